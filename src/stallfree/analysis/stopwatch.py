"""Rates with an interval of confidence, measured for as long as it takes and no longer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_BLOCKS, _FEW_BLOCKS = 10, 5
_T95 = {10: 2.262, 5: 2.776}
"""Student's t for so many blocks, two-sided 95%."""

_LOOK_SECONDS = 0.1

_ENOUGH = 0.01
"""Half width of the interval, as a share of the rate, at which a run ends."""


@dataclass(frozen=True)
class Rate:
    """A rate in samples/s.

    Attributes:
        value: the mean over the run; None if it could not be measured, and then `note` says why.
        low: lower end of its 95% interval of confidence.
        high: upper end.
        repeats: batches that were timed.
        note: what to know about it; may be empty.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    repeats: int = 0
    note: str = ""

    def json(self) -> dict[str, Any]:
        """As a report holds it."""
        return asdict(self)

    def __float__(self) -> float:
        return math.inf if self.value is None else self.value


@dataclass(frozen=True)
class Limits:
    """How long a run may last.

    Attributes:
        least: seconds that are timed at least.
        most: seconds after which it ends in any case, warm-up included.
    """

    least: float = 1.0
    most: float = 10.0


def steady_rate(
    batches: Iterable[int],
    warm_up: int,
    limits: Limits,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Rate:
    """The rate at which samples are delivered by `batches`, an iterator that gives the size of each batch.

    The first `warm_up` batches come out of queues that were filled while nobody looked, and are not timed, unless they
    take half of `limits.most`. The run ends
    when the interval (batch means: ten blocks, Student's t) is within 1% of the rate and `limits.least` seconds have
    been timed, after `limits.most`, or with the iterator. `on_progress` hears how much is over at the most, 0 to 1.
    """
    ends: list[float] = []
    sizes: list[int] = []
    started = looked = begun = time.perf_counter()
    for number, size in enumerate(batches, 1):
        now = time.perf_counter()
        if number <= warm_up and now - started < limits.most / 2:
            begun = now
        else:
            ends.append(now - begun)
            sizes.append(size)
        if now - looked >= _LOOK_SECONDS:
            looked = now
            on_progress(min(1.0, (now - started) / limits.most))
            if _over(ends, sizes, now - started, limits):
                break
    on_progress(1.0)
    return rate_of(ends, sizes)


def _over(ends: Sequence[float], sizes: Sequence[int], seconds: float, limits: Limits) -> bool:
    if not ends:
        return False
    if seconds >= limits.most:
        return True
    if ends[-1] < limits.least:
        return False
    rate = rate_of(ends, sizes)
    return rate.value is not None and rate.high is not None and rate.high - rate.value <= _ENOUGH * rate.value


def rate_of(ends: Sequence[float], sizes: Sequence[int], note: str = "") -> Rate:
    """The rate of batches that ended `ends` seconds after the beginning."""
    if not ends or ends[-1] <= 0:
        return Rate(None, note=note or "no batch could be timed")
    value = sum(sizes) / ends[-1]
    blocks = _BLOCKS if len(ends) >= 2 * _BLOCKS else _FEW_BLOCKS
    if len(ends) < blocks:
        return Rate(value, repeats=len(ends), note=note or f"only {len(ends)} batches: no interval")
    cuts = np.linspace(0, len(ends), blocks + 1).astype(int)[1:] - 1
    times = np.diff(np.asarray(ends)[cuts], prepend=0.0)
    counts = np.diff(np.cumsum(sizes)[cuts], prepend=0)
    if times.min() <= 0:
        return Rate(value, repeats=len(ends), note=note)
    rates = counts / times
    half = _T95[blocks] * float(rates.std(ddof=1)) / math.sqrt(blocks)
    return Rate(value, max(0.0, value - half), value + half, len(ends), note)
