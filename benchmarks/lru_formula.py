"""The hit ratio of LRU over random orders against the formula."""

from __future__ import annotations

import json
import math
import mmap
import sys
from importlib.metadata import version

import numpy as np
import numpy.typing as npt

from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, run_child, scratch_folder
from stallfree.cache.sample_cache import SampleCache

NAME = "lru_formula"
QUESTION = (
    "Each epoch visits every sample once, in another random order. Does `lru` hit as theory says, c + (1-c) ln(1-c) "
    "for a cache of the share c?"
)
SHARES = (0.2, 0.4, 0.6, 0.8)
EPOCHS = 10
BATCH = 8
PAGE = mmap.PAGESIZE


def run(options: Options) -> Report:
    ids = 4_000 if options.quick else 20_000
    with scratch_folder() as scratch:
        runs = [run_child("benchmarks.lru_formula", {"ids": ids, "share": share}, scratch=scratch) for share in SHARES]
    rows, checks = [], []
    for found in runs:
        share, ratio = found["share"], found["hits"] / found["asked"]
        expected = share + (1 - share) * math.log(1 - share)
        rows.append([f"{share:.4f}", f"{ratio:.4f}", f"{expected:.4f}", f"{found['minio']:.4f}"])
        checks.append(
            Check(f"hit ratio of `lru` at {share:.0%}, away from the formula", abs(ratio - expected), 0.01, "<=", ".4f")
        )
    return Report(
        columns=["resident share c", "hit ratio of lru", "c + (1-c) ln(1-c)", "hit ratio of minio"],
        rows=rows,
        checks=checks,
        notes=[f"{ids:,} ids, {EPOCHS} epochs after the first, asked for and stored in batches of {BATCH}."],
        versions=runs[0]["versions"],
        raw=runs,
    )


def child() -> None:
    given = json.loads(sys.argv[1])
    ratios = {policy: _ratio(policy, given["ids"], given["share"]) for policy in ("lru", "minio")}
    hits, asked, share = ratios["lru"]
    emit(
        {"share": share, "hits": hits, "asked": asked, "minio": ratios["minio"][0] / ratios["minio"][1]},
        stallfree=version("stallfree"),
        numpy=np.__version__,
    )


def _ratio(policy: str, ids: int, share: float) -> tuple[int, int, float]:
    """Hits, samples asked for, and the share that is resident."""
    value = np.zeros(64, np.uint8)
    blocks = round(ids * share)
    rng = np.random.default_rng(1)
    with _cache_of(blocks, ids, policy, value) as cache:
        before = cache.stats()
        for epoch in range(1 + EPOCHS):
            if epoch == 1:
                before = cache.stats()
            order = rng.permutation(ids)
            for start in range(0, ids, BATCH):
                batch = order[start : start + BATCH]
                missing = batch[~cache.resident(batch)]
                cache.get_many(batch)
                cache.put_many(missing, [value] * len(missing))
        after = cache.stats()
    return after.hits - before.hits, ids * EPOCHS, after.resident_items / ids


def _cache_of(blocks: int, ids: int, policy: str, value: npt.NDArray[np.uint8]) -> SampleCache:
    """A cache with room for about `blocks` records, whatever its index takes; memory comes in whole pages."""
    capacity = 60 * ids + 80 * blocks
    for attempt in range(20):
        cache = SampleCache(ids, capacity=capacity, fingerprint=f"lru-{policy}-{attempt}", policy=policy, example=value)
        if abs(cache.meta.num_blocks - blocks) <= PAGE // 64:
            return cache
        capacity += 64 * (blocks - cache.meta.num_blocks)
        cache.close()
    raise AssertionError(f"no capacity gives room for about {blocks} records")


if __name__ == "__main__":
    child()
