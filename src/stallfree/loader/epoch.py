"""One pass over a plan: submits tasks to the pool, orders the results, and leases slots to batches."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from stallfree.batches.messages import EMPTY, FAILED, NO_SLOT, READY, UNDONE, WHOLE, Ids, Result, Task
from stallfree.errors import (
    StallfreeError,
    WaitError,
    batch_timeout,
    iteration_over,
    stop_iteration,
    text_of,
)
from stallfree.ipc.remote import unpack_error
from stallfree.loader.progress import Progress
from stallfree.pipeline.codec import read_own_record
from stallfree.units import format_size
from stallfree.workers.worker_pool import KEPT, Counts, WorkerPool

_REPORTED_SKIPS = 5

_OVER = "this iteration is over: the loader was iterated again or closed, or an error ended it. Begin a new one"

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
        self._status = pool.status
        self._log = pool.log
        self._now = time.monotonic()
        if self._now >= self._status.due:
            self._publish()

    def _publish(self, waiting: float = 0.0) -> None:
        self._status.publish(self._now, self.progress.number, self.pool.counts, waiting)


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
            if self._now >= self._status.due:
                self._publish()
            if batch is not None:
                return batch

    def _next_result(self) -> Result | None:
        """Wait for the next result; None at the end.

        Any interruption other than a timeout ends the iteration.
        """
        if self.closed or self.pool.closed or self._token != self.pool.token:
            raise iteration_over(_OVER)
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
            self._now = time.monotonic()
            if self.pool.counts_waits:
                self.pool.counts["wait_seconds"] += self._now - started
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
        self._now = time.monotonic()
        left = self.pool.seconds - (self._now - started)
        if left > 0:
            if self._now >= self._status.due:
                self._publish(self._now - started)
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
                if result.ended:
                    self.progress.end_stream(self._tasks[result.number].ids)
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
                    _raise(result)
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
            self._now = time.monotonic()
            if self._status.made:
                self._publish()


class DirectEpoch(_Pass):
    """Like `Epoch`, but the training process builds each batch on request: nothing is started ahead."""

    def __init__(self, pool: WorkerPool, progress: Progress) -> None:
        super().__init__(pool, progress)
        pool.builder.reader.begin()

    def __iter__(self) -> DirectEpoch:
        return self

    def __next__(self) -> tuple[Any, Ids]:
        pool, progress = self.pool, self.progress
        while True:
            if self.closed or pool.closed:
                raise iteration_over(_OVER)
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
                data, samples = pool.builder.build(Task(self._token, number, NO_SLOT, progress.number, ids, repeat))
            except Exception as error:
                progress.hand_out()
                if isinstance(error, StopIteration):
                    raise _stopped(number) from error
                raise
            except BaseException:
                self._end()
                raise
            progress.hand_out()
            if samples.ended:
                progress.end_stream(ids)
            now = self._now = time.monotonic()
            counts = pool.counts
            if pool.counts_waits:
                counts["wait_seconds"] += now - started
            counts["misses"] += samples.misses
            counts["storage_bytes"] += samples.storage_bytes
            counts["prep_seconds"] += now - started
            if self._log is not None:
                self._log.built(started, now, number, progress.number)
            if samples.skipped:
                _report_skips(counts, samples.skipped)
            left_out = len(ids) > 0 and not samples.ids
            if not left_out:
                counts["batches"] += 1
                counts["samples"] += len(samples.ids)
            if now >= self._status.due:
                self._publish()
            if not left_out:
                return data, ids if len(samples.ids) == len(ids) else np.array(samples.ids, np.int64)

    def _end(self) -> None:
        """End the iteration after an interruption."""
        self.close()
        self.pool.close()

    def close(self) -> None:
        """Stop."""
        if not self.closed and os.getpid() == self._owner:
            self.closed = True
            if not self.pool.closed and self._token == self.pool.token:
                self._now = time.monotonic()
                if self._status.made:
                    self._publish()
                self.pool.rest()


def _report_skips(counts: Counts, problems: Sequence[object]) -> None:
    room = max(0, _REPORTED_SKIPS - counts["skips"])
    counts["skips"] += len(problems)
    for problem in problems[:room]:
        log.warning("left out a sample: %s", text_of(problem).replace("\n", " "))


def _raise(result: Result) -> None:
    """Raise the error of a batch; an error of a worker has the worker's traceback as its cause."""
    error = unpack_error(result.note) if result.value is None else result.value
    if isinstance(error, StopIteration):
        raise _stopped(result.number) from (error.__cause__ or error)
    raise error


def _stopped(number: int) -> StallfreeError:
    """The error that replaces a `StopIteration`, which would end the loop without an error."""
    return stop_iteration(
        f"batch {number} could not be made: the data set or collate_fn raised StopIteration, which would end the "
        "epoch. Let it raise another error"
    )
