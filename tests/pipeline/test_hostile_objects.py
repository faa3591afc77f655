"""Data sets and steps that refer to objects whose attributes cannot be looked at: they are cached all the same."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stallfree as sf


class Hostile:
    """Raises for any attribute that it does not have, as some libraries' namespaces do."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")


HOSTILE = Hostile()


class Holds:
    """Keeps it in an attribute, in containers and in its class."""

    of_class = HOSTILE

    def __init__(self) -> None:
        self.kept = {"one": [HOSTILE, (HOSTILE,)]}

    def __call__(self, value: Any) -> Any:
        return value + (HOSTILE is None) + (self.of_class is None) + len(self.kept)


class Itself(Hostile):
    """Is one."""

    def __call__(self, value: Any) -> Any:
        return value + 1


def by_default(value: Any, kept: Any = HOSTILE) -> Any:
    return value + (kept is None)


def by_closure() -> Callable[[Any], Any]:
    kept = Hostile()
    return lambda value: value + (kept is None)


STEPS = {
    "holds": Holds(),
    "itself": Itself(),
    "default": by_default,
    "closure": by_closure(),
    "partial": functools.partial(by_default, kept=Hostile()),
}


class Numbers:
    """Arrays, with a step in `__getitem__`."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __len__(self) -> int:
        return 6

    def __getitem__(self, id: int) -> Any:
        if id >= 6:
            raise IndexError(id)
        return self.step(np.full(4, id))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_that_refers_to_it_is_cached(step: Any) -> None:
    plain = sf.CachedDataset(list(map(np.array, range(6))), transform=step, capacity="1MiB")
    whole = sf.CachedDataset(Numbers(step), capacity="1MiB")
    with plain, whole, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert [int(value) for value in plain] == [int(step(np.array(id))) for id in range(6)]
        assert [value.tolist() for value in whole] == [step(np.full(4, id)).tolist() for id in range(6)]
        assert sum(1 for _ in sf.DataLoader(whole, 3)) == 2
