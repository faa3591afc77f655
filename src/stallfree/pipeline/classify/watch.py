"""Detects that random numbers were drawn.

Reading the state of a generator takes up to 65 µs. Each global generator therefore gets a twin in the same state, and a
check draws one number from both: the numbers differ once something else has drawn from one of them. A check takes 7 µs
in a loop, but 100 µs between two decoded images, whose data fill the processor's caches; it is made once per batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from stallfree.pipeline.classify.probe import same
from stallfree.pipeline.compose import Transform, as_call
from stallfree.pipeline.generators import find_generators, global_generators, handle_of
from stallfree.pipeline.randomness import wait_to_draw

_SEED = 0x5DEECE66

_ALWAYS = 4
"""Number of unconditional searches for new generators; later ones use at most a 200th of the time."""

_SHARE = 200


class Watch:
    """Detects draws from the global generators, and from those that `things` own, since the last check.

        with Watch(step) as watch:
            for value in values:
                step(value)
                if watch.moved(): ...

    Inside the block the global generators are in a state of the watch; at its end their former states are restored. A
    draw by another thread of the process is detected too.
    """

    def __init__(self, *things: object) -> None:
        self._things = things
        self._looks, self._looked, self._took = 0, 0.0, 0.0
        self._own = find_generators(list(things))
        self._handles = global_generators()
        self._python: random.Random = self._handles[0].generator  # type: ignore[assignment]
        self._legacy: np.random.RandomState = self._handles[1].generator  # type: ignore[assignment]
        self._twins = random.Random(), _twin_of(self._legacy), torch.Generator()
        self._numbers = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
        self._before: list[Any] = []
        self._states: list[Any] = []

    def __enter__(self) -> Watch:
        wait_to_draw()
        self._before.append([handle.get() for handle in self._handles])
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for handle, state in zip(self._handles, self._before.pop(), strict=True):
            handle.set(state)

    def _start(self) -> None:
        for handle in (*self._handles, *map(handle_of, self._twins)):
            handle.seed(_SEED)
        self._states = [handle.get() for handle in self._own]

    def made(self) -> list[object]:
        """Return the things that refer to a generator created since the start, as far as this was checked.

        The check traverses everything that the things refer to, so some calls skip it. Generators found become known.
        """
        began = time.perf_counter()
        if self._looks >= _ALWAYS and began - self._looked < _SHARE * self._took:
            return []
        known, found = {id(handle.generator) for handle in self._own}, []
        now = find_generators(list(self._things))
        if any(id(handle.generator) not in known for handle in now):
            found = [
                thing for thing in self._things if any(id(h.generator) not in known for h in find_generators(thing))
            ]
            self._own = now
            self._states = [handle.get() for handle in self._own]
        self._looks, self._looked = self._looks + 1, time.perf_counter()
        self._took = self._looked - began
        return found

    def moved(self) -> bool:
        """Return whether anything has drawn since the start of the block or the last call."""
        python, legacy, torchs = self._twins
        ours, theirs = self._numbers
        still = (
            self._python.getrandbits(64) == python.getrandbits(64)
            and self._legacy.random_sample() == legacy.random_sample()
            and ours.random_().item() == theirs.random_(generator=torchs).item()
            and all(same(handle.get(), state) for handle, state in zip(self._own, self._states, strict=True))
        )
        if not still:
            self._start()
        return not still


def _twin_of(generator: np.random.RandomState) -> np.random.RandomState:
    return np.random.RandomState(type(generator._bit_generator)(_SEED))


def find_draw(steps: Iterable[Transform], record: Any, ignored: Sequence[bool]) -> int | None:
    """Return the index of the first of `steps` that draws when they are applied to `record` in order; None if none
    does.

    Draws of steps for which `ignored` is true are passed over.
    """
    with Watch(*steps) as watch:
        for place, step in enumerate(steps):
            try:
                record = as_call(step)(record)
            except Exception:
                return place if watch.moved() and not ignored[place] else None
            if watch.moved() and not ignored[place]:
                return place
    return None
