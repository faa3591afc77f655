"""Which files lie in memory, and putting them out of it. Neither needs root."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence

from stallfree.platform import OPEN, shares_memory


def resident_share(paths: Iterable[str]) -> float | None:
    """The share of the bytes of these files that the operating system holds in memory (`mincore`), by pages.

    None if no file has bytes or none can be looked at, as nowhere but on Linux.
    """
    if not shares_memory():
        return None
    there = pages = 0
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
            found = _pages(file.fileno(), os.fstat(file.fileno()).st_size)
            there += found[0]
            pages += found[1]
    return there / pages if pages else None


def _pages(fd: int, size: int) -> tuple[int, int]:
    """Pages of a file that are in memory, and all of them."""
    if size == 0:
        return 0, 0
    count = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * count)()
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        start = ctypes.c_char.from_buffer(memory)
        try:
            failed = ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), vector
            )
        finally:
            del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(value & 1 for value in vector), count


def put_out(paths: Sequence[str]) -> None:
    """Ask the operating system to forget what it holds of these files (`posix_fadvise`, DONTNEED).

    Pages that are not written back yet are, first. It is a wish: see `resident_share`, before and after. Files that
    cannot be opened are left out, and so are all where there is no such call.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | OPEN)
            try:
                with contextlib.suppress(OSError):
                    os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def read_file(path: str) -> None:
    """Read a file from beginning to end, if it can be read."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
