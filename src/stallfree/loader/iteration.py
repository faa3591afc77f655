"""One pass over a loader: takes batches from an epoch, converts them, and yields them to the training loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from stallfree.datasets.epoch_source import EpochPlan, Ids
from stallfree.loader.epoch import Progress, begin_epoch
from stallfree.loader.pool import WorkerPool


class Owner(Protocol):
    """Starts iterations."""

    def __len__(self) -> int:
        """Number of batches of an epoch."""

    def finished(self, progress: Progress, samples: int, seconds: float, waited: float) -> None:
        """Record the end of a pass: its duration, and the waits of the training loop in it."""


class Iteration:
    """One pass over a loader. Ends when it is exhausted, closed or freed.

    Args:
        owner: started it.
        pool: prepares the batches.
        plan: of the epoch.
        progress: of the epoch.
        deliver: converts a batch and its ids to the yielded object; None: the batch itself.
        keep_pool: do not close the pool at the end.
        log_steps: log the steps of the training loop between two batches, if the pool has a log.
    """

    def __init__(
        self,
        owner: Owner,
        pool: WorkerPool,
        plan: EpochPlan,
        progress: Progress,
        deliver: Callable[[Any, Ids], Any] | None,
        *,
        keep_pool: bool,
        log_steps: bool,
    ) -> None:
        self._owner, self._pool, self._plan, self._progress = owner, pool, plan, progress
        self._deliver, self._keep_pool = deliver, keep_pool
        self._log = pool.log if log_steps else None
        self._delivered_at: float | None = None
        self._through = self._ended = False
        self._begun = time.monotonic()
        self._before = pool.counts["samples"], pool.counts["wait_seconds"]
        try:
            self._epoch = begin_epoch(pool, progress)
        except BaseException:
            pool.close()
            raise

    def __iter__(self) -> Iteration:
        return self

    def __len__(self) -> int:
        return len(self._owner)

    def __next__(self) -> Any:
        if self._through:
            raise StopIteration
        if self._log is not None:
            self.end_step()
        try:
            data, ids = next(self._epoch)
        except StopIteration:
            self._through = True
            samples, waited = self._pool.counts["samples"], self._pool.counts["wait_seconds"]
            seconds = time.monotonic() - self._begun
            self._owner.finished(self._progress, samples - self._before[0], seconds, waited - self._before[1])
            self.close()
            raise
        if self._deliver is not None:
            data = self._deliver(data, ids)
        if self._log is not None:
            self._delivered_at = time.monotonic()
        return data

    def end_step(self) -> None:
        """Log that the training loop has finished its last batch."""
        if self._log is not None and self._delivered_at is not None:
            self._log.computed(self._delivered_at, self._progress.handed_out - 1, self._progress.number)
            self._delivered_at = None

    def close(self) -> None:
        """End this pass. Idempotent."""
        if not self._ended:
            self._ended = True
            self._pool.note_settings()
        self._epoch.close()
        self._plan.end()
        if not self._keep_pool:
            self._pool.close()
        if self._pool.log is not None:
            self.end_step()
            self._pool.log.flush()

    def __del__(self) -> None:
        if hasattr(self, "_epoch"):
            self.close()
