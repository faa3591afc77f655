"""The simulation against closed forms, against the figures of the article, and against itself."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree import InputError, MissingExtraError
from stallfree.analysis.simulate import Pipeline, Run, compare, simulate

ARTICLE = {"loaders": 3, "transfer": 0.015, "compute": 0.030}


def test_the_article() -> None:
    """80 ms of loading: 20 against 29 batches in the first second; 160 ms: 16 against 17."""
    fast = compare(Pipeline(load=0.080, **ARTICLE), seeds=30)
    assert [figure.mean for figure in fast.first_second] == [pytest.approx(20.1, abs=0.4), pytest.approx(29.9, abs=0.4)]
    assert [figure.mean for figure in fast.steady] == [pytest.approx(law, rel=0.01) for law in fast.law]
    assert fast.advice == "prefetch gains 50%: copy and step overlap"
    slow = compare(Pipeline(load=0.160, **ARTICLE), seeds=30)
    assert [figure.mean for figure in slow.first_second] == [
        pytest.approx(16.0, abs=0.3),
        pytest.approx(16.15, abs=0.3),
    ]
    assert slow.law == (18.75, 18.75)
    assert slow.advice.startswith("prefetch gains nothing here: add loaders (6 would")
    singles = {
        (load, prefetch): {
            simulate(Pipeline(load=load, prefetch=prefetch, **ARTICLE), seed=seed).batches() for seed in range(30)
        }
        for load in (0.080, 0.160)
        for prefetch in (False, True)
    }
    assert 20 in singles[0.080, False]
    assert 29 in singles[0.080, True]
    assert 16 in singles[0.160, False]
    assert 17 in singles[0.160, True]


@pytest.mark.parametrize(("load", "expected"), [(0.080, (20, 30)), (0.160, (15, 15))])
def test_constant_times(load: float, expected: tuple[int, int]) -> None:
    runs = [simulate(Pipeline(load=load, prefetch=prefetch, variation=0, **ARTICLE)) for prefetch in (False, True)]
    assert tuple(run.batches() for run in runs) == expected


times = st.floats(0.005, 0.3)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), times, times, times, st.booleans())
def test_the_law_of_constant_times(loaders: int, load: float, transfer: float, compute: float, prefetch: bool) -> None:
    pipeline = Pipeline(loaders, load, transfer, compute, prefetch, variation=0)
    run = simulate(pipeline, seconds=60)
    assert run.batches(10) == pytest.approx(50 * pipeline.law, abs=loaders + 2)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), times, times, times, st.booleans(), st.integers(1, 3), st.integers(0, 99))
def test_what_holds_in_every_run(
    loaders: int, load: float, transfer: float, compute: float, prefetch: bool, depth: int, seed: int
) -> None:
    run = simulate(Pipeline(loaders, load, transfer, compute, prefetch, depth), seconds=10, seed=seed)
    assert run == simulate(run.pipeline, seconds=10, seed=seed)
    check(run)


def check(run: Run) -> None:
    """One thing at a time, each batch loaded before it is copied and copied before it is computed, none lost."""
    ends: dict[str, float] = {}
    for event in sorted(run.events, key=lambda event: event.start):
        assert event.start >= ends.get(event.actor, 0.0) - 1e-9
        ends[event.actor] = event.end
    done: dict[str, dict[int, Any]] = {"load": {}, "copy": {}, "device": {}}
    for event in run.events:
        stage = "load" if event.actor.startswith("loader") else event.actor
        assert event.batch not in done[stage]
        done[stage][event.batch] = event
    for before, after in (("load", "copy"), ("copy", "device")):
        for batch, event in done[after].items():
            assert done[before][batch].end <= event.start + 1e-9
    if not run.pipeline.prefetch:
        both = sorted((e for e in run.events if not e.actor.startswith("loader")), key=lambda e: e.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(both))


def test_advice() -> None:
    assert "the loaders are the limit" in compare(Pipeline(3, 0.1, 0.02, 0.03), seeds=2).advice
    assert "takes no time beside" in compare(Pipeline(9, 0.1, 0, 0.03), seeds=2).advice


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.1, 0.1, 0.1), "loaders=0"),
        ((1, -0.1, 0.1, 0.1), r"load=-0\.1"),
        ((1, 0, 0.1, 0.1), "above 0 seconds"),
        ((1, 0.1, 0, 0), "above 0 seconds"),
        ((1, 0.1, float("nan"), 0), "transfer=nan"),
        ((1, 0.1, 0.1, 0.1, False, 0), "depth=0"),
    ],
)
def test_bad_input(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Pipeline(*arguments)


def test_no_seeds() -> None:
    with pytest.raises(InputError, match="seeds=0"):
        compare(Pipeline(1, 0.1, 0.1, 0.1), seeds=0)


def test_without_simpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(MissingExtraError, match="simulate"):
        simulate(Pipeline(1, 0.1, 0.1, 0.1))
