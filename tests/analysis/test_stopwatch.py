"""Rates and their intervals, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from stallfree.analysis import stopwatch
from stallfree.analysis.stopwatch import Limits, rate_of, steady_rate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def ticks(clock: Clock, seconds: list[float] | Iterator[float], size: int = 8) -> Iterator[int]:
    for each in seconds:
        clock.now += each
        yield size


def test_warm_up_is_not_timed(clock: Clock) -> None:
    found = steady_rate(ticks(clock, [5.0, 5.0] + [0.1] * 50), 2, Limits(1, 60))
    assert found.value == pytest.approx(80)
    assert found.low == pytest.approx(80)
    assert found.high == pytest.approx(80)


def test_it_ends_when_the_interval_is_small(clock: Clock) -> None:
    found = steady_rate(ticks(clock, iter(lambda: 0.1, None)), 0, Limits(2, 1000))
    assert found.value == pytest.approx(80)
    assert found.repeats * 0.1 == pytest.approx(2.0, abs=0.3)


def test_it_ends_at_the_limit_when_rates_vary(clock: Clock) -> None:
    rng = np.random.default_rng(0)
    found = steady_rate(ticks(clock, iter(lambda: float(rng.exponential(0.1)), None)), 0, Limits(1, 7))
    assert 7 <= clock.now - 100 < 9
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


def test_it_ends_with_the_batches(clock: Clock) -> None:
    heard: list[float] = []
    found = steady_rate(ticks(clock, [0.5] * 3), 1, Limits(1, 10), heard.append)
    assert (found.value, found.low, found.repeats) == (pytest.approx(16), None, 2)
    assert "2 batches" in found.note
    assert heard[-1] == 1.0


def test_slow_batches_are_timed_even_if_warm_up_takes_all_the_time(clock: Clock) -> None:
    found = steady_rate(ticks(clock, iter(lambda: 6.0, None)), 10, Limits(1, 10))
    assert found.value == pytest.approx(8 / 6)
    assert clock.now - 100 == pytest.approx(12)


def test_nothing_to_time(clock: Clock) -> None:
    found = steady_rate(ticks(clock, [1.0]), 4, Limits(1, 10))
    assert found.value is None
    assert found.note


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        ends = np.cumsum(rng.gamma(4, 0.25, 200))
        found = rate_of(ends.tolist(), [1] * 200)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1.0 <= found.high
    assert 0.90 <= held / 400 <= 0.99
