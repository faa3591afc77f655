"""Writes samples in the background: a bounded queue with one thread in each process."""

from __future__ import annotations

import logging
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.tiers.buffers import Buffers
from stallfree.pipeline.structure import Structure
from stallfree.platform import at_fork

Array = npt.NDArray[Any]
Record = tuple[Structure, list[Array]]

QUEUE_BYTES = 32 << 20
"""Maximum bytes of samples in the queue of one process, unless one batch is larger."""

DRAIN_SECONDS = 0.25
"""Maximum wait for samples in the queue of a process, which may have been killed."""

_ALIGN = 64
_POLL_SECONDS = 0.001

_buffers = Buffers()
log = logging.getLogger("stallfree")


class WriteBehind:
    """Passes records to `write` in a thread. Thread-safe and fork-safe.

    The thread starts with the first sample, and the interpreter joins it at exit: a worker that exits loses nothing. A
    forked child starts with an empty queue and its own thread. The samples in the queue of a killed process are lost.

    Args:
        write: called in the thread with ids and their records. `flush` raises its first exception, which is logged.
        flags: a byte per id in memory that all processes share (`shared_array`): set while the id is in a queue.
        target: destination of the samples, for the warning: "the disk of /mnt/ssd".
    """

    def __init__(self, write: Callable[[Array, list[Record]], None], flags: Array, *, target: str) -> None:
        self._write, self._target = write, target
        self._flags = flags
        self._warned = self._logged = False
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._bytes = 0  # in the queue, including those being written
        self._last: Future[None] | None = None
        self._error: Exception | None = None

    def add(self, ids: Array, records: Sequence[Record]) -> int:
        """Add records to the queue; the bytes are copied. Returns how many were accepted, in order.

        An empty queue accepts all of them; else the limit is 32 MiB.
        """
        ends = np.cumsum([sum(-(-array.size // _ALIGN) * _ALIGN for array in arrays) for _, arrays in records])
        with self._lock:
            fit = int(np.searchsorted(ends, QUEUE_BYTES - self._bytes, "right")) if self._bytes else len(ids)
            size = int(ends[fit - 1]) if fit else 0
            self._bytes += size
        if fit < len(ids) and not self._warned:
            self._warned = True
            warnings.warn(
                f"samples arrive faster than {self._target} can store them: some are not stored",
                RuntimeWarning,
                stacklevel=4,
            )
        if not fit:
            return 0
        self._flags[ids[:fit]] = 1
        try:
            copies = _copied(records[:fit], size)
            with self._lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, thread_name_prefix="stallfree-write")
                self._last = self._pool.submit(self._run, ids[:fit], copies, size)
        except (MemoryError, RuntimeError):  # no memory for the copies, or the interpreter is exiting
            self._release(ids[:fit], size)
            return 0
        return fit

    def _release(self, ids: Array, size: int) -> None:
        with self._lock:
            self._bytes -= size
        self._flags[ids] = 0

    def _run(self, ids: Array, records: list[Record], size: int) -> None:
        try:
            self._write(ids, records)
        except Exception as error:
            if not self._logged:
                self._logged = True
                log.warning(
                    "samples could not be written to %s; this is logged once:\n%s", self._target, traceback.format_exc()
                )
            self._error = self._error or error
        finally:
            self._release(ids, size)

    def drain(self, ids: Array) -> None:
        """Wait until no process has `ids` in its queue; after 250 ms they count as lost."""
        flags = self._flags
        until = time.monotonic() + DRAIN_SECONDS
        while flags[ids].any():
            if time.monotonic() > until:
                flags[ids] = 0
            else:
                time.sleep(_POLL_SECONDS)

    def flush(self) -> None:
        """Wait until all records of this process are written. Raises the first exception since the last call."""
        with self._lock:
            future = self._last
        if future is not None:
            future.result()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Drain the queue and stop the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        try:
            self.flush()
        finally:
            self._flags = np.zeros(0, np.uint8)  # the memory is freed


_all: weakref.WeakSet[WriteBehind] = weakref.WeakSet()


def _reset_in_child() -> None:
    for queue in list(_all):
        queue._reset()


at_fork(after_in_child=_reset_in_child)


def _copied(records: Sequence[Record], size: int) -> list[Record]:
    """Copies of the records in one buffer of `size` bytes."""
    memory = _buffers.take(size)
    copies, at = [], 0
    for structure, arrays in records:
        parts = []
        for array in arrays:
            part = memory[at : at + array.size]
            part[:] = array
            parts.append(part)
            at += -(-array.size // _ALIGN) * _ALIGN
        copies.append((structure, parts))
    return copies
