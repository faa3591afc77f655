"""Samples on their way to the disk of a tier: a thread of each process writes them, so that nobody waits for it."""

from __future__ import annotations

import mmap
import os
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache import SampleCache
from stallfree.pipeline.structure import Structure
from stallfree.platform import OPEN, allocate
from stallfree.stores.buffers import Buffers

Array = npt.NDArray[Any]
Record = tuple[Structure, list[Array]]

MOST = 32 << 20
"""Bytes of samples that one process has on their way, if a batch is not larger."""

WAIT_SECONDS = 0.25
"""Longest wait for samples that a process is just writing, or had on their way when it was killed."""

FAILURES = 3
"""Failures in a row after which a disk is left alone."""

PAUSE = 10.0
"""Seconds for which it is."""

_ALIGN = 64
_GLANCE = 1024
_LOOK_SECONDS = 0.001
_FULL = 0.8
"""A disk is full, and does not fail, if so much of what it has taken is used: the rest is in blocks that lie apart."""

_buffers = Buffers()


class Health:
    """Whether a disk is to be used. After three failures in a row it is left alone for 10 s, which is warned of once.

    Args:
        path: of the folder on the disk.
        what: it does not do when it fails, for the warning.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what
        self._failures, self._until, self._warned = 0, 0.0, False

    @property
    def good(self) -> bool:
        """Whether it is to be used now."""
        return time.monotonic() >= self._until

    def succeeded(self) -> None:
        """It has done what it was asked for."""
        self._failures = 0

    def failed(self) -> None:
        """It has not."""
        self._failures += 1
        if self._failures >= FAILURES and self.good:
            self.rest()
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the disk of {self._path} {self._what} {FAILURES} times in a row: it is left alone for "
                    f"{PAUSE:.0f} s at a time, and samples come from the source meanwhile",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def rest(self) -> None:
        """Leave it alone for a while."""
        self._until = time.monotonic() + PAUSE


@dataclass(frozen=True)
class _Lot:
    """Samples that were handed over together.

    Attributes:
        ids: of the samples, integers.
        records: their bytes, in memory of our own.
        size: of all of them.
    """

    ids: Array
    records: list[Record]
    size: int


class Mover:
    """Writes samples to a disk in the background. Belongs to the process that made it; safe in threads.

    The thread starts with the first sample and is waited for when the interpreter ends, so a worker that ends loses
    nothing. What a killed process had on its way comes from the source again.

    Args:
        memory: the tier above.
        disk: written to.
        moving: a flag per id, of `shared_flags`: whether it is on its way in any process. They are set by whoever hands
            samples over, and taken back when these are written.
        yields: whether a copy on the disk of what memory holds goes when there is no room for what neither holds.
    """

    def __init__(self, memory: SampleCache, disk: SampleCache, moving: Array, *, yields: bool) -> None:
        self.pid = os.getpid()
        self._memory, self._disk, self._moving, self._yields = memory, disk, moving, yields
        self._health = Health(disk.path, "did not take samples")
        self._copies: Array | None = None  # ids that both held, None if nobody has looked
        self._news = 0  # how often there were more
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stallfree-tier")
        self._lots: list[_Lot] = []
        self._bytes = 0  # of lots, those that are being written included
        self._running = False
        self._last: Future[None] | None = None
        self._warned = False

    @property
    def takes(self) -> bool:
        """Whether samples may find a place on the disk."""
        if not self._health.good:
            return False
        return not self._disk.full or (self._yields and (self._copies is None or len(self._copies) > 0))

    def look_again(self) -> None:
        """Memory has taken what lies on the disk: there are copies that may go."""
        self._news += 1
        self._copies = None

    # -- handing over -------------------------------------------------------------------------------------------------

    def add(self, ids: Array, records: Sequence[Record]) -> int:
        """Take samples to be written; how many, the first ones. The bytes are copied: they may change afterwards.

        With nothing on its way all are taken, else as many as 32 MiB leave room for.
        """
        sizes = [sum(-(-array.size // _ALIGN) * _ALIGN for array in arrays) for _, arrays in records]
        count, size = self._reserve(ids, sizes)
        if not count:
            return 0
        try:
            lot = _Lot(ids[:count], _copied(records[:count], size), size)
            with self._lock:
                self._lots.append(lot)
                if not self._running:
                    self._last = self._pool.submit(self._drain)
                    self._running = True
        except (MemoryError, RuntimeError):  # no memory for the copies, or the interpreter is ending
            self._forget(ids[:count], size)
            return 0
        return count

    def _reserve(self, ids: Array, sizes: Sequence[int]) -> tuple[int, int]:
        ends = np.cumsum(sizes)
        with self._lock:
            count = len(ids) if not self._lots and not self._bytes else 0
            count = count or int(np.searchsorted(ends, MOST - self._bytes, "right"))
            size = int(ends[count - 1]) if count else 0
            self._bytes += size
        if count < len(ids) and not self._warned:
            self._warned = True
            warnings.warn(
                f"samples come faster than the disk of {self._disk.path} takes them: some are not stored this time",
                RuntimeWarning,
                stacklevel=4,
            )
        return count, size

    def _forget(self, ids: Array, size: int) -> None:
        with self._lock:
            self._bytes -= size
        self._moving[ids] = 0

    def flush(self) -> None:
        """Come back when all that was taken is written. Raises what the thread met and did not expect."""
        with self._lock:
            future = self._last
        if future is not None:
            future.result()

    def close(self) -> None:
        """Write what is on its way and end the thread. Does nothing in a forked child."""
        if self.pid == os.getpid():
            self._pool.shutdown(wait=True)
            self.flush()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        while True:
            with self._lock:
                lots, self._lots = self._lots, []
                self._running = bool(lots)
            if not lots:
                return
            ids = np.concatenate([lot.ids for lot in lots])
            try:
                self._write(ids, [record for lot in lots for record in lot.records])
            except OSError:
                self._health.failed()
            except BaseException:
                with self._lock:
                    self._running = False
                raise
            finally:
                self._forget(ids, sum(lot.size for lot in lots))

    def _write(self, ids: Array, records: list[Record]) -> None:
        there = self._disk.put_records(ids, records)
        stored, left = bool(there.any()), np.flatnonzero(~there)
        if len(left) and self._yields:
            left = left[~self._memory.resident(ids[left])]
            if self._give_way(len(left)):
                there = self._disk.put_records(ids[left], [records[at] for at in left.tolist()])
                stored, left = stored or bool(there.any()), left[~there]
        if stored or not len(left):
            self._health.succeeded()
        elif not self._disk.full:
            stats = self._disk.stats()
            size = sum(array.size for at in left.tolist() for array in records[at][1])
            if stats.resident_bytes + size > _FULL * stats.used_bytes:
                self._health.rest()
            else:
                self._health.failed()

    def _give_way(self, count: int) -> bool:
        """Drop up to `count` samples that memory holds too; whether there were any."""
        wanted, copies, looked, news = count, self._copies, False, self._news
        while wanted:
            if copies is None or (not len(copies) and not looked):
                copies, looked = self._in_both(np.arange(self._disk.num_ids)), True
            some, rest = np.split(copies, [max(wanted, _GLANCE)])
            some = self._in_both(some)  # it may be long ago that somebody looked
            copies = np.concatenate([some[wanted:], rest])
            if len(some):
                self._disk.drop(some[:wanted])
                wanted -= len(some[:wanted])
            elif not len(copies) and looked:
                break
        self._copies = copies if news == self._news else None
        return wanted < count

    def _in_both(self, ids: Array) -> Array:
        return ids[self._memory.resident(ids) & self._disk.resident(ids)]


def shared_flags(file: Path, count: int) -> Array:
    """`count` flags of a byte each for all processes that give the same `file`, which is made if it is not there.

    Without room for it, this process and its children have them for themselves.
    """
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | OPEN, 0o600)
        try:
            allocate(fd, 0, count)  # writing to a file that has no memory yet could be SIGBUS
            memory = mmap.mmap(fd, count)
        finally:
            os.close(fd)
    except OSError:
        memory = mmap.mmap(-1, count)
    return np.frombuffer(memory, np.uint8)


def settle(moving: Array, ids: Array) -> None:
    """Come back when none of `ids` is on its way any more; after 250 ms they are taken for lost."""
    if not moving[ids].any():
        return
    until = time.monotonic() + WAIT_SECONDS
    while moving[ids].any():
        if time.monotonic() > until:
            moving[ids] = 0
        else:
            time.sleep(_LOOK_SECONDS)


def _copied(records: Sequence[Record], size: int) -> list[Record]:
    """The same records in standing memory of `size` bytes."""
    memory = _buffers.take(size)
    copies, at = [], 0
    for structure, arrays in records:
        parts = []
        for array in arrays:
            part = memory[at : at + array.size]
            part[:] = array
            parts.append(part)
            at += -(-array.size // _ALIGN) * _ALIGN
        copies.append((structure, parts))
    return copies
