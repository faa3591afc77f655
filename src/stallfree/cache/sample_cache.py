"""The sample cache: single samples in memory that all processes of a host share, or on a local disk.

Writers hold a lock that the kernel frees when they die (writer.py). Readers hold none (records.py). What a killed
process leaves behind is put in order by the next writer (recovery.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.arena import Arena, DiskArena, MemoryArena
from stallfree.cache.checks import MISS, Closed, check_same, checked_ids, checked_scores, warn_of_capacity
from stallfree.cache.counters import Count, Counters
from stallfree.cache.create import create_files
from stallfree.cache.index import DamagedError, Field, Index
from stallfree.cache.layout import META, Meta
from stallfree.cache.policies import Policy, make_policy
from stallfree.cache.records import Aim, Borrowed, Found, Records, Views
from stallfree.cache.recovery import check_disk
from stallfree.cache.writer import Record, Writer, fence
from stallfree.errors import FingerprintError, InputError, StorageError, WaitError
from stallfree.folders import SharedFolder, default_root, prepare_root, remove_unused, sweep, user_root
from stallfree.locks import FileLock
from stallfree.pipeline.codec import encode
from stallfree.pipeline.structure import Structure
from stallfree.platform import at_fork, need_linux
from stallfree.stats import CacheStats
from stallfree.units import parse_size

Array = npt.NDArray[Any]

LOCK_SECONDS = 2.0
"""A writer that does not get the lock for so long gives up; the samples count as rejected."""

_BACK_OFF = 50
"""Batches that are not stored after the lock was not free in time."""


class SampleCache:
    """Attach to the cache `name`, making it if it is not there.

    Args:
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        capacity: bytes, as an int or such as "4GiB", for records and index together.
        fingerprint: says which samples these are. A cache of that name with another one is an error.
        policy: "minio", "fifo", "lru", "lfu", "random", or "importance" or "oracle", which want scores (`set_scores`);
            or an object of `policies.Policy`.
        store: "memory" (shared memory of this host) or a folder on a local disk.
        name: made from the fingerprint, the policy and the capacity if None, so that jobs with the same data meet.
        persist: keep the cache when the last process leaves.
        example: a sample of the data set. If its size is fixed, all records are laid out like it, and a batch is read
            by one gather; samples of another form are still taken, one by one.
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

        initialize = partial(
            create_files,
            name=name,
            num_ids=num_ids,
            size=size,
            fingerprint=fingerprint,
            policy=policy,
            on_disk=on_disk,
            example=example,
            allow_pickle=allow_pickle,
        )
        root = prepare_root(root)
        sweep(root)
        try:
            self._attach_to(name, root, policy, allow_pickle, initialize, persist)
        except DamagedError as error:
            if not remove_unused(root / name):
                raise
            warnings.warn(f"{error}. Nobody used it: it was thrown away and made anew", RuntimeWarning, stacklevel=2)
            self._attach_to(name, root, policy, allow_pickle, initialize, persist)
        try:
            check_same(self.meta, self._path, fingerprint, num_ids, policy.name)
        except FingerprintError:
            self.close()
            raise
        if size and not self._created:
            warn_of_capacity(self.meta, self._path, size)

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
        self._skip_puts, self._warned_of_lock = 0, False
        self._last: CacheStats | None = None
        with contextlib.ExitStack() as undo:
            folder = SharedFolder(name, root=root, initialize=initialize, persist=persist)
            undo.callback(folder.close)
            self._path, self._created = folder.path, folder.created
            meta = self.meta = Meta.load(folder.path)
            index = self._index = Index(folder.path / "index", meta.num_ids, meta.num_blocks, **meta.kinds)
            if not index.belongs_to(meta.num_ids, meta.num_blocks, meta.block):
                raise DamagedError(f"the index in {folder.path} is not the one of its {META}")
            kind = DiskArena if meta.on_disk else MemoryArena
            self._arena: Arena = kind(folder.path / "data", meta.block, meta.num_blocks)
            undo.callback(self._arena.close)
            self._file_lock = FileLock(folder.path / "lock")
            undo.callback(self._file_lock.close)
            self._counters = Counters(index.counters)
            self._records = Records(meta, index, self._arena, allow_pickle)
            self._writer = Writer(meta, index, self._arena, self._counters, policy, folder.path)
            if meta.on_disk and not folder.created:
                with self._file_lock.hold(5 * LOCK_SECONDS, f"checking the cache {name!r}"):
                    if not self._file_lock.claimed_elsewhere():
                        check_disk(index, meta.block, bool(meta.common), self._arena.whole())
                    self._counters.claim(self._file_lock)
            else:
                self._counters.claim(self._file_lock)
            undo.pop_all()
        self._pid = os.getpid()
        self._leave = weakref.finalize(self, _leave, self._arena, self._file_lock, folder)
        self.populate()

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_ids(self) -> int:
        """Number of samples of the data set."""
        return self.meta.num_ids

    @property
    def structure(self) -> Structure | None:
        """The structure that all samples share, or None if there is none."""
        return self._records.common

    @property
    def allow_pickle(self) -> bool:
        """Whether samples that the codec does not know are pickled."""
        return self._allow_pickle

    @property
    def capacity(self) -> int:
        """Bytes that the cache may take, index included."""
        return self.meta.capacity

    @property
    def fingerprint(self) -> str:
        """Says which samples these are."""
        return self.meta.fingerprint

    @property
    def path(self) -> Path:
        """The folder of the cache."""
        return self._path

    def resident(self, ids: Any) -> Array:
        """Which of `ids` (integers) are in the cache: an array of bool."""
        return self._index.first[self.checked(ids)] != 0  # type: ignore[no-any-return]

    @property
    def full(self) -> bool:
        """Whether a newcomer would not be stored, as far as one can tell: there is no room, and nobody makes any."""
        return not self.policy.evicts and not self._writer.has_room()

    @property
    def other_hits(self) -> int:
        """Hits that `count_others` has counted, over all processes."""
        return self._counters.totals()[Count.OTHERS]

    @property
    def complete(self) -> bool:
        """Whether all samples are in the cache."""
        return bool(self._index.header[Field.RESIDENT] == self.meta.num_ids)

    def stats(self) -> CacheStats:
        """The counts over all processes; after `close`, those of that moment."""
        if self._last is not None:
            return self._last
        sums = self._counters.totals()
        header = self._index.header
        return CacheStats(
            hits=sums[Count.HITS],
            misses=sums[Count.MISSES],
            evictions=sums[Count.EVICTIONS],
            rejected=sums[Count.REJECTED],
            damaged=sums[Count.DAMAGED],
            storage_reads=sums[Count.READS],
            storage_bytes=sums[Count.BYTES],
            resident_items=int(header[Field.RESIDENT]),
            resident_bytes=int(header[Field.RESIDENT_BYTES]),
            capacity_bytes=self.meta.capacity,
            used_bytes=self.meta.index_bytes + int(header[Field.BACKED]) * self.meta.block,
        )

    def count_fetch(self, reads: int, size: int) -> None:
        """Count `reads` fetches from the source that brought `size` bytes."""
        self._check_process()
        self._counters.add((Count.READS, reads), (Count.BYTES, size))

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
        wanted = self.checked(ids)
        values: list[Any] = [MISS] * len(wanted)
        found = self._records.look(wanted)
        self._records.read(found, values)
        self._seen(found)
        return values

    def get(self, id: int) -> Any:
        """One sample, or `MISS`."""
        return self.get_many([id])[0]

    def borrow(self, ids: Any) -> Borrowed | None:
        """The samples of `ids` as `get_many` has them, not copied: to be read at once. None for a cache on a disk."""
        if not isinstance(self._arena, MemoryArena):
            return None
        self._check_process()
        wanted = self.checked(ids)
        found = self._records.look(wanted)
        borrowed = self._records.borrow(found, [MISS] * len(wanted))
        self._seen(found)
        return borrowed

    def aim(self, outs: Sequence[Array]) -> Aim:
        """Prepare to `gather` into `outs`, once for memory that is filled many times.

        Only for a cache with a `structure`: `outs[k]` takes leaf k, as (number of ids, bytes of the leaf) of uint8,
        contiguous.
        """
        if self._records.common is None:
            raise InputError("gather needs a cache whose samples share one structure: use get_many")
        return self._records.aim(outs)

    def gather(self, ids: Any, into: Aim | Sequence[Array]) -> Array:
        """Copy the samples of `ids` leaf by leaf into what `aim` made, or takes; which were there, as an array of bool.

        Rows of samples that were not there hold anything afterwards.
        """
        aim = into if isinstance(into, Aim) else self.aim(into)
        self._check_process()
        found = self._records.look(self.checked(ids))
        self._records.gather(found, aim)
        self._seen(found)
        return found.good

    def _seen(self, found: Found) -> None:
        """Count, tell the policy, and drop what is damaged."""
        hits = found.ids if found.good.all() else found.ids[found.good]
        self._writer.used(hits)
        self._counters.add((Count.HITS, len(hits)), (Count.MISSES, len(found.ids) - len(hits)))
        if found.damaged:
            ids, at = np.unique(found.ids[found.damaged], return_index=True)
            generation = found.generation[found.damaged][at]
            self._counters.add((Count.DAMAGED, len(ids)))
            with contextlib.suppress(WaitError), self._file_lock.hold(LOCK_SECONDS, "dropping damaged records"):
                self._writer.drop(ids[self._index.generation[ids] == generation])

    def view_records(self, ids: Any) -> Views:
        """The records of `ids` where they lie, for a cache in memory. The policy is told; nothing is counted."""
        self._check_process()
        found = self._records.look(self.checked(ids))
        views = self._records.views(found)
        self._writer.used(found.ids[found.good])
        return views

    def count_changed(self, samples: int) -> None:
        """Count `samples` that were borrowed and turned out to be changed: misses after all."""
        self._counters.add((Count.HITS, -samples), (Count.MISSES, samples))

    def count_others(self, hits: int, misses: int) -> None:
        """Count samples that another node of the job was asked for: those that it had, and those that it had not."""
        self._check_process()
        self._counters.add((Count.HITS, hits), (Count.MISSES, misses), (Count.OTHERS, hits))

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any], *, uncached: int | None = None) -> Array:
        """Store `values` as the samples of `ids`; which of them are resident now, as an array of bool.

        Ids that are resident already stay as they are. With `uncached`, nothing is stored if `uncached_steps` is
        another number: the values were made by other steps.

        Raises `CodecError` for a value that would need pickle where it is not allowed, and `InputError` for ids outside
        of the data set; then nothing is stored. Whatever else is in the way (no room, an item larger than the cache, a
        lock that is not free, a full disk) is counted as rejected.
        """
        wanted = self._checked_pairs(ids, values, "put_many", "values")
        return self._put(wanted, lambda at: encode(values[at], allow_pickle=self._allow_pickle), uncached)

    def put_records(self, ids: Any, records: Sequence[Record]) -> Array:
        """The same for samples that `pipeline.codec.encode` or `split_record` has taken apart."""
        return self._put(self._checked_pairs(ids, records, "put_records", "records"), records.__getitem__)

    def _checked_pairs(self, ids: Any, given: Sequence[Any], method: str, what: str) -> Array:
        self._check_process()
        wanted = self.checked(ids)
        if len(wanted) != len(given):
            raise InputError(f"{method} was given {len(wanted)} ids and {len(given)} {what}: give one for each")
        return wanted

    def _put(self, wanted: Array, record: Callable[[int], Record], uncached: int | None = None) -> Array:
        _, unique = np.unique(wanted, return_index=True)
        todo = unique[self._index.first[wanted[unique]] == 0]
        todo.sort()
        if len(todo) and self._may_store(len(todo)):
            records = [record(position) for position in todo.tolist()]
            try:
                with self._file_lock.hold(LOCK_SECONDS, f"storing in the cache {self.name!r}"):
                    if uncached is None or self._index.header[Field.UNCACHED] == 2 * uncached:
                        self._writer.write(wanted[todo], records)
                    else:
                        self._counters.add((Count.REJECTED, len(todo)))
            except WaitError as error:
                self._skip_puts = _BACK_OFF
                self._counters.add((Count.REJECTED, len(todo)))
                if not self._warned_of_lock:
                    self._warned_of_lock = True
                    warnings.warn(f"{error}; samples are not stored for a while", RuntimeWarning, stacklevel=3)
        return self.resident(wanted)

    def _may_store(self, count: int) -> bool:
        """False, and `count` samples are rejected, where it would be of no use to encode them."""
        if self._skip_puts > 0:
            self._skip_puts -= 1
        elif not self.full:
            return True
        self._counters.add((Count.REJECTED, count))
        return False

    def put(self, id: int, value: Any) -> bool:
        """Store one sample; whether it is resident now."""
        return bool(self.put_many([id], [value])[0])

    def set_scores(self, ids: Any, scores: Any) -> None:
        """Say how much each sample is worth, resident or not; the cache keeps those of highest score.

        Ids that are not resident keep their scores for when they come. A new cache has 0 for all. When it is full, a
        newcomer is stored only if its score is above those of the residents whose place it takes. To drive the policy
        "oracle", give each sample of a batch minus its next use before the batch is read (`policies.next_uses`).

        A score is a number, not NaN; of an id that is there twice, the last one counts.

        Raises `InputError` for another policy than "importance" and "oracle", and for scores that cannot be used;
        `WaitError` if the lock is not free in 2 s.
        """
        self._check_process()
        if not self.policy.given:
            raise InputError(
                f"the cache {self.name!r} has the policy {self.policy.name!r}, which makes its own scores: "
                "set_scores is for a cache made with policy='importance' or 'oracle'"
            )
        wanted = self.checked(ids)
        values = checked_scores(scores, len(wanted))
        with self._file_lock.hold(LOCK_SECONDS, f"setting scores in the cache {self.name!r}"):
            self._writer.set_scores(wanted, values)

    def drop(self, ids: Any) -> None:
        """Make `ids` absent. They are not counted as evictions. Raises `WaitError` if the lock is not free in 2 s."""
        self._check_process()
        wanted = np.unique(self.checked(ids))
        with self._file_lock.hold(LOCK_SECONDS, f"dropping from the cache {self.name!r}"):
            self._writer.drop(wanted)

    def clear(self) -> None:
        """Drop all records. The memory stays with the cache. Raises `WaitError` if the lock is not free in 2 s."""
        self._check_process()
        with self._file_lock.hold(LOCK_SECONDS, f"clearing the cache {self.name!r}"):
            self._writer.drop(np.flatnonzero(self._index.first))

    @property
    def uncached_steps(self) -> int:
        """How many steps records are made without, counted from the last one; see `uncache_steps`."""
        if self._index.header[Field.UNCACHED] & 1:  # the process that drops the records is at it, or has died
            self._check_process()
            with self._file_lock.hold(LOCK_SECONDS, f"dropping records of the cache {self.name!r}"):
                self._finish_uncaching()
        return int(self._index.header[Field.UNCACHED]) >> 1

    def uncache_steps(self, count: int) -> bool:
        """Have records made without the last `count` steps, since one of these turned out to be random.

        Drops all records, for all processes. Returns False if records are made without as many steps already. Raises
        `WaitError` if the lock is not free in 2 s.
        """
        self._check_process()
        with self._file_lock.hold(LOCK_SECONDS, f"dropping records of the cache {self.name!r}"):
            self._finish_uncaching()
            if self._index.header[Field.UNCACHED] >= 2 * count:
                return False
            self._index.header[Field.UNCACHED] = 2 * count + 1
            fence()
            self._finish_uncaching()
        return True

    def _finish_uncaching(self) -> None:
        if self._index.header[Field.UNCACHED] & 1:
            self._writer.drop(np.flatnonzero(self._index.first))
            fence()
            self._index.header[Field.UNCACHED] -= 1

    def check(self) -> list[str]:
        """What is wrong with the bookkeeping, as sentences: nothing, unless something is broken.

        Raises `WaitError` if the lock is not free in 2 s.
        """
        self._check_process()
        with self._file_lock.hold(LOCK_SECONDS, f"checking the cache {self.name!r}"):
            return self._writer.check()

    # -- small things -------------------------------------------------------------------------------------------------

    def checked(self, ids: Any) -> Array:
        """`ids` as an array of int64. Raises `InputError` for what is no list of ids of the data set."""
        return checked_ids(ids, self.meta.num_ids)

    def _check_process(self) -> None:
        """Raises `InputError` after `close`; after a fork, takes a row of counters for this process."""
        if self._pid == os.getpid():
            return
        with _after_fork:
            if not self._leave.alive:
                raise InputError(f"the cache {self.name!r} is closed: make a new one")
            if self._pid != os.getpid():
                self._counters.claim(self._file_lock)
                self._pid = os.getpid()

    def close(self) -> None:
        """Leave the cache and its memory; the last process out removes it unless it persists. May be called twice."""
        self._pid = -1
        if self._leave.alive:
            self._last = self.stats()
            self._leave()
            gone: Any = Closed(self.name)
            self._index = self._arena = self._counters = self._records = self._writer = gone

    def __reduce__(self) -> tuple[Any, ...]:
        need_linux("a cache that other processes use", "use num_workers=0")
        return _attach, (self._root, self.name, self.policy, self._allow_pickle)

    def __enter__(self) -> SampleCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_after_fork = threading.RLock()
at_fork(before=_after_fork.acquire, after_in_parent=_after_fork.release, after_in_child=_after_fork.release)


def _leave(arena: Arena, file_lock: FileLock, folder: SharedFolder) -> None:
    arena.close()
    file_lock.close()
    folder.close()


def _attach(root: Path, name: str, policy: Policy, allow_pickle: bool) -> SampleCache:
    """Attach to a cache that another process made: how a cache travels to a worker."""

    def gone(folder: Path) -> None:
        raise StorageError(f"the cache {name!r} in {root} is gone: whoever made it has closed it. Make it anew")

    cache = SampleCache.__new__(SampleCache)
    cache._attach_to(name, root, policy, allow_pickle, gone, False)
    return cache
