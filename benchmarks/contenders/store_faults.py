"""Epochs of one node while something befalls the other, which owns all samples that are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import RawValue, get_context
from typing import Any

import numpy as np
import torch
from stallfree.stores.addresses import Address
from stallfree.stores.launch.rendezvous import NodeAddresses
from stallfree.stores.launch.server import read_running
from stallfree.stores.launch.supervisor import SERVER, read_json

import stallfree as sf
from benchmarks.store_team import PATIENT, Json, Meet, Nodes, Records, node_root, print_found, read_task, servers_of

LASTING = ("server frozen", "server full", "cut off", "password changed", "node killed")
"""What stays so until it is mended; a server or supervisor that was killed is started again."""
FOR_EVER = "node killed"
PATIENCE = 20.0
"""Seconds until hits that do not come again count as gone."""

_RUN_SECONDS = 300.0


# -- what befalls the other node --------------------------------------------------------------------------------------


class Fault:
    """Something that happens to node 1, whose processes the benchmark has started.

    Args:
        kind: which.
        node: process id of node 1, a shared integer.
    """

    def __init__(self, kind: str, node: Any) -> None:
        self.kind, self._node = kind, node
        self._proxies: dict[int, tuple[subprocess.Popen[str], int]] = {}
        self._stopped: int | None = None

    def lie_between(self) -> None:
        """Have this process and its children reach the other node by way of a network that can be cut."""
        of = NodeAddresses.of

        def rerouted(addresses: NodeAddresses, place: int) -> tuple[int, Address] | None:
            found = of(addresses, place)
            if found is None or place == addresses.me:
                return found
            return found[0], replace(found[1], port=self._port_to(found[1].port))

        NodeAddresses.of = rerouted  # type: ignore[method-assign]

    def _port_to(self, port: int) -> int:
        """The port of a proxy for `port`."""
        if port not in self._proxies:
            command = [sys.executable, "-m", "benchmarks.contenders.store_proxy", str(port)]
            proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert proxy.stdout is not None
            self._proxies[port] = proxy, int(proxy.stdout.readline())
        return self._proxies[port][1]

    def strike(self) -> None:
        """Let it happen."""
        running = self._running()
        if self.kind == "server killed":
            os.kill(running["pid"], signal.SIGKILL)
        elif self.kind == "supervisor killed":
            os.kill(running["supervisor"], signal.SIGKILL)
        elif self.kind == "node killed":
            for pid in (self._node.value, running["supervisor"], running["pid"]):
                os.kill(pid, signal.SIGKILL)
        elif self.kind == "server full":
            self._command(("CONFIG", "SET", "maxmemory", "1"), ("FLUSHALL",))
        elif self.kind == "password changed":
            self._command(("CONFIG", "SET", "requirepass", "another"), ("CLIENT", "KILL", "TYPE", "normal"))
        else:
            self._stopped = running["pid"] if self.kind == "server frozen" else self._proxy().pid
            os.kill(self._stopped, signal.SIGSTOP)

    def mend(self) -> None:
        """Let what is stopped go on, or give the server room or a password that is announced."""
        if self._stopped is not None:
            os.kill(self._stopped, signal.SIGCONT)
            self._stopped = None
        elif self.kind == "server full":
            self._command(("CONFIG", "SET", "maxmemory", "8gb"))
        elif self.kind == "password changed":
            os.kill(self._running()["pid"], signal.SIGTERM)  # its supervisor starts another one

    def _running(self) -> Json:
        found = read_json(next(node_root(1).glob("redis-*")) / SERVER)
        assert found is not None
        return found

    def _command(self, *commands: tuple[str, ...]) -> None:
        running = read_running(next(node_root(1).glob("redis-*")))
        assert running is not None
        with running[1].client(PATIENT) as client:
            for command in commands:
                client.execute_command(*command)

    def _proxy(self) -> subprocess.Popen[str]:
        ((proxy, _),) = self._proxies.values()
        return proxy

    def close(self) -> None:
        if self._stopped is not None:
            self.mend()
        for proxy, _ in self._proxies.values():
            proxy.kill()
            proxy.communicate()


# -- epochs -----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """An epoch, batch by batch.

    Attributes:
        seconds: of all of it.
        times: when each batch had come, by `time.perf_counter`.
        hits, misses: counted until then.
    """

    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)


class Reading:
    """Epochs over the samples of node 1, and whether they are what they should be.

    Attributes:
        wrong: samples that were another one, or came at the wrong place.
    """

    def __init__(self, given: Json, cached: sf.CachedDataset) -> None:
        self._given, self._cached = given, cached
        self.ids = ids_of(cached).tolist()
        self.wrong = 0

    def loader(self, data: Any) -> sf.DataLoader:
        return sf.DataLoader(
            data, batch_size=self._given["batch"], sampler=self.ids, num_workers=1, persistent_workers=True
        )

    def run(self, loader: Any, pause: float = 0.0, at: int = -1, act: Callable[[], None] | None = None) -> Run:
        """One epoch with a pause after each batch; before batch `at` comes `act`."""
        run, place = Run(), 0
        begun = time.perf_counter()
        for number, (data, ids) in enumerate(loader):
            run.times.append(time.perf_counter())
            stats = self._cached.stats()
            run.hits.append(stats.hits)
            run.misses.append(stats.misses)
            stamps = data[:, :8].contiguous().view(torch.int64).flatten().tolist()
            wanted = self.ids[place : place + len(stamps)]
            self.wrong += sum(not a == b == c for a, b, c in zip(stamps, ids.tolist(), wanted, strict=True))
            place += len(stamps)
            if number + 1 == at and act is not None:
                act()
            if pause:
                time.sleep(pause)
        run.seconds = time.perf_counter() - begun
        self.wrong += len(self.ids) - place
        return run

    def until_hits(self, loader: Any, pause: float, since: float, missed: bool, run: Run | None = None) -> float | None:
        """Seconds from `since` until samples come from the other node again; 0 if they never failed to, None for never.

        Args:
            missed: whether they did so before `since`.
            run: the epoch in which it began; None: begin another one.
        """
        while time.perf_counter() < since + PATIENCE:
            run = self.run(loader, pause) if run is None else run
            for at in range(1, len(run.times)):
                if run.times[at] > since:
                    if missed and run.hits[at] > run.hits[at - 1]:
                        return run.times[at] - since
                    missed |= run.misses[at] > run.misses[at - 1]
            if not missed:
                return 0.0
            run = None
        return None


def node_0(meet: Meet, given: Json, node: Any) -> Json:
    """What node 0 sees of the fault."""
    fault = Fault(given["kind"], node)
    if fault.kind == "cut off":
        fault.lie_between()
    found: Json = {"base": [], "fault": [], "misses": [], "rejoin": [], "outage": {}}
    with sf.RedisStore(capacity_per_node="8GiB") as store:
        datas = make_data(given, store)
        meet()  # node 1 has filled its server
        reading = Reading(given, datas["quick"][1])
        try:
            quick = reading.loader(datas["quick"][1])
            for _ in range(1 if fault.kind == FOR_EVER else given["strikes"]):
                _strike(fault, reading, quick, given, found)
            if fault.kind in LASTING:
                if fault.kind != FOR_EVER:
                    fault.strike()
                for name in ("storage", "prep"):
                    found["outage"][name] = _outage(reading, *datas[name], given["pairs"])
        finally:
            fault.close()
        found["wrong"] = reading.wrong
        for _, cached in datas.values():
            cached.close()
    return found


def _strike(fault: Fault, reading: Reading, quick: Any, given: Json, found: Json) -> None:
    """An epoch without fault, one with it, and what follows until hits come again."""
    pause = given["pause"]
    reading.run(quick, pause)  # an empty server is filled again
    found["base"].append(reading.run(quick, pause).seconds)
    struck: list[float] = []

    def act() -> None:
        struck.append(time.perf_counter())
        fault.strike()

    run = reading.run(quick, pause, len(reading.ids) // given["batch"] // 2, act)
    found["fault"].append(run.seconds)
    found["misses"].append(run.misses[-1] - run.misses[0])
    if fault.kind not in LASTING:
        found["rejoin"].append(reading.until_hits(quick, pause, struck[0], False, run))
    elif fault.kind != FOR_EVER:
        fault.mend()
        found["rejoin"].append(reading.until_hits(quick, pause, time.perf_counter(), True))


def _outage(reading: Reading, source: Any, cached: sf.CachedDataset, pairs: int) -> list[Json]:
    """Epochs while the other node is lost and epochs without a cache, in turns. The first ones are not timed."""
    lost, plain = reading.loader(cached), reading.loader(source)
    reading.run(plain)
    reading.run(lost)
    before = cached.stats().hits
    found = []
    for turn in range(pairs):
        seconds: Json = {}
        for name, loader in (("lost", lost), ("plain", plain)) if turn % 2 else (("plain", plain), ("lost", lost)):
            seconds[name] = reading.run(loader).seconds
        found.append(seconds)
    if cached.stats().hits != before:
        raise AssertionError(f"{cached.stats().hits - before} hits of a node that is lost")
    return found


def make_data(given: Json, store: sf.RedisStore) -> dict[str, tuple[Any, sf.CachedDataset]]:
    """Sources and their caches: one that is quick, the same on slow storage, and one of costly prep."""
    count, size = 2 * given["samples"], given["size"]
    plain, costly = Records(count, size), Records(count, size, given["prep"])
    slow = sf.testing.ThrottledSource(plain, bandwidth=given["bandwidth"])
    made: dict[str, tuple[Any, sf.CachedDataset]] = {}
    for name, source, form, key in (
        ("quick", plain, "fetched", "fetched"),
        ("storage", slow, "fetched", "fetched"),
        ("prep", costly, "prepared", "prepared"),
    ):
        made[name] = source, sf.CachedDataset(source, capacity=0, store=store, form=form, name=key)
    return made


def ids_of(cached: sf.CachedDataset) -> Any:
    """The ids that node 1 owns."""
    return np.flatnonzero(servers_of(cached).owner(np.arange(len(cached))) == 1)


def node_1(meet: Meet, given: Json, node: Any, end: Any) -> None:
    """Fill the server of this node, and be there."""
    node.value = os.getpid()
    with sf.RedisStore(capacity_per_node="8GiB") as store:
        datas = make_data(given, store)
        for name in ("quick", "prep"):
            cached = datas[name][1]
            ids = ids_of(cached)
            for start in range(0, len(ids), 50):
                cached.__getitems__(ids[start : start + 50].tolist())
                servers_of(cached).flush()
            if not servers_of(cached).verify(ids).all():
                raise AssertionError("not all samples are in the server")
        meet()
        end[0].poll(_RUN_SECONDS)
        for _, cached in datas.values():
            cached.close()


def as_node(number: int, meet: Meet, given: Json, node: Any, end: Any) -> Json | None:
    if number:
        return node_1(meet, given, node, end)  # type: ignore[func-returns-value]
    try:
        return node_0(meet, given, node)
    finally:
        end[1].send(None)


def main() -> None:
    given = read_task()
    with Nodes(2, as_node, given, RawValue("i", 0), get_context("fork").Pipe(duplex=False)) as nodes:
        found = nodes.result(0)
    print_found({"found": found})


if __name__ == "__main__":
    main()
