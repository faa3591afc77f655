"""The model of speed: its law, and what finite queues lose, against a simulation that knows nothing of it."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree import InputError
from stallfree.analysis.model import Loading, Rates, knee, law, sustained

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


def test_away_from_the_knee_queues_lose_nothing() -> None:
    loading = Loading(32, 2, 4, True)
    for one, hits in ((rates(1000, 5000, 300), 0.2), (rates(200, 5000, 3000), 0.5), (rates(9000, 700, 900), 0.9)):
        assert sustained(one, hits, loading) == pytest.approx(law(one, hits)[0], rel=0.01)


def test_at_the_knee_a_short_look_ahead_loses_and_a_long_one_does_not() -> None:
    one = rates(1000, 1e6, 500)  # F = G at half the hits
    short, long = (sustained(one, 0.5, Loading(4, 1, ahead, True)) for ahead in (1, 64))
    assert short < 0.95 * 1000
    assert 0.97 * 1000 < long <= 1000


def by_events(missed: list[int], one: Rates, loading: Loading) -> float:
    """Samples/s of the same loader, as a simulation by events with one heap."""
    size, step = loading.batch_size, loading.batch_size / one.compute
    heap: list[tuple[float, int, str, int]] = []
    line, worker_free = 0.0, [0.0] * loading.workers
    ready: dict[int, float] = {}
    next_out, device_free, asked = 0, 0.0, 0
    outs: list[float] = []

    def ask(now: float) -> None:
        nonlocal asked, line
        if asked == len(missed):
            return
        line = max(line, now) + missed[asked] / one.storage
        heapq.heappush(heap, (line, asked, "fetched", asked))
        asked += 1

    for _ in range(loading.ahead):
        ask(0.0)
    while next_out < len(missed):
        now, _, what, number = heapq.heappop(heap)
        if what == "fetched":
            worker = worker_free.index(min(worker_free))
            busy = missed[number] / one.prep + (size - missed[number]) / one.prep_hit
            worker_free[worker] = max(worker_free[worker], now) + loading.workers * busy
            heapq.heappush(heap, (worker_free[worker], number, "prepared", number))
        elif what == "prepared":
            ready[number] = now
        while next_out in ready and max(ready[next_out], device_free) <= now:
            outs.append(now)
            device_free = now + step
            heapq.heappush(heap, (device_free, -1, "stepped", -1))
            del ready[next_out]
            next_out += 1
            ask(now)
    warm = len(missed) // 4
    return size * (len(outs) - 1 - warm) / (outs[-1] - outs[warm])


@pytest.mark.parametrize(("hits", "workers", "ahead"), [(0.3, 2, 4), (0.5, 1, 2), (0.55, 4, 8), (0.8, 2, 4)])
def test_queues_follow_a_simulation_by_events(hits: float, workers: int, ahead: int) -> None:
    one, loading = Rates(1000, 1100, 1200, 500, 50_000), Loading(16, workers, ahead, True)
    missed = np.random.default_rng(5).binomial(16, 1 - hits, 3000).tolist()
    assert sustained(one, hits, loading) == pytest.approx(
        min(law(one, hits)[0], by_events(missed, one, loading)), rel=0.01
    )


def test_no_workers_means_one_after_the_other() -> None:
    assert sustained(rates(100, 100, 100), 0.0, Loading(8, 0, 1, True)) == pytest.approx(100 / 3)


@given(rate, rate, rate)
def test_knee_is_where_fetching_stops_to_bind(g: float, p: float, s: float) -> None:
    one = rates(g, p, s, 1e9)
    found = knee(one)
    assert found is not None
    limit = min(g, p)
    assert found == pytest.approx(max(0.0, (1 / limit - 1 / s) / (1 / 1e9 - 1 / s)) if s < limit else 0.0, abs=1e-4)


def test_no_knee_when_the_cache_is_too_slow() -> None:
    assert knee(Rates(1000, 1000, 1000, 10, 500)) is None


def test_bad_shares() -> None:
    for hits in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match="share of hits"):
            rates().fetch_at(hits)
