"""Speed behind slow storage, against the bound of the model: min(F, P, G) from rates measured one by one."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, Spread, run_child, scratch_folder
from benchmarks.part_rates import fetch_rate, prep_rate
from benchmarks.photos import CropAndFlip, make_photos

NAME = "bound"
QUESTION = "Behind slow storage, how much of the bound min(F, P, G) is reached?"
CASES = (
    # MB/s, share of the data that the cache may hold, samples/s of the device
    (60, 0.35, 10_000),
    (60, 0.65, 10_000),
    (20, 0.35, 10_000),
    (20, 0.65, 10_000),
    (20, 0.65, 500),
)
BATCH = 32
WORKERS = 2
PASSES = 3


def run(options: Options) -> Report:
    rounds = 1 if options.quick else 3
    with scratch_folder() as scratch:
        what = make_photos(scratch / "photos", options.data, 400 if options.quick else 2000)
        runs = [
            [run_child("benchmarks.bound", _params(case, scratch), scratch=scratch) for case in CASES]
            for _ in range(rounds)
        ]
    rows, checks = [], []
    for number, (bandwidth, share, device) in enumerate(CASES):
        found = [round_[number] for round_ in runs]
        reached = Spread.of([each["rate"] / each["bound"] for each in found])
        middle = {key: float(np.median([each[key] for each in found])) for key in found[0] if key != "versions"}
        limit = min("FPG", key=lambda name: middle[name])
        rows.append(
            [
                f"{bandwidth} MB/s",
                f"{share:.0%}",
                f"{middle['hit_ratio']:.3f}",
                *(f"{middle[name]:,.0f}" for name in "SCFPG"),
                f"{middle['bound']:,.0f} ({limit})",
                f"{middle['rate']:,.0f}",
                reached.show(".2f"),
            ]
        )
        what_for = (
            f"storage of {bandwidth} MB/s, {share:.0%} cache, device of {device:,}/s: samples/s against min(F, P, G)"
        )
        checks.append(Check(what_for, reached.median, 0.9, spread=(reached.low, reached.high)))
    return Report(
        columns=["storage", "cache", "hit ratio", *"SCFPG", "min(F, P, G)", "reached, samples/s", "share of the bound"],
        rows=rows,
        checks=checks,
        notes=[
            f"{what}; decode, random crop, flip; batches of {BATCH}, {WORKERS} workers; {PASSES} passes in random "
            "order after the first, as one iteration. All rates in samples/s. S: fetches from the `ThrottledSource` by "
            "as many threads as the workers use; C: `get_many` of resident records; F = 1 / (x/C + (1-x)/S) with the "
            f"hit ratio x that was found; P: {WORKERS} processes that run the pipeline on records in memory; G: the "
            "device, which takes a fixed time per batch and no processor time."
        ],
        versions=runs[0][0]["versions"],
        raw=runs,
    )


def _params(case: tuple[int, float, int], scratch: Any) -> dict[str, Any]:
    return {"photos": str(scratch / "photos"), "bandwidth": case[0], "share": case[1], "device": case[2]}


def child() -> None:
    given = json.loads(sys.argv[1])
    folder = sf.ImageFolder(given["photos"], CropAndFlip())
    samples = len(folder)
    records = [folder.fetch(id) for id in range(samples)]
    total = sum(len(record[0]) for record in records)
    source = sf.testing.ThrottledSource(folder, bandwidth=given["bandwidth"] * 1e6)
    rng = np.random.default_rng(0)
    rates: dict[str, float] = {}
    rates["S"] = fetch_rate(source.fetch, rng.permutation(samples)[: samples // 2].tolist(), threads=8 * WORKERS)
    rates["P"] = prep_rate(folder.pipeline, records[:200], WORKERS, seconds=2.0)
    with sf.CachedDataset(source, capacity=int(total * given["share"]), form="fetched") as cached:
        order: list[int] = []
        loader = sf.DataLoader(
            cached, batch_size=BATCH, sampler=_Order(order), num_workers=WORKERS, persistent_workers=True
        )
        order[:] = rng.permutation(samples).tolist()
        for _batch in loader:
            pass
        resident = np.flatnonzero(cached.cache.resident(np.arange(samples)))
        rates["C"] = _cache_rate(cached.cache, resident, rng)
        order[:] = np.concatenate([rng.permutation(samples) for _ in range(PASSES)]).tolist()
        before = loader.stats()
        pause = BATCH / given["device"]
        busy = 0.0
        start = time.perf_counter()
        for _batch in loader:
            stepped = time.perf_counter()
            time.sleep(pause)
            busy += time.perf_counter() - stepped
        rates["rate"] = len(order) / (time.perf_counter() - start)
        rates["G"] = len(order) / busy
        after = loader.stats()
        hits, misses = after.hits - before.hits, after.misses - before.misses
        loader.close()
    rates["hit_ratio"] = hits / (hits + misses)
    rates["F"] = 1 / (rates["hit_ratio"] / rates["C"] + (1 - rates["hit_ratio"]) / rates["S"])
    rates["bound"] = min(rates["F"], rates["P"], rates["G"])
    emit(rates, stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__)


class _Order:
    """A sampler that gives the ids of a list, which may be changed between iterations."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __iter__(self) -> Any:
        return iter(list(self.ids))

    def __len__(self) -> int:
        return len(self.ids)


def _cache_rate(cache: Any, resident: Any, rng: np.random.Generator, seconds: float = 1.0) -> float:
    read = 0
    start = time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        cache.get_many(rng.choice(resident, BATCH))
        read += BATCH
    return read / taken


if __name__ == "__main__":
    child()
