"""Measurements: what the samples of a data set cost, and rates with a confidence interval.

`measure_samples` and `measure_files` time some samples in a child process, for `cache="auto"` and `analyze`. The runs
of `analyze` are timed by `steady_rate`, until the interval is narrow enough.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import StatisticsError, fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.analysis.model import Costs
from stallfree.datasets.probe import FirstLook, Sample
from stallfree.errors import CodecError
from stallfree.notes import note_sample
from stallfree.pipeline.codec import encode, record_size
from stallfree.pipeline.fingerprint import same
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.randomness import Randomness
from stallfree.pipeline.values import payload_bytes, private

# -- the costs of samples ---------------------------------------------------------------------------------------------

_LEAST, _MOST_SAMPLES, _MOST_BYTES = 5, 256, 256 << 20
"""Samples that are fetched in any case, and the most samples and bytes."""

_WAIT = 50e-6
"""Seconds of a fetch without CPU time from which it waits for storage."""


def measure_samples(source: Source, first: FirstLook, *, seconds: float, threads: int) -> tuple[Costs, list[Sample]]:
    """Fetch and prepare some samples, and time it. Call it in a child process.

    The records are fetched by so many threads, or one after the other if the source allows no threads: the wait for
    storage is then a part of the work. Each sample is made twice, as those of the first look.

    Returns:
        The costs of a sample, and the samples that came out the same, to be cached.

    Raises the error of a sample if all fail.
    """
    torch.set_num_threads(1)  # as in workers
    used, end = {sample.id for sample in first.samples}, time.monotonic() + seconds
    ids = np.random.default_rng(0).permutation(len(source))[: _MOST_SAMPLES + len(used)].tolist()
    ids = [id for id in ids if id not in used] or list(used)
    records, storage, fetching = _fetch(source, ids, end - 0.6 * seconds, threads)
    deterministic, random = first.parts.deterministic, first.parts.random
    samples, times = list[Sample](), list[tuple[float, ...]]()
    with Randomness(random if len(random) else None) as randomness:
        randomness.seed(0, 0, 0)
        for id, record in records.items():
            with contextlib.suppress(Exception):  # raised when the sample is requested
                clock = [time.perf_counter()]
                copy = private(record)
                clock.append(time.perf_counter())
                prepared = private(deterministic(copy) if len(deterministic) else copy)
                clock.append(time.perf_counter())
                copy = private(prepared)
                clock.append(time.perf_counter())
                random(copy)
                clock.append(time.perf_counter())
                times.append(tuple(np.diff(clock).tolist()))
                again = record if getattr(source, "threads", True) else source.fetch(id)
                if same(prepared, deterministic(private(again)) if len(deterministic) else again) is not False:
                    samples.append(Sample(id, record, prepared))
            if len(times) >= _LEAST and time.monotonic() > end:
                break
    copying, before, copying_prepared, after = map(median, zip(*(times or [(0.0,) * 4]), strict=True))
    read = {"fetched": copying, "prepared": copying_prepared}
    hit = {"fetched": copying + before + after, "prepared": copying_prepared + after}
    size = {"fetched": _record_size([sample.record for sample in samples])}
    if len(deterministic):
        size["prepared"] = _record_size([sample.prepared for sample in samples])
    return Costs(len(source), storage, fetching + before + after, hit, read, size), samples


def _fetch(source: Source, ids: list[int], end: float, threads: int) -> tuple[dict[int, Any], float, float]:
    """Fetch until `end`: the records, S, and seconds of a fetch.

    The first records are fetched in turn. If they wait, and the source allows threads, the others are fetched at once:
    S is their rate, and the waits are not in the seconds. Medians leave out a first fetch that loads libraries, and
    other processes that take the core.
    """
    at_once, waits = bool(getattr(source, "threads", True)), False
    records, problem, held = dict[int, Any](), None, 0
    walls, used = list[float](), list[float]()
    for id in ids:
        clock, processor = time.perf_counter(), time.thread_time()
        try:
            records[id] = private(source.fetch(id))
        except Exception as error:
            note_sample(error, source, id, "fetching")
            problem = error
            continue
        walls.append(time.perf_counter() - clock)
        used.append(time.thread_time() - processor)
        held += payload_bytes(records[id])
        waits = at_once and median(walls) > median(used) + max(_WAIT, 0.3 * median(used))
        if len(records) >= _LEAST and (waits or time.monotonic() > end or held > _MOST_BYTES):
            break
    if problem is not None and not records:
        raise problem
    if not waits:
        return records, math.inf, median(used if at_once else walls)
    pool, began, count = ThreadPoolExecutor(threads), time.monotonic(), 0
    for id, future in [(id, pool.submit(source.fetch, id)) for id in ids[len(walls) :][: 4 * threads]]:
        with contextlib.suppress(Exception):  # raised when the sample is requested
            records[id], count = future.result(), count + 1
            held += payload_bytes(records[id])
        if count >= _LEAST and (time.monotonic() > end or held > _MOST_BYTES):
            break
    storage = count / (time.monotonic() - began) if count else 1 / median(walls)
    pool.shutdown(wait=False, cancel_futures=True)
    return records, storage, median(used)


def _record_size(values: list[Any]) -> float:
    """Mean bytes of a record in a cache; infinite if the values cannot be stored."""
    with contextlib.suppress(CodecError, RecursionError, StatisticsError):
        return fmean(record_size(*encode(value, allow_pickle=True)) for value in values)
    return math.inf


def measure_files(cached: Any, *, seconds: float) -> Costs:
    """Make some samples of a data set whose files are cached: from storage, and with its files in the cache.

    Both are timed one after the other for each sample, and their difference is the median over the samples: what the
    machine does meanwhile affects both. Call it in a child process; the files stay in the cache.

    Args:
        cached: a `CachedDataset` of the form "files", which is empty.
        seconds: that it may take.
    """
    torch.set_num_threads(1)
    reader, before, end = cached.reader, cached.stats().resident_bytes, time.monotonic() + seconds
    ids = np.random.default_rng(0).permutation(len(cached))[:_MOST_SAMPLES].tolist()
    misses, saved = list[float](), list[float]()
    for id in ids:
        clock, one = [time.perf_counter()], np.array([id])
        cached.steps(cached.dataset[id])
        clock.append(time.perf_counter())
        for _ in range(2):  # the first time they are stored
            reader.finish(reader.start(one), 0, 0, skip=False)
            clock.append(time.perf_counter())
        misses.append(clock[1] - clock[0])
        saved.append(misses[-1] - (clock[3] - clock[2]))
        if len(misses) >= _LEAST and time.monotonic() > end:
            break
    size = (cached.stats().resident_bytes - before) / len(misses)
    miss = median(misses)
    return Costs(
        len(cached), math.inf, miss, {"files": miss - max(0.0, median(saved))}, {}, {"files": size or math.inf}
    )


# -- rates ----------------------------------------------------------------------------------------------------------

_BLOCKS, _FEW_BLOCKS = 10, 5
_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t by number of figures, two-sided 95%; the value for ten is used for more, which is conservative."""

_WIDE = 0.5
"""Half width, as a share of the rate, from which an interval is meaningless: it is wider than the value."""

_USEFUL = 0.25
"""Target half width for the reported number of further batches."""

ROUNDS_FOR_INTERVAL = 3
"""Rounds from which their spread gives the interval; for fewer, that of the batches within them does."""

_LOOK_SECONDS = 0.1

_ENOUGH = 0.01
"""Half width of the interval, as a share of the rate, at which a run ends."""


@dataclass(frozen=True)
class Rate:
    """A rate in samples/s.

    Attributes:
        value: the mean over the run; None if it could not be measured: `note` then has the reason.
        low: lower end of its 95% confidence interval.
        high: upper end.
        repeats: number of timed batches.
        note: a remark; may be empty.
        more: further batches required for a meaningful interval; 0 if there is one.
        rounds: the value of each round, if there were several.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    repeats: int = 0
    note: str = ""
    more: int = 0
    rounds: tuple[float, ...] = ()

    def json(self) -> dict[str, Any]:
        """The rate as stored in a report."""
        return asdict(self) | {"rounds": list(self.rounds)}

    def within(self, share: float) -> bool:
        """Whether the interval is at most this share of the rate to each side."""
        return self.value is not None and self.high is not None and self.high - self.value <= share * self.value

    def __float__(self) -> float:
        return math.inf if self.value is None else self.value


@dataclass(frozen=True)
class Limits:
    """Time limits of a run.

    Attributes:
        least: minimum timed seconds.
        most: maximum seconds, warm-up included; after a longer warm-up, half of this is still timed.
        warm: maximum seconds of the warm-up; half of `most` if None.
    """

    least: float = 1.0
    most: float = 10.0
    warm: float | None = None


def steady_rate(
    batches: Iterable[int], warm_up: int, limits: Limits, on_progress: Callable[[float], None] = lambda share: None
) -> Rate:
    """The rate at which `batches`, an iterator over batch sizes, delivers samples.

    The first `warm_up` batches wait for the start of workers or come from filled queues, and are not timed, unless they
    take longer than `limits.warm`. The run ends when the interval (batch means: ten blocks, Student's t) is within 1%
    of the rate and `limits.least` seconds have been timed, after `limits.most`, or with the iterator. `on_progress` is
    called with an upper bound of the progress, 0 to 1.
    """
    warm = limits.most / 2 if limits.warm is None else limits.warm
    ends: list[float] = []
    sizes: list[int] = []
    started = looked = begun = time.perf_counter()
    for number, size in enumerate(batches, 1):
        now = time.perf_counter()
        if number <= warm_up and now - started < warm:
            begun = now
        else:
            ends.append(now - begun)
            sizes.append(size)
        if now - looked >= _LOOK_SECONDS:
            looked = now
            on_progress(min(1.0, (now - started) / limits.most))
            if _over(ends, sizes, begun - started, limits):
                break
    on_progress(1.0)
    return rate_of(ends, sizes)


def _over(ends: Sequence[float], sizes: Sequence[int], warmed: float, limits: Limits) -> bool:
    if not ends:
        return False
    if ends[-1] >= limits.most - min(warmed, limits.most / 2):
        return True
    if ends[-1] < limits.least:
        return False
    return rate_of(ends, sizes).within(_ENOUGH)


def rate_of(ends: Sequence[float], sizes: Sequence[int]) -> Rate:
    """The rate of batches that ended `ends` seconds after the start."""
    if not ends or ends[-1] <= 0:
        return Rate(None, note="no batch could be timed")
    value = sum(sizes) / ends[-1]
    blocks = _BLOCKS if len(ends) >= 2 * _BLOCKS else _FEW_BLOCKS
    if len(ends) < blocks:
        return _too_few(value, len(ends), 2 * _BLOCKS - len(ends))
    cuts = np.linspace(0, len(ends), blocks + 1).astype(int)[1:] - 1
    times = np.diff(np.asarray(ends)[cuts], prepend=0.0)
    counts = np.diff(np.cumsum(sizes)[cuts], prepend=0)
    if times.min() <= 0:
        return _too_few(value, len(ends), 2 * _BLOCKS)
    return _with_interval(value, half_width(counts / times), len(ends))


def half_width(figures: Sequence[float] | npt.NDArray[Any]) -> float:
    """Half width of the 95% interval of the mean of at least two figures."""
    count = len(figures)
    return _T95[min(count, max(_T95))] * float(np.std(figures, ddof=1)) / math.sqrt(count)


def next_half_width(figures: Sequence[float]) -> float:
    """Half width of the 95% prediction interval, about the mean of some figures, for another such figure."""
    return half_width(figures) * math.sqrt(len(figures) + 1)


def combined(rounds: Sequence[Rate]) -> Rate:
    """The rate of several rounds, with an interval that includes the variation between rounds.

    From three rounds on this is the interval of their mean, from their spread. For fewer rounds, it is the union of
    their own intervals.
    """
    known = [rate for rate in rounds if rate.value is not None]
    if len(known) < 2:
        return known[0] if known else rounds[0]
    values = tuple(float(rate) for rate in known)
    value, repeats = math.fsum(values) / len(values), sum(rate.repeats for rate in known)
    if len(known) >= ROUNDS_FOR_INTERVAL:
        found = _with_interval(value, half_width(values), repeats)
    elif any(rate.low is None or rate.high is None for rate in known):
        found = _too_few(value, repeats, max(1, 2 * _BLOCKS - repeats))
    else:
        ends = [end for rate in known for end in (rate.low, rate.high) if end is not None]
        found = _with_interval(value, max(abs(end - value) for end in ends), repeats)
    return replace(found, rounds=values)


def _with_interval(value: float, half: float, repeats: int) -> Rate:
    if half > _WIDE * value:
        return _too_few(value, repeats, math.ceil(repeats * (half / value / _USEFUL) ** 2) - repeats)
    return Rate(value, value - half, value + half, repeats)


def _too_few(value: float, repeats: int, more: int) -> Rate:
    return Rate(value, repeats=repeats, note=f"too few batches: {more} more needed", more=more)
