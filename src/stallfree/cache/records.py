"""Lock-free reads of records, a whole batch at a time, and writes.

A reader loads the generation, then the location, copies the record, and loads the generation again. A nonzero `first`
implies a complete record. If blocks were reused during the copy, the generation differs and the read is a miss.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from stallfree.cache.arena import DiskArena, MemoryArena
from stallfree.cache.layout import Array, Index, fence
from stallfree.cache.space import Reserved
from stallfree.errors import CodecError, IdError, cache_ids
from stallfree.pipeline.codec import MissingClassError, Structure, read_leaves, read_record, stack_build, write_record

Record = tuple[Structure, list[Array]]
"""The structure of a sample, and the bytes of its leaves (`pipeline.codec.encode`)."""

_LARGE = 4 << 10
"""Mean record bytes from which each record is copied to memory of its own."""


class _Miss:
    def __repr__(self) -> str:
        return "MISS"

    def __reduce__(self) -> str:
        return "MISS"


MISS = _Miss()
"""The value of a sample that is not in the cache; None may be a sample."""


def checked_ids(ids: Any, num_ids: int) -> Array:
    """Return `ids` as an array of int64. Raises `InputError` for no integers, `IdError` unless 0 to `num_ids` - 1."""
    try:
        array = np.asarray(ids)
    except ValueError:
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise cache_ids(f"ids={ids!r:.80}: give a sequence of integers")
    array = array.astype(np.int64, copy=False)
    if len(array) and (array.min() < 0 or array.max() >= num_ids):
        bad = array[(array < 0) | (array >= num_ids)][0]
        raise IdError(
            f"id {bad} is outside of the data set, of which the cache has ids 0 to {num_ids - 1}: if it has grown, "
            "make a new cache"
        )
    return array


def checked_scores(scores: Any, count: int) -> Array:
    """Return `scores` as an array of float64. Raises `InputError` unless they are `count` numbers."""
    try:
        values = np.asarray(scores, np.float64)
    except (TypeError, ValueError):
        values = np.empty((0, 0))
    if values.shape != (count,) or np.isnan(values).any():
        raise cache_ids(
            f"set_scores was given {count} ids and the scores {scores!r:.80}: give one number for each id, and no NaN"
        )
    return values


def checksum(parts: Sequence[Array], id: int) -> int:
    """Return the checksum of a record, whole or one part per leaf, as in the index; it includes the id."""
    digest = xxhash.xxh3_64(seed=id)
    for part in parts:
        digest.update(part.data)
    return digest.intdigest() & 0xFFFFFFFF


@dataclass
class Located:
    """A batch read: the locations of the records, and later which of them are valid.

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

    def subset(self, at: Array) -> "Located":
        """Return the same for the positions `at`."""
        sums = None if self.checksum is None else self.checksum[at]
        return Located(self.ids[at], self.generation[at], self.first[at], self.length[at], sums, self.good[at], [])


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
    """Reads and writes the records of a cache.

    Args:
        index, arena: of the cache.
        allow_pickle: whether pickled leaves are loaded, so that the content of the cache is trusted. A record of a
            class that is not imported here then raises `MissingClassError`; otherwise it is a miss.
    """

    def __init__(self, index: Index, arena: MemoryArena | DiskArena, allow_pickle: bool) -> None:
        self._index, self._arena, self._allow_pickle = index, arena, allow_pickle
        self.common = index.meta.structure()
        leaves = () if self.common is None else self.common.leaves
        self._filled = [number for number, leaf in enumerate(leaves) if leaf.nbytes]
        self._offsets = [] if self.common is None else [self.common.offsets[number] for number in self._filled]

    def locate(self, ids: Array) -> Located:
        """Return the current locations of the records of `ids`."""
        index = self._index
        generation = index.generation[ids]
        fence()
        first, length = index.first[ids], index.length[ids]
        sums = None if index.checksum is None else index.checksum[ids]
        return Located(ids, generation, first, length, sums, first != 0, [])

    def aim(self, outs: Sequence[Array]) -> Aim:
        """Prepare to gather the records of the common structure, leaf by leaf, into `outs`."""
        filled = [outs[number] for number in self._filled]
        return Aim(filled, self._arena.aim(self._offsets, filled))

    def gather(self, batch: Located, aim: Aim) -> None:
        """Copy the records of the common structure to `aim`."""
        batch.good &= batch.length == 0
        blocks = batch.first.astype(np.int64)
        blocks -= 1
        if not batch.good.all():
            if not batch.good.any():
                return
            blocks[~batch.good] = blocks[batch.good.argmax()]  # any allocated block
        self._arena.gather(blocks, aim.target)
        self._check_unchanged(batch, slice(None))
        if batch.checksum is not None:
            for position in np.flatnonzero(batch.good).tolist():
                self._check_sum(batch, position, [out[position] for out in aim.outs])

    def read(self, batch: Located, values: list[Any], *, lend: bool = False) -> None:
        """Put the resident values into `values`, at the positions of their ids.

        With `lend`, their arrays are views of the arena in memory where possible: where a record is in one piece, and
        needs not be unpickled. Otherwise the caller owns them.
        """
        if lend:
            self._view(batch, values)
        elif len(uniform := np.flatnonzero(batch.good & (batch.length == 0))):
            self._read_columns(batch, uniform, values)
            if len(uniform) == len(values):
                return
        chained = np.flatnonzero(batch.good & (batch.length != 0))
        if lend:
            chained = chained[[values[position] is MISS for position in chained.tolist()]]
        if len(chained):
            self._read_chains(batch, chained, values)

    def read_one(self, id: int) -> Any:
        """Return the sample of `id`, or `MISS`, in a quarter of the time of `read`; None if it is one for `read`."""
        index, arena = self._index, self._arena
        generation = int(index.generation[id])
        fence()
        first, length, last = int(index.first[id]), int(index.length[id]), len(index.next) - 1
        count = -(-length // arena.block)
        if not first:
            return MISS
        if not length or count > arena.num_blocks or index.checksum is not None:
            return None
        chain = [min(first - 1, last)]
        while len(chain) < count:
            chain.append(min(int(index.next[chain[-1]]), last))
        data = np.empty((count, arena.block), np.uint8)
        arena.read(np.array(chain), data)
        fence()
        if int(index.generation[id]) != generation:
            return MISS
        try:
            return read_record(data.reshape(-1)[:length], copy=False, allow_pickle=self._allow_pickle)
        except CodecError:
            return None

    def borrowed(self, batch: Located, values: list[Any]) -> Borrowed:
        """Return `values` that were lent, with the check whether they are unchanged."""
        generation, ids, before = self._index.generation, batch.ids.tolist(), batch.generation.tolist()

        def unchanged(at: int) -> bool:
            fence()
            return bool(generation[ids[at]] == before[at])

        return Borrowed(values, unchanged)

    def write(self, ids: Array, records: list[Record], lengths: Array, new: Reserved) -> Array | None:
        """Write records into the blocks that they have got; return their checksums, or None if the disk fails."""
        arena, block, sums = self._arena, self._arena.block, []
        scratch = np.empty(int(new.counts.max(initial=0)) * block, np.uint8)
        ends = np.cumsum(new.counts).tolist()
        try:
            for at, count, end in zip(new.at.tolist(), new.counts.tolist(), ends, strict=True):
                (structure, arrays), length, blocks = records[at], int(lengths[at]), new.blocks[end - count : end]
                row = None
                if not length and isinstance(arena, MemoryArena):
                    row = arena.row_for_writing(int(blocks[0]))
                data = scratch[: count * block] if row is None else row
                if length:
                    write_record(structure, arrays, data)
                else:
                    for offset, array in zip(structure.offsets, arrays, strict=True):
                        data[offset : offset + len(array)] = array
                if self._index.checksum is not None:
                    sums.append(checksum([data[:length]] if length else arrays, int(ids[at])))
                if row is None:
                    arena.write(blocks, data.reshape(count, block))
        except OSError:
            return None
        return np.array(sums, np.uint32)

    def _view(self, batch: Located, values: list[Any]) -> None:
        """Put values that are views of the arena into `values`; those of other records remain `MISS`."""
        arena, common = self._arena, self.common
        assert isinstance(arena, MemoryArena)
        at, counts, blocks = self._chains(batch, np.flatnonzero(batch.good))
        starts = np.cumsum(counts) - counts
        jumps = np.cumsum(np.diff(blocks, prepend=blocks[:1]) != 1)
        adjacent = jumps[starts + counts - 1] == jumps[starts]
        columns = (at, blocks[starts], batch.length[at], adjacent)
        for position, block, length, whole in zip(*(column.tolist() for column in columns), strict=True):
            if length and whole:
                with contextlib.suppress(CodecError):  # it is pickled, or being changed
                    values[position] = read_record(arena.view(block, length), copy=False)
            elif not length and common is not None:
                values[position] = read_leaves(common, arena.view(block, common.size))
            elif not length:  # a writer is changing the record
                batch.good[position] = False

    def _read_columns(self, batch: Located, at: Array, values: list[Any]) -> None:
        """Read the records at the positions `at`, which have the common structure."""
        if self.common is None:  # a writer is changing the records
            batch.good[at] = False
            return
        part = batch if len(at) == len(values) else batch.subset(at)
        columns = [np.empty((len(at), leaf.nbytes), np.uint8) for leaf in self.common.leaves]
        self.gather(part, self.aim(columns))
        built = stack_build(self.common, columns, len(at))
        if part is batch and batch.good.all():
            values[:] = built
            return
        for row in np.flatnonzero(part.good).tolist():
            values[at[row]] = built[row]
        if part is not batch:
            batch.good[at] = part.good
            batch.damaged += at[part.damaged].tolist()

    def _read_chains(self, batch: Located, at: Array, values: list[Any]) -> None:
        """Read records that describe themselves: all into one block of memory, or large ones into one each."""
        at, counts, blocks = self._chains(batch, at)
        ends, block = np.cumsum(counts), self._arena.block
        parts = [slice(*part) for part in zip((ends - counts).tolist(), ends.tolist(), strict=True)]
        if len(at) > 1 and batch.length[at].mean() >= _LARGE:
            records = [np.empty((part.stop - part.start, block), np.uint8) for part in parts]
            for record, part in zip(records, parts, strict=True):
                self._arena.read(blocks[part], record)
        else:
            data = np.empty((len(blocks), block), np.uint8)
            self._arena.read(blocks, data)
            records = [data[part] for part in parts]
        self._check_unchanged(batch, at)
        for position, record in zip(at.tolist(), records, strict=True):
            if not batch.good[position]:
                continue
            record = record.reshape(-1)[: int(batch.length[position])]
            if batch.checksum is not None and not self._check_sum(batch, position, [record]):
                continue
            try:
                values[position] = read_record(record, copy=False, allow_pickle=self._allow_pickle)
            except MissingClassError:
                if self._allow_pickle:
                    raise
                batch.good[position] = False
            except CodecError:
                self._damaged(batch, position)

    def _chains(self, batch: Located, at: Array) -> tuple[Array, Array, Array]:
        """Return the positions `at` whose length is possible, their numbers of blocks, and all these blocks."""
        counts = self._index.blocks_of(batch.length[at])
        fits = counts <= self._arena.num_blocks
        if not fits.all():  # a writer is changing the record
            batch.good[at[~fits]] = False
            at, counts = at[fits], counts[fits]
        return at, counts, self._index.chains(batch.first[at].astype(np.int64) - 1, counts)

    def _check_unchanged(self, batch: Located, at: Any) -> None:
        """Mark the records at `at` as not good if their generation has changed."""
        fence()
        batch.good[at] &= self._index.generation[batch.ids[at]] == batch.generation[at]

    def _check_sum(self, batch: Located, position: int, parts: Sequence[Array]) -> bool:
        assert batch.checksum is not None
        if checksum(parts, int(batch.ids[position])) == batch.checksum[position]:
            return True
        self._damaged(batch, position)
        return False

    def _damaged(self, batch: Located, position: int) -> None:
        batch.good[position] = False
        batch.damaged.append(position)
