"""Randomness as a pure function of (seed, epoch, id): generators, their states, and the seeding of samples."""

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import get_worker_info

from stallfree.pipeline.compose import Transform, flatten
from stallfree.pipeline.objects import generators_of

_MASK = 0xFFFFFFFFFFFFFFFF
_STEP = 0x9E3779B97F4A7C15
_thread = threading.local()


# --- generators ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handle:
    """Saves, seeds and restores one generator."""

    generator: object
    seed: Callable[[int], Any]
    """Takes a seed of 0 to 2**64 - 1. Generators with a shorter seed use its low bits."""
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def handle_of(generator: Any) -> Handle:
    """Return the handle of a generator of Python, NumPy or torch."""
    if isinstance(generator, random.Random):
        return Handle(generator, generator.seed, generator.getstate, generator.setstate)
    if isinstance(generator, torch.Generator):
        return Handle(generator, generator.manual_seed, generator.get_state, generator.set_state)
    legacy = isinstance(generator, np.random.RandomState)
    bits = generator._bit_generator if legacy else generator.bit_generator
    get = partial(generator.get_state, legacy=False) if legacy else lambda: bits.state
    put = generator.set_state if legacy else partial(setattr, bits, "state")
    if legacy and isinstance(bits, np.random.MT19937):
        return Handle(generator, lambda seed: generator.seed(seed & 0xFFFFFFFF), get, put)
    return Handle(generator, lambda seed: put(type(bits)(seed).state), get, put)


def _globals() -> tuple[object, ...]:
    """Return Python's, NumPy's legacy and torch's default CPU generator."""
    return random.seed.__self__, np.random.mtrand._rand, torch.default_generator  # type: ignore[attr-defined]


def find_generators(transform: object) -> list[Handle]:
    """Return the generators that `transform` owns or refers to (see `generators_of`), without the global ones."""
    shared = [id(generator) for generator in _globals()]
    owned = (each for each in generators_of(transform) if not isinstance(each, random.SystemRandom))
    return [handle_of(generator) for generator in owned if id(generator) not in shared]


class States:
    """The states of Python's, NumPy's and torch's global generators, and of `more`. Reading them takes about 90 µs."""

    def __init__(self, more: Sequence[Handle] = ()) -> None:
        own = [handle.get for handle in more]
        self._reads: list[Callable[[], Any]] = [random.getstate, np.random.get_state, torch.get_rng_state, *own]
        self._states = self._read()

    def moved(self) -> bool:
        """Return whether anything has drawn since the last call; also true for draws of other threads."""
        before, self._states = self._states, self._read()
        return before != self._states

    def _read(self) -> list[Any]:
        return [_comparable(read()) for read in self._reads]


class WorkerStates:
    """Like `States`, for a worker process, in 10 µs: it draws from two of the generators, and from copies of them.

    Python's and NumPy's generators move on thereby, so one object serves the whole process.
    """

    def __init__(self) -> None:
        self._copy()

    def _copy(self) -> None:
        version, state, _ = random.getstate()
        random.setstate((version, state, None))  # without what `gauss` keeps: to return that, it draws nothing
        np.random.set_state(np.random.get_state(legacy=False) | {"has_gauss": 0})
        bits = np.random.mtrand._rand._bit_generator
        python, numpy = random.Random(), type(bits)()
        python.setstate(random.getstate())
        numpy.state = bits.state
        self._draws = (
            (partial(random.getrandbits, 64), bits.random_raw),
            (partial(python.getrandbits, 64), numpy.random_raw),
        )
        self._torch = torch.get_rng_state().numpy().tobytes()

    def moved(self) -> bool:
        """Return whether anything has drawn since the last call."""
        drawn, expected = ([draw() for draw in draws] for draws in self._draws)
        moved = drawn != expected or self._torch != torch.get_rng_state().numpy().tobytes()
        if moved:
            self._copy()
        return moved


@cache
def _worker_states(pid: int) -> WorkerStates:
    return WorkerStates()


_FEW = 10
"""Items of the largest tuple in a state that may hold arrays; the numbers of Python's generator are 625."""


def _comparable(state: Any) -> Any:
    """Return a state as a value that is compared fast."""
    if isinstance(state, torch.Tensor | np.ndarray):
        return np.asarray(state).tobytes()
    if isinstance(state, dict):
        state = tuple(state.values())
    return [*map(_comparable, state)] if isinstance(state, tuple) and len(state) < _FEW else state


# --- seeds -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def before_drawing(wait: Callable[[], None]) -> Iterator[None]:
    """Make this thread call `wait`, inside the block, before `Randomness` uses the process-wide generators.

    `wait` returns when nothing else in the process draws.
    """
    _thread.wait = wait
    try:
        yield
    finally:
        del _thread.wait


def wait_to_draw() -> None:
    """Wait until nothing else in the process draws, in a thread within `before_drawing`; elsewhere return at once."""
    getattr(_thread, "wait", lambda: None)()


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed of 0 to 2**63 - 1 from `generator`, or from torch's default one, which `torch.manual_seed` controls.

    torch's `DataLoader` and `RandomSampler` draw their seeds in the same way, so each call moves the generator as one
    of theirs does.
    """
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def peek_seed() -> int:
    """Return the seed that `draw_seed` would draw now, without moving torch's generator."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return draw_seed(generator)


def sample_seed(seed: int, epoch: int, id: int) -> int:
    """Return a number of 0 to 2**64 - 1 that depends on all bits of the three, taken modulo 2**64.

    For one seed and one epoch, no two ids share a number.
    """
    return _mix(_mix(_mix(int(seed) + _STEP) + int(epoch) + _STEP) + int(id) + _STEP)


def _mix(number: int) -> int:
    """Apply the finaliser of SplitMix64, a bijection of 64-bit numbers; each bit changes about half of the others."""
    number &= _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


class Drew(Exception):
    """Raised if unseeded samples drew random numbers: they must be recomputed with a seed."""


class Randomness:
    """Makes the random draws of `transform` depend only on (seed, epoch, id), and restores the generators afterwards.

        with Randomness(transform) as randomness:
            for id in ids:
                randomness.seed(seed, epoch, id)
                sample = transform(record)

    Seeded are Python's, NumPy's legacy and torch's default CPU generator, and the generators owned by the steps of
    `transform`, as in MONAI, albumentations and much user code. These are found once, when the object is created: a
    generator that a step creates later is not seeded, so create generators in the constructors of steps. At the end of
    the block all generators are restored to their states at its start.

    The seed of an owned generator depends on its position in `pipeline`: the first part that refers to it, and its
    number there. It is therefore independent of which part of the pipeline remains to run, and of generators in other
    parts.

    If `transform` is None or has no steps, nothing is saved, seeded or restored.

    Three of the generators are process-wide, so only one thread of a process may prepare samples at a time.

    Seeding takes longer than many samples. With `lazy`, the first sample shows whether anything draws. If not, later
    samples are not seeded; the states of the global generators are compared once per block, and a block in which one of
    them draws after all raises `Drew` at its end: recompute its samples then.

    Args:
        transform: the transform that draws.
        pipeline: the parts of the whole pipeline that contains `transform`; the steps of `transform` if None.
        lazy: seed nothing as long as nothing draws. Ignored if `transform` owns generators.

    Attributes:
        draws: whether anything drew; None if unknown. Seeding is skipped only if it is False.
    """

    def __init__(
        self, transform: Transform | None, pipeline: Iterable[object] | None = None, *, lazy: bool = False
    ) -> None:
        steps = flatten(transform)
        parts = steps if pipeline is None else tuple(pipeline)
        self._arguments = transform, parts, lazy
        owned = find_generators(steps) if steps else []
        self._handles = [*map(handle_of, _globals()), *owned] if steps else []
        places = [-1, -2, -3, *(_places(parts, owned) if owned else ())]  # equal seeds would make equal streams
        self._seeders = [(handle.seed, _mix(at + _STEP)) for handle, at in zip(self._handles, places, strict=False)]
        self._saved: list[list[Any] | None] = []
        self.draws: bool | None = None if lazy and steps and not owned else True  # None: not known yet
        self._states: States | WorkerStates | None = States() if self.draws is None else None
        self._tried = False  # whether a sample was seeded
        self._pid = -1  # the process whose states are known

    def seed(self, seed: int, epoch: int, id: int) -> None:
        """Set all generators to the state of sample `id` in `epoch`. Takes about 10 µs."""
        if not self.moved() and self._tried and self.draws is None:
            self.draws = False
        if self._seeders and self.draws is not False:
            self._tried = True
            number = sample_seed(seed, epoch, id)
            for seeder, place in self._seeders:
                seeder(_mix(number + place))
            if self._states is not None:
                self._states.moved()

    def moved(self) -> bool:
        """Check, while it is unknown, whether anything has drawn since the last call of `seed`."""
        if self._states is not None and self.draws is None and self._states.moved():
            self.draws, self._states = True, None
        return self.draws is True

    def __enter__(self) -> Self:
        if self._handles:
            wait_to_draw()
        if self._states is not None and (self.draws is None or self._pid != os.getpid() or get_worker_info() is None):
            self._states.moved()  # in a worker, nothing else draws between two blocks
            self._pid = os.getpid()
        self._saved.append(None if self.draws is False else [handle.get() for handle in self._handles])
        return self

    def __exit__(self, *exception: object) -> None:
        saved, seeded = self._saved.pop(), self.draws is not False
        if self._states is not None:
            self.draws = self._states.moved()
            if self.draws or get_worker_info() is not None:
                self._states = None if self.draws else _worker_states(os.getpid())
        if saved is not None:
            for handle, state in zip(self._handles, saved, strict=True):
                handle.set(state)
            self._pid = -1
        if self.draws and not seeded:
            raise Drew

    def __reduce__(self) -> tuple[Any, ...]:
        transform, pipeline, lazy = self._arguments
        return partial(Randomness, lazy=lazy), (transform, pipeline)


def _places(parts: Sequence[object], owned: Sequence[Handle]) -> list[int]:
    """Return the position of each generator among `parts`; generators not referred to by a part come after them."""
    known: dict[int, int] = {}
    for part, thing in enumerate(parts):
        for number, handle in enumerate(find_generators(thing)):
            known.setdefault(id(handle.generator), part << 32 | number)
    behind = len(parts) << 32
    return [known.get(id(handle.generator), behind + at) for at, handle in enumerate(owned)]
