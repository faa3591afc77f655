"""A random step that names its halves: the first one may be cached."""

import random
from typing import Any

import pytest

import stallfree as sf
from stallfree.pipeline.classify import Verdict, split
from stallfree.pipeline.compose import OnItem


def double(value: int) -> int:
    return 2 * value


def add_some(value: int) -> int:
    return value + random.randint(1, 1000)


class DoubleAndAdd:
    """Both at once."""

    def __call__(self, value: int) -> int:
        return 2 * value + random.randint(1, 1000)

    def halves(self) -> tuple[Any, Any]:
        return double, add_some


class AddTwice(DoubleAndAdd):
    def __call__(self, value: int) -> int:
        return super().__call__(value) + random.randint(1, 1000)


class Named(DoubleAndAdd):
    """Does the same as the class above."""


sf.mark_random(DoubleAndAdd)
sf.mark_random(add_some)
NAME = DoubleAndAdd.__module__


def names(parts: Any) -> tuple[list[str], list[str]]:
    return [str(step) for step in parts.deterministic], [str(step) for step in parts.random]


@pytest.mark.parametrize("step", [DoubleAndAdd(), Named()])
def test_the_first_half_ends_the_part_that_may_be_cached(step: Any) -> None:
    parts = split(sf.Compose([sf.mark_deterministic(abs), step, add_some, DoubleAndAdd()]))
    assert list(parts.deterministic) == [abs, double]
    assert list(parts.random)[:2] == [add_some, add_some]
    assert isinstance(parts.random.transforms[2], DoubleAndAdd)  # what comes later stays whole
    assert [verdict.random for verdict in parts.verdicts] == [False, False, True, True, True]
    assert parts.verdicts[1:3] == (
        Verdict(f"{NAME}.double", False, "halves"),
        Verdict(f"{NAME}.add_some", True, "halves"),
    )
    lines = str(parts).splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["cached", "deterministic", "halves"],
        ["fresh", "random", "halves"],
    ]


def test_the_two_are_the_whole() -> None:
    whole = sf.Compose([abs, DoubleAndAdd(), add_some])
    parts = split(whole, probe=-3)
    for value in range(-5, 5):
        random.seed(value)
        expected = whole(value)
        random.seed(value)
        assert parts.random(parts.deterministic(value)) == expected


def test_in_one_element_of_a_sample() -> None:
    parts = split(OnItem("image", DoubleAndAdd()))
    assert parts.deterministic({"image": 4, "label": 1}) == {"image": 8, "label": 1}
    random.seed(1)
    expected = add_some(8)
    random.seed(1)
    assert parts.random({"image": 8}) == {"image": expected}
    assert [(verdict.step, verdict.reason) for verdict in parts.verdicts] == [
        (f"OnItem('image', {NAME}.double)", "halves"),
        (f"OnItem('image', {NAME}.add_some)", "halves"),
    ]


def test_halves_do_not_stand_for_a_subclass_that_does_more() -> None:
    parts = split(AddTwice())
    assert len(parts.deterministic) == 0
    assert len(parts.random) == len(parts.verdicts) == 1


def test_a_step_that_counts_as_deterministic_stays_whole() -> None:
    step = sf.mark_deterministic(DoubleAndAdd())
    parts = split(step)
    assert list(parts.deterministic) == [step]
    assert len(parts.random) == 0
