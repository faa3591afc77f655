"""Lock-free reads of records, a whole batch at a time.

A reader loads the generation, then the location, copies the record, and loads the generation again. A nonzero `first`
implies a complete record. If blocks were reused during the copy, the generation differs and the read is a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.memory.arena import Arena, MemoryArena
from stallfree.cache.memory.index import Index, fence
from stallfree.cache.memory.layout import Meta
from stallfree.cache.memory.recovery import blocks_of, chains
from stallfree.cache.memory.writer import checksum, checksum_of
from stallfree.errors import CodecError
from stallfree.pipeline.codec import MissingClassError, read_leaves, read_record, stack_build

Array = npt.NDArray[Any]

_LARGE = 4 << 10
"""Mean record bytes from which each record is copied individually."""


@dataclass
class Found:
    """The state of a batch read: the locations of the records, and later which of them are valid.

    Attributes:
        ids: the requested ids.
        generation, first, length, checksum: their index entries before the read.
        good: which records were read completely.
        damaged: positions of records that did not change during the read but fail their checksum.
    """

    ids: Array
    generation: Array
    first: Array
    length: Array
    checksum: Array | None
    good: Array
    damaged: list[int]


@dataclass(frozen=True)
class Aim:
    """The target of a gather, created once for memory that is reused.

    Attributes:
        outs: the memory, an array per leaf that has bytes.
        target: its arena-specific form.
    """

    outs: list[Array]
    target: Any


@dataclass(frozen=True)
class Borrowed:
    """Read-only samples whose arrays are views of the cache, which other processes may change at any time.

    Attributes:
        values: the samples, `MISS` for absent ones.
        unchanged: returns whether the sample at a position is unchanged; results computed from it are then valid.
    """

    values: list[Any]
    unchanged: Callable[[int], bool]


class Records:
    """Reads the records of a cache.

    Args:
        meta: the layout of the cache.
        index, arena: its parts.
        allow_pickle: whether pickled leaves are loaded, so that the content of the cache is trusted. A record of a
            class that is not imported here then raises `MissingClassError`; otherwise it is a miss.
    """

    def __init__(self, meta: Meta, index: Index, arena: Arena, allow_pickle: bool) -> None:
        self._index, self._arena, self._block, self._num_blocks = index, arena, meta.block, meta.num_blocks
        self._allow_pickle = allow_pickle
        self._local = threading.local()
        self.common = meta.structure()
        leaves = () if self.common is None else self.common.leaves
        self._filled = [number for number, leaf in enumerate(leaves) if leaf.nbytes]
        self._offsets = [] if self.common is None else [self.common.offsets[number] for number in self._filled]

    def locate(self, ids: Array) -> Found:
        """The current locations of the records of `ids`."""
        index = self._index
        generation = index.generation[ids]
        fence()
        first, length = index.first[ids], index.length[ids]
        sums = None if index.checksum is None else index.checksum[ids]
        return Found(ids, generation, first, length, sums, first != 0, [])

    def aim(self, outs: Sequence[Array]) -> Aim:
        """Prepare to gather the records of the common structure, leaf by leaf, into `outs`."""
        filled = [outs[number] for number in self._filled]
        return Aim(filled, self._arena.aim(self._offsets, filled))

    def gather(self, found: Found, aim: Aim) -> None:
        """Copy the records of the common structure to `aim`."""
        found.good &= found.length == 0
        blocks = found.first.astype(np.int64)
        blocks -= 1
        if not found.good.all():
            if not found.good.any():
                return
            blocks[~found.good] = blocks[found.good.argmax()]  # any allocated block
        self._arena.gather(blocks, aim.target)
        self._check_unchanged(found, slice(None))
        if found.checksum is not None:
            known = found.checksum.tolist()
            for at in np.flatnonzero(found.good).tolist():
                if checksum_of([out[at] for out in aim.outs], int(found.ids[at])) != known[at]:
                    found.good[at] = False
                    found.damaged.append(at)

    def read(self, found: Found, values: list[Any]) -> None:
        """Put the resident values into `values`, at the positions of their ids."""
        plain = found.good & (found.length == 0)
        if plain.all():
            self._read_plain(found, values)
            return
        chained = np.flatnonzero(found.good & (found.length != 0))
        at = np.flatnonzero(plain)
        if len(at):
            some = _subset(found, at)
            into: list[Any] = [None] * len(at)
            self._read_plain(some, into)
            for position, value, good in zip(at.tolist(), into, some.good.tolist(), strict=True):
                if good:
                    values[position] = value
            found.good[at] = some.good
            found.damaged += at[some.damaged].tolist()
        if len(chained) and isinstance(self._arena, MemoryArena) and found.length[chained].mean() >= _LARGE:
            chained = self._read_views(found, chained, values)
        if len(chained):
            self._read_chained(found, chained, values)

    def _views(self, found: Found) -> list[tuple[Array, ...]]:
        """A view of each record in its own structure (`pipeline.codec`); () for absent ones."""
        arena = self._arena
        assert isinstance(arena, MemoryArena)
        parts: list[tuple[Array, ...]] = [()] * len(found.ids)
        counts = blocks_of(found.length, self._block)
        counts[~found.good] = 0
        found.good &= counts <= self._num_blocks
        at = np.flatnonzero(found.good)
        counts = counts[at]
        blocks = chains(self._index, found.first[at].astype(np.int64) - 1, counts)
        ends = np.cumsum(counts)
        sizes = found.length[at].tolist()
        for position, count, end, length in zip(at.tolist(), counts.tolist(), ends.tolist(), sizes, strict=True):
            own = blocks[end - count : end]
            if length:
                parts[position] = tuple(arena.pieces(own, length))
            elif self.common is not None:
                parts[position] = (self.common.head, *arena.pieces(own, self.common.size))
            else:  # a writer is changing the record
                found.good[position] = False
        return parts

    def borrow(self, found: Found, values: list[Any]) -> Borrowed:
        """Put views of the resident values in place of `MISS` into `values`. Only for a cache in memory.

        A record that is in several pieces, or must be unpickled, is copied.
        """
        views = self._views(found)
        left = self._decode_views(views, np.flatnonzero(found.good), values, copy=False)
        if len(left):
            self._read_chained(found, left, values)
        generation, ids, before = self._index.generation, found.ids.tolist(), found.generation.tolist()

        def unchanged(at: int) -> bool:
            fence()
            return bool(generation[ids[at]] == before[at])

        return Borrowed(values, unchanged)

    def _read_views(self, found: Found, at: Array, values: list[Any]) -> Array:
        """Put the values at the positions `at` into `values`, each copied once; return the positions left to read."""
        some = _subset(found, at)
        into: list[Any] = [None] * len(at)
        views = self._views(some)
        left = self._decode_views(views, np.flatnonzero(some.good), into, copy=True)
        self._check_unchanged(some, slice(None))
        unchanged = found.good[at] = some.good
        done = unchanged.copy()
        done[left] = False
        for local in np.flatnonzero(done).tolist():
            values[at[local]] = into[local]
        return at[left[unchanged[left]]]

    def _decode_views(self, views: list[tuple[Array, ...]], at: Array, values: list[Any], *, copy: bool) -> Array:
        """Decode the records at `at` into `values`; return the positions of records that must be unpickled."""
        left = []
        for position in at.tolist():
            parts = views[position]
            if self.common is not None and parts[0] is self.common.head:
                values[position] = read_leaves(self.common, parts[1])
                continue
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            try:
                values[position] = read_record(whole, copy=copy and len(parts) == 1)
            except CodecError:
                left.append(position)
        return np.array(left, np.int64)

    def _read_plain(self, found: Found, values: list[Any]) -> None:
        """Read records of the common structure only."""
        if self.common is None or len(values) == 0:
            found.good[:] = False
            return
        columns = [np.empty((len(values), leaf.nbytes), np.uint8) for leaf in self.common.leaves]
        self.gather(found, self.aim(columns))
        built = stack_build(self.common, columns, len(values))
        if found.good.all():
            values[:] = built
            return
        for at in np.flatnonzero(found.good).tolist():
            values[at] = built[at]

    def _read_chained(self, found: Found, at: Array, values: list[Any]) -> None:
        block = self._block
        counts = blocks_of(found.length[at], block)
        fits = counts <= self._num_blocks
        if not fits.all():  # a writer is changing the record
            found.good[at[~fits]] = False
            at, counts = at[fits], counts[fits]
        blocks = chains(self._index, found.first[at].astype(np.int64) - 1, counts)
        data = self._scratch(len(blocks) * block)
        self._arena.read(blocks, data.reshape(len(blocks), block))
        self._check_unchanged(found, at)
        starts = (np.cumsum(counts) - counts) * block
        good = found.good[at].tolist()
        for position, start, unchanged in zip(at.tolist(), starts.tolist(), good, strict=True):
            if not unchanged:
                continue
            record = data[start : start + int(found.length[position])]
            id = int(found.ids[position])
            try:
                if found.checksum is not None and checksum(record, id) != found.checksum[position]:
                    raise CodecError("the checksum is wrong")
                values[position] = read_record(record, copy=True, allow_pickle=self._allow_pickle)
            except MissingClassError:
                if self._allow_pickle:
                    raise
                found.good[position] = False
            except CodecError:
                found.good[position] = False
                found.damaged.append(position)

    def _check_unchanged(self, found: Found, at: Any) -> None:
        """Mark the records at `at` as not good if their generation has changed."""
        fence()
        found.good[at] &= self._index.generation[found.ids[at]] == found.generation[at]

    def _scratch(self, size: int) -> Array:
        """Reusable scratch memory of this thread."""
        memory: Array | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) < size:
            memory = self._local.memory = np.empty(size + size // 4, np.uint8)
        return memory[:size]


def _subset(found: Found, at: Array) -> Found:
    """`found`, restricted to the positions `at`."""
    sums = None if found.checksum is None else found.checksum[at]
    return Found(found.ids[at], found.generation[at], found.first[at], found.length[at], sums, found.good[at], [])
