"""What would be if: F, P and G of a job with another cache, more CPUs, other storage, more devices or more jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stallfree.analysis.model import Loading, Rates, knee, law, sustained
from stallfree.units import format_size

_NAMES = {"fetch": "F", "prep": "P", "compute": "G"}


@dataclass(frozen=True)
class Setting:
    """A job on a machine.

    Attributes:
        rates: of one job, alone.
        loading: its loader.
        hits: share of samples that the cache serves.
        cpus: cores that prepare.
        together: samples/s of the job with all data in memory, if less than min(P, G); else infinite.
        sample_bytes: mean bytes of a fetch; None if not known.
        record_bytes: mean bytes of a cached sample; None if not known.
        samples: of the data set.
    """

    rates: Rates
    loading: Loading
    hits: float
    cpus: int
    together: float
    sample_bytes: float | None
    record_bytes: float | None
    samples: int

    @property
    def throughput(self) -> float:
        """Samples/s that the job keeps up."""
        return sustained(self.limited, self.hits, self.loading)

    @property
    def limited(self) -> Rates:
        """The rates, the lower of P and G no higher than `together`."""
        rates = self.rates
        if rates.compute <= rates.prep_hit:
            return replace(rates, compute=min(rates.compute, self.together))
        factor = min(1.0, self.together / rates.prep_hit)
        return replace(rates, prep=rates.prep * factor, prep_hit=rates.prep_hit * factor)

    @property
    def binds(self) -> str:
        """What limits: "fetch", "prep", "compute", or "cpu" when they share the cores."""
        _, part = law(self.limited, self.hits, overlap=self.loading.overlap)
        return "cpu" if part != "fetch" and math.isfinite(self.together) else part

    def with_cpus(self, cpus: float) -> Setting:
        """With so many cores, and a worker on each: P in proportion."""
        factor = cpus / self.cpus
        rates = replace(self.rates, prep=self.rates.prep * factor, prep_hit=self.rates.prep_hit * factor)
        workers = max(1, math.ceil(self.loading.workers * factor)) if self.loading.workers else 0
        ahead = max(self.loading.ahead, math.ceil(self.loading.ahead * factor))
        loading = replace(self.loading, workers=workers, ahead=ahead)
        return replace(self, rates=rates, loading=loading, cpus=max(1, round(cpus)), together=self.together * factor)

    def with_storage(self, bandwidth: float) -> Setting:
        """With storage of so many bytes/s. `sample_bytes` must be known."""
        assert self.sample_bytes
        return replace(self, rates=replace(self.rates, storage=bandwidth / self.sample_bytes))

    def with_devices(self, devices: float) -> Setting:
        """With so many devices that share each batch: G in proportion."""
        together = self.together * (devices if self.rates.compute <= self.rates.prep_hit else 1)
        return replace(self, rates=replace(self.rates, compute=self.rates.compute * devices), together=together)

    def with_jobs(self, jobs: int) -> Setting:
        """What one of so many equal jobs on the host gets, each with a device of its own: 1/jobs of S, C and P."""
        rates = self.rates
        shared = replace(
            rates,
            prep=rates.prep / jobs,
            prep_hit=rates.prep_hit / jobs,
            storage=rates.storage / jobs,
            cache=rates.cache / jobs,
        )
        return replace(self, rates=shared, together=self.together / jobs)

    def with_hits(self, hits: float) -> Setting:
        """With another share of hits."""
        return replace(self, hits=hits)

    def with_overlap(self) -> Setting:
        """With a loader that fetches and prepares at once."""
        return replace(self, loading=replace(self.loading, overlap=True))


@dataclass(frozen=True)
class Prediction:
    """The answer of `Report.predict`.

    Attributes:
        throughput: samples/s of one job.
        binds: "fetch", "prep", "compute", or "cpu" when they share the cores.
        F, P, G: fetch rate, prep rate, compute rate of that job, samples/s.
        hits: share of samples that the cache serves.
        now: samples/s of the job as it was measured, by the same model.
        reasoning: how the figures came about, a line each.
        answers: what would help, and what would not, a line each.
    """

    throughput: float
    binds: str
    F: float
    P: float
    G: float
    hits: float
    now: float
    reasoning: tuple[str, ...]
    answers: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((*self.reasoning, "", *self.answers))


def explain(before: Setting, after: Setting, *, devices: int, jobs: int, storage: float | None) -> Prediction:
    """The prediction for `after`, which `before` became by those changes."""
    rates, hits = after.rates, after.hits
    fetch, prep = rates.fetch_at(hits), rates.prep_at(hits)
    throughput, now, binds = after.throughput, before.throughput, after.binds
    each = f", for each of {jobs} jobs" if jobs > 1 else ""
    size = "" if after.record_bytes is None else f" ({format_size(hits * after.samples * after.record_bytes)})"
    speed = "" if storage is None else f" (storage of {format_size(storage)}/s)"
    reasoning = [
        f"x = {hits:.1%} of the samples come out of the cache{size}",
        f"F = 1 / (x/C + (1-x)/S) = {_mix(hits, rates.cache, rates.storage)} = {_rate(fetch)}{each}{speed}",
        f"P = {_rate(prep)}{each} ({after.cpus} {_plural(after.cpus, 'CPU')})",
        f"G = {_rate(rates.compute)}" + (f" ({devices} devices)" if devices > 1 else ""),
    ]
    if math.isfinite(after.together):
        reasoning.append(f"prep, compute and the loader share the CPUs: together {_rate(after.together)}")
    if not after.loading.overlap:
        reasoning.append("a worker of this loader fetches and prepares in turn: 1 / (1/F + 1/P) is its limit")
    limit, _ = law(after.limited, hits, overlap=after.loading.overlap)
    what = {"cpu": "the CPUs, which prep, compute and the loader share, bind"}.get(
        binds, f"{binds} binds ({_NAMES.get(binds)})"
    )
    reasoning.append(f"{what}: {_rate(throughput)}{each}, {throughput / now:.2f} times as many as now ({_rate(now)})")
    if throughput < 0.99 * limit:
        reasoning.append(
            f"that is {1 - throughput / limit:.1%} less than the limit of {_rate(limit)}: the parts are nearly equal, "
            "and how many samples of a batch miss varies"
        )
    return Prediction(throughput, binds, fetch, prep, rates.compute, hits, now, tuple(reasoning), _answers(after))


def _answers(setting: Setting) -> tuple[str, ...]:
    """The questions of the paper, one line each."""
    return tuple(
        line
        for line in (
            _on_cache(setting),
            _on_cpus(setting),
            _on_storage(setting),
            _on_device(setting),
            _on_jobs(setting),
        )
        if line
    )


def _on_cache(setting: Setting) -> str:
    enough = enough_cache(setting)
    if enough is None:
        return "cache: no cache ends the fetch stall; its own rate C is the limit"
    if enough == 0:
        return "cache: none is needed, storage keeps up without one"
    size = f" ({format_size(enough * setting.samples * setting.record_bytes)})" if setting.record_bytes else ""
    verb = "ends" if setting.hits < enough else "is enough to end"
    return f"cache: {enough:.0%} of the samples{size} {verb} the fetch stall; more gains nothing"


def _on_cpus(setting: Setting) -> str:
    if setting.binds not in ("prep", "cpu"):
        return f"more CPUs: gain nothing, {_binder(setting)} is the limit"
    goal = min(setting.rates.fetch_at(setting.hits), setting.rates.compute)
    need = math.ceil(setting.cpus * goal / min(setting.rates.prep_at(setting.hits), setting.together))
    gain = _gain(setting, setting.with_cpus(2 * setting.cpus))
    return f"more CPUs: {gain} with twice as many; {need} end the prep stall"


def _on_storage(setting: Setting) -> str:
    if setting.hits >= 1:
        return "faster storage: gains nothing, all samples come out of the cache"
    if not setting.sample_bytes:
        return ""
    twice = setting.with_storage(2 * setting.rates.storage * setting.sample_bytes)
    goal = min(setting.limited.prep_at(setting.hits), setting.limited.compute)
    left = 1 / goal - setting.hits / setting.rates.cache
    need = math.inf if left <= 0 else (1 - setting.hits) / left * setting.sample_bytes
    if twice.throughput < 1.01 * setting.throughput:
        return f"faster storage: gains nothing, {_binder(setting)} is the limit"
    return f"faster storage: {_gain(setting, twice)} if twice as fast; {format_size(need)}/s ends the fetch stall"


def _on_device(setting: Setting) -> str:
    if setting.binds != "compute":
        return f"a faster device: gains nothing, {_binder(setting)} is the limit"
    return f"a faster device: {_gain(setting, setting.with_devices(2))} if twice as fast"


def _on_jobs(setting: Setting) -> str:
    """How many jobs the host feeds without a stall: each its own loader, and with batches prepared once for all."""
    slowest = min(setting.rates.fetch_at(setting.hits), setting.rates.prep_at(setting.hits), setting.together)
    fed = int(slowest * 1.01 / setting.rates.compute)
    if fed < 1:
        return "jobs on this host: not even one is fed without stalls; if batches are prepared once, more cost nothing"
    return f"jobs on this host: {fed} are fed without stalls; if batches are prepared once, any number"


def _gain(before: Setting, after: Setting) -> str:
    return f"{after.throughput / before.throughput:.2f}x"


def _binder(setting: Setting) -> str:
    return {"fetch": "fetching", "prep": "prep", "compute": "the device", "cpu": "what the CPUs share"}[setting.binds]


def _mix(hits: float, cache: float, storage: float) -> str:
    if hits == 0:
        return f"S = {storage:,.0f}"
    if hits == 1:
        return f"C = {cache:,.0f}"
    return f"1 / ({hits:.3f}/{cache:,.0f} + {1 - hits:.3f}/{storage:,.0f})"


def _rate(value: float) -> str:
    return f"{value:,.0f} samples/s" if math.isfinite(value) else "no limit"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def best_share(setting: Setting) -> float | None:
    """The share of samples to cache: the least that ends the fetch stall; None if that gains less than 2%."""
    enough = enough_cache(setting)
    share = 1.0 if enough is None else enough
    gain = setting.with_hits(share).throughput / setting.with_hits(0.0).throughput
    return share if gain > 1.02 else None


def enough_cache(setting: Setting) -> float | None:
    """The least share of hits at which fetching holds nothing up; None if even 1 is too little.

    Where a worker fetches and prepares in turn, each miss costs its time: there it is the least share within 2% of
    what caching all samples gives.
    """
    if setting.loading.overlap:
        return knee(setting.limited)
    goal = 0.98 * setting.with_hits(1.0).throughput
    low, high = 0.0, 1.0
    if setting.with_hits(low).throughput >= goal:
        return low
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if setting.with_hits(middle).throughput >= goal else (middle, high)
    return high
