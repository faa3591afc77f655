"""Builds one batch, in a worker process, a gathering thread or the training process.

A batch that is used in the process that builds it, without a slot, is an object; all others are records in memory.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from torch.utils.data import default_collate, default_convert

from stallfree.cache.buffers import Buffers
from stallfree.cache.records import Aim
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.reader import Reader
from stallfree.datasets.samples import Pending, Samples, index_plainly
from stallfree.errors import IdError, text_of
from stallfree.ipc.remote import pack_error
from stallfree.loader.collate import (
    BatchBuffer,
    Bytes,
    Collate,
    batch_structure,
    collate_default,
    compose,
    stack,
    write_batch,
)
from stallfree.loader.messages import EMPTY, FAILED, NO_SLOT, PRIVATE, READY, UNDONE, WHOLE, Ids, Result, Task
from stallfree.loader.ring import Slots
from stallfree.notes import described, note_samples
from stallfree.pipeline.codec import Structure, read_own_record
from stallfree.pipeline.randomness import Drew, Randomness
from stallfree.pipeline.values import payload_bytes, private
from stallfree.platform import shares_memory
from stallfree.sources.mapped import MapSource

LARGE = 1 << 20
"""Smallest batch, in bytes, that is stacked in persistent memory: for larger ones, fresh pages cost more than that."""

_buffers = Buffers()
log = logging.getLogger("stallfree")


@dataclass
class BatchBuilder:
    """Builds batches from tasks.

    Attributes:
        reader: makes the samples.
        slots: slots of the ring, which receive the batches of worker processes and gathering threads.
        collate: the user's `collate_fn`, or None for torch's default. Its random draws are a function of
            (seed, epoch, batch).
        single: a batch is a single sample, converted but not collated.
        seed: seed of all random draws.
        skip: skip samples that cannot be read or prepared, instead of raising the error.
    """

    reader: Reader
    slots: Slots
    collate: Collate | None
    single: bool
    seed: int
    skip: bool
    _stacked: Structure | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.reader.single = self.single
        self._can_gather = self.collate is None and not self.single and shares_memory()

    @cached_property
    def _drawing(self) -> Randomness:
        return Randomness(self.collate, lazy=True)

    # -- gathers ------------------------------------------------------------------------------------------------------

    def can_gather(self, ids: Ids) -> bool:
        """Return whether the cache holds all samples of the batch in their final form, for `gather`."""
        reader = self.reader
        cache = reader.cache
        return (
            self._can_gather
            and reader.plain
            and cache is not None
            and len(ids) > 0
            and cache.uncached_steps == reader.split.uncached  # as `current`, of which `plain` has tested the rest
            and cache.structure is not None
            and batch_structure(cache.structure, len(ids)) is not None
            and (cache.complete or bool(cache.resident(ids).all()))
        )

    def gather(self, task: Task) -> Result:
        """Copy the batch from the cache to its slot. Returns UNDONE if that fails, for example after an eviction."""
        started, result = time.monotonic(), Result(UNDONE, task.token, task.number, task.slot)
        cache, split = self.reader.cache, self.reader.split
        uncached = split.uncached  # read first: another thread may be changing the split
        if cache is None or not self.reader.plain or split.rest.transforms:
            return result
        destination = _Destination(self.slots, task.slot)
        try:
            target = self._gather_target(cache, len(task.ids), destination)
            if target is None or not cache.gather(task.ids, target.aim).all():
                return result
        except Exception as error:  # `finish` builds the batch instead, and raises an error that persists
            _log_of_gather(f"{type(error).__name__}: {text_of(error)}")
            return result
        if cache.uncached_steps == uncached:
            result.status, result.size, result.memory = destination.status, target.size, destination.memory
            result.hits, result.ids, result.started = len(task.ids), task.ids, started
            result.prep_seconds = time.monotonic() - started
        return result

    def _gather_target(self, cache: SampleCache, count: int, destination: _Destination) -> _GatherTarget | None:
        """Return the target of a gather of `count` samples; a slot's last target is reused if its count is the same."""
        targets = self.slots.derived
        target: _GatherTarget | None = targets.get(destination.slot)
        if target is not None and target.count == count:
            target.head[:] = target.saved_head
            return target
        composed = None if cache.structure is None else compose(cache.structure, count, destination.reserve)
        if composed is None:
            return None
        rows, size, head = composed
        target = _GatherTarget(count, size, head, head.copy(), cache.aim(rows))
        if destination.status == READY:
            targets[destination.slot] = target
        return target

    # -- all other batches --------------------------------------------------------------------------------------------

    def start(self, task: Task) -> Pending:
        """Start the reads and fetches of a task."""
        try:
            return self.reader.start(task.ids)
        except Exception:  # raised again by `finish`
            return Pending(task.ids)

    def finish(self, task: Task, pending: Pending, *, here: bool) -> Result:
        """Build the batch of a started task. Errors are returned in the result.

        Args:
            task: the task.
            pending: its reads and fetches.
            here: whether the batch is used in this process: it is then an object, unless the task has a slot.
        """
        destination = _Destination(None if here and task.slot == NO_SLOT else self.slots, task.slot, here)
        started = time.monotonic()
        try:
            status, size, value, samples = self._build(task, pending, destination)
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
            ids=task.ids if len(samples.ids) == len(task.ids) else np.array(samples.ids, np.int64),
            note="\n".join(map(described, samples.skipped)).encode(errors="replace"),
            memory=destination.memory if status == PRIVATE else None,
            value=value,
            started=started,
        )

    def _build(self, task: Task, pending: Pending, destination: _Destination) -> tuple[int, int, Any, Samples]:
        """Return status, size and value of the batch, and its samples."""
        while True:
            if not len(task.ids):  # `collate_fn` handles an empty batch of a `batch_sampler`
                with contextlib.suppress(Drew):  # it drew for the first time, without a seed
                    return (*self._collate(task, Samples(), destination), Samples())
                continue
            buffer = None
            if self._stacked is not None and self.reader.in_place:
                # Samples of a known structure are written to their rows as they are made.
                buffer = BatchBuffer(self._stacked, len(task.ids), destination.reserve)
                buffer = buffer if buffer.size else None
            samples = self.reader.finish(pending, self.seed, task.draws, skip=self.skip, buffer=buffer)
            if buffer is not None and buffer.whole:
                return (*destination.written(buffer.size), samples)
            if not samples.ids:
                return EMPTY, 0, None, samples
            try:
                return (*self._collate(task, samples, destination), samples)
            except Drew:  # `collate_fn` drew for the first time, without a seed
                deadline, pending = pending.deadline, self.reader.start(task.ids)
                pending.deadline = deadline
            except Exception as error:
                note_samples(error, samples.ids, "collating")
                raise

    def _large(self, samples: Samples) -> bool:
        """Return whether a batch has `LARGE` bytes; for an indexed data set, `storage_bytes` is the batch's size."""
        if samples.storage_bytes >= LARGE or self.reader.direct:
            return samples.storage_bytes >= LARGE
        return payload_bytes(samples.values[0]) * len(samples.values) >= LARGE

    def _collate(self, task: Task, samples: Samples, destination: _Destination) -> tuple[int, int, Any]:
        """Collate the samples and return status, size and value of the batch."""
        here = destination.here
        values = samples.values
        if self.collate is not None:
            with self._drawing as drawing:
                drawing.seed(self.seed, task.epoch, -1 - task.number)
                value = self.collate(values[0] if self.single else values)
        elif self.single:
            # A data set that is indexed may keep a reference to its sample.
            sample = private(values[0]) if here and self.reader.direct else values[0]
            value = default_convert(sample)
        elif samples.whole:
            value = collate_default(values)
        elif not values:
            raise IdError(
                "the batch sampler gave an empty batch: leave it out, or give a collate_fn that takes []",
                page="sampler-output",
            )
        else:
            if self.reader.in_place or self._large(samples):
                size, self._stacked = stack(values, destination.reserve)
                if size:
                    return destination.written(size)
            value = collate_default(values)
        if here:
            return WHOLE, 0, value
        return destination.written(write_batch(value, destination.reserve))


@dataclass(frozen=True, slots=True)
class _GatherTarget:
    """The memory that a gather fills.

    Attributes:
        count: number of samples.
        size: size of the batch in bytes.
        head: the head of the batch's record in that memory.
        saved_head: a copy of the head, since other batches overwrite the slot between two gathers.
        aim: the target in the form that the cache expects.
    """

    count: int
    size: int
    head: Bytes
    saved_head: Bytes
    aim: Aim


class _Destination:
    """The memory that a batch is written to.

    It is the batch's slot, or private memory if the batch has no slot or the slot is too small.

    Args:
        slots: slots of the ring; None for a batch without a slot.
        slot: number of the slot.
        here: whether the batch is used in this process.

    Attributes:
        memory: the private memory; None for a batch in its slot.
    """

    def __init__(self, slots: Slots | None, slot: int, here: bool = False) -> None:
        self._slots = slots
        self.slot, self.here = slot, here
        self.memory: Bytes | None = None

    def reserve(self, size: int) -> Bytes:
        """Return memory of at least `size` bytes."""
        memory = None if self._slots is None else self._slots.reserve(self.slot, size)
        if memory is not None:
            self.memory = None
            return memory
        self.memory = _buffers.take(size) if self._slots is None else np.empty(size, np.uint8)
        return self.memory

    @property
    def status(self) -> int:
        return READY if self.memory is None else PRIVATE

    def written(self, size: int) -> tuple[int, int, Any]:
        """Return status, size and value of a batch whose `size` bytes have been written."""
        if self.here and self.memory is not None:
            return WHOLE, size, read_own_record(self.memory[:size], copy=False)
        return self.status, size, None


@lru_cache(maxsize=16)
def _log_of_gather(problem: str) -> None:
    """Log an error of a gather, once for each problem, with the traceback."""
    log.warning(
        "a batch could not be gathered from the cache and is made sample by sample, which is slower (%s):\n%s",
        problem,
        traceback.format_exc(),
    )


def failure(task: Task, error: BaseException, *, here: bool) -> Result:
    """Return the result of a task that raised `error`; for another process (not `here`), the error is packed."""
    failed = Result(FAILED, task.token, task.number, task.slot)
    return replace(failed, value=error) if here else replace(failed, note=pack_error(error))


class PlainBatches:
    """Batches of a data set without a cache, made as torch's loader makes them.

    A batch is `collate_fn([dataset[id] for id in ids])`; random numbers come from the global generators.

    Args:
        reader: of the data set.
        collate: the user's `collate_fn`, or None for torch's default.
        single: a batch is a single sample.
        skip: leave out samples that fail.
    """

    def __init__(self, reader: Reader, collate: Callable[[Any], Any] | None, single: bool, skip: bool) -> None:
        self._source = source = reader.source
        self._dataset: Any = source.dataset if type(source) is MapSource else _Prepared(reader)
        self._several = None if single or skip else getattr(self._dataset, "__getitems__", None)
        self._collate = collate or (default_convert if single else default_collate)
        self._single, self._skip = single, skip

    def make(self, ids: list[int]) -> tuple[Any, Samples | None]:
        """Return the batch of `ids`; and, if samples were left out, those that are in it.

        Raises the error of a sample that fails, unless it is left out.
        """
        samples = None
        if self._several is not None:
            try:
                values: Any = self._several(ids)
            except Exception as error:
                note_samples(error, ids, "fetching")
                raise
        elif not self._skip:
            values = index_plainly(self._dataset, self._source, ids)
        else:
            samples = self._with_gaps(ids)
            values = samples.values
            if not values and ids:
                return None, samples
        try:
            return self._collate(values[0] if self._single else values), samples
        except Exception as error:
            note_samples(error, ids if samples is None else samples.ids, "collating")
            raise

    def _with_gaps(self, ids: list[int]) -> Samples:
        samples = Samples()
        for id in ids:
            try:
                samples.values.append(self._dataset[id])
            except Exception as error:
                samples.add_failure(error, self._source, id, "fetching", skip=True)
            else:
                samples.ids.append(id)
        return samples


class _Prepared:
    """The samples of a source and its transforms, by index."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, id: int) -> Any:
        return self._reader.rest(self._reader.source.fetch(id))
