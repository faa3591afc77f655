"""The executors of a loader, and the ring of slots that they fill.

`submit` passes a task to one executor: gather threads if all its samples can be gathered, else worker processes, Ray
workers or the training process. `poll` returns the results, whose batches are in slots of the ring.
"""

import contextlib
import copy
import os
import select
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from operator import methodcaller
from typing import Any

from stallfree.datasets.reader import Reader, reader_of
from stallfree.ipc.process import finalize_here
from stallfree.loader.batch import BatchBuilder
from stallfree.loader.collate import Collate
from stallfree.loader.event_log import EventLog
from stallfree.loader.executors import Executor, GatherThreads, TrainingProcess, WorkerProcesses, WorkerSetup
from stallfree.loader.messages import NO_SLOT, Result, Task
from stallfree.loader.ring import Ring
from stallfree.pipeline.settings import Settings
from stallfree.platform import cpu_count, shares_memory
from stallfree.raising import users_level
from stallfree.stats import LoaderStats

KEPT = 3
"""Slots beyond those in flight: batches that the training loop may keep before it gets copies."""

GATHERERS = 2
"""Maximum gather threads, if there are as many workers, whose part they do: two saturate the memory bandwidth."""

Counts = dict[str, Any]


def new_counts() -> Counts:
    """Return all counts of `LoaderStats`, zero."""
    return {each.name: 0.0 if each.type in ("float", float) else 0 for each in fields(LoaderStats)}


@dataclass(eq=False)
class Options:
    """The arguments of a loader that its pools and epochs use. Not changed once made.

    Attributes:
        reader: reads and prepares samples; None: made from `dataset`.
        dataset: the data set as passed by the user.
        collate: the user's `collate_fn`, or None for torch's default.
        single: whether a batch is one sample, converted and not collated.
        seed: seed of the random draws.
        skip: whether samples that fail are left out.
        workers: number of worker processes.
        ahead: batches in flight.
        context: multiprocessing context that starts the workers.
        worker_init: called in each worker with its number, or None.
        seconds: maximum wait for a batch.
        staging: bytes of the ring, or None for the default.
        log: the event log, or None.
        remote: `RayWorkers` in place of worker processes, which make their executor; or None.
        with_ids: whether a batch is delivered as a `Batch`.
        pin: whether it is delivered in pinned memory.
        persistent: keep the pool between epochs. An iteration then ends the previous one.
    """

    reader: Any
    dataset: Any
    collate: Collate | None
    single: bool
    seed: int
    skip: bool
    workers: int
    ahead: int
    context: Any
    worker_init: Callable[[int], None] | None
    seconds: float
    staging: int | None
    log: EventLog | None
    remote: Any = None
    with_ids: bool = False
    pin: bool = False
    persistent: bool = False

    def __post_init__(self) -> None:
        if self.reader is None:
            self.reader = reader_of(self.dataset, divide=self.workers > 0 or self.remote is not None, empty=True)


class WorkerPool:
    """The executors of a loader and their ring. Stopped when closed or freed.

    A pool lasts for one epoch or, with persistent workers, for many.

    Args:
        options: arguments of the pool.
        base_seed: of the workers' generators.
        counts: incremented by the pool.
        slots: of the ring; None: those in flight, and three that may be kept.

    Attributes:
        ring: the slots. Created on first use: batches of the training process itself need none.
        token: number of the present iteration.
        ahead: maximum batches in flight.
    """

    def __init__(self, options: Options, base_seed: int, counts: Counts, slots: int | None = None) -> None:
        self.options, self.seconds, self.counts = options, options.seconds, counts
        self.warned_of_size, self.token, self._pid = False, 0, os.getpid()
        _ = options.reader.randomness  # the search for generators, once instead of for each epoch
        # A copy with separate threads: closing them must not affect another loader of the same data set.
        reader = copy.copy(options.reader)
        remote = options.remote
        self.ahead = options.ahead if remote is None else remote.ahead
        self.ring = Ring(slots or self.ahead + KEPT, options.staging)
        self.builder = BatchBuilder(
            reader, self.ring.slots, options.collate, options.single, options.seed, options.skip
        )
        self._gatherers: GatherThreads | None = None
        self._most_gatherers = max(1, min(options.workers, cpu_count(), GATHERERS))
        self._executors: list[Executor] = []
        self._end = finalize_here(self, _close, self._executors, reader, self.ring, counts)
        self._main: Executor = TrainingProcess(self.builder, options.seconds)
        if not shares_memory():
            if options.workers:
                _warn_of_workers(options.workers)
        elif options.workers or remote is not None:
            workers = options.workers if remote is None else remote.num_workers
            setup = WorkerSetup(0, workers, self.builder, options.dataset, base_seed, options.worker_init)
            if remote is None:
                self._main = WorkerProcesses(setup, options.context, workers)
            else:
                self._main = remote.executor(setup, self.ring.slots)
        self._executors.append(self._main)
        if reader.cache is not None:
            reader.cache.populate()

    @property
    def closed(self) -> bool:
        """Whether the pool is closed, or that of the process which forked this one."""
        return not self._end.alive or self._pid != os.getpid()

    def begin(self) -> int:
        """Begin an iteration, which ends older ones; return its token."""
        self.token += 1
        for executor in self._executors:
            executor.forget(self.token)
        return self.token

    @property
    def settings(self) -> Settings | None:
        """The attributes of the data set, if it makes samples in this process."""
        return self.builder.reader.settings if isinstance(self._main, TrainingProcess) else None

    def use(self, reader: Reader) -> None:
        """Make the samples of the following batches by `reader`, in this process."""
        if reader.source is not self.builder.reader.source or reader.cache is not self.builder.reader.cache:
            self.builder.reader = copy.copy(reader)

    def submit(self, task: Task, *, gather: bool) -> None:
        """Submit a task to an executor; with `gather`, to one that gathers from the cache."""
        executor = self._main
        if gather:
            if self._gatherers is None:
                self._gatherers = GatherThreads(self.builder, self._most_gatherers)
                self._executors.append(self._gatherers)
            executor = self._gatherers
        if executor.needs_slot and task.slot == NO_SLOT:
            task.slot = self.ring.take()
        executor.submit(task)

    def poll(self, number: int | None = None) -> list[Result]:
        """Return the available results. Results of older iterations are dropped, and their slots freed.

        `number` is the awaited batch, which the training process builds now if it has the task.
        """
        results = []
        for executor in reversed(self._executors):
            for result in executor.poll(number):
                if result.token >= self.token:
                    results.append(result)
                else:
                    self.ring.give(result.slot)
        if self._main.replaced:
            self.counts["workers_replaced"] += self._main.replaced
            self._main.replaced = 0
        return results

    def wait(self, seconds: float) -> None:
        """Wait for a result, for one second at most; then check the workers."""
        if self.prepare_wait():
            return
        poller = select.poll()
        for descriptor, events in self.descriptors:
            poller.register(descriptor, events)
        if not poller.poll(1000 * max(0.0, min(seconds, 1.0))):
            self.check()

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """The descriptors to wait for, with events of `poll`."""
        return [descriptor for executor in self._executors for descriptor in executor.descriptors]

    def prepare_wait(self) -> bool:
        """Signal results from now on. Returns whether one is already available, so that no wait is needed."""
        return any(map(methodcaller("prepare_wait"), self._executors))

    def check(self) -> None:
        """Check for workers that died or hang."""
        for executor in self._executors:
            executor.check()

    @property
    def stuck(self) -> bool:
        """Whether its workers hang at their start, so that another process should start them."""
        return self._main.stuck

    def describe(self, task: Task) -> str:
        """Return the process or thread that has this task, for messages."""
        return next(filter(None, (executor.describe(task) for executor in self._executors)), "no executor")

    def close(self) -> None:
        """Stop threads and workers, and remove the ring. Kept batches stay valid. Idempotent."""
        self._end()


@cache
def _warn_of_workers(workers: int) -> None:
    warnings.warn(
        f"num_workers={workers}: worker processes need Linux, so batches are prepared by the training process. "
        "num_workers=0 says the same without this warning",
        RuntimeWarning,
        stacklevel=users_level(),
    )


def _close(executors: list[Executor], reader: Reader, ring: Ring, counts: Counts) -> None:
    counts["staging_bytes"] = ring.bytes
    with contextlib.ExitStack() as ending:
        ending.callback(ring.close)
        ending.callback(reader.close)
        for executor in executors:
            ending.callback(executor.close)
