"""Block allocation, admission and eviction.

Everything here except `used` and `has_room` runs under the writer lock. Readers (records.py) and recovery rely on this
order of stores:

    put     data, length, chain -> generation + 1 -> first        evict   first = 0 -> generation + 1 -> blocks are free
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.counters import Count, Counters
from stallfree.cache.memory.arena import SEGMENT
from stallfree.cache.memory.index import FREE_BLOCK, Field, Index, fence
from stallfree.cache.memory.layout import Meta
from stallfree.cache.memory.recovery import blocks_of, chains, recover
from stallfree.cache.policies import Policy, Victims
from stallfree.units import format_size

Array = npt.NDArray[Any]

_LARGEST = (1 << 32) - 1  # maximum record bytes in the index


class Space:
    """Allocates blocks to records, and frees them.

    Args:
        meta: the layout of the cache.
        index, counters: its parts.
        policy: eviction policy.
        allocate: allocates memory for blocks (`Arena.allocate`).
        path: the folder of the cache, for messages.
        victims: the eviction queue; that of the index if None.
    """

    def __init__(
        self,
        meta: Meta,
        index: Index,
        counters: Counters,
        policy: Policy,
        allocate: Callable[[int, int], int],
        path: Path,
        victims: Victims | None = None,
    ) -> None:
        self._index, self._counters, self._policy, self._allocate = index, counters, policy, allocate
        self._header = index.header
        self._block, self._capacity, self._path = meta.block, meta.capacity, path
        self._index_bytes = meta.index_bytes
        self._victims = victims or Victims(index, index.header[Field.VICTIMS_AT : Field.VICTIMS_END + 1])
        self._warned = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Context of an index change. Repairs an interrupted change first."""
        if self._header[Field.DIRTY]:
            recover(self._index, self._block)
        self._header[Field.DIRTY] = 1
        yield
        self._header[Field.DIRTY] = 0

    @property
    def limit(self) -> int:
        """Maximum number of blocks of the cache."""
        return int(self._header[Field.LIMIT])

    def has_room(self) -> bool:
        """Whether a block is probably free without an eviction. Does not take the lock."""
        header = self._header
        return bool(header[Field.DIRTY] or header[Field.FREE] + header[Field.LIMIT] > header[Field.HIGH])

    # -- records ------------------------------------------------------------------------------------------------------

    def enter(self, ids: Array, lengths: Array, copy: Callable[[int, Array], None] | None) -> int:
        """Store records in as many blocks each as they need; return how many were not stored.

        Args:
            ids: distinct new ids. If the policy has given scores, the highest come first.
            lengths: bytes of their records; 0 for those of the common structure, which take one block.
            copy: writes the record at a position in `ids` into blocks. May raise `OSError`. None: nothing is written.
        """
        counts = blocks_of(lengths, self._block)
        left = np.flatnonzero((counts <= self.limit) & (lengths <= _LARGEST))
        if self._policy.given and self._index.score is not None:
            left = left[np.argsort(-self._index.score[ids[left]], kind="stable")]
        if len(left) == 0:
            return len(ids)
        need, lowest = int(counts[left].sum()), -np.inf
        if self._policy.given:
            together = self.admit(ids[left], counts[left])
        else:
            there = self.make_room(need)
            if not self._policy.evicts:
                left = left[counts[left] <= there]
            together = int(np.searchsorted(np.cumsum(counts[left]), there, "right"))
        first, left = left[:together], left[together:]
        stored = self._store(first, ids[first], lengths[first], counts[first], copy)
        if not self._policy.evicts:
            left = left[counts[left] <= there - int(counts[first].sum())]
        elif self._policy.given and len(left):  # the policy did not admit the first record
            left = left[1:] if counts[left].min() < counts[left[0]] else left[:0]
            lowest = self._lowest_score() if len(left) else lowest
        for at in left.tolist():
            one = slice(at, at + 1)
            if self._admit_one(ids[one], counts[one], lowest):
                stored += self._store(np.array([at]), ids[one], lengths[one], counts[one], copy)
        return len(ids) - stored

    def _admit_one(self, id: Array, count: Array, lowest: float) -> bool:
        """Evict for a new record, if the policy admits it. `lowest` is the score of the first victim."""
        if not self._policy.given:
            return self.make_room(int(count[0])) == int(count[0])
        score = self._index.score
        assert score is not None
        if score[id[0]] <= lowest and self.available(int(count[0])) < count[0]:  # usual: no search for victims
            return False
        return self.admit(id, count) == 1

    def _store(
        self, at: Array, ids: Array, lengths: Array, counts: Array, copy: Callable[[int, Array], None] | None
    ) -> int:
        """Store the records at the positions `at`, for which blocks are free; return how many were stored."""
        if len(at) == 0:
            return 0
        blocks, ends = self.take(int(counts.sum())), np.cumsum(counts)
        if copy is not None:
            try:
                for position, start, end in zip(at.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
                    copy(position, blocks[start:end])
            except OSError:
                self.give_back(blocks)
                return 0
        if len(blocks) > len(ids):
            inner = np.ones(len(blocks), bool)
            inner[ends - 1] = False
            links = np.flatnonzero(inner)
            self._index.next[blocks[links]] = blocks[links + 1]
        self._publish(ids, blocks[ends - counts], lengths)
        return len(at)

    def _publish(self, ids: Array, heads: Array, lengths: Array) -> None:
        """Make records visible after their data and chains are written."""
        index, header = self._index, self._header
        index.length[ids] = lengths
        index.generation[ids] += 1
        fence()
        header[Field.RESIDENT] += len(ids)
        header[Field.RESIDENT_BYTES] += int(np.where(lengths == 0, self._block, lengths).sum())
        index.first[ids] = heads + 1
        if index.score is not None:
            self._policy.entered(index.score, ids, self._tick(len(ids)), float(index.level[0]))
            self._victims.entered(index.score, ids)

    def drop(self, ids: Array) -> None:
        """Make the distinct `ids` absent."""
        self._free(ids[self._index.first[ids] != 0])
        self._victims.clear()

    def _free(self, ids: Array) -> None:
        index, header = self._index, self._header
        if len(ids) == 0:
            return
        lengths = index.length[ids]
        heads = np.minimum(index.first[ids].astype(np.int64) - 1, len(index.next) - 1)
        if lengths.any():
            blocks = chains(index, heads, blocks_of(lengths, self._block))
            size = int(np.where(lengths == 0, self._block, lengths).sum(dtype=np.int64))
        else:
            blocks, size = heads, len(ids) * self._block
        index.first[ids] = 0
        fence()
        index.generation[ids] += 1
        fence()
        header[Field.RESIDENT] -= len(ids)
        header[Field.RESIDENT_BYTES] -= size
        self.give_back(blocks)

    # -- admission ----------------------------------------------------------------------------------------------------

    def used(self, ids: Array) -> None:
        """Record hits of `ids`. Needs no lock: at worst a use is lost."""
        score = self._index.score
        if score is not None and len(ids):
            self._policy.used(score, ids, self._tick(len(ids)))

    def set_scores(self, ids: Array, scores: Array) -> None:
        """Set the scores of `ids`, resident or not; of equal ids the last score counts."""
        index = self._index
        assert index.score is not None
        index.score[ids] = scores
        self._victims.entered(index.score, ids[index.first[ids] != 0])

    def _lowest_score(self) -> float:
        """The score of the next victim; infinity if there is none."""
        score = self._index.score
        assert score is not None
        victim = self._victims.choose(1, score)
        self._victims.give_back(score, victim)
        return float(score[victim].min(initial=np.inf))

    def admit(self, ids: Array, counts: Array) -> int:
        """Evict for new records of descending scores with `counts` blocks each; return how many are admitted, in order.

        A record is admitted if its score is above those of all residents that it replaces.
        """
        index = self._index
        assert index.score is not None
        ends = np.cumsum(counts)
        there = self.available(int(ends[-1]))
        fit = int(np.searchsorted(ends, there, "right"))
        if fit == len(ids):
            return fit
        victims = self._victims.choose(int(ends[-1]) - there, index.score)
        freed = np.cumsum(blocks_of(index.length[victims], self._block))
        last = np.searchsorted(freed, ends[fit:] - there)  # the last necessary victim
        last = last[: np.searchsorted(last, len(victims))]
        above = index.score[ids[fit : fit + len(last)]] > index.score[victims[last]]
        above[1:] |= last[1:] == last[:-1]  # the previous record leaves space
        count = len(above) if above.all() else int(above.argmin())
        self._evict_first(victims, int(last[count - 1]) + 1 if count else 0)
        return fit + count

    def make_room(self, need: int) -> int:
        """Free up to `need` blocks; fewer only if the policy does not evict or the cache is smaller."""
        while True:
            need = min(need, self.limit)
            there = self.available(need)
            if there >= need or not self._policy.evicts or not self._evict(need - there):
                return min(there, need)

    def _evict(self, need: int) -> bool:
        """Evict the records of lowest score until `need` blocks are free, or all; return whether any was evicted."""
        index, header = self._index, self._header
        assert index.score is not None
        used = int(header[Field.HIGH] - header[Field.FREE])
        per_item = max(1.0, used / max(1, int(header[Field.RESIDENT])))
        victims = self._victims.choose(max(1, int(need / per_item)), index.score)
        blocks = np.cumsum(blocks_of(index.length[victims], self._block))
        self._evict_first(victims, int(np.searchsorted(blocks, need)) + 1)
        return len(victims) > 0

    def _evict_first(self, victims: Array, count: int) -> None:
        """Drop the first `count` of `victims`, and return the others to the queue."""
        index = self._index
        assert index.score is not None
        if count < len(victims):
            self._victims.give_back(index.score, victims[count:])
            victims = victims[:count]
        if len(victims):
            index.level[0] = index.score[victims[-1]]
            self._free(victims)
            self._counters.add((Count.EVICTIONS, len(victims)))

    def evict_one(self, ids: Array) -> None:
        """Evict the record of lowest score among `ids`."""
        score, ids = self._index.score, ids[self._index.first[ids] != 0]
        if score is not None and len(ids):
            self._free(ids[[score[ids].argmin()]])
            self._counters.add((Count.EVICTIONS, 1))

    def _tick(self, count: int) -> int:
        tick = int(self._header[Field.TICK])
        self._header[Field.TICK] = tick + count
        return tick

    # -- blocks -------------------------------------------------------------------------------------------------------

    def available(self, need: int) -> int:
        """The number of free blocks; allocates memory for more if fewer than `need` are free."""
        header = self._header
        while True:
            backed, limit = int(header[Field.BACKED]), int(header[Field.LIMIT])
            there = int(header[Field.FREE]) + backed - int(header[Field.HIGH])
            if there >= need or backed >= limit:
                return there
            step = min(max(1, SEGMENT // self._block), limit - backed)
            got = self._allocate(backed, step)
            header[Field.BACKED] = backed + got
            if got < step:
                header[Field.LIMIT] = backed + got
                self._warn_full(self._index_bytes + (backed + got) * self._block)

    def _warn_full(self, taken: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the file system of {self._path} is full: the cache is limited to {format_size(taken)} of the "
                f"requested {format_size(self._capacity)}",
                RuntimeWarning,
                stacklevel=2,
            )

    def take(self, count: int) -> Array:
        """Take `count` free blocks: first freed ones, in LIFO order, then new ones."""
        header, index = self._header, self._index
        reused = min(count, int(header[Field.FREE]))
        high = int(header[Field.HIGH])
        blocks = np.empty(count, np.int64)
        done = 0
        while done < reused:
            stacked = int(header[Field.STACKED]) or self._fill_stack()
            step = min(reused - done, stacked)
            blocks[done : done + step] = index.free[stacked - step : stacked][::-1]
            index.next[blocks[done : done + step]] = 0
            header[Field.STACKED] = stacked - step
            done += step
        blocks[reused:] = np.arange(high, high + count - reused)
        index.next[blocks[reused:]] = 0
        header[Field.FREE] -= reused
        header[Field.HIGH] = high + count - reused
        return blocks

    def _fill_stack(self) -> int:
        """Search for free blocks and push them on the empty stack; return how many."""
        header, index = self._header, self._index
        found = np.flatnonzero(index.next[: int(header[Field.HIGH])] == FREE_BLOCK)[: len(index.free)]
        index.free[: len(found)] = found[::-1]
        return len(found)

    def give_back(self, blocks: Array) -> None:
        """Free `blocks`."""
        header, index = self._header, self._index
        index.next[blocks] = FREE_BLOCK
        header[Field.FREE] += len(blocks)
        stacked = int(header[Field.STACKED])
        some = blocks[: len(index.free) - stacked]
        index.free[stacked : stacked + len(some)] = some
        header[Field.STACKED] = stacked + len(some)
