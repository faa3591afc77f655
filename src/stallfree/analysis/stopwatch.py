"""Rates with a confidence interval, measured until the interval is narrow enough."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

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


class ChildTime:
    """CPU seconds of worker processes that have exited by the end of the block."""

    def __enter__(self) -> ChildTime:
        self._before = self._now()
        self._samples = 0
        self.seconds = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self._now() - self._before

    def each(self, start: ChildTime) -> float:
        """Seconds per counted sample, minus those of `start`."""
        return max(0.0, self.seconds - start.seconds) / max(1, self._samples)

    def count(self, ids: Iterable[int]) -> Iterator[int]:
        """Yield and count `ids`."""
        for id in ids:
            self._samples += 1
            yield id

    @staticmethod
    def _now() -> float:
        times = os.times()
        return times.children_user + times.children_system
