"""The model of speed: its law, and what finite queues lose, against a simulation that knows nothing of it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree.analysis.model import Loading, Rates, Setting, law, sustained

rate = st.floats(10, 1e5)


def rates(compute: float = 1e9, prep: float = 1e9, storage: float = 1e9, cache: float = 1e9) -> Rates:
    return Rates(compute, prep, prep, storage, cache)


@given(rate, rate, st.floats(0, 1))
def test_fetch_rate_is_the_weighted_harmonic_mean(storage: float, cache: float, hits: float) -> None:
    found = rates(storage=storage, cache=cache).fetch_at(hits)
    assert 1 / found == pytest.approx(hits / cache + (1 - hits) / storage)


def test_law_names_what_binds() -> None:
    assert law(rates(100, 300, 200), 0.0) == (100, "compute")
    assert law(rates(400, 300, 500), 0.0) == (300, "prep")
    assert law(rates(400, 300, 100), 0.0) == (100, "fetch")
    assert law(rates(400, 300, 100), 1.0) == (300, "prep")
    rate, binds = law(rates(400, 300, 100), 0.0, overlap=False)
    assert (rate, binds) == (pytest.approx(75.0), "fetch")


@given(rate, rate, rate, st.floats(0, 1), st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=20)
def test_queues_never_beat_the_law(g: float, p: float, s: float, hits: float, workers: int, factor: int) -> None:
    one = rates(g, p, s, 1e6)
    for overlap in (True, False):
        limit, _ = law(one, hits, overlap=True)
        assert sustained(one, hits, Loading(32, workers, factor * workers, overlap)) <= limit * (1 + 1e-9)


def test_a_short_look_ahead_loses_only_at_the_knee() -> None:
    for one, hits in ((rates(1000, 5000, 300), 0.2), (rates(200, 5000, 3000), 0.5), (rates(9000, 700, 900), 0.9)):
        assert sustained(one, hits, Loading(32, 2, 4, True)) == pytest.approx(law(one, hits)[0], rel=0.01)
    knee = rates(1000, 1e6, 500)  # F = G at half the hits
    short, long = (sustained(knee, 0.5, Loading(4, 1, ahead, True)) for ahead in (1, 64))
    assert short < 0.95 * 1000
    assert 0.97 * 1000 < long <= 1000


def test_no_workers_means_one_after_the_other() -> None:
    assert sustained(rates(100, 100, 100), 0.0, Loading(8, 0, 1, True)) == pytest.approx(100 / 3)


@given(rate, rate, rate)
def test_the_knee_is_where_fetching_stops_to_bind(g: float, p: float, s: float) -> None:
    setting = Setting(rates(g, p, s, 1e9), Loading(32, 2, 4, True), 0.0, 2, None, None, 100)
    limit = min(g, p)
    exact = (1 / limit - 1 / s) / (1 / 1e9 - 1 / s) if s < limit else 0.0
    assert setting.enough_cache() == pytest.approx(exact, abs=0.0101)
    assert replace(setting, rates=Rates(1000, 1000, 1000, 10, 500)).enough_cache() is None, "the cache is too slow"
