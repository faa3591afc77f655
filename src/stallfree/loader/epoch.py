"""One pass over a plan: submits tasks to the pool, orders the results, and leases slots to batches."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import default_collate, default_convert

from stallfree.datasets.direct import PlainBatches
from stallfree.datasets.epoch_source import Position
from stallfree.errors import (
    StallfreeError,
    WaitError,
    batch_timeout,
    iteration_over,
)
from stallfree.ipc.remote import unpack_error
from stallfree.loader.messages import EMPTY, FAILED, NO_SLOT, READY, UNDONE, WHOLE, Ids, Result, Task
from stallfree.loader.pool import KEPT, Counts, WorkerPool
from stallfree.notes import described, raisable
from stallfree.pipeline.codec import read_own_record
from stallfree.units import format_size

_REPORTED_SKIPS = 5

OVER = "this iteration is over: the loader was iterated again or closed, or an error ended it. Begin a new one"

log = logging.getLogger("stallfree")


def begin_epoch(pool: WorkerPool, progress: Progress) -> Epoch | DirectEpoch:
    """Begin an epoch: batches are started ahead if possible, else built one by one in this process."""
    return (DirectEpoch if pool.direct else Epoch)(pool, progress)


class _Pass:
    """Base class of passes over a plan. After an error in a batch, the next call continues with the following batch.

    Args:
        pool: builds the batches.
        progress: holds the remaining batches.
    """

    def __init__(self, pool: WorkerPool, progress: Progress) -> None:
        self.pool = pool
        self.progress = progress
        self.closed = False
        self._owner = os.getpid()
        self._token = pool.begin()
        self._log = pool.log


class Epoch(_Pass):
    """Yields `(batch, ids)` in the order of the plan; batches are started ahead."""

    def __init__(self, pool: WorkerPool, progress: Progress) -> None:
        super().__init__(pool, progress)
        self._tasks: dict[int, Task] = {}  # started, not delivered
        self._results: dict[int, Result] = {}  # of those, the finished ones
        self._start_more()

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> tuple[Any, Ids]:
        while True:
            result = self._next_result()
            if result is None:
                raise self.progress.take_problem() or StopIteration
            self._count(result)
            batch = self._hand_out(result)
            if batch is not None:
                return batch

    def _next_result(self) -> Result | None:
        """Wait for the next result; None at the end.

        Any interruption other than a timeout ends the iteration.
        """
        if self.closed or self.pool.closed or self._token != self.pool.token:
            raise iteration_over(OVER)
        if self._owner != os.getpid():  # its results would be those that the parent awaits
            raise iteration_over(f"this iteration is that of process {self._owner}, which was forked. Begin a new one")
        try:
            self._start_more()
            started = time.monotonic()
            number = self.progress.handed_out
            while number not in self._tasks:
                if self.progress.peek() is None:
                    return None
                self._wait(started, None)  # batches of an earlier iteration still hold all slots
                self._start_more()
            while number not in self._results:
                self._wait(started, self._tasks[number])
            if self.pool.counts_waits:
                self.pool.counts["wait_seconds"] += time.monotonic() - started
            self._start_more(handing_out=1)  # now, not after the next training step
            return self._results.pop(number)
        except WaitError:
            raise
        except BaseException:
            self.close()
            self.pool.close()
            raise

    def _start_more(self, handing_out: int = 0) -> None:
        """Start batches until enough are in flight, not counting those just delivered, or no slot is free."""
        pool, progress = self.pool, self.progress
        most = pool.ahead + handing_out
        while len(self._tasks) < most and pool.room and progress.peek() is not None:
            number, ids, repeat = progress.start()
            task = self._tasks[number] = Task(self._token, number, NO_SLOT, progress.number, ids, repeat)
            pool.submit(task, gather=pool.builder.can_gather(ids))

    def _wait(self, started: float, task: Task | None) -> None:
        """Wait until `task` or any other task has progressed."""
        if self._collect(task) and (task is None or task.number in self._results):
            return
        left = self.pool.seconds - (time.monotonic() - started)
        if left > 0:
            self.pool.wait(left)
        elif task is None:
            raise batch_timeout(
                f"no slot of the staging ring came free within {self.pool.seconds:g} s: workers are still busy with "
                "batches of an earlier iteration. Give a larger timeout if they take so long"
            )
        else:
            raise batch_timeout(
                f"batch {task.number} of epoch {task.epoch} did not come within {self.pool.seconds:g} s; it is with "
                f"{self.pool.describe(task)}; its samples are {task.ids.tolist()}. "
                "Give a larger timeout if they take so long"
            )

    def _collect(self, awaited: Task | None) -> bool:
        """Take the available results; return whether there were any."""
        results = self.pool.poll(None if awaited is None else awaited.number)
        for result in results:
            if result.status == UNDONE:
                self.pool.counts["retries"] += 1
                task = self._tasks[result.number]
                task.slot = result.slot
                self.pool.submit(task, gather=False)
            else:
                self._results[result.number] = result
        return bool(results)

    def _count(self, result: Result) -> None:
        counts = self.pool.counts
        counts["hits"] += result.hits
        counts["misses"] += result.misses
        counts["storage_bytes"] += result.storage_bytes
        counts["fetch_seconds"] += result.fetch_seconds
        counts["prep_seconds"] += result.prep_seconds
        counts["queue_depth"] = len(self._results)
        if self._log is not None:
            self._log.prepared(result, self.progress.number)
        if result.skipped:
            _report_skips(counts, result.note.decode().split("\n"))

    def _hand_out(self, result: Result) -> tuple[Any, Ids] | None:
        """The batch in a result, None if it is empty."""
        ring, counts = self.pool.ring, self.pool.counts
        self._tasks.pop(result.number, None)
        self.progress.hand_out()
        if result.status == READY and ring.leased < KEPT:
            memory = ring.slots.view(result.slot, result.size)
            ring.lease(result.slot, memory)
            data = read_own_record(memory, copy=False)
        else:
            try:
                if result.status == FAILED:
                    raise raisable(unpack_error(result.note) if result.value is None else result.value)
                if result.status == EMPTY:
                    return None
                data = self._apart(result)
            finally:
                ring.give(result.slot)
        counts["batches"] += 1
        counts["samples"] += len(result.ids)
        return data, result.ids

    def _apart(self, result: Result) -> Any:
        """A copy of a batch without a slot."""
        if result.status == WHOLE:
            return result.value
        self.pool.counts["private_copies"] += 1
        if result.status == READY:
            return read_own_record(self.pool.ring.slots.view(result.slot, result.size), copy=True)
        if not self.pool.warned_of_size:
            self.pool.warned_of_size = True
            limit = self.pool.ring.slots.limit
            log.warning(
                "a batch of %s has no room in the staging ring (%s) and is copied: give a larger staging",
                format_size(result.size),
                "shared memory is full" if limit is None else f"slots of {format_size(limit)}",
            )
        assert result.memory is not None
        return read_own_record(result.memory, copy=False)

    def close(self) -> None:
        """Stop. Slots of batches in flight are freed when their results arrive."""
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = True
        for result in self._results.values():
            self.pool.ring.give(result.slot)
        self._tasks.clear()
        self._results.clear()
        if not self.pool.closed and self._token == self.pool.token:
            self.pool.begin()  # drops batches in flight
            self.pool.counts["queue_depth"] = 0


class DirectEpoch(_Pass):
    """Like `Epoch`, but the training process builds each batch on request: nothing is started ahead.

    Without a cache and a prefetcher, batches and their random numbers are those of torch's loader.
    """

    def __init__(self, pool: WorkerPool, progress: Progress) -> None:
        super().__init__(pool, progress)
        builder = pool.builder
        self._plain = None
        if pool.counts_waits and builder.reader.cache is None:
            collate = builder.collate or (default_convert if builder.single else default_collate)
            self._plain = PlainBatches(builder.reader, collate, builder.single, builder.skip)

    def __iter__(self) -> DirectEpoch:
        return self

    def __next__(self) -> tuple[Any, Ids]:
        pool, progress = self.pool, self.progress
        while True:
            if self.closed or pool.closed:
                raise iteration_over(OVER)
            started = time.monotonic()
            try:
                ids = progress.peek()
            except BaseException:
                self._end()
                raise
            if ids is None:
                raise progress.take_problem() or StopIteration
            number, _, repeat = progress.start()
            try:
                if self._plain is not None:
                    data, samples = self._plain.make(ids.tolist())
                else:
                    data, samples = pool.builder.build(Task(self._token, number, NO_SLOT, progress.number, ids, repeat))
            except Exception as error:
                progress.hand_out()
                if isinstance(error, StopIteration):
                    raise raisable(error) from error
                raise
            except BaseException:
                self._end()
                raise
            progress.hand_out()
            now = time.monotonic()
            counts = pool.counts
            if pool.counts_waits:
                counts["wait_seconds"] += now - started
            counts["prep_seconds"] += now - started
            if self._log is not None:
                self._log.built(started, now, number, progress.number)
            counts["misses"] += len(ids)
            if samples is not None:
                counts["storage_bytes"] += samples.storage_bytes
                if samples.skipped:
                    _report_skips(counts, [*map(described, samples.skipped)])
                if len(samples.ids) < len(ids):
                    ids = np.array(samples.ids, np.int64)
                    if not len(ids):
                        continue
            counts["batches"] += 1
            counts["samples"] += len(ids)
            return data, ids

    def _end(self) -> None:
        """End the iteration after an interruption."""
        self.close()
        self.pool.close()

    def close(self) -> None:
        """Stop."""
        if not self.closed and os.getpid() == self._owner:
            self.closed = True
            if not self.pool.closed and self._token == self.pool.token:
                self.pool.rest()


def _report_skips(counts: Counts, problems: Sequence[str]) -> None:
    room = max(0, _REPORTED_SKIPS - counts["skips"])
    counts["skips"] += len(problems)
    for problem in problems[:room]:
        log.warning("left out a sample: %s", problem)


RECENT = 64
"""Delivered batches whose ids are kept: a prefetcher takes batches ahead, and may request an earlier state."""


class Progress:
    """The progress of an epoch. It outlives the iteration, so that a state can be saved afterwards.

    Args:
        batches: the ids of each remaining batch.
        number: of the epoch.
        first: number of the first of `batches`; those before it were delivered by an earlier process.
        dealt: see `Position`.
        repeats: counts how often the ids have come before in this epoch; None: each comes once.

    Attributes:
        number, first: as given.
        handed_out: batches delivered, those before `first` included.
    """

    def __init__(
        self,
        batches: Iterator[Ids],
        number: int,
        first: int = 0,
        dealt: dict[str, int] | None = None,
        repeats: Repeats | None = None,
    ) -> None:
        self.number = number
        self.first = self.handed_out = first
        self._dealt = dealt
        self._batches, self._repeats = batches, repeats
        self._problem: Exception | None = None  # exception of the sampler, which ends the epoch
        self._ready: deque[tuple[Ids, int]] = deque()  # drawn from the sampler, not started
        self._started: deque[tuple[Ids, int]] = deque()  # started, not delivered
        self._recent: deque[tuple[Ids, int]] = deque(maxlen=RECENT)  # delivered

    def peek(self) -> Ids | None:
        """The ids of the next batch to start, None at the end."""
        if not self._ready:
            self._draw()
        return self._ready[0][0] if self._ready else None

    def _draw(self) -> bool:
        """Take one batch from the sampler; False if there is none."""
        try:
            ids = next(self._batches)
            self._ready.append((ids, 0 if self._repeats is None else self._repeats.count(ids)))
        except StopIteration:
            return False
        except Exception as problem:
            self._problem, self._batches = problem, iter(())
            return False
        return True

    def take_problem(self) -> Exception | None:
        """The exception of the sampler. Removed here, because its traceback refers to the iterating frame."""
        problem, self._problem = self._problem, None
        return problem

    def start(self) -> tuple[int, Ids, int]:
        """Take the batch that `peek` returned: its number, its ids, and how often these have come before."""
        number = self.handed_out + len(self._started)
        batch = self._ready.popleft()
        self._started.append(batch)
        return number, *batch

    def hand_out(self) -> None:
        """Record the delivery of the first batch in flight."""
        self._recent.append(self._started.popleft())
        self.handed_out += 1

    def position(self, batches: int, endless: Callable[[int, int], bool] | None) -> Position:
        """The position of the epoch after `batches` delivered batches, at most 64 ago.

        Args:
            batches: as above.
            endless: returns whether a sampler that has so many ids left, and batches of them, counts as endless; None
                for an epoch that is planned by (seed, epoch).

        With `endless`, this reads the rest of the sampler. Raises `StallfreeError` if that fails.
        """
        if endless is None or self._ends_not(endless):
            return Position(batches, None, self._dealt)
        recent = list(self._recent)[len(self._recent) - (self.handed_out - batches) :]
        rest = [*recent, *self._started, *self._ready]
        repeats = [repeat for _, repeat in rest]
        return Position(batches, [ids.tolist() for ids, _ in rest], self._dealt, repeats if any(repeats) else None)

    def _ends_not(self, endless: Callable[[int, int], bool]) -> bool:
        """Draw the rest of the sampler. Returns True as soon as it counts as endless."""
        left = sum(len(ids) or 1 for ids, _ in self._ready)
        while not endless(left, len(self._ready)):
            if not self._draw():
                break
            left += len(self._ready[-1][0]) or 1
        else:
            return True
        if self._problem is not None:
            raise StallfreeError(
                f"there is no state to take: the sampler raised {self._problem!r}. Correct the sampler",
                page="sampler-output",
            )
        return False


class Repeats:
    """Counts how often the ids of an epoch have come, since a sample that comes again draws other random numbers.

    Args:
        known: the counts of the first batches, from a state.
    """

    def __init__(self, known: Sequence[int] = ()) -> None:
        self._known = deque(known)
        self._times = np.zeros(0, np.int32)

    def count(self, ids: Ids) -> int:
        """The number of times that the ids of the next batch have come before: the highest among them."""
        if self._known:
            return self._known.popleft()
        if not len(ids):
            return 0
        missing = int(ids.max()) + 1 - len(self._times)
        if missing > 0:
            self._times = np.append(self._times, np.zeros(missing + len(self._times), np.int32))
        times = int(self._times[ids].max())
        self._times[ids] = times + 1
        return times
