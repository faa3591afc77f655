"""What the processes attached to a cache have done, summed without a lock and without losing what dead ones counted.

Each process adds to a row of its own, which it has claimed with a lock that the kernel drops when the process dies. A
row is never emptied: the next process that claims it goes on from there, so the sum of all rows is exact at any
instant.
"""

from __future__ import annotations

import enum
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.ipc.locks import FileLock
from stallfree.platform import at_fork
from stallfree.stats import CacheStats

Array = npt.NDArray[Any]


class Count(enum.IntEnum):
    """What stands where in a row."""

    HITS = 0
    MISSES = 1
    EVICTIONS = 2
    REJECTED = 3
    DAMAGED = 4
    READS = 5
    BYTES = 6
    OTHERS = 7


class Counters:
    """The counts of this process and of all.

    Args:
        rows: one row per process. Row 0 is shared by those that find no other: beyond 255 processes counts may be lost.
    """

    def __init__(self, rows: Array) -> None:
        self._rows = rows
        self._row = rows[0]
        self._lock = threading.Lock()
        self._claimed: tuple[int, FileLock] | None = None  # by which process, with which lock

    def claim(self, file_lock: FileLock) -> None:
        """Take a row for this process."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old one
        self._claimed = os.getpid(), file_lock
        for row in range(1, len(self._rows)):
            if file_lock.claim(row):
                self._row = self._rows[row]
                return
        self._row = self._rows[0]

    def follow_fork(self) -> None:
        """In a forked child, take a row for it."""
        if self._claimed is not None and self._claimed[0] != os.getpid():
            with _after_fork:
                if self._claimed[0] != os.getpid():
                    self.claim(self._claimed[1])

    def add(self, *counts: tuple[Count, int]) -> None:
        """Add to the row of this process."""
        with self._lock:
            for column, number in counts:
                self._row[column] += number

    def totals(self) -> list[int]:
        """The sums over all processes that are or were attached, by `Count`."""
        return [int(n) for n in np.asarray(self._rows).sum(axis=0)]

    def stats(self, **state: int) -> CacheStats:
        """The sums, with `state`: the fields of `CacheStats` that are no counts."""
        sums = self.totals()
        return CacheStats(
            hits=sums[Count.HITS],
            misses=sums[Count.MISSES],
            evictions=sums[Count.EVICTIONS],
            rejected=sums[Count.REJECTED],
            damaged=sums[Count.DAMAGED],
            storage_reads=sums[Count.READS],
            storage_bytes=sums[Count.BYTES],
            **state,
        )


_after_fork = threading.RLock()
at_fork(before=_after_fork.acquire, after_in_parent=_after_fork.release, after_in_child=_after_fork.release)
