"""Storage of record bytes: blocks of one size in one sparse file.

In memory the file is mapped, and a batch is read by one gather per leaf. On a disk the file is read and written by
system calls: a bad sector or a truncated file then raises an error instead of SIGBUS. A block is accessed only after
`posix_fallocate` has allocated it, so a full file system means a smaller cache, never SIGBUS.
"""

import contextlib
import ctypes
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stallfree.cache.layout import Array, DamagedError, Meta
from stallfree.platform import OPEN, allocate

SEGMENT = 64 << 20
"""Bytes per allocation, or one block if that is larger."""

_MOST_PARTS = 1024  # buffers per read call
_POPULATE_READ = 22
_POPULATE_STEP = 32 << 20


class Arena:
    """The blocks of a cache: `meta.num_blocks` of `meta.block` bytes (a multiple of 64), in the file `data`.

    Subclasses have these methods. Unreadable bytes on a disk are zero: the checksum of the record detects them.

    read(blocks, out): copy `blocks` (integers) in order into `out`, (len(blocks), block) bytes.
    write(blocks, data): copy the rows of `data`, (len(blocks), block) bytes, into `blocks`. May raise `OSError`.
    aim(offsets, outs): return a target for many calls of `gather`: the bytes of a block from `offsets[k]` on go to a
        row of `outs[k]`, (number of blocks, bytes). Offsets ascend.
    gather(blocks, target): copy the parts of each of `blocks` (int64) into one row.
    """

    def __init__(self, folder: Path, meta: Meta) -> None:
        self.block, self.num_blocks = meta.block, meta.num_blocks
        try:
            self._fd = os.open(folder / "data", os.O_RDWR | OPEN)
        except OSError as error:
            raise DamagedError(f"the file {folder / 'data'} of a cache cannot be opened: {error}") from error

    @staticmethod
    def create(folder: Path, meta: Meta) -> None:
        """Create the sparse file, without allocating memory."""
        fd = os.open(folder / "data", os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN, 0o600)
        try:
            os.ftruncate(fd, meta.block * max(1, meta.num_blocks))  # an empty file cannot be mapped
        finally:
            os.close(fd)

    def allocate(self, start: int, count: int) -> int:
        """Allocate up to `count` blocks from block `start` on; return the number allocated.

        If the file system is nearly full, a 16th of its free space is left free.
        """
        while count > 0:
            try:
                allocate(self._fd, start * self.block, count * self.block)
                return count
            except OSError:
                disk = os.fstatvfs(self._fd)
                space = disk.f_bavail * disk.f_frsize
                count = min(count - 1, (space - space // 16) // self.block)
        return 0

    def close(self) -> None:
        """Close the file descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class MemoryArena(Arena):
    """Blocks in shared memory, mapped whole."""

    def __init__(self, folder: Path, meta: Meta) -> None:
        super().__init__(folder, meta)
        try:
            self._map = mmap.mmap(self._fd, self.block * max(1, self.num_blocks))
        except ValueError as error:
            os.close(self._fd)
            raise DamagedError(f"the file {folder / 'data'} does not belong to this cache: {error}") from error
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.rows = self._bytes.reshape(-1, self.block)
        """Writable views of the blocks."""
        self._written = np.zeros(self.num_blocks, bool)
        self._tensor = torch.from_numpy(self._bytes)
        self._leaves: dict[tuple[int, int, bool], torch.Tensor] = {}
        self._stop = threading.Event()
        self._populating: threading.Thread | None = None
        self._populated = 0

    def read(self, blocks: Array, out: Array) -> None:
        """See `Arena`."""
        np.take(self.rows, blocks, axis=0, out=out, mode="clip")

    def write(self, blocks: Array, data: Array) -> None:
        """See `Arena`."""
        first, count = int(blocks[0]), len(blocks)
        if not self._written[first] and (len(blocks) == 1 or (blocks[1:] - blocks[:-1] == 1).all()):
            # By a system call: storing into memory that this process has not used costs a fault for each page.
            self._written[first : first + count] = True
            with contextlib.suppress(OSError):  # such as a limit on the size of files
                if os.pwrite(self._fd, data.data, first * self.block) == data.nbytes:
                    return
        self.rows[blocks] = data

    def row_for_writing(self, block: int) -> Array | None:
        """Return a writable view of `block`; None if `write` is faster, because this process has not written it yet."""
        return self.rows[block] if self._written[block] else None

    def view(self, block: int, size: int) -> Array:
        """Return a view of `size` bytes from the start of `block`."""
        start = block * self.block
        return self._bytes[start : start + size]

    def aim(self, offsets: Sequence[int], outs: Sequence[Array]) -> Any:
        """See `Arena`."""
        return [self._aim(offset, out) for offset, out in zip(offsets, outs, strict=True)]

    def gather(self, blocks: Array, target: Any) -> None:
        """See `Arena`."""
        index = torch.from_numpy(blocks)
        with one_thread():
            for leaf, out in target:
                torch.index_select(leaf, 0, index, out=out)

    def _aim(self, offset: int, out: Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of all blocks from `offset` on, and `out`: as words of 8 bytes if `out` is aligned."""
        width = out.shape[1]
        words = width % 8 == 0 and out.flags.c_contiguous and out.ctypes.data % 8 == 0
        source = self._leaves.get((offset, width, words))
        if source is None:
            memory, size = (self._tensor.view(torch.int64), 8) if words else (self._tensor, 1)
            shape, strides = (self.num_blocks, width // size), (self.block // size, 1)
            source = memory.as_strided(shape, strides, offset // size)
            if words and width == 8:
                source = source[:, 0]
            self._leaves[offset, width, words] = source
        target = torch.from_numpy(out.view(np.int64) if words else out)
        return source, target[:, 0] if source.dim() == 1 else target

    def populate(self, blocks: int) -> None:
        """Map the first `blocks` blocks in the background, so that reads cause no page faults."""
        size = blocks * self.block // mmap.PAGESIZE * mmap.PAGESIZE
        if size <= self._populated or (self._populating is not None and self._populating.is_alive()):
            return
        start, self._populated = self._populated, size
        self._populating = threading.Thread(
            target=self._populate, args=(start, size), name="stallfree-populate", daemon=True
        )
        self._populating.start()

    def _populate(self, start: int, end: int) -> None:
        with contextlib.suppress(OSError, AttributeError, TypeError):  # other systems have no such function
            madvise = ctypes.CDLL(None, use_errno=True).madvise
            base = self._bytes.ctypes.data
            for at in range(start, end, _POPULATE_STEP):
                size = min(_POPULATE_STEP, end - at)
                if self._stop.is_set() or madvise(ctypes.c_void_p(base + at), ctypes.c_size_t(size), _POPULATE_READ):
                    return

    def close(self) -> None:
        """Stop populating, and close the file descriptor."""
        self._stop.set()
        thread = self._populating
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()
        super().close()


class DiskArena(Arena):
    """Blocks in a file on a disk, read and written by system calls, one per run of adjacent blocks."""

    def read(self, blocks: Array, out: Array) -> None:
        """See `Arena`."""
        for start, count, at in _runs(blocks):
            self._read([out[at : at + count].data.cast("B")], start * self.block)

    def restore_length(self) -> int:
        """Set the file to its full length; return its previous number of blocks."""
        size = os.fstat(self._fd).st_size
        if size != self.num_blocks * self.block:
            os.ftruncate(self._fd, self.num_blocks * self.block)
        return min(size // self.block, self.num_blocks)

    def write(self, blocks: Array, data: Array) -> None:
        """See `Arena`."""
        for start, count, at in _runs(blocks):
            view = data[at : at + count].data.cast("B")
            done = 0
            while done < len(view):
                done += os.pwritev(self._fd, [view[done:]], start * self.block + done)

    def aim(self, offsets: Sequence[int], outs: Sequence[Array]) -> Any:
        """See `Arena`."""
        return list(offsets), list(outs)

    def gather(self, blocks: Array, target: Any) -> None:
        """See `Arena`."""
        offsets, outs = target
        if not outs:
            return
        gaps = [
            memoryview(bytearray(max(0, after - offset - out.shape[1])))
            for offset, after, out in zip(offsets, (*offsets[1:], 0), outs, strict=True)
        ]
        views = [out.data for out in outs]
        for row, block in enumerate(blocks.tolist()):
            parts = [part for view, gap in zip(views, gaps, strict=True) for part in (view[row : row + 1], gap)]
            self._read([part.cast("B") for part in parts if part.nbytes], block * self.block + offsets[0])

    def _read(self, views: list[memoryview], at: int) -> None:
        """Fill `views` from offset `at` of the file; with zeros where the read fails or the file ends."""
        while views:
            try:
                got = os.preadv(self._fd, views[:_MOST_PARTS], at)
            except OSError:
                got = 0
            if got == 0:
                for view in views:
                    view[:] = bytes(len(view))
                return
            at += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if got:
                views[0] = views[0][got:]


def _runs(blocks: Array) -> list[tuple[int, int, int]]:
    """(first block, number of blocks, position) of each run of consecutive numbers in `blocks`."""
    if len(blocks) == 0:
        return []
    signed = blocks.astype(np.int64)
    breaks = np.flatnonzero(np.diff(signed) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(signed)]))
    return list(zip(signed[starts].tolist(), (ends - starts).tolist(), starts.tolist(), strict=True))


# -- gathers in one thread ---------------------------------------------------------------------------------------------
#
# torch splits a large operation among OpenMP threads, which spin at the barrier and for some time after it. If other
# processes use the cores, as during training, all threads wait for a descheduled one. With one of two cores busy, a
# gather of 64 images by two threads took 19 times as long as by one. On idle cores the gain of two threads is small,
# because memory is the limit.
# `torch.set_num_threads` would affect threads that the user's training starts later. OpenMP's own setting is per
# thread, and is restored.

_LIBRARY = re.compile(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)")
_thread = threading.local()


@lru_cache(maxsize=1)
def _openmp() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """OpenMP's getter and setter in the library that torch has loaded; None if not found."""
    try:
        libraries = _LIBRARY.findall(Path("/proc/self/maps").read_text())
        torchs = [path for path in libraries if "torch" in path] or libraries
        library = ctypes.PyDLL(torchs[0])  # these calls are shorter than releasing the GIL
        return library.omp_get_max_threads, library.omp_set_num_threads
    except (OSError, IndexError, AttributeError):
        return None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch runs the operations of this thread single-threaded."""
    functions = None if getattr(_thread, "alone", False) else _openmp()
    if functions is None:
        yield
        return
    get, put = functions
    if not getattr(_thread, "ready", False):
        torch.get_num_threads()  # the first call in a thread sets its number, and would override ours
        _thread.ready = True
    before = get()
    put(1)
    try:
        yield
    finally:
        put(before)


def stay_alone() -> None:
    """Make torch run the operations of this thread single-threaded from now on. For internal threads."""
    functions = _openmp()
    if functions is not None:
        torch.get_num_threads()
        functions[1](1)
        _thread.alone = True
