"""Arrays in memory that processes of a host share: by a file, or by starting one another."""

from __future__ import annotations

import ctypes
import mmap
import os
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.platform import OPEN, allocate


def shared_array(file: Path, dtype: Any, count: int, *, required: bool = False) -> npt.NDArray[Any]:
    """Map `file` as an array of `count` items of `dtype`, initially 0, shared by all processes that map it.

    Without room for the file, this process shares them only with its forked children; with `required`, it raises
    `OSError`.
    """
    size = count * np.dtype(dtype).itemsize
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | OPEN, 0o600)
        try:
            if os.fstat(fd).st_size < size:
                allocate(fd, 0, size)  # writing to an unallocated part could raise SIGBUS
            memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except OSError:
        if required:
            raise
        memory = mmap.mmap(-1, size)
    return np.frombuffer(memory, dtype)


class SharedCounts:
    """`length` counters, initially 0. A process that receives them when it is started shares them; others get a copy.

    Attributes:
        array: the counters, int32.
    """

    def __init__(self, length: int) -> None:
        self._use(RawArray(ctypes.c_int32, length))

    def _use(self, memory: Any) -> None:
        self._memory, self.array = memory, np.frombuffer(memory, np.int32)

    def close(self) -> None:
        """Release the memory; a single private 0 remains."""
        self._use(bytearray(4))

    def __reduce__(self) -> tuple[Any, ...]:
        return _counts, (bytes(self._memory) if get_spawning_popen() is None else self._memory,)


def _counts(memory: Any) -> SharedCounts:
    counts = SharedCounts.__new__(SharedCounts)
    counts._use(bytearray(memory) if isinstance(memory, bytes) else memory)
    return counts
