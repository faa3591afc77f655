"""Builds one batch: the same code in worker processes, in the threads that gather, and in the training process."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import default_convert

from stallfree.batches.batch_buffer import BatchBuffer
from stallfree.batches.batch_state import Samples
from stallfree.batches.collate import Bytes, Collate, batch_structure, collate_default, compose, stack, write_batch
from stallfree.batches.messages import EMPTY, FAILED, NO_SLOT, PRIVATE, READY, UNDONE, WHOLE, Ids, Result, Task
from stallfree.batches.reader import Reader
from stallfree.batches.ring import Slots
from stallfree.batches.sample_access import Pending
from stallfree.cache import Aim, Cache
from stallfree.cache.tiers.buffers import Buffers
from stallfree.error_types import also_of_type
from stallfree.errors import sampler_output, text_of
from stallfree.ipc.remote import pack_error
from stallfree.pipeline.codec import read_own_record
from stallfree.pipeline.randomness import Drew, Randomness
from stallfree.pipeline.structure import Structure
from stallfree.pipeline.values import private
from stallfree.platform import shares_memory
from stallfree.sources.throttle import payload_bytes

LARGE = 1 << 20
"""Bytes of a batch from which on samples are stacked where the batch goes, as fresh pages cost more than that."""

_buffers = Buffers()


@dataclass
class BatchBuilder:
    """What it takes to build batches.

    Attributes:
        reader: gives samples.
        slots: where batches of worker processes and of threads go.
        collate: the user's function, or None for torch's default. What it draws is a function of (seed, epoch, batch),
            unless the samples are from streams.
        single: a batch is one sample, which is not collated but converted.
        seed: of the randomness.
        skip: leave samples out that cannot be had.
    """

    reader: Reader
    slots: Slots
    collate: Collate | None
    single: bool
    seed: int
    skip: bool
    _drawing: Randomness = field(init=False)
    _stacked: Structure | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._drawing = Randomness(None if self.reader.streams else self.collate, lazy=True)

    # -- batches that are nothing but a gather out of the cache -------------------------------------------------------

    def can_gather(self, ids: Ids) -> bool:
        """Whether the batch is nothing but a gather out of the cache at this moment."""
        cache = self.reader.cache
        return (
            cache is not None
            and self.collate is None
            and not self.single
            and len(ids) > 0
            and shares_memory()
            and self.reader.plain
            and self.reader.current
            and cache.structure is not None
            and batch_structure(cache.structure, len(ids)) is not None
            and (cache.complete or bool(cache.resident(ids).all()))
        )

    def gather(self, task: Task) -> Result:
        """Fill the slot straight from the cache. UNDONE when that cannot be done, as when a sample has vanished."""
        started, result = time.monotonic(), Result(UNDONE, task.token, task.number, task.slot)
        cache, uncached = self.reader.cache, self.reader.split.uncached
        place = _Place(self.slots, task.slot)
        with contextlib.suppress(Exception):  # it will be done in another way; if that fails too, it is raised there
            room = None if cache is None or not self.reader.plain else self._room(cache, len(task.ids), place)
            if cache is None or room is None or not cache.gather(task.ids, room.aim).all():
                return result
            if cache.uncached_steps == uncached:
                result.status, result.size, result.memory = place.status, room.size, place.memory
                result.hits, result.ids, result.started = len(task.ids), task.ids, started
                result.prep_seconds = time.monotonic() - started
        return result

    def _room(self, cache: Cache, count: int, place: _Place) -> _Room | None:
        """Where `count` samples go: in a slot that took as many before, what was made for it then."""
        kept = self.slots.kept
        room: _Room | None = kept.get(place.slot)
        if room is not None and room.count == count:
            room.top[:] = room.head
            return room
        composed = None if cache.structure is None else compose(cache.structure, count, place.reserve)
        if composed is None:
            return None
        rows, size, top = composed
        room = _Room(count, size, top, top.copy(), cache.aim(rows))
        if place.status == READY:
            kept[place.slot] = room
        return room

    # -- all others ---------------------------------------------------------------------------------------------------

    def start(self, task: Task) -> Pending:
        """Start the reads and fetches of a task."""
        try:
            return self.reader.start(task.ids)
        except Exception:  # it comes again, and is raised, when the task is done
            return Pending(task.ids)

    def finish(self, task: Task, pending: Pending, *, here: bool) -> Result:
        """Build the batch of a task that was started. Errors are in the result.

        Args:
            task: what to do.
            pending: its reads and fetches.
            here: whether the batch stays in this process: then it is an object, unless the task has a slot.
        """
        place = _Place(None if here and task.slot == NO_SLOT else self.slots, task.slot)
        started = time.monotonic()
        try:
            status, size, value, samples = self._build(task, pending, place, here)
            if here and status == PRIVATE:
                assert place.memory is not None
                status, value = WHOLE, read_own_record(place.memory[:size], copy=False)
        except Exception as error:
            return failure(task, error, here=here)
        spent = time.monotonic() - started
        return Result(
            status,
            task.token,
            task.number,
            task.slot,
            size,
            hits=samples.hits,
            misses=samples.misses,
            storage_bytes=samples.storage_bytes,
            fetch_seconds=samples.fetch_seconds,
            prep_seconds=max(0.0, spent - samples.fetch_seconds),
            skipped=len(samples.skipped),
            ended=samples.ended,
            ids=task.ids if len(samples.ids) == len(task.ids) else np.array(samples.ids, np.int64),
            note="\n".join([text_of(error).replace("\n", " ") for error in samples.skipped]).encode(errors="replace"),
            memory=place.memory if status == PRIVATE else None,
            value=value,
            started=started,
        )

    def build(self, task: Task) -> tuple[Any, Samples]:
        """The batch of a task as an object of this process, None if all its samples were left out; and its samples."""
        place = _Place(None, NO_SLOT)
        status, size, value, samples = self._build(task, Pending(task.ids), place, here=True)
        if status == PRIVATE:
            assert place.memory is not None
            value = read_own_record(place.memory[:size], copy=False)
        return value, samples

    def _build(self, task: Task, pending: Pending, place: _Place, here: bool) -> tuple[int, int, Any, Samples]:
        """Status, size and value of the batch, and its samples."""
        while True:
            if not len(task.ids):  # an empty batch of a `batch_sampler` is up to `collate_fn`
                return (*self._collate(task, Samples(), place, here), Samples())
            buffer = self._buffer(len(task.ids), place)
            samples = self.reader.finish(pending, self.seed, task.epoch, skip=self.skip, buffer=buffer)
            if buffer is not None and buffer.whole:
                return place.status, buffer.size, None, samples
            if not samples.values:
                return EMPTY, 0, None, samples
            try:
                return (*self._collate(task, samples, place, here), samples)
            except Drew:  # `collate_fn` drew for the first time, without a seed
                pending = self.reader.start(task.ids)

    def _buffer(self, count: int, place: _Place) -> BatchBuffer | None:
        """Where the samples go as they are prepared, if they are likely to be like those before."""
        if self._stacked is None or not self.reader.in_place:
            return None
        buffer = BatchBuffer(self._stacked, count, place.reserve)
        return buffer if buffer.size else None

    def _large(self, samples: Samples) -> bool:
        """Whether a batch is worth standing memory. Of a data set that is indexed, `storage_bytes` is its size."""
        if samples.storage_bytes >= LARGE or self.reader.direct:
            return samples.storage_bytes >= LARGE
        return payload_bytes(samples.values[0]) * len(samples.values) >= LARGE

    def _collate(self, task: Task, samples: Samples, place: _Place, here: bool) -> tuple[int, int, Any]:
        """Status, size and value of the batch: an object if it stays here, else in the slot."""
        values = samples.values
        if self.collate is not None:
            with self._drawing as drawing:
                drawing.seed(self.seed, task.epoch, -1 - task.number)
                value = self.collate(values[0] if self.single else values)
        elif self.single:
            sample = private(values[0]) if here and self.reader.indexes else values[0]  # of the data set itself
            value = default_convert(sample)
        elif not values:
            raise also_of_type(
                sampler_output(
                    "the batch sampler gave an empty batch: leave it out, or give a collate_fn that takes []"
                ),
                IndexError(),  # which torch's collate_fn raises
            )
        else:
            if self.reader.in_place or self._large(samples):
                size, self._stacked = stack(values, place.reserve)
                if size:
                    return place.status, size, None
            value = collate_default(values)
        if here:
            return WHOLE, 0, value
        size = write_batch(value, place.reserve)
        return place.status, size, None


@dataclass(frozen=True, slots=True)
class _Room:
    """Where a batch out of the cache goes.

    Attributes:
        count: of samples.
        size: bytes of the batch.
        top: where its head stands.
        head: that head; others write to the slot in between.
        aim: where the samples go.
    """

    count: int
    size: int
    top: Bytes
    head: Bytes
    aim: Aim


class _Place:
    """Where a batch goes: into its slot, or into memory of its own when it has none, or none that is large enough."""

    def __init__(self, slots: Slots | None, slot: int) -> None:
        self._slots = slots
        self.slot = slot
        self.memory: Bytes | None = None

    def reserve(self, size: int) -> Bytes:
        there = None if self._slots is None else self._slots.reserve(self.slot, size)
        if there is not None:
            self.memory = None
            return there
        self.memory = _buffers.take(size) if self._slots is None else np.empty(size, np.uint8)
        return self.memory

    @property
    def status(self) -> int:
        return READY if self.memory is None else PRIVATE


def failure(task: Task, error: Exception, *, here: bool) -> Result:
    """The result of a task that ended in `error`: the error itself, or for another process its bytes."""
    failed = Result(FAILED, task.token, task.number, task.slot)
    return replace(failed, value=error) if here else replace(failed, note=pack_error(error))
