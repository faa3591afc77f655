"""The simulation against closed forms, against the figures of the article, and against itself."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree import InputError
from stallfree.analysis.simulate import Pipeline, compare, simulate

ARTICLE = {"loaders": 3, "transfer": 0.015, "compute": 0.030}


def test_the_article() -> None:
    """80 ms of loading: 20 against 29 batches in the first second; 160 ms: 16 against 17."""
    fast = compare(Pipeline(load=0.080, **ARTICLE), seeds=6)
    assert [figure["mean"] for figure in fast["first"]] == [pytest.approx(20.1, abs=0.4), pytest.approx(29.9, abs=0.4)]
    assert [figure["mean"] for figure in fast["steady"]] == [pytest.approx(law, rel=0.01) for law in fast["law"]]
    assert fast["advice"] == "prefetch gains 50%: copy and step overlap"
    slow = compare(Pipeline(load=0.160, **ARTICLE), seeds=16)
    assert [figure["mean"] for figure in slow["first"]] == [pytest.approx(16.0, abs=0.3), pytest.approx(16.15, abs=0.3)]
    assert slow["law"] == [18.75, 18.75]
    assert slow["advice"].startswith("prefetch gains nothing here: add loaders (6 would")
    assert "the loaders are the limit" in compare(Pipeline(3, 0.1, 0.02, 0.03), seeds=1)["advice"]
    assert "takes no time beside" in compare(Pipeline(9, 0.1, 0, 0.03), seeds=1)["advice"]
    for comparison, means in ((fast, (20, 29)), (slow, (16, 17))):
        for (least, most), figure in zip(comparison["singles"], means, strict=True):
            assert least <= figure <= most, "single seeds give the article's figures"


@pytest.mark.parametrize("load", [15e-6, 30.0])
def test_the_steady_state_at_any_scale(load: float) -> None:
    """The law holds for microseconds and for minutes, for many loaders that deliver in bursts too."""
    for pipeline in (Pipeline(4, load, load / 8, load / 3), Pipeline(48, load, load / 200, load / 100, variation=0)):
        found = compare(pipeline, seeds=2, seconds=load)
        assert [figure["mean"] for figure in found["steady"]] == [pytest.approx(law, rel=0.02) for law in found["law"]]


def test_what_had_not_ended_is_known_too() -> None:
    pipeline = Pipeline(load=0.160, **ARTICLE)
    whole, part = simulate(pipeline, seconds=2, seed=3), simulate(pipeline, seconds=1, seed=3)
    assert set(part.events) == {event for event in whole.events if event.start < 1}
    assert part.events[-1].end >= 1
    assert part.batches() == sum(event.actor == "device" and event.end < 1 for event in whole.events)


def test_queues_of_finite_length() -> None:
    """By hand: two loaders of 1 s, a copy of 1 s, a step of 2 s, four places in the queue and one on the device."""
    run = simulate(Pipeline(2, 1.0, 1.0, 2.0, prefetch=True, variation=0), seconds=7)
    steps = [(event.start, event.end, event.batch) for event in run.events if event.actor == "device"]
    assert steps == [(2, 4, 0), (4, 6, 1), (6, 8, 2)]
    loads = {event.batch: event.start for event in run.events if event.what == "load"}
    assert loads == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3, 8: 4, 9: 4, 10: 6}


times = st.floats(0.005, 0.3)


@settings(max_examples=8)
@given(st.integers(1, 6), times, times, times, st.booleans())
def test_the_law_of_constant_times(loaders: int, load: float, transfer: float, compute: float, prefetch: bool) -> None:
    pipeline = Pipeline(loaders, load, transfer, compute, prefetch, variation=0)
    assert simulate(pipeline, seconds=60).batches(10) == pytest.approx(50 * pipeline.law, abs=loaders + 2)


@settings(max_examples=8)
@given(st.integers(1, 5), times, times, times, st.booleans(), st.integers(0, 99))
def test_what_always_holds(loaders: int, load: float, transfer: float, compute: float, ahead: bool, seed: int) -> None:
    """One thing at a time, each batch loaded before it is copied and copied before it is computed, none lost."""
    run = simulate(Pipeline(loaders, load, transfer, compute, ahead), seconds=10, seed=seed)
    assert run == simulate(run.pipeline, seconds=10, seed=seed)
    ends: dict[str, float] = {}
    for event in sorted(run.events, key=lambda event: event.start):
        assert event.start >= ends.get(event.actor, 0.0) - 1e-9
        ends[event.actor] = event.end
    done: dict[str, dict[int, Any]] = {"load": {}, "copy": {}, "compute": {}}
    for event in run.events:
        assert done[event.what].setdefault(event.batch, event) is event
    for before, after in (("load", "copy"), ("copy", "compute")):
        assert all(done[before][batch].end <= event.start + 1e-9 for batch, event in done[after].items())
    if not ahead:
        both = sorted((e for e in run.events if e.what != "load"), key=lambda e: e.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(both))


def test_bad_input() -> None:
    wrong = {(-0.1, 0.1, 0.1): r"load=-0\.1", (0, 0.1, 0.1): "load=0: give a number above 0"}
    wrong |= {(0.1, 0, 0): "above 0 seconds", (0.1, float("nan"), 0): "transfer=nan"}
    for times, message in wrong.items():
        with pytest.raises(InputError, match=message):
            Pipeline(1, *times)
    with pytest.raises(InputError, match=r"seconds=nan: give a number above 0"):
        simulate(Pipeline(1, 1, 1, 1), seconds=float("nan"))
    with pytest.raises(InputError, match=r"seconds=1 are .* batches: give fewer seconds or seeds"):
        compare(Pipeline(8, 15e-6, 1e-6, 2e-6))
