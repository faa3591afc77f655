"""The protocol of epoch sources, which decide the samples of each epoch.

A loader calls `EpochSource.begin` and iterates over the batches of the returned `EpochPlan`. Sources are the loader's
order, a sampler, a moving window or an importance plan.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from stallfree.cache.arena import one_thread
from stallfree.errors import state_format
from stallfree.pipeline.randomness import sample_seed

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Position:
    """The position in an epoch, as stored in the state of a loader.

    Attributes:
        batches: number of delivered batches.
        rest: the ids of the remaining batches; None if (seed, epoch) determines them, or if their sampler is endless.
        repeats: for each of these, how often its ids have come before in the epoch; None: never.
        dealt: the place in the order from which its batches are counted, and the number of ranks ("start", "ranks").
    """

    batches: int = 0
    rest: list[list[int]] | None = None
    dealt: dict[str, int] | None = None
    repeats: list[int] | None = None


@dataclass
class EpochPlan:
    """One epoch, or the rest of it.

    Attributes:
        batches: the ids of each batch, in order.
        first: number of the first of these batches in the epoch.
        skip: number of leading `batches` to leave out.
        dealt: see `Position`.
        on_delivered: called with the ids of each delivered batch; returns their weights. None: no weights.
        end: called when the iteration has ended. Idempotent.
    """

    batches: Iterator[Ids]
    first: int = 0
    dealt: dict[str, int] | None = None
    on_delivered: Callable[[Ids], torch.Tensor] | None = None
    end: Callable[[], None] = field(default=lambda: None)
    skip: int = 0


class EpochSource(Protocol):
    """Decides the samples of each epoch and their order.

    A data set with a method `epoch_source(setup)` creates the source itself.
    """

    planned: bool = False
    """Whether (seed, epoch) determines the order, so that a state needs no ids."""

    @property
    def knows_ranks(self) -> bool:
        """Whether each rank is known to have its own part of the samples."""
        return True

    @property
    def partitioned(self) -> bool:
        """Whether the samples are one rank's part, which Accelerate does not partition again."""
        return self.knows_ranks

    @property
    def next_epoch(self) -> int:
        """The number of the next epoch, if the user does not set it."""

    def num_batches(self, epoch: int) -> int:
        """The number of batches of an epoch. Raises `TypeError` if it is not known."""

    def describe(self) -> dict[str, Any]:
        """The properties that two loaders must share for a position to be valid in both."""

    def check_ranks(self) -> None:
        """Warn if there are several ranks and each has all samples."""
        return

    def set_seed(self, seed: int) -> None:
        """Set the seed of the loader. Called after `begin` and before the first batch is taken."""
        return

    def set_epoch(self, epoch: int) -> None:
        """The user or a state has set the number of the next epoch."""
        return

    def begin(self, epoch: int, resume: Position | None) -> EpochPlan:
        """Begin an epoch, or resume one at a saved position."""

    def state_dict(self) -> dict[str, Any]:
        """Entries of the loader's state in addition to the position."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loader's `state`. Raises `InputError` if entries are missing."""
        return

    def close(self) -> None:
        """Stop the processes that the source has started. It may begin another epoch afterwards."""
        return


@dataclass
class SourceSetup:
    """The arguments of an epoch source: those of a loader, and its shared objects. Not changed once made.

    Attributes:
        samples: number of samples of the data set.
        batch_size: samples per batch; None for single samples.
        shuffle, sampler, batch_sampler, drop_last, ranks: as passed to the loader.
        seed: of the loader; None before it is drawn.
        seed_of_data: whether the seed is that of the data set.
        counter: its attribute `next_epoch` is the epoch count of all loaders of a data set; None: one count per loader.
        reader: reads the samples; None if the order is used without them.
        auto: what makes the cache of `cache="auto"`; or None.
        context: `multiprocessing` context.
        counts: of the loader, by the names of `LoaderStats`.
        order: makes the loader's own order from a setup, for a source that is an order with something beside it.
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
    auto: Any = None
    context: Any = None
    counts: Mapping[str, Any] = field(default_factory=dict)
    order: Callable[["SourceSetup"], EpochSource] | None = None

    def make_order(self, **changes: Any) -> EpochSource:
        """Return the order that the loader would have without the object that asks, with `changes` of this setup."""
        assert self.order is not None
        return self.order(replace(self, **changes))

    @property
    def size(self) -> int:
        """Samples per batch."""
        return self.batch_size or 1

    def num_batches(self, samples: int) -> int:
        """The number of batches for this number of samples."""
        return samples // self.size if self.drop_last else -(-samples // self.size)


def plans_epochs(sampler: Any) -> bool:
    """Whether a sampler plans whole epochs itself, as an `ImportanceSampler` does."""
    return getattr(sampler, "plans_epochs", False) is True


def check_state(state: Any, version: int, *names: str) -> None:
    """Raise `InputError` unless `state` is a dict of this version with these entries."""
    actual = state.get("version") if isinstance(state, dict) else None
    if actual != version:
        raise state_format(
            f"the state has version {actual!r}, expected {version}: give what state_dict() of this release returned"
        )
    if missing := set(names) - state.keys():
        raise state_format(f"the state lacks {', '.join(sorted(missing))}: give what state_dict() returned")


@dataclass(frozen=True)
class Plan:
    """The ids of an epoch, in order.

    Attributes:
        ids: int64, one per draw.
        weights: float32 of the same length, or None where all are 1.
        epoch: number of the epoch.
    """

    ids: Ids
    weights: np.ndarray[Any, np.dtype[np.float32]] | None
    epoch: int


_SPLIT = 32_768
"""Length from which torch splits an operation among its threads."""


def make_plan(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> Plan:
    """Every sample once: in order, or shuffled by (seed, epoch).

    Any process computes the same plan from the two integers, so a resume needs only them.
    """
    if not shuffle:
        return Plan(np.arange(num_samples, dtype=np.int64), None, epoch)
    generator = torch.Generator()  # takes half the time of NumPy's
    generator.manual_seed(sample_seed(seed, epoch, 0))
    with one_thread() if num_samples >= _SPLIT else nullcontext():
        ids = torch.randperm(num_samples, generator=generator).numpy()
    return Plan(ids, None, epoch)
