"""The size of a Smart Cache in samples and bytes, estimated from the sizes of the first samples."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from stallfree.batches.sample_access import untouched
from stallfree.cache.memory.layout import Meta, plan_layout
from stallfree.cache.memory.limits import free_memory
from stallfree.errors import CapacityError, capacity_too_large, capacity_too_small, text_of
from stallfree.pipeline.classify.watch import Watch
from stallfree.pipeline.codec import encode, record_size
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.structure import Structure
from stallfree.pipeline.values import private
from stallfree.sampling.plans.window import WindowPlan, replace_count
from stallfree.units import format_size

log = logging.getLogger("stallfree")

_MEASURED = 8
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


def fit_count(sizes: FirstSamples, total: int, size: int, replace: int) -> Fit:
    """Memory for `size` samples and `replace` more. Raises `CapacityError` if they exceed free memory."""
    found = _measure(sizes)
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


def fit_budget(sizes: FirstSamples, total: int, capacity: int, rate: float, available: int) -> Fit:
    """The most of the `available` samples that fit into `capacity` bytes with their replacements."""
    found = _measure(sizes)
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


def _measure(sizes: FirstSamples) -> _Measured:
    """Measure the first samples; only two if their sizes are fixed and equal."""
    values = sizes.more(2)
    forms = [encode(value, allow_pickle=True) for value in values]
    first = forms[0][0]
    if first.fixed and all(structure is first for structure, _ in forms):
        size = record_size(*forms[0])
        return _Measured(values[0], first, size, size)
    values = sizes.more(_MEASURED)
    bytes_of = [record_size(*encode(value, allow_pickle=True)) for value in values]
    example = bytes(max(bytes_of))
    return _Measured(example, encode(example)[0], sum(bytes_of) / len(bytes_of), max(bytes_of))


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


class FirstSamples:
    """Reads the first samples of the window to measure their size, and keeps them."""

    def __init__(self, source: Source, before: Compose, id: int, value: Any, reach: WindowPlan) -> None:
        self.reach = reach
        self.read: list[tuple[int, Any]] = [(id, value)]
        self.drew: set[int] = set()  # prepared again by a reader that detects random steps
        self._source = source
        self._before = before

    def more(self, count: int) -> list[Any]:
        """The cached values of `count` samples, without those that fail."""
        known = {id for id, _ in self.read}
        with untouched(self._source):
            for id in self.reach.sequence(0, min(count, self.reach.total)).tolist():
                if id not in known:
                    self._read(id)
        return [value for _, value in self.read]

    def _read(self, id: int) -> None:
        try:  # steps may change their input, and the source may keep a reference
            record = private(self._source.fetch(id))
            with Watch(self._before) as watch:
                self.read.append((id, self._before(record)))
                if watch.moved() or watch.made():
                    self.drew.add(id)
        except Exception as error:  # raised again when the sample is requested
            log.info("sample %d could not be read to learn its size: %s", id, text_of(error))
