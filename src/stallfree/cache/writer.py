"""How records come into a cache and go out of it. Everything here happens under the lock of writers.

The order of the stores is what readers (records.py) and recovery rely on:

    put     data, length, chain -> generation + 1 -> first        evict   first = 0 -> generation + 1 -> blocks are free
"""

from __future__ import annotations

import platform
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stallfree.cache.arena import SEGMENT, Arena, MemoryArena
from stallfree.cache.counters import Count, Counters
from stallfree.cache.index import FREE_BLOCK, Field, Index
from stallfree.cache.layout import Meta
from stallfree.cache.policies import Policy, Victims
from stallfree.cache.recovery import blocks_of, chains, find_problems, recover
from stallfree.pipeline.codec import record_size, write_record
from stallfree.pipeline.structure import Structure
from stallfree.units import format_size

Array = npt.NDArray[Any]
Record = tuple[Structure, list[Array]]

_LARGEST = (1 << 32) - 1  # bytes of a record that the index can say
_fence_lock = threading.Lock()
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


def fence() -> None:
    """Keep the order of loads and stores on processors that would change it (x86 does not)."""
    if not _ORDERED:
        with _fence_lock:
            pass
        with _fence_lock:
            pass


def checksum(record: Array, id: int) -> int:
    """The checksum of a record as the index keeps it: it says whose record it is, too."""
    return xxhash.xxh3_64_intdigest(record.data, id) & 0xFFFFFFFF


def checksum_of(parts: Sequence[Array], id: int) -> int:
    """The same for a record in parts, one per leaf."""
    digest = xxhash.xxh3_64(seed=id)
    for part in parts:
        digest.update(part.data)
    return digest.intdigest() & 0xFFFFFFFF


class Writer:
    """Puts records into the blocks of an arena and drops them.

    Args:
        meta: what the cache is made of.
        index, arena, counters: its parts.
        policy: which record goes when there is no room.
        path: the folder of the cache, for messages.
    """

    def __init__(self, meta: Meta, index: Index, arena: Arena, counters: Counters, policy: Policy, path: Path) -> None:
        self._index, self._arena, self._counters, self._policy = index, arena, counters, policy
        self._header = index.header
        self._block, self._capacity, self._path = meta.block, meta.capacity, path
        self._beside = meta.index_bytes
        self._common = meta.structure()
        self._victims = Victims(index, index.header[Field.VICTIMS_AT : Field.VICTIMS_END + 1])
        self._memory = np.empty(0, np.uint8)
        self._warned = False

    def write(self, ids: Array, records: Sequence[Record]) -> None:
        """Store `records` as those of `ids`, which are all different. Those that are there already stay as they are."""
        self._begin()
        absent = np.flatnonzero(self._index.first[ids] == 0)  # another process may have been faster
        absent = absent[self._turns(ids[absent])].tolist()
        common = self._common
        plain = [at for at in absent if records[at][0] is common]
        chained = absent if not plain else [at for at in absent if records[at][0] is not common]
        rejected = 0
        if plain:
            rejected += self._write_plain(ids[plain], [records[at][1] for at in plain])
        if chained:
            rejected += self._write_chained(ids[chained].tolist(), [records[at] for at in chained])
        self._header[Field.DIRTY] = 0
        if rejected:
            self._counters.add((Count.REJECTED, rejected))

    def drop(self, ids: Array) -> None:
        """Make `ids` absent, which are all different."""
        self._begin()
        self._free(ids[self._index.first[ids] != 0])
        self._victims.forget()
        self._header[Field.DIRTY] = 0

    def set_scores(self, ids: Array, scores: Array) -> None:
        """Let `scores` be those of `ids`, whether they are resident or not; the last one of an id counts."""
        index = self._index
        assert index.score is not None
        self._begin()
        index.score[ids] = scores
        self._victims.entered(index.score, ids[index.first[ids] != 0])
        self._header[Field.DIRTY] = 0

    def check(self) -> list[str]:
        """What is wrong with the bookkeeping, as sentences; what a killed writer left is put in order before."""
        self._begin()
        self._header[Field.DIRTY] = 0
        return find_problems(self._index, self._block)

    def used(self, ids: Array) -> None:
        """`ids` were hit. This alone needs no lock: at worst a use is forgotten."""
        score = self._index.score
        if score is not None and len(ids):
            self._policy.used(score, ids, self._tick(len(ids)))

    def has_room(self) -> bool:
        """Whether a newcomer may find a block without evicting, as far as one can tell without the lock."""
        header = self._header
        return bool(header[Field.DIRTY] or header[Field.FREE] + header[Field.LIMIT] > header[Field.HIGH])

    def _begin(self) -> None:
        if self._header[Field.DIRTY]:
            recover(self._index, self._block)
        self._header[Field.DIRTY] = 1

    # -- records ------------------------------------------------------------------------------------------------------

    def _write_plain(self, ids: Array, leaves: list[list[Array]]) -> int:
        """Write records of the common structure, one block each; how many were not stored."""
        done = 0
        while done < len(ids):
            if self._policy.given:
                count = self._admit(ids[done:], np.ones(len(ids) - done, np.int64))
            else:
                count = self._make_room(len(ids) - done)
            if count == 0:
                break
            blocks = self._take(count)
            batch = slice(done, done + count)
            try:
                self._copy_plain(ids[batch], blocks, leaves[batch])
            except OSError:
                self._push(blocks)
                break
            self._publish(ids[batch], blocks, 0, count * self._block)
            done += count
            if self._policy.given:
                break  # the others are below all that are there now
        return len(ids) - done

    def _copy_plain(self, ids: Array, blocks: Array, leaves: list[list[Array]]) -> None:
        assert self._common is not None
        arena, offsets = self._arena, self._common.offsets
        if isinstance(arena, MemoryArena):
            rows = [arena.row(block) for block in blocks.tolist()]
        else:
            data = self._scratch(len(blocks) * self._block).reshape(len(blocks), self._block)
            rows = list(data)
        for row, arrays in zip(rows, leaves, strict=True):
            for offset, array in zip(offsets, arrays, strict=True):
                row[offset : offset + len(array)] = array
        if self._index.checksum is not None:
            sums = [checksum_of(arrays, id) for id, arrays in zip(ids.tolist(), leaves, strict=True)]
            self._index.checksum[ids] = sums
        if not isinstance(arena, MemoryArena):
            arena.write(blocks, data)

    def _write_chained(self, ids: list[int], records: list[Record]) -> int:
        """Write records that describe themselves, over as many blocks as they need; how many were not stored."""
        sizes = [record_size(structure, arrays) for structure, arrays in records]
        counts = [-(-size // self._block) for size in sizes]
        limit = int(self._header[Field.LIMIT])
        rejected = 0
        if self._policy.evicts and not self._policy.given:  # once for all newcomers that can be stored at all
            self._make_room(sum(count for count in counts if count <= limit))
        for id, (structure, arrays), size, count in zip(ids, records, sizes, counts, strict=True):
            limit = int(self._header[Field.LIMIT])
            if count > limit or size > _LARGEST or not self._has_place(id, count):
                rejected += 1
                continue
            blocks = self._take(count)
            record = self._scratch(count * self._block)
            write_record(structure, arrays, record)
            if self._index.checksum is not None:
                self._index.checksum[id] = checksum(record[:size], id)
            try:
                self._arena.write(blocks, record.reshape(count, self._block))
            except OSError:
                self._push(blocks)
                rejected += 1
                continue
            self._index.next[blocks[:-1]] = blocks[1:]
            self._publish(np.array([id]), blocks[:1], size, size)
        return rejected

    def _publish(self, ids: Array, heads: Array, length: Any, size: int) -> None:
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
        self._push(blocks)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _turns(self, ids: Array) -> Any:
        """In which order newcomers come: where scores are given, the highest first."""
        if not self._policy.given:
            return slice(None)
        assert self._index.score is not None
        return np.argsort(-self._index.score[ids], kind="stable")

    def _has_place(self, id: int, count: int) -> bool:
        """Make room for a newcomer of `count` blocks, if the policy admits it."""
        if self._policy.given:
            return self._admit(np.array([id]), np.array([count])) == 1
        return self._make_room(count) == count

    def _admit(self, ids: Array, counts: Array) -> int:
        """Make room for newcomers of given scores, falling, and so many blocks each; how many, the first ones.

        A newcomer is admitted if its score is above those of all whose place it takes.
        """
        index = self._index
        assert index.score is not None
        ends = np.cumsum(counts)
        there = self._available(int(ends[-1]))
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

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _make_room(self, need: int) -> int:
        """Blocks that can be taken now: `need`, fewer only if the policy does not evict or the cache is smaller."""
        while True:
            need = min(need, int(self._header[Field.LIMIT]))
            there = self._available(need)
            if there >= need or not self._policy.evicts or not self._evict(need - there):
                return min(there, need)

    def _available(self, need: int) -> int:
        """Blocks that are free; gets memory for more if `need` are not there yet."""
        header = self._header
        while True:
            backed, limit = int(header[Field.BACKED]), int(header[Field.LIMIT])
            there = int(header[Field.FREE]) + backed - int(header[Field.HIGH])
            if there >= need or backed >= limit:
                return there
            step = min(max(1, SEGMENT // self._block), limit - backed)
            got = self._arena.back(backed, step)
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

    def _take(self, count: int) -> Array:
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

    def _push(self, blocks: Array) -> None:
        header, index = self._header, self._index
        index.next[blocks] = FREE_BLOCK
        header[Field.FREE] += len(blocks)
        stacked = int(header[Field.STACKED])
        some = blocks[: len(index.free) - stacked]
        index.free[stacked : stacked + len(some)] = some
        header[Field.STACKED] = stacked + len(some)

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

    # -- small things -------------------------------------------------------------------------------------------------

    def _tick(self, count: int) -> int:
        tick = int(self._header[Field.TICK])
        self._header[Field.TICK] = tick + count
        return tick

    def _scratch(self, size: int) -> Array:
        """Memory that is used again and again; the lock of writers is also between threads."""
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]
