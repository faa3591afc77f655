"""Shared memory flags between the training process and the two packaging processes."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from stallfree.cache.packages import Count, PackageStats, package_stats
from stallfree.ipc.shared_counts import SharedCounts

LOW = 1
"""Flag: an L-sample."""

PENDING = 2
"""Flag: in this epoch's plan, and not served yet."""

MISSED = 4
"""Flag: requested, not resident, and deferred."""

PACK, READ = 0, 1
"""Rows of counts: of the process that packs, of the process that reads packages."""


class Field(enum.IntEnum):
    """Indices into `SharedFlags.fields`."""

    EPOCH = 0  # of the flags, -1 before the first
    REGION = 1  # maximum of pending L-samples that packages may make resident


_NUMBERS = len(Field) + 2 * len(Count)
"""Number of 8-byte values before the flags: the fields, and two rows of counts."""


class SharedFlags:
    """Arrays in shared memory. Processes that receive this object at their start share them.

    There are no locks: every array has one writer, and every entry is written atomically. The training process writes
    flags and fields. After serving a sample it first clears `PENDING` and then lowers the sample's score in the cache,
    so that the process that reads packages can detect that it was late.

    Args:
        num_ids: number of samples.

    Attributes:
        flags: uint8 per id, sums of `LOW`, `PENDING` and `MISSED`.
        fields: int64 per `Field`.
        counts: int64, one row each for `PACK` and `READ`, written by that process; an entry per `Count`.

    Raises `StorageError` if there is no shared memory left.
    """

    flags: npt.NDArray[np.uint8]
    fields: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    def __init__(self, num_ids: int) -> None:
        self.__setstate__((num_ids, SharedCounts(2 * _NUMBERS + -(-num_ids // 4))))
        self.fields[Field.EPOCH] = -1

    def stats(self) -> PackageStats:
        """The counts of both processes; after `close`, those at that time."""
        return package_stats(self.counts)

    def close(self) -> None:
        """Release the flags; fields and counts keep their values. Idempotent."""
        self.fields, self.counts = self.fields.copy(), self.counts.copy()
        self.flags = np.empty(0, np.uint8)  # the memory is freed with its last array
        self._memory.close()

    def __getstate__(self) -> tuple[int, SharedCounts]:
        return self._num_ids, self._memory

    def __setstate__(self, state: tuple[int, SharedCounts]) -> None:
        self._num_ids, self._memory = state
        numbers = self._memory.array[: 2 * _NUMBERS].view(np.int64)
        self.fields = numbers[: len(Field)]
        self.counts = numbers[len(Field) :].reshape(2, len(Count))
        self.flags = self._memory.array[2 * _NUMBERS :].view(np.uint8)[: self._num_ids]
