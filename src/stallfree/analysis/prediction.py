"""Predicts F, P and G of a job with another cache, more CPUs, other storage, more devices or more jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stallfree.analysis.setting import WORTH, Setting
from stallfree.report.figures import plural, speed
from stallfree.units import format_size

_BINDS = {
    "fetch": "fetch binds (F)",
    "prep": "prep binds (P)",
    "compute": "compute binds (G)",
    "cpu": "the CPUs, which prep, compute and the loader share, bind",
}

_LIMITS = {"fetch": "fetching", "prep": "prep", "compute": "the device", "cpu": "what the CPUs share"}


@dataclass(frozen=True)
class Prediction:
    """The result of `Report.predict`.

    Attributes:
        throughput: samples/s of one job.
        binds: the bottleneck, whose doubling gains most: "fetch", "prep", "compute", or "cpu" if they share the cores.
            Several, joined by " and ", if they are equal.
        F, P, G: fetch rate, prep rate, compute rate of that job, samples/s.
        hits: share of samples that the cache serves.
        now: samples/s of the measured job, by the same model.
        reasoning: the result, and its derivation, one line each.
        answers: changes that would help, and that would not, one line each.
        low, high: the 95% interval for the throughput of such a run, from the spread of the prediction over the rounds
            of the analysis; None if there were too few.
        cpus_elsewhere: CPUs on other machines (`RayWorkers`) that would end the prep stall, in addition to those here;
            0 if there is none.

    Example:
        ```python
        report = sf.Report.load("report.json")
        prediction = report.predict(cache="50%", cpus=16)
        print(f"{prediction.throughput:.0f} samples/s, limited by {prediction.binds}")
        ```
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
    low: float | None = None
    high: float | None = None
    cpus_elsewhere: int = 0

    def __str__(self) -> str:
        result, *derivation = self.reasoning
        return "\n".join((result, *self.answers, "", *derivation))


def explain(
    before: Setting, after: Setting, *, devices: int, storage: float | None, half: float | None = None
) -> Prediction:
    """The prediction for `after`, which results from `before` by these changes; `half` is its half width."""
    rates, hits, jobs = after.rates, after.hits, after.jobs
    fetch, prep = rates.fetch_at(hits), rates.prep_at(hits)
    throughput, now, binds = after.throughput, before.throughput, " and ".join(after.binding)
    each = f", for each of {jobs} jobs" if jobs > 1 else ""
    size = "" if after.record_bytes is None else f" ({format_size(hits * after.samples * after.record_bytes)})"
    bandwidth = "" if storage is None else f" (storage of {speed(storage)})"
    reasoning = [
        f"x = {hits:.1%} of the samples come out of the cache{size}",
        f"F = 1 / (x/C + (1-x)/S) = {_mix(hits, rates.cache, rates.storage)} = {_rate(fetch)}{each}{bandwidth}",
        f"P = {_rate(prep)}{each} ({plural(after.cpus, 'CPU')})",
        f"G = {_rate(rates.compute)}" + (f" ({devices} devices)" if devices > 1 else ""),
    ]
    if math.isfinite(after.together):
        reasoning.append(f"prep, compute and the loader share the CPUs: together {_rate(after.together)}")
    if not after.loading.workers:
        reasoning.append("without workers fetch, prep and compute follow each other: 1 / (1/F + 1/P + 1/G)")
    elif not after.loading.overlap:
        reasoning.append("a worker of this loader fetches and prepares in turn: 1 / (1/F + 1/P) is its limit")
    wide = half is None or half > throughput / 2
    low, high = (None, None) if half is None or wide else (throughput - half, throughput + half)
    ends = "" if low is None or high is None else f" ({low:,.0f} to {high:,.0f})"
    one = len(after.binding) == 1
    bound = _BINDS[after.binding[0]] if one else f"{limits(after)} bind alike"
    reasoning.insert(
        0,
        f"{bound}: {_rate(throughput)}{ends}{each}, {throughput / now:.2f} times as many as now ({_rate(now)})",
    )
    if throughput < 0.99 * after.limit:
        reasoning.append(
            f"the result is {1 - throughput / after.limit:.1%} less than the limit of {_rate(after.limit)}: the parts "
            "are nearly equal, and the number of misses in a batch varies"
        )
    topics = (_on_cache, _on_cpus, _on_placement, _on_storage, _on_device, _on_jobs)
    texts = tuple(reasoning), tuple(filter(None, (answer(after) for answer in topics)))
    return Prediction(
        throughput, binds, fetch, prep, rates.compute, hits, now, *texts, low, high, after.cpus_elsewhere()
    )


def limits(setting: Setting) -> str:
    """The bottleneck in words: "prep", "fetching and the device"."""
    return " and ".join(_LIMITS[part] for part in setting.binding)


def _on_cache(setting: Setting) -> str:
    enough = setting.whole_share()
    whole = setting.with_hits(1.0)
    if enough == 0:
        cheaper = f"; with all samples in it: {_gain(setting, whole)}, a hit costs less prep"
        return f"cache: storage keeps up without one{cheaper if setting.gain(whole) > WORTH else ''}"
    if enough is None:
        gains = f"all samples in it: {_gain(setting, whole)}; " if setting.gain(whole) > WORTH else ""
        return f"cache: {gains}no cache ends the fetch stall; its own rate C is the limit"
    there = setting.with_hits(enough)
    size = f" ({format_size(enough * setting.samples * setting.record_bytes)})" if setting.record_bytes else ""
    more = f"all of them: {_gain(setting, whole)}" if there.gain(whole) > WORTH else "more gains nothing"
    if setting.hits >= enough:
        if setting.gain(whole) <= WORTH:
            more = "more gains nothing"
        return f"cache: {enough:.0%} of the samples{size} is enough to end the fetch stall; {more}"
    if max(setting.gain(there), setting.gain(whole)) <= WORTH:
        return f"cache: a larger one gains {_nothing(setting)}"
    return f"cache: {_gain(setting, there)} with {enough:.0%} of the samples{size}, which ends the fetch stall; {more}"


def _on_cpus(setting: Setting) -> str:
    twice = setting.with_cpus(2 * setting.cpus)
    if setting.gain(twice) <= WORTH:
        return f"more CPUs: gain {_nothing(setting, 'prep', 'cpu')}"
    elsewhere = setting.cpus_elsewhere()
    need = setting.enough_cpus()
    end = "" if need is None else f"; {need} end the prep stall"
    remote = ""
    if elsewhere:
        remote = f"; so do {plural(elsewhere, 'CPU')} on other machines (sf.RayWorkers({elsewhere}))"
    return f"more CPUs: {_gain(setting, twice)} with twice as many{end}{remote}"


def _on_placement(setting: Setting) -> str:
    if setting.placement is None:
        return ""
    here, there = setting.placement.speeds(setting.rates.fetch_at(setting.hits))
    fast, slow = ("the device", "the CPUs") if there > here else ("the CPUs", "the device")
    return (
        f"prep on {fast}: {max(here, there):,.0f} samples/s by min(F, P, G), {max(here, there) / min(here, there):.2f} "
        f"times as many as on {slow}; on the device it takes {setting.placement.takes:.0%} of G"
    )


def _on_storage(setting: Setting) -> str:
    if setting.hits >= 1:
        return "faster storage: gains nothing, all samples come out of the cache"
    if not setting.sample_bytes or not math.isfinite(setting.rates.storage):
        return ""
    twice = setting.with_storage(2 * setting.rates.storage * setting.jobs * setting.sample_bytes)
    if setting.gain(twice) <= WORTH:
        if setting.binding == ("fetch",):
            return "faster storage: gains less than 2%, the cache's own rate C is the limit"
        return f"faster storage: gains {_nothing(setting, 'fetch')}"
    need = setting.enough_storage()
    end = "" if need is None else f"; {speed(need)} ends the fetch stall"
    return f"faster storage: {_gain(setting, twice)} if twice as fast{end}"


def _on_device(setting: Setting) -> str:
    twice = setting.with_devices(2)
    if setting.gain(twice) <= WORTH:
        return f"a faster device: gains {_nothing(setting, 'compute')}"
    return f"a faster device: {_gain(setting, twice)} if twice as fast"


def _on_jobs(setting: Setting) -> str:
    """The number of jobs without a stall: with separate loaders, and with batches prepared once for all jobs."""
    slowest = min(setting.rates.fetch_at(setting.hits), setting.limited.prep_at(setting.hits))
    if not setting.loading.overlap:
        slowest = 1 / (1 / setting.rates.fetch_at(setting.hits) + 1 / setting.limited.prep_at(setting.hits))
    fed = int(slowest * setting.jobs * 1.01 / setting.rates.compute) if setting.loading.workers else 0
    if fed < 1:
        return "jobs on this host: not even one is fed without stalls; if batches are prepared once, more cost nothing"
    return f"jobs on this host: {fed} are fed without stalls; if batches are prepared once, any number"


def _nothing(setting: Setting, *parts: str) -> str:
    """The reason why improving only `parts` gains less than 2%."""
    if len(setting.binding) > 1 and set(setting.binding) & set(parts):
        others = " and ".join(_LIMITS[part] for part in setting.binding if part not in parts)
        return f"less than 2% alone, {others} must gain as well"
    return f"less than 2%, {limits(setting)} {'is' if len(setting.binding) == 1 else 'are'} the limit"


def _gain(before: Setting, after: Setting) -> str:
    return f"{before.gain(after):.2f}x"


def _mix(hits: float, cache: float, storage: float) -> str:
    if hits == 0:
        return f"S = {storage:,.0f}"
    if hits == 1:
        return f"C = {cache:,.0f}"
    return f"1 / ({hits:.3f}/{cache:,.0f} + {1 - hits:.3f}/{storage:,.0f})"


def _rate(value: float) -> str:
    return f"{value:,.0f} samples/s" if math.isfinite(value) else "no limit"
