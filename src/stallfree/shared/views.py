"""A member's view of the ring: slots mapped copy-on-write, so that no job sees what another does to its batch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stallfree.errors import StallfreeError
from stallfree.ipc.fork_guard import Owner
from stallfree.platform import fcntl

Bytes = npt.NDArray[np.uint8]

_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20  # bits of the last byte of a page's entry in the page table
_CLEAN = bytes(byte for byte in range(256) if byte & _OF_A_FILE or not byte & (_PRESENT | _SWAPPED))

_PAGEMAP_SCAN, _FILE, _HERE = 0xC0606610, 1 << 2, 1 << 3 | 1 << 4
"""The question of Linux 6.7 which pages are of some kinds: of a file, present or swapped."""


class Views:
    """The slots in `folder`. A page that was written to is this process's own until `clean` drops it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[int, mmap.mmap] = {}
        self._owner = Owner()
        self._pages = -1  # descriptor of its page table
        self._scans = True  # the kernel looks through it, as far as is known
        self._region = (ctypes.c_uint64 * 3)()  # for the page that it finds
        with contextlib.suppress(OSError):
            self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

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
            self.drop(slot)

    def drop(self, slot: int) -> None:
        """Map `slot` anew when it is next used. To look at a page table is slow where many pages are mapped."""
        self._maps[slot].madvise(mmap.MADV_DONTNEED)

    def _written(self, there: mmap.mmap, size: int) -> bool:
        """Whether a page is this process's own. Dropping all pages for nothing would mean to map them again."""
        if self._pages < 0 or not self._owner.is_here:
            return True
        address = np.frombuffer(there, np.uint8, 1).ctypes.data
        if self._scans:
            with contextlib.suppress(OSError):
                return self._scan(address, address + size)
            self._scans = False
        start, count = address // mmap.PAGESIZE, -(-size // mmap.PAGESIZE)
        found = os.pread(self._pages, 8 * count, 8 * start)
        return len(found) < 8 * count or bool(found[7::8].translate(None, _CLEAN))

    def _scan(self, start: int, end: int) -> bool:
        """The same, in one call that ends at the first such page."""
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        room = ctypes.addressof(self._region)
        question = struct.pack("12Q", 96, 0, start, end, 0, room, 1, 1, _FILE, _FILE, _HERE, _FILE)
        return bool(fcntl.ioctl(self._pages, _PAGEMAP_SCAN, bytearray(question)))

    def close(self) -> None:
        """Let go of the slots. What batches are kept in stays until they are freed."""
        self._maps.clear()
        pages, self._pages = self._pages, -1
        if pages >= 0 and self._owner.is_here:
            os.close(pages)
