"""Rates and their intervals, on a clock of the test's own."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from stallfree.analysis import measure
from stallfree.analysis.measure import combined, measure_rate, next_half_width


@pytest.mark.parametrize(
    ("times", "warm_up", "rate", "lasts"),
    [
        ([4.0, *[0.1] * 50], 1, 80, 6.0),  # the warm-up takes longer than the run, and is not timed
        ([0.1] * 50, 0, 80, 2.0),
        ([0.5] * 3, 1, 16, 1.5),  # the batches end early
        ([6.0] * 9, 10, 8 / 6, 6.0),  # slow batches are timed in spite of a long warm-up
        ([0.5], 1, None, 0.5),
        ([], 0, None, 0.0),
    ],
)
def test_what_is_timed(
    times: list[float], warm_up: int, rate: float | None, lasts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def batches() -> Iterator[int]:
        for each in times:
            now[0] += each
            yield 8

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert measure_rate(batches(), warm_up, 2.0) == (rate and pytest.approx(rate))
    assert now[0] - 100 == pytest.approx(lasts, abs=0.11)


def test_the_intervals_of_rounds_hold_the_truth_nearly_always() -> None:
    rng = np.random.default_rng(3)
    rounds = 100 * (1 + 0.05 * rng.standard_normal((400, 4)))
    rates = [combined(list(map(float, row))) for row in rounds[:, :3]]
    assert np.mean([rate.low < 100 < rate.high for rate in rates]) > 0.92  # type: ignore[operator]
    inside = [abs(row[3] - row[:3].mean()) < next_half_width(row[:3]) for row in rounds]
    assert np.mean(inside) > 0.92, "the next figure is in the prediction interval"


def test_what_is_too_uncertain_has_no_interval() -> None:
    for rounds in ([80.0], [80.0, 80.0], [10.0, 100.0, 10.0]):
        rate = combined(rounds)
        assert (rate.value, rate.low, rate.high) == (pytest.approx(np.mean(rounds)), None, None)
    assert combined([None, None], "no file").note == "no file"
    assert combined([None, 4.0, 4.0, 4.0]).rounds == [4.0, 4.0, 4.0]
    assert all(combined(list(rounds)).low for rounds in itertools.permutations([80.0, 82.0, 81.0]))
