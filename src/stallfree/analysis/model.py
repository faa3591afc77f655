"""The throughput model: F, P and G, the bottleneck, and the loss from queues of finite length.

    F = 1 / (x / C + (1 - x) / S)      fetch rate, for a share x of hits
    throughput = min(F, P, G)          if fetch, prep and compute overlap

This is the model of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021,
section 3.4 and appendix) with two additions. A miss costs more CPU time than a hit, so P depends on x as F does. And
the number of misses in a batch is random, so a loader that works only a few batches ahead stalls occasionally if F is
near P or G; `sustained` simulates the queues of the loader batch by batch.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from stallfree.errors import InputError

_BATCHES = 1500
"""Batches that `sustained` simulates; the first quarter is warm-up."""

_PARTS = 1_000_000

_WORKERS = 128
"""Maximum workers that `sustained` simulates; more are modelled as this number of faster ones."""


@dataclass(frozen=True)
class Rates:
    """The rate of each part alone, in samples/s; infinite if it takes no time.

    Attributes:
        compute: G, steps on batches already on the device.
        prep: P of misses: all steps, and the CPU time of fetching.
        prep_hit: P of hits: the remaining steps, and reading the cache if loading overlaps.
        storage: S, fetches from cold storage, no prep.
        cache: C, reads from the cache, no prep.
    """

    compute: float
    prep: float
    prep_hit: float
    storage: float
    cache: float

    def times(self, factor: float, *names: str) -> Rates:
        """With some of the rates multiplied."""
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def fetch_at(self, hits: float) -> float:
        """F for this share of hits."""
        return _mix(self.cache, self.storage, hits)

    def prep_at(self, hits: float) -> float:
        """P for this share of hits."""
        return _mix(self.prep_hit, self.prep, hits)


@dataclass(frozen=True)
class Loading:
    """The configuration of a loader.

    Attributes:
        batch_size: samples per batch.
        workers: worker processes; 0 counts as one that is idle while the device computes.
        ahead: batches in flight.
        overlap: whether a worker fetches the next batch during prep, as stallfree's workers do and torch's do not.
    """

    batch_size: int
    workers: int
    ahead: int
    overlap: bool


def law(rates: Rates, hits: float, *, overlap: bool = True) -> tuple[float, str]:
    """min(F, P, G) in samples/s, and the bottleneck: "fetch", "prep" or "compute".

    Without `overlap` a worker alternates fetch and prep, which combine to 1 / (1/F + 1/P); the slower of the two is
    returned as the bottleneck.
    """
    fetch, prep, compute = rates.fetch_at(hits), rates.prep_at(hits), rates.compute
    slower = "fetch" if fetch <= prep else "prep"
    rate = min(fetch, prep) if overlap else 1 / (1 / fetch + 1 / prep)
    return (rate, slower) if rate < compute else (compute, "compute")


@lru_cache(maxsize=512)
def sustained(rates: Rates, hits: float, loading: Loading, *, seed: int = 0) -> float:
    """Sustained samples/s of a loader if each sample hits with probability `hits`. At most `law`.

    Batch n is requested when batch n - `ahead` is delivered. Its misses pass one queue of rate S; a worker prepares it
    when they have arrived; it is delivered in order, after the previous step.
    """
    bound, _ = law(rates, hits, overlap=loading.overlap)
    if loading.workers == 0:  # sequentially, in the training process
        return 1 / (1 / rates.fetch_at(hits) + 1 / rates.prep_at(hits) + 1 / rates.compute)
    size, workers = loading.batch_size, min(loading.workers, _WORKERS)
    ahead = math.ceil(loading.ahead * workers / loading.workers)
    missed = np.random.default_rng(seed).binomial(size, 1 - hits, _BATCHES)
    step = size / rates.compute
    fetching = (missed / rates.storage).tolist()
    working = missed / rates.prep + (size - missed) / rates.prep_hit
    if not loading.overlap:
        working += (size - missed) / rates.cache
    preparing = (workers * working).tolist()
    out = _handed_out(fetching, preparing, step, replace(loading, workers=workers, ahead=ahead))
    warm = _BATCHES // 4
    timed = (_BATCHES - 1 - warm) // workers * workers  # whole rounds: with constant times workers finish in bursts
    seconds = out[warm + timed] - out[warm]
    return min(bound, size * timed / seconds) if seconds > 0 else bound


def _handed_out(fetching: list[float], preparing: list[float], step: float, loading: Loading) -> list[float]:
    """Delivery time of each batch, from the seconds of its fetches in the queue and its prep in a worker."""
    free, ahead, overlap = [0.0] * loading.workers, loading.ahead, loading.overlap
    line = 0.0
    out: list[float] = []
    for number, (fetch, prep) in enumerate(zip(fetching, preparing, strict=True)):
        asked = out[number - ahead] if number >= ahead else 0.0
        worker = free[0]
        line = max(line, asked if overlap else max(asked, worker)) + fetch
        done = max(worker, line) + prep
        heapq.heapreplace(free, done)
        out.append(max(done, out[-1] + step if out else 0.0))
    return out


def knee(rates: Rates) -> float | None:
    """The minimum share of hits without a fetch stall, F >= min(P, G); None if even 1 is not enough."""

    def enough(hits: float) -> bool:
        return rates.fetch_at(hits) >= min(rates.prep_at(hits), rates.compute)

    return least_share(enough) if enough(1.0) else None


def least_share(enough: Callable[[float], bool]) -> float:
    """The minimum share, in millionths, that is `enough`; 1 if none is. `enough` must be monotonic."""
    return bisect_left(range(_PARTS), True, key=lambda part: enough(part / _PARTS)) / _PARTS


def _mix(hit: float, miss: float, hits: float) -> float:
    """The rate of a share `hits` at the rate `hit` and the rest at the rate `miss`."""
    if not 0 <= hits <= 1:
        raise InputError(f"{hits!r} is no share of hits: give 0 to 1")
    seconds = hits / hit + (1 - hits) / miss
    return 1 / seconds if seconds else math.inf
