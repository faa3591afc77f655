"""Memory over a local disk over the source: the cache of one host in two tiers.

Both tiers are sample caches: memory with the policy of the data set, the disk with "minio", which never evicts. What
memory lacks of a batch is read from the disk by the threads that would fetch it, as soon as a worker is told of the
batch, which is batches before it is used. What is to be stored there is written by a thread in the background
(mover.py).

Where memory never evicts, a sample lies in memory or on the disk, so that the room is that of both. Where it evicts, or
the disk is to be found by the next job, all that is fetched goes to the disk. In the latter case what memory holds too
goes from the disk when there is no room for a sample that neither holds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache import MISS, Aim, Policy, SampleCache
from stallfree.cache.checks import EVERY_STEP
from stallfree.errors import CapacityError, InputError, WaitError
from stallfree.folders import is_address, is_path
from stallfree.pipeline.codec import encode
from stallfree.pipeline.structure import Structure
from stallfree.platform import at_fork
from stallfree.stats import TierStats
from stallfree.stores.mover import Health, Mover, settle, shared_flags
from stallfree.units import format_size, parse_size

Array = npt.NDArray[Any]

_PIECES = 8
"""Parts in which a batch is read from the disk at the same time."""

_PIECE_BYTES = 256 << 10
"""Bytes of such a part, at least."""

_UP_SECONDS = 1.0
"""Pause after memory has had no room for what was read from the disk."""


class DiskTier:
    """A folder on a local disk that takes what memory has no room for.

        tier = DiskTier("/mnt/ssd", capacity="200GiB")
        dataset = CachedDataset(ds, capacity="16GiB", store=tier)

    Samples come from memory, else from the disk, else from the source. Of those on the disk, the ones that the next
    batches need are read ahead. A disk that is full or fails costs hits, and no error.

    Args:
        folder: on a local disk; data sets share it, each under its own name. It is made if it is missing.
        capacity: bytes on the disk for each data set that is given this, index included, as an int or such as "200GiB".
            With a `CachedDataset`, its own capacity is memory.
        persist: keep what lies on the disk when the last process has left, for the next job with the same data.

    Attributes:
        folder: as an absolute path.
        capacity: bytes.
        persist: as given.

    Raises `InputError` for a folder that is no path, `CapacityError` for a capacity that is no size.
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
    ) -> TieredCache:
        """The cache of one data set in memory and in this folder; the arguments are those of `SampleCache`, for memory.

        A name made from policy and capacity is none on the disk: what lies there may be used with others.
        """
        memory = SampleCache(
            num_ids,
            capacity=capacity,
            fingerprint=fingerprint,
            policy=policy,
            name=name,
            persist=persist,
            example=example,
        )
        given = name != f"{fingerprint[:20]}-{memory.policy.name}-{capacity}"
        try:
            disk = SampleCache(
                num_ids,
                capacity=self.capacity,
                fingerprint=fingerprint,
                store=self.folder,
                name=name if given else f"{fingerprint[:20]}-tier",
                persist=self.persist,
                example=example,
            )
        except CapacityError as error:
            memory.close()
            raise CapacityError(f"{self!r}: {error}") from error
        except BaseException:
            memory.close()
            raise
        return TieredCache(memory, disk, persist=self.persist)

    def __repr__(self) -> str:
        return f"DiskTier({str(self.folder)!r}, capacity={format_size(self.capacity)})"


class TieredCache:
    """Two tiers as one cache, as one process sees it. Has the methods of `SampleCache` that loaders use.

    `resident`, `structure`, `complete`, `aim` and `gather` tell of memory only. Samples on the disk are asked for with
    `ask`, piece by piece, so that they are read at the same time.

    Args:
        memory: the upper tier, with any policy.
        disk: the lower one, which never evicts.
        persist: whether the disk is to hold what memory holds too, as far as there is room.
    """

    def __init__(self, memory: SampleCache, disk: SampleCache, *, persist: bool = False) -> None:
        self.memory, self.disk = memory, disk
        self._persist = persist
        self._both = persist or memory.policy.evicts
        self._reading = Health(disk.path, "did not give samples")
        self._flags: Array | None = shared_flags(memory.path / "moving", memory.num_ids)
        self._mover: Mover | None = None
        self._up_after = 0.0
        self._last: TierStats | None = None

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_ids(self) -> int:
        """Number of samples of the data set."""
        return self.memory.num_ids

    @property
    def name(self) -> str:
        """Of the tier in memory."""
        return self.memory.name

    @property
    def policy(self) -> Policy:
        """Of the tier in memory."""
        return self.memory.policy

    @property
    def fingerprint(self) -> str:
        """Says which samples these are."""
        return self.memory.fingerprint

    @property
    def path(self) -> Path:
        """The folder of the tier in memory."""
        return self.memory.path

    @property
    def structure(self) -> Structure | None:
        """The structure that all samples share, or None if there is none."""
        return self.memory.structure

    @property
    def capacity(self) -> int:
        """Bytes that the tier in memory may take."""
        return self.memory.capacity

    @property
    def complete(self) -> bool:
        """Whether all samples are in memory."""
        return self.memory.complete

    @property
    def allow_pickle(self) -> bool:
        """Whether samples that the codec does not know are pickled."""
        return self.memory.allow_pickle

    def resident(self, ids: Any) -> Array:
        """Which of `ids` (integers) are in memory: an array of bool."""
        return self.memory.resident(ids)

    def populate(self) -> None:
        """As `SampleCache.populate`."""
        self.memory.populate()

    def stats(self) -> TierStats:
        """The counts over all processes; after `close`, those of that moment."""
        if self._last is not None:
            return self._last
        memory, disk = self.memory.stats(), self.disk.stats()
        return TierStats(
            **{**memory.__dict__, "damaged": memory.damaged + disk.damaged},
            disk_hits=self.memory.other_hits,
            disk_items=disk.resident_items,
            disk_bytes=disk.resident_bytes,
            disk_capacity_bytes=disk.capacity_bytes,
        )

    def count_fetch(self, reads: int, size: int) -> None:
        """Count `reads` fetches from the source that brought `size` bytes."""
        self.memory.count_fetch(reads, size)

    def set_scores(self, ids: Any, scores: Any) -> None:
        """As `SampleCache.set_scores`: they decide who is in memory."""
        self.memory.set_scores(ids, scores)

    @property
    def uncached_steps(self) -> int:
        """See `SampleCache.uncached_steps`. 0, or `EVERY_STEP`: this kind of cache is then not used any more."""
        return max(self.memory.uncached_steps, self.disk.uncached_steps)

    def uncache_steps(self, count: int) -> bool:
        """Do not use this cache any more, on this host; whether it was used until now. See `SampleCache`."""
        return self.memory.uncache_steps(EVERY_STEP) | self.disk.uncache_steps(EVERY_STEP)

    # -- reading ------------------------------------------------------------------------------------------------------

    def owns(self, id: int) -> bool:
        """Whether this host stores sample `id`: every one."""
        return True

    def here(self, ids: Array) -> Array:
        """Which of `ids` need not be asked for with `ask`: an array of bool."""
        if not self._reading.good:
            return np.ones(len(ids), bool)
        return ~self.disk.resident(ids)

    def away(self, ids: Array) -> list[Array]:
        """Those of `ids` that are on the disk, in pieces that several threads are to read."""
        found = ids[~self.here(ids)]
        if not len(found):
            return []
        stats = self.disk.stats()
        typical = max(1, stats.resident_bytes // max(1, stats.resident_items))
        step = max(-(-len(found) // _PIECES), -(-_PIECE_BYTES // typical))
        return [found[at : at + step] for at in range(0, len(found), step)]

    def ask(self, ids: Array) -> list[Any]:
        """The samples of `ids`, which the disk has; `MISS` for those that it lost. Memory takes what it has room for.

        They may share memory, which lives as long as any of them.
        """
        return self._read(ids)[0]

    def settle(self, ids: Array) -> Array:
        """Which of `ids` neither tier holds, when those on their way to the disk are written: an array of bool."""
        settle(self._moving, ids)
        return ~self.memory.resident(ids) & self.here(ids)

    def get_here(self, ids: Array) -> list[Any]:
        """The samples of `ids` out of either tier, `MISS` for those that neither holds."""
        values: list[Any] = [MISS] * len(ids)
        at = np.flatnonzero(self.memory.resident(ids))
        _fill(values, at, self.memory.get_many(ids[at]))
        left = np.array([position for position, value in enumerate(values) if value is MISS], np.int64)
        if not len(left):
            return values
        self.settle(ids[left])
        found, counted = self._read(ids[left])
        _fill(values, left, found)
        vanished = len(left) - (len(ids) - len(at))  # which are counted as misses already
        self.memory.count_others(0, len(left) - vanished - counted)
        return values

    def get_many(self, ids: Any) -> list[Any]:
        """The samples of `ids`, `MISS` for those that neither tier holds. Raises `InputError` for ids out of range."""
        return self.get_here(self.memory.checked(ids))

    def get(self, id: int) -> Any:
        """One sample, or `MISS`."""
        return self.get_many([id])[0]

    def aim(self, outs: Sequence[Array]) -> Aim:
        """As `SampleCache.aim`."""
        return self.memory.aim(outs)

    def gather(self, ids: Any, into: Aim | Sequence[Array]) -> Array:
        """As `SampleCache.gather`: out of memory."""
        return self.memory.gather(ids, into)

    def _read(self, ids: Array) -> tuple[list[Any], int]:
        """The samples of `ids` that the disk had, those moved up meanwhile too; and how many of them are counted."""
        values: list[Any] = [MISS] * len(ids)
        at = np.flatnonzero(~self.here(ids))
        if len(at):
            with contextlib.suppress(OSError):
                _fill(values, at, self.disk.get_many(ids[at]))
        lost = np.array([position for position, value in enumerate(values) if value is MISS], np.int64)
        got = np.setdiff1d(at, lost, assume_unique=True)
        moved = lost[self.memory.resident(ids[lost])]
        if len(moved):
            _fill(values, moved, self.memory.get_many(ids[moved]))
        if len(got):
            self._reading.succeeded()
            self.memory.count_others(len(got), 0)
            self._move_up(ids[got], [values[position] for position in got.tolist()])
        elif len(at) and not len(moved):
            self._reading.failed()
        return values, len(got) + len(moved)

    def _move_up(self, ids: Array, values: Sequence[Any]) -> None:
        """Have memory take what was read from the disk, as its policy says."""
        if self.memory.policy.evicts:
            self.memory.put_many(ids, values)
            return
        if self.memory.full or time.monotonic() < self._up_after:
            return
        taken = self.memory.put_many(ids, values)
        if not taken.any():
            self._up_after = time.monotonic() + _UP_SECONDS
        elif self._both:
            self._writing().look_again()
        else:
            with contextlib.suppress(WaitError):
                self.disk.drop(ids[taken])

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any]) -> Array:
        """Store `values` as the samples of `ids`; which of them were taken by either tier, as an array of bool.

        What goes to the disk is copied and written in the background; while there is too much of it on its way, it is
        not taken. Raises like `SampleCache.put_many`.
        """
        wanted = self.memory.checked(ids)
        if len(wanted) != len(values):
            raise InputError(f"put_many was given {len(wanted)} ids and {len(values)} values: give one for each")
        mover = self._writing()
        if not mover.takes:
            return self.memory.put_many(wanted, values) | ~self.here(wanted)
        records = [encode(value, allow_pickle=self.allow_pickle) for value in values]
        there = ~self.here(wanted)
        left = wanted[~there]
        self._moving[left] = 1  # before another process can see them come and go in memory
        try:
            taken = self.memory.put_records(wanted, records)
            down = ~there if self._both and not self.disk.full else ~there & ~taken
            at = np.flatnonzero(down)
            at = at[: mover.add(wanted[at], [records[position] for position in at.tolist()])]
            left = np.setdiff1d(left, wanted[at])
        finally:
            self._moving[left] = 0
        taken[at] = True
        return taken | there

    def put(self, id: int, value: Any) -> bool:
        """Store one sample; whether it was taken."""
        return bool(self.put_many([id], [value])[0])

    def flush(self) -> None:
        """Come back when all that this process had on its way to the disk is written."""
        self._writing().flush()

    def drop(self, ids: Any) -> None:
        """Make `ids` absent in both tiers, but for what other processes have on its way to the disk.

        Raises `WaitError` if a lock is not free in 2 s.
        """
        self.flush()
        self.memory.drop(ids)
        self.disk.drop(ids)

    def clear(self) -> None:
        """Drop all records of both tiers, but for what other processes have on its way to the disk.

        Raises `WaitError` if a lock is not free in 2 s.
        """
        self.flush()
        self.memory.clear()
        self.disk.clear()

    @property
    def _moving(self) -> Array:
        if self._flags is None:
            raise InputError(f"the cache {self.name!r} is closed: make a new one")
        return self._flags

    def _writing(self) -> Mover:
        """What writes to the disk in this process."""
        mover = self._mover
        if mover is None or mover.pid != os.getpid():
            with _after_fork:
                mover = self._mover
                if mover is None or mover.pid != os.getpid():
                    yields = self._both and not self.memory.policy.evicts
                    mover = self._mover = Mover(self.memory, self.disk, self._moving, yields=yields)
        return mover

    # -- the life of it -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave both tiers, when what is on its way to the disk is written. May be called twice."""
        if self._last is not None:
            return
        try:
            if self._mover is not None:
                self._mover.close()
        finally:
            self._last = self.stats()
            self._mover = self._flags = None
            self.memory.close()
            self.disk.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.memory, self.disk, self._persist)

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_after_fork = threading.RLock()
at_fork(before=_after_fork.acquire, after_in_parent=_after_fork.release, after_in_child=_after_fork.release)


def _attach(memory: SampleCache, disk: SampleCache, persist: bool) -> TieredCache:
    """How a cache travels to a worker."""
    return TieredCache(memory, disk, persist=persist)


def _fill(values: list[Any], at: Array, found: Sequence[Any]) -> None:
    """Put `found` into `values` at the positions `at`."""
    for position, value in zip(at.tolist(), found, strict=True):
        values[position] = value
