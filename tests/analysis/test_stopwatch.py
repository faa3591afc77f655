"""Rates and their intervals, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.analysis import measure as stopwatch
from stallfree.analysis.measure import Limits, Rate, combined, rate_of, steady_rate


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
    assert (found.note, found.more) == ("too few batches: 18 more needed", 18)
    assert heard[-1] == 1.0


def test_slow_batches_are_timed_even_if_warm_up_takes_all_the_time(clock: Clock) -> None:
    found = steady_rate(ticks(clock, iter(lambda: 6.0, None)), 10, Limits(1, 10))
    assert found.value == pytest.approx(8 / 6)
    assert clock.now - 100 == pytest.approx(12)


def test_the_start_of_workers_is_not_timed_in_a_short_run(clock: Clock) -> None:
    start = [3.0] + [0.01] * 9  # longer than the run itself
    found = steady_rate(ticks(clock, start + [0.1] * 100), 10, Limits(0.2, 2, 5))
    assert found.value == pytest.approx(80)
    assert clock.now - 100 == pytest.approx(3.09 + 0.2, abs=0.4)
    clock.now = 100.0
    varied = steady_rate(ticks(clock, start + [0.1, 0.3] * 100), 10, Limits(0.2, 2, 5))
    assert varied.value == pytest.approx(40, rel=0.2)
    assert clock.now - 100 == pytest.approx(3.09 + 1.0, abs=0.4)


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


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=60))
def test_an_interval_is_within_half_the_rate_or_says_what_is_missing(seconds: list[float]) -> None:
    found = rate_of(np.cumsum(seconds).tolist(), [8] * len(seconds))
    assert found.value is not None
    if found.more:
        assert (found.low, found.high) == (None, None)
        assert found.note == f"too few batches: {found.more} more needed"
    else:
        assert found.low is not None
        assert found.high is not None
        assert 0 < found.low <= found.value <= found.high < 2 * found.value


def drifting(rng: np.random.Generator, rounds: int, *, drift: float = 0.08, noise: float = 0.01) -> list[Rate]:
    """A rate of 100 that drifts from round to round; each round has a narrow interval of its own."""
    speeds = 100 * (1 + drift * rng.standard_normal(rounds))
    return [rate_of((np.cumsum(1 + noise * rng.standard_normal(40)) / speed).tolist(), [1] * 40) for speed in speeds]


def test_rounds_give_an_interval_that_holds_in_spite_of_drift() -> None:
    rng = np.random.default_rng(3)
    held = within = 0
    for _ in range(300):
        found = combined(drifting(rng, 5))
        assert found.low is not None
        assert found.high is not None
        assert len(found.rounds) == 5
        assert found.repeats == 200
        held += found.low <= 100 <= found.high
        one = drifting(rng, 1)[0]
        assert one.low is not None
        assert one.high is not None
        within += one.low <= 100 <= one.high
    assert 0.91 <= held / 300 <= 0.99
    assert within / 300 < 0.3  # what one round alone says of itself


def test_one_and_two_rounds() -> None:
    one, other = Rate(100.0, 98.0, 102.0, 20), Rate(110.0, 108.0, 112.0, 20)
    assert combined([one]) == one
    assert combined([one, Rate(None, note="no")]) == one
    assert combined([Rate(None, note="no")]).note == "no"
    both = combined([one, other])
    assert (both.value, both.low, both.high, both.repeats) == (105.0, 98.0, 112.0, 40)
    assert combined([one, Rate(100.0, repeats=3, more=17)]).more > 0
    assert combined([one, other, Rate(500.0, 499.0, 501.0, 20)]).more > 0
