"""The window of a Smart Cache against a model that is nothing but a queue."""

from __future__ import annotations

import math
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree import InputError
from stallfree.datasets.window import WindowPlan, replace_count


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int, float]:
    total = draw(st.integers(1, 60))
    size = draw(st.integers(1, total))
    rate = draw(st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.3, 0.5, 1.0]) | st.floats(0, 1))
    return total, size, rate


def as_queue(order: list[int], size: int, replace: int, epochs: int) -> list[list[int]]:
    """The windows of some epochs: the first leave, as many join from an endless circle."""
    endless = deque(order)
    endless.rotate(-size)
    window = deque(order[:size])
    seen = []
    for _ in range(epochs):
        seen.append(list(window))
        for _ in range(replace):
            window.popleft()
            window.append(endless[0])
            endless.rotate(-1)
    return seen


@given(windows(), st.integers(0, 2**70), st.booleans())
def test_it_is_a_queue(numbers: tuple[int, int, float], seed: int, shuffle: bool) -> None:
    total, size, rate = numbers
    replace = replace_count(size, rate, total)
    plan = WindowPlan(total, size, replace, seed=seed, shuffle=shuffle)
    order = plan.sequence(0, total).tolist()
    assert sorted(order) == list(range(total))
    assert shuffle or order == list(range(total))
    epochs, before = 2 * total + 3, plan.window(0).tolist()
    for epoch, expected in enumerate(as_queue(order, size, replace, epochs)):
        ids = plan.window(epoch * replace).tolist()
        assert sorted(ids) == sorted(expected)
        assert len(set(ids)) == size
        if replace < size:
            stayed = set(expected) & set(before)
            assert all(ids.index(id) == before.index(id) for id in stayed)  # who stays keeps its position
        before = ids


@given(windows())
def test_after_a_round_every_sample_was_seen_equally_often(numbers: tuple[int, int, float]) -> None:
    total, size, rate = numbers
    replace = replace_count(size, rate, total)
    if replace == 0:
        return
    plan = WindowPlan(total, size, replace)
    to_see_all = -(-(total - size) // replace) + 1
    early = {id for epoch in range(to_see_all) for id in plan.window(epoch * replace).tolist()}
    assert early == set(range(total))
    if to_see_all > 1:
        before = {id for epoch in range(to_see_all - 1) for id in plan.window(epoch * replace).tolist()}
        assert len(before) < total
    counts = Counter(id for epoch in range(total) for id in plan.window(epoch * replace).tolist())
    step = math.gcd(replace, total)  # `total` epochs are whole rounds, which begin at every multiple of this
    assert set(counts.values()) <= {size // step * step, -(-size // step) * step}
    assert sum(counts.values()) == size * total


def test_the_example_of_the_manual() -> None:
    """100 samples, 50 in the window, a tenth replaced: all seen after 11 epochs, each 10 times after 20."""
    plan = WindowPlan(100, 50, replace_count(50, 0.1, 100))
    windows = [plan.window(5 * epoch).tolist() for epoch in range(20)]
    assert len(set().union(*windows[:11])) == 100
    assert len(set().union(*windows[:10])) == 95
    assert set(Counter(id for window in windows for id in window).values()) == {10}


@pytest.mark.parametrize(
    ("size", "rate", "total", "expected"),
    [(50, 0.1, 100, 5), (30, 0.1, 100, 3), (3, 0.1, 100, 1), (10, 0.25, 100, 3), (50, 0, 100, 0), (50, 1, 60, 10)],
)
def test_replace_count(size: int, rate: float, total: int, expected: int) -> None:
    assert replace_count(size, rate, total) == expected


@given(st.integers(1, 5), st.integers(5, 40), st.integers(0, 9))
def test_hosts_share_the_samples(hosts: int, total: int, seed: int) -> None:
    parts = [WindowPlan(total, 1, 0, seed=seed, part=(host, hosts)) for host in range(hosts)]
    ids = [id for plan in parts for id in plan.sequence(0, plan.total).tolist()]
    assert sorted(ids) == list(range(total))
    assert max(plan.total for plan in parts) - min(plan.total for plan in parts) <= 1


@given(windows(), st.integers(0, 50))
def test_window_and_others_are_all(numbers: tuple[int, int, float], start: int) -> None:
    total, size, rate = numbers
    plan = WindowPlan(total, size, replace_count(size, rate, total), part=(0, 1))
    assert sorted([*plan.window(start).tolist(), *plan.others(start).tolist()]) == list(range(total))
    shuffled = plan.shuffled(plan.window(start), 3)
    assert sorted(shuffled.tolist()) == sorted(plan.window(start).tolist())
    assert (shuffled == plan.shuffled(plan.window(start), 3)).all()


def test_what_makes_no_window() -> None:
    with pytest.raises(InputError, match="a window of 5 samples of which 0 are replaced does not fit over 4"):
        WindowPlan(4, 5, 0)
    with pytest.raises(InputError, match="a window of 3 samples of which 2 are replaced"):
        WindowPlan(4, 3, 2)
    with pytest.raises(InputError, match=r"part=\(2, 2\)"):
        WindowPlan(4, 1, 0, part=(2, 2))
