"""Iterable data sets: torch's own loader makes the batches; epochs, state and counts are kept beside it."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.data

from stallfree.errors import iteration_over
from stallfree.loader.epochs import STATE_VERSION, EpochsBase, check_position
from stallfree.loader.pool import Counts
from stallfree.loader.run import OVER, EpochPass
from stallfree.pipeline.randomness import sample_seed
from stallfree.stats import LoaderStats

_OF_WORKERS = {"timeout", "multiprocessing_context", "prefetch_factor"}
_HANDED_ON = {*inspect.signature(torch.utils.data.DataLoader).parameters} - {"shuffle", "sampler", "batch_sampler"}
"""Arguments that are handed on to torch's loader; those of workers only if there are any."""


@dataclass
class _Progress:
    """The progress of an iteration.

    Attributes:
        number: of the epoch.
        first: batches of the epoch that were delivered before the iteration.
        taken: batches of the epoch that the iteration has taken from torch's loader, failed ones included.
        state: of the data set, as loaded for the first batch; or None.
        exhausted: whether there are no more batches.
    """

    number: int
    first: int = 0
    taken: int = 0
    state: Any = None
    exhausted: bool = False


class IterableEpochs(EpochsBase):
    """Runs the epochs of a loader of an iterable data set: like `Epochs`, with torch's loader beneath.

    A state holds the number of delivered batches, and resuming takes as many from torch's loader and drops them. A data
    set with `state_dict` and `load_state_dict` resumes by these if it is iterated in this process.

    Args:
        loader: the `stallfree.DataLoader`, whose attributes are the arguments of torch's loader.
        counts: of the loader.

    Attributes:
        seed: of the workers' generators; None: torch's loader draws it.
        source: see `Epochs`. Whether the data set partitions its samples among the ranks is not known.
    """

    source: Any = SimpleNamespace(knows_ranks=False)

    def __init__(self, loader: Any, counts: Counts) -> None:
        super().__init__()
        self.counts, self.seed = counts, loader.seed
        self._next = 0  # number of the next epoch
        self._set: int | None = None  # the epoch that the data set was given
        self._resume: _Progress | None = None
        self.adopt(loader)

    def adopt(self, loader: Any) -> None:
        """Use the present attributes of `loader` from the next iteration on."""
        names = _HANDED_ON if loader.num_workers else _HANDED_ON - _OF_WORKERS
        self._arguments = {name: value for name, value in vars(loader).items() if name in names}
        self._arguments["pin_memory"] = loader.pin_memory and loader.device is None  # a prefetcher pins memory itself
        if self.seed is not None:
            self._arguments["generator"] = torch.Generator()
        self.counts["num_workers"] = loader.num_workers
        self._torchs: torch.utils.data.DataLoader[Any] | None = torch.utils.data.DataLoader(**self._arguments)

    @property
    def _loader(self) -> torch.utils.data.DataLoader[Any]:
        if self._torchs is None:
            self._torchs = torch.utils.data.DataLoader(**self._arguments)
        return self._torchs

    @property
    def samplers(self) -> tuple[Any, Any]:
        """`sampler` and `batch_sampler` of torch's loader."""
        return self._loader.sampler, self._loader.batch_sampler

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, for the data set too if it has `set_epoch`."""
        dataset = self._arguments["dataset"]
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
            self._set = epoch
        self._next = epoch
        self._resume = self._progress = self._prefetcher = None

    def _begin(self, prefetcher: Any) -> EpochPass:
        progress = self._resume or _Progress(self._next)
        if self._arguments["persistent_workers"]:  # an iteration has the workers of the previous one
            self._end_passes(stop_workers=False)
        if progress.state is not None:
            self._arguments["dataset"].load_state_dict(copy.deepcopy(progress.state))
        if self.seed is not None:
            self._arguments["generator"].manual_seed(sample_seed(self.seed, progress.number, 0))
        begun = _TorchPass(self, progress, iter(self._loader), in_loop=prefetcher is None)
        self._progress, self._resume, self._next = progress, None, progress.number + 1
        return begun

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """The state of the iteration, including batches that a prefetcher has taken ahead."""
        progress = self._active or self._resume or _Progress(self._next)
        of_dataset, dataset = progress.state, self._arguments["dataset"]
        here = progress.taken > progress.first and not self._arguments["num_workers"]
        if here and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
            of_dataset = copy.deepcopy(dataset.state_dict())
        return {
            "version": STATE_VERSION,
            "epoch": progress.number,
            "seed": self.seed,
            "order": self._describe(),
            "batches": max(progress.first, progress.taken),
            "rest": None,
            "dataset": of_dataset,
            "dataset_epoch": self._set,
        }

    def state_at(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return the state at `position`."""
        return position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises `InputError` for a state that does not match."""
        check_position(state, self._describe())
        if state["dataset_epoch"] is not None:
            self.set_epoch(state["dataset_epoch"])
        batches, of_dataset = state["batches"], state["dataset"]
        taken = 0 if of_dataset is None else batches
        self._resume = _Progress(state["epoch"], batches, taken, of_dataset)
        self._progress = self._prefetcher = None

    def _describe(self) -> dict[str, Any]:
        return {"seed": self.seed, **{name: self._arguments[name] for name in ("batch_size", "num_workers")}}

    # -- counts and end -----------------------------------------------------------------------------------------------

    def stats(self) -> LoaderStats:
        """Return the statistics of the loader since its creation."""
        return LoaderStats(**self.counts)

    def close(self) -> None:
        """End all iterations and their workers. More may be started afterwards."""
        self._end_passes(stop_workers=True)
        self._torchs = None

    def _end_passes(self, *, stop_workers: bool) -> None:
        for one in self._living():
            stop = getattr(one.batches, "_shutdown_workers", None)
            one.close()
            if stop_workers and stop is not None and one.is_here:  # an exception may keep the iterator alive
                stop()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no iterations."""
        return {**vars(self), "_torchs": None, "_progress": None, "_prefetcher": None, "_passes": []}


class _TorchPass(EpochPass):
    """One pass over torch's loader: `batches`. Those that were delivered before the pass are dropped."""

    def __init__(self, epochs: IterableEpochs, progress: _Progress, batches: Iterator[Any], *, in_loop: bool) -> None:
        super().__init__(epochs, progress, in_loop=in_loop)
        self.batches = batches

    def _take(self) -> tuple[Any, Any]:
        if self.closed:
            raise iteration_over(OVER)
        begun, progress = time.monotonic(), self.progress
        while True:
            try:
                batch = next(self.batches)
            except Exception as error:  # torch's loader continues with the following batch
                progress.taken += not isinstance(error, StopIteration)
                raise
            progress.taken += 1
            if progress.taken > progress.first:
                break
        self.counts["batches"] += 1
        if self._in_loop:
            self.counts["wait_seconds"] += time.monotonic() - begun
        return batch, None

    def _stop(self) -> None:
        self.batches = iter(())
