"""What decides the samples of an epoch: the loader's order, a sampler, a moving window or an importance plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Position:
    """Where an epoch was left, as the state of a loader holds it.

    Attributes:
        batches: how many were delivered.
        rest: the ids of the batches that are left; None if (seed, epoch) decides them.
        dealt: from which place of the order on, and among how many ranks, its batches are counted ("start", "ranks").
    """

    batches: int = 0
    rest: list[list[int]] | None = None
    dealt: dict[str, int] | None = None


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class EpochPlan:
    """One epoch, or what is left of it.

    Attributes:
        batches: the ids of each batch, in order.
        first: number of the first of them in the epoch.
        dealt: see `Position`.
        on_delivered: called with the ids of each batch that is delivered; returns their weights. None: no weights.
        end: called when the iteration is over. May be called twice.
    """

    batches: Iterator[Ids]
    first: int = 0
    dealt: dict[str, int] | None = None
    on_delivered: Callable[[Ids], torch.Tensor] | None = None
    end: Callable[[], None] = _nothing


class EpochSource(Protocol):
    """Decides which samples each epoch has, and in which order.

    A data set that has a method `epoch_source(setup)` makes the source itself: see `sampling.sources`.
    """

    planned: bool = False
    """Whether (seed, epoch) decides the order, so that a state needs no ids."""

    @property
    def knows_ranks(self) -> bool:
        """Whether each rank has its part of the samples, as far as that can be seen."""
        return True

    @property
    def next_epoch(self) -> int:
        """The number of the next epoch, unless the user sets it."""
        ...

    def num_batches(self, epoch: int) -> int:
        """Batches of an epoch. Raises `TypeError` if that is not known."""
        ...

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position in one loader to be that position in another."""
        ...

    def check_ranks(self) -> None:
        """Warn if there are several ranks, and each has all samples."""
        return

    def set_seed(self, seed: int) -> None:
        """Set the seed of the loader. Called after `begin` and before the first batch is taken."""
        return

    def begin(self, epoch: int, resume: Position | None) -> EpochPlan:
        """Begin an epoch, or go on with one where a state was taken."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Entries of the loader's state beside the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as where the loader's `state` was taken. Raises `InputError` if it has not what is needed."""
        return

    def close(self) -> None:
        """End what the source has started. It may begin another epoch after that."""
        return


@runtime_checkable
class TakesLosses(Protocol):
    """An epoch source that goes by the losses of the samples."""

    def update(self, ids: Any, losses: Any) -> None:
        """Take the losses of samples that were delivered."""

    def stats(self) -> Any:
        """What was asked of the cache."""


@dataclass(frozen=True)
class SourceSetup:
    """What a source is made from: arguments of a loader, and what goes with them.

    Attributes:
        samples: of the data set.
        batch_size: None for single samples.
        shuffle, sampler, batch_sampler, drop_last, ranks: as the loader was given them.
        seed: of the loader; None if it is not drawn yet.
        seed_of_data: whether the seed is that of the data set.
        counter: has the attribute `next_epoch`, in which all loaders of a data set count; None: each counts by itself.
        reader: gives the samples.
        context: of `multiprocessing`.
        counts: of the loader, by the names of `LoaderStats`.
    """

    samples: int
    batch_size: int | None
    shuffle: bool
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    ranks: tuple[int, int] | str | None = None
    seed: int | None = None
    seed_of_data: bool = False
    counter: Any = None
    reader: Any = None
    context: Any = None
    counts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Samples of a batch."""
        return self.batch_size or 1

    def num_batches(self, samples: int) -> int:
        """Batches that so many samples make."""
        return samples // self.size if self.drop_last else -(-samples // self.size)


def plans_epochs(sampler: Any) -> bool:
    """Whether a sampler decides by itself which samples an epoch has, as an `ImportanceSampler` does."""
    return getattr(sampler, "plans_epochs", False) is True
