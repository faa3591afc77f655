"""Orders of samples: the loader's own, a function of (seed, epoch), and that of a sampler or batch sampler."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from stallfree.datasets.epoch_source import EpochPlan, EpochSource, Ids, Position, SourceSetup, make_plan
from stallfree.datasets.ranks import deal, rank_and_count, share, warn_of_ranks
from stallfree.errors import IdError, StallfreeWarning, sampler_output
from stallfree.raising import users_level
from stallfree.sources.mapped import MapSource

_set: WeakKeyDictionary[DistributedSampler[Any], int] = WeakKeyDictionary()
"""The last epoch that a loader set in a sampler, which may outlive the loader; `_BY_USER` if the user sets it."""

_BY_USER = -1
_MOST = (1 << 24) - 1
"""The highest id that is counted: others count as one up to this."""


class _Counted(EpochSource):
    """Counts epochs: per loader, or with a `counter` for all loaders that share it."""

    def __init__(self, setup: SourceSetup) -> None:
        self._setup = setup
        self._next = 0
        self._length = 0 if setup.reader is None else len(setup.reader.source)

    @property
    def next_epoch(self) -> int:
        counter = self._setup.counter
        return self._next if counter is None else max(self._next, counter.next_epoch)

    def _follow_length(self) -> None:
        """Use the present length of the data set, as torch's samplers do. A cache keeps the length that it has."""
        setup, reader, before = self._setup, self._setup.reader, self._length
        if reader is None or (length := len(reader.source)) == before:
            return
        self._length = length
        if setup.auto is not None:
            setup.auto.follow(f"the data set has {length} samples now and had {before}")
        if reader.cache is None:
            self._setup = replace(setup, samples=length)
            return
        warnings.warn(
            f"the data set has {length} samples now and had {before}, to which the loader keeps: make a new "
            "CachedDataset and DataLoader",
            StallfreeWarning,
            stacklevel=users_level(),
        )

    def check_ranks(self) -> None:
        if not (self.knows_ranks or self._next):  # in the first epoch: this takes 30 µs
            warn_of_ranks(sampler=not self.planned)

    def _count(self, epoch: int) -> None:
        self._next = epoch + 1
        if self._setup.counter is not None:
            self._setup.counter.next_epoch = epoch + 1


class Order(_Counted):
    """All samples of a data set, in order or shuffled by (seed, epoch), and partitioned among the ranks.

    Attributes:
        seed: may be set later, before the first batch.
        ranks: as given.
        shuffles: whether it depends on the seed.
    """

    planned: bool = True

    def __init__(self, setup: SourceSetup) -> None:
        super().__init__(setup)
        self.seed, self.ranks, self.shuffles = setup.seed, setup.ranks, setup.shuffle

    def __len__(self) -> int:
        return self._setup.num_batches(self.samples)

    @property
    def samples(self) -> int:
        """Number of samples of this rank in a whole epoch."""
        self._follow_length()
        return share(self._setup.samples, rank_and_count(self.ranks)[1], drop_last=self._setup.drop_last)

    @property
    def knows_ranks(self) -> bool:
        return self.ranks is not None

    def num_batches(self, epoch: int) -> int:
        return len(self)

    def describe(self) -> dict[str, Any]:
        setup = self._setup
        names = ("samples", "shuffle", "drop_last")
        return {"batch_size": setup.size, **{name: getattr(setup, name) for name in names}}

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def begin(self, epoch: int, resume: Position | None) -> EpochPlan:
        self._follow_length()
        first, dealt = self._place(resume or Position())
        self._count(epoch)
        return EpochPlan(self.batches(epoch, first, dealt["start"]), first, dealt)

    def _place(self, left: Position) -> tuple[int, dict[str, int]]:
        """The first batch, and the partition of the rest of the order.

        If the number of ranks has changed, the samples that no rank has received are partitioned again.
        """
        before = left.dealt or {"start": 0, "ranks": 1}
        count = rank_and_count(self.ranks)[1]
        if count == before["ranks"]:
            return left.batches, before
        done = before["start"] + left.batches * self._setup.size * before["ranks"]
        return 0, {"start": min(done, self._setup.samples), "ranks": count}

    def ids(self, epoch: int, start: int = 0) -> Ids:
        """The samples of this rank if the order is partitioned from place `start` on."""
        setup = self._setup
        plan = make_plan(setup.samples, shuffle=setup.shuffle, seed=self.seed or 0, epoch=epoch)
        return deal(plan.ids[start:], *rank_and_count(self.ranks), drop_last=setup.drop_last)

    def batches(self, epoch: int, first: int, start: int = 0) -> Iterator[Ids]:
        """The ids of each batch of an epoch, from batch `first` on; `start`: see `ids`."""
        assert self.seed is not None
        ids, size = self.ids(epoch, start), self._setup.size
        for at in range(first * size, self._setup.num_batches(len(ids)) * size, size):
            yield ids[at : at + size]


class SamplerOrder(_Counted):
    """The order of a sampler, which yields ids, or of a batch sampler, which yields lists of ids."""

    def __init__(self, setup: SourceSetup) -> None:
        super().__init__(setup)
        sampler = setup.batch_sampler if setup.sampler is None else setup.sampler
        self._parts = (sampler, getattr(sampler, "sampler", None))
        self._distributed = next((part for part in self._parts if isinstance(part, DistributedSampler)), None)

    @property
    def knows_ranks(self) -> bool:
        return self._setup.ranks is not None or not any(type(part) in _SAME_ON_ALL_RANKS for part in self._parts)

    @property
    def next_epoch(self) -> int:
        """The number of the next epoch. A `DistributedSampler`, which shuffles by its epoch, has its own.

        Loaders increment that epoch unless the user sets it.
        """
        sampler = self._distributed
        if sampler is None:
            return super().next_epoch
        own = sampler not in _set or _set_by_user(sampler)
        return max(super().next_epoch, sampler.epoch if own else sampler.epoch + 1)

    @property
    def partitioned(self) -> bool:
        return self._setup.ranks is not None or self._distributed is not None

    def num_batches(self, epoch: int) -> int:
        setup = self._setup
        return len(setup.batch_sampler) if setup.sampler is None else setup.num_batches(len(setup.sampler))

    def describe(self) -> dict[str, Any]:
        return {"samples": self._setup.samples}

    def begin(self, epoch: int, resume: Position | None) -> EpochPlan:
        self._count(epoch)
        self._follow_length()
        if resume is not None and resume.rest is not None:
            return EpochPlan((np.asarray(ids, np.int64) for ids in resume.rest), resume.batches)
        if self._distributed is not None and not _set_by_user(self._distributed):
            self._distributed.set_epoch(epoch)
            _set[self._distributed] = epoch
        setup = self._setup
        batches = setup.batch_sampler
        if setup.sampler is not None:  # single ids are drawn from its iterator, which torch's loader creates at once
            batches = self._chunks(iter(setup.sampler) if setup.batch_size is None else setup.sampler)
        first = 0 if resume is None else resume.batches  # of an endless sampler
        return EpochPlan(map(self._checked, batches), first, skip=first)

    def _chunks(self, sampler: Iterable[Any]) -> Iterator[list[Any]]:
        ids, size = iter(sampler), self._setup.size
        while len(chunk := list(islice(ids, size))) == size:
            yield chunk
        if chunk and not self._setup.drop_last:
            yield chunk

    def _checked(self, ids: Any) -> Ids:
        """Ids as an array. A plain data set decides what others than 0 to N-1 mean; elsewhere -1 is the last one."""
        values = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, (np.ndarray, torch.Tensor)) else ids
        array, samples, reader = np.asarray(values), self._setup.samples, self._setup.reader
        if array.shape == (0,):
            return np.empty(0, np.int64)  # `collate_fn` decides, as under torch
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise sampler_output(
                f"the sampler gave {repr(ids)[:200]}: ids of samples must be integers, in a list for each batch"
            )
        if isinstance(values, list) and array.dtype == np.int64 and array.view(np.uint64).max() < samples:
            return array  # no negative id, which would be a large one
        cached = getattr(self._setup.auto, "cached", None)
        if reader and reader.cache is cached is None and type(reader.source) is MapSource:
            return array.astype(np.int64)
        bad = array[(array < -samples) | (array >= samples)]
        if len(bad):
            raise IdError(
                f"the sampler gave the id {bad[0]}, and the data set has the ids 0 to {samples - 1}: "
                "give a sampler made for this data set",
                page="sampler-output",
            )
        array = array.astype(np.int64)
        return np.where(array < 0, array + samples, array)


class Repeats:
    """Counts how often the ids of an epoch have come, since a sample that comes again draws other random numbers.

    Args:
        known: the counts of the first batches, from a state.
    """

    def __init__(self, known: Sequence[int] = ()) -> None:
        self._known = deque(known)
        self._times = np.zeros(0, np.int32)

    def count(self, ids: Ids) -> int:
        """Return the number of times that the ids of the next batch have come before: the highest among them."""
        if self._known:
            return self._known.popleft()
        if not len(ids):
            return 0
        ids = np.abs(ids) & _MOST  # two that count as one are counted too often, which is as good
        missing = int(ids.max()) + 1 - len(self._times)
        if missing > 0:
            self._times = np.append(self._times, np.zeros(missing + len(self._times), np.int32))
        times = int(self._times[ids].max())
        self._times[ids] = times + int(np.unique(ids, return_counts=True)[1].max())
        return times


def _set_by_user(sampler: DistributedSampler[Any]) -> bool:
    if sampler.epoch != _set.get(sampler, 0):
        _set[sampler] = _BY_USER
    return _set.get(sampler) == _BY_USER


def order_of(setup: SourceSetup, dataset: Any = None) -> EpochSource:
    """Return the source of the `dataset` or the sampler that has `epoch_source(setup)`, else an order.

    That of a sampler or batch sampler, or the loader's own.
    """
    for brings_source in (dataset, setup.sampler):
        if hasattr(type(brings_source), "epoch_source"):
            source: EpochSource = brings_source.epoch_source(setup)
            return source
    return Order(setup) if setup.sampler is None and setup.batch_sampler is None else SamplerOrder(setup)


# -- the samplers that a loader shows ---------------------------------------------------------------------------------

NextIds = Callable[[Order, int | None], Ids]
"""Begins an epoch of an order, by default the next one, and returns its ids."""


def shown_samplers(loader: Any, epochs: Any, sampler: Any, batch_sampler: Any) -> tuple[Any, Any]:
    """The public `sampler` and `batch_sampler` of a loader with these arguments.

    Other libraries inspect them to determine whether a loader is shuffled, and whether its samples are partitioned.
    They also iterate over them, to skip the first batches of an epoch.
    """
    if sampler is None:
        order: Any = getattr(epochs.source, "order", epochs.source)  # of a window
        if getattr(order, "ranks", None) is not None:
            sampler = DealtSampler(loader.dataset, order, epochs.next_ids)
        elif isinstance(order, Order) and loader.shuffle:
            sampler = ShuffledSampler(loader.dataset, loader.generator, order, epochs.next_ids)
        elif loader.shuffle:
            sampler = RandomSampler(loader.dataset, generator=loader.generator)
        else:
            sampler = SequentialSampler(loader.dataset)
    if batch_sampler is None and loader.batch_size is not None:
        batch_sampler = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return sampler, batch_sampler


class ShuffledSampler(RandomSampler):
    """The order of a loader with `shuffle=True`. Each iteration over it is the loader's next epoch."""

    def __init__(self, dataset: Any, generator: Any, order: Order, next_ids: NextIds) -> None:
        super().__init__(dataset, generator=generator)
        self._order, self._next_ids = order, next_ids

    def __iter__(self) -> Iterator[int]:
        return iter(self._next_ids(self._order, None).tolist())


class DealtSampler(DistributedSampler[Any]):
    """The part of this rank of a loader with `ranks=`. Each iteration over it is the loader's next epoch.

    It is a `DistributedSampler`, so that Lightning does not partition the samples again. The loader counts its own
    epochs; `set_epoch` here affects only direct iteration over this object.
    """

    def __init__(self, dataset: Any, order: Order, next_ids: NextIds) -> None:
        rank, count = rank_and_count(order.ranks)
        super().__init__(dataset, count, rank)
        self._order, self._next_ids = order, next_ids
        self._given: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = self._given = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self._next_ids(self._order, self._given).tolist())

    def __len__(self) -> int:
        return self._order.samples


_SAME_ON_ALL_RANKS = (RandomSampler, SequentialSampler, ShuffledSampler)
"""Samplers that give every rank every sample. Samplers of users may depend on the rank."""
