"""The bookkeeping of a cache without its records: which ids would be resident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.counters import Count, Counters
from stallfree.cache.memory.index import Index
from stallfree.cache.memory.layout import ALIGN, VERSION, Meta, plan_layout
from stallfree.cache.memory.recovery import blocks_of
from stallfree.cache.memory.space import Space
from stallfree.cache.policies import Policy

Ids = npt.NDArray[np.int64]


class Bookkeeper:
    """Decides as the live cache does: the same `Space` gives blocks to records.

    Args:
        folder: for the index.
        num_ids: number of samples.
        policy: which record goes when there is no room.
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
        self._index, self._policy, self._counters = index, policy, Counters(index.counters)
        self._space = Space(meta, index, self._counters, policy, lambda start, count: count, folder)
        self._seen = np.zeros(num_ids, np.int64)
        self._sizes = sizes
        self._blocks = None if sizes is None else blocks_of(sizes, meta.block)

    def use(self, ids: Ids) -> Ids:
        """Look `ids` up, as one batch, and store those that are missing; gives these, repeated ones each time."""
        there = self._index.first[ids] != 0
        self._space.used(ids[there])
        missed: Ids = ids[~there]
        if len(missed):
            times = np.arange(len(missed))
            self._seen[missed[::-1]] = times[::-1]
            self._enter(missed[self._seen[missed] == times])  # the first of repeated ones
        return missed

    def drop(self, ids: Ids) -> None:
        """Make `ids` absent, which are all different."""
        self._space.drop(ids)

    def set_scores(self, ids: Ids, scores: npt.NDArray[Any]) -> None:
        """See `Space`."""
        self._space.set_scores(ids, scores)

    def _enter(self, ids: Ids) -> None:
        rejected = len(ids)
        if self._policy.evicts or self._space.has_room():
            ids = ids[self._space.turns(ids)]
            if self._blocks is None:
                rejected = self._space.enter_plain(ids, lambda part, blocks: None)
            else:
                rejected -= self._enter_sized(ids, self._blocks[ids])
        if rejected:
            self._counters.add((Count.REJECTED, rejected))

    def _enter_sized(self, ids: Ids, counts: Ids) -> int:
        """Store records of `counts` blocks each; how many were stored."""
        possible = counts <= self._space.limit
        if self._policy.given:
            return self._enter_given(ids[possible], counts[possible])
        total = int(counts[possible].sum())
        there = self._space.make_room(total)
        if not self._policy.evicts:
            possible &= counts <= there
        ids, counts = ids[possible], counts[possible]
        if there >= total:
            return self._store(ids, counts)
        return sum(self._enter_one(ids, counts, at) for at in range(len(ids)))

    def _enter_given(self, ids: Ids, counts: Ids) -> int:
        if len(ids) == 0:
            return 0
        first = self._space.admit(ids, counts)
        stored = self._store(ids[:first], counts[:first])
        score: Any = self._index.score
        lowest = self._space.lowest_score()
        for at in range(first + 1, len(ids)):  # most are not above the lowest: that spares the look at who would go
            if score[ids[at]] > lowest or self._space.available(int(counts[at])) >= counts[at]:
                stored += self._enter_one(ids, counts, at)
        return stored

    def _enter_one(self, ids: Ids, counts: Ids, at: int) -> int:
        one = slice(at, at + 1)
        return self._store(ids[one], counts[one]) if self._space.has_place(int(ids[at]), int(counts[at])) else 0

    def _store(self, ids: Ids, counts: Ids) -> int:
        """Store records of `counts` blocks each, which are free; how many."""
        if len(ids) == 0:
            return 0
        assert self._sizes is not None
        blocks, ends = self._space.take(int(counts.sum())), np.cumsum(counts)
        inner = np.ones(len(blocks), bool)
        inner[ends - 1] = False
        links = np.flatnonzero(inner)
        self._index.next[blocks[links]] = blocks[links + 1]
        sizes = self._sizes[ids]
        self._space.publish(ids, blocks[ends - counts], sizes, int(sizes.sum()))
        return len(ids)

    @property
    def evictions(self) -> int:
        """Records dropped to make room."""
        return self._counters.totals()[Count.EVICTIONS]

    @property
    def rejected(self) -> int:
        """Records not stored."""
        return self._counters.totals()[Count.REJECTED]

    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of `ids` are in the cache."""
        there: npt.NDArray[np.bool_] = self._index.first[ids] != 0
        return there

    def resident(self) -> Ids:
        """The ids that are in the cache, ascending."""
        ids: Ids = np.flatnonzero(self._index.first)
        return ids
