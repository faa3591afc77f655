"""Measurements: what the samples of a data set cost, and rates with a confidence interval.

`measure_samples` and `measure_files` time some samples in a child process: `cache="auto"` in one, `analyze` in as many
at once as the job has workers. `measure_rate` times a loop, and `combined` joins several rounds.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import StatisticsError, fmean, median
from typing import Any, TypeVar

import numpy as np

from stallfree.analysis.model import Costs
from stallfree.datasets.probe import FirstLook, Sample
from stallfree.errors import CodecError
from stallfree.ipc.process import call_in_child
from stallfree.pipeline.codec import encode, record_size
from stallfree.pipeline.compose import Source
from stallfree.pipeline.fingerprint import same
from stallfree.pipeline.randomness import Randomness
from stallfree.pipeline.values import payload_bytes, private
from stallfree.sources.mapped import samples_of

T = TypeVar("T")

# -- the costs of samples ---------------------------------------------------------------------------------------------

_LEAST, _MOST_BYTES = 5, 256 << 20
"""Samples that are fetched in any case, and the most bytes."""

MOST_SAMPLES = 256
"""Samples that are worth a measurement."""

_WAIT = 50e-6
"""Seconds of a fetch without CPU time from which it waits for storage."""


def at_once(call: Callable[[int], T], processes: int, what: str) -> list[T]:
    """Return the results of `call(0)`, `call(1)`, ..., which so many child processes make at the same time."""

    def calls() -> list[T]:
        with ThreadPoolExecutor(processes) as pool:
            return list(pool.map(lambda number: call_in_child(lambda: call(number), what), range(processes)))

    return call_in_child(calls, what)  # a process of one thread, so that no other one is copied by the forks


def measure_samples(
    source: Source, first: FirstLook, ids: Sequence[int], *, seconds: float, threads: int
) -> tuple[Costs, list[Sample]]:
    """Fetch and prepare some samples, and time it. Call it in a child process.

    The records are fetched by so many threads, or one after the other if the source allows no threads: the wait for
    storage is then a part of the work. Each sample is made twice, as those of the first look.

    Returns:
        The costs of a sample, and the samples that came out the same, to be cached.

    Raises the error of a sample if all fail.
    """
    end = time.monotonic() + seconds
    records, storage, fetching = _fetch(source, ids, end - 0.6 * seconds, threads)
    deterministic, random = first.parts.deterministic, first.parts.random
    samples, times = list[Sample](), list[list[float]]()

    def prepare(record: Any) -> Any:
        return private(deterministic(record) if len(deterministic) else record)

    with Randomness(random if len(random) else None) as randomness:
        randomness.seed(0, 0, 0)
        for id, record in records.items():
            with contextlib.suppress(Exception):  # raised when the sample is requested
                values, clock = [record], [time.perf_counter()]
                for part in (private, prepare, private, random):
                    values.append(part(values[-1]))
                    clock.append(time.perf_counter())
                times.append(np.diff(clock).tolist())
                again = record if getattr(source, "threads", True) else source.fetch(id)
                if same(values[2], prepare(private(again))) is not False:
                    samples.append(Sample(id, record, values[2]))
            if len(times) >= _LEAST and time.monotonic() > end:
                break
    copying, before, copying_prepared, after = map(median, zip(*(times or [[0.0] * 4]), strict=True))
    read = {"fetched": copying, "prepared": copying_prepared}
    hit = {"fetched": copying + before + after, "prepared": copying_prepared + after}
    size = {"fetched": _record_size([sample.record for sample in samples])}
    if len(deterministic):
        size["prepared"] = _record_size([sample.prepared for sample in samples])
    fetched = fmean(map(payload_bytes, records.values()))
    return Costs(len(source), storage, fetching + before + after, hit, read, size, fetched=fetched), samples


def _fetch(source: Source, ids: Sequence[int], end: float, threads: int) -> tuple[dict[int, Any], float, float]:
    """Fetch until `end`: the records, S, and seconds of a fetch.

    The first records are fetched in turn. If they wait, and the source allows threads, the others are fetched at once:
    S is their rate, and the waits are not in the seconds. Medians leave out a first fetch that loads libraries, and
    other processes that take the core.
    """
    allowed, waits, held = bool(getattr(source, "threads", True)), False, 0
    records, walls, used = dict[int, Any](), list[float](), list[float]()

    def timed(id: int) -> Any:
        clock, processor = time.perf_counter(), time.thread_time()
        record = private(source.fetch(id))
        walls.append(time.perf_counter() - clock)
        used.append(time.thread_time() - processor)
        return record

    for id, record in samples_of(source, ids, timed):
        records[id], held = record, held + payload_bytes(record)
        waits = allowed and median(walls) > median(used) + max(_WAIT, 0.3 * median(used))
        if len(records) >= _LEAST and (waits or time.monotonic() > end or held > _MOST_BYTES):
            break
    if not waits:
        return records, math.inf, median(used if allowed else walls)
    pool, ends = ThreadPoolExecutor(threads), [time.monotonic()]
    for id, future in [(id, pool.submit(source.fetch, id)) for id in ids if id not in records]:
        with contextlib.suppress(Exception):  # raised when the sample is requested
            records[id] = future.result()
            ends.append(time.monotonic())
            held += payload_bytes(records[id])
        if len(ends) > _LEAST and (ends[-1] > end or held > _MOST_BYTES):
            break
    pool.shutdown(wait=False, cancel_futures=True)
    full = threads if len(ends) > 2 * threads else 0  # until then not all threads have been at work all the time
    storage = (len(ends) - 1 - full) / (ends[-1] - ends[full]) if len(ends) > 1 else 1 / median(walls)
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
    reader, before, end = cached.reader, cached.stats().resident_bytes, time.monotonic() + seconds
    ids = np.random.default_rng(0).permutation(len(cached))[:MOST_SAMPLES].tolist()
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
    miss, hit = median(misses), median(misses) - max(0.0, median(saved))
    return Costs(len(cached), math.inf, miss, {"files": hit}, {}, {"files": size or math.inf})


# -- rates ------------------------------------------------------------------------------------------------------------

_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t by number of figures, two-sided 95%; the value for five is used for more, which is conservative."""

_WIDE = 0.5
"""Half width, as a share of the rate, from which an interval is meaningless: it is wider than the value."""

ROUNDS_FOR_INTERVAL = 3
"""Rounds from which their spread gives an interval."""


@dataclass(frozen=True)
class Rate:
    """A rate in samples/s.

    Attributes:
        value: the mean over the rounds; None if it could not be measured: `note` then has the reason.
        low: lower end of its 95% confidence interval; None for fewer than three rounds, or if it is meaningless.
        high: upper end.
        note: a remark; may be empty.
        rounds: the value of each round.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""
    rounds: list[float] = field(default_factory=list)

    def __float__(self) -> float:
        return math.inf if self.value is None else self.value


def measure_rate(batches: Iterable[int], warm_up: int, seconds: float) -> float | None:
    """Samples/s that `batches`, an iterator over batch sizes, delivers in `seconds`; None if there are too few.

    The first `warm_up` batches wait for the start of workers or come from filled queues: they are not timed, unless
    they take 2.5 times as long as that. At least one batch is timed.
    """
    started = begun = now = time.perf_counter()
    samples = 0
    for number, size in enumerate(batches, 1):
        now = time.perf_counter()
        if number <= warm_up and now - started < 2.5 * seconds:
            begun = now
            continue
        samples += size
        if now - begun >= seconds:
            break
    return samples / (now - begun) if samples and now > begun else None


def half_width(figures: Sequence[float]) -> float:
    """Half width of the 95% interval of the mean of at least two figures."""
    count = len(figures)
    return _T95[min(count, max(_T95))] * float(np.std(figures, ddof=1)) / math.sqrt(count)


def next_half_width(figures: Sequence[float]) -> float:
    """Half width of the 95% prediction interval, about the mean of some figures, for another such figure."""
    return half_width(figures) * math.sqrt(len(figures) + 1)


def combined(rounds: Sequence[float | None], note: str = "") -> Rate:
    """The rate of several rounds: their mean, with an interval from their spread. `note` says why there is none."""
    values = [value for value in rounds if value is not None]
    if not values:
        return Rate(None, note=note)
    value = fmean(values)
    half = half_width(values) if len(values) >= ROUNDS_FOR_INTERVAL else math.inf
    low, high = (None, None) if half > _WIDE * value else (value - half, value + half)
    return Rate(value, low, high, rounds=values)
