"""The blocks of a cache: which are free, which records have the others, and which of these make room.

Everything here but `used` and `has_room` happens under the lock of writers. The order of the stores is what readers
(records.py) and recovery rely on:

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


class Space:
    """Gives blocks to records, and takes them back.

    Args:
        meta: what the cache is made of.
        index, counters: its parts.
        policy: which record goes when there is no room.
        back: gets memory for some blocks (`Arena.back`).
        path: the folder of the cache, for messages.
    """

    def __init__(
        self,
        meta: Meta,
        index: Index,
        counters: Counters,
        policy: Policy,
        back: Callable[[int, int], int],
        path: Path,
    ) -> None:
        self._index, self._counters, self._policy, self._back = index, counters, policy, back
        self._header = index.header
        self._block, self._capacity, self._path = meta.block, meta.capacity, path
        self._beside = meta.index_bytes
        self._victims = Victims(index, index.header[Field.VICTIMS_AT : Field.VICTIMS_END + 1])
        self._warned = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A change of the index. What a change that was cut short has left is put in order before."""
        if self._header[Field.DIRTY]:
            recover(self._index, self._block)
        self._header[Field.DIRTY] = 1
        yield
        self._header[Field.DIRTY] = 0

    @property
    def limit(self) -> int:
        """Blocks that the cache may have."""
        return int(self._header[Field.LIMIT])

    def has_room(self) -> bool:
        """Whether a newcomer may find a block without evicting, as far as is known without the lock."""
        header = self._header
        return bool(header[Field.DIRTY] or header[Field.FREE] + header[Field.LIMIT] > header[Field.HIGH])

    # -- records ------------------------------------------------------------------------------------------------------

    def enter_plain(self, ids: Array, copy: Callable[[slice, Array], None]) -> int:
        """Store records of one block each; how many were not stored.

        Args:
            ids: in the order of `turns`.
            copy: writes the records of a part of `ids` into blocks. May raise `OSError`.
        """
        done = 0
        while done < len(ids):
            if self._policy.given:
                count = self.admit(ids[done:], np.ones(len(ids) - done, np.int64))
            else:
                count = self.make_room(len(ids) - done)
            if count == 0:
                break
            blocks = self.take(count)
            batch = slice(done, done + count)
            try:
                copy(batch, blocks)
            except OSError:
                self.give_back(blocks)
                break
            self.publish(ids[batch], blocks, 0, count * self._block)
            done += count
            if self._policy.given:
                break  # the others are below all that are there now
        return len(ids) - done

    def publish(self, ids: Array, heads: Array, length: Any, size: int) -> None:
        """Make records visible whose data and chains are written; `size` is the sum of their bytes."""
        index, header = self._index, self._header
        index.length[ids] = length
        index.generation[ids] += 1
        fence()
        header[Field.RESIDENT] += len(ids)
        header[Field.RESIDENT_BYTES] += size
        index.first[ids] = heads + 1
        if index.score is not None:
            self._policy.entered(index.score, ids, self._tick(len(ids)), float(index.level[0]))
            self._victims.entered(index.score, ids)

    def drop(self, ids: Array) -> None:
        """Make `ids` absent, which are all different."""
        self._free(ids[self._index.first[ids] != 0])
        self._victims.forget()

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
        """Note that `ids` were hit. This alone needs no lock: at worst a use is forgotten."""
        score = self._index.score
        if score is not None and len(ids):
            self._policy.used(score, ids, self._tick(len(ids)))

    def set_scores(self, ids: Array, scores: Array) -> None:
        """Let `scores` be those of `ids`, whether they are resident or not; the last one of an id counts."""
        index = self._index
        assert index.score is not None
        index.score[ids] = scores
        self._victims.entered(index.score, ids[index.first[ids] != 0])

    def lowest_score(self) -> float:
        """The score of the resident that would go first; infinity if there is none."""
        score = self._index.score
        assert score is not None
        victim = self._victims.choose(1, score)
        self._victims.give_back(score, victim)
        return float(score[victim].min(initial=np.inf))

    def turns(self, ids: Array) -> Any:
        """In which order newcomers come: where scores are given, the highest first."""
        if not self._policy.given:
            return slice(None)
        assert self._index.score is not None
        return np.argsort(-self._index.score[ids], kind="stable")

    def has_place(self, id: int, count: int) -> bool:
        """Make room for a newcomer of `count` blocks, if the policy admits it. Returns whether there is."""
        if self._policy.given:
            return self.admit(np.array([id]), np.array([count])) == 1
        return self.make_room(count) == count

    def admit(self, ids: Array, counts: Array) -> int:
        """Make room for newcomers of given scores, falling, and so many blocks each; how many, the first ones.

        A newcomer is admitted if its score is above those of all whose place it takes.
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
        last = np.searchsorted(freed, ends[fit:] - there)  # the last one who would have to go
        last = last[: np.searchsorted(last, len(victims))]
        above = index.score[ids[fit : fit + len(last)]] > index.score[victims[last]]
        above[1:] |= last[1:] == last[:-1]  # there is room left where the one before finds place
        count = len(above) if above.all() else int(above.argmin())
        self._let_go(victims, int(last[count - 1]) + 1 if count else 0)
        return fit + count

    def make_room(self, need: int) -> int:
        """Blocks that can be taken now: `need`, fewer only if the policy does not evict or the cache is smaller."""
        while True:
            need = min(need, self.limit)
            there = self.available(need)
            if there >= need or not self._policy.evicts or not self._evict(need - there):
                return min(there, need)

    def _evict(self, need: int) -> bool:
        """Drop the records of lowest score until `need` blocks are free, or all; whether any was dropped."""
        index, header = self._index, self._header
        assert index.score is not None
        used = int(header[Field.HIGH] - header[Field.FREE])
        per_item = max(1.0, used / max(1, int(header[Field.RESIDENT])))
        victims = self._victims.choose(max(1, int(need / per_item)), index.score)
        blocks = np.cumsum(blocks_of(index.length[victims], self._block))
        self._let_go(victims, int(np.searchsorted(blocks, need)) + 1)
        return len(victims) > 0

    def _let_go(self, victims: Array, count: int) -> None:
        """Drop the first `count` of `victims`, and give the others back."""
        index = self._index
        assert index.score is not None
        if count < len(victims):
            self._victims.give_back(index.score, victims[count:])
            victims = victims[:count]
        if len(victims):
            index.level[0] = index.score[victims[-1]]
            self._free(victims)
            self._counters.add((Count.EVICTIONS, len(victims)))

    def _tick(self, count: int) -> int:
        tick = int(self._header[Field.TICK])
        self._header[Field.TICK] = tick + count
        return tick

    # -- blocks -------------------------------------------------------------------------------------------------------

    def available(self, need: int) -> int:
        """Blocks that are free; gets memory for more if `need` are not there yet."""
        header = self._header
        while True:
            backed, limit = int(header[Field.BACKED]), int(header[Field.LIMIT])
            there = int(header[Field.FREE]) + backed - int(header[Field.HIGH])
            if there >= need or backed >= limit:
                return there
            step = min(max(1, SEGMENT // self._block), limit - backed)
            got = self._back(backed, step)
            header[Field.BACKED] = backed + got
            if got < step:
                header[Field.LIMIT] = backed + got
                self._warn_full(self._beside + (backed + got) * self._block)

    def _warn_full(self, taken: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the file system of {self._path} is full: the cache stays at {format_size(taken)} of the "
                f"{format_size(self._capacity)} asked for",
                RuntimeWarning,
                stacklevel=2,
            )

    def take(self, count: int) -> Array:
        """`count` blocks that are there: first those given back, last of them first, then new ones."""
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
        """Look for free blocks and put them on the empty stack; how many."""
        header, index = self._header, self._index
        found = np.flatnonzero(index.next[: int(header[Field.HIGH])] == FREE_BLOCK)[: len(index.free)]
        index.free[: len(found)] = found[::-1]
        return len(found)

    def give_back(self, blocks: Array) -> None:
        """Make `blocks` free."""
        header, index = self._header, self._index
        index.next[blocks] = FREE_BLOCK
        header[Field.FREE] += len(blocks)
        stacked = int(header[Field.STACKED])
        some = blocks[: len(index.free) - stacked]
        index.free[stacked : stacked + len(some)] = some
        header[Field.STACKED] = stacked + len(some)
