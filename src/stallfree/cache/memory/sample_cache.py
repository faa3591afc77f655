"""The sample cache in memory shared by all processes of a host, or on a local disk.

Writers hold a lock that the kernel releases when they die (writer.py). Readers hold none (records.py). The next writer
repairs the incomplete changes of a killed process (recovery.py).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from stallfree.cache.checks import (
    MISS,
    Closed,
    check_same,
    checked_ids,
    checked_pairs,
    checked_scores,
    warn_of_capacity,
)
from stallfree.cache.counters import Count, Counters
from stallfree.cache.memory.arena import Arena, DiskArena, MemoryArena
from stallfree.cache.memory.index import MAGIC, DamagedError, Field, Index
from stallfree.cache.memory.layout import META, Meta, plan_layout
from stallfree.cache.memory.limits import allowed_capacity
from stallfree.cache.memory.records import Aim, Borrowed, Found, Records
from stallfree.cache.memory.recovery import check_disk
from stallfree.cache.memory.writer import LOCK_SECONDS, Record, Writer
from stallfree.cache.policies import Policy, make_policy
from stallfree.errors import FingerprintError, dataset_empty, folder_gone, text_of
from stallfree.ipc.folders import SharedFolder, default_root, prepare_root, remove_unused, sweep, user_root
from stallfree.ipc.locks import FileLock
from stallfree.pipeline.codec import encode, record_size
from stallfree.platform import need_linux
from stallfree.stats import CacheStats
from stallfree.units import parse_size

Array = npt.NDArray[Any]

_TYPICAL = 128 << 10
"""Assumed bytes of a record without an example."""


class SampleCache:
    """Attaches to the cache `name`, and creates it if missing.

    Args:
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        capacity: bytes, as an int or a string like "4GiB", for records and index together.
        fingerprint: identifies the samples. A cache of that name with another fingerprint is an error.
        policy: "minio", "fifo", "lru", "lfu", "random", or "importance" or "oracle", which need scores (`set_scores`);
            or an object of `policies.Policy`.
        store: "memory" (shared memory of this host) or a folder on a local disk.
        name: if None, derived from fingerprint, policy and capacity, so that jobs on the same data share the cache.
        persist: keep the cache after the last process has detached.
        example: a sample of the data set. If its size is fixed, all records have its layout, and one gather reads a
            batch. Samples of another structure are still accepted, and read one by one.
        allow_pickle: whether samples that the codec does not support may be pickled. Only this user can read the cache.

    Raises:
        CapacityError: for a capacity that is invalid, too small for a record or larger than the free memory.
        FingerprintError: for a cache of other data.
        StorageError: if the folder is not usable.
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
            raise dataset_empty(f"num_ids={num_ids}: a cache needs a data set of at least one sample")
        size = parse_size(capacity, "capacity")
        policy = make_policy(policy)
        on_disk = str(store) != "memory"
        name = name or f"{fingerprint[:20]}-{policy.name}-{size}"
        structure, typical = None, _TYPICAL
        if example is not MISS:
            structure, arrays = encode(example, allow_pickle=allow_pickle)
            typical = record_size(structure, arrays)

        def create(folder: Path) -> None:
            meta = plan_layout(
                num_ids,
                allowed_capacity(size, folder, on_disk, name),
                fingerprint=fingerprint,
                policy=policy.name,
                scored=policy.scored,
                on_disk=on_disk,
                structure=structure,
                typical=typical,
            )
            _create_files(folder, meta)

        root = prepare_root(user_root(store) if on_disk else default_root())
        sweep(root)
        attach = partial(self._attach_to, name, root, policy, allow_pickle, create, persist)
        try:
            attach()
        except DamagedError as error:
            if not remove_unused(root / name):
                raise
            warnings.warn(
                f"{text_of(error)}. No process uses this cache, so an empty one replaces it",
                RuntimeWarning,
                stacklevel=2,
            )
            attach()
        try:
            check_same(self.meta, self.path, fingerprint, num_ids, policy.name)
        except FingerprintError:
            self.close()
            raise
        if size and not self._created:
            warn_of_capacity(self.meta, self.path, size)

    def _attach_to(
        self,
        name: str,
        root: Path,
        policy: Policy,
        allow_pickle: bool,
        initialize: Callable[[Path], None],
        persist: bool,
    ) -> None:
        self.name, self.policy, self._root, self.allow_pickle = name, policy, root, allow_pickle
        self.tier: Any = None  # the `TierClient` behind this cache
        self._final_stats: CacheStats | None = None
        with contextlib.ExitStack() as undo:
            folder = SharedFolder(name, root=root, initialize=initialize, persist=persist)
            undo.callback(folder.close)
            self.path, self._created = folder.path, folder.created
            meta = self.meta = Meta.load(folder.path)
            self.num_ids, self.capacity, self.fingerprint = meta.num_ids, meta.capacity, meta.fingerprint
            index = self._index = Index(folder.path / "index", meta.num_ids, meta.num_blocks, **meta.kinds)
            made = index.header[[Field.MAGIC, Field.NUM_IDS, Field.NUM_BLOCKS, Field.BLOCK]].tolist()
            if made != [MAGIC, meta.num_ids, meta.num_blocks, meta.block]:
                raise DamagedError(f"the index in {folder.path} does not match its {META}")
            kind = DiskArena if meta.on_disk else MemoryArena
            arena: Arena = kind(folder.path / "data", meta.block, meta.num_blocks)
            undo.callback(arena.close)
            lock = FileLock(folder.path / "lock")
            undo.callback(lock.close)
            self._arena, self._counters = arena, Counters(index.counters)
            self._records = Records(meta, index, arena, allow_pickle)
            self._writer = Writer(meta, index, arena, self._counters, policy, folder.path, lock)
            self.structure = self._records.common
            if meta.on_disk and not folder.created:
                with lock.hold(5 * LOCK_SECONDS, f"checking the cache {name!r}"):
                    if not lock.claimed_elsewhere():
                        check_disk(index, meta.block, bool(meta.common), arena.restore_length())
                    self._counters.claim(lock)
            else:
                self._counters.claim(lock)
            self._detach = weakref.finalize(self, undo.pop_all().close)
        self.populate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- state --------------------------------------------------------------------------------------------------------

    def resident(self, ids: Any) -> Array:
        """See `Cache`."""
        return self._index.first[checked_ids(ids, self.num_ids)] != 0  # type: ignore[no-any-return]

    def known(self, ids: Any) -> Array:
        """Return which of `ids` are resident, or assumed to be in the tier: an array of bool."""
        there = self.resident(ids)
        return there if self.tier is None else there | self.tier.known(ids)

    @property
    def full(self) -> bool:
        """Whether a new sample would probably be rejected: the cache is full, and the policy does not evict."""
        return self._writer.full

    @property
    def complete(self) -> bool:
        """See `Cache`."""
        return bool(self._index.header[Field.RESIDENT] == self.num_ids)

    def stats(self) -> CacheStats:
        """See `Cache`."""
        if self._final_stats is not None:
            return self._final_stats
        header = self._index.header
        return self._counters.stats(
            resident_items=int(header[Field.RESIDENT]),
            resident_bytes=int(header[Field.RESIDENT_BYTES]),
            capacity_bytes=self.capacity,
            used_bytes=self.meta.index_bytes + int(header[Field.BACKED]) * self.meta.block,
        )

    def count_fetch(self, reads: int, size: int) -> None:
        """See `Cache`."""
        self._counters.follow_fork()
        self._counters.add((Count.READS, reads), (Count.BYTES, size))

    def populate(self) -> None:
        """See `Cache`."""
        if isinstance(self._arena, MemoryArena):
            self._arena.populate(int(self._index.header[Field.BACKED]))

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, ids: Any) -> list[Any]:
        """See `Cache`."""
        self._counters.follow_fork()
        wanted = checked_ids(ids, self.num_ids)
        values: list[Any] = [MISS] * len(wanted)
        found = self._records.locate(wanted)
        self._records.read(found, values)
        self._record_use(found)
        return values

    def find(self, ids: Any, accept: Callable[[Any], bool]) -> Any:
        """The first value of `ids` that `accept` returns True for, which counts as a hit; else `MISS`."""
        self._counters.follow_fork()
        for id in checked_ids(ids, self.num_ids):
            values = [MISS]
            found = self._records.locate(id[None])
            self._records.read(found, values)
            if found.damaged or (values[0] is not MISS and accept(values[0])):
                self._record_use(found)
                return values[0]
        self._counters.add((Count.MISSES, 1))
        return MISS

    def borrow(self, ids: Any) -> Borrowed | None:
        """See `Lends`: None for a cache on a disk."""
        if not isinstance(self._arena, MemoryArena):
            return None
        self._counters.follow_fork()
        wanted = checked_ids(ids, self.num_ids)
        found = self._records.locate(wanted)
        borrowed = self._records.borrow(found, [MISS] * len(wanted))
        self._record_use(found)
        return borrowed

    def aim(self, outs: Sequence[Array]) -> Aim:
        """See `Cache`."""
        return self._records.aim(outs)

    def gather(self, ids: Any, into: Aim | Sequence[Array]) -> Array:
        """See `Cache`."""
        aim = into if isinstance(into, Aim) else self.aim(into)
        self._counters.follow_fork()
        found = self._records.locate(checked_ids(ids, self.num_ids))
        self._records.gather(found, aim)
        self._record_use(found)
        return found.good

    def _record_use(self, found: Found) -> None:
        """Count the reads, pass the hits to the policy, and drop damaged records."""
        hits = found.ids if found.good.all() else found.ids[found.good]
        self._writer.space.used(hits)
        self._counters.add((Count.HITS, len(hits)), (Count.MISSES, len(found.ids) - len(hits)))
        if found.damaged:
            ids, at = np.unique(found.ids[found.damaged], return_index=True)
            self._counters.add((Count.DAMAGED, len(ids)))
            self._writer.drop_damaged(ids, found.generation[found.damaged][at])

    def count_changed(self, samples: int) -> None:
        """See `Lends`."""
        self._counters.add((Count.HITS, -samples), (Count.MISSES, samples))

    def count_tier(self, hits: int, rejected: int) -> None:
        """Count misses that the tier served, and samples that it did not store."""
        self._counters.follow_fork()
        self._counters.add(
            (Count.HITS, hits), (Count.MISSES, -hits), (Count.TIER_HITS, hits), (Count.TIER_REJECTED, rejected)
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any], *, uncached: int = 0) -> Array:
        """See `Cache`.

        A sample that cannot be stored (no space, larger than the cache, lock timeout, full disk) is counted as
        rejected.
        """
        self._counters.follow_fork()
        wanted = checked_pairs(ids, values, self.num_ids)
        self._writer.put(wanted, lambda at: encode(values[at], allow_pickle=self.allow_pickle), uncached)
        return self.resident(wanted)

    def put_records(self, ids: Any, records: Sequence[Record], *, uncached: int = 0) -> Array:
        """As `put_many`, for samples encoded by `pipeline.codec.encode`."""
        self._counters.follow_fork()
        wanted = checked_pairs(ids, records, self.num_ids)
        self._writer.put(wanted, records.__getitem__, uncached)
        return self.resident(wanted)

    def set_scores(self, ids: Any, scores: Any) -> None:
        """See `Cache`. The cache keeps the samples with the highest scores.

        All scores are 0 in a new cache. When it is full, a new sample is stored only if its score is above those of
        the residents that it replaces. For the policy "oracle", set the score of each sample of a batch to minus its
        next use before the batch is read (`policies.next_uses`). Of equal ids, the last score counts.

        Raises `InputError` for policies other than "importance" and "oracle", and `WaitError` if the writer lock is
        not free in 2 s.
        """
        self._counters.follow_fork()
        wanted = checked_ids(ids, self.num_ids)
        self._writer.set_scores(wanted, checked_scores(scores, len(wanted)))

    def clear(self) -> None:
        """Remove all samples. Raises `WaitError` if the writer lock is not free in 2 s."""
        self.drop(np.arange(self.num_ids))

    def get(self, id: int) -> Any:
        """Return one sample, or `MISS`."""
        return self.get_many([id])[0]

    def put(self, id: int, value: Any) -> bool:
        """Store one sample; return whether it is stored now."""
        return bool(self.put_many([id], [value])[0])

    def drop(self, ids: Any) -> None:
        """See `Cache`. Raises `WaitError` if the writer lock is not free in 2 s."""
        self._counters.follow_fork()
        self._writer.drop(np.unique(checked_ids(ids, self.num_ids)))

    def evict_one(self, ids: Any) -> None:
        """Evict the sample of lowest score among `ids`. Raises `WaitError` if the writer lock is not free in 2 s."""
        self._counters.follow_fork()
        self._writer.evict_one(np.unique(checked_ids(ids, self.num_ids)))

    @property
    def uncached_steps(self) -> int:
        """See `Cache`."""
        return self._writer.uncached_steps

    def uncache_steps(self, count: int) -> bool:
        """See `Cache`. Raises `WaitError` if the writer lock is not free in 2 s."""
        self._counters.follow_fork()
        return self._writer.uncache_steps(count)

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Cache`. The last process to close it removes the cache, unless it persists."""
        if self._detach.alive:
            if self.tier is not None:
                self.tier.close()
            self._final_stats = self.stats()
            self._detach()
            gone: Any = Closed(self.name)
            self._index = self._arena = self._counters = self._records = self._writer = gone

    def __reduce__(self) -> tuple[Any, ...]:
        need_linux("a cache that other processes use", "use num_workers=0")
        return _attach, self.address, {"tier": self.tier}

    @property
    def address(self) -> tuple[Path, str, Policy, bool]:
        """The arguments of `attach_or_create` before the layout."""
        return self._root, self.name, self.policy, self.allow_pickle


def _attach(root: Path, name: str, policy: Policy, allow_pickle: bool) -> SampleCache:
    """Attach to a cache created by another process. Used to unpickle a cache in a worker."""

    def gone(folder: Path) -> None:
        raise folder_gone(
            f"the cache {name!r} in {root} does not exist any more: the process that created it has closed it. Create "
            "a new one"
        )

    cache = SampleCache.__new__(SampleCache)
    cache._attach_to(name, root, policy, allow_pickle, gone, False)
    return cache


def attach_or_create(root: Path, name: str, policy: Policy, allow_pickle: bool, meta: Meta) -> SampleCache:
    """Attach to a cache created by another process; on another host, create a cache of the same layout.

    Raises `CapacityError` if the host has not enough free memory.
    """
    if not root.exists() and not meta.on_disk:  # another host, where this user has another folder
        root = default_root()
    root = prepare_root(root)
    sweep(root)

    def create(folder: Path) -> None:
        allowed_capacity(meta.capacity, folder, meta.on_disk, name)
        _create_files(folder, meta)

    cache = SampleCache.__new__(SampleCache)
    cache._attach_to(name, root, policy, allow_pickle, create, False)
    return cache


def _create_files(folder: Path, meta: Meta) -> None:
    Index.create(folder / "index", meta.num_ids, meta.num_blocks, meta.block, **meta.kinds)
    Arena.create(folder / "data", meta.block, meta.num_blocks)
    (folder / "lock").touch(mode=0o600)
    meta.save(folder)
