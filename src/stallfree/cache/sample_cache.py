"""The sample cache: single samples in memory that all processes of a host share, or on a local disk.

Writers hold a lock that the kernel frees when they die. Readers hold none: they read a record's generation, copy, read the
generation again, and take a change for a miss. The order of writes makes that right:

    put     data, length, chain -> generation + 1 -> first        evict   first = 0 -> generation + 1 -> blocks are free

Whoever sees `first` sees a whole record, and whoever copied from blocks that were given away sees another generation.
"""

from __future__ import annotations

import os
import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stallfree.cache.arena import SEGMENT, Arena, DiskArena, MemoryArena
from stallfree.cache.index import ROWS, Field, Index, index_bytes
from stallfree.cache.layout import Meta, plan_layout
from stallfree.cache.limits import free_memory, free_space
from stallfree.cache.policies import Policy, Victims, make_policy
from stallfree.cache.recovery import blocks_of, chains, recover
from stallfree.errors import CapacityError, CodecError, FingerprintError, InputError, StorageError, WaitError
from stallfree.folders import SharedFolder, default_root, prepare_root, sweep, user_root
from stallfree.locks import FileLock
from stallfree.pipeline.codec import Structure, encode, read_record, record_size, stack_build, write_record
from stallfree.stats import CacheStats
from stallfree.units import format_size, parse_size

Array = npt.NDArray[Any]

LOCK_SECONDS = 2.0
"""A writer that does not get the lock for so long gives up; the samples count as rejected."""

_TYPICAL = 128 << 10
"""Bytes of a record when no example was given."""

_BACK_OFF = 50
"""Batches that are not stored after the lock was not free in time."""

_HITS, _MISSES, _EVICTIONS, _REJECTED, _DAMAGED, _READS, _BYTES = range(7)
_fence_lock = threading.Lock()
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


class _Miss:
    def __repr__(self) -> str:
        return "MISS"

    def __reduce__(self) -> str:
        return "MISS"


def _fence() -> None:
    """Keep the order of loads and stores on processors that would change it (x86 does not)."""
    if not _ORDERED:
        with _fence_lock:
            pass
        with _fence_lock:
            pass


MISS = _Miss()
"""Stands for a sample that is not in the cache, where None might be a sample."""


class SampleCache:
    """Attach to the cache `name`, making it if it is not there.

    Args:
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        capacity: bytes, as an int or such as "4GiB", for records and index together.
        fingerprint: says which samples these are. A cache of that name with another one is an error.
        policy: "minio", "fifo", "lru", "lfu" or "random", or an object of `policies.Policy`.
        store: "memory" (shared memory of this host) or a folder on a local disk.
        name: made from the fingerprint, the policy and the capacity if None, so that jobs with the same data meet.
        persist: keep the cache when the last process leaves.
        example: a sample of the data set. If its size is fixed, all records are laid out like it, and a batch is read by one
            gather; samples of another form are still taken, one by one.
        allow_pickle: whether samples that the codec does not know may be pickled. Only this user can read the cache.

    Raises `CapacityError` for a capacity that is no size, holds no record or is more than the free memory,
    `FingerprintError` for a cache of other data, `StorageError` when the folder cannot be used.
    """

    def __init__(
        self,
        num_ids: int,
        *,
        capacity: int | str,
        fingerprint: str,
        policy: str | Policy = "minio",
        store: str | Path = "memory",
        name: str | None = None,
        persist: bool = False,
        example: Any = MISS,
        allow_pickle: bool = True,
    ) -> None:
        if num_ids < 1:
            raise InputError(f"num_ids={num_ids}: a cache needs a data set of at least one sample")
        size = parse_size(capacity, "capacity")
        policy = make_policy(policy)
        on_disk = str(store) != "memory"
        root = user_root(store) if on_disk else default_root()
        name = name or f"{fingerprint[:20]}-{policy.name}-{size}"

        def initialize(folder: Path) -> None:
            structure, typical = None, _TYPICAL
            if example is not MISS:
                structure, arrays = encode(example, allow_pickle=allow_pickle)
                typical = record_size(structure, arrays)
            meta = plan_layout(
                num_ids,
                _check_capacity(size, folder, on_disk, name),
                fingerprint=fingerprint,
                policy=policy.name,
                scored=policy.scored,
                on_disk=on_disk,
                structure=structure,
                typical=typical,
            )
            kinds = {"scored": meta.scored, "checked": meta.on_disk}
            Index.create(folder / "index", num_ids, meta.num_blocks, meta.block, **kinds)
            Arena.create(folder / "data", meta.block, meta.num_blocks)
            (folder / "lock").touch(mode=0o600)
            meta.save(folder)

        prepare_root(root)
        sweep(root)
        self._attach_to(name, root, policy, allow_pickle, initialize, persist)
        for what, there, wanted in (
            ("fingerprint", self.meta.fingerprint, fingerprint),
            ("number of samples", self.meta.num_ids, num_ids),
            ("policy", self.meta.policy, policy.name),
        ):
            if there != wanted:
                self.close()
                raise FingerprintError(
                    f"the cache {name!r} in {root} holds other data: its {what} is {there}, yours is {wanted}. "
                    f"Give another name, or remove it with `stallfree cache rm {name}`"
                )

    def _attach_to(
        self,
        name: str,
        root: Path,
        policy: Policy,
        allow_pickle: bool,
        initialize: Callable[[Path], None],
        persist: bool,
    ) -> None:
        self.name, self.policy, self._root, self._allow_pickle = name, policy, root, allow_pickle
        self._folder = SharedFolder(name, root=root, initialize=initialize, persist=persist)
        try:
            self._open()
        except BaseException:
            self._folder.close()
            raise

    def _open(self) -> None:
        path = self._folder.path
        meta = self.meta = Meta.load(path)
        kinds = {"scored": meta.scored, "checked": meta.on_disk}
        self._common = meta.structure()
        self._index = Index(path / "index", meta.num_ids, meta.num_blocks, **kinds)
        self._index_bytes = index_bytes(meta.num_ids, meta.num_blocks, **kinds)
        kind = DiskArena if meta.on_disk else MemoryArena
        self._arena: Arena = kind(path / "data", meta.block, meta.num_blocks)
        self._file_lock = FileLock(path / "lock")
        self._victims = Victims(self.policy, self._index, self._index.header[Field.VICTIMS_AT : Field.VICTIMS_END + 1])
        self._local = threading.local()
        self._pid = -1
        self._skip_puts = 0
        self._warned_full = False
        if meta.on_disk and not self._folder.created:
            with self._file_lock.hold(5 * LOCK_SECONDS, "checking a cache on a disk"):
                self._check_files(path)
                recover(self._index)
                self._index.header[Field.DIRTY] = 0
        self._check_process()
        self.populate()

    def _check_files(self, path: Path) -> None:
        expected = self.meta.block * self.meta.num_blocks
        there = os.stat(path / "data")
        if there.st_size != expected:
            os.truncate(path / "data", expected)
            self._index.first[:] = 0
            self._index.header[Field.BACKED] = 0

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_ids(self) -> int:
        """Number of samples of the data set."""
        return self.meta.num_ids

    @property
    def structure(self) -> Structure | None:
        """The structure that all samples share, or None if there is none."""
        return self._common

    @property
    def path(self) -> Path:
        """The folder of the cache."""
        return self._folder.path

    def resident(self, ids: Any) -> Array:
        """Which of `ids` (integers) are in the cache: an array of bool."""
        return self._index.first[self._ids(ids)] != 0  # type: ignore[no-any-return]

    def stats(self) -> CacheStats:
        """The counts over all processes."""
        sums = [int(n) for n in self._index.counters.sum(axis=0)]
        header = self._index.header
        return CacheStats(
            hits=sums[_HITS],
            misses=sums[_MISSES],
            evictions=sums[_EVICTIONS],
            rejected=sums[_REJECTED],
            damaged=sums[_DAMAGED],
            storage_reads=sums[_READS],
            storage_bytes=sums[_BYTES],
            resident_items=int(header[Field.RESIDENT]),
            resident_bytes=int(header[Field.RESIDENT_BYTES]),
            capacity_bytes=self.meta.capacity,
            used_bytes=self._index_bytes + int(header[Field.BACKED]) * self.meta.block,
        )

    def count_fetch(self, reads: int, size: int) -> None:
        """Count `reads` fetches from the source that brought `size` bytes."""
        self._check_process()
        self._count((_READS, reads), (_BYTES, size))

    def populate(self) -> None:
        """Map what is in memory in the background, so that the first reads do not fault page by page."""
        if isinstance(self._arena, MemoryArena):
            self._arena.populate(int(self._index.header[Field.BACKED]))

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, ids: Any) -> list[Any]:
        """The samples of `ids`, `MISS` for those that are not in the cache.

        Each call gives values of its own; those of one call may share one piece of memory. Raises `InputError` for ids
        outside of the data set.
        """
        self._check_process()
        wanted = self._ids(ids)
        found: list[Any] = [MISS] * len(wanted)
        index = self._index
        generation = index.generation[wanted]
        _fence()
        first, length = index.first[wanted], index.length[wanted]
        there = first != 0
        plain = np.flatnonzero(there & (length == 0))
        chained = np.flatnonzero(there & (length != 0))
        if len(plain):
            self._read_plain(wanted, plain, first, generation, found)
        if len(chained):
            self._read_chained(wanted, chained, first, length, generation, found)
        good = np.fromiter((value is not MISS for value in found), bool, len(found))
        self._used(wanted[good], len(wanted))
        return found

    def gather(self, ids: Any, outs: Sequence[Array]) -> Array:
        """Copy the samples of `ids` leaf by leaf into `outs`; which of them were there, as an array of bool.

        Only for a cache with a `structure`: `outs[k]` takes leaf k, as (len(ids), bytes of the leaf) of uint8, contiguous.
        Rows of samples that were not there hold anything afterwards.
        """
        if self._common is None:
            raise InputError("gather needs a cache whose samples share one structure: use get_many")
        self._check_process()
        wanted = self._ids(ids)
        index = self._index
        generation = index.generation[wanted]
        _fence()
        first = index.first[wanted]
        good = (first != 0) & (index.length[wanted] == 0)
        blocks = first.astype(np.int64)
        blocks -= 1
        if not good.all():
            blocks[~good] = 0
        if self._gather(blocks, outs):
            _fence()
            good &= index.generation[wanted] == generation
            if self.meta.on_disk:
                good &= self._intact(wanted, outs)
        else:
            good[:] = False
        self._used(wanted[good] if not good.all() else wanted, len(wanted))
        return good

    def _gather(self, blocks: Array, outs: Sequence[Array]) -> bool:
        assert self._common is not None
        try:
            for leaf, offset, out in zip(self._common.leaves, self._common.offsets, outs, strict=True):
                if leaf.nbytes:
                    self._arena.gather(blocks, offset, out)
        except OSError:
            return False
        return True

    def _read_plain(self, ids: Array, at: Array, first: Array, generation: Array, found: list[Any]) -> None:
        assert self._common is not None
        columns = [np.empty((len(at), leaf.nbytes), np.uint8) for leaf in self._common.leaves]
        if not self._gather(first[at].astype(np.int64) - 1, columns):
            return
        _fence()
        good = self._index.generation[ids[at]] == generation[at]
        if self.meta.on_disk:
            good &= self._intact(ids[at], columns)
        values = stack_build(self._common, columns, len(at))
        if good.all() and len(at) == len(found):
            found[:] = values
            return
        for ok, position, value in zip(good.tolist(), at.tolist(), values, strict=True):
            if ok:
                found[position] = value

    def _read_chained(
        self, ids: Array, at: Array, first: Array, length: Array, generation: Array, found: list[Any]
    ) -> None:
        block = self.meta.block
        counts = blocks_of(length[at], block)
        if int(counts.max()) > self.meta.num_blocks:
            return
        blocks = chains(self._index, first[at].astype(np.int64) - 1, counts)
        data = self._scratch(len(blocks) * block)
        try:
            self._arena.read(blocks, data.reshape(len(blocks), block))
        except OSError:
            return
        _fence()
        same = self._index.generation[ids[at]] == generation[at]
        starts = (np.cumsum(counts) - counts) * block
        for ok, position, start in zip(same.tolist(), at.tolist(), starts.tolist(), strict=True):
            if not ok:
                continue
            id = int(ids[position])
            record = data[start : start + int(length[position])]
            if self._index.checksum is not None and _checksum(record, id) != self._index.checksum[id]:
                self._damaged(id)
                continue
            try:
                found[position] = read_record(record, copy=True, allow_pickle=self._allow_pickle)
            except CodecError:
                self._damaged(id)

    def _intact(self, ids: Array, columns: Sequence[Array]) -> Array:
        assert self._index.checksum is not None
        known = self._index.checksum[ids]
        good = np.ones(len(ids), bool)
        for position, id in enumerate(ids.tolist()):
            if _checksum_of([column[position] for column in columns], id) != known[position]:
                good[position] = False
                if self._index.first[id] and self._index.length[id] == 0:
                    self._damaged(id)
        return good

    def _damaged(self, id: int) -> None:
        self._count((_DAMAGED, 1))
        self.drop([id])

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any]) -> Array:
        """Store `values` as the samples of `ids`; which of them are resident now, as an array of bool.

        Ids that are resident already stay as they are. Raises `CodecError` for a value that would need pickle where it is
        not allowed, and `InputError` for ids outside of the data set; then nothing is stored. Whatever else is in the way (no
        room, an item larger than the cache, a lock that is not free, a full disk) is counted as rejected.
        """
        self._check_process()
        wanted = self._ids(ids)
        if len(wanted) != len(values):
            raise InputError(f"put_many was given {len(wanted)} ids and {len(values)} values")
        if self._skip_puts > 0:
            self._skip_puts -= 1
            self._count((_REJECTED, len(wanted)))
            return self.resident(wanted)
        _, unique = np.unique(wanted, return_index=True)
        todo = unique[self._index.first[wanted[unique]] == 0]
        todo.sort()
        todo = todo[self._worth(len(todo))]
        records = [encode(values[position], allow_pickle=self._allow_pickle) for position in todo.tolist()]
        if records:
            try:
                with self._file_lock.hold(LOCK_SECONDS, f"storing in the cache {self.name!r}"):
                    self._write(wanted[todo], records)
            except WaitError as error:
                self._skip_puts = _BACK_OFF
                self._count((_REJECTED, len(todo)))
                warnings.warn(f"{error}; samples are not stored for a while", RuntimeWarning, stacklevel=2)
        return self.resident(wanted)

    def put(self, id: int, value: Any) -> bool:
        """Store one sample; whether it is resident now."""
        return bool(self.put_many([id], [value])[0])

    def get(self, id: int) -> Any:
        """One sample, or `MISS`."""
        return self.get_many([id])[0]

    def drop(self, ids: Any) -> None:
        """Make `ids` absent. They are not counted as evictions. Raises `WaitError` if the lock is not free in 2 s."""
        self._check_process()
        with self._file_lock.hold(LOCK_SECONDS, f"dropping from the cache {self.name!r}"):
            self._begin()
            wanted = np.unique(self._ids(ids))
            self._free(wanted[self._index.first[wanted] != 0])
            self._victims.forget()
            self._index.header[Field.DIRTY] = 0

    def clear(self) -> None:
        """Drop all records. The memory stays with the cache."""
        self.drop(np.arange(self.num_ids))

    def _worth(self, count: int) -> slice:
        """When the cache is full and never evicts, encoding would be wasted: reject at once."""
        header = self._index.header
        if self.policy.evicts or self._room() > 0 or header[Field.DIRTY]:
            return slice(None)
        self._count((_REJECTED, count))
        return slice(0, 0)

    def _room(self) -> int:
        header = self._index.header
        return int(header[Field.FREE] + header[Field.LIMIT] - header[Field.HIGH])

    def _begin(self) -> None:
        header = self._index.header
        if header[Field.DIRTY]:
            recover(self._index)
        header[Field.DIRTY] = 1

    def _write(self, ids: Array, records: list[tuple[Structure, list[Array]]]) -> None:
        self._begin()
        index, header, block = self._index, self._index.header, self.meta.block
        absent = index.first[ids] == 0  # another process may have been faster
        rejected = 0
        if self.policy.evicts:
            self._make_room(records, absent)
        for id, (structure, arrays), wanted in zip(ids.tolist(), records, absent.tolist(), strict=True):
            if not wanted:
                continue
            common = structure is self._common
            size = structure.size if common else record_size(structure, arrays)
            count = 1 if common else -(-size // block)
            blocks = self._allocate(count) if size < 1 << 32 else None
            if blocks is None:
                rejected += 1
                continue
            try:
                self._write_record(id, blocks, structure, arrays, 0 if common else size)
            except OSError:
                self._push(blocks)
                rejected += 1
                continue
            index.length[id] = 0 if common else size
            if count > 1:
                index.next[blocks[:-1]] = blocks[1:]
            index.generation[id] += 1
            _fence()
            header[Field.RESIDENT] += 1
            header[Field.RESIDENT_BYTES] += block if common else size
            index.first[id] = blocks[0] + 1
            self._enter(id)
        header[Field.DIRTY] = 0
        if rejected:
            self._count((_REJECTED, rejected))

    def _make_room(self, records: list[tuple[Structure, list[Array]]], absent: Array) -> None:
        """Evict for all newcomers of a batch at once."""
        block = self.meta.block
        need = sum(
            1 if structure is self._common else -(-record_size(structure, arrays) // block)
            for (structure, arrays), wanted in zip(records, absent.tolist(), strict=True)
            if wanted
        )
        need = min(need, int(self._index.header[Field.LIMIT]))
        while self._available(need) < need and self._evict(need - self._room()):
            pass

    def _enter(self, id: int) -> None:
        score = self._index.score
        if score is not None:
            ids = np.array([id])
            self.policy.entered(score, ids, self._tick(1))
            self._victims.entered(score, ids)

    def _write_record(
        self, id: int, blocks: Array, structure: Structure, arrays: list[Array], size: int
    ) -> None:
        arena, block = self._arena, self.meta.block
        in_place = isinstance(arena, MemoryArena)
        if size == 0:
            row = arena.row(int(blocks[0])) if isinstance(arena, MemoryArena) else self._scratch(block)
            for offset, array in zip(structure.offsets, arrays, strict=True):
                row[offset : offset + len(array)] = array
            if self._index.checksum is not None:
                self._index.checksum[id] = _checksum_of(arrays, id)
        else:
            row = self._scratch(len(blocks) * block)
            write_record(structure, arrays, row)
            if self._index.checksum is not None:
                self._index.checksum[id] = _checksum(row[:size], id)
            in_place = False
        if not in_place:
            arena.write(blocks, row[: len(blocks) * block].reshape(len(blocks), block))

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _allocate(self, count: int) -> Array | None:
        """`count` blocks, evicting if need be and allowed; None if there is no room."""
        header = self._index.header
        if count > header[Field.LIMIT]:
            return None
        while self._available(count) < count:
            if not self.policy.evicts or not self._evict(count - self._room()):
                return None
        free = self._index.free
        height = int(header[Field.FREE])
        reused = min(count, height)
        blocks = np.empty(count, np.int64)
        blocks[:reused] = free[height - reused : height][::-1]
        header[Field.FREE] = height - reused
        high = int(header[Field.HIGH])
        blocks[reused:] = np.arange(high, high + count - reused)
        header[Field.HIGH] = high + count - reused
        return blocks

    def _available(self, count: int) -> int:
        """Blocks that can be handed out now; gets memory for more if `count` are not there yet."""
        header = self._index.header
        while True:
            there = int(header[Field.FREE] + header[Field.BACKED] - header[Field.HIGH])
            backed, limit = int(header[Field.BACKED]), int(header[Field.LIMIT])
            if there >= count or backed >= limit:
                return there
            step = min(max(1, SEGMENT // self.meta.block), limit - backed)
            if self._arena.back(backed, step):
                header[Field.BACKED] = backed + step
            else:
                header[Field.LIMIT] = backed
                self._warn_full()

    def _warn_full(self) -> None:
        if not self._warned_full:
            self._warned_full = True
            taken = self.stats().used_bytes
            warnings.warn(
                f"the file system of {self.path} is full: the cache stays at {format_size(taken)} of the "
                f"{format_size(self.meta.capacity)} asked for",
                RuntimeWarning,
                stacklevel=2,
            )

    def _evict(self, blocks: int) -> int:
        index = self._index
        assert index.score is not None
        header = index.header
        used = int(header[Field.HIGH] - header[Field.FREE])
        per_item = max(1.0, used / max(1, int(header[Field.RESIDENT])))
        victims = self._victims.choose(max(1, int(blocks / per_item)), index.score, int(header[Field.TICK]))
        self._free(victims)
        self._count((_EVICTIONS, len(victims)))
        return len(victims)

    def _free(self, ids: Array) -> None:
        index, header = self._index, self._index.header
        if len(ids) == 0:
            return
        lengths = index.length[ids]
        counts = blocks_of(lengths, self.meta.block)
        blocks = chains(index, index.first[ids].astype(np.int64) - 1, counts)
        index.first[ids] = 0
        _fence()
        index.generation[ids] += 1
        _fence()
        header[Field.RESIDENT] -= len(ids)
        header[Field.RESIDENT_BYTES] -= int(np.where(lengths == 0, self.meta.block, lengths).sum())
        self._push(blocks)

    def _push(self, blocks: Array) -> None:
        header = self._index.header
        height = int(header[Field.FREE])
        self._index.free[height : height + len(blocks)] = blocks
        header[Field.FREE] = height + len(blocks)

    # -- small things -------------------------------------------------------------------------------------------------

    def _ids(self, ids: Any) -> Array:
        array = np.asarray(ids, np.int64)
        if array.ndim != 1:
            raise InputError(f"ids must be one-dimensional, not of shape {array.shape}")
        if len(array) and (array.min() < 0 or array.max() >= self.meta.num_ids):
            bad = array[(array < 0) | (array >= self.meta.num_ids)][0]
            raise InputError(f"id {bad} is outside of the data set: ids are 0 to {self.meta.num_ids - 1}")
        return array

    def _tick(self, count: int) -> int:
        header = self._index.header
        tick = int(header[Field.TICK])
        header[Field.TICK] = tick + count
        return tick

    def _used(self, hit: Array, asked: int) -> None:
        score = self._index.score
        if score is not None and len(hit):
            self.policy.used(score, hit, self._tick(len(hit)))
        self._count((_HITS, len(hit)), (_MISSES, asked - len(hit)))

    def _scratch(self, size: int) -> Array:
        """Memory of this thread that is used again and again."""
        there: Array | None = getattr(self._local, "scratch", None)
        if there is None or len(there) < size:
            there = self._local.scratch = np.empty(size + size // 4, np.uint8)
        return there[:size]

    def _count(self, *counts: tuple[int, int]) -> None:
        with self._count_lock:
            row = self._index.counters[self._row]
            for column, number in counts:
                row[column] += number

    def _check_process(self) -> None:
        """After a fork: a row of counters for this process. What dead processes counted is added to row 0."""
        if self._pid == os.getpid():
            return
        self._count_lock, self._pid, self._row = threading.Lock(), os.getpid(), 0
        with self._file_lock.hold(5 * LOCK_SECONDS, f"attaching to the cache {self.name!r}"):
            counters = self._index.counters
            for row in range(1, ROWS):
                if self._file_lock.claim(row):
                    counters[0] += counters[row]
                    counters[row] = 0
                    self._row = row
                    break

    def close(self) -> None:
        """Leave the cache; the last process out removes it unless it persists. May be called twice."""
        if self._folder is None:
            return
        folder, self._folder = self._folder, None  # type: ignore[assignment]
        self._arena.close()
        if self._pid == os.getpid() and self._row:
            self._file_lock.release(self._row)
        self._file_lock.close()
        folder.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self._root, self.name, self.policy, self._allow_pickle)

    def __enter__(self) -> SampleCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _attach(root: Path, name: str, policy: Policy, allow_pickle: bool) -> SampleCache:
    """Attach to a cache that another process made: how a cache travels to a worker."""

    def gone(folder: Path) -> None:
        raise StorageError(f"the cache {name!r} in {root} is gone: the process that made it has closed it")

    cache = SampleCache.__new__(SampleCache)
    cache._attach_to(name, root, policy, allow_pickle, gone, False)
    return cache


def _check_capacity(size: int, folder: Path, on_disk: bool, name: str) -> int:
    """Bytes to plan with. Raises `CapacityError` for more than the free memory; shrinks to a small file system."""
    if not on_disk and size > (free := free_memory()):
        raise CapacityError(
            f"capacity={format_size(size)} for the cache {name!r} is more than the {format_size(free)} of memory that are "
            "free here (of the host and of this control group): give less"
        )
    space = free_space(folder)
    if size <= space:
        return size
    room = space - space // 16
    warnings.warn(
        f"the file system of {folder.parent} has only {format_size(space)} free: the cache {name!r} takes {format_size(room)} "
        f"in place of the {format_size(size)} asked for. A larger /dev/shm (docker: --shm-size) or another store helps",
        RuntimeWarning,
        stacklevel=2,
    )
    return room


def _checksum(record: Array, id: int) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(record), id) & 0xFFFFFFFF


def _checksum_of(parts: Sequence[Array], id: int) -> int:
    digest = xxhash.xxh3_64(seed=id)
    for part in parts:
        digest.update(memoryview(part))
    return digest.intdigest() & 0xFFFFFFFF
