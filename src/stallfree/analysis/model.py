"""The throughput model: F, P and G, the bottleneck, what a cache saves, and the loss from queues of finite length.

    F = 1 / (x / C + (1 - x) / S)      fetch rate, for a share x of hits
    throughput = min(F, P, G)          if fetch, prep and compute overlap

This is the model of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021,
section 3.4 and appendix) with two additions. A miss costs more CPU time than a hit, so P depends on x as F does. And
the number of misses in a batch is random, so a loader that works only a few batches ahead stalls occasionally if F is
near P or G; `sustained` simulates the queues of the loader batch by batch.

`analyze` and `predict` evaluate it for a job (`setting`), `cache="auto"` for each form of a cache (`choose`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from stallfree.errors import InputError

_BATCHES = 1500
"""Batches that `sustained` simulates; the first quarter is warm-up."""

_WORKERS = 128
"""Maximum workers that `sustained` simulates; more are modelled as this number of faster ones."""

NOTHING = "nothing"
"""The form of no cache; the others are those of `CachedDataset`."""

_GAIN, _LEAST_SAVED = 1.1, 50e-6
"""A cache must make the loader at least so much faster, and save so many worker seconds per sample.

Short measurements vary by some percent, and costs of about 50 µs are not in the model.
"""

_EQUAL = 1.02
"""Forms whose rates differ by less are equal; the one that costs less prep is taken."""


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


def _mix(hit: float, miss: float, hits: float) -> float:
    """The rate of a share `hits` at the rate `hit` and the rest at the rate `miss`."""
    if not 0 <= hits <= 1:
        raise InputError(f"{hits!r} is no share of hits: give 0 to 1")
    seconds = hits / hit + (1 - hits) / miss
    return 1 / seconds if seconds else math.inf


@dataclass(frozen=True)
class Costs:
    """What the samples of a data set cost, in seconds of one process per sample.

    Attributes:
        samples: of the data set.
        storage: S in samples/s, of all processes together; infinite if no wait was observed.
        miss: a sample that is not cached, without waits that overlap with prep.
        hit: a cached sample, by form.
        read: the read from the cache in it, by form.
        size: bytes of a cached sample, by form; infinite if it cannot be stored.
        compute: G in samples/s; infinite if unknown.
        fetched: mean bytes of a fetched record.
    """

    samples: int
    storage: float
    miss: float
    hit: Mapping[str, float]
    read: Mapping[str, float] = field(default_factory=dict)
    size: Mapping[str, float] = field(default_factory=dict)
    compute: float = math.inf
    fetched: float = 0.0


@dataclass(frozen=True)
class Option:
    """A form of the cache, and its effect.

    Attributes:
        form: `NOTHING` or one of a `CachedDataset`.
        hits: x, the share of the samples that fit.
        rates: of the parts.
        memory: bytes of the cached samples.
    """

    form: str
    hits: float
    rates: Rates
    memory: float

    @property
    def rate(self) -> float:
        """Samples/s of the loader by itself, min(F, P)."""
        return min(self.rates.fetch_at(self.hits), self.rates.prep_at(self.hits))


def expect(costs: Costs, form: str, capacity: int, workers: int) -> Option:
    """The effect of a cache of this form in `capacity` bytes, with so many workers."""
    workers, size = max(1, workers), costs.size.get(form, math.inf)
    hits = min(1.0, capacity / (costs.samples * size))
    hit, read = costs.hit.get(form, costs.miss), costs.read.get(form, 0.0)
    miss_rate, hit_rate, read_rate = (workers / max(1e-9, seconds) for seconds in (costs.miss, hit, read))
    rates = Rates(costs.compute, miss_rate, hit_rate, costs.storage, read_rate)
    return Option(form, hits, rates, hits * costs.samples * size if hits else 0.0)


def choose(costs: Costs, capacity: int, workers: int) -> Option:
    """The form of the fastest loader; `NOTHING` if no cache gains a tenth."""
    nothing = best = expect(costs, NOTHING, capacity, workers)
    for form in costs.size:
        option = expect(costs, form, capacity, workers)
        equal = option.rate * _EQUAL >= best.rate and option.rates.prep_at(option.hits) > _EQUAL * best.rates.prep_at(
            best.hits
        )
        if option.hits and (option.rate > _EQUAL * best.rate or equal):
            best = option
    saved = max(1, workers) * (1 / nothing.rate - 1 / best.rate)
    return best if best.rate >= _GAIN * nothing.rate and saved >= _LEAST_SAVED else nothing
