"""What the training process and the two processes that pack and read packages share about the samples."""

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
    """Places in `SharedFlags.fields`."""

    EPOCH = 0  # of the flags, -1 before the first
    REGION = 1  # L-samples that are pending and may be resident through packages


_NUMBERS = len(Field) + 2 * len(Count)
"""Before the flags, 8 bytes each: the fields, and two rows of counts."""


class SharedFlags:
    """Arrays in shared memory. Processes that get this object when they are started share them.

    There are no locks: every array has one writer, and every entry is written at once. The training process writes
    flags and fields. When a sample has been served it takes `PENDING` away first and lowers the sample's score in the
    cache after that; so the process that reads packages can see when it was late.

    Args:
        num_ids: number of samples.

    Attributes:
        flags: uint8 per id, sums of `LOW`, `PENDING` and `MISSED`.
        fields: int64 per `Field`.
        counts: int64, a row for `PACK` and one for `READ`, each written by that process; an entry per `Count`.

    Raises `StorageError` if there is no shared memory left.
    """

    flags: npt.NDArray[np.uint8]
    fields: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    def __init__(self, num_ids: int) -> None:
        self.__setstate__((num_ids, SharedCounts(2 * _NUMBERS + -(-num_ids // 4))))
        self.fields[Field.EPOCH] = -1

    def stats(self) -> PackageStats:
        """What both processes have done so far; after `close`, until then."""
        return package_stats(self.counts)

    def close(self) -> None:
        """Leave. Flags are gone then, fields and counts stay as they are. May be called twice."""
        self.fields, self.counts = self.fields.copy(), self.counts.copy()
        self.flags = np.empty(0, np.uint8)  # the memory goes with the last array on it
        self._memory.close()

    def __getstate__(self) -> tuple[int, SharedCounts]:
        return self._num_ids, self._memory

    def __setstate__(self, state: tuple[int, SharedCounts]) -> None:
        self._num_ids, self._memory = state
        numbers = self._memory.array[: 2 * _NUMBERS].view(np.int64)
        self.fields = numbers[: len(Field)]
        self.counts = numbers[len(Field) :].reshape(2, len(Count))
        self.flags = self._memory.array[2 * _NUMBERS :].view(np.uint8)[: self._num_ids]
