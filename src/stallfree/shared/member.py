"""A job's membership in a group: its folder and terms, its coordinators, and the batches that the job receives.

A member requests batches from the coordinator, and replaces one that died.
"""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from stallfree import errors
from stallfree.ipc.channel import Message, pack, unpack_error
from stallfree.ipc.folders import SharedFolder, check_name, sweep
from stallfree.ipc.locks import FileLock
from stallfree.ipc.process import Child
from stallfree.loader.messages import FAILED, PRIVATE, READY, Result, unpack_result
from stallfree.loader.ring import slot_bytes
from stallfree.pipeline.codec import read_own_record
from stallfree.raising import raisable
from stallfree.shared.coordinator import GroupSetup, coordinate
from stallfree.shared.link import NEWCOMER, Hello, Kind, Link, PrivateSlots

PROTOCOL = 5
"""The version of the messages and of the group's folder."""

_START_SECONDS, _LEAVE_SECONDS, ANSWER_SECONDS = 120.0, 30.0, 5.0

LIVES = 10
"""Coordinators that may die in a row without delivering a batch before `WorkerError` is raised."""


@dataclass(frozen=True)
class Terms:
    """The settings that the first job of a group decides and later jobs read.

    Attributes:
        same: values that must be equal in all jobs that give one (not None).
        chunk: samples prepared as one batch: those of a batch of the first job, in all of its ranks.
        options: values of `pool.Options`: the numbers of workers and of batches in flight, the bytes of the ring.
    """

    same: dict[str, Any]
    chunk: int
    options: dict[str, Any]


class Group:
    """One job's attachment to the group `name`, which is created if it does not exist.

    Args:
        name: the group's name.
        terms: the terms of this job, which become those of a new group.
        batch_size, ranks: samples per batch of a rank of this job, and number of its ranks.
        divisible: whether batches can be split and joined.

    Attributes:
        name: as given.
        folder: the group's folder.
        terms: the group's terms.

    Raises `InputError` if this job does not fit into the group.
    """

    def __init__(self, name: str, terms: Terms, batch_size: int, ranks: int, divisible: bool) -> None:
        self.name = check_name(name, "group")
        text = json.dumps(vars(terms))
        self._attached = SharedFolder(f"group-{name}", initialize=lambda path: (path / "group.json").write_text(text))
        self.folder = self._attached.path
        try:
            self.terms = _read(self.folder)
            self._check_same(terms.same)
            self._check_sizes(batch_size, ranks, divisible)
            if terms.same["seed"] is not None:
                self.agree_on_seed(terms.same["seed"])
            self._starting = FileLock(self.folder / "starting")
        except BaseException:
            self._attached.close()
            raise

    def _check_same(self, ours: dict[str, Any]) -> None:
        """Raise `InputError` if values of this job differ from the group's."""
        theirs = self.terms.same
        differing = [
            f"{key} differs (it has {theirs[key]!r}, this job {value!r})"
            for key, value in ours.items()
            if None not in (value, theirs.get(key)) and value != theirs[key]
        ]
        if differing:
            raise errors.group_mismatch(
                f"this job does not fit into the group {self.name!r}: {'; '.join(differing)}. Give the same, or the "
                "name of another group"
            )

    def _check_sizes(self, batch_size: int, ranks: int, divisible: bool) -> None:
        """Raise `InputError` if batches of this size cannot be made of the group's chunks."""
        chunk, unit = self.terms.chunk, batch_size * ranks
        fits = chunk % unit == 0 or unit % chunk == 0
        if not (fits if divisible else batch_size == chunk):
            raise errors.collate_output(
                f"batch_size={batch_size} (ranks: {ranks}) does not match the group {self.name!r}, whose first job has "
                f"batches of {chunk}: give a multiple or a divisor of that, for all ranks together; with a collate_fn "
                "the same, on one rank, since its batches cannot be split or joined"
            )

    def agree_on_seed(self, seed: int, *, drawn: bool = False) -> int:
        """Return the group's seed, after setting it to `seed` if the group has none.

        Raises `InputError` if the group has another one, unless `seed` is only drawn.
        """
        file, first = self.folder / "seed", self.terms.same["seed"]
        with contextlib.suppress(FileExistsError):
            file.symlink_to(str(seed if first is None else first))  # which exists with its content or not at all
        self.terms.same["seed"] = agreed = int(os.readlink(file))
        if not drawn:
            self._check_same({"seed": seed})
        return agreed

    def connect(self, setup: GroupSetup) -> Link:
        """Connect to the coordinator; starts one first if there is none.

        Raises `EOFError` if the new coordinator died at once.
        """
        link = Link.open(self.folder)
        if link is None:
            with self._starting.hold(_START_SECONDS, f"starting the group {self.name!r}"):
                link = Link.open(self.folder) or _start(setup, self._attached)
        if link is None:
            raise EOFError
        return link

    def close(self) -> None:
        """Leave the group. The last member removes the folder."""
        self._starting.close()
        self._attached.close()
        sweep(self.folder.parent)  # remove the folders of killed coordinators


def _read(folder: Path) -> Terms:
    try:
        return Terms(**json.loads((folder / "group.json").read_bytes()))
    except (OSError, ValueError, TypeError) as error:  # also one of another release
        raise errors.StorageError(f"the group's folder {folder} cannot be read: {error}. Give another name") from error


# -- coordinators that this process started --------------------------------------------------------------------------


_started: list[tuple[Path, Child]] = []


def _start(setup: GroupSetup, attached: SharedFolder) -> Link | None:
    """Start a coordinator, replace it if it hangs at its start, and connect to it; returns None if it died at once."""
    options, deadline = setup.options, time.monotonic() + _START_SECONDS
    inherited = attached if options.context.get_start_method() == "fork" else None
    attempts = count()
    while True:
        child = Child(
            *(coordinate, setup, inherited),
            context=options.context,
            name="stallfree-coordinator",
            parts=(("the data set", options.dataset), ("collate_fn", options.collate)),
            attempt=next(attempts),
            leads=True,
        )
        try:
            problem = child.wait_until_reported(deadline - time.monotonic())
            if problem is None:
                _started.append((setup.folder, child))
                return Link.open(setup.folder)
            error = unpack_error(problem)
        except (EOFError, errors.WorkerError) as ended:  # it was killed or hangs; or the script has no main guard
            error = ended
        hangs = child.overdue and time.monotonic() < deadline
        child.end(0.0)
        if not hangs:
            raise error


def reap(seconds: float, folder: Path) -> None:
    """Wait up to `seconds` for each coordinator of the group in `folder` that this process started; it is ending."""
    for started in list(_started):
        child = started[1]
        with contextlib.suppress(ValueError):  # another thread has ended it
            if child.join(seconds if started[0] == folder else 0.0) is not None:
                _started.remove(started)
                child.end(0.0)


# -- the member -------------------------------------------------------------------------------------------------------


class Member:
    """A job's membership in a group. See the module. Not thread-safe.

    Args:
        group: the group to join.
        setup: setup for a coordinator, used if there is none.
        hello: description of this member, sent to the coordinator.

    Attributes:
        group, setup: as given.
        jobs: number of members of the group, as last received.
        deaths: number of coordinators that died.
        joined: whether this process is a member.
    """

    def __init__(self, group: Group, setup: GroupSetup, hello: Hello) -> None:
        self.group, self.setup, self.jobs, self.deaths, self.joined = group, setup, 0, 0, False
        self._hello, self._seconds = hello, setup.options.seconds  # the longest wait, if no job gets a batch
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
            raise errors.group_timeout(
                f"process {link.pid}, the coordinator of the group {self.group.name!r}, did not admit this job within "
                f"{self._seconds:g} s: "
                + ("not all ranks of this job have joined" if self._hello.ranks > 1 else "it does not answer")
            )
        if answer.kind == Kind.DROPPED:
            self._disconnect()
            raise errors.InputError(bytes(answer.body).decode(), page="state-mismatch")
        self.jobs = answer.value
        link.slots = PrivateSlots(Path(os.fsdecode(bytes(answer.body))))
        return answer.number

    def _lost(self) -> None:
        """Handle a dead coordinator; batches that it sent and this job has not yielded are discarded."""
        self._in_a_row += 1
        if self._link is not None:
            self.deaths += self._link.slots is not None  # else it was already dying at the connection
        self._disconnect()
        last = self._in_a_row >= LIVES
        reap(ANSWER_SECONDS if last else 0.0, self.group.folder)
        if last:
            raise errors.WorkerError(
                f"{LIVES} coordinators of the group {self.group.name!r} died in a row without delivering a batch. If "
                "the system killed them, memory may be short: use less, or fewer workers"
            )

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
                if asked and not self._in_a_row and link.pid:  # else of another PID namespace, out of reach
                    link.kill("stuck")
                    raise EOFError
                if asked:
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
                self.joined = False
                if number % len(self.setup.order) == 0:
                    return None
                raise errors.group_timeout(f"{bytes(message.body).decode()}, so it gets no more batches of this epoch")
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
        link.send(pack(Kind.REQUEST, number=number, value=1))

    def _timeout(self, number: int, why: str) -> errors.StallfreeError:
        epoch, batch = divmod(number, len(self.setup.order))
        return errors.group_timeout(
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
            self._link.send(pack(Kind.REQUEST, number=cursor))

    @property
    def staging_bytes(self) -> int:
        """Size of the ring in bytes."""
        link = self._link
        return 0 if link is None or link.slots is None else slot_bytes(link.slots.folder)

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self) -> None:
        """Leave the group. The last member waits until the coordinator has ended."""
        try:
            if self._link is not None:
                self._link.send(pack(Kind.LEAVE))
                deadline = time.monotonic() + _LEAVE_SECONDS
                while (message := self._link.next_message(deadline)) and message.kind != Kind.DROPPED:
                    pass
        except EOFError:
            reap(ANSWER_SECONDS, self.group.folder)
        finally:
            self._disconnect()
            self.group.close()
