"""Who does the work of a loader: the ring, the workers and the gathering thread."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from multiprocessing.context import BaseContext
from typing import Any

from stallfree.loader.collate import Collate
from stallfree.loader.event_log import EventLog
from stallfree.loader.fill import Filler
from stallfree.loader.lanes import GatherLane, WorkerLane, wait
from stallfree.loader.messages import Result, Task
from stallfree.loader.reader import Reader
from stallfree.loader.ring import Ring
from stallfree.loader.status import Status
from stallfree.loader.worker import WorkerSetup
from stallfree.platform import cpu_count, shares_memory
from stallfree.stats import LoaderStats

KEPT = 3
"""Slots beyond those under way: batches that the training loop may keep before it gets copies."""

GATHERERS = 2
"""Threads that gather, at most, when there are as many workers: they do the workers' part, and two fill the memory."""

Counts = dict[str, Any]


def new_counts() -> Counts:
    """All counts of `LoaderStats`, zero."""
    return {f.name: 0.0 if f.type in ("float", float) else 0 for f in fields(LoaderStats)}


@dataclass(frozen=True)
class Options:
    """What a crew is made from.

    Attributes:
        reader: gives samples.
        dataset: as the user gave it.
        collate: the user's function, or None for torch's default.
        single: samples one by one, converted and not collated.
        seed: of the randomness.
        skip: leave samples out that cannot be had.
        workers: number of worker processes.
        ahead: batches under way.
        context: starts the workers.
        worker_init: called in each worker with its number, or None.
        seconds: longest wait for a batch.
        staging: bytes of the ring, or None.
        log: of events, or None.
        begun: when the loader was made, in seconds of `time.monotonic`.
    """

    reader: Reader
    dataset: Any
    collate: Collate | None
    single: bool
    seed: int
    skip: bool
    workers: int
    ahead: int
    context: BaseContext
    worker_init: Callable[[int], None] | None
    seconds: float
    staging: int | None
    log: EventLog | None
    begun: float


class Crew:
    """Lives for one epoch or, with persistent workers, for many. Ends when it is closed or when nobody refers to it.

    Args:
        options: what to do and how.
        base_seed: of the workers' own generators.
        counts: is added to.
        slots: of the ring; those under way, and three that may be kept, if None.
    """

    def __init__(self, options: Options, base_seed: int, counts: Counts, slots: int | None = None) -> None:
        self.ahead = options.ahead
        self.seconds = options.seconds
        self.counts = counts
        self.warned_of_size = False
        self.counts_waits = True
        """Whether it is the training loop that waits when a batch is not there; else somebody waits in its place."""
        self.token = 0
        # A copy, whose threads are this crew's own: closing them must not disturb another loader of the same data set.
        reader = copy.copy(options.reader)
        self.ring = Ring(slots or options.ahead + KEPT, options.staging)
        self.log = options.log
        self.status = Status(self.ring.slots.folder, options.dataset, options.begun)
        self.filler = Filler(reader, self.ring.slots, options.collate, options.single, options.seed, options.skip)
        self._gatherer: GatherLane | None = None
        self._gatherers = max(1, min(options.workers, cpu_count(), GATHERERS))
        self._workers: WorkerLane | None = None
        self._lanes: list[GatherLane | WorkerLane] = []
        if options.workers and not shares_memory():
            _warn_of_workers(options.workers)
        elif options.workers:
            setup = WorkerSetup(0, options.workers, self.filler, options.dataset, base_seed, options.worker_init)
            self._workers = WorkerLane(setup, options.context)
            self._lanes.append(self._workers)
        self._end = weakref.finalize(self, _close, os.getpid(), self._lanes, reader, self.ring, self.status, counts)
        if reader.cache is not None:
            reader.cache.populate()

    def begin(self) -> int:
        """A new iteration; older ones are over. Its token."""
        self.token += 1
        for lane in self._lanes:
            lane.forget(self.token)
        return self.token

    @property
    def room(self) -> bool:
        """Whether there is a slot for one more batch."""
        return self.ring.free > (0 if self._gatherer is None else self._gatherer.slots_to_take)

    def submit(self, task: Task, *, gather: bool) -> bool:
        """Have a task done beside the training loop; whether anybody does it.

        With `gather` it is done in one go out of the cache, and needs no slot yet.
        """
        if gather:
            if self._gatherer is None:
                self._gatherer = GatherLane(self.filler, self.ring, self._gatherers)
                self._lanes.append(self._gatherer)
            self._gatherer.submit(task)
        elif self._workers is not None:
            self._workers.submit(task)
        return gather or self._workers is not None

    def poll(self) -> list[Result]:
        """Results that are there, but for those of older iterations, whose slots go back."""
        results = []
        for lane in self._lanes:
            for result in lane.poll():
                if result.token >= self.token:
                    results.append(result)
                else:
                    self.ring.give(result.slot)
        if self._workers is not None and self._workers.replaced:
            self.counts["workers_replaced"] += self._workers.replaced
            self._workers.replaced = 0
        return results

    def wait(self, seconds: float) -> None:
        """Wait for a result, but for a second at most: then those who should be working are looked after."""
        if not self.prepare_wait() and not wait(self.descriptors, min(seconds, 1.0)):
            self.check()

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """What to wait for, as descriptors and events of `poll`."""
        return [pair for lane in self._lanes for pair in lane.descriptors]

    def prepare_wait(self) -> bool:
        """From now on, results are announced. Whether one is there already, so that there is nothing to wait for."""
        return any(lane.prepare_wait() for lane in self._lanes)

    def check(self) -> None:
        """Look after those who should be working."""
        for lane in self._lanes:
            lane.check()

    @property
    def stuck(self) -> bool:
        """Whether its workers hang at their start, and another process should start them."""
        return self._workers is not None and self._workers.stuck

    def describe(self, task: Task) -> str:
        """Who has that task, for messages."""
        return "the gathering thread" if self._workers is None else self._workers.describe(task)

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return not self._end.alive

    def close(self) -> None:
        """End threads and workers, remove the ring. Batches that are kept stay valid. May be called twice."""
        self._end()


@lru_cache(maxsize=1)
def _warn_of_workers(workers: int) -> None:
    warnings.warn(
        f"num_workers={workers}: worker processes need Linux, so batches are prepared by the training process. "
        "num_workers=0 says the same without this warning",
        RuntimeWarning,
        stacklevel=2,
    )


def _close(
    owner: int, lanes: list[GatherLane | WorkerLane], reader: Reader, ring: Ring, status: Status, counts: Counts
) -> None:
    if os.getpid() != owner:
        return  # a forked child: the workers and the ring are its parent's
    counts["staging_bytes"] = ring.bytes
    status.close()
    with contextlib.ExitStack() as ending:
        ending.callback(ring.close)
        ending.callback(reader.close)
        for lane in lanes:
            ending.callback(lane.close)
