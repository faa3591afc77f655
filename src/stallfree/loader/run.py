"""One pass over the batches of an epoch: submits tasks ahead, puts the results in order, leases slots to batches."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, NamedTuple

import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils.pin_memory import pin_memory

from stallfree.datasets.epoch_source import EpochPlan, Position
from stallfree.datasets.reader import Reader
from stallfree.datasets.samples import index_plainly
from stallfree.errors import StallfreeError, WaitError, batch_timeout, iteration_over
from stallfree.ipc.process import Owner
from stallfree.loader.event_log import EventLog
from stallfree.loader.executors import TrainingProcess
from stallfree.loader.messages import EMPTY, FAILED, GATHERER, NO_SLOT, READY, UNDONE, WHOLE, Ids, Result, Task
from stallfree.loader.order import Repeats
from stallfree.loader.pool import KEPT, Options, WorkerPool
from stallfree.pipeline.codec import read_own_record
from stallfree.pipeline.objects import comes_from
from stallfree.raising import log, note_samples, raisable, shorten
from stallfree.sources.mapped import MapSource
from stallfree.typevars import BatchT_co
from stallfree.units import format_size

_OVER = "this iteration is over: the loader was iterated again or closed, or an error ended it. Begin a new one"

RECENT = 64
"""Delivered batches whose ids are kept: a prefetcher takes batches ahead, and may request an earlier state."""

_REPORTED_SKIPS = 5

Deliver = Callable[[Any, Ids], Any]

pinned: Callable[[Any], Any] = pin_memory
"""Returns a batch with its tensors in pinned memory."""


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


class Progress:
    """The progress of an epoch. It outlives the pass, so that a state can be saved afterwards.

    Args:
        plan: has the ids of the remaining batches.
        number: of the epoch.
        repeats: counts how often the ids have come before in this epoch; None: each comes once.

    Attributes:
        plan, number: as given.
        handed_out: batches delivered, those before the first of the plan included.
        tasks: the batches that were started and not delivered, in order.
        exhausted: whether all batches were delivered.
        problem: the exception of the sampler, which ends the epoch; None without one.
    """

    def __init__(self, plan: EpochPlan, number: int, repeats: Repeats | None = None) -> None:
        self.plan, self.number, self.handed_out, self.exhausted = plan, number, plan.first, False
        self.problem: Exception | None = None
        self._batches, self._skip, self._repeats = plan.batches, plan.skip, repeats
        self._drawn = plan.first
        self._ready: deque[Task] = deque()  # drawn from the sampler, not started
        self.tasks: deque[Task] = deque()
        self._recent: deque[Task] = deque(maxlen=RECENT)  # delivered

    def peek(self) -> bool:
        """Return whether there is another batch to start."""
        return bool(self._ready) or self._draw()

    def _draw(self) -> bool:
        """Take one batch from the sampler; False if there is none."""
        try:
            while True:
                ids = next(self._batches)
                repeat = 0 if self._repeats is None else self._repeats.count(ids)
                if not self._skip:
                    break
                self._skip -= 1
        except StopIteration:
            return False
        except Exception as problem:
            self.problem, self._batches = problem, iter(())
            return False
        self._ready.append(Task(0, self._drawn, NO_SLOT, self.number, ids, repeat))
        self._drawn += 1
        return True

    def start(self, token: int = 0) -> Task:
        """Start a batch, after `peek`."""
        task = self._ready.popleft()
        task.token = token
        self.tasks.append(task)
        return task

    def hand_out(self) -> None:
        """Record the delivery of the first batch that was started."""
        self._recent.append(self.tasks.popleft())
        self.handed_out += 1

    def end(self) -> Exception:
        """Return what ends the epoch. An exception is removed, because its traceback refers to the iterating frame."""
        problem, self.problem = self.problem, None
        return problem or StopIteration()

    def position(self, batches: int, limits: tuple[int, int] | None) -> Position:
        """Return the position of the epoch after `batches` delivered batches, at most 64 ago.

        Args:
            batches: as above.
            limits: a sampler that has more ids left than the first number, and more batches than the second, counts
                as endless; None for an epoch that is planned by (seed, epoch).

        With `limits`, this reads the rest of the sampler. Raises `StallfreeError` if that fails.
        """
        if limits is None or self._is_endless(*limits):
            return Position(batches, None, self.plan.dealt)
        recent = list(self._recent)[len(self._recent) - (self.handed_out - batches) :]
        left = [*recent, *self.tasks, *self._ready]
        repeats = [task.repeat for task in left]
        ids = [task.ids.tolist() for task in left]
        return Position(batches, ids, self.plan.dealt, repeats if any(repeats) else None)

    def _is_endless(self, most_ids: int, most_batches: int) -> bool:
        """Draw the rest of the sampler. Returns True as soon as it counts as endless."""
        left = sum(len(task.ids) or 1 for task in self._ready)
        while left <= most_ids or len(self._ready) <= most_batches:
            if not self._draw():
                if self.problem is not None:
                    raise StallfreeError(
                        f"there is no state to take: the sampler raised {self.problem!r}. Correct the sampler",
                        page="sampler-output",
                    )
                return False
            left += len(self._ready[-1].ids) or 1
        return True


def delivery(options: Options, weigh: Callable[[Ids], torch.Tensor] | None) -> Deliver | None:
    """Return the function that converts a batch and its ids to the delivered object; None if that is the batch itself.

    `weigh` returns the weights of ids, and implies a `Batch`; it may be None.
    """
    pin, with_ids = options.pin and torch.cuda.is_available(), options.with_ids or weigh is not None
    if not (with_ids or pin):
        return None

    def deliver(data: Any, ids: Ids) -> Any:
        if with_ids:
            data = Batch(data, torch.from_numpy(ids.copy()), None if weigh is None else weigh(ids))
        return pinned(data) if pin else data

    return deliver


class EpochPass(Iterator[Any]):
    """One pass over an epoch. Ends when it is exhausted, closed or freed.

    After an error in a batch, the next call continues with the following batch.

    Args:
        epochs: has begun the pass: the epochs of a loader, with its length and counts.
        progress: of the epoch.
        deliver: converts a batch and its ids to the yielded object; None: the batch itself.
        log: the event log, or None.
        in_loop: whether the training loop takes the batches, and not a prefetcher, which counts its waits.
    """

    def __init__(
        self, epochs: Any, progress: Any, deliver: Deliver | None = None, log: EventLog | None = None, *, in_loop: bool
    ) -> None:
        self.progress, self.counts, self.closed = progress, epochs.counts, False
        self._epochs, self._deliver, self._log, self._in_loop = epochs, deliver, log, in_loop
        self._delivered_at: float | None = None
        self._owner = Owner()

    def __next__(self) -> Any:
        if self.progress.exhausted:
            raise StopIteration
        if self._log is not None:
            self._end_step()
        try:
            if self.closed:
                raise iteration_over(_OVER)
            data, ids = self._take()
        except StopIteration:
            self.progress.exhausted = True
            self.close()
            raise
        except Exception as error:
            shorten(error)
            raise
        if self._deliver is not None:
            data = self._deliver(data, ids)
        if self._log is not None:
            self._delivered_at = time.monotonic()
        return data

    def __len__(self) -> int:
        return len(self._epochs)

    def _take(self) -> tuple[Any, Ids]:
        """Return the next batch and its ids. Raises `StopIteration` at the end of the epoch."""
        raise NotImplementedError

    def _end_step(self) -> None:
        """Log that the training loop has finished its last batch."""
        if self._log is not None and self._in_loop and self._delivered_at is not None:
            number = self.progress.handed_out - 1
            self._log.add(self._delivered_at, time.monotonic(), "device", "compute", number, self.progress.number)
        self._delivered_at = None

    def close(self) -> None:
        """End this pass. Idempotent."""
        if self.closed or not self._owner.is_here:
            return
        self.closed = True
        self._stop()
        if self._log is not None:
            self._end_step()
            self._log.flush()

    def _stop(self) -> None:
        """Stop what is under way."""

    def __del__(self) -> None:
        if hasattr(self, "_owner"):
            self.close()


class PlainPass(EpochPass):
    """A pass that makes each batch as torch's loader does, when it is asked for.

    A batch is `collate_fn([dataset[id] for id in ids])`; random numbers come from the global generators.
    """

    def __init__(self, epochs: Any, progress: Progress, options: Options) -> None:
        super().__init__(epochs, progress, delivery(options, progress.plan.on_delivered), options.log, in_loop=True)
        self._settings, self._single = options.reader.settings, options.single
        self._source = source = options.reader.source
        self._dataset: Any = source.dataset if type(source) is MapSource else _Prepared(options.reader)
        self._several = None if self._single else getattr(self._dataset, "__getitems__", None)
        self._collate = options.collate or (default_convert if self._single else default_collate)

    def _take(self) -> tuple[Any, Ids]:
        progress, counts, started = self.progress, self.counts, time.monotonic()
        if not progress.peek():
            raise progress.end()
        ids = progress.start().ids
        progress.hand_out()
        try:
            data = self._make(ids.tolist())
        except StopIteration as error:
            raise raisable(error) from error
        now = time.monotonic()
        counts["wait_seconds"] += now - started
        counts["prep_seconds"] += now - started
        counts["misses"] += len(ids)
        if self._log is not None:
            self._log.add(started, now, "loader 0", "prep", progress.handed_out - 1, progress.number)
        counts["batches"] += 1
        counts["samples"] += len(ids)
        return data, ids

    def _make(self, ids: list[int]) -> Any:
        """Return the batch of `ids`. Raises the error of a sample that fails."""
        doing = "fetching"
        try:
            if self._several is None:
                doing = ""  # it adds its own note
                values: Any = index_plainly(self._dataset, self._source, ids)
            else:
                values = self._several(ids)
            doing = "collating"
            return self._collate(values[0] if self._single else values)
        except Exception as error:
            if doing:
                note_samples(error, ids, doing)
            raise

    def _stop(self) -> None:
        self._settings.note()
        self.progress.plan.end()


class _Prepared:
    """The samples of a source and its transforms, by index."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, id: int) -> Any:
        return self._reader.later_steps(self._reader.source.fetch(id))


class Pass(EpochPass):
    """A pass whose batches are started ahead, and built by the executors of a pool."""

    def __init__(self, epochs: Any, progress: Progress, options: Options, pool: WorkerPool, *, in_loop: bool) -> None:
        self.pool, self._token = pool, pool.begin()
        super().__init__(epochs, progress, delivery(options, progress.plan.on_delivered), options.log, in_loop=in_loop)
        self._keeps_pool = options.persistent
        self._results: dict[int, Result] = {}  # of finished batches that were not delivered
        source, threads = options.reader.source, getattr(options.reader.source, "threads", True)
        while (inner := getattr(source, "source", None)) is not None:
            source = inner
        self._alone = in_loop and (not threads or comes_from(type(source), "stallfree"))
        """Whether none of the user's code makes samples while the loop runs."""
        self._settings, self._glance, self._made = pool.settings, list[Any](), 0
        """The attributes of the data set, and what they were when the loop went on."""
        self._look_at_settings()
        try:
            self._start_more()
        except BaseException:
            pool.close()
            raise

    def _take(self) -> tuple[Any, Ids]:
        settings, made = self._settings, TrainingProcess.made  # another loader may have changed its data set, too
        glance, self._glance = self._glance if made == self._made else [], []
        if settings is not None and settings.moved(glance) and not self.pool.closed:
            self._begin_again(self._epochs.heed_loop())
            glance = []
        while True:
            result = self._next_result()
            if result is None:
                raise self.progress.end()
            batch = self._hand_out(result)
            if batch is not None:
                if settings is not None and glance and (result.worker == GATHERER or not settings.moved(glance)):
                    self._glance, self._made = glance, TrainingProcess.made
                else:
                    self._look_at_settings()
                return batch

    def _look_at_settings(self) -> None:
        self._glance = [] if self._settings is None or not self._alone else self._settings.glance()
        self._made = TrainingProcess.made

    def _begin_again(self, reader: Reader) -> None:
        """Make the batches that are not delivered again, by `reader`."""
        self._drop_results()
        self.pool.use(reader)
        self._settings = self.pool.settings
        self._token, tasks = self.pool.begin(), self.progress.tasks
        for at, task in enumerate(tasks):
            tasks[at] = replace(task, token=self._token, slot=NO_SLOT)
            self.pool.submit(tasks[at], gather=False)

    def _drop_results(self) -> None:
        for result in self._results.values():
            self.pool.ring.give(result.slot)
        self._results.clear()

    def _next_result(self) -> Result | None:
        """Wait for the next result; None at the end. Any interruption other than a timeout ends the iteration."""
        pool, progress = self.pool, self.progress
        if not self._owner.is_here:  # its results would be those that the parent awaits
            raise iteration_over(
                f"this iteration is that of process {self._owner.pid}, which was forked. Begin a new one"
            )
        if pool.closed or self._token != pool.token:
            raise iteration_over(_OVER)
        try:
            self._start_more()
            if not progress.tasks:
                return None
            started, number = time.monotonic(), progress.handed_out
            while number not in self._results:
                self._wait(started, progress.tasks[0])
            if self._in_loop:
                self.counts["wait_seconds"] += time.monotonic() - started
            self._start_more(handing_out=1)  # now, not after the next training step
            return self._results.pop(number)
        except WaitError:
            raise
        except BaseException:
            self.close()
            pool.close()
            raise

    def _start_more(self, handing_out: int = 0) -> None:
        """Start batches until enough are in flight, not counting those just delivered, or no slot is free.

        If batches of an earlier iteration still hold all slots, one batch is made without a slot.
        """
        pool, progress = self.pool, self.progress
        most = pool.ahead + handing_out
        while len(progress.tasks) < most and (pool.ring.free or not progress.tasks) and progress.peek():
            task = progress.start(self._token)
            pool.submit(task, gather=pool.builder.can_gather(task.ids))

    def _wait(self, started: float, task: Task) -> None:
        """Wait until `task` or any other task has progressed."""
        pool = self.pool
        results = pool.poll(task.number)
        for result in results:
            if result.status == UNDONE:
                self.counts["retries"] += 1
                pool.submit(self.progress.tasks[result.number - self.progress.handed_out], gather=False)
            else:
                self._results[result.number] = result
        if task.number in self._results:
            return
        left = pool.seconds - (time.monotonic() - started)
        if left <= 0:
            raise batch_timeout(
                f"batch {task.number} of epoch {task.epoch} did not come within {pool.seconds:g} s; it is with "
                f"{pool.describe(task)}; its samples are {task.ids.tolist()}. "
                "Give a larger timeout if they take so long"
            )
        pool.wait(left)

    def _hand_out(self, result: Result) -> tuple[Any, Ids] | None:
        """Return the batch in a result and its ids, None if it is empty."""
        ring, counts, memory = self.pool.ring, self.counts, None
        counts["queue_depth"] = len(self._results)
        if self._log is not None:
            self._log.prepared(result, self.progress.number)
        if result.skipped:
            for problem in result.note.decode().split("\n")[: max(0, _REPORTED_SKIPS - counts["skips"])]:
                log.warning("left out a sample: %s", problem)
        result.add_to(counts)
        self.progress.hand_out()
        if result.status == READY:
            memory = ring.lease(result.slot, result.size, KEPT)
        if memory is not None:
            data = read_own_record(memory, copy=False)
        else:
            try:
                if result.status == FAILED:
                    raise raisable(result.error)
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
        if result.slot != NO_SLOT and not pool.warned_of_size:
            pool.warned_of_size = True
            full = result.size <= pool.ring.slots.limit
            log.warning(
                "a batch of %s has no room in the staging ring (%s) and is copied: give a larger staging",
                format_size(result.size),
                "shared memory is full" if full else f"slots of {format_size(pool.ring.slots.limit)}",
            )
        assert result.memory is not None
        return read_own_record(result.memory, copy=False)

    def _stop(self) -> None:
        """Drop what is under way. Slots of batches in flight are freed when their results arrive."""
        self._drop_results()
        if not self.pool.closed and self._token == self.pool.token:
            self.pool.begin()  # drops batches in flight
            self.counts["queue_depth"] = 0
        settings = self._settings
        if settings is not None and not settings.moved(self._glance):  # else the next epoch follows it
            settings.note()  # the data set itself may have changed while it made samples
        self.progress.plan.end()
        if not self._keeps_pool:
            self.pool.close()
