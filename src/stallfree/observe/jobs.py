"""Snapshots of this user's caches and loaders on this host, with changes since the previous snapshot."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stallfree.cache.admin import CacheInfo, caches_root, list_caches
from stallfree.cache.layout import Count, Index, Meta
from stallfree.errors import StorageError
from stallfree.observe.servers import ServerRow, running_servers
from stallfree.workers.status import LoaderStatus, running_loaders

_LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class CacheRow:
    """A cache in a snapshot. Counts are sums over all processes, current and past; None if unknown.

    Attributes:
        name: its name.
        policy: name of its policy.
        samples: number of samples of the data set.
        resident_items: resident records.
        used_bytes, capacity_bytes: index included.
        processes: number of attached processes, workers included.
        hits, misses, evictions: counts.
        hit_ratio: hits over hits and misses; None before the first.
        recent_hit_ratio: the same since the previous snapshot; None if there were no requests, or no previous snapshot.
        recent_evictions: since the previous snapshot.
    """

    name: str
    policy: str
    samples: int
    resident_items: int
    used_bytes: int
    capacity_bytes: int
    processes: int | None
    hits: int | None = None
    misses: int | None = None
    evictions: int | None = None
    hit_ratio: float | None = None
    recent_hit_ratio: float | None = None
    recent_evictions: int | None = None


@dataclass(frozen=True)
class LoaderRow:
    """A loader in a snapshot. Rates and shares are since the previous snapshot, or since its creation.

    Attributes:
        pid: the iterating process.
        script: name of its script.
        dataset: class of the data set.
        epoch: the current epoch.
        workers: worker processes.
        queue_depth: ready batches.
        batches, samples: delivered so far.
        samples_per_second: delivery rate; None if no time has passed.
        fetch_stall, prep_stall: shares of the time that the training loop waited for fetch and for prep.
        silent_seconds: since the last status update. Updates are sent four times a second, but not during a long step.
    """

    pid: int
    script: str
    dataset: str
    epoch: int
    workers: int
    queue_depth: int
    batches: int
    samples: int
    samples_per_second: float | None
    fetch_stall: float | None
    prep_stall: float | None
    silent_seconds: float


@dataclass(frozen=True)
class Look:
    """A snapshot of all caches, loaders and servers."""

    caches: list[CacheRow]
    loaders: list[LoaderRow]
    servers: list[ServerRow] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.caches or self.loaders or self.servers)


@dataclass
class Jobs:
    """Takes repeated snapshots.

    Args:
        root: folder of the caches; None: that of this user in memory.
    """

    root: Path = field(default_factory=caches_root)
    _counts: dict[Path, list[int]] = field(default_factory=dict)
    _seen: dict[str, tuple[LoaderStatus | None, LoaderStatus]] = field(default_factory=dict)

    def look(self) -> Look:
        """Take a snapshot."""
        owners = _lock_owners()
        before, self._counts = self._counts, {}
        caches = [self._cache(info, before.get(info.path), owners) for info in list_caches(self.root)]
        loaders = [self._loader(status) for status in running_loaders(self.root)]
        return Look(caches, loaders, running_servers(self.root))

    def _cache(
        self, info: CacheInfo, before: list[int] | None, owners: dict[tuple[int, int], set[int]] | None
    ) -> CacheRow:
        known: dict[str, Any] = {}
        counts = _counts(info.path)
        if counts is not None:
            self._counts[info.path] = counts
            hits, misses, evictions = counts[Count.HITS], counts[Count.MISSES], counts[Count.EVICTIONS]
            known = {"hits": hits, "misses": misses, "evictions": evictions, "hit_ratio": _ratio(counts)}
            recent = [now - then for now, then in zip(counts, before or [], strict=before is not None)]
            if recent and min(recent) >= 0:  # not the first snapshot of this cache, or of a new one of that name
                known |= {"recent_hit_ratio": _ratio(recent), "recent_evictions": recent[Count.EVICTIONS]}
        processes = None
        if owners is not None:
            with contextlib.suppress(OSError):
                lock = os.stat(info.path / "lock")
                processes = len(owners.get((lock.st_dev, lock.st_ino), ()))  # each claims a row of counters
        names = ("name", "policy", "samples", "resident_items", "used_bytes", "capacity_bytes")
        return CacheRow(**{name: getattr(info, name) for name in names}, processes=processes, **known)

    def _loader(self, now: LoaderStatus) -> LoaderRow:
        before, last = self._seen.get(now.key, (None, None))
        if last is not None and last.at != now.at:
            before = last
        self._seen[now.key] = before, now
        seconds = now.at - (now.begun if before is None else before.at)
        done = now.stats if before is None else now.stats - before.stats
        timed = seconds > 0
        return LoaderRow(
            pid=now.pid,
            script=now.script,
            dataset=now.dataset,
            epoch=now.epoch,
            workers=now.stats.num_workers,
            queue_depth=now.stats.queue_depth,
            batches=now.stats.batches,
            samples=now.stats.samples,
            samples_per_second=done.samples / seconds if timed else None,
            fetch_stall=min(1.0, done.stall_fetch_seconds / seconds) if timed else None,
            prep_stall=min(1.0, done.stall_prep_seconds / seconds) if timed else None,
            silent_seconds=max(0.0, time.monotonic() - now.at),
        )


def _ratio(counts: list[int]) -> float | None:
    asked = counts[Count.HITS] + counts[Count.MISSES]
    return counts[Count.HITS] / asked if asked else None


def _counts(path: Path) -> list[int] | None:
    """The sums of all processes' counters, None if they cannot be read."""
    try:
        meta = Meta.load(path)
        return Index(path, meta).counters.totals()
    except (StorageError, OSError):
        return None


def _lock_owners() -> dict[tuple[int, int], set[int]] | None:
    """The processes with record locks on each file, by device and inode; None if the kernel does not report them."""
    owners: dict[tuple[int, int], set[int]] = {}
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        parts = line.split()
        if len(parts) > 5 and parts[1] == "POSIX":
            major, minor, number = parts[5].split(":")
            owners.setdefault((os.makedev(int(major, 16), int(minor, 16)), int(number)), set()).add(int(parts[4]))
    return owners
