"""Verdicts by outcome: a sample is made twice, and compared after each step.

This detects every source of randomness, wherever it is: a generator in a class attribute or another module, one that a
library makes, C code, a clock. Draws from the global generators are also detected by the states of these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from stallfree.pipeline.classify.libraries import may_draw
from stallfree.pipeline.classify.same import same
from stallfree.pipeline.compose import Transform, as_call
from stallfree.pipeline.generators import Handle
from stallfree.pipeline.marks import mark_of
from stallfree.pipeline.randomness import sample_seed
from stallfree.pipeline.values import private

SOURCE = -1
"""The place of what fetches a sample, before the first step."""

_NUMPY = 5
"""Items of the state of NumPy's global generator."""

DREW = "it drew random numbers"
DIFFERS = "it returned something else for the same input"


class States:
    """The states of Python's, NumPy's and torch's global generators, and of `more`. Reading them takes about 90 µs."""

    def __init__(self, more: Sequence[Handle] = ()) -> None:
        self._reads: list[Callable[[], Any]] = [
            random.getstate,
            np.random.get_state,
            torch.get_rng_state,
            *(handle.get for handle in more),
        ]
        self._states = self._read()

    def moved(self) -> bool:
        """Return whether anything has drawn since the last call; also true for draws of other threads."""
        before, self._states = self._states, self._read()
        return before != self._states

    def _read(self) -> list[Any]:
        return [_plain(read()) for read in self._reads]


def _plain(state: Any) -> Any:
    """Return a state as a value that is compared fast."""
    if isinstance(state, dict):
        return [_plain(part) for part in state.values()]
    if isinstance(state, tuple) and len(state) == _NUMPY:
        return [_plain(part) for part in state]
    array = state.numpy() if isinstance(state, torch.Tensor) else state
    return array.tobytes() if isinstance(array, np.ndarray) else array


@dataclass(frozen=True)
class Trust:
    """What is known of a step, or of the data set, without running it."""

    draws: bool = False
    """Its draws do not affect its output: it is marked as deterministic, or its library draws in any case."""
    outputs: bool = False
    """It is marked as deterministic, so its outputs are not compared."""

    @classmethod
    def of(cls, thing: object) -> Trust:
        """Return the trust in a step or data set: its mark, or what its library declares."""
        marked = mark_of(thing) is False
        return cls(marked or may_draw(thing), marked)


@dataclass(frozen=True)
class Found:
    """A step, or the data set, that proved random."""

    at: int
    """Its place among the steps, or `SOURCE`."""
    why: str
    certain: bool = True
    """False if its outputs cannot be compared."""


class StepError(Exception):
    """The first run failed at a place, `at`, with an `error`."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__(at, error)
        self.at, self.error = at, error


def make_twice(
    fetch: Callable[[], Any],
    again: Callable[[], Any] | None,
    steps: Sequence[Transform],
    trust: Sequence[Trust],
    states: States | None = None,
) -> tuple[Any, Found | None]:
    """Make a sample twice, step by step, until something is random.

    If the second run fails, as storage may, the rest of the sample is made once.

    Args:
        fetch: fetches the record.
        again: fetches it again; None if fetches are not compared.
        steps: applied to the record in turn.
        trust: in what fetches, and in each of `steps`: one entry more than there are steps.
        states: if given, a step is also random if these states change while it runs, or if its outputs cannot be
            compared.

    Returns:
        The output of the last step that ran, and what is random.

    Raises `StepError` if the first run fails.
    """
    output = other = None
    compares = True
    if states is not None:
        states.moved()
    for at in range(SOURCE, len(steps)):
        known = trust[at + 1]
        call = as_call(steps[at]) if at != SOURCE else None
        first: Callable[[], Any] = fetch if call is None else partial(call, output)
        second = again if call is None else partial(call, other)
        try:
            output, other = private(first()), None  # the result may be a buffer of the step
        except Exception as error:
            raise StepError(at, error) from error
        repeats = compares and second is not None and not known.outputs
        if repeats and second is not None:
            try:
                other = second()
            except Exception:
                compares = repeats = False
        if states is not None and states.moved() and not known.draws:
            return output, Found(at, DREW)
        if repeats:
            equal = same(output, other)
            if equal is False:
                return output, Found(at, DIFFERS)
            if equal is None and states is not None:
                why = f"its outputs, of type {type(output).__name__}, cannot be compared"
                return output, Found(at, why, certain=False)
            other = private(other)
        elif compares:
            other = private(output)
    return output, None


def earliest(*found: Found | None) -> Found | None:
    """Return the finding of the first step; a certain one if there are several of it."""
    return min(filter(None, found), key=lambda one: (one.at, not one.certain), default=None)


def spread(length: int, count: int) -> list[int]:
    """Return up to `count` ids spread over a data set: the first, the last, and some between, always the same."""
    edges = [1 + place * (length - 2) // (count - 2) for place in range(count - 1)]
    between = [low + sample_seed(0, 0, low) % (high - low) for low, high in pairwise(edges) if low < high]
    return list(dict.fromkeys([0, length - 1, *between]))
