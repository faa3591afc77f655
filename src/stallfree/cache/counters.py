"""Lock-free counters of all processes attached to a cache, which include those of dead processes.

Each process adds to its own row, which it claims with a lock that the kernel releases when the process dies. A row is
never reset: the next process that claims it continues from its values, so the sum of all rows is always exact.
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
    """Indices into a row."""

    HITS = 0
    MISSES = 1
    EVICTIONS = 2
    REJECTED = 3
    DAMAGED = 4
    READS = 5
    BYTES = 6
    TIER_HITS = 7
    TIER_REJECTED = 8


class Counters:
    """The counts of this process, and the totals of all.

    Args:
        rows: one row per process. Processes without a free row share row 0: beyond 255 processes counts may be lost.
    """

    def __init__(self, rows: Array) -> None:
        self._rows = rows
        self._row = rows[0]
        self._lock = threading.Lock()
        self._claimed: tuple[int, FileLock] | None = None  # process id and lock

    def claim(self, file_lock: FileLock) -> None:
        """Claim a row for this process."""
        self._lock = threading.Lock()  # a thread of the parent may have held the old one
        self._claimed = os.getpid(), file_lock
        for row in range(1, len(self._rows)):
            if file_lock.claim(row):
                self._row = self._rows[row]
                return
        self._row = self._rows[0]

    def follow_fork(self) -> None:
        """Claim a new row in a forked child."""
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
        """The sums over all processes, current and past, by `Count`."""
        return [int(n) for n in np.asarray(self._rows).sum(axis=0)]

    def stats(self, **state: int) -> CacheStats:
        """The sums, with `state`: the fields of `CacheStats` that are not counts."""
        sums = self.totals()
        return CacheStats(
            hits=sums[Count.HITS],
            misses=sums[Count.MISSES],
            evictions=sums[Count.EVICTIONS],
            rejected=sums[Count.REJECTED],
            damaged=sums[Count.DAMAGED],
            storage_reads=sums[Count.READS],
            storage_bytes=sums[Count.BYTES],
            tier_hits=sums[Count.TIER_HITS],
            tier_rejected=sums[Count.TIER_REJECTED],
            **state,
        )


_after_fork = threading.RLock()
at_fork(before=_after_fork.acquire, after_in_parent=_after_fork.release, after_in_child=_after_fork.release)
