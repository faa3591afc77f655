"""The records of the store's benchmarks: noise that tells its id. Needs NumPy only, as the peer's environment does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

WARM = 4
"""Batches, at least, that are not counted: the memory that they are received to is new."""

_SPAN = 1 << 16


def make_noise(size: int) -> Bytes:
    """What records of `size` bytes are cut out of."""
    return np.random.default_rng(size).integers(0, 256, size + _SPAN, dtype=np.uint8)


def make_record(noise: Bytes, id: int) -> Bytes:
    """The record `id`: its id in 8 bytes, then a piece of `noise`."""
    size = len(noise) - _SPAN
    start = id * 64 % _SPAN
    record: Bytes = noise[start : start + size].copy()
    record[:8] = np.frombuffer(int(id).to_bytes(8, "little"), np.uint8)
    return record


def same(value: Bytes, noise: Bytes, id: int) -> bool:
    """Whether `value` is the record `id`."""
    return bool(np.array_equal(value, make_record(noise, id)))
