"""What the training process and the processes that pack and read packages tell each other about the samples."""

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
from stallfree.errors import InputError, StorageError
from stallfree.folders import SharedFolder

Array = npt.NDArray[Any]

LOW = 1
"""Flag: an L-sample."""

PENDING = 2
"""Flag: in this epoch's plan, and not served yet."""

MISSED = 4
"""Flag: asked for, not resident, and deferred."""

PACK, READ = 0, 1
"""Rows of counts: of the process that packs, of the process that reads packages."""


class Field(enum.IntEnum):
    """What stands where in `Board.fields`."""

    NUM_IDS = 0
    EPOCH = 1  # of the flags, -1 before the first
    REGION = 2  # L-samples that are pending and may be resident through packages


_FIELDS = 8
_HEAD = 8 * (_FIELDS + 2 * len(Count))


class Board:
    """Attach to the board `name`, making it if it is not there. The last process out removes it.

    There are no locks: every array has one writer, and every entry is written at once. The training process writes
    flags and fields. When a sample has been served it takes `PENDING` away first and lowers the sample's score in the
    cache after that; so the process that reads packages can tell when it was late.

    Args:
        name: of a folder in shared memory; a new one if None.
        num_ids: number of samples.

    Attributes:
        name: to attach to it.
        flags: uint8 per id, sums of `LOW`, `PENDING` and `MISSED`.
        fields: int64 per `Field`.
        counts: int64, a row for `PACK` and one for `READ`, each written by that process; an entry per `Count`.

    Picklable to any process; there it only attaches. Raises `InputError` when the board has another number of samples,
    and `StorageError` when there is no shared memory left, or when an unpickled board is gone.
    """

    flags: npt.NDArray[np.uint8]
    fields: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    def __init__(self, name: str | None, num_ids: int) -> None:
        def make(folder: Path) -> None:
            fd = os.open(folder / "board", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _HEAD + num_ids)
                os.pwrite(fd, np.array([num_ids, -1, 0], np.int64).tobytes(), 0)
            finally:
                os.close(fd)

        if num_ids < 1:
            raise InputError(f"num_ids={num_ids}: a board needs a data set of at least one sample")
        self._attach(SharedFolder(name or f"board-{secrets.token_hex(8)}", initialize=make), num_ids)

    def _attach(self, folder: SharedFolder, num_ids: int) -> None:
        self.name, self._root = folder.path.name, folder.root
        self._leave = weakref.finalize(self, folder.close)
        try:
            with open(folder.path / "board", "r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
            there = int(np.frombuffer(memory, np.int64, 1)[0])
            if there != num_ids:
                raise InputError(
                    f"the board {self.name!r} is for {there} samples, not for {num_ids}: give another name"
                )
            self.fields = np.frombuffer(memory, np.int64, _FIELDS)
            self.counts = np.frombuffer(memory, np.int64, 2 * len(Count), 8 * _FIELDS).reshape(2, len(Count))
            self.flags = np.frombuffer(memory, np.uint8, num_ids, _HEAD)
        except BaseException:
            self._leave()
            raise

    @property
    def num_ids(self) -> int:
        """Number of samples."""
        return int(self.fields[Field.NUM_IDS])

    def stats(self) -> PackageStats:
        """What both processes have done so far; after `close`, until then."""
        return package_stats(self.counts)

    def close(self) -> None:
        """Leave the board. Flags are gone then, fields and counts stay as they are. May be called twice."""
        self.fields, self.counts = self.fields.copy(), self.counts.copy()
        self.flags = np.empty(0, np.uint8)  # the memory goes with the last array on it
        self._leave()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self._root, self.name, self.num_ids)


def _attach(root: Path, name: str, num_ids: int) -> Board:
    def gone(folder: Path) -> None:
        raise StorageError(f"the board {name!r} in {root} is gone: whoever made it has closed it. Make it anew")

    board = Board.__new__(Board)
    board._attach(SharedFolder(name, root=root, initialize=gone), num_ids)
    return board
