"""Page cache residency of files, and their removal from it, without root."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence

from stallfree.platform import OPEN, shares_memory


def resident_share(paths: Iterable[str]) -> float | None:
    """The share of the pages of these files in the page cache (`mincore`).

    None if all files are empty or none can be checked; always None on systems other than Linux.
    """
    if not shares_memory():
        return None
    resident = pages = 0
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
            counts = _pages(file.fileno(), os.fstat(file.fileno()).st_size)
            resident, pages = resident + counts[0], pages + counts[1]
    return resident / pages if pages else None


def _pages(fd: int, size: int) -> tuple[int, int]:
    """The number of pages of a file in memory, and of all its pages."""
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


def drop_pages(paths: Sequence[str]) -> None:
    """Advise the operating system to drop these files from the page cache (`posix_fadvise`, DONTNEED).

    Dirty pages are written back first. The call is only advisory: check `resident_share` before and after. Files that
    cannot be opened are skipped, and so are all files on systems without this call.
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
    """Read a file, if it is readable."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
