"""One pass over a loader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from stallfree.frames import short_traceback
from stallfree.loader.crew import Crew
from stallfree.loader.epoch import Epoch
from stallfree.loader.epoch_source import EpochPlan, Ids
from stallfree.loader.progress import Progress


class Owner(Protocol):
    """Begins iterations."""

    def __len__(self) -> int:
        """Number of batches of an epoch."""

    def finished(self, progress: Progress, samples: int, seconds: float, waited: float) -> None:
        """The last batch was yielded: what the pass has taken, and how long the training loop waited in it."""


class Iteration:
    """One pass over a loader. Ends when it is through, closed, or no longer referred to.

    Args:
        owner: has begun it.
        crew: prepares the batches.
        plan: of the epoch.
        progress: of the epoch.
        deliver: makes of a batch and its ids what is yielded; None: the batch itself.
        keep_crew: do not close the crew at the end.
        log_steps: log what the training loop does between two batches, if the crew has a log.
    """

    def __init__(
        self,
        owner: Owner,
        crew: Crew,
        plan: EpochPlan,
        progress: Progress,
        deliver: Callable[[Any, Ids], Any] | None,
        *,
        keep_crew: bool,
        log_steps: bool,
    ) -> None:
        self._owner, self._crew, self._plan, self._progress = owner, crew, plan, progress
        self._deliver, self._keep_crew = deliver, keep_crew
        self._log = crew.log if log_steps else None
        self._delivered_at: float | None = None
        self._through = False
        self._begun = time.monotonic()
        self._before = crew.counts["samples"], crew.counts["wait_seconds"]
        try:
            self._epoch = Epoch(crew, progress)
        except BaseException:
            crew.close()
            raise

    def __iter__(self) -> Iteration:
        return self

    def __len__(self) -> int:
        return len(self._owner)

    @short_traceback
    def __next__(self) -> Any:
        if self._through:
            raise StopIteration
        if self._log is not None:
            self.end_step()
        try:
            data, ids = next(self._epoch)
        except StopIteration:
            self._through = True
            samples, waited = self._crew.counts["samples"], self._crew.counts["wait_seconds"]
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
        """For the log: the training loop is done with the batch that it was given."""
        if self._log is not None and self._delivered_at is not None:
            self._log.computed(self._delivered_at, self._progress.handed_out - 1, self._progress.number)
            self._delivered_at = None

    def close(self) -> None:
        """End this pass. May be called twice."""
        self._epoch.close()
        self._plan.end()
        if not self._keep_crew:
            self._crew.close()
        if self._crew.log is not None:
            self.end_step()
            self._crew.log.flush()

    def __del__(self) -> None:
        if hasattr(self, "_epoch"):
            self.close()
