"""Probabilities and draws: exact where they can be counted out, else against definitions written down as loops."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from importance_tools import z_score
from stallfree.importance.plans import (
    draw,
    leaning,
    ranks,
    systematic,
)

STEPS = 64

finite = st.floats(-(2.0**90), 2.0**90, width=32)
scores = st.lists(finite | st.just(float("inf")), max_size=40).map(lambda values: np.array(values, np.float32))


def with_mark(mark: float) -> Any:
    """A generator whose one random number is `mark`."""
    return SimpleNamespace(random=lambda: mark)


@given(st.lists(st.integers(0, STEPS), max_size=30), st.randoms(use_true_random=False))
def test_systematic_draws_each_with_exactly_its_chance(chances: list[int], random: Any) -> None:
    """With chances in 64ths, the 64 places that the marks can have decide all there is."""
    order = np.array(random.sample(range(len(chances)), len(chances)), np.int64)
    times = np.zeros(len(chances), int)
    for step in range(STEPS):
        drawn = systematic(np.array(chances) / STEPS, order, with_mark((step + 0.5) / STEPS))
        assert len(set(drawn.tolist())) == len(drawn)
        assert len(drawn) in (sum(chances) // STEPS, -(-sum(chances) // STEPS))
        places = [order.tolist().index(id) for id in drawn]
        assert places == sorted(places)
        times[drawn] += 1
    assert times.tolist() == chances


def test_a_draw_has_the_chances_that_it_was_given() -> None:
    rng = np.random.default_rng(3)
    chances = np.clip(rng.random(80) * 1.3, 0.05, 1)
    places = ranks(rng.random(80))
    drawn = np.zeros((2000, 80))
    for number in range(2000):
        drawn[number, draw(chances, places, rng)] = 1
    sure = chances == 1
    assert drawn[:, sure].all()
    assert z_score(drawn[:, ~sure], chances[~sure]) < 4.5
    assert z_score(drawn[:, ~sure], chances[~sure] ** 1.2) > 6  # the test tells these apart


@given(scores)
def test_ranks(values: Any) -> None:
    places = ranks(values)
    count = len(values)
    assert sorted((places * count).round().astype(int).tolist()) == list(range(1, count + 1))
    for one in range(count):
        for other in range(count):
            assert values[one] <= values[other] or places[one] > places[other]


@given(
    st.integers(1, 300),
    st.floats(0.01, 1.2),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_leaning(count: int, mean: float, lowest: float, lean: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    places, some = ranks(rng.random(count)), rng.random(count) < 0.7
    chances = leaning(places, some, mean, lowest, lean)
    assert chances.min() >= lowest
    assert chances.max() <= 1
    assert (np.diff(chances[np.argsort(places)]) >= 0).all()
    if some.any():
        assert chances[some].mean() == pytest.approx(np.clip(mean, lowest, 1), rel=2e-3)
    if lean == 0:
        assert np.ptp(chances) < 1e-9
