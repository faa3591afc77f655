"""In which order a loader asks for samples: its own plan, the user's sampler or the user's batch sampler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from stallfree.error_types import also_of_type
from stallfree.errors import InputError
from stallfree.loader.messages import Ids
from stallfree.loader.ranks import deal, rank_and_count, share
from stallfree.plans import make_plan

_set: WeakKeyDictionary[DistributedSampler[Any], int] = WeakKeyDictionary()
"""The epoch that a loader set last in a sampler, which may outlive the loader; `_BY_USER` if the user sets it."""

_BY_USER = -1

_SAME_ON_ALL_RANKS = (RandomSampler, SequentialSampler)
"""Samplers of torch that give every rank every sample. Those of users may know their ranks."""


class Order:
    """Batches of ids, epoch by epoch.

    Args:
        samples: of the data set.
        batch_size: None stands for single samples.
        shuffle: in the loader's own plan.
        sampler: gives ids, or None.
        batch_sampler: gives lists of ids, or None.
        drop_last: leave out a last batch that is not full.
        seed: of the loader's own plan; may be set later, before the first batch.
        ranks: among which that plan is dealt out: (rank, number of ranks), "auto" or None.

    Attributes:
        own: whether the order is the loader's own plan, which (seed, epoch) decides.
        seed: see above.
        ranks: as given.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int | None,
        shuffle: bool,
        sampler: Iterable[Any] | None,
        batch_sampler: Iterable[Any] | None,
        drop_last: bool,
        seed: int | None,
        ranks: tuple[int, int] | str | None = None,
    ) -> None:
        self.own = sampler is None and batch_sampler is None
        self._samples = samples
        self._size = 1 if batch_size is None else batch_size
        self._shuffle = shuffle
        self._sampler = sampler
        self._batch_sampler = batch_sampler
        self._drop_last = drop_last
        self.seed = seed
        self.ranks = ranks
        self._distributed = _distributed(batch_sampler if sampler is None else sampler)

    def __len__(self) -> int:
        """Number of batches. Raises `TypeError` if the sampler has no length."""
        if self._batch_sampler is not None:
            return len(self._batch_sampler)  # type: ignore[arg-type]
        return self._batches(self.samples if self._sampler is None else len(self._sampler))  # type: ignore[arg-type]

    @property
    def samples(self) -> int:
        """Samples that this rank has of the loader's own plan, in a whole epoch."""
        return share(self._samples, rank_and_count(self.ranks)[1], drop_last=self._drop_last)

    def _batches(self, samples: int) -> int:
        return samples // self._size if self._drop_last else -(-samples // self._size)

    @property
    def knows_ranks(self) -> bool:
        """Whether each rank has its part of the samples, as far as that can be seen."""
        if self.ranks is not None:
            return True
        given = self._batch_sampler if self._sampler is None else self._sampler
        parts = (given, getattr(given, "sampler", None))
        return given is not None and not any(type(part) in _SAME_ON_ALL_RANKS for part in parts)

    def ids(self, epoch: int, start: int = 0) -> Ids:
        """What this rank has of the loader's own plan, which is dealt out from position `start` on."""
        plan = make_plan(self._samples, shuffle=self._shuffle, seed=self.seed or 0, epoch=epoch)
        return deal(plan.ids[start:], *rank_and_count(self.ranks), drop_last=self._drop_last)

    def place(self, batches: int, dealt: dict[str, int] | None) -> tuple[int, dict[str, int]]:
        """Where to go on in the own plan: the first batch, and how what is left is dealt out ("start", "ranks").

        Args:
            batches: handed out of what was dealt out as `dealt` says, on each rank.
            dealt: from a state; None if it was taken without `ranks`.
        """
        before = dealt or {"start": 0, "ranks": 1}
        count = rank_and_count(self.ranks)[1]
        if count == before["ranks"]:
            return batches, before
        done = before["start"] + batches * self._size * before["ranks"]
        return 0, {"start": min(done, self._samples), "ranks": count}

    def describe(self) -> dict[str, Any]:
        """What must be the same for a position in one loader to be that position in another."""
        if not self.own:
            return {"samples": self._samples}
        return {
            "samples": self._samples,
            "batch_size": self._size,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def batches(self, epoch: int, first: int, start: int = 0) -> Iterator[Ids]:
        """The ids of each batch of an epoch, from batch `first` on; `start`: see `ids`."""
        if self.own:
            return self._planned(epoch, first, start)
        if self._distributed is not None and not self._set_by_user(self._distributed):
            self._distributed.set_epoch(epoch)
            _set[self._distributed] = epoch
        if self._batch_sampler is not None:
            return (self._checked(ids) for ids in self._batch_sampler)
        assert self._sampler is not None
        return self._chunks(self._sampler)

    def _planned(self, epoch: int, first: int, start: int) -> Iterator[Ids]:
        assert self.seed is not None
        ids = self.ids(epoch, start)
        for at in range(first * self._size, self._batches(len(ids)) * self._size, self._size):
            yield ids[at : at + self._size]

    def _chunks(self, sampler: Iterable[Any]) -> Iterator[Ids]:
        chunk: list[Any] = []
        for id in sampler:
            chunk.append(id)
            if len(chunk) == self._size:
                yield self._checked(chunk)
                chunk = []
        if chunk and not self._drop_last:
            yield self._checked(chunk)

    def _checked(self, ids: Any) -> Ids:
        """Ids as an array; negative ones count from the end, as in a list."""
        given = ids if isinstance(ids, (list, tuple, np.ndarray, torch.Tensor, range)) else _listed(ids)
        array = np.asarray(given)
        if array.shape == (0,):
            return np.empty(0, np.int64)  # `collate_fn` decides, as under torch
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(
                f"the sampler gave {repr(ids)[:200]}: ids of samples must be integers, in a list for each batch"
            )
        bad = array[(array < -self._samples) | (array >= self._samples)]
        if len(bad):
            problem = InputError(
                f"the sampler gave the id {bad[0]}, and the data set has the ids 0 to {self._samples - 1}: "
                "give a sampler made for this data set"
            )
            raise also_of_type(problem, IndexError())
        array = array.astype(np.int64)
        return np.where(array < 0, array + self._samples, array) if array.min() < 0 else array

    @property
    def next_epoch(self) -> int:
        """The epoch that a `DistributedSampler` goes on with; 0 without one.

        It shuffles by its epoch, which users forget to set. Then loaders count in it; those users who do set it decide.
        """
        sampler = self._distributed
        if sampler is None:
            return 0
        return sampler.epoch if sampler not in _set or self._set_by_user(sampler) else sampler.epoch + 1

    def _set_by_user(self, sampler: DistributedSampler[Any]) -> bool:
        if sampler.epoch != _set.get(sampler, 0):
            _set[sampler] = _BY_USER
        return _set.get(sampler) == _BY_USER


def _distributed(sampler: Any) -> DistributedSampler[Any] | None:
    """The `DistributedSampler` in a sampler or batch sampler, if there is one."""
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(candidate, DistributedSampler):
            return candidate
    return None


def _listed(ids: Any) -> Any:
    """As a list, or as it is if it cannot be iterated."""
    return list(ids) if hasattr(ids, "__iter__") or hasattr(ids, "__getitem__") else ids
