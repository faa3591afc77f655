"""A job's membership in its group: requests batches from the coordinator and replaces a coordinator that died.

`Member` sends requests over a `Link`; granted batches are views of the coordinator's ring, released as they are freed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stallfree.errors import WorkerError, group_timeout
from stallfree.ipc.channel import Connection, Message, pack
from stallfree.ipc.forked import Owner, prepare_for_forks
from stallfree.ipc.remote import unpack_error
from stallfree.loader.messages import EMPTY, FAILED, PRIVATE, READY, Result, unpack_result
from stallfree.notes import raisable
from stallfree.pipeline.codec import read_own_record
from stallfree.shared.group import Group, reap
from stallfree.shared.preparation import Setup
from stallfree.shared.protocol import NEWCOMER, Hello, Kind
from stallfree.shared.views import Views

Bytes = npt.NDArray[np.uint8]

log = logging.getLogger("stallfree")

LIVES = 10
"""Coordinators that may die in a row without delivering a batch before `WorkerError` is raised."""

_WAITING = 1
"""Number of releases that may wait for the next request, which follows soon in a training loop."""

_RELEASE_SECONDS = 0.002
"""Seconds of waiting for a batch after which pending releases are sent in any case."""

_ANSWER_SECONDS = 5.0
_CHECK_SECONDS = 1.0
_STOPPED_SECONDS = 10.0
"""Seconds after which a stopped coordinator (SIGSTOP) is killed and replaced, while a member waits for a batch."""

_LEAVE_SECONDS = 30.0


@dataclass
class Chunk:
    """A batch prepared by the group. `error` is set if its preparation failed."""

    number: int
    result: Result
    data: Any = None
    error: BaseException | None = None


class Skipped(NamedTuple):
    """The group does not serve the requested batch; it serves from batch `start` on."""

    start: int


class EpochAdvanced(NamedTuple):
    """The group has finished the epoch that this job was about to start; it is in `epoch` now."""

    epoch: int


class Link(Connection):
    """The connection to one coordinator, and the views of its ring.

    Any thread may free batches at any time, so `release` is safe to call from finalisers.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.views: Views | None = None
        self._lock = threading.Lock()
        self._released: deque[int] = deque()
        self._leases: dict[int, tuple[int, int, weakref.ref[Bytes]]] = {}  # slot, size and memory of each held batch
        self._never_released: set[int] = set()
        self._owner = Owner()
        self._stopped = float("inf")  # time since when the coordinator is known to be stopped
        prepare_for_forks(self)

    def send(self, *messages: bytes) -> None:
        """Send messages and the pending releases."""
        with self._lock:
            super().send(*self._releases(), *messages)
        self._send_releases(_WAITING)

    def request(self, serial: int, number: int) -> None:
        """Request a batch and send the pending releases; the request itself carries one of them."""
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
        deadline = time.monotonic() + _ANSWER_SECONDS
        while super().next_message(deadline) is not None:
            pass
        raise EOFError

    # -- leases -------------------------------------------------------------------------------------------------------

    def may_keep(self, count: int) -> bool:
        """Return whether this process holds fewer than `count` batches, as seen by the coordinator."""
        if len(self._leases) + len(self._released) >= count:
            self._send_releases(0)
        return len(self._leases) + len(self._released) < count

    def lease(self, number: int, slot: int, memory: Bytes) -> None:
        """Release batch `number` when `memory`, which its tensors view, is freed."""
        size = memory.nbytes

        def end(_: object) -> None:
            if number in self._never_released:
                return
            self._leases.pop(number, None)
            if self._owner.is_here and self.fileno() >= 0:
                assert self.views is not None
                self.views.clean(slot, size)
                self.release(number)

        self._leases[number] = slot, size, weakref.ref(memory, end)

    def keep_held(self) -> None:
        """Copy the held batches to this process, since their slots will be filled again."""
        for _, slot, size, views, _memory in self._held():
            views.keep(slot, size)

    def before_fork(self) -> None:
        """Copy the held batches, for a process that is forked now. What cannot be copied stays leased."""
        for number, slot, size, views, _memory in self._held():
            if self._owner.is_here and self.fileno() >= 0 and not views.copy(slot, size):
                self._never_released.add(number)

    def _held(self) -> Iterator[tuple[int, int, int, Views, Bytes]]:
        """Yield the number, slot and size of each held batch, and its memory, which is not freed meanwhile."""
        for number, (slot, size, memory) in list(self._leases.items()):
            if (held := memory()) is not None and self.views is not None:
                yield number, slot, size, self.views, held
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


class Member:
    """A job's membership in a group. See the module. Not thread-safe.

    Args:
        group: the group to join.
        setup: setup for a coordinator, used if there is none.
        hello: description of this member, sent to the coordinator.
        seconds: longest wait for a batch.

    Attributes:
        setup: as given.
        jobs: number of members of the group, as last received.
        deaths: number of coordinators that died.
    """

    def __init__(self, group: Group, setup: Setup, hello: Hello, seconds: float) -> None:
        self.jobs = 0
        self.deaths = 0
        self._group = group
        self.setup = setup
        self._hello = hello
        self._seconds = seconds
        self._link: Link | None = None
        self._claim = -1
        self._serial = 0
        self._requested: int | None = None
        self._taken = -1
        self._position = NEWCOMER
        self._in_a_row = 0

    def join(self, position: int) -> int:
        """Join as a member whose next batch is `position`, or as `NEWCOMER`; returns the epoch of this job."""
        self._position = position
        self._claim = self._group.claim()
        while True:
            try:
                return self._enter().number
            except EOFError:
                self._lost()

    def _enter(self) -> Message:
        """Connect, wait until the coordinator admits this job, and return its answer."""

        def connect(folder: Path) -> Link | None:
            link = Link.open(folder)
            if link is not None:
                link.send(pack(Kind.HELLO, number=self._position, body=self._hello.pack()))
            return link

        link = self._link = self._group.reach(self.setup, connect)
        self._requested, self._serial = None, self._serial + 1
        answer = link.next_message(time.monotonic() + self._seconds)
        if answer is None:
            if is_stopped(link.pid):
                link.end("is stopped")
            raise group_timeout(
                f"process {link.pid}, the coordinator of the group {self._group.name!r}, did not admit this job within "
                f"{self._seconds:g} s: "
                + ("not all ranks of this job have joined" if self._hello.ranks > 1 else "it does not answer")
            )
        self.jobs = answer.value
        link.views = Views(Path(os.fsdecode(bytes(answer.body))))
        return answer

    def _lost(self) -> None:
        """Handle a dead coordinator; batches that it sent and this job has not yielded are discarded."""
        self._in_a_row += 1
        pid = -1
        if self._link is not None:
            self.deaths += self._link.views is not None  # else it was already dying at the connection
            pid = self._link.pid
            self._link.close()
            self._link = None
        if self._in_a_row >= LIVES:
            raise WorkerError(
                f"{LIVES} coordinators of the group {self._group.name!r} died in a row (the last was process {pid}) "
                "without delivering a batch. If the system killed them, memory may be short: use less, or fewer "
                "workers",
                ids=[],
            )
        reap(0.0, self._group.folder)

    def take(self, number: int, end: int) -> Chunk | Skipped | EpochAdvanced:
        """Wait for batch `number`, and request the next one if it is below `end`."""
        self._position = number
        while True:
            deadline = time.monotonic() + self._seconds
            try:
                if self._link is None:
                    self._enter()
                return self._take(number, end, deadline)
            except EOFError:
                self._lost()

    def _take(self, number: int, end: int, deadline: float) -> Chunk | Skipped | EpochAdvanced:
        link = self._link
        assert link is not None
        if self._requested != number:
            self._request(link, number)
        while True:
            message = link.next_message(deadline)
            if message is None:
                raise group_timeout(self._explain_timeout(link, number))
            if message.serial != self._serial:
                continue
            if message.kind != Kind.BATCH:
                self._requested = None
                return (Skipped if message.kind == Kind.SKIPPED else EpochAdvanced)(message.number)
            if message.number == number:
                self._in_a_row = 0
                self._requested, self._taken, self._position = None, number, number + 1
                if number + 1 < end:
                    self._request(link, number + 1)
                return self._open(link, message)
            link.release(message.number)  # requested before an interrupt

    def _request(self, link: Link, number: int) -> None:
        self._requested = number
        link.request(self._serial, number)

    def _open(self, link: Link, message: Message) -> Chunk:
        """Open the batch of a message as a view of the ring; as a copy if too many views are held."""
        number, result = message.number, unpack_result(message.body)
        chunk = Chunk(number, result)
        assert link.views is not None
        if result.status == READY:
            try:
                memory = link.views.view(result.slot, result.size)
            except OSError:
                self._position = number
                raise EOFError from None
            if link.may_keep(message.value):
                link.lease(number, result.slot, memory)
                chunk.data = read_own_record(memory, copy=False)
                return chunk
            chunk.data = read_own_record(memory, copy=True)
            link.views.drop(result.slot)
        elif result.status == PRIVATE:
            assert result.memory is not None
            chunk.data = read_own_record(result.memory, copy=False)
        elif result.status == FAILED:
            chunk.error = raisable(unpack_error(result.note))
        else:
            assert result.status == EMPTY
        link.release(number)
        return chunk

    def skip(self, cursor: int) -> None:
        """Notify the coordinator that no batch before `cursor` is needed."""
        self._position = max(self._position, cursor)
        self._serial += 1
        self._requested = None
        if self._link is not None:
            self._link.send(pack(Kind.SKIP, self._serial, cursor, self._taken))

    def _explain_timeout(self, link: Link, number: int) -> str:
        """Return the message for a batch that timed out. Kills an unresponsive coordinator and raises `EOFError`."""
        batch = "batch {1} of epoch {0}".format(*divmod(number, len(self.setup.order)))
        link.send(pack(Kind.EXPLAIN, number=number))
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (answer := link.next_message(deadline)) is not None and answer.kind != Kind.EXPLANATION:
            if answer.kind == Kind.BATCH:
                link.release(answer.number)
            self._requested = None
        why = f"process {link.pid}, the coordinator of the group, does not answer: it may be stopped"
        if answer is not None:
            why = bytes(answer.body).decode()
        elif not self._in_a_row:
            link.end(f"has not answered for {self._seconds + _ANSWER_SECONDS:g} s")
        return (
            f"the group {self._group.name!r} did not deliver {batch} within {self._seconds:g} s: {why}. "
            "Give a larger timeout if samples take so long"
        )

    @property
    def staging_bytes(self) -> int:
        """Size of the ring in bytes."""
        link = self._link
        return 0 if link is None or link.views is None else link.views.ring_bytes

    def close(self) -> None:
        """Leave the group. The last member waits until the coordinator has ended."""
        link, self._link = self._link, None
        if link is not None:
            link.keep_held()
            link.send(pack(Kind.LEAVE))
            try:
                deadline = time.monotonic() + _LEAVE_SECONDS
                while (message := link.next_message(deadline)) is not None and message.kind != Kind.LEFT:
                    pass
            except EOFError:
                reap(_ANSWER_SECONDS, self._group.folder)
            link.close()
        if self._claim >= 0:
            self._group.release(self._claim)
