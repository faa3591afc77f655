"""Writes and removals of records, under the writer lock."""

from __future__ import annotations

import contextlib
import itertools
import time
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
from stallfree.cache.memory.space import Space
from stallfree.cache.policies import Policy
from stallfree.errors import WaitError, cache_required, text_of
from stallfree.ipc.locks import FileLock
from stallfree.pipeline.codec import record_size, write_record
from stallfree.pipeline.structure import Structure

Array = npt.NDArray[Any]
Record = tuple[Structure, list[Array]]

LOCK_SECONDS = 2.0
"""Timeout of the writer lock. Samples whose writer times out count as rejected."""

_PIECE = 4 << 20
"""Bytes that are written to a disk under one hold of the lock."""

_LONG, _PAUSE = 0.02, 0.005
"""After a piece that took longer, other processes get time to take the lock: seconds of both."""


def checksum(record: Array, id: int) -> int:
    """The checksum of a record in the index; it includes the id."""
    return xxhash.xxh3_64_intdigest(record.data, id) & 0xFFFFFFFF


def checksum_of(parts: Sequence[Array], id: int) -> int:
    """The checksum of a record in parts, one per leaf."""
    digest = xxhash.xxh3_64(seed=id)
    for part in parts:
        digest.update(part.data)
    return digest.intdigest() & 0xFFFFFFFF


class Writer:
    """Writes records into the blocks of an arena, and drops them.

    Methods other than `put` and `drop_damaged` raise `WaitError` if the writer lock is not free in 2 s.

    Args:
        meta: the layout of the cache.
        index, arena, counters: its parts.
        policy: eviction policy.
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
        self.space = Space(meta, index, counters, policy, arena.allocate, path)
        self._index, self._arena, self._counters, self._policy, self._lock = index, arena, counters, policy, lock
        self._header, self._block, self._name = index.header, meta.block, path.name
        self._common = meta.structure()
        self._memory = np.empty(0, np.uint8)
        self._waits, self._warned_of_lock = True, False

    def _locked(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return self._lock.hold(LOCK_SECONDS, f"{doing} the cache {self._name!r}")

    @property
    def full(self) -> bool:
        """Whether a new record would probably be rejected: the cache is full, and the policy does not evict."""
        return not self._policy.evicts and not self.space.has_room()

    # -- storing ------------------------------------------------------------------------------------------------------

    def put(self, ids: Array, record: Callable[[int], Record], uncached: int) -> None:
        """Store the records of `ids`; records that are already stored are unchanged.

        Args:
            ids: of equal ids, the first counts.
            record: creates the record for a position in `ids`.
            uncached: nothing is stored if `uncached_steps` is another number.
        """
        _, unique = np.unique(ids, return_index=True)
        todo = unique[self._index.first[ids[unique]] == 0]
        todo.sort()
        if not len(todo) or not self._may_store(len(todo)):
            return
        records = [record(position) for position in todo.tolist()]
        for piece in self._pieces(records):
            began = time.monotonic()
            self._put_piece(ids[todo[piece]], records[piece], uncached)
            if piece.stop < len(todo) and time.monotonic() - began > _LONG:
                time.sleep(_PAUSE)

    def _pieces(self, records: list[Record]) -> list[slice]:
        """The parts of a batch that are written at once: all of it into memory, some 4 MiB to a disk."""
        if isinstance(self._arena, MemoryArena):
            return [slice(0, len(records))]
        sizes = np.cumsum([sum(array.size for array in arrays) for _, arrays in records])
        starts = [0, *(np.flatnonzero(np.diff(sizes // _PIECE)) + 1).tolist(), len(records)]
        return [slice(start, end) for start, end in itertools.pairwise(starts)]

    def _put_piece(self, ids: Array, records: list[Record], uncached: int) -> None:
        """Store records if the lock is free in 2 s. After a timeout, they are not stored until it is free at once."""
        try:
            with self._lock.hold(LOCK_SECONDS if self._waits else 0.0, f"storing in the cache {self._name!r}"):
                self._waits = True
                if self._header[Field.UNCACHED] == 2 * uncached:
                    self._write(ids, records)
                else:
                    self._counters.add((Count.REJECTED, len(ids)))
        except WaitError as error:
            self._waits = False
            self._counters.add((Count.REJECTED, len(ids)))
            if not self._warned_of_lock:
                self._warned_of_lock = True
                warnings.warn(
                    f"{text_of(error)}; samples are not stored until the lock is free", RuntimeWarning, stacklevel=3
                )

    def _may_store(self, count: int) -> bool:
        """False, with `count` samples rejected, if they could not be stored even when encoded."""
        if not self.full:
            return True
        self._counters.add((Count.REJECTED, count))
        return False

    def _write(self, ids: Array, records: Sequence[Record]) -> None:
        """Store the `records` of the distinct `ids`. Records that are already stored are unchanged."""
        with self.space.changing():
            absent = np.flatnonzero(self._index.first[ids] == 0)  # another process may have stored some of them
            ids, records = ids[absent], [records[at] for at in absent.tolist()]
            sizes = [
                0 if structure is self._common else record_size(structure, arrays) for structure, arrays in records
            ]
            rejected = self.space.enter(
                ids,
                np.array(sizes, np.int64),
                lambda at, blocks: self._copy(int(ids[at]), records[at], sizes[at], blocks),
            )
        if rejected:
            self._counters.add((Count.REJECTED, rejected))

    def _copy(self, id: int, record: Record, size: int, blocks: Array) -> None:
        """Write a record of `size` bytes, 0 for one of the common structure, into blocks."""
        (structure, arrays), arena = record, self._arena
        if in_place := not size and isinstance(arena, MemoryArena) and arena.has_written(int(blocks[0])):
            data = arena.row(int(blocks[0]))
        else:
            data = self._scratch(len(blocks) * self._block)
        if size:
            write_record(structure, arrays, data)
        else:
            for offset, array in zip(structure.offsets, arrays, strict=True):
                data[offset : offset + len(array)] = array
        if self._index.checksum is not None:
            self._index.checksum[id] = checksum(data[:size], id) if size else checksum_of(arrays, id)
        if not in_place:
            arena.write(blocks, data.reshape(len(blocks), self._block))

    def _scratch(self, size: int) -> Array:
        """Reusable scratch memory; the writer lock also excludes other threads."""
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]

    # -- dropping, scores, uncached steps -----------------------------------------------------------------------------

    def drop(self, ids: Array) -> None:
        """Make the distinct `ids` absent."""
        with self._locked("dropping from"), self.space.changing():
            self.space.drop(ids)

    def evict_one(self, ids: Array) -> None:
        """Evict the record of lowest score among the distinct `ids`."""
        with self._locked("evicting from"), self.space.changing():
            self.space.evict_one(ids)

    def drop_damaged(self, ids: Array, generations: Array) -> None:
        """Drop the damaged records of the distinct `ids`, unless they have changed since."""
        with contextlib.suppress(WaitError), self._locked("dropping damaged records from"), self.space.changing():
            self.space.drop(ids[self._index.generation[ids] == generations])

    def set_scores(self, ids: Array, scores: Array) -> None:
        """See `Cache`. Raises `InputError` if the policy computes its own scores."""
        if not self._policy.given:
            raise cache_required(
                f"the cache {self._name!r} has the policy {self._policy.name!r}, which computes its own scores: "
                "set_scores requires policy='importance' or 'oracle'"
            )
        with self._locked("setting scores in"), self.space.changing():
            self.space.set_scores(ids, scores)

    @property
    def uncached_steps(self) -> int:
        """See `Cache`."""
        if self._header[Field.UNCACHED] & 1:  # a process is dropping the records, or has died
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
