"""The plan of a window against a model that is nothing but a queue."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.datasets.window import WindowPlan, replace_count


@st.composite
def plans(draw: st.DrawFn) -> WindowPlan:
    samples = draw(st.integers(1, 60))
    size = draw(st.integers(1, samples))
    rate = draw(st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.3, 0.5, 1.0]) | st.floats(0, 1))
    seed, shuffle = draw(st.integers(-5, 2**70)), draw(st.booleans())
    return WindowPlan(samples, size, replace_count(size, rate, samples), seed, shuffle)


@given(plans())
def test_it_is_a_queue(plan: WindowPlan) -> None:
    order = plan.sequence(0, plan.samples).tolist()
    assert sorted(order) == list(range(plan.samples))
    assert plan.shuffle or order == list(range(plan.samples))
    endless, queue = deque(order), deque(order[: plan.size])
    endless.rotate(-plan.size)
    before = plan.window(0).tolist()
    for epoch in range(2 * plan.samples + 3):
        ids = plan.window(epoch * plan.replace).tolist()
        assert sorted(ids) == sorted(queue)
        if plan.replace < plan.size:
            assert all(ids.index(id) == before.index(id) for id in {*ids} & {*before})  # who stays keeps its position
        before = ids
        for _ in range(plan.replace):
            queue.popleft()
            queue.append(endless[0])
            endless.rotate(-1)


@pytest.mark.parametrize(("size", "rate", "total", "expected"), [
    (50, 0.1, 99, 5), (100, 0.07, 200, 7), (3, 0.1, 99, 1), (10, 0.25, 99, 3), (50, 0, 99, 0), (50, 1, 60, 10),
])  # fmt: skip
def test_replace_count(size: int, rate: float, total: int, expected: int) -> None:
    assert replace_count(size, rate, total) == expected


@given(st.integers(1, 5), st.integers(5, 40), st.booleans())
def test_hosts_share_the_samples_whatever_their_seeds(hosts: int, samples: int, shuffle: bool) -> None:
    parts = [WindowPlan(samples, 1, 0, host, shuffle, (host, hosts)) for host in range(hosts)]
    assert sorted(id for plan in parts for id in plan.sequence(0, plan.total).tolist()) == list(range(samples))
    assert max(plan.total for plan in parts) - min(plan.total for plan in parts) <= 1
