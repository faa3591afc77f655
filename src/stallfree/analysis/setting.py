"""A job on a machine, and variants of it with other resources: the rates of its parts, and the bottleneck."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import combinations

from stallfree.analysis.model import Loading, Option, Rates, law, sustained

WORTH = 1.02
"""Minimum gain of a recommendation; smaller gains are reported as less than 2%."""

_ALIKE = 0.99
"""Parts whose gain is within 1% of the best count as equal bottlenecks."""


@dataclass(frozen=True)
class Sharing:
    """CPU seconds per sample used by other parts that share the CPUs with prep.

    Attributes:
        step: of the training step, less on a faster device.
        loader: of the loader and the training process.
    """

    step: float
    loader: float


@dataclass(frozen=True)
class Setting:
    """A job on a machine.

    Attributes:
        rates: of one job alone.
        loading: its loader.
        hits: share of samples that the cache serves.
        cpus: cores for prep.
        sharing: set if prep, compute and the loader share the cores, so that together they are slower than each alone.
        sample_bytes: mean bytes of a fetch; None if unknown.
        record_bytes: mean bytes of a cached sample; None if unknown.
        samples: of the data set.
        jobs: equal jobs on the machine; the rates are those of one of them.
        measured: cores and loader from which `with_cpus` scales; None: these.
    """

    rates: Rates
    loading: Loading
    hits: float
    cpus: int
    sharing: Sharing | None
    sample_bytes: float | None
    record_bytes: float | None
    samples: int
    jobs: int = 1
    measured: tuple[int, Loading] | None = None

    @cached_property
    def throughput(self) -> float:
        """Sustained samples/s of the job."""
        return sustained(self.limited, self.hits, self.loading)

    @property
    def limit(self) -> float:
        """Samples/s by the law, without the loss from short queues."""
        if not self.loading.workers:
            return self.throughput
        return law(self.limited, self.hits, overlap=self.loading.overlap)[0]

    @property
    def limited(self) -> Rates:
        """The rates, with P limited by the shared CPUs."""
        prep, prep_hit = self.rates.prep, self.rates.prep_hit
        return replace(self.rates, prep=min(prep, self._work(prep)), prep_hit=min(prep_hit, self._work(prep_hit)))

    @property
    def together(self) -> float:
        """Samples/s of prep, compute and the loader together on shared CPUs; infinite if they do not share."""
        return math.inf if self.sharing is None else self._work(self.rates.prep_at(self.hits))

    def _work(self, prep: float) -> float:
        if self.sharing is None:
            return math.inf
        return 1 / (1 / prep + self.sharing.step + self.sharing.loader)

    @cached_property
    def binding(self) -> tuple[str, ...]:
        """The bottleneck: the parts whose doubling gains most, of "fetch", "prep" or "cpu", and "compute".

        If doubling any single part gains less than 2%, several are equal: the smallest set that gains when doubled
        together.
        """
        cpu = "cpu" if self.together < self.rates.prep_at(self.hits) else "prep"
        doubled: dict[str, Callable[[Setting], Setting]] = {
            "fetch": lambda now: replace(now, rates=now.rates.times(2, "storage", "cache")),
            cpu: lambda now: now.with_cpus(2 * now.cpus),
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
        rates, limit = self.rates, self.with_hits(1.0).limit
        if not self.loading.workers:
            more = max(0.0, 1 / fastest - 1 / limit)
            slower = {name: 1 / (1 / getattr(rates, name) + more) for name in ("prep", "prep_hit")}
            return replace(self, rates=replace(rates, **slower))
        if fastest >= 0.99 * limit:
            factor = fastest / limit if limit < fastest < math.inf else 1.0
            return replace(self, rates=rates.times(factor, "prep", "prep_hit"))
        others = max(0.0, 1 / fastest - (0.0 if self.loading.overlap else 1 / rates.cache) - 1 / rates.prep_hit)
        step = min(others, 1 / rates.compute) if own_cpu else 0.0
        return replace(self, sharing=Sharing(step, others - step))

    # -- variants -----------------------------------------------------------------------------------------------------

    def with_cpus(self, cpus: int) -> Setting:
        """With `cpus` cores for prep, and one worker on each: P and the shared work in proportion."""
        if cpus == self.cpus:
            return self
        factor = cpus / self.cpus
        rates = self.rates.times(factor, "prep", "prep_hit")
        sharing = self.sharing and _scaled(self.sharing, 1 / factor)
        measured = base, loading = self.measured or (self.cpus, self.loading)  # rounded once, not in each variant
        workers = max(1, math.ceil(loading.workers * cpus / base)) if loading.workers else cpus
        ahead = max(loading.ahead, math.ceil(loading.ahead * cpus / base))
        loading = replace(self.loading, workers=workers, ahead=ahead)
        return replace(self, rates=rates, loading=loading, cpus=cpus, sharing=sharing, measured=measured)

    def with_workers(self, workers: int) -> Setting:
        """With `workers` workers on the same machine: P in proportion, with the same shared work."""
        then = self.with_cpus(workers)
        if self.sharing is None:
            return then
        freed = 1 / self.rates.prep_hit - 1 / then.rates.prep_hit
        return replace(then, sharing=replace(self.sharing, loader=self.sharing.loader + freed))

    def with_storage(self, bandwidth: float) -> Setting:
        """With storage of `bandwidth` bytes/s. `sample_bytes` must be known."""
        assert self.sample_bytes
        return replace(self, rates=replace(self.rates, storage=bandwidth / self.sample_bytes / self.jobs))

    def with_devices(self, devices: float) -> Setting:
        """With `devices` devices that share each batch: G in proportion."""
        sharing = self.sharing and replace(self.sharing, step=self.sharing.step / devices)
        return replace(self, rates=self.rates.times(devices, "compute"), sharing=sharing)

    def with_jobs(self, jobs: int) -> Setting:
        """One of `jobs` equal jobs on the host, each with its own device: 1/jobs of S, C and P."""
        shared = self.rates.times(1 / jobs, "prep", "prep_hit", "storage", "cache")
        sharing = self.sharing and _scaled(self.sharing, jobs)
        return replace(self, rates=shared, sharing=sharing, jobs=self.jobs * jobs)

    def with_hits(self, hits: float) -> Setting:
        """With another share of hits."""
        return replace(self, hits=hits)

    def with_option(self, option: Option, nothing: Option, workers: int) -> Setting:
        """With a cache, scaled by its change relative to `nothing` in the same model."""
        prep = self.rates.prep
        if not self.loading.overlap:  # fetch and prep alternate
            prep = 1 / (1 / self.rates.storage + 1 / prep)
        prep *= option.rates.prep_at(option.hits) / nothing.rates.prep
        fetch = option.rates.fetch_at(option.hits)
        loading = Loading(self.loading.batch_size, workers, max(self.loading.ahead, 2 * workers), overlap=True)
        rates = Rates(self.rates.compute, prep, prep, fetch, fetch)
        return replace(self, rates=rates, loading=loading, hits=option.hits, cpus=workers, measured=None)

    def enough_cache(self) -> float | None:
        """The minimum share of hits, in whole percents, without a fetch stall; None if even 1 is not enough.

        If a worker alternates fetch and prep, each miss costs its time: the result is then the minimum share within 2%
        of the rate with all samples cached.
        """
        rates, goal = self.limited, self.with_hits(1.0).limit

        def suffices(hits: float) -> bool:
            if self.loading.overlap and self.loading.workers:
                return rates.fetch_at(hits) >= min(rates.prep_at(hits), rates.compute)
            return self.with_hits(hits).limit * WORTH >= goal

        return next((percent / 100 for percent in range(101) if suffices(percent / 100)), None)


def _scaled(sharing: Sharing, factor: float) -> Sharing:
    return Sharing(sharing.step * factor, sharing.loader * factor)
