"""Predictions for a job with other hardware or caches, and the advice that follows from them.

All of them compare settings of the one model. What a report or a prediction names as the bottleneck is the part whose
doubling gains most (`Setting.binding`), so it is also what the advice says would help.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stallfree.analysis.model import NOTHING, WORTH, Option, Rates, Setting
from stallfree.analysis.render import plural, speed
from stallfree.units import format_size

_LIMITS = {"fetch": "storage", "prep": "prep", "compute": "the device", "cpu": "work that shares the CPUs"}
"""The parts in words. Prep, the step and the loader may share the CPUs."""


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
            of the analysis; None if there were too few, or if the machine's own speed drifted more than that.

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

    def __str__(self) -> str:
        result, *derivation = self.reasoning
        return "\n".join((result, *self.answers, "", *derivation))


def explain(before: Setting, after: Setting, half: float | None, drift: float) -> Prediction:
    """The prediction for `after`, which results from `before` by these changes.

    Args:
        before, after: the job as measured and as changed.
        half: half width of the interval; None if unknown.
        drift: share by which the machine's own speed changed during the measurement.
    """
    rates, hits, jobs = after.rates, after.hits, after.jobs
    fetch, prep, compute = rates.fetch_at(hits), rates.prep_at(hits), rates.compute
    throughput, now = after.throughput, before.throughput
    each = f", for each of {jobs} jobs" if jobs > 1 else ""
    size = "" if after.record_bytes is None else f" ({format_size(hits * after.samples * after.record_bytes)})"
    reasoning = [
        f"x = {hits:.1%} of the samples come out of the cache{size}",
        f"F = 1 / (x/C + (1-x)/S) = {_mix(hits, rates.cache, rates.storage)} = {_rate(fetch)}{each}",
        f"P = {_rate(prep)}{each} ({plural(after.cpus, 'CPU')})",
        f"G = {_rate(compute)}",
    ]
    if after.shares:
        reasoning.append(f"prep, compute and the loader share the CPUs: together {_rate(after.limited.prep_at(hits))}")
    if not after.workers:
        reasoning.append("without workers fetch, prep and compute follow each other: 1 / (1/F + 1/P + 1/G)")
    elif not after.overlap:
        reasoning.append("a worker of this loader fetches and prepares in turn: 1 / (1/F + 1/P) is its limit")
    low = high = None
    ends = ""
    if half is not None and drift * throughput > 2 * half:
        ends = f" (no interval: the machine's own speed drifted by {drift:.0%} while it was measured)"
    elif half is not None and half <= throughput / 2:
        low, high = throughput - half, throughput + half
        ends = f" ({low:,.0f} to {high:,.0f})"
    change = f"{throughput / now:.2f} times as many as now ({_rate(now)})"
    result = f"{limits(after)}: {_rate(throughput)}{ends}{each}, {change}"
    answers = tuple(f"{change.question}: {_answer(after, change)}" for change in _changes(after))
    binds = " and ".join(after.binding)
    return Prediction(throughput, binds, fetch, prep, compute, hits, now, (result, *reasoning), answers, low, high)


def limits(setting: Setting) -> str:
    """The bottleneck in words: "prep is the limit", "storage and the device are the limit"."""
    verb = "is" if len(setting.binding) == 1 else "are"
    return f"{' and '.join(_LIMITS[part] for part in setting.binding)} {verb} the limit"


def _mix(hits: float, cache: float, storage: float) -> str:
    if hits in (0, 1):
        return f"C = {cache:,.0f}" if hits else f"S = {storage:,.0f}"
    return f"1 / ({hits:.3f}/{cache:,.0f} + {1 - hits:.3f}/{storage:,.0f})"


def _rate(value: float) -> str:
    return f"{value:,.0f} samples/s" if math.isfinite(value) else "no limit"


# -- what would help --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """Something that could be changed.

    Attributes:
        question: what it is about, such as "more CPUs".
        do: the change in a sentence.
        then: the setting that results.
        memory: bytes that it takes.
        hardware: whether it takes other hardware.
    """

    question: str
    do: str
    then: Setting
    memory: float = 0.0
    hardware: bool = False


def _changes(now: Setting) -> Iterator[_Change]:
    """One change for each part: a cache, CPUs, storage, the device."""
    share = now.enough_cache()
    size = share * now.samples * (now.record_bytes or 0.0)
    capacity = f"'{format_size(1.05 * size)}'" if size else "..."
    do = f"Cache {share:.0%} of the samples as they are read: sf.CachedDataset(dataset, capacity={capacity})"
    yield _Change("cache", do, now.with_hits(max(share, now.hits)), size)
    twice = now.with_cpus(2 * now.cpus)
    yield _Change("more CPUs", f"Take twice as many CPUs ({twice.cpus})", twice, hardware=True)
    if now.sample_bytes and math.isfinite(now.rates.storage) and now.hits < 1:
        bandwidth = 2 * now.rates.storage * now.sample_bytes * now.jobs
        then = now.with_storage(bandwidth)
        do = f"Put the data on storage twice as fast ({speed(bandwidth)})"
        yield _Change("faster storage", do, then, hardware=True)
    yield _Change("a faster device", "Use a device twice as fast", now.with_devices(2), hardware=True)


def _answer(now: Setting, change: _Change) -> str:
    """What a change gains, or why it gains nothing."""
    gain = now.gain(change.then)
    return f"{gain:.2f}x. {change.do}" if gain > WORTH else f"gains less than 2%, {limits(now)}"


def advise(now: Setting, data: dict[str, Any], remedy: Option | None) -> list[dict[str, Any]]:
    """The recommendations that gain 2%: first those without other hardware, then the others, each by gain.

    Args:
        now: the job as measured.
        data: of the report.
        remedy: the choice of `DataLoader(cache="auto")`.
    """
    changes, workers = list(_changes(now)), now.workers
    if remedy is not None and remedy.form != NOTHING:
        size, auto = remedy.memory, now.with_option(remedy, max(1, workers))
        capacity = f"cache='auto', capacity='{format_size(1.05 * size)}'"
        cached = f"{remedy.hits:.0%} cached ({remedy.form})"
        do = f"Use sf.DataLoader(dataset, {data['job']['batch_size']}, {capacity}): {cached}"
        if now.gain(auto) >= now.gain(changes[0].then) and size <= changes[0].memory:
            del changes[0]
        changes.insert(0, _Change("cache='auto'", do, auto, size))
    if not now.overlap:
        do = "Use stallfree.DataLoader with a source that separates fetch from prep (sf.ImageFolder, sf.FileDataset)"
        changes.append(_Change("", do, replace(now, overlap=True)))
    if workers < (cpus := data["machine"]["cpus"]):
        do = f"Raise num_workers from {workers} to {cpus}, one for each CPU"
        changes.append(_Change("", do, now.with_workers(cpus)))
    if placed := data["placement"]:
        other_place = "CPUs" if placed["on_device"] else "device"
        # The measured rate is that of step and prep at once.
        rates = Rates(placed[other_place], math.inf, math.inf, now.rates.storage, now.rates.cache)
        then = replace(now, rates=rates, step_cpu=0.0, loader_cpu=0.0)
        changes.append(_Change("", f"Let the {other_place} decode: on_device={not placed['on_device']}", then))
    changes = [change for change in changes if now.gain(change.then) > WORTH]
    return [
        {
            "do": change.do,
            "why": _parts(change.then) + (f"; takes {format_size(change.memory)} of memory" if change.memory else ""),
            "throughput": change.then.throughput,
            "gain": now.gain(change.then),
            "memory_bytes": round(change.memory),
        }
        for change in sorted(changes, key=lambda one: (one.hardware, -now.gain(one.then)))
    ]


def _parts(setting: Setting) -> str:
    """F, P and G of a setting as text."""
    rates, hits = setting.rates, setting.hits
    parts = rates.fetch_at(hits), rates.prep_at(hits), rates.compute
    shown = (f"{rate:,.0f}" if math.isfinite(rate) else "no limit" for rate in parts)
    return "F {}, P {}, G {} samples/s".format(*shown)


def bottleneck(now: Setting, data: dict[str, Any]) -> str:
    """The bottleneck of a report in two sentences."""
    cold, what = data["shares"]["cold"], limits(now)
    return (
        f"{what[0].upper()}{what[1:]} ({_parts(now)}). With cold files the device computes "
        f"{cold['compute']:.0%} of the time, {cold['fetch_stall']:.0%} is a wait for storage, {cold['prep_stall']:.0%} "
        "one for prep."
    )


def cache_curve(now: Setting) -> dict[str, Any]:
    """The throughput, F, P and G against the share of the samples that is cached, and the best share."""
    shares = [percent / 100 for percent in range(0, 101, 5)]
    cached = [now.with_hits(x) for x in shares]
    fetch, best = [one.rates.fetch_at(one.hits) for one in cached], now.enough_cache()
    return {
        "x": shares,
        "throughput": [one.throughput for one in cached],
        "F": [rate if math.isfinite(rate) else None for rate in fetch],
        "P": [one.rates.prep_at(one.hits) for one in cached],
        "G": [one.rates.compute for one in cached],
        "best": best if now.with_hits(0.0).gain(now.with_hits(best)) > WORTH else None,
    }
