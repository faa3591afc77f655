"""A callback of PyTorch Lightning that shows the stalls of each epoch.

    from stallfree.integrations.lightning import StallMonitor

    trainer = Trainer(callbacks=[StallMonitor()])

Works with `lightning` and with `pytorch_lightning`, version 2.2 or later.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from stallfree.errors import InputError, missing_extra
from stallfree.stats import CacheStats, LoaderStats

_NAMES = ("lightning.pytorch", "pytorch_lightning")
_SMALL_FRACTION = 0.05
"""Fraction of the time below which stalls count as small."""

_ADVICE = {
    "cache_fill": "the cache was being filled; later epochs wait less",
    "fetch_stall": "storage is too slow; a larger cache (CachedDataset) or faster storage helps",
    "prep_stall": "prep is too slow; more num_workers, or prepared samples in a cache (CachedDataset), help",
}
"""What to do, by the largest part of the waits."""


def _lightning() -> Any:
    """The imported Lightning package, else the installed one."""
    for name in sorted(_NAMES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ImportError as error:
            problem = error
    raise missing_extra("lightning", "lightning", "StallMonitor") from problem


class StallMonitor(_lightning().Callback):  # type: ignore[misc]
    """Logs how long training waited for data in each epoch, and why.

    The callback logs `stallfree/wait`, and its parts: `stallfree/fetch_stall` and `stallfree/prep_stall` (see
    `LoaderStats`), and `stallfree/cache_fill`, waits for samples that a cache keeps from then on. Each is a fraction, 0
    to 1, of the epoch's time without validation, on this rank. The first rank prints. Loaders are found in the result
    of `train_dataloader`, also in lists and dicts. Other loaders are ignored.

    Raises `InputError` at the start of training if none of its loaders is stallfree's.

    Example:
        ```python
        # needs lightning
        from lightning.pytorch import Trainer
        from stallfree.integrations.lightning import StallMonitor

        trainer = Trainer(max_epochs=90, callbacks=[StallMonitor()], accelerator="cpu", logger=False)
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[tuple[Any, LoaderStats, int]] = []
        self._started = self._validating = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the loaders."""
        loaders = trainer.train_dataloader
        if next(_loaders(loaders), None) is None:
            raise InputError(
                f"StallMonitor found no loader of stallfree: train_dataloader returned {type(loaders).__name__}. "
                "Return a stallfree.DataLoader, or leave out the callback"
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the loaders' statistics at the start of the epoch."""
        self._before = [(each, each.stats(), _cached(each)) for each in _loaders(trainer.train_dataloader)]
        self._started = time.monotonic()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Pause the timing: validation does not count."""
        self._validating = time.monotonic()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Resume the timing."""
        self._started += time.monotonic() - self._validating

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log and print the waits of this epoch."""
        seconds = time.monotonic() - self._started
        fill = fetch = prep = 0.0
        for loader, before, resident in self._before:
            stats = loader.stats() - before
            kept = min(1.0, max(0, _cached(loader) - resident) / max(1, stats.misses))
            fill += kept * stats.stall_fetch_seconds / seconds
            fetch += (1 - kept) * stats.stall_fetch_seconds / seconds
            prep += stats.stall_prep_seconds / seconds
        parts = {"wait": fill + fetch + prep, "cache_fill": fill, "fetch_stall": fetch, "prep_stall": prep}
        pl_module.log_dict({f"stallfree/{name}": fraction for name, fraction in parts.items()})
        if trainer.is_global_zero:
            shown = ", ".join(
                f"{name.replace('_', ' ')} {parts[name]:.1%}" for name in _ADVICE if parts[name] or name != "cache_fill"
            )
            line = f"epoch {trainer.current_epoch}: waited for data {parts['wait']:.1%} of {seconds:.1f} s ({shown})"
            largest = max(_ADVICE, key=lambda name: round(parts[name], 3))
            print(line if parts["wait"] < _SMALL_FRACTION else f"{line}: {_ADVICE[largest]}", flush=True)


def _cached(loader: Any) -> int:
    """The number of samples in the cache of a loader; 0 if it has none."""
    data: Any = getattr(loader, "cached", None) or getattr(loader, "dataset", None)
    stats = data.stats() if callable(getattr(data, "stats", None)) else None
    return stats.resident_items if isinstance(stats, CacheStats) else 0


def _loaders(loaders: Any) -> Iterator[Any]:
    """Yield the loaders with statistics in `loaders`: a loader, or lists, tuples and dicts of loaders."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        for value in loaders:
            yield from _loaders(value)
    elif callable(getattr(loaders, "stats", None)) and isinstance(loaders.stats(), LoaderStats):
        yield loaders
