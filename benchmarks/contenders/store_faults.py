"""Epochs of one node while something befalls the other, which owns all samples that are read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
import stallfree.stores.store as job_store
from benchmarks.contender import emit
from benchmarks.shared_team import Meet, family
from benchmarks.store_team import Nodes, Records, node_root, room_for
from stallfree.stores.meet import Peer
from stallfree.stores.spawn import Doors

Json = dict[str, Any]

LASTING = ("server frozen", "clerk frozen", "cut off", "node killed")
"""What stays so until it is mended; a killed server or clerk is started again by the node's keeper."""
FOR_EVER = "node killed"
PATIENCE = 20.0
"""Seconds until hits that do not come again count as gone."""
STEPS = 3
"""Stages of a run, after each of which the nodes meet."""


# -- what befalls the other node --------------------------------------------------------------------------------------


class Fault:
    """Something that happens to the processes of node 1, which the benchmark has started."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._proxy: subprocess.Popen[str] | None = None
        self._stopped: int | None = None

    def lie_between(self) -> None:
        """Have the store of this process reach the other node by way of a network that can be cut."""
        meet = job_store.meet  # type: ignore[attr-defined]

        def rerouted(*arguments: Any, **options: Any) -> tuple[list[Peer], int]:
            peers, me = meet(*arguments, **options)
            return [peer if place == me else self._reroute(peer) for place, peer in enumerate(peers)], me

        job_store.meet = rerouted  # type: ignore[attr-defined]

    def _reroute(self, peer: Peer) -> Peer:
        server, clerk = peer.doors.server, peer.doors.clerk
        command = [sys.executable, "-m", "benchmarks.contenders.store_proxy", str(server.port), str(clerk.port)]
        self._proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._proxy.stdout is not None
        ports = map(int, self._proxy.stdout.readline().split())
        return replace(
            peer, doors=Doors(*(replace(at, port=port) for at, port in zip((server, clerk), ports, strict=True)))
        )

    def strike(self) -> None:
        """Let it happen."""
        pid = self._victim()
        if self.kind.endswith("killed"):
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            self._stopped = pid

    def mend(self) -> None:
        """Let what is stopped go on."""
        if self._stopped is not None:
            os.kill(self._stopped, signal.SIGCONT)
            self._stopped = None

    def _victim(self) -> int:
        if self.kind == "cut off":
            assert self._proxy is not None
            return self._proxy.pid
        told = json.loads(next(node_root(1).glob("redis-*/server.json")).read_text())
        who: int = told["pid"] if self.kind.startswith("server") else told["keeper"]
        return _clerk_of(who) if self.kind.startswith("clerk") else who

    def close(self) -> None:
        self.mend()
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()
            assert self._proxy.stdout is not None
            self._proxy.stdout.close()


def _clerk_of(keeper: int) -> int:
    for pid in family(keeper)[1:]:  # its own command names the clerk's
        if b"stallfree.stores.clerk" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise ProcessLookupError("the other node has no clerk")


# -- epochs -----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """An epoch, batch by batch.

    Attributes:
        seconds: of all of it.
        times: when each batch had come, by `time.perf_counter`.
        hits, misses: counted until then; hits are those of the other node.
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
        owner = cached.cache.owner(np.arange(len(cached)))  # type: ignore[union-attr]
        self.ids: list[int] = np.flatnonzero(owner == 1).tolist()
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
            stats: Any = self._cached.stats()
            run.hits.append(stats.other_hits)
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


def node_0(meet: Meet, given: Json) -> Json:
    """What node 0 sees of the fault."""
    fault = Fault(given["kind"])
    if fault.kind == "cut off":
        fault.lie_between()
    found: Json = {"base": [], "fault": [], "rejoin": [], "outage": {}}
    with sf.RedisStore(capacity_per_node="8GiB") as store:
        datas = make_data(given, store)
        meet()  # node 1 has filled its caches
        reading = Reading(given, datas["quick"][1])
        try:
            quick = reading.loader(datas["quick"][1])
            reading.run(quick, given["pause"])
            meet()
            for _ in range(1 if fault.kind == FOR_EVER else given["strikes"]):
                _strike(fault, reading, quick, given, found)
            meet()
            if fault.kind in LASTING:
                if fault.kind != FOR_EVER:
                    fault.strike()
                for name in ("storage", "prep"):
                    found["outage"][name] = _outage(
                        reading, *datas[name], given["pairs"], fault.kind != "server frozen"
                    )
            meet()
        finally:
            fault.close()
        found["wrong"] = reading.wrong
        for _, cached in datas.values():
            cached.close()
    return found


def _strike(fault: Fault, reading: Reading, quick: Any, given: Json, found: Json) -> None:
    """An epoch without fault, one with it, and what follows until hits come again."""
    pause = given["pause"]
    found["base"].append(reading.run(quick, pause).seconds)
    struck: list[float] = []

    def act() -> None:
        fault.strike()
        struck.append(time.perf_counter())

    run = reading.run(quick, pause, len(reading.ids) // given["batch"] // 2, act)
    found["fault"].append(run.seconds)
    if fault.kind not in LASTING:
        found["rejoin"].append(reading.until_hits(quick, pause, struck[0], False, run))
    elif fault.kind != FOR_EVER:
        fault.mend()
        found["rejoin"].append(reading.until_hits(quick, pause, time.perf_counter(), True))


def _outage(reading: Reading, source: Any, cached: sf.CachedDataset, pairs: int, lost_whole: bool) -> list[Json]:
    """Epochs while the other node is lost and epochs without a cache, in turns. The first ones are not timed.

    A node that is `lost_whole` gives no samples; without its server only it does.
    """
    lost, plain = reading.loader(cached), reading.loader(source)
    reading.run(plain)
    before = reading.run(lost).hits[-1]
    found = []
    for turn in range(pairs):
        seconds: Json = {}
        for name, loader in (("lost", lost), ("plain", plain)) if turn % 2 else (("plain", plain), ("lost", lost)):
            run = reading.run(loader)
            seconds[name] = run.seconds
            if lost_whole and run.hits[-1] != before:
                raise AssertionError(f"{run.hits[-1] - before} hits of a node that is lost")
        found.append(seconds)
    return found


def make_data(given: Json, store: sf.RedisStore) -> dict[str, tuple[Any, sf.CachedDataset]]:
    """Sources and their caches: one that is quick, the same on slow storage, and one of costly prep."""
    count, size = 2 * given["samples"], given["size"]
    plain, costly = Records(count, size), Records(count, size, given["prep"])
    slow = sf.testing.ThrottledSource(plain, bandwidth=given["bandwidth"])
    room = room_for(given["samples"], plain)
    made: dict[str, tuple[Any, sf.CachedDataset]] = {}
    for name, source, form, key in (
        ("quick", plain, "fetched", "fetched"),
        ("storage", slow, "fetched", "fetched"),
        ("prep", costly, "prepared", "prepared"),
    ):
        made[name] = source, sf.CachedDataset(source, capacity=room, store=store, form=form, name=key)
    return made


def node_1(meet: Meet, given: Json) -> None:
    """Fill the caches of this node, and be there."""
    with sf.RedisStore(capacity_per_node="8GiB") as store:
        datas = make_data(given, store)
        for name in ("quick", "prep"):
            cached = datas[name][1]
            owner = cached.cache.owner(np.arange(len(cached)))  # type: ignore[union-attr]
            mine = np.flatnonzero(owner == 1)
            for start in range(0, len(mine), 50):
                cached.__getitems__(mine[start : start + 50].tolist())
            if not cached.cache.resident(mine).all():
                raise AssertionError("not all samples are in the cache")
        for _ in range(1 + STEPS):
            meet()
        for _, cached in datas.values():
            cached.close()


def as_node(number: int, meet: Meet, given: Json) -> Json | None:
    return node_1(meet, given) if number else node_0(meet, given)  # type: ignore[func-returns-value]


def main() -> None:
    given = json.loads(sys.argv[1])
    with Nodes(2, as_node, given) as nodes:
        found = nodes.results()[0]
    emit({"found": found}, stallfree=version("stallfree"), torch=torch.__version__)


if __name__ == "__main__":
    main()
