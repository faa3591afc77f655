"""One pass over a plan: hand out tasks, put results in order, lend slots to batches."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from stallfree.errors import StallfreeError, WaitError
from stallfree.loader.crew import KEPT, Crew
from stallfree.loader.messages import EMPTY, FAILED, NO_SLOT, READY, UNDONE, WHOLE, Ids, Result, Task
from stallfree.loader.reader import Pending
from stallfree.pipeline.codec import read_own_record
from stallfree.remote import RemoteTraceback, unpack_error
from stallfree.units import format_size

_REPORTED_SKIPS = 5

RECENT = 64
"""Batches handed out of which an epoch still knows the ids: whoever takes them ahead may ask for a state of before."""

log = logging.getLogger("stallfree")


class Progress:
    """How far an epoch has come. It outlives the iteration: a state can be taken when that is over.

    Args:
        batches: the ids of each batch that is left.
        number: of the epoch.
        first: number of the first of `batches`; those before it were handed out by an earlier process.
        dealt: how the epoch is dealt out among the ranks; see `Order.place`.

    Attributes:
        first: number of the first batch of this process.
        handed_out: batches handed out, those before `first` included.
    """

    def __init__(self, batches: Iterator[Ids], number: int, first: int, dealt: dict[str, int] | None = None) -> None:
        self.number = number
        self.dealt = dealt
        self.first = first
        self.handed_out = first
        self._batches = batches
        self._problem: Exception | None = None  # what the sampler raised, which ends the epoch
        self._ready: deque[Ids] = deque()  # out of the sampler, not started
        self._started: dict[int, Ids] = {}
        self._recent: deque[Ids] = deque(maxlen=RECENT)  # handed out

    def peek(self) -> Ids | None:
        """The ids of the next batch to start, None at the end."""
        if not self._ready:
            self._draw(1)
        return self._ready[0] if self._ready else None

    def _draw(self, count: int | None) -> None:
        try:
            if self._problem is None:
                self._ready.extend(islice(self._batches, count))
        except Exception as problem:
            self._problem = problem
            self._batches = iter(())

    def take_problem(self) -> Exception | None:
        """What the sampler raised. Not kept here: its traceback refers to whoever iterates."""
        problem, self._problem = self._problem, None
        return problem

    def start(self) -> tuple[int, Ids]:
        """Take the batch that `peek` showed: its number and ids."""
        number = self.handed_out + len(self._started)
        ids = self._started[number] = self._ready.popleft()
        return number, ids

    def hand_out(self) -> None:
        """The first of the batches under way is out."""
        self._recent.append(self._started.pop(self.handed_out))
        self.handed_out += 1

    def rest(self, position: int) -> list[list[int]]:
        """The ids of all batches from number `position` on, the last handed out or later. Reads the sampler's rest."""
        self._draw(None)
        if self._problem is not None:
            raise StallfreeError(
                f"there is no state to take: the sampler raised {self._problem!r}. Correct the sampler"
            )
        recent = list(self._recent)[len(self._recent) - (self.handed_out - position) :]
        return [ids.tolist() for ids in (*recent, *self._started.values(), *self._ready)]


class Epoch:
    """Yields `(batch, ids)` in the order of the plan.

    After an error with a batch the next call goes on with the batch that follows.

    Args:
        crew: does the work.
        progress: says what is left to do.
    """

    def __init__(self, crew: Crew, progress: Progress) -> None:
        self.crew = crew
        self.progress = progress
        self.closed = False
        self._owner = os.getpid()
        self._token = crew.begin()
        self._tasks: dict[int, Task] = {}  # started, not handed out
        self._results: dict[int, Result] = {}  # of those, the ones that are done
        self._pending: dict[int, Pending] = {}  # of those, the ones this process has to do itself
        self._status = crew.status
        self._log = crew.log
        self._now = time.monotonic()
        self._publish()
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

        Whatever interrupts this, but for a limit that was reached, ends the iteration.
        """
        if self.closed or self.crew.closed or self._token != self.crew.token:
            raise StallfreeError(
                "this iteration is over: the loader was iterated again or closed, or an error ended it. Begin a new one"
            )
        try:
            self._start_more()
            started = time.monotonic()
            number = self.progress.handed_out
            while number not in self._tasks:
                if self.progress.peek() is None:
                    return None
                self._wait(started, None)  # batches of an earlier iteration still have all slots
                self._start_more()
            while number not in self._results:
                self._wait(started, self._tasks[number])
            self._now = time.monotonic()
            if self.crew.counts_waits:
                self.crew.counts["wait_seconds"] += self._now - started
            self._start_more(handing_out=1)  # now, and not after the training step that follows
            return self._results.pop(number)
        except WaitError:
            raise
        except BaseException:
            self.close()
            self.crew.close()
            raise

    def _start_more(self, handing_out: int = 0) -> None:
        """Start batches until enough are under way, not counting those just handed out, or no slot is free."""
        crew, progress = self.crew, self.progress
        while len(self._tasks) - handing_out < crew.ahead and crew.room and progress.peek() is not None:
            number, ids = progress.start()
            self._start(Task(self._token, number, NO_SLOT, progress.number, ids), crew.filler.can_gather(ids))

    def _start(self, task: Task, gather: bool) -> None:
        if not gather and task.slot == NO_SLOT:
            slot = self.crew.ring.take()
            task = task if slot is None else replace(task, slot=slot)
        self._tasks[task.number] = task
        if not self.crew.submit(task, gather=gather):
            self._pending[task.number] = self.crew.filler.start(task)

    def _wait(self, started: float, task: Task | None) -> None:
        """Bring `task` (or the end of any) nearer: take the results that are there, do it, or wait."""
        if self._collect() and (task is None or task.number in self._results):
            return
        pending = None if task is None else self._pending.pop(task.number, None)
        if task is not None and pending is not None:
            self._results[task.number] = self.crew.filler.finish(task, pending, here=True)
            return
        self._now = time.monotonic()
        left = self.crew.seconds - (self._now - started)
        if left > 0:
            if self._now >= self._status.due:
                self._publish(self._now - started)
            self.crew.wait(left)
        elif task is None:
            raise WaitError(
                f"no slot of the staging ring came free within {self.crew.seconds:g} s: workers are still busy with "
                "batches of an earlier iteration. Give a larger timeout if they take so long"
            )
        else:
            raise WaitError(
                f"batch {task.number} of epoch {task.epoch} did not come within {self.crew.seconds:g} s; it is with "
                f"{self.crew.describe(task)}; its samples are {task.ids.tolist()}. "
                "Give a larger timeout if they take so long"
            )

    def _collect(self) -> bool:
        """Take the results that are there; whether there were any."""
        results = self.crew.poll()
        for result in results:
            if result.status == UNDONE:
                self.crew.counts["retries"] += 1
                self._start(replace(self._tasks[result.number], slot=result.slot), gather=False)
            else:
                self._results[result.number] = result
        return bool(results)

    def _count(self, result: Result) -> None:
        counts = self.crew.counts
        counts["hits"] += result.hits
        counts["misses"] += result.misses
        counts["storage_bytes"] += result.storage_bytes
        counts["fetch_seconds"] += result.fetch_seconds
        counts["prep_seconds"] += result.prep_seconds
        counts["queue_depth"] = len(self._results)
        if self._log is not None:
            self._log.prepared(result, self.progress.number)
        if result.skipped:
            room = max(0, _REPORTED_SKIPS - counts["skips"])
            counts["skips"] += result.skipped
            for line in result.note.decode().split("\n")[:room]:
                log.warning("left out a sample: %s", line)

    def _hand_out(self, result: Result) -> tuple[Any, Ids] | None:
        """The batch in a result, None if it is empty."""
        ring, counts = self.crew.ring, self.crew.counts
        del self._tasks[result.number]
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
        """A batch that is to have no slot."""
        if result.status == WHOLE:
            return result.value
        self.crew.counts["private_copies"] += 1
        if result.status == READY:
            return read_own_record(self.crew.ring.slots.view(result.slot, result.size), copy=True)
        if not self.crew.warned_of_size:
            self.crew.warned_of_size = True
            limit = self.crew.ring.slots.limit
            log.warning(
                "a batch of %s has no room in the staging ring (%s) and is copied: give a larger staging",
                format_size(result.size),
                "shared memory is full" if limit is None else f"slots of {format_size(limit)}",
            )
        assert result.memory is not None
        return read_own_record(result.memory, copy=False)

    def _publish(self, waiting: float = 0.0) -> None:
        self._status.publish(self._now, self.progress.number, self.crew.counts, waiting)

    def close(self) -> None:
        """Stop. Slots of batches that are still being prepared go back when their results come."""
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = True
        for number, task in self._tasks.items():
            pending = self._pending.pop(number, None)
            if pending is not None:
                for future in pending.fetches.values():
                    future.cancel()
                self.crew.ring.give(task.slot)
            elif number in self._results:
                self.crew.ring.give(self._results[number].slot)
        self._tasks.clear()
        self._results.clear()
        if not self.crew.closed and self._token == self.crew.token:
            self.crew.begin()  # whatever is still under way is not wanted
            self.crew.counts["queue_depth"] = 0
            self._now = time.monotonic()
            self._publish()


def _raise(result: Result) -> None:
    """Raise the error of a batch; one of a worker has its traceback there as the cause."""
    error, trace = result.value, None
    if error is None:
        error, text = unpack_error(result.note)
        trace = RemoteTraceback(text)
    if error is None:
        raise StallfreeError(f"batch {result.number} could not be made:\n{trace}") from trace
    if isinstance(error, StopIteration):  # would end the loop as if all were well
        raise StallfreeError(
            f"batch {result.number} could not be made: the data set or collate_fn raised StopIteration, which would "
            "end the epoch. Let it raise another error"
        ) from (trace or error)
    if trace is None:
        raise error
    raise error from trace
