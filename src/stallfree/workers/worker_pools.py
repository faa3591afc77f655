"""The pools of a loader: one for each iteration, or one for all of them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from stallfree.workers.worker_pool import Counts, Options, WorkerPool


class WorkerPools:
    """Starts pools, and keeps one between epochs if workers are persistent, or if it has nothing to start.

    Args:
        counts: of the loader; pools add to them.
        persistent: whether workers are persistent. An iteration then ends the previous one.

    Attributes:
        persistent: as given.
        kept: the kept pool, or None.
    """

    def __init__(self, counts: Counts, persistent: bool) -> None:
        self.persistent = persistent
        self._counts = counts
        self._process = os.getpid()
        self.kept: WorkerPool | None = None
        self._options: Options | None = None  # of the kept pool
        self._known: list[weakref.ref[WorkerPool]] = []  # replaced, never changed: any thread may call `stats`

    def has_workers(self, options: Options) -> bool:
        """Whether persistent workers with these options exist, so that `take` starts none."""
        return self.persistent and self._has(options)

    def _has(self, options: Options) -> bool:
        self._leave_to_parent()
        return self.kept is not None and self._options is options and not self.kept.closed

    def _leave_to_parent(self) -> None:
        """In a forked child: drop the pools, whose workers and slots are those of the parent."""
        if self._process != os.getpid():
            self._process, self.kept, self._known = os.getpid(), None, []

    def take(self, options: Options, base_seed: int, pin: Callable[[Any], Any] | None) -> WorkerPool:
        """The pool of the next iteration.

        Args:
            options: of the pool; persistent workers with other options are stopped.
            base_seed: of the workers' generators.
            pin: registers memory with a device; set by a prefetcher, which counts the waits of the training loop.
        """
        self._leave_to_parent()
        pool = self.kept
        if pool is None or not self._has(options) or not (self.persistent or (pool.direct and pin is None)):
            if pool is not None and self.persistent:
                pool.close()
            pool = WorkerPool(options, base_seed, self._counts)
            self._known = [*map(weakref.ref, self._living()), weakref.ref(pool)]
            self.kept, self._options = pool, options
        pool.counts_waits = pin is None
        if pin is not None:
            pool.ring.slots.pin = pin
        if not (self.persistent or pool.direct):
            self.kept = None
        return pool

    @property
    def staging_bytes(self) -> int | None:
        """Bytes of the rings; None if no pool exists: the counts then hold the last value."""
        bytes_of = [pool.ring.bytes for pool in self._living() if not pool.closed]
        return sum(bytes_of) if bytes_of else None

    def close(self) -> None:
        """Close all pools. More may be started afterwards."""
        self._leave_to_parent()
        for pool in self._living():
            pool.close()
        self.kept = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has no pools: those of this object belong to its iterations."""
        return WorkerPools, (self._counts, self.persistent)

    def _living(self) -> list[WorkerPool]:
        return [pool for known in self._known if (pool := known()) is not None]
