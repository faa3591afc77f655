"""Notices that random numbers were drawn.

Reading the state of a generator takes up to 65 µs. So each global generator gets a twin in the same state, and a look
draws one number from both: the numbers differ as soon as something else has drawn from one of them. A look takes 7 µs
in a row, but 100 µs between two pictures that are decoded, whose data fill the processor's caches: there is one per
batch.
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
"""Looks for new generators that are made in any case; the others take a 200th of the time at most."""

_SHARE = 200


class Watch:
    """Says whether anything drew from the global generators or from those that `things` own since the last look.

        with Watch(step) as watch:
            for value in values:
                step(value)
                if watch.moved(): ...

    Inside the block the global generators are in a state of the watch; at its end they get back the one they had. A
    draw by another thread of the process is seen too.
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
        """Those of the things that refer to a generator that was not there at first, as far as that was looked for.

        Looking goes through all that the things refer to, so it is not done each time. What is found is known then.
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
        """Whether something has drawn since the block began or the last call of this."""
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
    """Which of `steps`, applied to `record` one after the other, draws random numbers; None if none does.

    Those are passed over for which `ignored` is true.
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
