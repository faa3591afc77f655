"""A job's seat in a group: asks the conductor for batches, and gets the group another one when that has died."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.channel import Channel
from stallfree.errors import StallfreeError, WaitError, WorkerError
from stallfree.loader.messages import EMPTY, FAILED, PRIVATE, READY, Result
from stallfree.pipeline.codec import read_own_record
from stallfree.remote import RemoteTraceback
from stallfree.shared.closing import forget, keep_from_children
from stallfree.shared.conductor import Setup
from stallfree.shared.group import Gone, Group, reap
from stallfree.shared.protocol import NOWHERE, Hello, Kind, body_of, request, result_of, unpack_answer, unpack_note
from stallfree.shared.views import Views
from stallfree.sockets import process_of

Bytes = npt.NDArray[np.uint8]

log = logging.getLogger("stallfree")

LIVES = 10
"""Conductors that may die one after the other, before a batch came of any, until that is an error."""

_WAITING = 1
"""Batches that were let go of, of which the conductor is told with the next request and not at once."""

_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_STOPPED_SECONDS = 10.0
"""A coordinator that is stopped (SIGSTOP) for so long while a batch is waited for is ended, and another one started."""

_LEAVE_SECONDS = 30.0


@dataclass
class Chunk:
    """What the group prepared as one batch. `error` is what went wrong with it, if anything."""

    number: int
    result: Result
    data: Any = None
    error: StallfreeError | None = None


@dataclass(frozen=True)
class Elsewhere:
    """The group does not serve what was asked for, but batch `start` of the row and those after it."""

    start: int


@dataclass(frozen=True)
class Onward:
    """The group is through with the epoch that this job was about to begin; it is in `epoch` now."""

    epoch: int


class Line:
    """The connection to one conductor, and the views of its ring.

    Batches may be freed by any thread, at any instant, so that part is safe to be called from finalisers.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.pid = process_of(connection)
        self.views: Views | None = None
        self._channel = Channel(connection)
        self._fd = connection.fileno()
        keep_from_children(self._fd)
        self._process = -1
        try:
            self._process = os.pidfd_open(self.pid)
        except (OSError, AttributeError):
            self._process = -1  # of another name space: the end of the connection must do
        self._lock = threading.Lock()
        self._let_go: deque[int] = deque()
        self._leases: dict[int, weakref.ref[Bytes]] = {}
        self._owner = os.getpid()
        self._closed = False
        self._stopped = float("inf")  # since when, as far as is known

    def welcome(self, folder: Path) -> None:
        """The ring is in `folder`."""
        self.views = Views(folder)

    def send(self, message: bytes) -> None:
        """Send a message, and what was let go of."""
        with self._lock:
            self._channel.send(*self._released(), message)
        self._send_releases(_WAITING)

    def _released(self) -> list[bytes]:
        """The messages for what was let go of since."""
        messages = []
        while self._let_go:
            messages.append(request(Kind.RELEASE, number=self._let_go.popleft()))
        return messages

    def receive(self, deadline: float) -> bytearray | None:
        """The next message; None at the deadline. Raises `Gone` when there will be none."""
        while True:
            try:
                message = self._channel.receive()
            except EOFError:
                raise Gone from None
            if message is not None:
                self._stopped = float("inf")
                return message
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._send_releases(0)
            self._wait(min(left, _LOOK_SECONDS))
            self._stopped = min(self._stopped, time.monotonic()) if is_stopped(self.pid) else float("inf")
            if time.monotonic() - self._stopped >= _STOPPED_SECONDS:
                self.end(f"has been stopped for {_STOPPED_SECONDS:g} s")

    def end(self, why: str) -> None:
        """End the process, which may be stopped, so that it does nothing more when it goes on; then raises `Gone`.

        Does nothing for a process of another name space, which cannot be ended from here.
        """
        if self._process < 0:
            return
        log.warning("process %d, which prepares for a group, %s: it is ended, and another one started", self.pid, why)
        try:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        except ProcessLookupError:
            raise Gone from None
        select.select([self._process], [], [], _ANSWER_SECONDS)
        raise Gone

    def _wait(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN | (select.POLLOUT if self._channel.writing else 0))
        if self._process >= 0:
            poller.register(self._process, select.POLLIN)
        ready = dict(poller.poll(seconds * 1000))
        if self._channel.writing:
            with self._lock:
                self._channel.flush()
        if self._process in ready and not ready.get(self._fd, 0) & select.POLLIN:
            raise Gone

    @property
    def leased(self) -> int:
        """Batches whose memory is in use here, or was until just now."""
        return len(self._leases) + len(self._let_go)

    def lease(self, number: int, slot: int, memory: Bytes) -> None:
        """Batch `number` is let go of when `memory` is freed, on which its tensors are views."""
        size = memory.nbytes

        def end(_: object) -> None:
            self._leases.pop(number, None)
            if os.getpid() == self._owner and not self._closed:
                assert self.views is not None
                self.views.clean(slot, size)
                self.release(number)

        self._leases[number] = weakref.ref(memory, end)

    def release(self, number: int) -> None:
        """Batch `number` is not used here any more. In any thread, also in the midst of `send`.

        The conductor hears of it with the next request, which comes soon in a loop; that spares it half of its wakings.
        """
        self._let_go.append(number)
        self._send_releases(_WAITING)

    def _send_releases(self, waiting: int) -> None:
        """Send what was let go of, if that is more than `waiting` batches."""
        # Whoever cannot get the lock leaves it to the one who has it, who looks again when it is free.
        while len(self._let_go) > waiting and self._lock.acquire(blocking=False):
            try:
                messages = self._released()
                if messages and not self._closed:
                    self._channel.send(*messages)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Hang up. Batches that are kept stay valid."""
        if self._closed or os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            forget(self._fd)
            self._channel.close()
        if self._process >= 0:
            os.close(self._process)
        if self.views is not None:
            self.views.close()


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class Member:
    """See the module. One thread at a time.

    Args:
        group: to be a member of.
        setup: for a conductor, if there is none.
        hello: how to introduce itself.
        seconds: longest wait for a batch.

    Attributes:
        jobs: members of the group, as last heard.
        deaths: conductors that died.
    """

    def __init__(self, group: Group, setup: Setup, hello: Hello, seconds: float) -> None:
        self.jobs = 0
        self.deaths = 0
        self._group = group
        self._setup = setup
        self._hello = hello
        self._seconds = seconds
        self._line: Line | None = None
        self._claim = -1
        self._serial = 0
        self._asked: int | None = None
        self._taken = -1
        self._position = NOWHERE
        self._in_a_row = 0

    def join(self, position: int) -> int:
        """Become a member, who needs the batch at `position` of the row next, or a newcomer; the epoch of this job."""
        self._position = position
        self._claim = self._group.claim()
        while True:
            try:
                return self._enter()
            except Gone:
                self._lost()

    def _enter(self) -> int:
        line = self._line = Line(self._group.reach(self._setup))
        self._asked, self._serial = None, self._serial + 1
        line.send(replace(self._hello, position=self._position).pack())
        epoch = None
        deadline = time.monotonic() + self._seconds
        while epoch is None:
            message = line.receive(deadline)
            if message is None:
                if is_stopped(line.pid):
                    line.end("is stopped")
                raise WaitError(
                    f"process {line.pid}, which prepares for the group {self._group.name!r}, did not let this job in "
                    f"within {self._seconds:g} s: "
                    + ("not all ranks of this job have come" if self._hello.ranks > 1 else "it does not answer")
                )
            kind, _, number, extra = unpack_answer(message)
            if kind == Kind.BROKEN:
                self._broken(message)
            if kind == Kind.WELCOME:
                epoch, self.jobs = number, extra
                line.welcome(Path(os.fsdecode(bytes(body_of(message)))))
        return epoch

    def _lost(self) -> None:
        """The conductor is dead. Nothing that it sent and that was not handed out counts."""
        self._in_a_row += 1
        pid = -1
        if self._line is not None:
            self.deaths += self._line.views is not None  # else it was dying when it was found
            pid = self._line.pid
            self._line.close()
            self._line = None
        if self._in_a_row >= LIVES:
            raise WorkerError(
                f"{LIVES} processes that were to prepare for the group {self._group.name!r} died one after the other "
                f"(the last was {pid}), before a batch came. Kills by the system often mean that memory is short: use "
                "less, or fewer workers",
                ids=[],
            )
        reap(0.0)

    def take(self, number: int, end: int) -> Chunk | Elsewhere | Onward:
        """Wait for batch `number` of the row, and ask for the one after it if that is below `end`."""
        self._position = number
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                if self._line is None:
                    self._enter()
                return self._take(number, end, deadline)
            except Gone:
                self._lost()
                deadline = time.monotonic() + self._seconds

    def _take(self, number: int, end: int, deadline: float) -> Chunk | Elsewhere | Onward:
        line = self._line
        assert line is not None
        if self._asked != number:
            self._ask(line, number)
        while True:
            message = line.receive(deadline)
            if message is None:
                raise WaitError(self._why(line, number))
            kind, serial, told, extra = unpack_answer(message)
            if kind == Kind.BROKEN:
                self._broken(message)
            if serial != self._serial:
                continue
            if kind == Kind.BATCH and told != number:
                line.release(told)  # asked for before an interrupt
            elif kind == Kind.BATCH:
                self._in_a_row = 0
                self._asked, self._taken, self._position = None, number, number + 1
                if number + 1 < end:
                    self._ask(line, number + 1)
                return self._open(line, number, result_of(message), extra)
            elif kind in (Kind.ALONE, Kind.MOVED):
                self._asked = None
                return Elsewhere(told) if kind == Kind.ALONE else Onward(told)

    def _ask(self, line: Line, number: int) -> None:
        self._asked = number
        line.send(request(Kind.ASK, self._serial, number))

    def _open(self, line: Line, number: int, result: Result, keep: int) -> Chunk:
        """The batch in an answer: as a view on the ring while not too many are held, else as a copy."""
        chunk = Chunk(number, result)
        assert line.views is not None
        if result.status == READY:
            try:
                memory = line.views.view(result.slot, result.size)
            except OSError:
                self._position = number
                raise Gone from None
            if line.leased < keep:
                line.lease(number, result.slot, memory)
                chunk.data = read_own_record(memory, copy=False)
                return chunk
            chunk.data = read_own_record(memory, copy=True)
        elif result.status == PRIVATE:
            assert result.memory is not None
            chunk.data = read_own_record(result.memory, copy=False)
        elif result.status == FAILED:
            chunk.error, trace = unpack_note(result.note)
            chunk.error.__cause__ = RemoteTraceback(trace)
        else:
            assert result.status == EMPTY
        line.release(number)
        return chunk

    def skip(self, cursor: int) -> None:
        """Nothing before batch `cursor` is needed."""
        self._position = max(self._position, cursor)
        self._serial += 1
        self._asked = None
        if self._line is not None:
            self._line.send(request(Kind.SKIP, self._serial, cursor, self._taken))

    def _why(self, line: Line, number: int) -> str:
        """The message for a batch that did not come. Raises `Gone` if the coordinator did not answer and is ended."""
        batch = "batch {1} of epoch {0}".format(*divmod(number, len(self._setup.order)))
        why = f"process {line.pid}, which prepares for the group, does not answer: it may be stopped"
        line.send(request(Kind.WHY, self._serial, number))
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (message := line.receive(deadline)) is not None:
            if unpack_answer(message)[0] == Kind.BECAUSE:
                why = bytes(body_of(message)).decode()
                break
        else:
            if not self._in_a_row:
                line.end(f"has not answered for {self._seconds + _ANSWER_SECONDS:g} s")
        return (
            f"{batch} did not come from the group {self._group.name!r} within {self._seconds:g} s: {why}. "
            "Give a larger timeout if samples take so long"
        )

    def _broken(self, message: bytearray) -> None:
        error, trace = unpack_note(body_of(message))
        raise error from RemoteTraceback(trace)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the ring."""
        line = self._line
        return 0 if line is None or line.views is None else line.views.ring_bytes

    def close(self) -> None:
        """Leave the group. If nobody is left, wait until its process has ended."""
        line, self._line = self._line, None
        if line is not None:
            line.send(request(Kind.BYE))
            try:
                deadline = time.monotonic() + _LEAVE_SECONDS
                while (message := line.receive(deadline)) is not None:
                    if unpack_answer(message)[0] == Kind.FAREWELL:
                        break
            except Gone:
                reap(_ANSWER_SECONDS)
            line.close()
        if self._claim >= 0:
            self._group.release(self._claim)
