"""Counters shared by forked and spawned processes, wherever there is a writable folder."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.errors import storage_full
from stallfree.ipc.folders import default_root, prepare_root
from stallfree.platform import allocate, shares_memory

Counts = npt.NDArray[np.int32]


class SharedCounts:
    """`length` counters, initially 0. A process that receives them when it is started shares them; others get a copy.

    torch's `share_memory_` would do the same, but requires a writable `/dev/shm`.

    Attributes:
        array: the counters, int32.

    Raises `StorageError` if there is no room for them.
    """

    def __init__(self, length: int) -> None:
        if not shares_memory():
            self._use(np.zeros(length, np.int32), None)
            return
        root, size = prepare_root(default_root()), 4 * length
        try:
            with tempfile.TemporaryFile(dir=root) as file:
                allocate(file.fileno(), 0, size)
                fd = os.dup(file.fileno())
        except OSError as error:
            raise storage_full(
                f"no memory is left in {root} for {size} bytes of shared counts ({error}): a larger /dev/shm helps"
            ) from error
        self._map(fd, length)

    def _map(self, fd: int, length: int) -> None:
        self._end = weakref.finalize(self, os.close, fd)
        self._use(np.frombuffer(mmap.mmap(fd, 4 * length), np.int32), fd)

    def _use(self, array: Counts, fd: int | None) -> None:
        self.array, self._fd = array, fd

    def close(self) -> None:
        """Unmap the counters; a single private 0 remains."""
        if self._fd is not None:
            self._end()
        self._use(np.zeros(1, np.int32), None)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._fd is None or get_spawning_popen() is None:
            return _copy, (self.array.copy(),)
        return _attach, (reduction.DupFd(self._fd), len(self.array))


def _copy(array: Counts) -> SharedCounts:
    counts = SharedCounts.__new__(SharedCounts)
    counts._use(array, None)
    return counts


def _attach(sent: Any, length: int) -> SharedCounts:
    counts = SharedCounts.__new__(SharedCounts)
    counts._map(sent.detach(), length)
    return counts
