"""The bookkeeping of a cache without its records: which ids would be resident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.counters import Count, Counters
from stallfree.cache.index import Field, Index
from stallfree.cache.layout import ALIGN, VERSION, Meta, plan_layout
from stallfree.cache.policies import Policy, Victims
from stallfree.cache.recovery import blocks_of
from stallfree.cache.writer import Writer

Ids = npt.NDArray[np.int64]

_SHARE = 8


class Bookkeeper(Writer):
    """Decides as the live cache does, by being its `Writer`.

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
        super().__init__(meta, index, _NoArena(), Counters(index.counters), policy, folder)  # type: ignore[arg-type]
        if policy.evicts:  # memory is no matter here: a longer queue is filled less often, and decides alike
            self._victims = Victims(policy, _Queue(index.first), np.zeros(2, np.int64), _SHARE)
        self._sizes = sizes
        self._blocks = None if sizes is None else blocks_of(sizes, meta.block)

    def use(self, ids: Ids) -> Ids:
        """Look `ids` up, as one batch, and store those that are missing; gives these, repeated ones each time."""
        there = self._index.first[ids] != 0
        self.used(ids[there])
        missed: Ids = ids[~there]
        if len(missed):
            _, first = np.unique(missed, return_index=True)
            first.sort()
            self._enter(missed[first])
        return missed

    def _enter(self, ids: Ids) -> None:
        if not self._policy.evicts and not self.has_room():
            self._counters.add((Count.REJECTED, len(ids)))
            return
        if self._blocks is None:
            rejected = self._write_plain(ids, range(len(ids)))  # type: ignore[arg-type]
        else:
            rejected = self._enter_chained(ids, self._blocks[ids])
        if rejected:
            self._counters.add((Count.REJECTED, rejected))

    def _copy_plain(self, ids: Any, blocks: Any, leaves: Any) -> None:
        """There is nothing to copy."""

    def _enter_chained(self, ids: Ids, counts: Ids) -> int:
        assert self._sizes is not None
        rejected = 0
        limit = int(self._header[Field.LIMIT])
        if self._policy.evicts:
            self._make_room(int(counts[counts <= limit].sum()))
        for id, count, size in zip(ids.tolist(), counts.tolist(), self._sizes[ids].tolist(), strict=True):
            if count > limit or self._make_room(count) < count:
                rejected += 1
                continue
            blocks = self._take(count)
            self._index.next[blocks[:-1]] = blocks[1:]
            self._publish(np.array([id]), blocks[:1], size, size)
        return rejected

    @property
    def evictions(self) -> int:
        """Records dropped to make room."""
        return self._counters.totals()[Count.EVICTIONS]

    @property
    def rejected(self) -> int:
        """Records not stored."""
        return self._counters.totals()[Count.REJECTED]

    def resident(self) -> Ids:
        """The ids that are in the cache, ascending."""
        ids: Ids = np.flatnonzero(self._index.first)
        return ids


class _Queue:
    """The state of `Victims`, in memory of its own."""

    def __init__(self, first: npt.NDArray[Any]) -> None:
        room = max(64, len(first) // _SHARE)
        self.first = first
        self.victim_ids = np.zeros(room, np.uint32)
        self.victim_scores = np.zeros(room)
        self.victims_limit = np.zeros(2)


class _NoArena:
    """Blocks without memory."""

    def back(self, start: int, count: int) -> int:
        """All that is asked for."""
        return count
