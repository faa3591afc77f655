"""A local disk as a tier below memory: `DiskTier` for users, `DiskCache` for one data set."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache import MISS, Policy, SampleCache
from stallfree.cache.sample_cache import EVERY_STEP
from stallfree.cache.tiers.tier_stack import LowerTier
from stallfree.cache.tiers.tiered import TieredCache
from stallfree.cache.tiers.write_behind import Record, WriteBehind
from stallfree.errors import CapacityError, InputError, text_of
from stallfree.ipc.folders import is_address, is_path
from stallfree.ipc.shared_array import shared_array
from stallfree.stats import CacheStats
from stallfree.units import format_size, parse_size

Array = npt.NDArray[Any]

FAILURES = 3
"""Consecutive failures after which the disk is paused."""

PAUSE = 10.0
"""Seconds of the pause."""

_PIECES = 8
"""Parts of a batch that are read concurrently from the disk."""

_PIECE_BYTES = 256 << 10
"""Minimum bytes of such a part."""

_FULL = 0.8
"""Used share above which a disk that stores nothing counts as full: its free blocks are fragmented."""


class DiskTier:
    """A folder on a local disk for samples that do not fit into memory.

    Samples are read from memory, else from the disk, else from the source. Samples of the next batches are read ahead
    from the disk. A full or failing disk reduces hits, but raises no error.

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

    def __init__(self, folder: str | Path, *, capacity: int | str, persist: bool = False) -> None:
        if not is_path(folder) or str(folder) == "memory" or is_address(folder):
            raise InputError(f"DiskTier(folder={folder!r:.80}): give the path of a folder on a local disk")
        self.folder = Path(folder).expanduser().absolute()
        self.capacity = parse_size(capacity, "capacity")
        self.persist = bool(persist)

    def attach(
        self,
        num_ids: int,
        *,
        capacity: int,
        fingerprint: str,
        policy: str | Policy,
        name: str,
        persist: bool = False,
        example: Any = MISS,
        below: LowerTier | None = None,
    ) -> TieredCache:
        """The cache of one data set in memory and in this folder.

        The tier `below` is its last one, if given.

        The other arguments are those of `SampleCache`, for memory. A `name` derived from policy and capacity is not
        used on the disk, whose records are valid for other policies and capacities too. The cache closes `below`; if
        this raises, the caller must.
        """
        shared: dict[str, Any] = {
            "fingerprint": fingerprint,
            "example": example,
            "allow_pickle": below is None or below.allow_pickle,
        }
        memory = SampleCache(num_ids, capacity=capacity, policy=policy, name=name, persist=persist, **shared)
        if name == f"{fingerprint[:20]}-{memory.policy.name}-{capacity}":
            name = f"{fingerprint[:20]}-tier"
        with contextlib.ExitStack() as undo:
            undo.callback(memory.close)
            try:
                disk = SampleCache(
                    num_ids, capacity=self.capacity, store=self.folder, name=name, persist=self.persist, **shared
                )
            except CapacityError as error:
                raise CapacityError(f"{self!r}: {text_of(error)}", page=error.page) from error
            undo.pop_all()
        lower = DiskCache(disk, memory, persist=self.persist)
        return TieredCache(memory, lower, *([] if below is None else [below]))

    def __repr__(self) -> str:
        return f"DiskTier({str(self.folder)!r}, capacity={format_size(self.capacity)})"


class DiskCache:
    """The samples of one data set on a local disk: a `LowerTier`. Writes are in the background.

    Args:
        records: the sample cache on the disk, which never evicts.
        upper: the tier in memory above.
        persist: whether the disk also receives the samples in memory, if the disk has space.
    """

    def __init__(self, records: SampleCache, upper: SampleCache, *, persist: bool = False) -> None:
        self.records, self.allow_pickle = records, records.allow_pickle
        self._upper, self._persist = upper, persist
        self._both = persist or upper.policy.evicts
        self._typical = 0  # bytes per record
        self._reading = Health(records.path, "failed to read samples")
        self._writer = _DiskWriter(records, upper, drops_copies=self._both and not upper.policy.evicts)
        flags = shared_array(upper.path / "moving", np.uint8, records.num_ids)
        self._writes = WriteBehind(self._writer.write, flags, target=f"the disk of {records.path}")

    @property
    def inclusive(self) -> bool:
        """See `LowerTier`."""
        return self._both and not self.records.full

    @property
    def accepts(self) -> bool:
        """See `LowerTier`."""
        return self._writer.accepts

    def known(self, ids: Array) -> Array:
        """Which of `ids` are on the disk: an array of bool. All False while the disk is not used."""
        there = self.records.resident(ids)
        return there if self._reading.good else np.zeros_like(there)

    def parts(self, ids: Array) -> list[Array]:
        """Those of `ids` that are on the disk, in parts that threads read concurrently."""
        found = ids[self.known(ids)]
        if not len(found):
            return []
        if not self._typical:
            stats = self.records.stats()
            self._typical = stats.resident_bytes // max(1, stats.resident_items)
        step = max(-(-len(found) // _PIECES), -(-_PIECE_BYTES // max(1, self._typical)))
        return [found[at : at + step] for at in range(0, len(found), step)]

    def read(self, ids: Array) -> list[Any]:
        """The samples of `ids`, `MISS` for absent or unreadable ones."""
        values: list[Any] = [MISS] * len(ids)
        with contextlib.suppress(OSError):
            values = self.records.get_many(ids)
        if any(value is not MISS for value in values):
            self._reading.succeeded()
        elif not self._upper.resident(ids).any():  # else another process has promoted them
            self._reading.failed()
        return values

    def put_records(self, ids: Array, records: Sequence[Record]) -> Array:
        """Queue `records` for writing; return which were accepted or are stored, as an array of bool."""
        there = self.records.resident(ids)
        at = np.flatnonzero(~there)
        there[at[: self._writes.add(ids[at], [records[position] for position in at.tolist()])]] = True
        return there

    def drain(self, ids: Array) -> None:
        """See `LowerTier`."""
        self._writes.drain(ids)

    def promoted(self, ids: Array) -> None:
        """Drop `ids`, which memory now holds, unless the disk receives all samples."""
        if self._both:
            self._writer.note_promoted()
        else:
            self.records.drop(ids)

    def drop(self, ids: Array) -> None:
        """Remove the records of `ids`. Raises `WaitError` if the lock is not free in 2 s."""
        self.records.drop(ids)

    def flush(self) -> None:
        """See `LowerTier`."""
        self._writes.flush()

    def stats(self) -> CacheStats:
        """The counts over all processes."""
        return self.records.stats()

    @property
    def uncached_steps(self) -> int:
        """See `LowerTier`."""
        return self.records.uncached_steps

    def uncache_steps(self, count: int) -> bool:
        """See `LowerTier`."""
        return self.records.uncache_steps(EVERY_STEP)

    def close(self) -> None:
        """Drain the queue, and detach from the disk."""
        try:
            self._writes.close()
        finally:
            self.records.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(DiskCache, self.records, self._upper, persist=self._persist), ()


class _DiskWriter:
    """Writes records to a disk, in the thread of its `WriteBehind`.

    Args:
        disk: written to.
        upper: the tier in memory above.
        drops_copies: whether records that memory also holds are dropped to free space for other records.
    """

    def __init__(self, disk: SampleCache, upper: SampleCache, *, drops_copies: bool) -> None:
        self._disk, self._upper, self._drops_copies = disk, upper, drops_copies
        self._health = Health(disk.path, "failed to store samples")
        self._copies = True  # whether memory may also hold some of its records

    @property
    def accepts(self) -> bool:
        """Whether the disk can currently store samples."""
        if not self._health.good:
            return False
        return not self._disk.full or (self._drops_copies and self._copies)

    def note_promoted(self) -> None:
        """Record that memory now holds samples of the disk, whose records may be dropped."""
        self._copies = True

    def write(self, ids: Array, records: list[Record]) -> None:
        """Store as many records as fit."""
        try:
            self._store(ids, records)
        except OSError:
            self._health.failed()

    def _store(self, ids: Array, records: list[Record]) -> None:
        there = self._disk.put_records(ids, records)
        stored, left = bool(there.any()), np.flatnonzero(~there)
        if len(left) and self._drops_copies:
            left = left[~self._upper.resident(ids[left])]
            if len(left) and self._make_room(len(left)):
                there = self._disk.put_records(ids[left], [records[at] for at in left.tolist()])
                stored, left = stored or bool(there.any()), left[~there]
        if stored or not len(left):
            self._health.succeeded()
        elif not self._disk.full:
            stats = self._disk.stats()
            size = sum(array.size for at in left.tolist() for array in records[at][1])
            if stats.resident_bytes + size > _FULL * stats.used_bytes:
                self._health.pause()
            else:
                self._health.failed()

    def _make_room(self, count: int) -> bool:
        """Drop up to `count` records that memory also holds. Returns whether there were any."""
        self._copies = False  # before the check: memory may receive samples concurrently
        ids = np.arange(self._disk.num_ids)
        copies = np.flatnonzero(self._upper.resident(ids) & self._disk.resident(ids))
        self._disk.drop(copies[:count])
        self._copies |= len(copies) > count
        return len(copies) > 0


class Health:
    """Pauses the use of a disk for 10 s after 3 consecutive failures, with a warning the first time.

    Args:
        path: of the folder on the disk.
        what: the failure, for the warning: "failed to read samples".
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what
        self._failures, self._until, self._warned = 0, 0.0, False

    @property
    def good(self) -> bool:
        """Whether the disk is currently used."""
        return time.monotonic() >= self._until

    def succeeded(self) -> None:
        """Count a success, which resets the failures."""
        self._failures = 0

    def failed(self) -> None:
        """Count a failure."""
        self._failures += 1
        if self._failures >= FAILURES and self.good:
            self.pause()
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the disk of {self._path} {self._what} {FAILURES} times in a row: its use is paused for "
                    f"{PAUSE:.0f} s at a time, and samples are read from the source meanwhile",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def pause(self) -> None:
        """Pause the use of the disk."""
        self._until = time.monotonic() + PAUSE
