"""What the training process and the two processes that pack and read packages share about the samples."""

from __future__ import annotations

import enum
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.packages import Count, PackageStats, package_stats
from stallfree.errors import StorageError
from stallfree.ipc.folders import SharedFolder

Array = npt.NDArray[Any]

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

    NUM_IDS = 0
    EPOCH = 1  # of the flags, -1 before the first
    REGION = 2  # L-samples that are pending and may be resident through packages


_FIELDS = 8
_HEAD = 8 * (_FIELDS + 2 * len(Count))


class SharedFlags:
    """Arrays in shared memory, removed when the last process has closed them.

    There are no locks: every array has one writer, and every entry is written at once. The training process writes
    flags and fields. When a sample has been served it takes `PENDING` away first and lowers the sample's score in the
    cache after that; so the process that reads packages can see when it was late.

    Args:
        num_ids: number of samples.

    Attributes:
        flags: uint8 per id, sums of `LOW`, `PENDING` and `MISSED`.
        fields: int64 per `Field`.
        counts: int64, a row for `PACK` and one for `READ`, each written by that process; an entry per `Count`.

    Picklable to any process; there it attaches to the same memory. Raises `StorageError` if there is no shared memory
    left, or if an unpickled object is gone.
    """

    flags: npt.NDArray[np.uint8]
    fields: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    def __init__(self, num_ids: int) -> None:
        def make(folder: Path) -> None:
            fd = os.open(folder / "flags", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _HEAD + num_ids)
                os.pwrite(fd, np.array([num_ids, -1, 0], np.int64).tobytes(), 0)
            finally:
                os.close(fd)

        self._attach(SharedFolder(f"flags-{secrets.token_hex(8)}", initialize=make))

    def _attach(self, folder: SharedFolder) -> None:
        self._name, self._root = folder.path.name, folder.root
        self._leave = weakref.finalize(self, folder.close)
        try:
            with open(folder.path / "flags", "r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except BaseException:
            self._leave()
            raise
        self.fields = np.frombuffer(memory, np.int64, _FIELDS)
        self.counts = np.frombuffer(memory, np.int64, 2 * len(Count), 8 * _FIELDS).reshape(2, len(Count))
        self.flags = np.frombuffer(memory, np.uint8, int(self.fields[Field.NUM_IDS]), _HEAD)

    def stats(self) -> PackageStats:
        """What both processes have done so far; after `close`, until then."""
        return package_stats(self.counts)

    def close(self) -> None:
        """Leave. Flags are gone then, fields and counts stay as they are. May be called twice."""
        self.fields, self.counts = self.fields.copy(), self.counts.copy()
        self.flags = np.empty(0, np.uint8)  # the memory goes with the last array on it
        self._leave()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._root, self._name)


def _attached(root: Path, name: str) -> SharedFlags:
    def gone(folder: Path) -> None:
        raise StorageError(f"the shared memory {name!r} in {root} is gone: its process has closed it. Make it anew")

    shared = SharedFlags.__new__(SharedFlags)
    shared._attach(SharedFolder(name, root=root, initialize=gone))
    return shared
