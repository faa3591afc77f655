"""Builds one batch, in a worker process, a gathering thread or the training process.

A batch that is used in the process that builds it, without a slot, is an object; all others are records in memory.
"""

import time
import traceback
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from torch.utils.data import default_convert

from stallfree.cache.buffers import Buffers
from stallfree.cache.records import Aim
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.reader import Reader
from stallfree.datasets.samples import Pending, Samples
from stallfree.errors import IdError, text_of
from stallfree.loader.collate import BatchBuffer, Collate, batch_structure, collate_default, compose, stack, write_batch
from stallfree.loader.messages import EMPTY, FAILED, GATHERER, PRIVATE, READY, UNDONE, WHOLE, Bytes, Ids, Result, Task
from stallfree.loader.ring import Slots
from stallfree.pipeline.codec import Structure, read_own_record
from stallfree.pipeline.randomness import Drew, Randomness
from stallfree.pipeline.values import payload_bytes, private
from stallfree.platform import shares_memory
from stallfree.raising import described, log, note_samples

LARGE = 1 << 20
"""Smallest batch, in bytes, that is stacked in persistent memory: for larger ones, fresh pages cost more than that."""

_buffers = Buffers()


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
    """The memory that a batch is written to: its slot, or other memory if it has none or that is too small.

    Args:
        slots: slots of the ring; None in a worker on another machine.
        slot: number of the slot.
        here: whether the batch is used in this process.

    Attributes:
        memory: None for a batch in its slot.
        status, size, value: of the result; of a batch without samples at first.
    """

    def __init__(self, slots: Slots | None, slot: int, here: bool = False) -> None:
        self._slots, self.slot, self.here = slots, slot, here
        self.memory: Bytes | None = None
        self.status, self.size, self.value = EMPTY, 0, None

    def reserve(self, size: int) -> Bytes:
        """Return memory of at least `size` bytes."""
        memory = None if self._slots is None else self._slots.reserve(self.slot, size)
        if memory is not None:
            self.memory = None
            return memory
        self.memory = _buffers.take(size) if self.here or self._slots is None else np.empty(size, np.uint8)
        return self.memory

    def finish(self, size: int) -> None:
        """Note that the `size` bytes of the batch have been written."""
        self.size, self.status = size, READY if self.memory is None else PRIVATE
        if self.here and self.memory is not None:
            self.status, self.value, self.memory = WHOLE, read_own_record(self.memory[:size], copy=False), None


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
        started, result = time.monotonic(), Result(UNDONE, task.token, task.number, task.slot, worker=GATHERER)
        cache, split = self.reader.cache, self.reader.split
        uncached = split.uncached  # read first: another thread may be changing the split
        if cache is None or not self.reader.plain or split.later_steps.transforms:
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
            destination.finish(target.size)
            result.status, result.size, result.memory = destination.status, destination.size, destination.memory
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
        if destination.memory is None:
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
        destination = _Destination(self.slots, task.slot, here)
        started = time.monotonic()
        try:
            while (samples := self._build(task, pending, destination)) is None:
                deadline, pending = pending.deadline, self.reader.start(task.ids)
                pending.deadline = deadline
        except Exception as error:
            return failure(task, error)
        spent = time.monotonic() - started
        return Result(
            destination.status,
            task.token,
            task.number,
            task.slot,
            destination.size,
            hits=samples.hits,
            misses=samples.misses,
            storage_bytes=samples.storage_bytes,
            fetch_seconds=samples.fetch_seconds,
            prep_seconds=max(0.0, spent - samples.fetch_seconds),
            skipped=len(samples.skipped),
            ids=task.ids if len(samples.ids) == len(task.ids) else np.array(samples.ids, np.int64),
            note="\n".join(map(described, samples.skipped)).encode(errors="replace"),
            memory=destination.memory,
            value=destination.value,
            started=started,
        )

    def _build(self, task: Task, pending: Pending, destination: _Destination) -> Samples | None:
        """Build the batch and return its samples; None if `collate_fn` drew for the first time, without a seed."""
        samples = Samples()
        if len(task.ids):  # `collate_fn` handles an empty batch of a `batch_sampler`
            buffer = None
            if self._stacked is not None and self.reader.in_place:
                # Samples of a known structure are written to their rows as they are made.
                buffer = BatchBuffer(self._stacked, len(task.ids), destination.reserve)
                buffer = buffer if buffer.size else None
            samples = self.reader.finish(pending, self.seed, task.draws, skip=self.skip, buffer=buffer)
            if buffer is not None and buffer.whole:
                destination.finish(buffer.size)
                return samples
            if not samples.ids:
                return samples
        try:
            self._collate(task, samples, destination)
        except Drew:
            return None
        except Exception as error:
            if samples.ids:
                note_samples(error, samples.ids, "collating")
            raise
        return samples

    def _large(self, samples: Samples) -> bool:
        """Return whether a batch has `LARGE` bytes; for an indexed data set, `storage_bytes` is the batch's size."""
        if samples.storage_bytes >= LARGE or self.reader.direct:
            return samples.storage_bytes >= LARGE
        return payload_bytes(samples.values[0]) * len(samples.values) >= LARGE

    def _collate(self, task: Task, samples: Samples, destination: _Destination) -> None:
        values, here = samples.values, destination.here
        if self.collate is not None:
            with self._drawing as drawing:
                drawing.seed(self.seed, task.epoch, -1 - task.number)
                value = self.collate(values[0] if self.single else values)
        elif self.single:
            # A data set that is indexed may keep a reference to its sample.
            value = default_convert(private(values[0]) if here and self.reader.direct else values[0])
        elif not samples.whole and not values:
            raise IdError(
                "the batch sampler gave an empty batch: leave it out, or give a collate_fn that takes []",
                page="sampler-output",
            )
        else:
            if not samples.whole and (self.reader.in_place or self._large(samples)):
                size, self._stacked = stack(values, destination.reserve)
                if size:
                    destination.finish(size)
                    return
            value = collate_default(values)
        if here:
            destination.status, destination.memory, destination.value = WHOLE, None, value
        else:
            destination.finish(write_batch(value, destination.reserve))


@lru_cache(maxsize=16)
def _log_of_gather(problem: str) -> None:
    """Log an error of a gather, once for each problem, with the traceback."""
    log.warning(
        "a batch could not be gathered from the cache and is made sample by sample, which is slower (%s):\n%s",
        problem,
        traceback.format_exc(),
    )


def failure(task: Task, error: BaseException) -> Result:
    """Return the result of a task that raised `error`."""
    return Result(FAILED, task.token, task.number, task.slot, value=error)
