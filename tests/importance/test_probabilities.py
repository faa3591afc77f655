"""Probabilities and draws: exact where they can be counted out, else against definitions written down as loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from importance_tools import z_score
from stallfree import InputError
from stallfree.importance.plans import (
    check_share,
    draw,
    generator,
    leaning,
    pruned,
    ranks,
    selective,
    shares,
    some_known,
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


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(0, 2**32))
def test_the_number_drawn_is_the_sum_of_the_chances(chances: list[float], seed: int) -> None:
    places = ranks(np.random.default_rng(seed).random(len(chances)))
    drawn = draw(np.array(chances), places, np.random.default_rng(seed))
    assert abs(len(drawn) - sum(chances)) < 1 + 1e-9
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert {id for id, chance in enumerate(chances) if chance == 1} <= set(drawn.tolist())
    assert not {id for id, chance in enumerate(chances) if chance == 0} & set(drawn.tolist())


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


def test_all_ranges_of_ranks_take_part_in_proportion() -> None:
    rng = np.random.default_rng(4)
    places = ranks(rng.random(5120))
    chances = np.full(5120, 0.3)
    for _ in range(20):
        drawn = draw(chances, places, rng)
        counts = np.bincount(np.minimum(places[drawn] * 256, 255).astype(int), minlength=256)
        assert set(counts.tolist()) <= {5, 6, 7}  # 20 samples in each of the 256 strata: 6, and one more or less
        neighbours = np.isin(drawn + 1, drawn).mean()
        assert 0.2 < neighbours < 0.4  # by id they are independent


@given(scores)
def test_ranks(values: Any) -> None:
    places = ranks(values)
    count = len(values)
    assert sorted((places * count).round().astype(int).tolist()) == list(range(1, count + 1))
    for one in range(count):
        for other in range(count):
            assert values[one] <= values[other] or places[one] > places[other]


@given(scores, scores, st.sampled_from([0.5, 1.0, 2.0]))
def test_selective_is_its_definition(values: Any, history: Any, beta: float) -> None:
    found = selective(values, history, beta)
    for value, chance in zip(values, found, strict=True):
        below = sum(old <= value for old in history)
        assert chance == pytest.approx((below / len(history)) ** beta if len(history) else 1.0)
        if len(history) and value >= max(history):
            assert chance == 1  # none is lost at the top


def test_scores_to_compare_with() -> None:
    """A random 1,024 of those that are known, or all of them."""
    few = np.array([np.inf, 3, np.inf, 1, -np.inf], np.float32)
    assert sorted(some_known(few, np.random.default_rng(0)).tolist()) == [1, 3]
    many = np.where(np.arange(20_000) % 2 == 0, np.arange(20_000), np.inf).astype(np.float32)
    means = []
    for seed in range(100):
        some = some_known(many, np.random.default_rng(seed))
        assert len(some) == 1024
        assert np.isin(some, many[::2]).all()
        means.append(some.mean())
    assert z_score(means, many[::2].mean()) < 4
    assert np.std(means) == pytest.approx(20_000 / 12**0.5 / 32, rel=0.25)  # each is drawn by itself


@given(scores, st.floats(0.01, 0.99))
def test_pruned_is_its_definition(values: Any, share: float) -> None:
    known = [float(value) for value in values if np.isfinite(value)]
    mean = sum(known) / len(known) if known else -np.inf
    for value, chance in zip(values, pruned(values, share), strict=True):
        if value == np.inf or abs(value - mean) > 1e-6 * max(map(abs, known)):
            assert chance == (1 - share if value < mean else 1)


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


@pytest.mark.parametrize("period", [2, 5])
def test_leaning_where_the_loss_goes_by_the_id(period: int) -> None:
    """Classes that lie interleaved, more samples than are looked at one by one."""
    count = 150_000
    losses = np.random.default_rng(0).random(count) + 10 * (np.arange(count) % period == 0)
    chances = leaning(ranks(losses), np.ones(count, bool), 0.25, 0.1, 0.8)
    assert chances.mean() == pytest.approx(0.25, rel=0.005)


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.001, 1)), min_size=1, max_size=80))
def test_shares_are_means_of_strata(given: list[tuple[float, float]]) -> None:
    chances, places = (np.array(part) for part in zip(*given, strict=True))
    found = shares(chances, places)
    strata = [min(63, int(place * 64)) for place in places]
    for one, stratum in enumerate(strata):
        same = [chance for chance, other in zip(chances, strata, strict=True) if other == stratum]
        assert found[one] == pytest.approx(sum(same) / len(same))
    assert (1 / found * chances).sum() == pytest.approx(len(chances))  # the weights add up to N


def test_random_numbers_by_seed_epoch_and_use() -> None:
    first = {
        tuple(generator(seed, epoch, use).random(2))
        for seed in (-1, 0, 1, 2**63, 2**64 - 2)
        for epoch in range(10)
        for use in range(4)
    }
    assert len(first) == 200
    assert generator(5, 6, 2).random() == generator(5, 6, 2).random()


@settings(max_examples=30)
@given(st.floats() | st.integers(-3, 3) | st.booleans() | st.text(max_size=2) | st.none())
def test_shares_that_are_given(value: Any) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        assert check_share("part", value) == value
    else:
        with pytest.raises(InputError, match=r"^part=.*: give a number above 0, and 1 at most\n"):
            check_share("part", value)
