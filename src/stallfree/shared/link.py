"""The connection of a job to its group's coordinator: messages, and leased views of the ring.

A member requests batches one by one, always one ahead of the batch it has yielded. Each request therefore reports the
member's progress, and the coordinator can revoke any batch that it has not sent, without a message. Slots are mapped
copy-on-write, so that no job sees another job's changes to its batch, and released as their tensors are freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import json
import logging
import mmap
import os
import signal
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stallfree.errors import BatchError
from stallfree.ipc.channel import Connection, Message, pack
from stallfree.ipc.forked import Owner, prepare_for_forks
from stallfree.loader.ring import slot_bytes
from stallfree.platform import fcntl

Bytes = npt.NDArray[np.uint8]

_WAITING = 1
"""Number of releases that may wait for the next request, which follows soon in a training loop."""

_RELEASE_SECONDS = 0.002
"""Seconds of waiting for a batch after which pending releases are sent in any case."""

ANSWER_SECONDS = 5.0
_CHECK_SECONDS = 1.0
_STOPPED_SECONDS = 10.0
"""Seconds after which a stopped coordinator (SIGSTOP) is killed and replaced, while a member waits for a batch."""

NEWCOMER = -1
"""Sent by a newcomer as the number of its first message; other members send the batch that they need next."""

log = logging.getLogger("stallfree")


class Kind(enum.IntEnum):
    """Kind of a message. A batch carries the serial of its request."""

    # sent by a member
    HELLO = 2  # the first message; the body is a `Hello`, `number` the batch needed next; `value` is 1 on return
    REQUEST = 3  # request batch `number`; batch `value` is released, unless it is -1
    SKIP = 4  # batches before `number` are not needed; grants after batch `value` are discarded
    RELEASE = 5  # batch `number` is released
    LEAVE = 6
    EXPLAIN = 7  # request the reason why batch `number` is not ready
    # sent by the coordinator
    WELCOME = 11  # admitted, with batch `number` as the first, with `value` members; the body is the ring's folder
    BATCH = 12  # batch `number`; the body is a result; the member may hold `value` batches
    EXPLANATION = 15  # the body is the reason as text; the last batch was delivered `value` milliseconds ago
    LEFT = 16  # other members remain
    DROPPED = 17  # the member has held up the others for too long; the body says so


class Hello(NamedTuple):
    """The description that a member sends when it connects.

    Attributes:
        job: identifier shared by all ranks of a job.
        ranks: number of the job's processes on this host.
        name: name of its script, for messages.
    """

    job: str
    ranks: int
    name: str

    def pack(self) -> bytes:
        """Return the description as bytes."""
        return json.dumps(self).encode()


def unpack_hello(packed: bytes | memoryview) -> Hello:
    """Unpack the bytes that `Hello.pack` returned."""
    return Hello(*json.loads(bytes(packed)))


class _Lease(weakref.ref[Bytes]):
    """The lease of a batch, which ends with the memory that it refers to."""

    number: int
    slot: int
    size: int


class Link(Connection):
    """The connection to one coordinator, and the views of its ring.

    Any thread may free batches at any time. No Python code runs there, since an interrupt during it would be lost: the
    leases that have ended are released when this process sends or receives next.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.views: Views | None = None
        self._lock = threading.Lock()
        self._released: deque[int] = deque()
        self._leases: dict[int, _Lease] = {}  # by number of the held batch
        self._ended: deque[Any] = deque()  # leases whose memory is freed
        self._never_released: set[int] = set()
        self._owner = Owner()
        self._stopped = float("inf")  # time since when the coordinator is known to be stopped
        prepare_for_forks(self)

    def send(self, *messages: bytes) -> None:
        """Send messages and the pending releases."""
        self._end_leases()
        with self._lock:
            super().send(*self._releases(), *messages)
        self._send_releases(_WAITING)

    def request(self, serial: int, number: int) -> None:
        """Request a batch and send the pending releases; the request itself carries one of them."""
        self._end_leases()
        with self._lock:
            released = self._released.popleft() if self._released else -1
            super().send(*self._releases(), pack(Kind.REQUEST, serial, number, released))
        self._send_releases(_WAITING)

    def flush(self) -> None:
        """Send the pending data."""
        with self._lock:
            super().flush()

    def next_message(self, deadline: float = 0.0) -> Message | None:
        """Return the next message, or None at the deadline. Raises `EOFError` if the connection has ended."""
        wait = _RELEASE_SECONDS
        while (message := super().next_message(min(deadline, time.monotonic() + wait))) is None:
            if time.monotonic() >= deadline:
                return None
            self._end_leases()
            self._send_releases(0)
            if wait == _CHECK_SECONDS:
                self._end_if_stopped()
            wait = _CHECK_SECONDS
        return message

    def _end_if_stopped(self) -> None:
        now = time.monotonic()
        self._stopped = min(self._stopped, now) if is_stopped(self.pid) else float("inf")
        if now - self._stopped >= _STOPPED_SECONDS:
            self.end(f"has been stopped for {_STOPPED_SECONDS:g} s")

    def end(self, why: str) -> None:
        """Kill the coordinator, so that a stopped one cannot resume later, then raise `EOFError`.

        Does nothing for a process of another PID namespace, which cannot be killed from here.
        """
        if self.pid <= 0:
            return
        log.warning("process %d, the coordinator of a group, %s: it is killed and replaced", self.pid, why)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + ANSWER_SECONDS
        while super().next_message(deadline) is not None:
            pass
        raise EOFError

    # -- leases -------------------------------------------------------------------------------------------------------

    def may_keep(self, count: int) -> bool:
        """Return whether this process holds fewer than `count` batches, as seen by the coordinator."""
        self._end_leases()
        if len(self._leases) + len(self._released) >= count:
            self._send_releases(0)
        return len(self._leases) + len(self._released) < count

    def lease(self, number: int, slot: int, memory: Bytes) -> None:
        """Release batch `number` when `memory`, which its tensors view, is freed."""
        lease = self._leases[number] = _Lease(memory, self._ended.append)
        lease.number, lease.slot, lease.size = number, slot, memory.nbytes

    def _end_leases(self) -> None:
        """Prepare the release of the batches that were freed."""
        while self._ended:
            with contextlib.suppress(IndexError):  # another thread took it
                lease = self._ended.popleft()
                if lease.number in self._never_released:
                    continue
                self._leases.pop(lease.number, None)
                if self._owner.is_here and self.fileno() >= 0:
                    assert self.views is not None
                    self.views.clean(lease.slot, lease.size)
                    self._released.append(lease.number)

    def keep_held(self) -> None:
        """Copy the held batches to this process, since their slots will be filled again."""
        self._end_leases()
        for _, slot, size, views, _memory in self._held():
            views.keep(slot, size)

    def before_fork(self) -> None:
        """Copy the held batches, for a process that is forked now. What cannot be copied stays leased."""
        for number, slot, size, views, _memory in self._held():
            if self._owner.is_here and self.fileno() >= 0 and not views.copy(slot, size):
                self._never_released.add(number)

    def _held(self) -> Iterator[tuple[int, int, int, Views, Bytes]]:
        """Yield the number, slot and size of each held batch, and its memory, which is not freed meanwhile."""
        for number, lease in list(self._leases.items()):
            if (held := lease()) is not None and self.views is not None:
                yield number, lease.slot, lease.size, self.views, held
            del held

    def release(self, number: int) -> None:
        """Release batch `number`. Safe in any thread, also during `send`."""
        self._released.append(number)
        self._send_releases(_WAITING)

    def _releases(self) -> list[bytes]:
        messages = []
        while self._released:
            messages.append(pack(Kind.RELEASE, number=self._released.popleft()))
        return messages

    def _send_releases(self, waiting: int) -> None:
        """Send the pending releases if there are more than `waiting`."""
        # A thread that cannot get the lock leaves the releases to the lock's holder, which checks again after releasing
        # it.
        while len(self._released) > waiting and self._lock.acquire(blocking=False):
            try:
                messages = self._releases()
                if messages and self.fileno() >= 0:
                    super().send(*messages)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Close the connection. Batches that are still held stay valid."""
        if self._owner.is_here:
            with self._lock:
                super().close()
            if self.views is not None:
                self.views.close()


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


# -- views of the ring ------------------------------------------------------------------------------------------------

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
