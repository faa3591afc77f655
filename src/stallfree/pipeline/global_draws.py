"""Detects draws from the process-wide generators, without moving them, in about a microsecond.

`random.getstate` takes 8 µs, `np.random.get_state` 30 µs and `torch.get_rng_state` 3 µs, longer than many samples take.
The positions of the three Mersenne twisters are therefore read directly from memory. Their memory layout is determined
once, with a separate generator; if that fails, whole states are compared.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

_WORDS = 624
"""Number of 32-bit words in the state of a Mersenne twister."""

_TORCH_HEAD = 256
"""Bytes of torch's generator that are searched for the start of its state; the state itself is longer."""

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

Position = Callable[[], Any]
"""Returns a value that changes with each draw: the position in the state, and a word that changes with each pass."""


class GlobalDraws:
    """Detects draws from Python's, NumPy's legacy and torch's default CPU generator.

    draws = GlobalDraws()
    draws.mark()
    step(value)
    if draws.moved(): ...
    """

    def __init__(self) -> None:
        self._python: random.Random = random.seed.__self__  # type: ignore[attr-defined]
        self._at_python, self._at_torch = _python_position(self._python), _torch_position(torch.default_generator)
        self._bits: Any = None
        self._mark: tuple[Any, ...] = ()

    def mark(self, *, seeded: bool = False) -> None:
        """Record the current states. `seeded`: all generators were seeded since the last call, which is faster."""
        self._mark = self._now(seeded)

    def moved(self) -> bool:
        """Return whether anything has drawn since `mark`, or since the last call."""
        before, self._mark = self._mark, self._now()
        return before != self._mark

    def _now(self, seeded: bool = False) -> tuple[Any, ...]:
        legacy = np.random.mtrand._rand
        if legacy._bit_generator is not self._bits:
            self._bits, self._at_numpy, self._reserve = legacy._bit_generator, _numpy_position(legacy), True
        at_numpy = self._at_numpy()
        if seeded:
            self._reserve = False  # seeding drops the cached normal number
        elif self._reserve or self._mark[:1] != (at_numpy,):
            # Taking a cached normal number does not step the generator, so its presence is part of the position.
            self._reserve = bool(legacy.get_state(legacy=False)["has_gauss"])
        return (
            at_numpy,
            self._reserve,
            self._at_python(),
            self._python.gauss_next,  # type: ignore[attr-defined]
            self._at_torch(),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return GlobalDraws, ()


def _python_position(generator: random.Random) -> Position:
    offset = _python_offset()
    if offset is None or type(generator) is not random.Random:
        return generator.getstate
    there = ctypes.c_uint64.from_address(id(generator) + offset)
    return lambda: there.value


@lru_cache(maxsize=1)
def _python_offset() -> int | None:
    """Return the offset of the position in a `random.Random`, followed by its state; None if it is not found."""
    trial = random.Random(5)
    trial.random()
    words = trial.getstate()[1]
    if len(words) != _WORDS + 1:
        return None
    memory = ctypes.string_at(id(trial), random.Random.__basicsize__)
    at = memory.find(struct.pack(f"={_WORDS}I", *words[:_WORDS])) - 4
    if at < 0:
        return None
    there = ctypes.c_int32.from_address(id(trial) + at)
    before = there.value
    trial.random()
    return at if (before, there.value) == (words[_WORDS], words[_WORDS] + 2) else None


def _numpy_position(generator: Any) -> Position:
    bits = generator._bit_generator
    if type(bits) is not np.random.MT19937:
        return lambda: repr(generator.get_state(legacy=False))
    # The structure `bitgen_t` begins with the address of the state. `bits.ctypes` has it as well, but takes 1 ms.
    interface = _capsule_pointer(bits.capsule, b"BitGenerator")
    there = (ctypes.c_uint32 * (_WORDS + 1)).from_address(ctypes.c_uint64.from_address(interface).value)
    state: Any = bits.state["state"]
    if there[0] != int(state["key"][0]) or there[_WORDS] != state["pos"]:
        return lambda: repr(generator.get_state(legacy=False))
    return lambda: (there[_WORDS], there[0])


def _torch_position(generator: torch.Generator) -> Position:
    offset = _torch_offset()
    if offset is None:
        return lambda: generator.get_state().numpy().tobytes()
    # The remaining words of the state, a flag, the next word, the state; then cached normal numbers.
    address = generator._cdata + offset  # type: ignore[attr-defined]
    head = (ctypes.c_uint32 * 4).from_address(address - 12)
    reserve = (ctypes.c_uint64 * 3).from_address(address + 4 * _WORDS)
    return lambda: (head[0], head[2], head[3], reserve[0], reserve[1], reserve[2])


@lru_cache(maxsize=1)
def _torch_offset() -> int | None:
    """Return the offset of the state in torch's CPU generator; None if it is not found."""
    trial = torch.Generator()
    trial.manual_seed(77)
    word = torch.empty((), dtype=torch.int64)
    word.random_(generator=trial)
    address = getattr(trial, "_cdata", 0)
    state = trial.get_state().numpy().tobytes()
    if not address or len(state) < 24 + 8 * _WORDS:
        return None
    words = struct.unpack_from(f"={_WORDS}Q", state, 24)
    offset = ctypes.string_at(address, _TORCH_HEAD).find(struct.pack("=8I", *words[:8]))
    if offset < 12 or ctypes.string_at(address + offset, 4 * _WORDS) != struct.pack(f"={_WORDS}I", *words):
        return None
    _, left, _, following = struct.unpack_from("=QiiQ", state)
    head = (ctypes.c_uint32 * 4).from_address(address + offset - 12)
    before = head[0], head[2]
    word.random_(generator=trial)  # takes two words of the state
    return offset if before == (left, following) and head[2] == following + 2 else None
