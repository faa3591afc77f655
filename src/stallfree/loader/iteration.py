"""One pass over a loader, and what it hands out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stallfree.frames import short_traceback
from stallfree.loader.crew import Crew
from stallfree.loader.epoch import Epoch, Progress
from stallfree.loader.importance import Served
from stallfree.loader.output import as_arrays

if TYPE_CHECKING:
    from stallfree.loader.dataloader import DataLoader


class Batch(NamedTuple):
    """What a loader with `with_ids=True` yields.

    Attributes:
        data: the batch as it would be without ids.
        ids: int64 tensor, the samples really in it, in order.
        weights: float32 tensor of the same length; None where no `ImportanceSampler` gives any.
    """

    data: Any
    ids: torch.Tensor
    weights: torch.Tensor | None


class Iteration:
    """One pass over a loader. Ends its workers when it is through, closed, or no longer referred to."""

    def __init__(
        self, loader: DataLoader, crew: Crew, progress: Progress, served: Served | None, *, sees_steps: bool
    ) -> None:
        self._loader = loader
        self._progress = progress
        self._with_ids = loader.with_ids
        self._served = served
        self._pin = loader.pin_memory and loader.device is None and torch.cuda.is_available()
        self._through = False
        self._log = loader._log
        self._sees_steps = sees_steps and self._log is not None
        self._handed_over: float | None = None
        self._own = None if crew is loader._crew else crew
        self._begun = time.monotonic()
        self._before = loader._counts["samples"], loader._counts["wait_seconds"]
        try:
            self._epoch = Epoch(crew, progress)
        except BaseException:
            crew.close()
            raise

    def __iter__(self) -> Iteration:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    @short_traceback
    def __next__(self) -> Any:
        if self._through:
            raise StopIteration
        if self._sees_steps:
            self.end_step()
        try:
            data, ids = next(self._epoch)
        except StopIteration:
            self._through = True
            samples, waited = (self._loader._counts[name] for name in ("samples", "wait_seconds"))
            self._loader._finished(
                self._progress,
                samples - self._before[0],
                time.monotonic() - self._begun,
                waited - self._before[1],
            )
            self.close()
            raise
        if self._served is not None:
            data = Batch(data, torch.from_numpy(ids.copy()), self._served.hand_out(ids))
        elif self._with_ids:
            data = Batch(data, torch.from_numpy(ids.copy()), None)
        if self._pin:
            data = pinned(data)
        if self._loader.arrays:
            data = as_arrays(data)
        if self._sees_steps:
            self._handed_over = time.monotonic()
        return data

    def end_step(self) -> None:
        """For the log: the training loop is done with the batch that it was handed."""
        if self._log is not None and self._handed_over is not None:
            self._log.computed(self._handed_over, self._progress.handed_out - 1, self._progress.number)
            self._handed_over = None

    def close(self) -> None:
        """End this pass. May be called twice."""
        self._epoch.close()
        if self._served is not None:
            self._served.end()
        if self._own is not None:
            self._own.close()
        if self._log is not None:
            self.end_step()
            self._log.flush()

    def __del__(self) -> None:
        if hasattr(self, "_epoch"):
            self.close()


def pinned(data: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(data)  # type: ignore[no-untyped-call]
