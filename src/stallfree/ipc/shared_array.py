"""Arrays in shared memory of the processes of a host."""

from __future__ import annotations

import mmap
import os
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
