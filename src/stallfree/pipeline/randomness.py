"""Randomness of a sample as a pure function of (seed, epoch, id)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from stallfree.pipeline.compose import Transform, flatten
from stallfree.pipeline.generators import Handle, find_generators, global_generators
from stallfree.pipeline.global_draws import GlobalDraws

_MASK = 0xFFFFFFFFFFFFFFFF
_STEP = 0x9E3779B97F4A7C15
_thread = threading.local()


@contextlib.contextmanager
def before_drawing(wait: Callable[[], None]) -> Iterator[None]:
    """Within it, this thread calls `wait` before it touches a generator that is global to the process."""
    _thread.wait = wait
    try:
        yield
    finally:
        del _thread.wait


def wait_to_draw() -> None:
    """Called before a global generator is seeded: returns when nothing else in the process draws. See `before_drawing`.

    In a thread that is not within `before_drawing`, returns at once.
    """
    wait = getattr(_thread, "wait", None)
    if wait is not None:
        wait()


def draw_seed(generator: torch.Generator | None = None) -> int:
    """A seed of 0 to 2**63 - 1, drawn from `generator`, or from torch's default one, which `torch.manual_seed` governs.

    torch's `DataLoader` and `RandomSampler` draw theirs in the same way, so each call moves the generator as one of
    theirs does.
    """
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def peek_seed() -> int:
    """The seed that `draw_seed` would draw now; torch's generator stays as it is."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return draw_seed(generator)


def sample_seed(seed: int, epoch: int, id: int) -> int:
    """A number of 0 to 2**64 - 1 that depends on all bits of the three, which count modulo 2**64.

    For one seed and one epoch no two ids share a number.
    """
    return _mix(_mix(_mix(int(seed) + _STEP) + int(epoch) + _STEP) + int(id) + _STEP)


class Drew(Exception):
    """What was made without a seed drew random numbers: it has to be made again, with one."""


class Randomness:
    """Makes whatever `transform` draws depend on (seed, epoch, id) alone, and leaves no trace.

        with Randomness(transform) as randomness:
            for id in ids:
                randomness.seed(seed, epoch, id)
                sample = transform(record)

    Seeded are Python's, NumPy's legacy and torch's default CPU generator, and the generators that the steps of
    `transform` own, as MONAI's, albumentations' and many users' do. These are found once, when the object is made: a
    generator that a step makes later is not seeded, so let steps make theirs in their constructors. At the end of the
    block all get back the state that they had at its start.

    The seed of an owned generator depends on its place in `pipeline`: the first part that refers to it, and its number
    there. So it is the same whatever part of the pipeline is left to do, and generators of other parts do not move it.

    When `transform` is None or has no steps, nothing is saved, seeded or restored.

    Three of the generators are global to the process, so only one thread of a process may prepare samples at a time.

    Seeding takes longer than many samples do. So `lazy` looks in the first block whether anything draws. If not, later
    blocks seed nothing, and their end raises `Drew` should something draw there after all: make them again then.

    Args:
        transform: what draws.
        pipeline: the parts of the whole that `transform` is taken from; the steps of `transform` if None.
        lazy: seed nothing for as long as nothing draws. Not if `transform` owns generators.

    Attributes:
        draws: whether anything drew; None if that is not known yet. Only with False nothing is seeded.
    """

    def __init__(
        self, transform: Transform | None, pipeline: Iterable[object] | None = None, *, lazy: bool = False
    ) -> None:
        steps = flatten(transform)
        self._arguments = transform, None if pipeline is None else tuple(pipeline), lazy
        shared = global_generators() if steps else []
        owned = find_generators(steps) if steps else []
        whole = steps if self._arguments[1] is None else self._arguments[1]
        places = _places(whole, owned) if owned else []
        self._seeders = [handle.seed for handle in shared]
        self._owned = [(handle.seed, _mix(place + _STEP)) for handle, place in zip(owned, places, strict=True)]
        self._handles = [*shared, *owned]
        self._saved: list[list[Any] | None] = []
        self.draws: bool | None = None if lazy and shared and not owned else True  # None: to be found out
        self._looks = GlobalDraws() if self.draws is None else None

    def seed(self, seed: int, epoch: int, id: int) -> None:
        """Put all generators into the state that belongs to sample `id` in `epoch`. Takes about 10 µs."""
        if self._seeders and self.draws is not False:
            self._look()
            number = sample_seed(seed, epoch, id)
            for seeder in self._seeders:
                number = _mix(number + _STEP)  # one for each: equal seeds would make equal streams
                seeder(number)
            for seeder, place in self._owned:
                seeder(_mix(number + place))

            if self._looks is not None:
                self._looks.mark()

    def _look(self) -> None:
        """While that is to be found out: whether something drew since the last call of `seed`."""
        if self._looks is not None and self.draws is None and self._looks.moved():
            self.draws, self._looks = True, None

    def __enter__(self) -> Randomness:
        if self._handles:
            wait_to_draw()
        if self._looks is not None:
            self._looks.mark()
        self._saved.append(None if self.draws is False else [handle.get() for handle in self._handles])
        return self

    def __exit__(self, *exception: object) -> None:
        saved = self._saved.pop()
        if saved is None:
            if self._looks is not None and self._looks.moved():
                self.draws, self._looks = True, None
                raise Drew
            return
        self._look()
        if self.draws is None:
            self.draws = False
        for handle, state in zip(self._handles, saved, strict=True):
            handle.set(state)

    def __reduce__(self) -> tuple[Any, ...]:
        transform, pipeline, lazy = self._arguments
        return partial(Randomness, lazy=lazy), (transform, pipeline)


def _places(parts: Sequence[object], owned: Sequence[Handle]) -> list[int]:
    """The place of each generator among `parts`; those that none of these refers to are numbered behind them."""
    known: dict[int, int] = {}
    for part, thing in enumerate(parts):
        for number, handle in enumerate(find_generators(thing)):
            known.setdefault(id(handle.generator), part << 32 | number)
    behind = len(parts) << 32
    return [known.get(id(handle.generator), behind + at) for at, handle in enumerate(owned)]


def _mix(number: int) -> int:
    """The finaliser of SplitMix64: maps 64-bit numbers one to one, each bit changing about half of the others."""
    number &= _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
