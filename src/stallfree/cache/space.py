"""Block allocation, admission, eviction and recovery.

Everything here except `used` and `full` runs under the writer lock. Readers (records.py) and recovery rely on this
order of stores:

    put     data, length, chain -> generation + 1 -> first        evict   first = 0 -> generation + 1 -> blocks are free

`first` is authoritative, because it is written last: an id is resident if and only if its chain of blocks is valid. All
other data (free blocks, counts, victims) is rebuilt from it after a writer died at any instant, or a disk damaged it.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from stallfree.cache.arena import SEGMENT
from stallfree.cache.layout import FREE_BLOCK, Array, Count, Field, Index, fence
from stallfree.cache.policies import Policy, Victims
from stallfree.units import format_size

_LARGEST = (1 << 32) - 1  # maximum record bytes in the index


@dataclass(frozen=True)
class Reserved:
    """Blocks of records that are not visible yet.

    Attributes:
        at: positions of the records in their batch.
        counts: number of blocks of each.
        blocks: the blocks of all, concatenated.
        recoveries: number of recoveries so far: the next one frees the blocks.
    """

    at: Array
    counts: Array
    blocks: Array
    recoveries: int


class Space:
    """Allocates blocks to records, and frees them.

    Args:
        index: of the cache.
        policy: eviction policy.
        allocate: allocates memory for blocks (`Arena.allocate`).
        victims: the eviction queue; that of the index if None.
    """

    def __init__(
        self, index: Index, policy: Policy, allocate: Callable[[int, int], int], victims: Victims | None = None
    ) -> None:
        self._index, self._header, self._policy, self._allocate = index, index.header, policy, allocate
        self._victims = victims or Victims(index, index.header[Field.VICTIMS_AT : Field.VICTIMS_END + 1])

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Context of an index change. Repairs an interrupted change first."""
        if self._header[Field.DIRTY]:
            self.recover()
        self._header[Field.DIRTY] = 1
        yield
        self._header[Field.DIRTY] = 0

    @property
    def full(self) -> bool:
        """Whether a new record would probably be rejected: no block is free, and the policy does not evict."""
        header = self._header
        if self._policy.evicts:
            return not header[Field.LIMIT]
        return not header[Field.DIRTY] and bool(header[Field.FREE] + header[Field.LIMIT] <= header[Field.HIGH])

    # -- records ------------------------------------------------------------------------------------------------------

    def reserve(self, ids: Array, lengths: Array, at: Array) -> tuple[Reserved, Array]:
        """Take blocks for new records, after evicting others if the policy admits that.

        Args:
            ids: the distinct ids of a batch.
            lengths: bytes of their records; 0 for those of the common structure, which take one block.
            at: positions of the records that need blocks.

        Returns those of `at` that have got blocks, and those to try again when these are published. The others are
        rejected.
        """
        counts = self._index.blocks_of(lengths[at])
        fits = (counts <= self._header[Field.LIMIT]) & (lengths[at] <= _LARGEST)
        at, counts = at[fits], counts[fits]
        if self._policy.given:
            assert self._index.score is not None
            order = np.argsort(-self._index.score[ids[at]], kind="stable")
            at, counts = at[order], counts[order]
        admitted = self._admit(ids[at], counts)
        left = at[admitted:] if admitted else at[counts < counts[:1]]  # the first does not fit, nor do larger ones
        counts = counts[:admitted]
        blocks = self._take(int(counts.sum()))
        return Reserved(at[:admitted], counts, blocks, int(self._header[Field.RECOVERIES])), left

    def publish(self, ids: Array, lengths: Array, new: Reserved, sums: Array | None = None) -> None:
        """Make records visible whose data is written. Those that another process has stored meanwhile are given up."""
        index, header, at, blocks, counts = self._index, self._header, new.at, new.blocks, new.counts
        absent = index.first[ids[at]] == 0
        if not absent.all():
            own = np.repeat(absent, counts)
            self.give_back(blocks[~own])
            at, blocks, counts, sums = at[absent], blocks[own], counts[absent], None if sums is None else sums[absent]
        ids, lengths, ends = ids[at], lengths[at], np.cumsum(counts)
        if len(ids) == 0:
            return
        if len(blocks) > len(ids):
            inner = np.ones(len(blocks), bool)
            inner[ends - 1] = False
            links = np.flatnonzero(inner)
            index.next[blocks[links]] = blocks[links + 1]
        index.length[ids] = lengths
        if index.checksum is not None:
            index.checksum[ids] = sums
        index.generation[ids] += 1
        fence()
        header[Field.RESIDENT] += len(ids)
        header[Field.RESIDENT_BYTES] += index.bytes_of(lengths)
        index.first[ids] = blocks[ends - counts] + 1
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
        blocks = index.chains(index.first[ids].astype(np.int64) - 1, index.blocks_of(lengths))
        index.first[ids] = 0
        fence()
        index.generation[ids] += 1
        fence()
        header[Field.RESIDENT] -= len(ids)
        header[Field.RESIDENT_BYTES] -= index.bytes_of(lengths)
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

    def _admit(self, ids: Array, counts: Array) -> int:
        """Make `counts` blocks free for each of the new `ids`, in order; return for how many.

        Fewer than all may mean that others can be admitted once these are stored; 0 that the first one is rejected. If
        scores are given, ids are in descending order, and the score of each must be above those of all residents that
        it replaces.
        """
        index, header, ends = self._index, self._header, np.cumsum(counts)
        need = int(ends[-1]) if len(ids) else 0
        free = self._available(need)
        fit = int(np.searchsorted(ends, free, "right"))
        if fit == len(ids) or not self._policy.evicts:
            return fit
        assert index.score is not None
        per_record = max(1.0, int(header[Field.HIGH] - header[Field.FREE]) / max(1, int(header[Field.RESIDENT])))
        victims = self._victims.choose(max(int(counts[fit]), int((need - free) / per_record)), index.score)
        freed = np.cumsum(index.blocks_of(index.length[victims]))
        last = np.searchsorted(freed, ends[fit:] - free)  # the last necessary victim of each new record
        last = last[: np.searchsorted(last, len(victims))]
        count = len(last)
        if self._policy.given:
            above = index.score[ids[fit : fit + count]] > index.score[victims[last]]
            count = count if above.all() else int(above.argmin())
        evicted = int(last[count - 1]) + 1 if count else 0
        if evicted < len(victims):
            self._victims.give_back(index.score, victims[evicted:])
        if evicted:
            index.level[0] = index.score[victims[evicted - 1]]
            self._free(victims[:evicted])
            index.counters.add((Count.EVICTIONS, evicted))
        return fit + count

    def evict_one(self, ids: Array) -> None:
        """Evict the record of lowest score among `ids`."""
        score, ids = self._index.score, ids[self._index.first[ids] != 0]
        if score is not None and len(ids):
            self._free(ids[[score[ids].argmin()]])
            self._index.counters.add((Count.EVICTIONS, 1))

    def _tick(self, count: int) -> int:
        tick = int(self._header[Field.TICK])
        self._header[Field.TICK] = tick + count
        return tick

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _available(self, need: int) -> int:
        """Return the number of free blocks; allocates memory for more if fewer than `need` are free."""
        header, meta = self._header, self._index.meta
        while True:
            backed, limit = int(header[Field.BACKED]), int(header[Field.LIMIT])
            free = int(header[Field.FREE]) + backed - int(header[Field.HIGH])
            if free >= need or backed >= limit:
                return free
            step = min(max(1, SEGMENT // meta.block), limit - backed)
            got = self._allocate(backed, step)
            header[Field.BACKED] = backed + got
            if got < step:
                header[Field.LIMIT] = backed + got
                taken = meta.index_bytes + (backed + got) * meta.block
                warnings.warn(
                    f"the file system of {self._index.folder} is full: the cache is limited to {format_size(taken)} of "
                    f"the requested {format_size(meta.capacity)}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _take(self, count: int) -> Array:
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

    # -- recovery -----------------------------------------------------------------------------------------------------

    def check_disk(self, backed: int) -> None:
        """Repair an index found on a disk, whatever its content.

        Only the first process to attach may call this. `backed` is the number of allocated blocks in the arena file.
        Damaged records with valid chains are detected by their checksums.
        """
        index, header = self._index, self._header
        header[Field.LIMIT] = self._index.meta.num_blocks  # the disk may have more space now
        header[Field.BACKED] = min(max(0, int(header[Field.BACKED])), backed)
        for field in (Field.TICK, Field.RECOVERIES):
            if not 0 <= header[field] < 1 << 52:
                header[field] = 0
        if index.score is not None:
            index.score[np.isnan(index.score)] = 0
            index.level[~np.isfinite(index.level)] = 0
        if not self._index.meta.common:
            index.first[(index.first != 0) & (index.length == 0)] = 0
        self.recover()
        header[Field.DIRTY] = 0

    def recover(self) -> None:
        """Rebuild the data that depends on `first`, drop records with invalid chains, and free reserved blocks.

        Idempotent: may be interrupted at any instant and repeated.
        """
        index, header = self._index, self._header
        backed = int(header[Field.BACKED])
        header[Field.RECOVERIES] += 1
        # A reader may be reading a record that the dead writer had dropped but not yet marked.
        index.generation[index.first == 0] += 1
        residents = np.flatnonzero(index.first)
        heads = index.first[residents].astype(np.int64) - 1
        counts = index.blocks_of(index.length[residents])
        sound = (heads < backed) & (counts <= backed)
        sound[np.cumsum(np.where(sound, counts, 0)) > backed] = False  # more blocks than allocated: damage
        bad = residents[~sound]
        residents, heads, counts = residents[sound], heads[sound], counts[sound]
        blocks = index.chains(heads, counts)
        owner = np.repeat(np.arange(len(residents)), counts)
        clash = blocks >= backed
        inner = np.ones(len(blocks), bool)
        inner[np.cumsum(counts) - 1] = False
        clash[inner] |= index.next[blocks[inner]] >= len(index.next)  # an invalid link
        clash |= np.bincount(blocks, minlength=len(index.next))[blocks] > 1
        wrong = np.zeros(len(residents), bool)
        wrong[owner[clash]] = True
        bad = np.concatenate((bad, residents[wrong]))
        index.first[bad] = 0
        index.generation[bad] += 1
        kept = blocks[~wrong[owner]]
        used = np.zeros(len(index.next), bool)
        used[kept] = True
        high = int(kept.max(initial=-1)) + 1
        free = np.flatnonzero(~used[:high])
        index.next[kept[index.next[kept] == FREE_BLOCK]] = 0
        index.next[free] = FREE_BLOCK
        header[Field.FREE], header[Field.STACKED], header[Field.HIGH] = len(free), 0, high
        header[Field.RESIDENT] = len(residents) - int(wrong.sum())
        header[Field.RESIDENT_BYTES] = index.bytes_of(index.length[residents[~wrong]])
        header[Field.VICTIMS_AT] = header[Field.VICTIMS_END] = 0
