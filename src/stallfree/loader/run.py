"""One pass over the batches of an epoch: submits tasks ahead, puts the results in order, leases slots to batches."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Generic, NamedTuple

import numpy as np
import torch

from stallfree.datasets.epoch_source import Position
from stallfree.errors import StallfreeError, WaitError, batch_timeout, iteration_over
from stallfree.ipc.remote import unpack_error
from stallfree.loader.batch import PlainBatches
from stallfree.loader.event_log import EventLog
from stallfree.loader.messages import EMPTY, FAILED, NO_SLOT, READY, UNDONE, WHOLE, Ids, Result, Task
from stallfree.loader.order import Repeats
from stallfree.loader.pool import KEPT, Counts, WorkerPool
from stallfree.notes import described, raisable
from stallfree.pipeline.codec import read_own_record
from stallfree.typevars import BatchT_co
from stallfree.units import format_size

OVER = "this iteration is over: the loader was iterated again or closed, or an error ended it. Begin a new one"

RECENT = 64
"""Delivered batches whose ids are kept: a prefetcher takes batches ahead, and may request an earlier state."""

_REPORTED_SKIPS = 5

log = logging.getLogger("stallfree")

Deliver = Callable[[Any, Ids], Any]


class Batch(NamedTuple, Generic[BatchT_co]):
    """The batch type of a loader with `with_ids=True`.

    Attributes:
        data: the batch as it would be without ids.
        ids: int64 tensor of the samples actually in it, in order.
        weights: float32 tensor of the same length; None without an `ImportanceSampler` that has weights.

    Example:
        ```python
        loader = sf.DataLoader(dataset, batch_size=4, with_ids=True)
        batch = next(iter(loader))
        assert batch.ids.tolist() == [0, 1, 2, 3]
        images, labels = batch.data
        ```
    """

    data: BatchT_co
    ids: torch.Tensor
    weights: torch.Tensor | Any  # Any: users of an ImportanceSampler need not check for None


def delivery(*, with_ids: bool, weigh: Callable[[Ids], torch.Tensor] | None, pin: bool) -> Deliver | None:
    """Return the function that converts a batch and its ids to the delivered object; None if that is the batch itself.

    Args:
        with_ids: return a `Batch`.
        weigh: returns the weights of ids, and implies a `Batch`; or None.
        pin: copy tensors to pinned memory, if there is an accelerator.
    """
    pin = pin and torch.cuda.is_available()
    if not (with_ids or weigh or pin):
        return None

    def deliver(data: Any, ids: Ids) -> Any:
        if with_ids or weigh is not None:
            data = Batch(data, torch.from_numpy(ids.copy()), None if weigh is None else weigh(ids))
        return pinned(data) if pin else data

    return deliver


def pinned(data: Any) -> Any:
    """Return `data` with its tensors in pinned memory."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(data)


class EpochPass(Iterator[Any]):
    """One pass over an epoch. Ends when it is exhausted, closed or freed.

    After an error in a batch, the next call continues with the following batch.

    Args:
        progress: holds the remaining batches.
        counts: of the loader.
        owner: has the length of the epoch; or None.
        deliver: converts a batch and its ids to the yielded object; None: the batch itself.
        on_end: called once at the end, with whether the epoch is exhausted.
        log: the event log, or None.
        log_steps: log the steps of the training loop between two batches too.
    """

    def __init__(
        self,
        progress: Any,
        counts: Counts,
        owner: Sized | None = None,
        deliver: Deliver | None = None,
        on_end: Callable[[bool], None] | None = None,
        log: EventLog | None = None,
        *,
        log_steps: bool = False,
    ) -> None:
        self.progress, self.counts = progress, counts
        self.closed = self.exhausted = False
        self._loader, self._deliver = owner, deliver
        self._on_end, self._log, self._log_steps = on_end, log, log_steps
        self._delivered_at: float | None = None
        self._owner = os.getpid()

    def __next__(self) -> Any:
        if self.exhausted:
            raise StopIteration
        if self._log is not None:
            self.end_step()
        try:
            data, ids = self._take()
        except StopIteration:
            self.exhausted = True
            self.close()
            raise
        if self._deliver is not None:
            data = self._deliver(data, ids)
        if self._log is not None:
            self._delivered_at = time.monotonic()
        return data

    def __len__(self) -> int:
        if self._loader is None:
            raise TypeError("the number of batches is not known")
        return len(self._loader)

    def _take(self) -> tuple[Any, Ids]:
        """Return the next batch and its ids. Raises `StopIteration` at the end of the epoch."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Log that the training loop has finished its last batch."""
        if self._log is not None and self._log_steps and self._delivered_at is not None:
            self._log.computed(self._delivered_at, self.progress.handed_out - 1, self.progress.number)
        self._delivered_at = None

    def _report_skips(self, problems: Sequence[str]) -> None:
        shown = max(0, _REPORTED_SKIPS - self.counts["skips"])
        self.counts["skips"] += len(problems)
        for problem in problems[:shown]:
            log.warning("left out a sample: %s", problem)

    @property
    def is_here(self) -> bool:
        """Whether this process began the pass."""
        return os.getpid() == self._owner

    def close(self) -> None:
        """End this pass. Idempotent."""
        if self.closed or not self.is_here:
            return
        self.closed = True
        self._stop()
        if self._on_end is not None:
            self._on_end(self.exhausted)
        if self._log is not None:
            self.end_step()
            self._log.flush()

    def _stop(self) -> None:
        """Stop what is under way."""

    def __del__(self) -> None:
        if hasattr(self, "_owner"):
            self.close()


class PlainPass(EpochPass):
    """A pass that makes each batch as torch's loader does, when it is asked for: see `PlainBatches`."""

    def __init__(self, batches: PlainBatches, progress: Progress, counts: Counts, *arguments: Any, **options: Any):
        super().__init__(progress, counts, *arguments, **options)
        self._batches = batches

    def _take(self) -> tuple[Any, Ids]:
        if self.closed:
            raise iteration_over(OVER)
        progress, counts = self.progress, self.counts
        while True:
            started = time.monotonic()
            ids = progress.take()
            try:
                data, samples = self._batches.make(ids.tolist())
            except StopIteration as error:
                raise raisable(error) from error
            now = time.monotonic()
            counts["wait_seconds"] += now - started
            counts["prep_seconds"] += now - started
            counts["misses"] += len(ids)
            if self._log is not None:
                self._log.built(started, now, progress.handed_out - 1, progress.number)
            if samples is not None:
                if samples.skipped:
                    self._report_skips([*map(described, samples.skipped)])
                if len(samples.ids) < len(ids):
                    ids = np.array(samples.ids, np.int64)
                    if not len(ids):
                        continue
            counts["batches"] += 1
            counts["samples"] += len(ids)
            return data, ids


class Pass(EpochPass):
    """A pass whose batches are started ahead, and built by the executors of a pool."""

    def __init__(
        self,
        pool: WorkerPool,
        progress: Progress,
        owner: Sized | None = None,
        deliver: Deliver | None = None,
        on_end: Callable[[bool], None] | None = None,
        *,
        log_steps: bool = False,
    ) -> None:
        self.pool = pool
        self._token = pool.begin()
        super().__init__(progress, pool.counts, owner, deliver, on_end, pool.log, log_steps=log_steps)
        self._tasks: dict[int, Task] = {}  # started, not delivered
        self._results: dict[int, Result] = {}  # of those, the finished ones
        try:
            self._start_more()
        except BaseException:
            pool.close()
            raise

    def _take(self) -> tuple[Any, Ids]:
        while True:
            result = self._next_result()
            if result is None:
                raise self.progress.take_problem() or StopIteration
            batch = self._hand_out(result)
            if batch is not None:
                return batch

    def _next_result(self) -> Result | None:
        """Wait for the next result; None at the end. Any interruption other than a timeout ends the iteration."""
        pool, progress = self.pool, self.progress
        if self.closed or pool.closed or self._token != pool.token:
            raise iteration_over(OVER)
        if self._owner != os.getpid():  # its results would be those that the parent awaits
            raise iteration_over(f"this iteration is that of process {self._owner}, which was forked. Begin a new one")
        try:
            self._start_more()
            started = time.monotonic()
            number = progress.handed_out
            while number not in self._tasks:
                if not progress.peek():
                    return None
                self._wait(started, None)  # batches of an earlier iteration still hold all slots
                self._start_more()
            while number not in self._results:
                self._wait(started, self._tasks[number])
            if pool.counts_waits:
                pool.counts["wait_seconds"] += time.monotonic() - started
            self._start_more(handing_out=1)  # now, not after the next training step
            return self._results.pop(number)
        except WaitError:
            raise
        except BaseException:
            self.close()
            pool.close()
            raise

    def _start_more(self, handing_out: int = 0) -> None:
        """Start batches until enough are in flight, not counting those just delivered, or no slot is free."""
        pool, progress = self.pool, self.progress
        most = pool.ahead + handing_out
        while len(self._tasks) < most and pool.room and progress.peek():
            number, ids, repeat = progress.start()
            task = self._tasks[number] = Task(self._token, number, NO_SLOT, progress.number, ids, repeat)
            pool.submit(task, gather=pool.builder.can_gather(ids))

    def _wait(self, started: float, task: Task | None) -> None:
        """Wait until `task` or any other task has progressed."""
        pool = self.pool
        results = pool.poll(None if task is None else task.number)
        for result in results:
            if result.status == UNDONE:
                self.counts["retries"] += 1
                undone = self._tasks[result.number]
                undone.slot = result.slot
                pool.submit(undone, gather=False)
            else:
                self._results[result.number] = result
        if results and (task is None or task.number in self._results):
            return
        seconds = pool.seconds
        left = seconds - (time.monotonic() - started)
        if left > 0:
            pool.wait(left)
        elif task is None:
            raise batch_timeout(
                f"no slot of the staging ring came free within {seconds:g} s: workers are still busy with "
                "batches of an earlier iteration. Give a larger timeout if they take so long"
            )
        else:
            raise batch_timeout(
                f"batch {task.number} of epoch {task.epoch} did not come within {seconds:g} s; it is with "
                f"{pool.describe(task)}; its samples are {task.ids.tolist()}. "
                "Give a larger timeout if they take so long"
            )

    def _hand_out(self, result: Result) -> tuple[Any, Ids] | None:
        """Return the batch in a result and its ids, None if it is empty."""
        ring, counts, memory = self.pool.ring, self.counts, None
        counts["hits"] += result.hits
        counts["misses"] += result.misses
        counts["storage_bytes"] += result.storage_bytes
        counts["fetch_seconds"] += result.fetch_seconds
        counts["prep_seconds"] += result.prep_seconds
        counts["queue_depth"] = len(self._results)
        if self._log is not None:
            self._log.prepared(result, self.progress.number)
        if result.skipped:
            self._report_skips(result.note.decode().split("\n"))
        self._tasks.pop(result.number, None)
        self.progress.hand_out()
        if result.status == READY:
            memory = ring.lease(result.slot, result.size, KEPT)
        if memory is not None:
            data = read_own_record(memory, copy=False)
        else:
            try:
                if result.status == FAILED:
                    raise raisable(unpack_error(result.note) if result.value is None else result.value)
                if result.status == EMPTY:
                    return None
                data = result.value if result.status == WHOLE else self._copied(result)
            finally:
                ring.give(result.slot)
        counts["batches"] += 1
        counts["samples"] += len(result.ids)
        return data, result.ids

    def _copied(self, result: Result) -> Any:
        """Return a batch that is not in a slot of its own as a copy."""
        pool = self.pool
        self.counts["private_copies"] += 1
        if result.status == READY:
            return read_own_record(pool.ring.slots.view(result.slot, result.size), copy=True)
        if not pool.warned_of_size:
            pool.warned_of_size = True
            limit = pool.ring.slots.limit
            log.warning(
                "a batch of %s has no room in the staging ring (%s) and is copied: give a larger staging",
                format_size(result.size),
                "shared memory is full" if limit is None else f"slots of {format_size(limit)}",
            )
        assert result.memory is not None
        return read_own_record(result.memory, copy=False)

    def _stop(self) -> None:
        """Drop what is under way. Slots of batches in flight are freed when their results arrive."""
        for result in self._results.values():
            self.pool.ring.give(result.slot)
        self._tasks.clear()
        self._results.clear()
        if not self.pool.closed and self._token == self.pool.token:
            self.pool.begin()  # drops batches in flight
            self.counts["queue_depth"] = 0


class Progress:
    """The progress of an epoch. It outlives the pass, so that a state can be saved afterwards.

    Args:
        batches: the ids of each remaining batch.
        number: of the epoch.
        first: number of the first of `batches`; those before it were delivered by an earlier process.
        dealt: see `Position`.
        repeats: counts how often the ids have come before in this epoch; None: each comes once.

    Attributes:
        number, first: as given.
        handed_out: batches delivered, those before `first` included.
        problem: the exception of the sampler, which ends the epoch; None without one.
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
        self.problem: Exception | None = None
        self._dealt, self._batches, self._repeats = dealt, batches, repeats
        self._ready: deque[tuple[Ids, int]] = deque()  # drawn from the sampler, not started
        self._started: deque[tuple[Ids, int]] = deque()  # started, not delivered
        self._recent: deque[tuple[Ids, int]] = deque(maxlen=RECENT)  # delivered

    def peek(self) -> bool:
        """Return whether there is another batch to start."""
        return bool(self._ready) or self._draw()

    def _draw(self) -> bool:
        """Take one batch from the sampler; False if there is none."""
        try:
            ids = next(self._batches)
            self._ready.append((ids, 0 if self._repeats is None else self._repeats.count(ids)))
        except StopIteration:
            return False
        except Exception as problem:
            self.problem, self._batches = problem, iter(())
            return False
        return True

    def take_problem(self) -> Exception | None:
        """Return the exception of the sampler. Removed here, because its traceback refers to the iterating frame."""
        problem, self.problem = self.problem, None
        return problem

    def start(self) -> tuple[int, Ids, int]:
        """Take a batch, after `peek`: its number, its ids, and how often these have come before."""
        number = self.handed_out + len(self._started)
        batch = self._ready.popleft()
        self._started.append(batch)
        return number, *batch

    def hand_out(self) -> None:
        """Record the delivery of the first batch in flight."""
        self._recent.append(self._started.popleft())
        self.handed_out += 1

    def take(self) -> Ids:
        """Take a batch that is delivered at once. Raises `StopIteration` at the end, and the sampler's exception."""
        if not (self._ready or self._draw()):
            raise self.take_problem() or StopIteration
        batch = self._ready.popleft()
        self._recent.append(batch)
        self.handed_out += 1
        return batch[0]

    def position(self, batches: int, endless: Callable[[int, int], bool] | None) -> Position:
        """Return the position of the epoch after `batches` delivered batches, at most 64 ago.

        Args:
            batches: as above.
            endless: returns whether a sampler that has so many ids left, and batches of them, counts as endless; None
                for an epoch that is planned by (seed, epoch).

        With `endless`, this reads the rest of the sampler. Raises `StallfreeError` if that fails.
        """
        if endless is None or self._ends_not(endless):
            return Position(batches, None, self._dealt)
        recent = list(self._recent)[len(self._recent) - (self.handed_out - batches) :]
        remaining = [*recent, *self._started, *self._ready]
        repeats = [repeat for _, repeat in remaining]
        ids = [ids.tolist() for ids, _ in remaining]
        return Position(batches, ids, self._dealt, repeats if any(repeats) else None)

    def _ends_not(self, endless: Callable[[int, int], bool]) -> bool:
        """Draw the rest of the sampler. Returns True as soon as it counts as endless."""
        left = sum(len(ids) or 1 for ids, _ in self._ready)
        while not endless(left, len(self._ready)):
            if not self._draw():
                break
            left += len(self._ready[-1][0]) or 1
        else:
            return True
        if self.problem is not None:
            raise StallfreeError(
                f"there is no state to take: the sampler raised {self.problem!r}. Correct the sampler",
                page="sampler-output",
            )
        return False
