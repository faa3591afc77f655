"""Reusable receive buffers: the page faults of newly mapped memory cost more than the copy."""

import contextlib
import mmap
import threading
import weakref
from collections import deque

import numpy as np

from stallfree.platform import at_fork

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

SMALLEST = 64 << 10
"""Size of the smallest piece in bytes."""

IDLE = 64 << 20
"""Bytes that are always kept."""

_HUGE = 2 << 20  # bytes of a huge page


class Buffers:
    """Memory pieces of one process, whose sizes are powers of two.

    Unused pieces are kept, up to `keep` bytes including those in use, or up to the peak use if that is more. So a batch
    of any size finds mapped memory. The least recently used pieces are freed first.

    Thread-safe. A forked child starts without pieces; inherited pieces in use stay readable.

    Args:
        keep: bytes that are always kept.
    """

    def __init__(self, keep: int = IDLE) -> None:
        self._keep = keep
        self._clear()
        _all.add(self)

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[mmap.mmap] = deque()  # finalizers append pieces here, at any time and in any thread
        self._idle: list[mmap.mmap] = []  # the most recently used one at the end
        self._used = 0  # bytes in use
        self._most = 0  # peak bytes in use

    def take(self, size: int) -> Bytes:
        """Memory of `size` bytes or more, 64-byte aligned and not cleared.

        The caller owns the memory until its last view is freed. Arrays and tensors made from the array count as views,
        because each refers to it in NumPy. Raises `MemoryError` if there is not enough memory.
        """
        wanted = max(SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            piece = self._find(wanted)
        self._drain()
        if piece is None:
            piece = self._map(wanted)
        array: Bytes = np.frombuffer(piece, np.uint8)
        weakref.finalize(array, self._return_piece, piece, self._returned).atexit = False
        return array

    def _find(self, wanted: int) -> mmap.mmap | None:
        self._collect_returned()
        self._used += wanted
        self._most = max(self._most, self._used)
        for at in range(len(self._idle) - 1, -1, -1):
            if len(self._idle[at]) == wanted:
                return self._idle.pop(at)
        return None

    def _map(self, wanted: int) -> mmap.mmap:
        try:
            piece = mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            with self._lock:
                self._used -= wanted
            raise MemoryError(f"no memory for a buffer of {wanted} bytes: {error}") from error
        if wanted >= _HUGE:
            with contextlib.suppress(AttributeError, OSError):  # huge pages: the first access takes a tenth of the time
                piece.madvise(mmap.MADV_HUGEPAGE)
        return piece

    def _return_piece(self, piece: mmap.mmap, returned: deque[mmap.mmap]) -> None:
        # A finalizer may run within `take`, in the same thread, so it never waits for the lock.
        if returned is self._returned:  # else it belongs to a parent process
            returned.append(piece)
            self._drain()

    def _drain(self) -> None:
        """Reclaim returned pieces, unless another thread is doing so: that one checks again afterwards."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._collect_returned()
            finally:
                self._lock.release()

    def _collect_returned(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._used -= len(piece)
            self._idle.append(piece)
        excess = self._used + self.idle_bytes - max(self._keep, self._most)
        while excess > 0 and self._idle:
            excess -= len(self._idle.pop(0))

    @property
    def idle_bytes(self) -> int:
        """Kept bytes that are not in use."""
        return sum(map(len, list(self._idle)))


_all: weakref.WeakSet[Buffers] = weakref.WeakSet()


def _clear_in_child() -> None:
    # A thread of the parent may have held a lock; and writes to inherited memory would copy it page by page.
    for buffers in list(_all):
        buffers._clear()


at_fork(after_in_child=_clear_in_child)
