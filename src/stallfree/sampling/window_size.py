"""The size of a Smart Cache in samples and bytes, estimated from the sizes of some samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stallfree.cache.capacity import free_memory
from stallfree.cache.layout import Meta, plan_layout
from stallfree.errors import CapacityError, capacity_too_large, capacity_too_small
from stallfree.pipeline.codec import encode, record_size
from stallfree.pipeline.structure import Structure
from stallfree.sampling.plans.window import replace_count
from stallfree.units import format_size

_MARGIN = 1.5
_SPARE = 0.9


@dataclass(frozen=True)
class Fit:
    """A window and its memory.

    Attributes:
        size: samples in the window.
        capacity: bytes of the cache, index included: the maximum of window and replacements.
        example: a sample whose format all samples share, or bytes of about the size of one.
    """

    size: int
    capacity: int
    example: Any


@dataclass(frozen=True)
class _Measured:
    example: Any
    structure: Structure
    mean: float
    largest: int


def fit_count(samples: Sequence[Any], total: int, size: int, replace: int) -> Fit:
    """Memory for `size` samples and `replace` more. Raises `CapacityError` if they exceed free memory."""
    found = _measure(samples)
    count, free = size + replace, free_memory()
    least = _capacity(total, count, found, found.mean)
    if least > free * _SPARE:
        each = format_size(int(found.mean))
        raise capacity_too_large(
            f"cache_num={size} and {replace} replacements of about {each} each take {format_size(least)}, and "
            f"{format_size(free)} of memory are free here (of the host and of this control group), of which a tenth is "
            f"left to others: give cache_num={max(0, int(size * free * _SPARE / least))} or less, or more memory"
        )
    generous = _capacity(total, count, found, max(found.mean * _MARGIN, found.largest))
    return Fit(size, min(generous, int(free * _SPARE)), found.example)


def fit_budget(samples: Sequence[Any], total: int, capacity: int, rate: float, available: int) -> Fit:
    """The most of the `available` samples that fit into `capacity` bytes with their replacements."""
    found = _measure(samples)
    meta = _layout(total, capacity, found)
    blocks = 1 if meta.common else math.ceil(found.mean / meta.block)
    room = meta.num_blocks // blocks
    size = min(available, room)
    while size > 0 and size + replace_count(size, rate, available) > room:
        size -= max(1, (size + replace_count(size, rate, available) - room) // 2)
    if size < 1:
        least = _capacity(total, 1 + replace_count(1, rate, available), found, found.mean)
        raise capacity_too_small(
            f"capacity={format_size(capacity)} holds no window: a sample takes {format_size(int(found.mean))}, and "
            f"there must be room for one and its replacement: give {least} bytes or more"
        )
    return Fit(size, capacity, found.example)


def _measure(samples: Sequence[Any]) -> _Measured:
    """Measure some samples, as the cache stores them."""
    forms = [encode(value, allow_pickle=True) for value in samples]
    first, sizes = forms[0][0], [record_size(*form) for form in forms]
    if first.fixed and all(structure is first for structure, _ in forms):
        return _Measured(samples[0], first, sizes[0], sizes[0])
    example = bytes(max(sizes))
    return _Measured(example, encode(example)[0], sum(sizes) / len(sizes), max(sizes))


def _layout(total: int, capacity: int, found: _Measured) -> Meta:
    record: dict[str, Any] = {"structure": found.structure, "typical": found.largest}
    return plan_layout(total, capacity, fingerprint="", policy="minio", scored=False, on_disk=False, **record)


def _capacity(total: int, count: int, found: _Measured, size: float) -> int:
    """Bytes of a cache that holds `count` records of `size` bytes."""
    capacity = int(count * size) + 24 * total + (1 << 16)
    while True:
        try:
            meta = _layout(total, capacity, found)
            blocks = count * (1 if meta.common else math.ceil(size / meta.block))
            if meta.num_blocks >= blocks:
                return capacity
        except CapacityError:
            pass
        capacity += capacity // 16
