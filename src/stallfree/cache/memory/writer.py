"""How records come into a cache and go out of it, under the lock of writers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stallfree.cache.counters import Count, Counters
from stallfree.cache.memory.arena import Arena, MemoryArena
from stallfree.cache.memory.index import Field, Index, fence
from stallfree.cache.memory.layout import Meta
from stallfree.cache.memory.recovery import find_problems
from stallfree.cache.memory.space import Space
from stallfree.cache.policies import Policy
from stallfree.errors import InputError, WaitError
from stallfree.ipc.locks import FileLock
from stallfree.pipeline.codec import record_size, write_record
from stallfree.pipeline.structure import Structure

Array = npt.NDArray[Any]
Record = tuple[Structure, list[Array]]

LOCK_SECONDS = 2.0
"""Longest wait for the lock of writers. Samples whose writer does not get it count as rejected."""

_BACK_OFF = 50
"""Batches that are not stored after the lock was not free in time."""

_LARGEST = (1 << 32) - 1  # bytes of a record that the index can say


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

    But for `put` and `found_damaged`, methods raise `WaitError` if the lock of writers is not free in 2 s.

    Args:
        meta: what the cache is made of.
        index, arena, counters: its parts.
        policy: which record goes when there is no room.
        path: the folder of the cache.
        lock: of writers.
    """

    def __init__(
        self,
        meta: Meta,
        index: Index,
        arena: Arena,
        counters: Counters,
        policy: Policy,
        path: Path,
        lock: FileLock,
    ) -> None:
        self.space = Space(meta, index, counters, policy, arena.back, path)
        self._index, self._arena, self._counters, self._policy, self._lock = index, arena, counters, policy, lock
        self._header, self._block, self._name = index.header, meta.block, path.name
        self._common = meta.structure()
        self._memory = np.empty(0, np.uint8)
        self._skip_puts, self._warned_of_lock = 0, False

    def _locked(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return self._lock.hold(LOCK_SECONDS, f"{doing} the cache {self._name!r}")

    @property
    def full(self) -> bool:
        """Whether a newcomer would not be stored, as far as is known: there is no room, and nothing makes any."""
        return not self._policy.evicts and not self.space.has_room()

    # -- storing ------------------------------------------------------------------------------------------------------

    def put(self, ids: Array, record: Callable[[int], Record], uncached: int) -> None:
        """Store the records of `ids`; what is stored already stays as it is.

        Args:
            ids: several may be equal: then the first counts.
            record: makes the record for a position in `ids`.
            uncached: nothing is stored if `uncached_steps` is another number.
        """
        _, unique = np.unique(ids, return_index=True)
        todo = unique[self._index.first[ids[unique]] == 0]
        todo.sort()
        if not len(todo) or not self._may_store(len(todo)):
            return
        records = [record(position) for position in todo.tolist()]
        try:
            with self._locked("storing in"):
                if self._header[Field.UNCACHED] == 2 * uncached:
                    self._write(ids[todo], records)
                else:
                    self._counters.add((Count.REJECTED, len(todo)))
        except WaitError as error:
            self._skip_puts = _BACK_OFF
            self._counters.add((Count.REJECTED, len(todo)))
            if not self._warned_of_lock:
                self._warned_of_lock = True
                warnings.warn(f"{error}; samples are not stored for a while", RuntimeWarning, stacklevel=3)

    def _may_store(self, count: int) -> bool:
        """False, and `count` samples are rejected, where it would be of no use to encode them."""
        if self._skip_puts > 0:
            self._skip_puts -= 1
        elif not self.full:
            return True
        self._counters.add((Count.REJECTED, count))
        return False

    def _write(self, ids: Array, records: Sequence[Record]) -> None:
        """Store `records` as those of `ids`, which are all different. Those that are there already stay as they are."""
        with self.space.changing():
            absent = np.flatnonzero(self._index.first[ids] == 0)  # another process may have been faster
            absent = absent[self.space.turns(ids[absent])].tolist()
            plain = [at for at in absent if records[at][0] is self._common]
            chained = absent if not plain else [at for at in absent if records[at][0] is not self._common]
            rejected = 0
            if plain:
                rejected += self._write_plain(ids[plain], [records[at][1] for at in plain])
            if chained:
                rejected += self._write_chained(ids[chained].tolist(), [records[at] for at in chained])
        if rejected:
            self._counters.add((Count.REJECTED, rejected))

    def _write_plain(self, ids: Array, leaves: list[list[Array]]) -> int:
        """Write records of the common structure, one block each; how many were not stored."""
        return self.space.enter_plain(ids, lambda part, blocks: self._copy_plain(ids[part], blocks, leaves[part]))

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
        space = self.space
        sizes = [record_size(structure, arrays) for structure, arrays in records]
        counts = [-(-size // self._block) for size in sizes]
        rejected = 0
        if self._policy.evicts and not self._policy.given:  # once for all newcomers that can be stored at all
            space.make_room(sum(count for count in counts if count <= space.limit))
        for id, (structure, arrays), size, count in zip(ids, records, sizes, counts, strict=True):
            if count > space.limit or size > _LARGEST or not space.has_place(id, count):
                rejected += 1
                continue
            blocks = space.take(count)
            record = self._scratch(count * self._block)
            write_record(structure, arrays, record)
            if self._index.checksum is not None:
                self._index.checksum[id] = checksum(record[:size], id)
            try:
                self._arena.write(blocks, record.reshape(count, self._block))
            except OSError:
                space.give_back(blocks)
                rejected += 1
                continue
            self._index.next[blocks[:-1]] = blocks[1:]
            space.publish(np.array([id]), blocks[:1], size, size)
        return rejected

    def _scratch(self, size: int) -> Array:
        """Memory that is used again and again; the lock of writers is also between threads."""
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]

    # -- the rest -----------------------------------------------------------------------------------------------------

    def drop(self, ids: Array) -> None:
        """Make `ids` absent, which are all different."""
        with self._locked("dropping from"), self.space.changing():
            self.space.drop(ids)

    def found_damaged(self, ids: Array, generations: Array) -> None:
        """Drop the records of `ids`, all different, that were found to be damaged, unless they have changed since."""
        with contextlib.suppress(WaitError), self._locked("dropping damaged records from"), self.space.changing():
            self.space.drop(ids[self._index.generation[ids] == generations])

    def set_scores(self, ids: Array, scores: Array) -> None:
        """See `Cache`. Raises `InputError` if the policy makes its own scores."""
        if not self._policy.given:
            raise InputError(
                f"the cache {self._name!r} has the policy {self._policy.name!r}, which makes its own scores: "
                "set_scores is for a cache made with policy='importance' or 'oracle'"
            )
        with self._locked("setting scores in"), self.space.changing():
            self.space.set_scores(ids, scores)

    @property
    def uncached_steps(self) -> int:
        """See `Cache`."""
        if self._header[Field.UNCACHED] & 1:  # the process that drops the records is at it, or has died
            with self._locked("dropping from"):
                self._finish_uncaching()
        return int(self._header[Field.UNCACHED]) >> 1

    def uncache_steps(self, count: int) -> bool:
        """See `Cache`."""
        with self._locked("dropping from"):
            self._finish_uncaching()
            if self._header[Field.UNCACHED] >= 2 * count:
                return False
            self._header[Field.UNCACHED] = 2 * count + 1
            fence()
            self._finish_uncaching()
        return True

    def _finish_uncaching(self) -> None:
        if self._header[Field.UNCACHED] & 1:
            with self.space.changing():
                self.space.drop(np.flatnonzero(self._index.first))
            fence()
            self._header[Field.UNCACHED] -= 1

    def check(self) -> list[str]:
        """What is wrong with the bookkeeping, as sentences; what a killed writer left is put in order before."""
        with self._locked("checking"):
            with self.space.changing():
                pass
            return find_problems(self._index, self._block)
