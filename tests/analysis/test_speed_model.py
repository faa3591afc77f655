"""The model of speed, and the rates that go into it, on a clock of the test's own."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.analysis import measure
from stallfree.analysis.measure import combined, measure_rate, next_half_width
from stallfree.analysis.model import Rates, Setting

rate = st.floats(10, 1e5)


def job(g: float, p: float, s: float, hits: float = 0.0, workers: int = 2, overlap: bool = True) -> Setting:
    return Setting(Rates(g, p, p, s, 1e9), hits, 2, workers, overlap, None, None, 100)


def test_law() -> None:
    assert [job(400, 300, 100, hits).throughput for hits in (0, 0.5, 1)] == [100, pytest.approx(200), 300]
    assert job(100, 300, 200).throughput == 100
    assert job(400, 300, 100, overlap=False).throughput == pytest.approx(75), "a worker alternates fetch and prep"
    assert job(100, 100, 100, workers=0).throughput == pytest.approx(100 / 3)


@given(rate, rate, rate)
def test_the_knee_is_where_fetching_stops_to_bind(g: float, p: float, s: float) -> None:
    limit = min(g, p) / 1.02
    exact = (1 / limit - 1 / s) / (1 / 1e9 - 1 / s) if s < limit else 0.0
    assert job(g, p, s).enough_cache() == pytest.approx(exact, abs=0.0101)


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
    means = [combined(list(map(float, row))) for row in rounds[:, :3]]
    assert np.mean([mean.low < 100 < mean.high for mean in means]) > 0.92  # type: ignore[operator]
    inside = [abs(row[3] - row[:3].mean()) < next_half_width(row[:3]) for row in rounds]
    assert np.mean(inside) > 0.92, "the next figure is in the prediction interval"


def test_what_is_too_uncertain_has_no_interval() -> None:
    for rounds in ([80.0], [80.0, 80.0], [10.0, 100.0, 10.0]):
        mean = combined(rounds)
        assert (mean.value, mean.low, mean.high) == (pytest.approx(np.mean(rounds)), None, None)
    assert combined([None, None], "no file").note == "no file"
    assert combined([None, 4.0, 4.0, 4.0]).rounds == [4.0, 4.0, 4.0]
