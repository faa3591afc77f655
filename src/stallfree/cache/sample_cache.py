"""The sample cache in memory shared by all processes of a host, or on a local disk.

Writers hold a lock that the kernel releases when they die. They copy records to memory under it. For a disk they
reserve blocks under it, write without it, and publish under it: a slow disk delays no other process. The next writer
repairs the incomplete changes of a killed process. The blocks that it had reserved on a disk are free again after a
recovery, at the latest when a first process attaches again (space.py). Readers hold no lock (records.py).
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stallfree import errors
from stallfree.cache.arena import Arena, DiskArena, MemoryArena
from stallfree.cache.capacity import allowed_capacity, no_space_left, warn_of_other_capacity
from stallfree.cache.layout import Array, Count, DamagedError, Field, Index, Meta, plan_layout
from stallfree.cache.policies import Policy, make_policy
from stallfree.cache.records import MISS, Aim, Borrowed, Located, Record, Records, checked_ids, checked_scores
from stallfree.cache.space import Space
from stallfree.ipc.folders import SharedFolder, check_name, default_root, prepare_root, remove_unused, sweep, user_root
from stallfree.ipc.locks import FileLock
from stallfree.pipeline.codec import encode, record_size
from stallfree.platform import need_linux
from stallfree.stats import CacheStats
from stallfree.typevars import Closing
from stallfree.units import parse_size

LOCK_SECONDS = 2.0
"""Timeout of the writer lock. Samples whose writer times out count as rejected."""

_SHORT = 0.02
"""The same for samples that are stored after one has timed out, until the lock was free in time."""

_TYPICAL = 128 << 10
"""Assumed bytes of a record without an example."""


class SampleCache(Closing):
    """The samples of one data set, by id.

    Attaches to the cache `name`, and creates it if missing.

    Methods take `ids` as a sequence or an array, which may contain equal ids. Wrong ids raise `InputError`; those out
    of range an `IndexError` as well. After `close`, methods raise `InputError`. Thread-safe; may be forked and pickled.

    Args:
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        capacity: bytes, as an int or a string like "4GiB", for records and index together. 0 for an index alone, which
            keeps scores and counts but stores nothing.
        fingerprint: identifies the samples. A cache of that name with another fingerprint is an error.
        policy: "minio", "fifo", "lru", "lfu", "random", or "importance" or "oracle", which need scores (`set_scores`);
            or an object of `policies.Policy`.
        store: "memory" (shared memory of this host) or a folder on a local disk.
        name: if None, derived from fingerprint, policy and capacity, so that jobs on the same data share the cache.
        persist: keep the cache after the last process has detached.
        example: a sample of the data set. If its size is fixed, all records have its layout, and one gather reads a
            batch. Samples of another structure are still accepted, and read one by one.
        allow_pickle: whether samples that the codec does not support may be pickled. Only this user can read the cache.

    Attributes:
        num_ids, name, fingerprint, allow_pickle: as given.
        path: folder of this cache.
        policy: eviction policy. Nothing is evicted while `policy.evicts` is False.
        capacity: maximum bytes of memory or disk.
        structure: the structure of the samples that `gather` can copy; None if it copies none.
        meta: the layout.
        tier: the `tier.TierClient` behind this cache, which it closes; or None.

    Raises:
        CapacityError: for a capacity that is invalid, too small for a record or larger than the free memory.
        FingerprintError: for a cache of other data.
        StorageError: if the folder is not usable.

    Example:
        ```python
        from stallfree.cache import SampleCache
        with SampleCache(100, capacity="1MiB", fingerprint="numbers") as cache:
            cache.put_many([3, 4], [b"three", b"four"])
            assert cache.get_many([4]) == [b"four"]
        ```
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
            raise errors.dataset_empty(f"num_ids={num_ids}: a cache needs a data set of at least one sample")
        size = parse_size(capacity, "capacity")
        policy = make_policy(policy)
        on_disk = str(store) != "memory"
        name = f"{fingerprint[:20]}-{policy.name}-{size}" if name is None else check_name(name)
        structure, typical = None, _TYPICAL
        if example is not MISS:
            structure, arrays = encode(example, allow_pickle=allow_pickle)
            typical = record_size(structure, arrays)

        def plan(folder: Path) -> Meta:
            allowed = allowed_capacity(size, folder, on_disk, name)
            kind: dict[str, Any] = {
                "fingerprint": fingerprint,
                "policy": policy.name,
                "scored": policy.scored,
                "on_disk": on_disk,
            }
            try:
                return plan_layout(num_ids, allowed, **kind, structure=structure, typical=typical, empty=size == 0)
            except errors.CapacityError as error:
                if allowed < size:
                    raise no_space_left(size, allowed, folder, name) from error
                raise

        root = prepare_root(user_root(store) if on_disk else default_root())
        sweep(root)
        attach = partial(self._attach_to, name, root, policy, allow_pickle, plan, persist)
        try:
            attach()
        except DamagedError as error:
            if not remove_unused(root / name):
                raise
            warnings.warn(
                f"{errors.text_of(error)}. No process uses this cache, so an empty one replaces it",
                RuntimeWarning,
                stacklevel=2,
            )
            attach()
        try:
            self.meta.check_same(self.path, fingerprint=fingerprint, num_ids=num_ids, policy=policy.name)
        except errors.FingerprintError:
            self.close()
            raise
        if size and not self._created:
            warn_of_other_capacity(name, self.capacity, size)

    def _attach_to(
        self, name: str, root: Path, policy: Policy, allow_pickle: bool, plan: Callable[[Path], Meta], persist: bool
    ) -> None:
        self.name, self.policy, self._root, self.allow_pickle = name, policy, root, allow_pickle
        self.tier: Any = None
        self._final_stats: CacheStats | None = None
        self._patience = LOCK_SECONDS

        def create(folder: Path) -> None:
            meta = plan(folder)
            Index.create(folder, meta)
            Arena.create(folder, meta)
            (folder / "lock").touch(mode=0o600)
            meta.save(folder)

        with contextlib.ExitStack() as undo:
            folder = SharedFolder(name, root=root, initialize=create, persist=persist)
            undo.callback(folder.close)
            self.path, self._created = folder.path, folder.created
            meta = self.meta = Meta.load(folder.path)
            self.num_ids, self.capacity, self.fingerprint = meta.num_ids, meta.capacity, meta.fingerprint
            self._index = Index(folder.path, meta)
            self._arena = (DiskArena if meta.on_disk else MemoryArena)(folder.path, meta)
            undo.callback(self._arena.close)
            self._lock = FileLock(folder.path / "lock")
            undo.callback(self._lock.close)
            self._counters = self._index.counters
            self._records = Records(self._index, self._arena, allow_pickle)
            self._space = Space(self._index, policy, self._arena.allocate)
            self.structure = self._records.common
            if isinstance(self._arena, DiskArena) and not folder.created:
                with self._lock.hold(5 * LOCK_SECONDS, f"checking the cache {name!r}"):
                    if not self._lock.claimed_elsewhere():
                        self._space.check_disk(self._arena.restore_length())
                    self._counters.claim(self._lock)
            else:
                self._counters.claim(self._lock)
            self._detach = weakref.finalize(self, undo.pop_all().close)
        self.populate()

    # -- state --------------------------------------------------------------------------------------------------------

    def resident(self, ids: Any) -> Array:
        """Return which of `ids` are stored, as an array of bool."""
        return self._index.first[checked_ids(ids, self.num_ids)] != 0  # type: ignore[no-any-return]

    def known(self, ids: Any) -> Array:
        """Return which of `ids` are stored, or assumed to be in the tier."""
        there = self.resident(ids)
        return there if self.tier is None else there | self.tier.known(ids)

    @property
    def complete(self) -> bool:
        """Whether all samples are resident."""
        return bool(self._index.header[Field.RESIDENT] == self.num_ids)

    @property
    def full(self) -> bool:
        """Whether no block is free and the policy does not evict."""
        return self._space.full

    def stats(self) -> CacheStats:
        """Return the counts over all processes of this host.

        Each requested id counts once, as a hit or as a miss. After `close`, those at that time.
        """
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
        """Count `reads` fetches of `size` bytes from the source."""
        self._count((Count.READS, reads), (Count.BYTES, size))

    def count_tier(self, hits: int, rejected: int) -> None:
        """Count misses that the tier served, and samples that it rejected."""
        self._count((Count.HITS, hits), (Count.MISSES, -hits), (Count.TIER_HITS, hits), (Count.TIER_REJECTED, rejected))

    def _count(self, *counts: tuple[Count, int]) -> None:
        self._counters.follow_fork()
        self._counters.add(*counts)

    def populate(self) -> None:
        """Map the memory in the background, so that the first reads are fast."""
        if isinstance(self._arena, MemoryArena):
            self._arena.populate(int(self._index.header[Field.BACKED]))

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, ids: Any) -> list[Any]:
        """Return the samples of `ids`, `MISS` for absent ones.

        The caller owns the values: changing them affects neither the cache nor the values of other calls, and equal
        ids have separate values. Values of one call may share one memory block.
        """
        return self._read(ids)[1]

    def find(self, ids: Any, accept: Callable[[Any], bool], *, count: bool = True) -> Any:
        """Return the first value of `ids` that is accepted, or `MISS`; with `count`, as a hit or a miss."""
        for id in checked_ids(ids, self.num_ids):
            value = self._records.read_one(int(id))
            if value is None:
                batch, values = self._locate(id[None]), [MISS]
                self._records.read(batch, values)
                if batch.damaged or (values[0] is not MISS and accept(values[0])):
                    self._record_use(batch)
                    return values[0]
            elif value is not MISS and accept(value):
                self._space.used(id[None])
                self._count((Count.HITS, int(count)))
                return value
        self._count((Count.MISSES, int(count)))
        return MISS

    def borrow(self, ids: Any) -> Borrowed | None:
        """Return the samples of `ids`, as `get_many` does, without copying; do not modify them.

        Returns None for a cache on a disk. Another process may overwrite a sample at any time: check
        `Borrowed.unchanged` after use.
        """
        if not isinstance(self._arena, MemoryArena):
            return None
        return self._records.borrowed(*self._read(ids, lend=True))

    def count_changed(self, samples: int) -> None:
        """Count `samples` borrowed samples that have changed as misses."""
        self._counters.add((Count.HITS, -samples), (Count.MISSES, samples))

    def aim(self, outs: Sequence[Array]) -> Aim:
        """Prepare `outs` for many calls of `gather`; see there."""
        return self._records.aim(outs)

    def gather(self, ids: Any, into: Aim | Sequence[Array]) -> Array:
        """Copy the samples of `ids`, leaf by leaf, and return which were copied.

        Only resident samples of the `structure` are copied; without a `structure`, none. The rows of other samples are
        undefined afterwards.

        Args:
            ids: of the samples.
            into: an array per leaf of `structure`: (number of ids, bytes of the leaf) of uint8, contiguous; or the
                result of `aim` for them.
        """
        aim = into if isinstance(into, Aim) else self.aim(into)
        batch = self._locate(ids)
        self._records.gather(batch, aim)
        self._record_use(batch)
        return batch.good

    def _locate(self, ids: Any) -> Located:
        self._counters.follow_fork()
        return self._records.locate(checked_ids(ids, self.num_ids))

    def _read(self, ids: Any, *, lend: bool = False) -> tuple[Located, list[Any]]:
        batch = self._locate(ids)
        values: list[Any] = [MISS] * len(batch.ids)
        self._records.read(batch, values, lend=lend)
        self._record_use(batch)
        return batch, values

    def _record_use(self, batch: Located) -> None:
        """Count the reads, pass the hits to the policy, and drop damaged records."""
        hits = batch.ids if batch.good.all() else batch.ids[batch.good]
        self._space.used(hits)
        self._counters.add((Count.HITS, len(hits)), (Count.MISSES, len(batch.ids) - len(hits)))
        if batch.damaged:
            ids, at = np.unique(batch.ids[batch.damaged], return_index=True)
            self._counters.add((Count.DAMAGED, len(ids)))
            generations = batch.generation[batch.damaged][at]
            with contextlib.suppress(errors.WaitError), self._changing("dropping damaged records from"):
                self._space.drop(ids[self._index.generation[ids] == generations])

    # -- storing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any], *, uncached: int = 0) -> Array:
        """Store `values` as the samples of `ids`, and return which are stored.

        Samples that are already stored are unchanged; of equal ids, the first counts. Values are copied. A sample that
        cannot be stored (no space, larger than the cache, lock timeout, full disk) counts as rejected.

        Args:
            ids: of the samples.
            values: a sample for each id.
            uncached: the `uncached_steps` with which the values were prepared. Nothing is stored if it has changed.

        Raises `CodecError` for a value that needs pickle if `allow_pickle` is False; then nothing is stored.
        """
        self._counters.follow_fork()
        wanted = checked_ids(ids, self.num_ids)
        if len(wanted) != len(values):
            raise errors.cache_ids(f"put_many: {len(wanted)} ids and {len(values)} values: give one value for each id")
        _, unique = np.unique(wanted, return_index=True)
        at = unique[self._index.first[wanted[unique]] == 0]
        at.sort()
        if len(at):
            stored = 0
            if not self._space.full:  # else samples are rejected without encoding them
                records = [encode(values[place], allow_pickle=self.allow_pickle) for place in at.tolist()]
                stored = self._store(wanted[at], records, uncached)
            self._counters.add((Count.REJECTED, len(at) - stored))
        return self.resident(wanted)

    def _store(self, ids: Array, records: list[Record], uncached: int) -> int:
        """Store the `records` of distinct `ids`; return how many are stored, by this process or another one."""
        lengths = np.array([0 if record[0] is self.structure else record_size(*record) for record in records], np.int64)
        header, left, stored = self._index.header, np.arange(len(ids)), 0
        try:
            while len(left):
                with self._changing("storing in", self._patience):
                    if header[Field.UNCACHED] != uncached:
                        break
                    absent = self._index.first[ids[left]] == 0
                    stored += len(left) - int(absent.sum())
                    new, left = self._space.reserve(ids, lengths, left[absent])
                    if isinstance(self._arena, MemoryArena):
                        self._records.write(ids, records, lengths, new)
                        self._space.publish(ids, lengths, new)
                        stored += len(new.at)
                        continue
                sums = self._records.write(ids, records, lengths, new)
                with self._changing("storing in", self._patience):
                    if header[Field.RECOVERIES] != new.recoveries:  # others may have these blocks now
                        left = np.concatenate((new.at, left))
                    elif sums is None or header[Field.UNCACHED] != uncached:
                        self._space.give_back(new.blocks)
                    else:
                        self._space.publish(ids, lengths, new, sums)
                        stored += len(new.at)
            self._patience = LOCK_SECONDS
        except errors.WaitError as error:
            if self._patience == LOCK_SECONDS:
                text = f"{errors.text_of(error)}. Samples are not stored meanwhile"
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            self._patience = _SHORT  # a process that is stopped costs hits, but no time
        return stored

    @contextlib.contextmanager
    def _changing(self, doing: str, seconds: float | None = None) -> Iterator[None]:
        """Context of a change, under the lock of writers."""
        with (
            self._lock.hold(LOCK_SECONDS if seconds is None else seconds, f"{doing} the cache {self.name!r}"),
            self._space.changing(),
        ):
            yield

    # -- dropping, scores, uncached steps -----------------------------------------------------------------------------
    #
    # These methods raise `WaitError` if the writer lock is not free in 2 s.

    def drop(self, ids: Any) -> None:
        """Remove the samples of `ids`. They do not count as evicted."""
        wanted = np.unique(checked_ids(ids, self.num_ids))
        with self._changing("dropping from"):
            self._space.drop(wanted)

    def clear(self) -> None:
        """Remove all samples."""
        self.drop(np.arange(self.num_ids))

    def ids_of_key(self, key: bytes) -> list[int]:
        """Return the 8 ids that a record may take by its `key`. Used half at most, all 8 are taken for 1 key in 256."""
        start, step = xxhash.xxh3_64_intdigest(key), xxhash.xxh3_64_intdigest(key, 1) | 1
        return [(start + way * step) % self.num_ids for way in range(8)]

    def free_one(self, ids: Any, same: Callable[[Any], bool]) -> Array:
        """Return one of `ids` that is not resident; if all are, a policy that evicts does it for one of them.

        Empty if there is none, also while another process writes, and if `same` is true of the value of one.
        """
        wanted = np.unique(checked_ids(ids, self.num_ids))
        if self.policy.evicts and self.resident(wanted).all():
            self._counters.follow_fork()
            with contextlib.suppress(errors.WaitError), self._changing("evicting from"):
                self._space.evict_one(wanted)
        free = wanted[~self.resident(wanted)][:1]  # of processes that choose the same one, the first stores
        return free if self.find(wanted, same, count=False) is MISS else free[:0]

    def set_scores(self, ids: Any, scores: Any) -> None:
        """Set the scores of samples, resident or not.

        The cache keeps the samples with the highest scores. All scores are 0 in a new cache. When it is full, a new
        sample is stored only if its score is above those of the residents that it replaces. For the policy
        "oracle", set the score of each sample of a batch to minus its next use before the batch is read
        (`policies.next_uses`). Of equal ids, the last score counts.

        Raises `InputError` for policies other than "importance" and "oracle", and unless there is one number per id,
        and none is NaN.
        """
        wanted = checked_ids(ids, self.num_ids)
        numbers = checked_scores(scores, len(wanted))
        if not self.policy.given:
            raise errors.cache_required(
                f"the cache {self.name!r} has the policy {self.policy.name!r}, which computes its own scores: "
                "set_scores requires policy='importance' or 'oracle'"
            )
        with self._changing("setting scores in"):
            self._space.set_scores(wanted, numbers)

    @property
    def uncached_steps(self) -> int:
        """The number of last pipeline steps that the stored samples do not include.

        0 initially; increases after a step proved random; see `uncache_steps`.
        """
        return int(self._index.header[Field.UNCACHED])

    def uncache_steps(self, count: int) -> bool:
        """Remove all samples, as one of the last `count` cached steps proved random.

        Afterwards `uncached_steps` is at least `count`. If that was already the case, removes nothing and returns
        False.
        """
        header = self._index.header
        with self._changing("dropping from", self._patience):
            if header[Field.UNCACHED] >= count:
                return False
            self._space.drop(np.flatnonzero(self._index.first))
            header[Field.UNCACHED] = count  # last, so that it is true of all that is stored
        return True

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Detach from the cache. Idempotent.

        The last process to close it removes the cache, unless it persists.
        """
        if self._detach.alive:
            if self.tier is not None:
                self.tier.close()
            self._final_stats = self.stats()
            self._detach()
            for part in _PARTS:
                delattr(self, part)

    def __getattr__(self, name: str) -> Any:
        if name in _PARTS:  # deleted by `close`, so that their memory is freed
            raise errors.object_closed(f"the cache {self.name!r} is closed: make a new one")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        need_linux("a cache that other processes use", "use num_workers=0")
        return attach_or_create, self.address, {"tier": self.tier}

    @property
    def address(self) -> tuple[Path, str, Policy, bool]:
        """The first arguments of `attach_or_create`."""
        return self._root, self.name, self.policy, self.allow_pickle


_PARTS = ("_index", "_arena", "_counters", "_records", "_space", "_lock")


def attach_or_create(
    root: Path, name: str, policy: Policy, allow_pickle: bool, meta: Meta | None = None
) -> SampleCache:
    """Attach to a cache created by another process; with a `meta`, create it if this is another host.

    Raises `StorageError` if the cache does not exist, `CapacityError` if the host has not enough free memory.
    """

    def plan(folder: Path) -> Meta:
        if meta is None:
            raise errors.folder_gone(
                f"the cache {name!r} in {root} does not exist any more: the process that created it has closed it. "
                "Create a new one"
            )
        allowed_capacity(meta.capacity, folder, meta.on_disk, name)
        return meta

    if meta is not None:
        if not root.exists() and not meta.on_disk:  # another host, where this user has another folder
            root = default_root()
        root = prepare_root(root)
        sweep(root)
    cache = SampleCache.__new__(SampleCache)
    cache._attach_to(name, root, policy, allow_pickle, plan, False)
    return cache
