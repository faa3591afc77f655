"""Copy-on-write views of the ring's slots, so that no job sees another job's changes to its batch."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stallfree.errors import BatchError
from stallfree.ipc.forked import Owner
from stallfree.loader.ring import slot_bytes
from stallfree.platform import fcntl

Bytes = npt.NDArray[np.uint8]

_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20  # bits of the last byte of a page table entry
_CLEAN = bytes(byte for byte in range(256) if byte & _OF_A_FILE or not byte & (_PRESENT | _SWAPPED))

_PAGEMAP_SCAN, _FILE, _HERE = 0xC0606610, 1 << 2, 1 << 3 | 1 << 4
"""The ioctl of Linux 6.7 that finds pages by category: file-backed, present or swapped."""


_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: makes pages private to the process, as a write does, without a write."""


class Views:
    """Maps the slots in `folder`. A page that is written to stays private to this process until `clean` drops it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[int, mmap.mmap] = {}
        self._owner = Owner()
        self._pages = -1  # descriptor of this process's page table
        self._scans = True  # until the kernel turns out not to support PAGEMAP_SCAN
        self._region = (ctypes.c_uint64 * 3)()  # receives the page that the scan finds
        with contextlib.suppress(OSError):
            self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def view(self, slot: int, size: int) -> Bytes:
        """Return the first `size` bytes of `slot` as a new array, to which the caller ties a lease.

        Raises `OSError` if the slot has been removed, for example after the coordinator ended.
        """
        there = self._maps.get(slot)
        if there is None or len(there) < size:
            fd = os.open(self._folder / f"slot-{slot}", os.O_RDWR | os.O_CLOEXEC)
            try:
                there = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(fd)
            if len(there) < size:
                raise BatchError(f"slot {slot} of the ring has {len(there)} bytes, a batch of {size} was announced")
            self._maps[slot] = there
        return np.frombuffer(there, np.uint8, size)

    @property
    def ring_bytes(self) -> int:
        """Total size of the ring's slots in bytes."""
        return slot_bytes(self._folder)

    def clean(self, slot: int, size: int) -> None:
        """Drop this process's changes to `slot`, so that its next batch is visible. No view of it may exist."""
        there = self._maps.get(slot)
        if there is not None and self._written(there, size):
            self.drop(slot)

    def copy(self, slot: int, size: int) -> bool:
        """Copy the pages of `slot` to this process, so that a new batch does not change the held one.

        Other threads may write to them meanwhile. Returns False if the kernel is too old, or memory is short.
        """
        try:
            self._maps[slot].madvise(_POPULATE_WRITE, 0, size)
        except OSError:
            return False
        return True

    def keep(self, slot: int, size: int) -> None:
        """Do the same with any kernel. Other threads may not write to the pages meanwhile."""
        if not self.copy(slot, size):
            pages = np.frombuffer(self._maps[slot], np.uint8, size)[:: mmap.PAGESIZE]
            pages[:] = pages.copy()

    def drop(self, slot: int) -> None:
        """Drop the private pages of `slot`. Skips the page table lookup, which is slow if many pages are mapped."""
        self._maps[slot].madvise(mmap.MADV_DONTNEED)

    def _written(self, there: mmap.mmap, size: int) -> bool:
        """Return whether any page is private. Dropping clean pages would cost page faults."""
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
        """Do the same with one system call, which stops at the first such page."""
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        room = ctypes.addressof(self._region)
        question = struct.pack("12Q", 96, 0, start, end, 0, room, 1, 1, _FILE, _FILE, _HERE, _FILE)
        return bool(fcntl.ioctl(self._pages, _PAGEMAP_SCAN, bytearray(question)))

    def close(self) -> None:
        """Unmap the slots. Pages of batches that are still held stay mapped until those are freed."""
        self._maps.clear()
        pages, self._pages = self._pages, -1
        if pages >= 0 and self._owner.is_here:
            os.close(pages)
