"""The caches of data sets: what `store=` accepts, how they are opened, listed and removed; and `DiskTier`."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stallfree import errors
from stallfree.cache.layout import META, Field, Index, Meta
from stallfree.cache.policies import Policy
from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.tier import Array, Record, TierClient, TierStore
from stallfree.ipc import folders
from stallfree.pipeline.codec import read_record
from stallfree.platform import shares_memory
from stallfree.raising import short_traceback, users_level
from stallfree.units import format_size, parse_size

Store = str | Path | TierStore


def open_cache(store: Store, num_ids: int, *, capacity: int, policy: Policy, **options: Any) -> SampleCache:
    """Open the cache of a data set, and its tier as `SampleCache.tier`.

    Args:
        store: "memory", a folder, or a place for tiers (`DiskTier`, `RedisStore`).
        num_ids: number of samples of the data set.
        capacity: bytes of memory, or of the disk for a folder; 0 for no memory in front of a tier.
        policy: of the cache.
        options: others of `SampleCache`.
    """
    if capacity == 0 and policy.evicts and not policy.given:
        raise errors.argument_conflict(
            f"policy={policy.name!r} with capacity=0: tiers do not evict by a policy. Leave policy out, or give a "
            "capacity for the memory in front of the tier"
        )
    if not is_tier(store):
        return SampleCache(num_ids, capacity=capacity, policy=policy, store=store, **options)  # type: ignore[arg-type]
    cache = SampleCache(num_ids, capacity=capacity, policy=policy, **options)
    try:
        fingerprint, example = cache.fingerprint, (0, 0, options["example"])
        name = options["name"] or fingerprint[:20]
        tier = store.attach(num_ids + 1, fingerprint=fingerprint, name=name, example=example)  # type: ignore[union-attr]
        cache.tier = TierClient(tier, cache)
    except BaseException:
        cache.close()
        raise
    return cache


def is_tier(store: Any) -> bool:
    """Return whether `store` is a place for tiers. Raises `InputError` for a list."""
    if isinstance(store, (list, tuple)):
        raise errors.InputError(f"store={store!r:.80}: give one store, memory has at most one tier behind it")
    return hasattr(store, "attach")


def parse_capacity(capacity: Any, store: Store) -> int:
    """Return `capacity` in bytes; 0 only with a tier. Raises `CapacityError`."""
    size = parse_size(capacity, "capacity")
    if not size and not is_tier(store):
        raise errors.capacity_too_small(
            f"capacity={capacity!r}: give the bytes of the cache; 0 is for a store with a tier"
        )
    return size


def sample_bytes_of(store: Store, capacity: int) -> int:
    """Return the bytes that samples may take, with `capacity` of memory: a tier holds those in memory too."""
    return max(capacity, int(getattr(store, "sample_bytes", 0)) if is_tier(store) else 0)


def default_store(capacity: int, unknown: Sequence[str] = ()) -> tuple[Store, int]:
    """Return the store for `capacity` bytes per node, and the bytes of memory in front of it.

    In a job of several nodes with a server program these are a `RedisStore` and 0, unless the data set has `unknown`
    objects: without their fingerprint, nodes could not find each other's samples. Otherwise "memory" and `capacity`,
    with a warning in a job of several nodes.
    """
    from stallfree.cache.redis.launch import find_node
    from stallfree.cache.redis.store import RedisStore

    if not shares_memory() or find_node()[1] == 1:
        return "memory", capacity
    try:
        if not unknown:
            return RedisStore(capacity_per_node=capacity, name="auto"), 0
        why = f"{unknown[0]} has no fingerprint. To share samples, give name=, another name for each data set"
    except (errors.MissingServerError, errors.MissingExtraError) as error:
        why = errors.text_of(error)
    warnings.warn(f"each node caches samples separately: {why}", RuntimeWarning, stacklevel=users_level())
    return "memory", capacity


# -- administration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheInfo:
    """One cache. `fingerprint` and the counts are empty if it cannot be read.

    Attributes:
        name: its name.
        path: its folder.
        in_use: whether a process is attached.
        persist: whether it is kept when no process is attached.
        samples: number of samples of the data set.
        resident_items: resident records.
        used_bytes: used bytes, index included.
        capacity_bytes: maximum bytes.
        policy: name of the policy.
        fingerprint: of the data.
    """

    name: str
    path: Path
    in_use: bool
    persist: bool
    samples: int = 0
    resident_items: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    policy: str = ""
    fingerprint: str = ""


def caches_root(store: str | Path = "memory") -> Path:
    """Return the root folder of this user's caches: in memory, or below the folder `store`."""
    return folders.default_root() if str(store) == "memory" else folders.user_root(store)


def list_caches(root: Path) -> list[CacheInfo]:
    """Return the caches below `root`, by name."""
    return [_info(path) for path in sorted(root.iterdir()) if _is_cache(path)] if folders.is_root(root) else []


def _is_cache(path: Path) -> bool:
    return path.name[0] != "." and any((path / file).is_file() for file in (META, "index"))


def _info(path: Path) -> CacheInfo:
    info = CacheInfo(path.name, path, folders.in_use(path), folders.is_persistent(path))
    try:
        meta = Meta.load(path)
        header = Index(path, meta).header
    except OSError:  # also a `StorageError`
        return info
    return replace(
        info,
        samples=meta.num_ids,
        resident_items=int(header[Field.RESIDENT]),
        used_bytes=meta.index_bytes + int(header[Field.BACKED]) * meta.block,
        capacity_bytes=meta.capacity,
        policy=meta.policy,
        fingerprint=meta.fingerprint,
    )


def remove(root: Path, name: str) -> None:
    """Remove the cache `name` below `root`.

    Raises `InputError` if the cache does not exist, or if a process is attached to it.
    """
    path = root / folders.check_name(name)
    if not folders.is_root(root) or not _is_cache(path):
        names = ", ".join(info.name for info in list_caches(root)) or "none"
        raise errors.cache_not_found(f"there is no cache {name!r} in {root}: give one of the existing caches ({names})")
    if not folders.remove_unused(path):
        raise errors.InputError(
            f"the cache {name!r} in {root} is in use: end the processes that are attached to it first", page="lock-held"
        )


# -- a tier on a disk -------------------------------------------------------------------------------------------------

_PARTS, _PART_BYTES = 8, 256 << 10
"""Largest number of parts of a batch that are read concurrently, and the smallest size of a part."""


class DiskTier:
    """A folder on a local disk for the samples of data sets, behind memory.

    Samples are read from memory, else from the disk, else from the source. Samples of the next batches are read ahead.
    New samples are written in the background. A full or failing disk reduces hits, but raises no error.

    Args:
        folder: on a local disk; data sets share it, each under its own name. Created if missing.
        capacity: bytes on the disk for each data set that uses this tier, index included, as an int or a string like
            "200GiB". The capacity of a `CachedDataset` is memory.
        persist: keep the samples on the disk after the last process has exited, for the next job with the same data.

    Attributes:
        folder: as an absolute path.
        capacity: bytes.
        persist: as given.

    Raises `InputError` for an invalid path, `CapacityError` for an invalid size.

    Example:
        ```python
        tier = sf.DiskTier("cache", capacity="64MiB")
        with sf.CachedDataset(dataset, capacity="1MiB", store=tier) as cached:
            image, label = cached[0]  # from memory, else from the disk, else from the data set
        ```
    """

    @short_traceback
    def __init__(self, folder: str | Path, *, capacity: int | str, persist: bool = False) -> None:
        if not folders.is_path(folder) or str(folder) == "memory" or folders.is_address(folder):
            raise errors.InputError(f"DiskTier(folder={folder!r:.80}): give the path of a folder on a local disk")
        self.folder = Path(folder).expanduser().absolute()
        self.capacity = self.sample_bytes = parse_size(capacity, "capacity")
        self.persist = bool(persist)

    def attach(self, num_ids: int, *, fingerprint: str, name: str, example: Any) -> "_DiskSamples":
        """Return the samples of one data set in this folder. See `TierStore`."""
        options: Any = {"capacity": self.capacity, "store": self.folder, "persist": self.persist, "example": example}
        try:
            return _DiskSamples(SampleCache(num_ids, fingerprint=fingerprint, name=f"{name}-tier", **options))
        except errors.CapacityError as error:
            raise errors.CapacityError(f"{self!r}: {errors.text_of(error)}", page=error.page) from error

    def __repr__(self) -> str:
        return f"DiskTier({str(self.folder)!r}, capacity={format_size(self.capacity)})"


class _DiskSamples:
    """The samples of one data set on a disk: a `Tier`. Nothing is evicted."""

    def __init__(self, records: SampleCache) -> None:
        self.records = records
        self._typical = 0  # bytes of a record

    def parts(self, ids: Array) -> list[Array]:
        """Return `ids` in parts that threads read concurrently."""
        if not self._typical:
            stats = self.records.stats()
            self._typical = stats.resident_bytes // max(1, stats.resident_items)
        step = max(-(-len(ids) // _PARTS), -(-_PART_BYTES // max(1, self._typical)))
        return [ids[at : at + step] for at in range(0, len(ids), step)]

    def get_many(self, ids: Array) -> list[Any]:
        """See `Tier`."""
        return self.records.get_many(ids)

    def put_many(self, ids: Array, records: Sequence[Record]) -> Array:
        """See `Tier`."""
        values = [read_record(record, copy=False, allow_pickle=True) for record in records]
        return np.asarray(self.records.put_many(ids, values))

    def drop(self, ids: Array) -> None:
        """See `Tier`."""
        self.records.drop(ids)

    def close(self) -> None:
        """See `Tier`."""
        self.records.close()

    def __repr__(self) -> str:
        return f"the disk of {self.records.path}"
