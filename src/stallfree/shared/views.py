"""A member's view of the ring: slots mapped copy-on-write, so that no job sees what another does to its batch."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stallfree.errors import StallfreeError

Bytes = npt.NDArray[np.uint8]

_PRESENT, _SWAPPED, _SHARED = (np.uint64(1 << bit) for bit in (63, 62, 61))


class Views:
    """The slots in `folder`. A page that was written to is this process's own until `clean` drops it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[int, mmap.mmap] = {}
        self._pages: tuple[int, int] | None = None  # process, descriptor of its page table
        with contextlib.suppress(OSError):
            self._pages = os.getpid(), os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def view(self, slot: int, size: int) -> Bytes:
        """The first `size` bytes of `slot`. A new array at each call: leases hang on it.

        Raises `OSError` when the slot is gone, as the process that filled it may be.
        """
        there = self._maps.get(slot)
        if there is None or len(there) < size:
            fd = os.open(self._folder / f"slot-{slot}", os.O_RDWR | os.O_CLOEXEC)
            try:
                there = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(fd)
            if len(there) < size:
                raise StallfreeError(f"slot {slot} of the ring has {len(there)} bytes, a batch of {size} was announced")
            self._maps[slot] = there
        return np.frombuffer(there, np.uint8, size)

    @property
    def ring_bytes(self) -> int:
        """Bytes of all slots of the ring."""
        with contextlib.suppress(OSError):
            return sum(entry.stat().st_size for entry in os.scandir(self._folder) if entry.name.startswith("slot-"))
        return 0

    def clean(self, slot: int, size: int) -> None:
        """Forget what was written to `slot` here, so that its next batch is seen. Only while nothing refers to it."""
        there = self._maps.get(slot)
        if there is not None and self._written(there, size):
            there.madvise(mmap.MADV_DONTNEED)

    def _written(self, there: mmap.mmap, size: int) -> bool:
        """Whether a page is this process's own. Dropping all pages for nothing would mean to map them again."""
        if self._pages is None or self._pages[0] != os.getpid():
            return True
        start = np.frombuffer(there, np.uint8, 1).ctypes.data // mmap.PAGESIZE
        count = -(-size // mmap.PAGESIZE)
        told = os.pread(self._pages[1], 8 * count, 8 * start)
        if len(told) < 8 * count:
            return True
        bits = np.frombuffer(told, np.uint64)
        return bool(((bits & (_PRESENT | _SWAPPED) != 0) & (bits & _SHARED == 0)).any())

    def close(self) -> None:
        """Let go of the slots. What batches are kept in stays until they are freed."""
        self._maps.clear()
        pages, self._pages = self._pages, None
        if pages is not None and pages[0] == os.getpid():
            os.close(pages[1])
