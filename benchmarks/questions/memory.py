"""Does memory stay bounded, also in an hour of kills?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.data import FromFunction
from benchmarks.harness import Case, Condition, Contender, Figure, Options

Figures = dict[str, Any]
MIB = 1 << 20
SAMPLES = {"fixed": 4_000, "varied": 4_000, "small": 60_000}


# -- peak memory ------------------------------------------------------------------------------------------------------


def record_size(records: str, id: int) -> int:
    """Bytes of a made-up record: of one size, of varied sizes, or small."""
    if records == "varied":
        return 10_000 + id * 7919 % 240_000
    return 224 * 224 * 3 if records == "fixed" else 4096


def concatenate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of records whose sizes differ."""
    return torch.from_numpy(np.concatenate([array for array, _ in samples])), torch.tensor([id for _, id in samples])


class PeakMemory:
    """The highest number of bytes that the files below a folder take, looked at every 2 ms."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.peak = folder, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def look(self) -> None:
        total = 0
        for folder, _, files in os.walk(self.folder):
            for file in files:
                try:
                    total += os.stat(os.path.join(folder, file)).st_blocks * 512
                except FileNotFoundError:
                    continue
        self.peak = max(self.peak, total)

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self.look()

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.look()


def peak_memory(records: str, policy: str, capacity: int, staging: int) -> Figures:
    """Bytes in shared memory during two epochs over data that are several times as large as the cache."""
    data = FromFunction(SAMPLES[records], lambda id: (np.full(record_size(records, id), id % 251, np.uint8), id))
    root = Path(os.environ["STALLFREE_ROOT"])
    with PeakMemory(root) as memory, sf.CachedDataset(data, capacity=capacity * MIB, policy=policy) as cached:
        loader = sf.DataLoader(
            cached,
            batch_size=256 if records == "small" else 64,
            shuffle=True,
            num_workers=2,
            staging=staging * MIB,
            collate_fn=concatenate if records == "varied" else None,
        )
        for _ in range(2):
            if (samples := sum(len(labels) for _, labels in loader)) != len(data):
                raise AssertionError(f"{samples} samples instead of {len(data)}")
            memory.look()
        evictions = cached.stats().evictions
    granted = capacity + staging
    size = sum(record_size(records, id) for id in range(len(data)))
    peak = memory.peak / MIB
    return {"peak": peak, "granted": granted, "fraction": peak / granted, "data": size / MIB, "evictions": evictions}


# -- growth -----------------------------------------------------------------------------------------------------------

PICTURE = 224 * 224 * 3


def index_size(policy: str, store: str, ids: int, folder: str) -> Figures:
    """Bytes of the index per id, with one block per id."""
    where: Any = "memory" if store == "memory" else f"{folder}/{store}"
    example = np.zeros(64, np.uint8)
    with sf.cache.SampleCache(
        ids, capacity=ids * 97, fingerprint=policy, policy=policy, store=where, example=example
    ) as cache:
        return {"value": (cache.path / "index").stat().st_size / ids}


def attach(ids: int, times: int = 7) -> Figures:
    """Milliseconds to attach to a cache, each time in a new process."""
    arguments = {"num_ids": ids, "capacity": ids * 100, "fingerprint": "attach", "name": "attach-many"}
    program = (
        "import json, sys, time; import stallfree as sf; arguments = json.loads(sys.argv[1]); sf.cache.SampleCache; "
        "begun = time.perf_counter(); cache = sf.cache.SampleCache(**arguments); taken = time.perf_counter() - begun; "
        "assert bool(cache.resident([200])[0]); cache.close(); print(taken)"
    )
    value = np.zeros(64, np.uint8)
    with sf.cache.SampleCache(**arguments, example=value) as cache:
        for start in range(0, ids, 1_000_000):
            part = range(start, min(start + 1_000_000, ids), 100)
            cache.put_many(part, [value] * len(part))
        command = [sys.executable, "-c", program, json.dumps(arguments)]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(times)]
    return {"value": [1000 * float(run.stdout) for run in runs]}


def hit_rate(gibibytes: float, seconds: float) -> Figures:
    """Samples/s of hits, batches of 64 of 224x224x3 bytes, into standing memory."""
    torch.set_num_threads(1)
    size = int(gibibytes * (1 << 30))
    ids, generator = size // (PICTURE + 64), np.random.default_rng(0)
    value = np.arange(PICTURE, dtype=np.uint64).astype(np.uint8)
    with sf.cache.SampleCache(ids, capacity=size, fingerprint="arena", example=value) as cache:
        for start in range(0, ids, 64):
            part = range(start, min(start + 64, ids))
            cache.put_many(part, [value] * len(part))
        resident = np.flatnonzero(cache.resident(np.arange(ids)))
        out, read = [np.zeros((64, PICTURE), np.uint8)], 0
        for start in range(0, len(resident) - 64, 64):  # the pages are mapped
            cache.gather(resident[start : start + 64], out)
        begun = time.perf_counter()
        while time.perf_counter() < begun + seconds:
            if not cache.gather(generator.choice(resident, 64), out).all():
                raise AssertionError("a resident record was not read")
            read += 64
        return {"value": read / (time.perf_counter() - begun)}


def evicting_puts(residents: int, puts: int = 40_000) -> Figures:
    """Microseconds per record of a put that evicts, policy lru, records of 64 bytes, all ids new."""
    value, ids = np.zeros(64, np.uint8), 4 * residents
    with sf.cache.SampleCache(
        ids, capacity=64 * residents + 26 * ids + (1 << 20), fingerprint="evict", policy="lru", example=value
    ) as cache:
        for start in range(0, ids // 2, 1000):  # more than fit
            part = range(start, min(start + 1000, ids // 2))
            cache.put_many(part, [value] * len(part))
        before, begun = cache.stats().evictions, time.perf_counter()
        for start in range(ids // 2, ids // 2 + puts, 64):
            cache.put_many((start + np.arange(64)) % ids, [value] * 64)
        taken = time.perf_counter() - begun
        if cache.stats().evictions - before < 0.5 * puts:
            raise AssertionError("the puts did not evict")
    return {"value": 1e6 * taken / puts}


# -- cases ------------------------------------------------------------------------------------------------------------

HERE = "benchmarks.questions.memory"


def size_case(title: str, key: str, records: str, policy: str, capacity: int = 256, staging: int = 80) -> Condition:
    return Condition(key, title, {"records": records, "policy": policy, "capacity": capacity, "staging": staging})


def growing(key: str, title: str, function: str, **params: Any) -> Contender:
    return Contender(key, title, f"{HERE}:{function}", params)


def soak_minutes(scratch: Path, options: Options) -> Figures:
    return {"minutes": options.minutes}


CASES = {
    "memory": Case(
        question="Do cache and staging ring together stay within the memory that they were granted, index included?",
        setup="Granted: `capacity` of the cache plus `staging` of the loader. Peak: pages that their files take in "
        "shared memory, looked at every 2 ms during two epochs with 2 workers over data several times as large.",
        contenders=[Contender("stallfree", "stallfree", f"{HERE}:peak_memory")],
        figures={
            "peak": Figure("peak, MiB", ".1f", less=True),
            "granted": Figure("granted, MiB", ".1f"),
            "fraction": Figure("peak over granted", ".3f", less=True),
            "data": Figure("data, MiB"),
            "evictions": Figure("evictions"),
        },
        conditions=[
            size_case("224x224x3 pictures of one size, minio", "fixed minio", "fixed", "minio"),
            size_case("224x224x3 pictures of one size, lru", "fixed lru", "fixed", "lru"),
            size_case("arrays of 10 to 250 KB, minio", "varied minio", "varied", "minio"),
            size_case("arrays of 10 to 250 KB, lru", "varied lru", "varied", "lru"),
            size_case("arrays of 4 KB, lru", "small lru", "small", "lru", 64, 16),
        ],
        ours="",
        rounds=1,
    ),
    "growth": Case(
        question="Does anything get worse as the cache grows?",
        setup="The index is measured with one block per id, so that the lists of blocks count too. Hits are read by "
        "one thread into a standing buffer after all pages were read. Evictions: records of 64 bytes in batches of "
        "64, all ids new.",
        contenders=[
            growing("minio", "index, bytes per id: minio, memory", "index_size", policy="minio", store="memory"),
            growing("lru", "index, bytes per id: lru, memory", "index_size", policy="lru", store="memory"),
            growing("disk", "index, bytes per id: lru, disk", "index_size", policy="lru", store="disk"),
            growing("attach", "attach to a cache of 14,000,000 ids, ms", "attach", ids=14_000_000),
            growing("small", "hits, samples/s, arena of 1 GiB", "hit_rate", gibibytes=1),
            growing("large", "hits, samples/s, arena of 12 GiB", "hit_rate", gibibytes=12),
            growing("few", "put that evicts, µs, 10,000 residents", "evicting_puts", residents=10_000),
            growing("many", "put that evicts, µs, 1,000,000 residents", "evicting_puts", residents=1_000_000),
        ],
        figures={"value": Figure("measured", ",.5g")},
        ours="",
        params={"ids": 1_000_000},
        quick={"ids": 100_000, "gibibytes": 0.1, "residents": 10_000, "times": 2},
        rounds=3,
    ),
    "soak": Case(
        question="Six jobs on one `SharedLoader` over memory and Redis, of which some are killed, leave and join: "
        "does anything grow?",
        setup="2,000 samples of 64 KiB; each epoch of each job is checked for missing, repeated and wrong samples. "
        "Workers, jobs, coordinators and servers are killed in turn. Sampled once per second; the first third, at "
        "most 10 minutes, is left out. Growth is the median of the slopes between all pairs of quiet moments. Memory "
        "is anonymous and shared memory, each shared page counted once.",
        contenders=[Contender("stallfree", "stallfree", "benchmarks.soak:soak")],
        figures={
            "epochs": Figure("epochs"),
            "kills": Figure("kills"),
            "joins": Figure("joins"),
            "failed": Figure("jobs with a wrong sample or an error", less=True),
            "memory": Figure("memory, MiB", less=True),
            "memory_growth": Figure("growth, % per hour", "+.2f", less=True),
            "descriptors": Figure("descriptors, last quarter over first", ".2f", less=True),
            "threads": Figure("threads, last quarter over first", ".2f", less=True),
            "shm": Figure("shared memory, last quarter over first", ".2f", less=True),
            "left": Figure("bytes left at the end", less=True),
        },
        ours="",
        rounds=1,
        prepare=soak_minutes,
        limit=7200,
    ),
}
