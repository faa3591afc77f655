"""One pass over a plan: hand out tasks, put results in order, lend slots to batches."""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.errors import InputError, StallfreeError, WaitError
from stallfree.loader.collate import Collate
from stallfree.loader.fill import Filler
from stallfree.loader.lanes import GatherLane, WorkerLane, wait
from stallfree.loader.messages import EMPTY, FAILED, INLINE, NO_SLOT, READY, UNDONE, Result, Task
from stallfree.loader.reader import Pending, Reader
from stallfree.loader.ring import Ring
from stallfree.loader.worker import WorkerSetup
from stallfree.pipeline.codec import read_record
from stallfree.stats import LoaderStats

KEPT = 3
"""Slots beyond those under way: batches that the training loop may keep before it gets copies."""

_REPORTED_SKIPS = 5

log = logging.getLogger("stallfree")
Ids = npt.NDArray[np.int64]


class Crew:
    """The ring and the lanes of a loader, for one epoch or, with persistent workers, for many."""

    def __init__(
        self,
        *,
        reader: Reader,
        dataset: Any,
        collate: Collate | None,
        seed: int,
        skip: bool,
        workers: int,
        ahead: int,
        context: str | BaseContext | None,
        worker_init: Callable[[int], None] | None,
        seconds: float,
        staging: int | None,
    ) -> None:
        self.ahead = ahead
        self.seconds = seconds
        self.closed = False
        self.token = 0
        self.counts = dict.fromkeys((field.name for field in fields(LoaderStats)), 0.0)
        self.ring = Ring(ahead + KEPT, staging)
        self.filler = Filler(reader, self.ring.slots, collate, seed, skip)
        self.gatherer: GatherLane | None = None
        self.workers: WorkerLane | None = None
        try:
            if workers:
                chosen = get_context(context) if isinstance(context, str) else context
                base = int(torch.empty((), dtype=torch.int64).random_().item())
                setup = WorkerSetup(0, workers, self.filler, dataset, base, worker_init, 0)
                self.workers = WorkerLane(setup, chosen)
        except ValueError as error:
            self.ring.close()
            if isinstance(error, StallfreeError):
                raise
            raise InputError(f"multiprocessing_context={context!r}: {error}") from error
        except BaseException:
            self.ring.close()
            raise
        if reader.cache is not None:
            reader.cache.populate()

    def gather_lane(self) -> GatherLane:
        """The gathering thread, started when it is first needed."""
        if self.gatherer is None:
            self.gatherer = GatherLane(self.filler, self.ring)
        return self.gatherer

    def poll(self, wanted: int) -> list[Result]:
        """Results that are there, of the iteration `wanted`. Slots of older ones go back."""
        results = []
        for lane in (self.gatherer, self.workers):
            for result in lane.poll() if lane is not None else ():
                if result.token == wanted:
                    results.append(result)
                elif result.slot != NO_SLOT:
                    self.ring.give(result.slot)
        return results

    def wait(self, seconds: float) -> None:
        """Wait for a result."""
        wait([fd for lane in (self.gatherer, self.workers) if lane is not None for fd in lane.descriptors], seconds)

    def begin(self) -> int:
        """A new iteration; older ones are over. Its token."""
        self.token += 1
        if self.workers is not None and self.token > 1:
            self.workers.forget(self.token)
        return self.token

    @staticmethod
    def no_stats() -> LoaderStats:
        """All counts zero."""
        return _stats_of({})

    @staticmethod
    def add_stats(a: LoaderStats, b: LoaderStats) -> LoaderStats:
        """Counts of two added; the state (queue, staging) is that of `b`."""
        sums = {field.name: getattr(a, field.name) + getattr(b, field.name) for field in fields(LoaderStats)}
        return _stats_of({**sums, "queue_depth": b.queue_depth, "staging_bytes": b.staging_bytes})

    def stats(self) -> LoaderStats:
        """What this crew has done."""
        replaced = self.workers.replaced if self.workers is not None else 0
        counts = {**self.counts, "workers_replaced": replaced}
        if not self.closed:
            counts["staging_bytes"] = self.ring.bytes
        return _stats_of(counts)

    def close(self) -> None:
        """End threads and workers, remove the ring. Batches that are kept stay valid."""
        if self.closed:
            return
        self.counts["staging_bytes"] = self.ring.bytes
        self.closed = True
        for lane in (self.gatherer, self.workers):
            if lane is not None:
                lane.close()
        self.filler.reader.close()
        self.ring.close()


def _stats_of(counts: dict[str, Any]) -> LoaderStats:
    return LoaderStats(
        **{f.name: (float if f.type == "float" else int)(counts.get(f.name, 0)) for f in fields(LoaderStats)}
    )


class Epoch:
    """Yields `(batch, ids)` in the order of the plan.

    Args:
        crew: does the work.
        batches: the ids of each batch.
        number: of the epoch.
        first: number of the first batch; those before it were handed out by an earlier process.
    """

    def __init__(self, crew: Crew, batches: Iterator[Ids], number: int, first: int) -> None:
        self.crew = crew
        self.number = number
        self.handed_out = first
        self._batches = batches
        self._token = crew.begin()
        self._tasks: dict[int, Task] = {}  # started, not handed out
        self._results: dict[int, Result] = {}  # of those, the ones that are done
        self._pending: dict[int, Pending] = {}  # of those, the ones this process has to do itself
        self._next = first  # the next batch to start
        self._undone: set[int] = set()  # that the gathering thread could not do
        self._exhausted = False
        self._closed = False

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> tuple[Any, Ids]:
        counts = self.crew.counts
        while True:
            if self._closed or self._token != self.crew.token:
                raise StallfreeError("this iteration is over, because the loader was iterated again or closed")
            self._start_more()
            if self.handed_out not in self._tasks:
                if self._exhausted:
                    raise StopIteration
                self.crew.wait(1.0)
                self._collect()
                continue
            started = time.perf_counter()
            result = self._wait_for(self.handed_out)
            waited = time.perf_counter() - started
            work = result.fetch_seconds + result.prep_seconds
            fetching = waited * result.fetch_seconds / work if work > 0 else 0.0
            counts["wait_seconds"] += waited
            counts["stall_fetch_seconds"] += fetching
            counts["stall_prep_seconds"] += waited - fetching
            self._count(result)
            batch = self._hand_out(result)
            if batch is not None:
                return batch

    def _start_more(self) -> None:
        """Start batches until enough are under way.

        Batches under way and batches kept never take all slots. Only those that an iteration before this one has left
        behind can: then this one begins with fewer, and waits when it would have none.
        """
        crew = self.crew
        while len(self._tasks) < crew.ahead and crew.ring.free > self._without_slot():
            ids = next(self._batches, None)
            if ids is None:
                self._exhausted = True
                return
            self._start(Task(self._token, self._next, NO_SLOT, self.number, ids))
            self._next += 1

    def _without_slot(self) -> int:
        return sum(task.slot == NO_SLOT for number, task in self._tasks.items() if number not in self._results)

    def _start(self, task: Task) -> None:
        crew = self.crew
        if task.number not in self._undone and crew.filler.can_gather(task.ids):
            self._tasks[task.number] = task
            crew.gather_lane().submit(task)
            return
        if task.slot == NO_SLOT:
            slot = crew.ring.take()
            assert slot is not None
            task = replace(task, slot=slot)
        self._tasks[task.number] = task
        if crew.workers is not None:
            crew.workers.submit(task)
        else:
            self._pending[task.number] = crew.filler.start(task)

    def _wait_for(self, number: int) -> Result:
        deadline = time.monotonic() + self.crew.seconds
        while number not in self._results:
            self._collect()
            if number in self._results:
                break
            pending = self._pending.pop(number, None)
            if pending is not None:
                self._results[number] = self.crew.filler.finish(self._tasks[number], pending)
                break
            left = deadline - time.monotonic()
            if left <= 0:
                who = "the gathering thread" if self.crew.workers is None else self.crew.workers.describe(number)
                raise WaitError(
                    f"batch {number} of epoch {self.number} did not come within {self.crew.seconds:g} s; it is with {who}; "
                    f"its samples are {self._tasks[number].ids.tolist()}. Give a larger timeout if they take so long"
                )
            self.crew.wait(min(left, 1.0))
        return self._results.pop(number)

    def _collect(self) -> None:
        for result in self.crew.poll(self._token):
            if result.status == UNDONE:
                self.crew.counts["retries"] += 1
                self._undone.add(result.number)
                self._start(replace(self._tasks[result.number], slot=result.slot))
            else:
                self._results[result.number] = result

    def _count(self, result: Result) -> None:
        counts = self.crew.counts
        counts["hits"] += result.hits
        counts["misses"] += result.misses
        counts["storage_bytes"] += result.storage_bytes
        counts["fetch_seconds"] += result.fetch_seconds
        counts["prep_seconds"] += result.prep_seconds
        counts["queue_depth"] = len(self._results)
        if result.skipped:
            if counts["skips"] < _REPORTED_SKIPS and result.status != INLINE:
                log.warning("left out %d samples: %s", result.skipped, result.payload.decode())
            counts["skips"] += result.skipped

    def _hand_out(self, result: Result) -> tuple[Any, Ids] | None:
        """The batch in a result, None if it is empty."""
        ring, counts = self.crew.ring, self.crew.counts
        self._tasks.pop(result.number)
        self.handed_out += 1
        if result.status == READY and ring.leased < KEPT:
            memory = ring.slots.view(result.slot, result.size)
            ring.lease(result.slot, memory)
            data = read_record(memory, copy=False, allow_pickle=True)
        else:
            try:
                if result.status == FAILED:
                    raise_error(result.payload)
                if result.status == EMPTY:
                    return None
                if result.status == INLINE:
                    memory = np.frombuffer(bytearray(result.payload), np.uint8)
                    data = read_record(memory, copy=False, allow_pickle=True)
                else:
                    data = read_record(ring.slots.view(result.slot, result.size), copy=True, allow_pickle=True)
                counts["private_copies"] += 1
            finally:
                ring.give(result.slot)
        counts["batches"] += 1
        counts["samples"] += len(result.ids)
        return data, result.ids

    def rest(self) -> list[list[int]]:
        """The ids of all batches that have not been handed out. Reads the rest of the sampler."""
        later = list(self._batches)
        self._batches = iter(later)
        return [self._tasks[number].ids.tolist() for number in sorted(self._tasks)] + [ids.tolist() for ids in later]

    def close(self) -> None:
        """Stop. Slots of batches that are still being prepared go back when their results come."""
        if self._closed:
            return
        self._closed = True
        self._collect_quietly()
        for number, task in self._tasks.items():
            pending = self._pending.pop(number, None)
            if pending is not None:
                for future in pending.fetches.values():
                    future.cancel()
            if number in self._results:
                self.crew.ring.give(self._results[number].slot)
            elif pending is not None:
                self.crew.ring.give(task.slot)
        self._tasks.clear()
        self._results.clear()

    def _collect_quietly(self) -> None:
        if not self.crew.closed and self._token == self.crew.token:
            with contextlib.suppress(StallfreeError):
                for result in self.crew.poll(self._token):
                    self._results[result.number] = result


def raise_error(payload: bytes) -> None:
    """Raise the error of a worker, with its traceback there as the cause."""
    error, trace = pickle.loads(payload)
    if error is None:
        raise StallfreeError(f"a batch could not be made:\n{trace}")
    raise error from RemoteTraceback(trace)


class RemoteTraceback(Exception):
    """Where in a worker an error came up, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
