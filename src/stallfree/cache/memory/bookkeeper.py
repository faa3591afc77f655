"""A simulated cache without records, which computes the ids that would be resident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.counters import Count, Counters
from stallfree.cache.memory.index import Index
from stallfree.cache.memory.layout import ALIGN, VERSION, Meta, plan_layout
from stallfree.cache.memory.space import Space
from stallfree.cache.policies import Policy, Victims

Ids = npt.NDArray[np.int64]


class Bookkeeper:
    """Makes the same decisions as the live cache, with the same `Space` for block allocation.

    Args:
        folder: for the index.
        num_ids: number of samples.
        policy: eviction policy.
        capacity: records of one size; with `sizes` bytes, index included, laid out as a live cache of that capacity.
        sizes: bytes of each record, or None.

    Raises `CapacityError` for a capacity that holds no record.
    """

    def __init__(self, folder: Path, num_ids: int, policy: Policy, capacity: int, sizes: Ids | None) -> None:
        if sizes is None:
            layout: Any = (VERSION, "", num_ids, ALIGN, capacity, policy.name, policy.scored, "", capacity, False)
            meta = Meta(*layout)
        else:
            meta = plan_layout(
                num_ids,
                capacity,
                fingerprint="",
                policy=policy.name,
                scored=policy.scored,
                on_disk=False,
                structure=None,
                typical=int(sizes.mean()),
            )
        file = folder / "index"
        Index.create(file, num_ids, meta.num_blocks, meta.block, **meta.kinds)
        index = Index(file, num_ids, meta.num_blocks, **meta.kinds)
        victims = None
        if policy.evicts:  # a longer queue takes more memory and less time, with the same decisions
            victims = Victims(_Queue(index.first), np.zeros(2, np.int64))
        self._index, self._policy, self._counters = index, policy, Counters(index.counters)
        self._space = Space(meta, index, self._counters, policy, lambda start, count: count, folder, victims)
        self._seen = np.zeros(num_ids, np.int64)
        self._sizes = np.zeros(num_ids, np.int64) if sizes is None else sizes

    def use(self, ids: Ids) -> Ids:
        """Look `ids` up as one batch, and store the missing ones; return these, with repetitions."""
        resident = self._index.first[ids] != 0
        self._space.used(ids[resident])
        missed: Ids = ids[~resident]
        if len(missed):
            times = np.arange(len(missed))
            self._seen[missed[::-1]] = times[::-1]
            self._enter(missed[self._seen[missed] == times])  # the first of equal ids
        return missed

    def drop(self, ids: Ids) -> None:
        """Make the distinct `ids` absent."""
        self._space.drop(ids)

    def set_scores(self, ids: Ids, scores: npt.NDArray[Any]) -> None:
        """See `Space`."""
        self._space.set_scores(ids, scores)

    def _enter(self, ids: Ids) -> None:
        rejected = len(ids)
        if self._policy.evicts or self._space.has_room():
            rejected = self._space.enter(ids, self._sizes[ids], None)
        if rejected:
            self._counters.add((Count.REJECTED, rejected))

    @property
    def evictions(self) -> int:
        """Number of evicted records."""
        return self._counters.totals()[Count.EVICTIONS]

    @property
    def rejected(self) -> int:
        """Number of rejected records."""
        return self._counters.totals()[Count.REJECTED]

    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of `ids` are resident."""
        resident: npt.NDArray[np.bool_] = self._index.first[ids] != 0
        return resident

    def resident(self) -> Ids:
        """The resident ids, ascending."""
        ids: Ids = np.flatnonzero(self._index.first)
        return ids


class _Queue:
    """The state of `Victims`, in private memory."""

    def __init__(self, first: npt.NDArray[Any]) -> None:
        self.first = first
        self.victims = np.zeros(max(64, len(first) // 8), np.complex128)
        self.victims_limit = np.zeros(1, np.complex128)
