"""The records of the store's benchmarks, and how reads are timed. Needs NumPy only, as the peer's environment does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_WARM = 4
"""Batches, at least, that are not counted: the memory that they are received into is new."""

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


def time_reads(read: Callable[[list[int]], Any], ids: list[int], batch: int, seconds: float) -> float:
    """Samples/s of `read(batch of ids)`, in another order each time.

    The first batches are not counted. The result of a call is still held during the next one, as in a loop over
    batches.
    """
    rng = np.random.default_rng(batch)
    order: list[int] = []
    count, warm = 0, False
    begun = time.perf_counter()
    while (now := time.perf_counter()) < begun + seconds or not warm:
        if not warm and count >= _WARM * batch and now > begun + seconds / 10:
            begun, count, warm = now, 0, True
        if len(order) < batch:
            order = rng.permutation(ids).tolist()
        some, order = order[:batch], order[batch:]
        held = read(some)  # noqa: F841
        count += batch
    return count / (time.perf_counter() - begun)
