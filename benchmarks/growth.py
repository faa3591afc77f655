"""Whether anything gets worse as the cache grows: the index, attaching, reading, evicting."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, Spread, run_child, say, scratch_folder
from stallfree.cache.capacity import free_memory
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.space import Space

NAME = "growth"
QUESTION = "Does anything get worse as the cache grows?"
MANY = 14_000_000
PICTURE = 224 * 224 * 3
GIB = 1 << 30
MODULE = "benchmarks.growth"

Json = dict[str, Any]


def run(options: Options) -> Report:
    raw: Json = {}
    with scratch_folder() as scratch:

        def ask(what: str, **params: Any) -> Json:
            say(f"  {what}")
            found = raw[what] = run_child(MODULE, {"what": what, "seconds": options.seconds, **params}, scratch=scratch)
            return found

        ids = MANY // 10 if options.quick else MANY
        index = ask("index", ids=1_000_000, folder=str(scratch / "disk"))
        attach = ask("attach", ids=ids, times=3 if options.quick else 11)
        large = _large(options)
        arenas = ask("arena", large=large, small=min(GIB, large // 2))
        evict = ask(
            "evict", residents=[10_000, 100_000 if options.quick else 1_000_000], times=3 if options.quick else 7
        )
    rows, checks = [], []
    for name, size in index["per_id"].items():
        rows.append([f"index, bytes per id: {name}", f"{size:.2f}"])
    checks.append(Check("index bytes per id, the most of all policies", max(index["per_id"].values()), 32, "<=", ".1f"))
    times = Spread.of([seconds * 1e3 for seconds in attach["seconds"]])
    rows.append([f"attach to a cache of {ids:,} ids in a fresh process, ms", times.show(".1f")])
    checks.append(
        Check(f"attach to a cache of {ids:,} ids, ms", times.median, 50, "<=", ".1f", (times.low, times.high))
    )
    for name in ("small", "large"):
        rates = Spread.of(arenas[name])
        rows.append(
            [
                f"hits, samples/s, batches of 64 of 224x224x3 bytes, arena of {arenas[f'{name} size'] / GIB:.1f} GiB",
                rates.show(),
            ]
        )
    ratio = Spread.of([a / b for a, b in zip(arenas["large"], arenas["small"], strict=True)])
    what = f"hit rate of an arena of {large / GIB:.1f} GiB against one of {arenas['small size'] / GIB:.1f} GiB"
    checks.append(Check(what, ratio.median, 0.9, spread=(ratio.low, ratio.high)))
    few, many = evict["residents"]
    per_item = {}
    for count in (few, many):
        figures = evict["runs"][str(count)]
        per_item[count] = Spread.of([figure["evict"] * 1e6 for figure in figures])
        put = Spread.of([figure["put"] * 1e6 for figure in figures])
        rows.append([f"eviction, µs per item, {count:,} residents (lru, batches of 64)", per_item[count].show(".2f")])
        rows.append([f"put that evicts, µs per item, {count:,} residents", put.show(".2f")])
    ratio = Spread.of(
        [b["evict"] / a["evict"] for a, b in zip(*(evict["runs"][str(count)] for count in (few, many)), strict=True)]
    )
    what = f"eviction per item: {many:,} residents against {few:,}"
    checks.append(Check(what, ratio.median, 2.0, "<=", ".2f", (ratio.low, ratio.high)))
    return Report(
        columns=["what", "found"],
        rows=rows,
        checks=checks,
        notes=[
            "The index is measured with one block per id, so the lists of blocks count too. Attaching is timed around "
            "`SampleCache(...)` alone, in a new process each, while another process holds the cache. Both arenas are "
            "read in turns by one thread into one standing buffer, after all of their pages were read. Evictions: "
            "records of 64 bytes, all ids new; only the time spent in choosing and dropping victims counts as eviction."
        ],
        versions=index["versions"],
        raw=raw,
    )


def _large(options: Options) -> int:
    """12 GiB, or what the machine can spare with 4 GiB left and the smaller arena beside it."""
    spare = max(GIB, free_memory() - 5 * GIB)
    wanted = 2 * GIB if options.quick else 12 * GIB
    return min(wanted, spare)


# -- in a fresh process -----------------------------------------------------------------------------------------------


def child() -> None:
    given = json.loads(sys.argv[1])
    work = {"index": _index, "attach": _attach, "attach-once": _attach_once, "arena": _arena, "evict": _evict}
    emit(work[given["what"]](given), stallfree=version("stallfree"), numpy=np.__version__)


def _index(given: Json) -> Json:
    ids, value = given["ids"], np.zeros(64, np.uint8)
    per_id = {}
    for policy in ("minio", "fifo", "lru", "lfu", "random"):
        for store in ("memory", given["folder"]):
            with SampleCache(
                ids, capacity=ids * 97, fingerprint=f"index-{policy}", policy=policy, store=store, example=value
            ) as cache:
                if cache.meta.num_blocks < ids:
                    raise AssertionError("there are fewer blocks than ids")
                size = (cache.path / "index").stat().st_size
            per_id[f"{policy}, {'memory' if store == 'memory' else 'disk'}"] = size / ids
    return {"per_id": per_id}


def _attach(given: Json) -> Json:
    value = np.zeros(64, np.uint8)
    arguments = {"ids": given["ids"], "what": "attach-once"}
    with SampleCache(**_many(given["ids"]), example=value) as cache:
        stored = range(0, given["ids"], 100)
        for start in range(0, len(stored), 10_000):
            part = stored[start : start + 10_000]
            cache.put_many(part, [value] * len(part))
        seconds = []
        for _ in range(given["times"]):
            done = subprocess.run(
                [sys.executable, "-m", MODULE, json.dumps(arguments)], capture_output=True, text=True, check=True
            )
            seconds.append(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])
    return {"seconds": seconds}


def _many(ids: int) -> Json:
    return {"num_ids": ids, "capacity": ids * 100, "fingerprint": "attach", "name": "attach-many"}


def _attach_once(given: Json) -> Json:
    start = time.perf_counter()
    cache = SampleCache(**_many(given["ids"]))
    seconds = time.perf_counter() - start
    if cache.get_many([100])[0] is MISS or not bool(cache.resident([200])[0]):
        raise AssertionError("the records are not there")
    cache.close()
    return {"seconds": seconds}


def _arena(given: Json) -> Json:
    torch.set_num_threads(1)
    batch = 64
    value = np.arange(PICTURE, dtype=np.uint64).astype(np.uint8)
    out = [np.zeros((batch, PICTURE), np.uint8)]
    rng = np.random.default_rng(0)
    caches: dict[str, SampleCache] = {}
    for name in ("small", "large"):
        ids = given[name] // (PICTURE + 64)
        caches[name] = cache = SampleCache(ids, capacity=given[name], fingerprint=f"arena-{name}", example=value)
        for start in range(0, ids, batch):
            part = range(start, min(start + batch, ids))
            cache.put_many(part, [value] * len(part))
        there = cache.stats().resident_items
        if there < 0.99 * ids:
            raise AssertionError(f"{there} of {ids} records fit")
        cache.populate()
    rates: dict[str, list[float]] = {name: [] for name in caches}
    resident = {name: np.flatnonzero(cache.resident(np.arange(cache.num_ids))) for name, cache in caches.items()}
    for name, cache in caches.items():  # every record once: the pages are mapped
        for start in range(0, len(resident[name]) - batch, batch):
            cache.gather(resident[name][start : start + batch], out)
    for turn in range(-3, 10):  # three turns to warm up
        for name, cache in caches.items():
            read = 0
            start_time = time.perf_counter()
            while (taken := time.perf_counter() - start_time) < given["seconds"] / 3:
                for _ in range(20):
                    if not cache.gather(rng.choice(resident[name], batch), out).all():
                        raise AssertionError("a resident record was not read")
                read += 20 * batch
            if turn >= 0:
                rates[name].append(read / taken)
    sizes = {f"{name} size": int(cache.stats().used_bytes) for name, cache in caches.items()}
    for cache in caches.values():
        cache.close()
    return {**rates, **sizes}


def _evict(given: Json) -> Json:
    batch = 64
    value = np.zeros(64, np.uint8)
    runs: dict[int, list[dict[str, float]]] = {count: [] for count in given["residents"]}
    caches = {}
    watch = Stopwatch()
    for count in given["residents"]:
        ids = 4 * count
        cache = caches[count] = SampleCache(
            ids, capacity=64 * count + 60 * ids, fingerprint=f"evict-{count}", policy="lru", example=value
        )
        room = cache.meta.num_blocks
        for start in range(0, room, 1000):
            part = range(start, min(start + 1000, room))
            cache.put_many(part, [value] * len(part))
    at = {count: cache.meta.num_blocks for count, cache in caches.items()}
    for turn in range(-1, given["times"]):  # one turn to warm up
        for count, cache in caches.items():
            watch.seconds, before = 0.0, cache.stats().evictions
            start_time = time.perf_counter()
            for _ in range(40_000 // batch):
                new = (at[count] + np.arange(batch)) % cache.num_ids
                cache.put_many(new, [value] * batch)
                at[count] += batch
            taken = time.perf_counter() - start_time
            evicted = cache.stats().evictions - before
            if evicted < 39_000:
                raise AssertionError(f"only {evicted} evictions")
            if turn >= 0:
                runs[count].append({"evict": watch.seconds / evicted, "put": taken / evicted})
    for cache in caches.values():
        cache.close()
    return {"residents": given["residents"], "runs": {str(count): figures for count, figures in runs.items()}}


class Stopwatch:
    """Adds up the time that caches of this process spend choosing victims and dropping them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        inner = Space._admit

        def evict(space: Space, *arguments: Any) -> int:
            start = time.perf_counter()
            try:
                return inner(space, *arguments)
            finally:
                self.seconds += time.perf_counter() - start

        Space._admit = evict  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    child()
