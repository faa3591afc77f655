"""Administration of this user's caches: list, remove, collect garbage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from stallfree.cache.layout import META, Field, Index, Meta
from stallfree.errors import InputError, StorageError, cache_not_found
from stallfree.ipc.folders import (
    check_name,
    default_root,
    in_use,
    is_persistent,
    is_root,
    remove_unused,
    sweep,
    user_root,
)


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
    """The root folder of this user's caches: in memory, or below the folder `store`."""
    return default_root() if str(store) == "memory" else user_root(store)


def list_caches(root: Path) -> list[CacheInfo]:
    """The caches below `root`, by name."""
    if not is_root(root):
        return []
    return [_info(path) for path in sorted(root.iterdir()) if _is_cache(path)]


def _is_cache(path: Path) -> bool:
    return path.name[0] != "." and any((path / file).is_file() for file in (META, "index"))


def _info(path: Path) -> CacheInfo:
    info = CacheInfo(path.name, path, in_use(path), is_persistent(path))
    try:
        meta = Meta.load(path)
        header = Index(path, meta).header
    except (StorageError, OSError):
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
    path = root / check_name(name)
    if not is_root(root) or not _is_cache(path):
        names = ", ".join(info.name for info in list_caches(root)) or "none"
        raise cache_not_found(f"there is no cache {name!r} in {root}: give one of the existing caches ({names})")
    if not remove_unused(path):
        raise InputError(
            f"the cache {name!r} in {root} is in use: end the processes that are attached to it first", page="lock-held"
        )


def collect_garbage(root: Path) -> list[str]:
    """Remove the leftovers of killed processes below `root`; return their names."""
    return sweep(root)
