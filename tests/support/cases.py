"""Cases of parametrized tests."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def half(*arguments: Iterable[Any]) -> list[Any]:
    """All combinations of the arguments' values, of which every second one is slow.

    Of three arguments or more, any two values come together in an everyday case; of two arguments, each value comes.
    """
    cases = []
    for places in itertools.product(*(enumerate(values) for values in arguments)):
        values = [value for _, value in places]
        slow = sum(place for place, _ in places) % 2
        cases.append(pytest.param(*values, marks=pytest.mark.slow) if slow else pytest.param(*values))
    return cases
