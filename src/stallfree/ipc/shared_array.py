"""Arrays in memory that processes of a host share: by a file, or by starting one another."""

import mmap
import os
import weakref
from multiprocessing import context, reduction
from pathlib import Path
from typing import Any

import numpy as np

from stallfree.platform import OPEN, allocate, need_linux


def shared_array(file: Path, dtype: Any, count: int, *, required: bool = False) -> np.ndarray[Any, np.dtype[Any]]:
    """Map `file` as an array of `count` items of `dtype`, initially 0, shared by all processes that map it.

    Without room for the file, this process shares them only with its forked children; with `required`, it raises
    `OSError`.
    """
    size = count * np.dtype(dtype).itemsize
    try:
        with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | OPEN, 0o600), "r+b") as opened:
            if os.fstat(opened.fileno()).st_size < size:
                allocate(opened.fileno(), 0, size)  # writing to an unallocated part could raise SIGBUS
            memory = mmap.mmap(opened.fileno(), size)
    except OSError:
        if required:
            raise
        memory = mmap.mmap(-1, size)
    return np.frombuffer(memory, dtype)


class SharedCounts:
    """`length` counters, initially 0. A process that receives them when it is started shares them; others get a copy.

    torch's `share_memory_` and `multiprocessing` would do the same, but require a writable `/dev/shm`.

    Attributes:
        array: the counters, int32.

    Raises `PlatformError` on systems other than Linux.
    """

    def __init__(self, length: int) -> None:
        need_linux("memory that processes share", "leave the cache out")
        fd = os.memfd_create("stallfree-counts")
        os.ftruncate(fd, 4 * length)
        self._use(fd)

    def _use(self, fd: int) -> None:
        self._fd, self._close = fd, weakref.finalize(self, os.close, fd)
        self.array: np.ndarray[Any, np.dtype[np.int32]] = np.frombuffer(mmap.mmap(fd, 0), np.int32)

    def close(self) -> None:
        """Release the memory; a single private 0 remains."""
        self._close()
        self.array = np.zeros(1, np.int32)

    def __reduce__(self) -> tuple[Any, ...]:
        shared = self._close.alive and context.get_spawning_popen() is not None
        return _counts, (reduction.DupFd(self._fd) if shared else self.array.copy(),)


def _counts(sent: Any) -> SharedCounts:
    if isinstance(sent, np.ndarray):
        counts = SharedCounts(len(sent))
        counts.array[:] = sent
    else:
        counts = SharedCounts.__new__(SharedCounts)
        counts._use(sent.detach())
    return counts
