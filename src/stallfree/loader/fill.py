"""Do one task: fill a slot with a batch. The same code in worker processes, in the gathering thread and inline."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import default_convert

from stallfree.cache import Aim, SampleCache
from stallfree.error_types import also_of_type
from stallfree.errors import CodecError, InputError
from stallfree.loader.collate import Bytes, Collate, batch_structure, collate_default, compose, stack, write_batch
from stallfree.loader.filling import Samples
from stallfree.loader.messages import EMPTY, FAILED, PRIVATE, READY, UNDONE, WHOLE, Ids, Result, Task
from stallfree.loader.reader import Pending, Reader
from stallfree.loader.ring import Slots
from stallfree.loader.rows import Rows
from stallfree.pipeline.randomness import Randomness
from stallfree.pipeline.structure import Structure
from stallfree.platform import shares_memory
from stallfree.remote import pack_error
from stallfree.stores import RedisCache, TieredCache


@dataclass
class Filler:
    """What it takes to fill slots.

    Attributes:
        reader: gives samples.
        slots: where batches go.
        collate: the user's function, or None for torch's default. What it draws is a function of (seed, epoch, batch).
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
        self._drawing = Randomness(self.collate)

    def can_gather(self, ids: Ids) -> bool:
        """Whether the batch is nothing but a gather out of the cache at this moment."""
        cache = self.reader.cache
        return (
            shares_memory()
            and self.collate is None
            and not self.single
            and len(ids) > 0
            and cache is not None
            and self.reader.plain
            and self.reader.current
            and cache.structure is not None
            and batch_structure(cache.structure, len(ids)) is not None
            and (cache.complete or bool(cache.resident(ids).all()))
        )

    def gather(self, task: Task) -> Result:
        """Fill the slot straight from the cache. UNDONE when that cannot be done, as when a sample has vanished."""
        started = time.monotonic()
        cache, uncached = self.reader.cache, self.reader.uncached
        place = _Place(self.slots, task.slot)
        try:
            if cache is None or isinstance(cache, RedisCache) or not self.reader.plain:
                return Result(UNDONE, task.token, task.number, task.slot)
            room = self._room(cache, len(task.ids), place)
            if room is None or not cache.gather(task.ids, room.aim).all() or cache.uncached_steps != uncached:
                return Result(UNDONE, task.token, task.number, task.slot)
        except Exception:  # it will be done in another way; if that fails too, the error is heard of
            return Result(UNDONE, task.token, task.number, task.slot)
        return Result(
            place.status,
            task.token,
            task.number,
            task.slot,
            room.size,
            hits=len(task.ids),
            prep_seconds=time.monotonic() - started,
            ids=task.ids,
            memory=place.memory,
            started=started,
        )

    def _room(self, cache: SampleCache | TieredCache, count: int, place: _Place) -> _Room | None:
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

    def start(self, task: Task) -> Pending:
        """Start the fetches of a task."""
        try:
            return self.reader.start(task.ids)
        except Exception:  # it will come again, and be heard of, when the task is done
            return Pending(task.ids, {})

    def finish(self, task: Task, pending: Pending, *, here: bool) -> Result:
        """Prepare and collate a task that was started. Errors are in the result.

        Args:
            task: what to do.
            pending: its fetches.
            here: whether the result stays in this process, so that objects may be handed over as they are.
        """
        if not pending.fetches and not pending.asked and self.can_gather(task.ids):
            done = self.gather(task)
            if done.status != UNDONE:
                return done
        started = time.monotonic()
        place = _Place(self.slots, task.slot)
        status, size, value = EMPTY, 0, None
        try:
            if not len(task.ids):  # an empty batch of a `batch_sampler` is the business of `collate_fn`
                status, size, value = self._collate(task, Samples([], []), place, here)
            rows = self._rows(len(task.ids), place)
            samples = self.reader.finish(pending, self.seed, task.epoch, skip=self.skip, rows=rows)
            if rows is not None and rows.whole:
                status, size = place.status, rows.size
            elif samples.values:
                status, size, value = self._collate(task, samples, place, here)
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
            ids=np.asarray(samples.ids, np.int64),
            note="\n".join(str(error).replace("\n", " ") for error in samples.skipped).encode(errors="replace"),
            memory=place.memory if status == PRIVATE else None,
            value=value,
            started=started,
        )

    def _rows(self, count: int, place: _Place) -> Rows | None:
        """Where the samples go as they are prepared, if they are likely to be like those before."""
        if self._stacked is None or not count or not self.reader.in_place:
            return None
        rows = Rows(self._stacked, count, place.reserve)
        return rows if rows.size else None

    def _collate(self, task: Task, samples: Samples, place: _Place, here: bool) -> tuple[int, int, Any]:
        """Status, size and value of the batch. One that was made in fresh memory and stays here needs no slot."""
        values = samples.values
        if self.collate is not None:
            with self._drawing as drawing:
                drawing.seed(self.seed, task.epoch, -1 - task.number)
                value = self.collate(values[0] if self.single else values)
        elif self.single:
            value = default_convert(values[0])  # type: ignore[no-untyped-call]  # which may be memory of the data set
        elif not values:
            raise also_of_type(
                InputError("the batch sampler gave an empty batch: leave it out, or give a collate_fn that takes []"),
                IndexError(),  # which torch's collate_fn raises
            )
        else:
            size, self._stacked = stack(values, place.reserve)
            if size:
                return place.status, size, None
            value = collate_default(values)
        if here and (self.collate is not None or not self.single):
            return WHOLE, 0, value
        try:
            size = write_batch(value, place.reserve)
        except CodecError:
            if not here:
                raise
            return WHOLE, 0, value
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
    """Where a batch goes: into its slot, or into memory of its own when the slot has no room for it."""

    def __init__(self, slots: Slots, slot: int) -> None:
        self._slots = slots
        self.slot = slot
        self.memory: Bytes | None = None

    def reserve(self, size: int) -> Bytes:
        there = self._slots.reserve(self.slot, size)
        if there is not None:
            self.memory = None
            return there
        self.memory = np.empty(size, np.uint8)
        return self.memory

    @property
    def status(self) -> int:
        return READY if self.memory is None else PRIVATE


def failure(task: Task, error: Exception, *, here: bool) -> Result:
    """The result of a task that ended in `error`: the error itself, or for another process its bytes."""
    failed = Result(FAILED, task.token, task.number, task.slot)
    return replace(failed, value=error) if here else replace(failed, note=pack_error(error))
