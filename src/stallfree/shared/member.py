"""A job's membership in its group: requests batches from the coordinator, and replaces a coordinator that died."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from stallfree.errors import InputError, WorkerError, group_timeout
from stallfree.ipc.channel import Message, pack
from stallfree.loader.messages import FAILED, PRIVATE, READY, Result, unpack_result
from stallfree.loader.ring import slot_bytes
from stallfree.notes import raisable
from stallfree.pipeline.codec import read_own_record
from stallfree.shared.coordinator import GroupSetup
from stallfree.shared.group import Group, reap
from stallfree.shared.link import ANSWER_SECONDS, NEWCOMER, Hello, Kind, Link, PrivateSlots

LIVES = 10
"""Coordinators that may die in a row without delivering a batch before `WorkerError` is raised."""

_LEAVE_SECONDS = 30.0


class Member:
    """A job's membership in a group. See the module. Not thread-safe.

    Args:
        group: the group to join.
        setup: setup for a coordinator, used if there is none.
        hello: description of this member, sent to the coordinator.
        seconds: longest wait without a batch for any job of the group.

    Attributes:
        group, setup: as given.
        jobs: number of members of the group, as last received.
        deaths: number of coordinators that died.
        joined: whether this process is a member.
    """

    def __init__(self, group: Group, setup: GroupSetup, hello: Hello, seconds: float) -> None:
        self.group, self.setup, self.jobs, self.deaths, self.joined = group, setup, 0, 0, False
        self._hello, self._seconds = hello, seconds
        self._link: Link | None = None
        self._requested: int | None = None  # the batch of the open request
        self._in_a_row = 0  # coordinators that died without delivering a batch

    def join(self, first: int = NEWCOMER) -> int:
        """Join as a member whose next batch is `first`, or as `NEWCOMER`; returns the number of its first batch."""
        while True:
            try:
                first = self._enter(first, returns=False)
            except EOFError:
                self._lost()
            else:
                self.joined = True
                return first

    def _enter(self, first: int, *, returns: bool) -> int:
        """Connect, wait until the coordinator admits this job, and return the number of its first batch."""
        link = self._link = self.group.connect(self.setup)
        self._requested = None
        link.send(pack(Kind.HELLO, number=first, value=returns, body=json.dumps(self._hello).encode()))
        answer = link.next_message(time.monotonic() + self._seconds)
        if answer is None:
            raise group_timeout(
                f"process {link.pid}, the coordinator of the group {self.group.name!r}, did not admit this job within "
                f"{self._seconds:g} s: "
                + ("not all ranks of this job have joined" if self._hello.ranks > 1 else "it does not answer")
            )
        if answer.kind == Kind.DROPPED:
            self._disconnect()
            raise InputError(bytes(answer.body).decode(), page="state-mismatch")
        self.jobs = answer.value
        link.slots = PrivateSlots(Path(os.fsdecode(bytes(answer.body))))
        return answer.number

    def _lost(self) -> None:
        """Handle a dead coordinator; batches that it sent and this job has not yielded are discarded."""
        self._in_a_row += 1
        pid = -1
        if self._link is not None:
            self.deaths += self._link.slots is not None  # else it was already dying at the connection
            pid = self._link.pid
            self._link.close()
            self._link = None
        if self._in_a_row >= LIVES:
            raise WorkerError(
                f"{LIVES} coordinators of the group {self.group.name!r} died in a row (the last was process {pid}) "
                "without delivering a batch. If the system killed them, memory may be short: use less, or fewer "
                "workers",
                ids=[],
            )
        reap(0.0, self.group.folder)

    def take(self, number: int, end: int) -> Result | None:
        """Wait for batch `number`, and request the next one if it is below `end`.

        Returns None if the coordinator has dropped this job, which was late at the begin of an epoch: join again.
        """
        while True:
            try:
                if self._link is None:
                    self._enter(number, returns=True)
                result = self._receive(number, end)
                self._in_a_row = 0
                return result
            except EOFError:
                self._lost()

    def _receive(self, number: int, end: int) -> Result | None:
        link, deadline, asked = self._link, time.monotonic() + self._seconds, False
        assert link is not None
        if self._requested != number:
            self._request(link, number)
        while True:
            message = link.next_message(deadline)
            if message is None:
                if asked:
                    if not self._in_a_row:
                        link.end(f"has not answered for {self._seconds + ANSWER_SECONDS:g} s")
                    raise self._timeout(number, f"process {link.pid}, which prepares it, does not answer")
                asked, deadline = True, time.monotonic() + ANSWER_SECONDS
                link.send(pack(Kind.EXPLAIN, number=number))
            elif message.kind == Kind.EXPLANATION and asked:
                left = self._seconds - message.value / 1000
                if left <= 0:
                    raise self._timeout(number, bytes(message.body).decode())
                asked, deadline = False, time.monotonic() + left  # other jobs have received batches meanwhile
            elif message.kind == Kind.DROPPED:
                self._disconnect()
                if number % len(self.setup.order) == 0:
                    return None
                raise group_timeout(f"{bytes(message.body).decode()}, so it gets no more batches of this epoch")
            elif message.kind == Kind.BATCH and message.number == number:
                self._requested = None
                if number + 1 < end:
                    self._request(link, number + 1)
                with contextlib.suppress(FileNotFoundError):  # its slot was removed; the next message says why
                    return self._open(link, message)
            elif message.kind == Kind.BATCH:
                link.release(message.number)  # requested before an interrupt, or before the epoch was ended

    def _request(self, link: Link, number: int) -> None:
        self._requested = number
        link.send(pack(Kind.REQUEST, number=number))

    def _timeout(self, number: int, why: str) -> BaseException:
        epoch, batch = divmod(number, len(self.setup.order))
        return group_timeout(
            f"the group {self.group.name!r} did not deliver batch {batch} of epoch {epoch} within {self._seconds:g} s: "
            f"{why}. Give a larger timeout if samples take so long"
        )

    def _open(self, link: Link, message: Message) -> Result:
        """Return the result; its value is the error, or the batch: a view, or a copy if too many views are held."""
        number, result, slots = message.number, unpack_result(message.body), link.slots
        assert slots is not None
        if result.status == READY:
            memory = slots.view(result.slot, result.size)
            if link.held < message.value:
                link.lease(number, result.slot, result.size, memory)
                result.value = read_own_record(memory, copy=False)
                return result
            result.value = read_own_record(memory, copy=True)
            slots.drop(result.slot)
        elif result.status == PRIVATE:
            assert result.memory is not None
            result.value = read_own_record(result.memory, copy=False)
        elif result.status == FAILED:
            result.value = raisable(result.error)
        link.release(number)
        return result

    def skip(self, cursor: int) -> None:
        """Notify the coordinator that no batch before `cursor` is needed."""
        self._requested = None
        if self._link is not None:
            self._link.send(pack(Kind.SKIP, number=cursor))

    @property
    def staging_bytes(self) -> int:
        """Size of the ring in bytes."""
        link = self._link
        return 0 if link is None or link.slots is None else slot_bytes(link.slots.folder)

    def _disconnect(self) -> None:
        link, self._link, self.joined = self._link, None, False
        if link is not None:
            link.close()

    def close(self) -> None:
        """Leave the group. The last member waits until the coordinator has ended."""
        try:
            if self._link is not None:
                self._link.send(pack(Kind.LEAVE))
                deadline = time.monotonic() + _LEAVE_SECONDS
                while (message := self._link.next_message(deadline)) is not None and message.kind != Kind.LEFT:
                    pass
        except EOFError:
            reap(ANSWER_SECONDS, self.group.folder)
        finally:
            self._disconnect()
            self.group.close()
