"""A job's membership in its group, and the epochs of the job.

`Member` requests batches from the coordinator over a `Link`, and replaces a coordinator that died. `EpochIterator`
converts them, the *chunks*, into the job's own batches (`Rebatching`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stallfree.errors import InputError, WorkerError, group_timeout
from stallfree.ipc.channel import Message, pack
from stallfree.loader.messages import EMPTY, FAILED, NOTHING, PRIVATE, READY, Ids, Result, unpack_result
from stallfree.loader.run import Batch, pinned
from stallfree.notes import note_samples, raisable
from stallfree.pipeline.codec import read_own_record
from stallfree.pipeline.randomness import Randomness
from stallfree.shared.coordinator import Setup
from stallfree.shared.group import Group, reap
from stallfree.shared.link import ANSWER_SECONDS, NEWCOMER, Hello, Kind, Link, Views, is_stopped
from stallfree.shared.rebatching import Rebatching

LIVES = 10
"""Coordinators that may die in a row without delivering a batch before `WorkerError` is raised."""

_LEAVE_SECONDS = 30.0


class Chunk(NamedTuple):
    """A batch prepared by the group. `error` is set if its preparation failed."""

    result: Result
    data: Any = None
    error: BaseException | None = None


class Member:
    """A job's membership in a group. See the module. Not thread-safe.

    Args:
        group: the group to join.
        setup: setup for a coordinator, used if there is none.
        hello: description of this member, sent to the coordinator.
        seconds: longest wait without a batch for any job of the group.

    Attributes:
        setup: as given.
        jobs: number of members of the group, as last received.
        deaths: number of coordinators that died.
        joined: whether this process is a member.
        next_epoch: the epoch of the job's next pass.
    """

    def __init__(self, group: Group, setup: Setup, hello: Hello, seconds: float) -> None:
        self.setup, self.jobs, self.deaths = setup, 0, 0
        self.joined, self.next_epoch = False, 0
        self._group, self._hello, self._seconds = group, hello, seconds
        self._link: Link | None = None
        self._claim = -1
        self._serial = self._in_a_row = 0
        self._requested: int | None = None
        self._taken, self._position = -1, NEWCOMER

    def join(self, position: int = NEWCOMER) -> int:
        """Join as a member whose next batch is `position`, or as `NEWCOMER`; returns the number of its first batch."""
        self._position = position
        if self._claim < 0:
            self._claim = self._group.claim()
        while True:
            try:
                self._position = self._enter(returns=False).number
            except EOFError:
                self._lost()
            else:
                self.joined = True
                return self._position

    def _enter(self, *, returns: bool) -> Message:
        """Connect, wait until the coordinator admits this job, and return its answer."""

        def connect(folder: Path) -> Link | None:
            link = Link.open(folder)
            if link is not None:
                link.send(pack(Kind.HELLO, number=self._position, value=returns, body=self._hello.pack()))
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
        if answer.kind == Kind.DROPPED:
            self._leave()
            raise InputError(bytes(answer.body).decode(), page="state-mismatch")
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

    def take(self, number: int, end: int) -> Chunk | None:
        """Wait for batch `number`, and request the next one if it is below `end`.

        Returns None if the coordinator has dropped this job, which was late at the begin of an epoch: join again.
        """
        self._position = number
        while True:
            try:
                if self._link is None:
                    self._enter(returns=True)
                return self._take(number, end)
            except EOFError:
                self._lost()

    def _take(self, number: int, end: int) -> Chunk | None:
        link, deadline = self._link, time.monotonic() + self._seconds
        assert link is not None
        if self._requested != number:
            self._request(link, number)
        while True:
            message = link.next_message(deadline)
            if message is None:
                deadline = self._later(link, number)
            elif message.kind == Kind.DROPPED:
                self._leave()
                if number % len(self.setup.order) == 0:
                    return None
                raise group_timeout(f"{bytes(message.body).decode()}, so it gets no more batches of this epoch")
            elif message.kind == Kind.BATCH and message.serial == self._serial:
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
        data, error = None, None
        assert link.views is not None
        if result.status == READY:
            try:
                memory = link.views.view(result.slot, result.size)
            except OSError:
                self._position = number
                raise EOFError from None
            if link.may_keep(message.value):
                link.lease(number, result.slot, memory)
                return Chunk(result, read_own_record(memory, copy=False))
            data = read_own_record(memory, copy=True)
            link.views.drop(result.slot)
        elif result.status == PRIVATE:
            assert result.memory is not None
            data = read_own_record(result.memory, copy=False)
        elif result.status == FAILED:
            error = raisable(result.error)
        else:
            assert result.status == EMPTY
        link.release(number)
        return Chunk(result, data, error)

    def skip(self, cursor: int) -> None:
        """Notify the coordinator that no batch before `cursor` is needed."""
        self._position = max(self._position, cursor)
        self._serial += 1
        self._requested = None
        if self._link is not None:
            self._link.send(pack(Kind.SKIP, self._serial, cursor, self._taken))

    def _later(self, link: Link, number: int) -> float:
        """Return a later deadline if other jobs have received batches meanwhile; otherwise raise `WaitError`.

        Kills an unresponsive coordinator, and raises `EOFError`.
        """
        link.send(pack(Kind.EXPLAIN, number=number))
        deadline = time.monotonic() + ANSWER_SECONDS
        while (answer := link.next_message(deadline)) is not None and answer.kind != Kind.EXPLANATION:
            if answer.kind == Kind.BATCH:
                link.release(answer.number)
            self._requested = None
        why = f"process {link.pid}, the coordinator of the group, does not answer: it may be stopped"
        if answer is not None:
            left = self._seconds - answer.value / 1000
            if left > 0:
                if self._requested is None:
                    self._request(link, number)
                return time.monotonic() + left
            why = bytes(answer.body).decode()
        elif not self._in_a_row:
            link.end(f"has not answered for {self._seconds + ANSWER_SECONDS:g} s")
        batch = "batch {1} of epoch {0}".format(*divmod(number, len(self.setup.order)))
        raise group_timeout(
            f"the group {self._group.name!r} did not deliver {batch} within {self._seconds:g} s: {why}. "
            "Give a larger timeout if samples take so long"
        )

    @property
    def staging_bytes(self) -> int:
        """Size of the ring in bytes."""
        link = self._link
        return 0 if link is None or link.views is None else link.views.ring_bytes

    def _leave(self) -> None:
        """Leave the group. The last member waits until the coordinator has ended."""
        link, self._link, self.joined = self._link, None, False
        if link is not None:
            link.keep_held()
            link.send(pack(Kind.LEAVE))
            try:
                deadline = time.monotonic() + _LEAVE_SECONDS
                while (message := link.next_message(deadline)) is not None and message.kind != Kind.LEFT:
                    pass
            except EOFError:
                reap(ANSWER_SECONDS, self._group.folder)
            link.close()

    def close(self) -> None:
        """Leave the group for good."""
        self._leave()
        if self._claim >= 0:
            self._group.release(self._claim)


class EpochIterator:
    """One epoch of one job. A later one of the same loader ends it.

    Args:
        loader: kept alive as long as this object.
        member: the job's membership in its group.
        rebatching: returns what makes the job's batches of an epoch.
        epoch: the epoch.
        done: numbers of the batches already yielded, if the epoch is resumed.
        counts: the job's counts.
        transform, pin, with_ids: as of `SharedLoader`.

    Attributes:
        done: numbers of the batches yielded.
        ended: whether the pass has ended.
        epoch: the group's epoch.
    """

    def __init__(
        self,
        loader: object,
        member: Member,
        rebatching: Callable[[int], Rebatching],
        epoch: int,
        done: frozenset[int],
        counts: dict[str, float],
        transform: Callable[[Any], Any] | None,
        *,
        pin: bool,
        with_ids: bool,
    ) -> None:
        self.done, self.ended, self._replaced = set(done), False, False
        self._loader, self._member, self._rebatching_of, self._counts = loader, member, rebatching, counts
        self._transform, self._pin, self._with_ids = transform, pin, with_ids
        self._drawing = Randomness(transform)
        self._batches = len(member.setup.order)
        self._ready: deque[tuple[int, Any, Ids]] = deque()
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch, first, self._rebatching = epoch, epoch * self._batches, self._rebatching_of(epoch)
        self._at, self._end = first + self._rebatching.first_chunk(self.done), first + self._rebatching.chunks

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        return len(self._rebatching)

    def __next__(self) -> Any:
        if self._replaced:
            raise InputError(
                "a later iteration of this SharedLoader has begun, and ended this one: a job has one at a time. Make "
                "a second loader to go through the data twice at once",
                page="argument-conflict",
            )
        while not self._ready:
            if self.ended or self._at >= self._end:
                self.close()
                raise StopIteration
            self._next_chunk()
        return self._finish_batch(*self._ready.popleft())

    def _next_chunk(self) -> None:
        """Take one more chunk and queue the batches that it completes."""
        started = time.monotonic()
        try:
            while (chunk := self._member.take(self._at, self._end)) is None:
                self._begin(self._member.join() // self._batches)
        finally:
            self._counts["wait_seconds"] += time.monotonic() - started
        chunk.result.add_to(self._counts)
        number, self._at = self._at - self.epoch * self._batches, self._at + 1
        ids = NOTHING if chunk.error is not None else chunk.result.ids
        batches = self._rebatching.feed(number, chunk.data, ids)
        self._ready.extend(batch for batch in batches if batch[0] not in self.done)
        if chunk.error is not None:
            raise chunk.error

    def _finish_batch(self, number: int, data: Any, ids: Ids) -> Any:
        self.done.add(number)
        if self._transform is not None:
            with self._drawing as drawing:
                drawing.seed(self._member.setup.options.seed, self.epoch, -1 - number)
                try:
                    data = self._transform(data)
                except Exception as error:
                    note_samples(error, ids.tolist(), "transforming")
                    if isinstance(error, StopIteration):
                        raise raisable(error) from error
                    raise
        if self._pin and torch.cuda.is_available():
            data = pinned(data)
        self._counts["batches"] += 1
        self._counts["samples"] += len(ids)
        return Batch(data, torch.from_numpy(np.array(ids)), None) if self._with_ids else data

    def replace(self) -> None:
        """End this pass for a later one: its next batch is an error."""
        self._replaced = not self.ended
        self.close()

    def close(self) -> None:
        """End this pass; notify the group that no more of this epoch is needed. Idempotent."""
        if not self.ended:
            self.ended = True
            self._ready.clear()
            self._member.next_epoch = self.epoch + 1
            if self._member.joined:
                self._member.skip((self.epoch + 1) * self._batches)

    def __del__(self) -> None:
        if hasattr(self, "_at"):
            self.close()
