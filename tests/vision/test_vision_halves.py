"""A random step that names its halves: the first one may be cached."""

import random
from functools import partial
from typing import Any

import stallfree as sf


def double(value: int) -> int:
    return 2 * value


@sf.mark_random
def add_some(value: int) -> int:
    return value + random.randint(1, 1000)


@sf.mark_random
class DoubleAndAdd:
    """Both at once."""

    def __call__(self, value: int) -> int:
        return 2 * value + random.randint(1, 1000)

    def halves(self) -> tuple[Any, Any]:
        return double, add_some


class AddTwice(DoubleAndAdd):
    def __call__(self, value: int) -> int:
        return super().__call__(value) + random.randint(1, 1000)


def test_the_first_half_ends_the_part_that_may_be_cached() -> None:
    positive = sf.mark_deterministic(partial(abs))
    whole = sf.Compose([positive, DoubleAndAdd(), add_some, DoubleAndAdd()])
    parts = sf.split(whole)
    assert list(parts.deterministic) == [positive, double]
    assert list(parts.random)[:2] == [add_some, add_some]
    assert isinstance(parts.random.transforms[2], DoubleAndAdd)  # what comes later stays whole
    assert [verdict.reason for verdict in parts.verdicts][1:3] == ["halves", "halves"]
    for value in range(-5, 5):
        random.seed(value)
        expected = whole(value)
        random.seed(value)
        assert parts.random(parts.deterministic(value)) == expected


def test_halves_do_not_stand_for_a_subclass_that_does_more_or_a_step_that_counts_as_deterministic() -> None:
    assert len(sf.split(AddTwice()).deterministic) == 0
    step = sf.mark_deterministic(DoubleAndAdd())
    assert list(sf.split(step).deterministic) == [step]
