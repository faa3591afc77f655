"""The throughput model: F, P and G, the bottleneck, and what a cache saves.

    F = 1 / (x / C + (1 - x) / S)      fetch rate, for a share x of hits
    throughput = min(F, P, G)          if fetch, prep and compute overlap

This is the model of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021,
section 3.4 and appendix) with an addition: a miss costs more CPU time than a hit, so P depends on x as F does.

`analyze` and `predict` evaluate it for a job on a machine (`Setting`), `cache="auto"` for each form of a cache
(`choose`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import combinations

NOTHING = "nothing"
"""The form of no cache; the others are those of `CachedDataset`."""

_GAIN, _LEAST_SAVED = 1.1, 50e-6
"""A cache must make the loader at least so much faster, and save so many worker seconds per sample.

Short measurements vary by some percent, and costs of about 50 µs are not in the model.
"""

_EQUAL = 1.02
"""Forms whose rates differ by less are equal; the one that costs less prep is taken."""

WORTH = 1.02
"""Minimum gain of a recommendation; smaller gains are reported as less than 2%."""

_ALIKE = 0.99
"""Parts whose gain is within 1% of the best count as equal bottlenecks."""


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

    def slowed(self, seconds: float) -> Rates:
        """With a prep that takes so many seconds more per sample."""
        if not seconds:
            return self
        return replace(self, prep=1 / (1 / self.prep + seconds), prep_hit=1 / (1 / self.prep_hit + seconds))

    def fetch_at(self, hits: float) -> float:
        """F for this share of hits."""
        return _mix(self.cache, self.storage, hits)

    def prep_at(self, hits: float) -> float:
        """P for this share of hits."""
        return _mix(self.prep_hit, self.prep, hits)


def _mix(hit: float, miss: float, hits: float) -> float:
    """The rate of a share `hits` at the rate `hit` and the rest at the rate `miss`."""
    seconds = hits / hit + (1 - hits) / miss
    return 1 / seconds if seconds else math.inf


# -- the choice of a cache --------------------------------------------------------------------------------------------


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
        fetched: mean bytes of a fetched record.
    """

    samples: int
    storage: float
    miss: float
    hit: Mapping[str, float]
    read: Mapping[str, float] = field(default_factory=dict)
    size: Mapping[str, float] = field(default_factory=dict)
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
    rates = Rates(math.inf, miss_rate, hit_rate, costs.storage, read_rate)
    return Option(form, hits, rates, hits * costs.samples * size if hits else 0.0)


def choose(costs: Costs, capacity: int, workers: int) -> Option:
    """The form of the fastest loader; `NOTHING` if no cache gains a tenth."""
    nothing = best = expect(costs, NOTHING, capacity, workers)
    for form in costs.size:
        option = expect(costs, form, capacity, workers)
        equal, prep = option.rate * _EQUAL >= best.rate, option.rates.prep_at(option.hits)
        less_prep = prep > _EQUAL * best.rates.prep_at(best.hits)
        if option.hits and (option.rate > _EQUAL * best.rate or (equal and less_prep)):
            best = option
    saved = max(1, workers) * (1 / nothing.rate - 1 / best.rate)
    return best if best.rate >= _GAIN * nothing.rate and saved >= _LEAST_SAVED else nothing


# -- a job on a machine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A job on a machine.

    Attributes:
        rates: of one job alone.
        hits: share of samples that the cache serves.
        cpus: cores for prep.
        workers: processes of the loader; 0: the training process loads, and the device is idle meanwhile.
        overlap: whether a worker fetches the next batch during prep, as stallfree's workers do and torch's do not.
        sample_bytes: mean bytes of a fetch; None if unknown.
        record_bytes: mean bytes of a cached sample; None if unknown.
        samples: of the data set.
        step_cpu: CPU seconds per sample of the step, if it shares the cores with prep; less on a faster device.
        loader_cpu: those of the loader and the training process.
        jobs: equal jobs on the machine; the rates are those of one of them.
    """

    rates: Rates
    hits: float
    cpus: int
    workers: int
    overlap: bool
    sample_bytes: float | None
    record_bytes: float | None
    samples: int
    step_cpu: float = 0.0
    loader_cpu: float = 0.0
    jobs: int = 1

    @property
    def throughput(self) -> float:
        """Samples/s of the job: min(F, P, G).

        A worker that alternates fetch and prep delivers 1 / (1/F + 1/P), and without workers compute alternates with
        them, too.
        """
        fetch, prep, compute = self.rates.fetch_at(self.hits), self.limited.prep_at(self.hits), self.rates.compute
        if not self.workers:
            return 1 / (1 / fetch + 1 / prep + 1 / compute)
        return min(min(fetch, prep) if self.overlap else 1 / (1 / fetch + 1 / prep), compute)

    @property
    def limited(self) -> Rates:
        """The rates, with P limited by the shared CPUs."""
        return self.rates.slowed(self.step_cpu + self.loader_cpu)

    @property
    def shares(self) -> bool:
        """Whether prep, compute and the loader share the cores, so that together they are slower than each alone."""
        return self.step_cpu + self.loader_cpu > 0

    @cached_property
    def binding(self) -> tuple[str, ...]:
        """The bottleneck: the parts whose doubling gains most, of "fetch", "prep" or "cpu", and "compute".

        If doubling any single part gains less than 2%, several are equal: the smallest set that gains when doubled
        together.
        """
        doubled: dict[str, Callable[[Setting], Setting]] = {
            "fetch": lambda now: replace(now, rates=now.rates.times(2, "storage", "cache")),
            "cpu" if self.shares else "prep": lambda now: now.with_cpus(2 * now.cpus),
            "compute": lambda now: now.with_devices(2),
        }
        for number in (1, 2):
            gains = {
                names: self.gain(reduce(lambda then, name: doubled[name](then), names, self))
                for names in combinations(doubled, number)
            }
            best = max(gains.values())
            if best > WORTH:
                alike = {name for names, gain in gains.items() if gain >= max(WORTH, _ALIKE * best) for name in names}
                return tuple(name for name in doubled if name in alike)
        return tuple(doubled)

    def gain(self, then: Setting) -> float:
        """The throughput of `then` relative to this one."""
        return then.throughput / self.throughput

    def reaching(self, fastest: float, *, own_cpu: bool) -> Setting:
        """This setting, so that with all samples cached it is as fast as the job was.

        If the job is slower than each of its parts alone, prep, compute and the loader share the CPUs. What is not prep
        is the step, if it runs on the CPUs instead of a separate device, and the loader. Without workers it is prep.

        Args:
            fastest: samples/s of the job itself at its fastest; infinite if unknown.
            own_cpu: whether the step runs on the CPUs.
        """
        rates, limit = self.rates, self.with_hits(1.0).throughput
        if not self.workers:
            return replace(self, rates=rates.slowed(max(0.0, 1 / fastest - 1 / limit)))
        if fastest >= 0.99 * limit:
            factor = fastest / limit if limit < fastest < math.inf else 1.0
            return replace(self, rates=rates.times(factor, "prep", "prep_hit"))
        others = max(0.0, 1 / fastest - (0.0 if self.overlap else 1 / rates.cache) - 1 / rates.prep_hit)
        step = min(others, 1 / rates.compute) if own_cpu else 0.0
        return replace(self, step_cpu=step, loader_cpu=others - step)

    def enough_cache(self) -> float:
        """The minimum share of hits, in whole percents, within 2% of the throughput with all samples cached."""
        goal = self.with_hits(1.0).throughput
        return next(share / 100 for share in range(101) if self.with_hits(share / 100).throughput * WORTH >= goal)

    # -- variants -----------------------------------------------------------------------------------------------------

    def with_cpus(self, cpus: int) -> Setting:
        """With `cpus` cores for prep, and one worker on each: P and the shared work in proportion."""
        if cpus == self.cpus:
            return self
        return replace(self._working(cpus / self.cpus), workers=cpus, cpus=cpus)

    def _working(self, factor: float) -> Setting:
        """With CPUs so many times as fast."""
        rates = self.rates.times(factor, "prep", "prep_hit")
        return replace(self, rates=rates, step_cpu=self.step_cpu / factor, loader_cpu=self.loader_cpu / factor)

    def with_workers(self, workers: int) -> Setting:
        """With `workers` workers on the same machine: P in proportion, with the same shared work."""
        then = self.with_cpus(workers)
        freed = 1 / self.rates.prep_hit - 1 / then.rates.prep_hit
        return replace(then, step_cpu=self.step_cpu, loader_cpu=self.loader_cpu + freed) if self.shares else then

    def with_storage(self, bandwidth: float) -> Setting:
        """With storage of `bandwidth` bytes/s. `sample_bytes` must be known."""
        assert self.sample_bytes
        return replace(self, rates=replace(self.rates, storage=bandwidth / self.sample_bytes / self.jobs))

    def with_devices(self, devices: float) -> Setting:
        """With `devices` devices that share each batch: G in proportion."""
        return replace(self, rates=self.rates.times(devices, "compute"), step_cpu=self.step_cpu / devices)

    def with_jobs(self, jobs: int) -> Setting:
        """One of `jobs` equal jobs on the host, each with its own device: 1/jobs of S, C and P."""
        then = self._working(1 / jobs)
        return replace(then, rates=then.rates.times(1 / jobs, "storage", "cache"), jobs=self.jobs * jobs)

    def with_hits(self, hits: float) -> Setting:
        """With another share of hits."""
        return replace(self, hits=hits)

    def with_option(self, option: Option, workers: int) -> Setting:
        """With a cache, scaled by its change relative to misses only in the same model."""
        prep = self.rates.prep
        if not self.overlap:  # fetch and prep alternate
            prep = 1 / (1 / self.rates.storage + 1 / prep)
        prep *= option.rates.prep_at(option.hits) / option.rates.prep
        fetch = option.rates.fetch_at(option.hits)
        rates = Rates(self.rates.compute, prep, prep, fetch, fetch)
        return replace(self, rates=rates, hits=option.hits, cpus=workers, workers=workers, overlap=True)
