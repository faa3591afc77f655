"""A job in its group: asks the coordinator for batches, and gets the group another one when that has died."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stallfree.batches.messages import EMPTY, FAILED, PRIVATE, READY, Result, unpack_result
from stallfree.errors import StallfreeError, WaitError, WorkerError
from stallfree.ipc.consumers import Connection, Gone, Message, ask, pack
from stallfree.ipc.fork_guard import Owner
from stallfree.ipc.remote import RemoteTraceback, unpack_plain_error
from stallfree.pipeline.codec import read_own_record
from stallfree.shared.group import Group, reap
from stallfree.shared.preparation import Setup
from stallfree.shared.protocol import NEWCOMER, VERSION, Hello, Kind
from stallfree.shared.views import Views

Bytes = npt.NDArray[np.uint8]

log = logging.getLogger("stallfree")

LIVES = 10
"""Coordinators that may die one after the other, before a batch came of any, until that is an error."""

_WAITING = 1
"""Releases that are sent with the next request, which comes soon in a loop, and not at once."""

_RELEASE_SECONDS = 0.002
"""How long a batch is waited for before they are sent in any case."""

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


class Skipped(NamedTuple):
    """The group does not serve the batch that was asked for, but batch `start` of the row and those after it."""

    start: int


class EpochAdvanced(NamedTuple):
    """The group is through with the epoch that this job was about to begin; it is in `epoch` now."""

    epoch: int


class Link(Connection):
    """The connection to one coordinator, and the views of its ring.

    Batches may be freed by any thread, at any instant, so `release` may be called by finalisers.
    """

    def __init__(self, connection: socket.socket, watch: bool = True) -> None:
        super().__init__(connection, watch)
        self.views: Views | None = None
        self._lock = threading.Lock()
        self._let_go: deque[int] = deque()
        self._leases: dict[int, weakref.ref[Bytes]] = {}
        self._owner = Owner()
        self._stopped = float("inf")  # since when, as far as is known

    def send(self, kind: int, serial: int = 0, number: int = 0, value: int = 0, body: bytes = b"") -> None:
        """Send a message, and the releases."""
        with self._lock:
            self.channel.send(*self._releases(), pack(kind, serial, number, value, body))
        self._send_releases(_WAITING)

    def ask(self, serial: int, number: int) -> None:
        """Ask for a batch, and send the releases; one of them needs no message of its own."""
        with self._lock:
            released = self._let_go.popleft() if self._let_go else -1
            self.channel.send(*self._releases(), pack(Kind.ASK, serial, number, released))
        self._send_releases(_WAITING)

    def flush(self) -> None:
        """Send what has not been sent."""
        with self._lock:
            self.channel.flush()

    def receive(self, deadline: float = 0.0) -> Message | None:
        """The next message; None at the deadline. Raises `Gone` when there will be none."""
        wait = _RELEASE_SECONDS
        while (message := super().receive(min(deadline, time.monotonic() + wait))) is None:
            if time.monotonic() >= deadline:
                return None
            self._send_releases(0)
            if wait == _LOOK_SECONDS:
                self._end_if_stopped()
            wait = _LOOK_SECONDS
        return message

    def _end_if_stopped(self) -> None:
        now = time.monotonic()
        self._stopped = min(self._stopped, now) if is_stopped(self.pid) else float("inf")
        if now - self._stopped >= _STOPPED_SECONDS:
            self.end(f"has been stopped for {_STOPPED_SECONDS:g} s")

    def end(self, why: str) -> None:
        """End the process, which may be stopped, so that it does nothing more when it goes on; then raises `Gone`.

        Does nothing for a process of another name space, which cannot be ended from here.
        """
        if self.process < 0:
            return
        log.warning("process %d, which prepares for a group, %s: it is ended, and another one started", self.pid, why)
        try:
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
        except ProcessLookupError:
            raise Gone from None
        select.select([self.process], [], [], _ANSWER_SECONDS)
        raise Gone

    # -- leases -------------------------------------------------------------------------------------------------------

    def may_keep(self, count: int) -> bool:
        """Whether fewer than `count` batches are in use here, as far as the coordinator knows."""
        if len(self._leases) + len(self._let_go) >= count:
            self._send_releases(0)
        return len(self._leases) + len(self._let_go) < count

    def lease(self, number: int, slot: int, memory: Bytes) -> None:
        """Batch `number` is released when `memory` is freed, on which its tensors are views."""
        size = memory.nbytes

        def end(_: object) -> None:
            self._leases.pop(number, None)
            if self._owner.is_here and not self.closed:
                assert self.views is not None
                self.views.clean(slot, size)
                self.release(number)

        self._leases[number] = weakref.ref(memory, end)

    def release(self, number: int) -> None:
        """Batch `number` is not used here any more. In any thread, also in the midst of `send`."""
        self._let_go.append(number)
        self._send_releases(_WAITING)

    def _releases(self) -> list[bytes]:
        messages = []
        while self._let_go:
            messages.append(pack(Kind.RELEASE, number=self._let_go.popleft()))
        return messages

    def _send_releases(self, waiting: int) -> None:
        """Send the releases, if there are more than `waiting`."""
        # A thread that cannot get the lock leaves them to the one that has it, which looks again afterwards.
        while len(self._let_go) > waiting and self._lock.acquire(blocking=False):
            try:
                messages = self._releases()
                if messages and not self.closed:
                    self.channel.send(*messages)
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the connection. Batches that are kept stay valid."""
        if self._owner.is_here:
            with self._lock:
                super().close()
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
        setup: for a coordinator, if there is none.
        hello: how to introduce itself.
        seconds: longest wait for a batch.

    Attributes:
        setup: as given.
        jobs: members of the group, as last received.
        deaths: coordinators that died.
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
        self._asked: int | None = None
        self._taken = -1
        self._position = NEWCOMER
        self._in_a_row = 0

    def join(self, position: int) -> int:
        """Become a member, that needs the batch at `position` of the row next, or a newcomer; the epoch of this job."""
        self._position = position
        self._claim = self._group.claim()
        while True:
            try:
                return self._enter().number
            except Gone:
                self._lost()

    def _enter(self) -> Message:
        """Connect, and wait until the coordinator lets this job in; its answer."""

        def connect(folder: Path) -> Link | None:
            return Link.open(folder, VERSION, self._position, body=self._hello.pack())

        link = self._link = self._group.reach(self.setup, connect)
        self._asked, self._serial = None, self._serial + 1
        answer = link.receive(time.monotonic() + self._seconds)
        if answer is None:
            if is_stopped(link.pid):
                link.end("is stopped")
            raise WaitError(
                f"process {link.pid}, which prepares for the group {self._group.name!r}, did not let this job in "
                f"within {self._seconds:g} s: "
                + ("not all ranks of this job have come" if self._hello.ranks > 1 else "it does not answer")
            )
        self.jobs = answer.value
        link.views = Views(Path(os.fsdecode(bytes(answer.body))))
        return answer

    def _lost(self) -> None:
        """The coordinator is dead. Nothing that it sent and that was not handed out counts."""
        self._in_a_row += 1
        pid = -1
        if self._link is not None:
            self.deaths += self._link.views is not None  # else it was dying when it was found
            pid = self._link.pid
            self._link.close()
            self._link = None
        if self._in_a_row >= LIVES:
            raise WorkerError(
                f"{LIVES} processes that were to prepare for the group {self._group.name!r} died one after the other "
                f"(the last was {pid}), before a batch came. Kills by the system often mean that memory is short: use "
                "less, or fewer workers",
                ids=[],
            )
        reap(0.0)

    def take(self, number: int, end: int) -> Chunk | Skipped | EpochAdvanced:
        """Wait for batch `number` of the row, and ask for the one after it if that is below `end`."""
        self._position = number
        while True:
            deadline = time.monotonic() + self._seconds
            try:
                if self._link is None:
                    self._enter()
                return self._take(number, end, deadline)
            except Gone:
                self._lost()

    def _take(self, number: int, end: int, deadline: float) -> Chunk | Skipped | EpochAdvanced:
        link = self._link
        assert link is not None
        if self._asked != number:
            self._ask(link, number)
        while True:
            message = link.receive(deadline)
            if message is None:
                raise WaitError(self._why(link, number))
            if message.serial != self._serial:
                continue
            if message.kind != Kind.BATCH:
                self._asked = None
                return (Skipped if message.kind == Kind.SKIPPED else EpochAdvanced)(message.number)
            if message.number == number:
                self._in_a_row = 0
                self._asked, self._taken, self._position = None, number, number + 1
                if number + 1 < end:
                    self._ask(link, number + 1)
                return self._open(link, message)
            link.release(message.number)  # asked for before an interrupt

    def _ask(self, link: Link, number: int) -> None:
        self._asked = number
        link.ask(self._serial, number)

    def _open(self, link: Link, message: Message) -> Chunk:
        """The batch in a message: as a view on the ring while not too many are held, else as a copy."""
        number, result = message.number, unpack_result(message.body)
        chunk = Chunk(number, result)
        assert link.views is not None
        if result.status == READY:
            try:
                memory = link.views.view(result.slot, result.size)
            except OSError:
                self._position = number
                raise Gone from None
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
            chunk.error, trace = unpack_plain_error(result.note)
            chunk.error.__cause__ = RemoteTraceback(trace)
        else:
            assert result.status == EMPTY
        link.release(number)
        return chunk

    def skip(self, cursor: int) -> None:
        """Nothing before batch `cursor` is needed."""
        self._position = max(self._position, cursor)
        self._serial += 1
        self._asked = None
        if self._link is not None:
            self._link.send(Kind.SKIP, self._serial, cursor, self._taken)

    def _why(self, link: Link, number: int) -> str:
        """The message for a batch that did not come. Raises `Gone` if the coordinator did not answer and is ended."""
        batch = "batch {1} of epoch {0}".format(*divmod(number, len(self.setup.order)))
        answer = ask(self._group.folder, VERSION, Kind.WHY, number, _ANSWER_SECONDS)
        why = f"process {link.pid}, which prepares for the group, does not answer: it may be stopped"
        if answer is not None:
            why = bytes(answer.body).decode()
        elif not self._in_a_row:
            link.end(f"has not answered for {self._seconds + _ANSWER_SECONDS:g} s")
        return (
            f"{batch} did not come from the group {self._group.name!r} within {self._seconds:g} s: {why}. "
            "Give a larger timeout if samples take so long"
        )

    @property
    def staging_bytes(self) -> int:
        """Bytes of the ring."""
        link = self._link
        return 0 if link is None or link.views is None else link.views.ring_bytes

    def close(self) -> None:
        """Leave the group. If no member is left, wait until its process has ended."""
        link, self._link = self._link, None
        if link is not None:
            link.send(Kind.BYE)
            try:
                deadline = time.monotonic() + _LEAVE_SECONDS
                while (message := link.receive(deadline)) is not None and message.kind != Kind.FAREWELL:
                    pass
            except Gone:
                reap(_ANSWER_SECONDS)
            link.close()
        if self._claim >= 0:
            self._group.release(self._claim)
