"""One epoch of one job: the batches served by the group, then those prepared locally.

Chunks come from `Member.take`, or from a local worker pool for gaps; `Rebatching` converts them into the job's own
batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch

from stallfree.loader.messages import NOTHING, Ids
from stallfree.loader.pool import Counts, Options, WorkerPool, new_counts
from stallfree.loader.run import Batch, Pass, Progress, pinned
from stallfree.notes import note_samples, raisable
from stallfree.pipeline.randomness import Randomness
from stallfree.shared.member import Chunk, EpochAdvanced, Member, Skipped
from stallfree.shared.rebatching import Rebatching


@dataclass
class JobContext:
    """State shared by all epochs of a job.

    Attributes:
        member: the job's membership in its group.
        rebatching: returns the `Rebatching` of an epoch.
        options: options of the local worker pool, for chunks that the group does not serve to this job.
        with_ids: yield `Batch` objects.
        transform: the job's own transform, or None.
        pin: yield pinned memory.
        counts: counters of the batches served by the group.
        local_counts: counters of the chunks prepared locally.
        local: number of chunks prepared locally.
        next_epoch: epoch of the next pass.
    """

    member: Member
    rebatching: Callable[[int], Rebatching]
    options: Options
    with_ids: bool
    transform: Callable[[Any], Any] | None = None
    pin: bool = False
    counts: Counts = field(default_factory=new_counts)
    local_counts: Counts = field(default_factory=new_counts)
    local: int = 0
    next_epoch: int = 0

    @cached_property
    def drawing(self) -> Randomness:
        """Seeds the random draws of `transform`."""
        return Randomness(self.transform)


class EpochIterator:
    """Yields the batches that the group serves, then prepares the remaining ones locally.

    Args:
        loader: kept alive as long as this object.
        context: state shared by the job's epochs.
        epoch: epoch to start with; replaced by the group's if the group is further on.
        done: numbers of the batches already yielded, if the epoch is resumed.

    Attributes:
        done: numbers of the batches yielded.
        ended: whether the pass has ended.
        epoch: the group's epoch.
    """

    def __init__(self, loader: object, context: JobContext, epoch: int, done: frozenset[int]) -> None:
        self._loader = loader
        self.done = set(done)
        self._context = context
        self._batches = len(context.member.setup.order)
        self._ready: deque[tuple[int, Any, Ids]] = deque()
        self._gaps: deque[tuple[int, int]] = deque()  # ranges of chunk numbers within the epoch
        self._pool: WorkerPool | None = None
        self._local: tuple[Pass, Progress, int] | None = None
        self.ended = False
        self._skipped = False
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._rebatching = self._context.rebatching(epoch)
        self._first = epoch * self._batches
        self._at = self._first + self._rebatching.first_chunk(self.done)
        self._end = self._first + self._rebatching.chunks

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        return len(self._rebatching)

    def __next__(self) -> Any:
        while not self._ready:
            if self.ended:
                raise StopIteration
            try:
                self._next_chunk()
            except StopIteration:
                self.close()
                raise
        return self._finish_batch(*self._ready.popleft())

    def _finish_batch(self, number: int, data: Any, ids: Ids) -> Any:
        context = self._context
        self.done.add(number)
        if context.transform is not None:
            with context.drawing as drawing:
                drawing.seed(context.options.seed, self.epoch, -1 - number)
                try:
                    data = context.transform(data)
                except Exception as error:
                    note_samples(error, ids.tolist(), "transforming")
                    if isinstance(error, StopIteration):
                        raise raisable(error) from error
                    raise
        if context.pin and torch.cuda.is_available():
            data = pinned(data)
        context.counts["batches"] += 1
        context.counts["samples"] += len(ids)
        return Batch(data, torch.from_numpy(np.array(ids)), None) if context.with_ids else data

    def _next_chunk(self) -> None:
        """Take one more chunk and queue the batches that it completes. Raises `StopIteration` at the end."""
        while self._at < self._end:
            started = time.monotonic()
            try:
                got = self._context.member.take(self._at, self._end)
            finally:
                self._context.counts["wait_seconds"] += time.monotonic() - started
            if isinstance(got, EpochAdvanced) and not self.done:
                self._begin(got.epoch)
            elif isinstance(got, EpochAdvanced):  # the rest of an active epoch is still required
                self._leave_to_local(self._end)
            elif isinstance(got, Skipped):
                self._leave_to_local(min(got.start, self._end))
            else:
                self._at += 1
                self._add_chunk(got)
                return
        self._skip_rest()
        self._next_local()

    def _add_chunk(self, chunk: Chunk) -> None:
        chunk.result.add_to(self._context.counts)
        ids = NOTHING if chunk.error is not None else chunk.result.ids
        self._feed(chunk.number - self._first, chunk.data, ids)
        if chunk.error is not None:
            raise chunk.error

    def _leave_to_local(self, end: int) -> None:
        """Prepare the batches before `end` locally."""
        if self._at < end:
            self._gaps.append((self._at - self._first, end - self._first))
            self._at = end

    def continue_alone(self) -> None:
        """Prepare the rest of this epoch locally, while the group serves the job's next one."""
        self._leave_to_local(self._end)
        self._skip_rest()

    def _skip_rest(self) -> None:
        """Notify the group that no more of this epoch is needed."""
        if not self._skipped:
            self._skipped = True
            self._context.next_epoch = self.epoch + 1
            self._context.member.skip(self._first + self._batches)

    def _next_local(self) -> None:
        """Prepare one chunk locally that the group does not serve to this job."""
        while True:
            if self._local is None:
                if not self._gaps:
                    raise StopIteration
                self._local = self._start_local(*self._gaps.popleft())
            epoch, progress, at = self._local
            batch: tuple[Any, Ids] | None = None
            try:
                batch = next(epoch, None)
            finally:  # the chunks passed over are empty, or one has raised
                self._feed_empty(at, progress.handed_out - (batch is not None))
                self._local = epoch, progress, progress.handed_out
            if batch is not None:
                self._context.local += 1
                self._feed(progress.handed_out - 1, *batch)
                return
            self._local = None
            if self._ready:
                return

    def _feed_empty(self, start: int, stop: int) -> None:
        for number in range(start, stop):
            self._feed(number, None, NOTHING)

    def _feed(self, number: int, data: Any, ids: Ids) -> None:
        made = self._rebatching.feed(number, data, ids)
        self._ready.extend(batch for batch in made if batch[0] not in self.done)

    def _start_local(self, start: int, stop: int) -> tuple[Pass, Progress, int]:
        context = self._context
        if self._pool is None:
            self._pool = WorkerPool(context.options, context.options.seed & 0x7FFFFFFF, context.local_counts)
        batches = islice(context.member.setup.order.batches(self.epoch, start), stop - start)
        progress = Progress(batches, self.epoch, start)
        return Pass(self._pool, progress, deliver=_with_ids), progress, start

    def close(self) -> None:
        """End this pass. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self._ready.clear()
        self._skip_rest()
        if self._local is not None:
            self._local[0].close()
        if self._pool is not None:
            self._pool.close()

    def __del__(self) -> None:
        if hasattr(self, "_at"):
            self.close()


def _with_ids(data: Any, ids: Ids) -> tuple[Any, Ids]:
    return data, ids
