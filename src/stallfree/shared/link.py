"""The connection of a job to its group's coordinator: messages, and leased views of the ring.

A member requests batches one by one, always one ahead of the batch it has yielded. Each request therefore reports the
member's progress, and the coordinator can leave a member behind without a message. Slots are mapped copy-on-write, so
that no job sees another job's changes to its batch, and released as their tensors are freed.
"""

import contextlib
import enum
import mmap
import os
import signal
import socket
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stallfree.ipc.channel import Connection, Message, pack
from stallfree.ipc.process import prepare_for_forks
from stallfree.loader.ring import Slots
from stallfree.raising import log

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_RELEASE_SECONDS = 0.002
"""Seconds of waiting for a batch after which pending releases are sent; until then they wait for the next request."""

_CHECK_SECONDS, _STOPPED_SECONDS = 1.0, 10.0
"""Seconds between looks at the coordinator; and after which one that is stopped (SIGSTOP) is killed and replaced."""

NEWCOMER = -1
"""Sent by a newcomer as the number of its first message; other members send the batch that they need next."""


class Kind(enum.IntEnum):
    """Kind of a message."""

    # sent by a member
    HELLO = 2  # the first message; the body is a `Hello` as JSON; `number` is needed next; `value` is 1 on return
    REQUEST = 3  # batches before `number` are not needed; if `value` is 1, that one is; no earlier request is open
    RELEASE = 5  # batch `number` is released; if `value` is 1, a forked process may still read it
    LEAVE = 6
    EXPLAIN = 7  # request the reason why batch `number` is not ready
    # sent by the coordinator
    WELCOME = 11  # admitted, with batch `number` as the first, with `value` members; the body is the ring's folder
    BATCH = 12  # batch `number`; the body is a result; the member may hold `value` batches
    EXPLANATION = 15  # the body is the reason as text; the last batch was delivered `value` milliseconds ago
    DROPPED = 17  # the member gets no more batches; the body says why, and the connection ends


class Hello(NamedTuple):
    """The description that a member sends when it connects.

    Attributes:
        job: identifier shared by all ranks of a job.
        ranks: number of the job's processes on this host.
    """

    job: str
    ranks: int


class PrivateSlots(Slots):
    """The slots in `folder`, copy-on-write: a page that is written to is private until `clean` drops it."""

    _access = mmap.ACCESS_COPY

    def __init__(self, folder: Path) -> None:
        super().__init__(lambda: folder)

    def clean(self, slot: int, size: int) -> None:
        """Drop this process's changes to `slot`, so that its next batch is visible. No view of it may exist."""
        if (mapping := self._maps.get(slot)) is not None and _is_written(mapping, size):
            self.drop(slot)

    def drop(self, slot: int) -> None:
        """Drop the private pages of `slot`. Skips the page table lookup, which is slow if many pages are mapped."""
        self._maps[slot].madvise(mmap.MADV_DONTNEED)


_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20  # bits of the last byte of a page table entry
_CLEAN = bytes(byte for byte in range(256) if byte & _OF_A_FILE or not byte & (_PRESENT | _SWAPPED))


def _is_written(mapping: mmap.mmap, size: int) -> bool:
    """Return whether any of the first pages is private, or cannot be checked. Dropping clean pages costs faults."""
    first, count = np.frombuffer(mapping, np.uint8, 1).ctypes.data // mmap.PAGESIZE, -(-size // mmap.PAGESIZE)
    try:
        table = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        entries = os.pread(table, 8 * count, 8 * first)
    finally:
        os.close(table)
    return len(entries) < 8 * count or bool(entries[7::8].translate(None, _CLEAN))


class _Lease(weakref.ref[Bytes]):
    """The lease of a batch, which ends with the memory that it refers to."""

    number: int
    slot: int
    size: int
    forked = False


class Link(Connection):
    """The connection to one coordinator, and the leases of its batches.

    Any thread may free batches at any time. No Python code runs there, since an interrupt during it would be lost: the
    leases that have ended are released when this process sends or receives next.

    Attributes:
        slots: the slots of its ring; None before this job is admitted.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.slots: PrivateSlots | None = None
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()  # messages that are still to be sent
        self._leases: dict[int, _Lease] = {}  # by number of the held batch
        self._ended: deque[_Lease] = deque()  # leases whose memory is freed
        self._stopped = float("inf")  # time since when the coordinator is known to be stopped
        prepare_for_forks(self)

    def send(self, *messages: bytes) -> None:
        """Send messages and the pending releases. In any thread, also during another call."""
        self._end_leases()
        self._outbox.extend(messages)
        self.flush()

    def flush(self) -> None:
        """Send the pending data. A thread that cannot get the lock leaves this to its holder, which checks again."""
        while self._lock.acquire(blocking=False):
            try:
                super().send(*(self._outbox.popleft() for _ in range(len(self._outbox))))
            finally:
                self._lock.release()
            if not self._outbox:
                return

    def next_message(self, deadline: float = 0.0) -> Message | None:
        """Return the next message, or None at the deadline. Raises `EOFError` if the connection has ended."""
        wait = _RELEASE_SECONDS
        while (message := super().next_message(min(deadline, time.monotonic() + wait))) is None:
            if time.monotonic() >= deadline:
                return None
            self.send()
            if wait == _CHECK_SECONDS and self._is_stopped():
                self.kill("stopped")
            wait = _CHECK_SECONDS
        return message

    def kill(self, why: str) -> None:
        """Kill the coordinator, which may be stopped and resume later."""
        log.warning("process %d, the coordinator of a group, is %s: it is killed and replaced", self.pid, why)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _is_stopped(self) -> bool:
        """Return whether the coordinator was seen stopped for 10 s; False for one of another PID namespace."""
        state = ""
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        now = time.monotonic()
        self._stopped = min(self._stopped, now) if state == "T" else float("inf")
        return now - self._stopped >= _STOPPED_SECONDS

    # -- leases -------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Number of batches that this process holds."""
        self._end_leases()
        return len(self._leases)

    def lease(self, number: int, slot: int, size: int, memory: Bytes) -> None:
        """Release batch `number` when `memory`, which its tensors view, is freed."""
        lease = self._leases[number] = _Lease(memory, self._ended.append)
        lease.number, lease.slot, lease.size = number, slot, size

    def release(self, number: int, *, forked: bool = False) -> None:
        """Release batch `number` with the next message."""
        self._outbox.append(pack(Kind.RELEASE, number=number, value=forked))

    def _end_leases(self) -> None:
        """Prepare the release of the batches that were freed."""
        while self._ended:
            with contextlib.suppress(IndexError):  # another thread took it
                lease = self._ended.popleft()
                self._leases.pop(lease.number, None)
                if self.slots is not None:
                    self.slots.clean(lease.slot, lease.size)
                self.release(lease.number, forked=lease.forked)

    def before_fork(self) -> None:
        """Mark the held batches: the process that is forked now may keep reading them."""
        for lease in list(self._leases.values()):
            lease.forked = True

    def close(self) -> None:
        """Close the connection. Batches that are still held stay valid: their slots are not filled again."""
        with self._lock:
            super().close()
        if self.slots is not None:
            self.slots.close()
