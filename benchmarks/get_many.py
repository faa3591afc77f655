"""What `get_many` costs beyond the copy."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, Spread, run_child, scratch_folder
from stallfree.cache.sample_cache import SampleCache

NAME = "get_many"
QUESTION = "256 small records in one call of `get_many`: what does a record cost beyond the copy of its bytes?"
IDS = 50_000
BATCH = 256


def run(options: Options) -> Report:
    with scratch_folder() as scratch:
        runs = [
            run_child("benchmarks.get_many", {"seconds": options.seconds / 2}, scratch=scratch)
            for _ in range(options.rounds)
        ]
    rows, checks = [], []
    for kind in runs[0]["kinds"]:
        figures = [found["kinds"][kind] for found in runs]
        get, copy, beyond = (
            Spread.of([figure[name] * 1e6 / BATCH for figure in figures]) for name in ("get", "copy", "beyond")
        )
        rows.append([kind, get.show(".3f"), copy.show(".3f"), beyond.show(".3f")])
        if kind[0] in "13":
            what = f"`get_many` of 256 records ({kind}): µs per record beyond the copy"
            checks.append(Check(what, beyond.median, 1.0, "<", ".2f", (beyond.low, beyond.high)))
    return Report(
        columns=["records", "get_many, µs/record", "copy alone, µs/record", "beyond the copy, µs/record"],
        rows=rows,
        checks=checks,
        notes=[
            f"{IDS:,} records in the cache, {BATCH} random ids per call. The copy alone is `numpy.take` of as many "
            "bytes at random places into fresh memory, in turns with `get_many`. Records of one structure are "
            f"read by one gather; records of different sizes one after the other. Median of {options.rounds} processes."
        ],
        versions=runs[0]["versions"],
        raw=runs,
    )


def child() -> None:
    seconds = json.loads(sys.argv[1])["seconds"]
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    kinds: dict[str, Callable[[int], Any]] = {
        "3 KB: picture (32x32x3) and label": lambda id: (torch.full((32, 32, 3), id % 256, dtype=torch.uint8), id),
        "1 KB: array": lambda id: np.full(1024, id % 256, np.uint8),
        "0.5 to 1.5 KB: bytes": lambda id: bytes([id % 256]) * int(512 + id * 977 % 1024),
    }
    found = {kind: _measure(kind, make, seconds, rng) for kind, make in kinds.items()}
    emit({"kinds": found}, stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__)


def _measure(kind: str, make: Callable[[int], Any], seconds: float, rng: np.random.Generator) -> dict[str, float]:
    sizes = [_size(make(id)) for id in range(IDS)]
    width = int(np.mean(sizes))
    memory = np.zeros((IDS, width), np.uint8)
    with SampleCache(IDS, capacity="512MiB", fingerprint=f"get-many-{width}", example=make(0)) as cache:
        for start in range(0, IDS, 1000):
            cache.put_many(range(start, start + 1000), [make(id) for id in range(start, start + 1000)])
        if cache.stats().resident_items != IDS:
            raise AssertionError("not all records fit")
        for id in rng.integers(0, IDS, 20).tolist():
            if repr(cache.get_many([id])[0]) != repr(make(id)):
                raise AssertionError(f"record {id} is another one")
        gets, copies = [], []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            ids = rng.integers(0, IDS, BATCH)
            start_get = time.perf_counter()
            cache.get_many(ids)
            start_copy = time.perf_counter()
            np.take(memory, ids, axis=0)
            end_copy = time.perf_counter()
            gets.append(start_copy - start_get)
            copies.append(end_copy - start_copy)
    skip = len(gets) // 10
    get, copy = statistics.median(gets[skip:]), statistics.median(copies[skip:])
    return {"get": get, "copy": copy, "beyond": get - copy}


def _size(value: Any) -> int:
    if isinstance(value, tuple):
        return _size(value[0]) + 8
    return len(value) if isinstance(value, bytes) else int(value.nbytes)


if __name__ == "__main__":
    child()
