"""Hits of a store out of the server of another node, and redis-py reading the same values; hits of a memory tier.

The processes of the nodes stand by, and read in turns with redis-py, which runs in fresh processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stallfree.stores import RedisCache, TieredCache

import stallfree as sf
from benchmarks.harness import run_child
from benchmarks.peers import venvs
from benchmarks.store_records import make_noise, make_record, same, time_reads
from benchmarks.store_team import PATIENT, Json, Meet, Nodes, Records, print_found, read_task, room_for
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.pipeline.codec import encode, record_size

PEER = "benchmarks.peers.redis_py_bench"
PROCESSES = 4
"""Of each node."""
TIER = 110_000
"""Bytes of the records of the memory tier."""

_JOB_SECONDS = 300.0


def sample(noise: Any, id: int) -> tuple[torch.Tensor, int]:
    return torch.from_numpy(make_record(noise, id)), id


# -- the processes of the nodes ---------------------------------------------------------------------------------------


def as_process(number: int, meet: Meet, given: Json, pipes: Any) -> None:
    """Do what comes through the pipe. The first process of node 1 fills its server, those of node 0 read from there."""
    pipe = pipes[number][1]
    with sf.RedisStore(capacity_per_node="4GiB", timeout=PATIENT) as store:
        caches = {size: _attach(store, int(size), count) for size, count in given["records"].items()}
        ids = {size: np.flatnonzero(cache.owner(np.arange(cache.num_ids)) == 1) for size, cache in caches.items()}
        if number == PROCESSES:
            for size, cache in caches.items():
                _fill(cache, ids[size], make_noise(int(size)))
            pipe.send(_describe(store, caches, ids))
        unix: dict[str, RedisCache] = {}
        while (job := pipe.recv()) is not None:
            size = job["size"]
            if job.get("unix") and not unix:
                server = sf.RedisStore([job["unix"]], capacity_per_node="4GiB", timeout=PATIENT)
                unix = {size: _attach(server, int(size), count) for size, count in given["records"].items()}
            if job["what"] == "tier":
                pipe.send(_tier(caches[size], ids[size], given["seconds"]))
                continue
            cache = (unix if job.get("unix") else caches)[size]
            _check(cache, ids[size][: job["batch"]], make_noise(int(size)))
            pipe.send(time_reads(_reader(cache), ids[size].tolist(), job["batch"], given["seconds"]))
        for cache in (*caches.values(), *unix.values()):
            cache.close()


def _attach(store: sf.RedisStore, size: int, count: int) -> RedisCache:
    """A data set of which each of two nodes owns `count` records."""
    return store.attach(2 * count, fingerprint=Records(2 * count, size).fingerprint(), name=f"reads-{size}")


def _fill(cache: Any, ids: Any, noise: Any) -> None:
    """Store records and raise unless all were taken."""
    for start in range(0, len(ids), 16):
        some = ids[start : start + 16].tolist()
        cache.put_many(some, [sample(noise, id) for id in some])
        cache.flush()
    _check(cache, ids, noise)


def _check(cache: Any, ids: Any, noise: Any) -> None:
    for start in range(0, len(ids), 64):
        some = ids[start : start + 64].tolist()
        for id, value in zip(some, cache.get_many(some), strict=True):
            if value is MISS or value[1] != id or not same(value[0].numpy(), noise, id):
                raise AssertionError(f"record {id} is missing, or another one")


def _describe(store: sf.RedisStore, caches: dict[str, RedisCache], ids: Json) -> Json:
    """The server of this node and its keys, as redis-py needs them."""
    assert store._server is not None
    address = store._server.address()
    assert address is not None
    with address.client(PATIENT) as client:
        keys = [key.decode() for key in client.scan_iter("stallfree:*", count=1000)]
    records: Json = {}
    for size in caches:
        key = next(key for key in keys if key.startswith(f"stallfree:reads-{size}-"))
        records[size] = {
            "prefix": key[: key.rindex(":") + 1],
            "ids": ids[size].tolist(),
            "length": record_size(*encode(sample(make_noise(int(size)), 0))),
        }
    tcp = {"host": address.host, "port": address.port, "password": address.password}
    socket = str(store._server.folder / "socket")
    return {"tcp": tcp, "unix": {"path": socket, "password": address.password}, "records": records}


def _reader(cache: RedisCache) -> Callable[[list[int]], Any]:
    def read(ids: list[int]) -> list[Any]:
        values = cache.get_many(ids)
        if any(value is MISS for value in values):
            raise AssertionError("a record is missing")
        return values

    return read


# -- the memory tier --------------------------------------------------------------------------------------------------


def _tier(servers: RedisCache, ids: Any, seconds: float) -> Json:
    """Samples/s of batches out of memory: of a tier over servers, and of a plain cache, in turns."""
    noise, batch = make_noise(TIER), 64
    options: Json = {
        "capacity": room_for(len(ids), Records(servers.num_ids, TIER)),
        "fingerprint": servers.fingerprint,
        "example": sample(noise, 0),
    }
    with SampleCache(servers.num_ids, name="plain", **options) as plain:
        tiered = TieredCache(SampleCache(servers.num_ids, name="tier", **options), servers)
        _check(tiered, ids, noise)  # what is read from the servers moves up
        for start in range(0, len(ids), 64):
            some = ids[start : start + 64].tolist()
            plain.put_many(some, [sample(noise, id) for id in some])
        if not (tiered.resident(ids).all() and plain.resident(ids).all()):
            raise AssertionError("not all records are in memory")
        gathers = [_gatherer(cache, batch) for cache in (tiered, plain)]
        found = {
            "gather": _in_turns(*gathers, ids, batch, seconds),
            "get_many": _in_turns(tiered.get_many, plain.get_many, ids, batch, seconds),
        }
        _check(tiered, ids[:batch], noise)
        tiered.upper.close()
    return found


def _gatherer(cache: Any, batch: int) -> Callable[[Any], Any]:
    standing = [np.zeros((batch, size), np.uint8) for size in cache.structure.nbytes]
    aim = cache.aim(standing)

    def gather(ids: Any) -> Any:
        if not cache.gather(ids, aim).all():
            raise AssertionError("a record is missing")
        return standing

    return gather


def _in_turns(one: Callable[[Any], Any], other: Callable[[Any], Any], ids: Any, batch: int, seconds: float) -> Json:
    """Median samples/s of both, which begin in turns."""
    rng, times = np.random.default_rng(0), ([], [])  # type: tuple[Any, tuple[list[float], list[float]]]
    end = time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < end or turn < 10:
        some = rng.permutation(ids)[:batch]
        for which in (0, 1) if turn % 2 else (1, 0):
            begun = time.perf_counter()
            (one, other)[which](some)
            times[which].append(time.perf_counter() - begun)
        turn += 1
    skip = turn // 10
    return {name: batch / float(np.median(each[skip:])) for name, each in zip(("tier", "plain"), times, strict=True)}


# -- all in turns -----------------------------------------------------------------------------------------------------


class Readers:
    """What reads from the server of node 1.

    Args:
        nodes: the processes.
        pipes: to them.
        given: as the contender got it.
    """

    def __init__(self, nodes: Nodes, pipes: Any, given: Json) -> None:
        self._nodes, self._pipes = nodes, [ours for ours, _ in pipes]
        self._common = self._receive(PROCESSES)
        self._seconds = given["seconds"]
        self.versions: dict[str, str] = {}

    def _receive(self, number: int) -> Any:
        deadline = time.monotonic() + _JOB_SECONDS
        while not self._pipes[number].poll(1.0):
            if not self._nodes.all_alive or time.monotonic() > deadline:
                raise AssertionError(f"process {number} does not answer")
        return self._pipes[number].recv()

    def tier(self) -> Json:
        """See `_tier`."""
        self._pipes[0].send({"what": "tier", "size": str(TIER)})
        found: Json = self._receive(0)
        return found

    def ours(self, run: Json) -> float:
        """Samples/s of `RedisCache.get_many`, all processes together."""
        job = {"what": "read", **run, "unix": self._common["unix"] if run.get("unix") else None}
        for number in range(run["processes"]):
            self._pipes[number].send(job)
        return sum(self._receive(number) for number in range(run["processes"]))

    def peer(self, run: Json, *, passes: int = 0) -> Any:
        """Samples/s of redis-py; with `passes`, of each of its settings."""
        seconds = min(0.3, self._seconds) if passes else self._seconds
        params = {**self._common, "seconds": seconds, "runs": [run], "passes": passes}
        result = run_child(PEER, params, scratch=Path("/nonexistent"), python=venvs.python_of("redis"))
        self.versions |= result["versions"]
        return result["found"][0]


def measure(readers: Readers, given: Json) -> Json:
    """What is tried, and all rounds."""
    peer = given["peer"]
    runs = [
        {"size": size, "batch": batch, "processes": processes}
        for size in given["records"]
        for batch in given["batches"]
        for processes in (1, PROCESSES)
    ]
    tried: Json = {}
    for run in runs if peer else ():
        passes = given["passes"] if run["processes"] == 1 else 1
        for way in ("checked", "bare"):
            tried[_name(run, way)] = readers.peer(run | {"way": way}, passes=passes)
        if run["processes"] == 1:
            tried[_name(run, "unix")] = readers.peer(run | {"way": "bare", "unix": True}, passes=given["passes"])
    best = {name: max(rates, key=lambda setting: rates[setting]) for name, rates in tried.items()}
    rounds = []
    for number in range(given["rounds"]):
        found: Json = {"tier": readers.tier()} if str(TIER) in given["records"] else {}
        for run in runs:
            calls: dict[str, Callable[[], float]] = {"ours": lambda run=run: readers.ours(run)}  # type: ignore[misc]
            for way in ("checked", "bare") if peer else ():
                setting = best[_name(run, way)]
                calls[way] = lambda run=run, way=way, setting=setting: readers.peer(  # type: ignore[misc]
                    run | {"way": way, "setting": setting}
                )
            if run["processes"] == 1:
                calls["ours unix"] = lambda run=run: readers.ours(run | {"unix": True})  # type: ignore[misc]
                if peer:
                    setting = best[_name(run, "unix")]
                    calls["bare unix"] = lambda run=run, setting=setting: readers.peer(  # type: ignore[misc]
                        run | {"way": "bare", "unix": True, "setting": setting}
                    )
            names = list(calls)
            names = names[number % len(names) :] + names[: number % len(names)]
            found |= {_name(run, name): calls[name]() for name in names}
        rounds.append(found)
    return {"rounds": rounds, "tried": tried, "best": best}


def _name(run: Json, way: str) -> str:
    return f"{run['size']} x {run['batch']} x {run['processes']} {way}"


def main() -> None:
    given = read_task()
    torch.set_num_threads(1)
    context = get_context("fork")
    pipes = [context.Pipe() for _ in range(2 * PROCESSES)]
    with Nodes(2, as_process, given, pipes, ranks=PROCESSES) as nodes:
        try:
            readers = Readers(nodes, pipes, given)
            found = measure(readers, given)
        finally:
            for ours, _ in pipes:
                ours.send(None)
            nodes.results()
    print_found(found, **readers.versions)


if __name__ == "__main__":
    main()
