"""The coordinator process: prepares a group's batches once, and grants each to every member.

It is a child process of one of the jobs, started by the first job that finds none. It ends with that job, or when no
member is left. It holds no state that could be lost: every batch can be prepared again from its number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from stallfree.ipc.channel import ERROR, Connection, Message, Server, pack
from stallfree.ipc.folders import SharedFolder
from stallfree.ipc.locks import FileLock
from stallfree.ipc.process import Parent
from stallfree.ipc.remote import pack_error
from stallfree.loader.messages import EMPTY, FAILED, NO_SLOT, UNDONE, Ids, Result, Task
from stallfree.loader.order import Order
from stallfree.loader.pool import Options, WorkerPool, new_counts
from stallfree.shared.link import Hello, Kind, unpack_hello
from stallfree.shared.schedule import Grant, Schedule

_SLOTS_PER_MEMBER = 4
"""Slots per member beyond the batches in flight: the batches that it may hold, and one being sent to it."""

_RETURN_SECONDS = 1.0
"""Seconds a new coordinator waits for its predecessor's members, whose locks show that they are alive."""

_FIRST_WAIT = 60.0
_CHECK_SECONDS = 1.0

log = logging.getLogger("stallfree")


@dataclass
class Setup:
    """The configuration of a coordinator.

    Attributes:
        folder: the group's folder.
        options: options of the worker pool.
        base_seed: seed of the workers' own generators.
        order: order of the chunks.
        lag_seconds: seconds that laggards may hold up the other members.
    """

    folder: Path
    options: Options
    base_seed: int
    order: Order
    lag_seconds: float


def coordinate(parent: Parent, setup: Setup, attached: SharedFolder | None) -> None:
    """Run a coordinator.

    Args:
        parent: the parent process. Receives a report once members may connect, or an error.
        setup: configuration of the group.
        attached: the parent's attachment to the folder, inherited by a fork; None without a fork.
    """
    torch.set_num_threads(1)  # the parent's threads do not survive a fork; OpenMP would wait for them
    if attached is not None:
        attached.close()
    coordinator = None
    try:
        coordinator = Coordinator(parent, setup)
        with contextlib.suppress(OSError):  # the parent has ended: `run` detects it
            parent.report()
        coordinator.run()
    except Exception as error:
        packed = pack_error(error)
        for peer in () if coordinator is None else coordinator.server.peers:
            peer.send(pack(ERROR, body=packed))
        with contextlib.suppress(OSError):
            parent.send(packed)
        raise
    finally:
        if coordinator is not None:
            coordinator.close()
        sys.stdout.flush()
        sys.stderr.flush()


class Coordinator:
    """Serves the members of one group and prepares its batches. See the module."""

    def __init__(self, parent: Parent, setup: Setup) -> None:
        self._setup, self._parent = setup, parent
        self._name = setup.folder.name.removeprefix("group-")
        self._folder = SharedFolder(setup.folder.name, root=setup.folder.parent, initialize=None)
        self._members_lock = FileLock(setup.folder / "members")
        ahead = setup.options.ahead
        self._pool = WorkerPool(setup.options, setup.base_seed, new_counts(), slots=ahead + _SLOTS_PER_MEMBER)
        self._schedule = Schedule(len(setup.order), ahead, _next_epoch(setup.folder))
        self._plan = lru_cache(2)(lambda epoch: list[Ids](setup.order.batches(epoch, 0)))
        self._noted = -1
        self._tasks: dict[int, Task] = {}
        self._ready: dict[int, tuple[int, bytes]] = {}  # slot and packed result of each ready batch
        self._largest = 0
        self._blocked: float | None = None  # since when all slots have been full while a member waits
        self._hellos: dict[Connection, Hello] = {}  # of members and of pending members
        self._begun = self._delivered = time.monotonic()
        self._serving = self._had_members = self._parent_ended = False
        self._last: Connection | None = None
        self.server = Server(setup.folder)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until no member is left, the parent ends, or no worker can be started."""
        while not self._is_over():
            back = len(self._hellos)
            waited = time.monotonic() - self._begun > _RETURN_SECONDS
            if not self._serving and back and (waited or back >= self._members_lock.count_claims()):
                self._serving = True
                self._admit_newcomers()
            if self._serving:
                self._start_more()
            self._wait()
            for result in self._pool.poll():
                self._collect(result)
            if self._pool.stuck:
                log.warning("workers of the group %s hang at their start: the coordinator is replaced", self._name)
                return

    def _is_over(self) -> bool:
        if self._parent_ended:
            return True
        if self.server.peers:
            if self._last is not None:  # another member has joined meanwhile
                self._last.close()
                self._last = None
            return False
        return self._had_members or time.monotonic() - self._begun > _FIRST_WAIT

    def _wait(self) -> None:
        """Wait for the next event, for a bounded time."""
        nothing = not self._pool.prepare_wait()
        poller = select.poll()
        poller.register(self._parent, select.POLLIN)
        for fd, events in [*self._pool.descriptors, *self.server.descriptors]:
            poller.register(fd, events)
        seconds = _CHECK_SECONDS if self._serving else 0.01
        if self._blocked is not None:
            seconds = min(seconds, max(0.001, self._blocked + self._setup.lag_seconds - time.monotonic()))
        if not poller.poll(1000 * seconds if nothing else 0):
            self._pool.check()
        for peer, message in self.server.receive():
            try:
                if message is not None:
                    self._serve(peer, message)
                else:
                    self._drop(peer)
            except Exception as error:  # an error of one member must not end the others
                log.warning("a member of the group %s is dropped after an error: %s", self._name, error)
                self._drop(peer)
        self._parent_ended = self._parent.wait(0.0)

    # -- members ------------------------------------------------------------------------------------------------------

    def _serve(self, peer: Connection, message: Message) -> None:
        kind, serial, number, value, _ = message
        if kind == Kind.REQUEST:
            grant = self._schedule.request(peer, serial, number)
            if grant is not None:
                self._send(grant)
            if value >= 0:
                self._free(self._schedule.release(peer, value))
            if grant is None:
                self._free(self._schedule.free())
        elif kind == Kind.RELEASE:
            self._free(self._schedule.release(peer, number))
        elif kind == Kind.SKIP:
            self._free(self._schedule.skip(peer, number, value))
        elif kind == Kind.HELLO:
            self._greet(peer, message)
        elif kind == Kind.EXPLAIN:
            ago = int(1000 * (time.monotonic() - self._delivered))
            peer.send(pack(Kind.EXPLANATION, value=ago, body=self._explain(number).encode()))
        elif kind == Kind.LEAVE:
            if len(self.server.peers) > 1:
                peer.send(pack(Kind.LEFT))
            self._drop(peer)

    def _greet(self, peer: Connection, message: Message) -> None:
        """Register a process as a pending member; one that returns, or resumes an epoch, is admitted at once."""
        self._hellos[peer] = unpack_hello(message.body)
        if message.number >= 0:
            if not message.value and self._schedule.is_behind(message.number):  # it was not in the group before
                epoch, now = message.number // self._schedule.batches, self._schedule.epoch
                text = f"this job continues epoch {epoch}, and the group {self._name!r} is in epoch {now}"
                peer.send(pack(Kind.DROPPED, body=f"{text}: continue it with a group of its own".encode()))
                return
            self._admit(peer, message.number)
        self._admit_newcomers()

    def _admit_newcomers(self) -> None:
        """Admit newcomers once the group has started; the ranks of one job are admitted together."""
        for hello in set(self._hellos.values()) if self._serving else ():
            members = self._schedule.members
            job = [peer for peer, other in self._hellos.items() if other.job == hello.job and peer not in members]
            if len(job) >= hello.ranks:
                first = self._schedule.epoch * self._schedule.batches
                for peer in job:
                    self._admit(peer, first)

    def _admit(self, peer: Connection, position: int) -> None:
        self._schedule.join(peer, position)
        self._had_members = True
        self._resize()
        folder = os.fsencode(self._pool.ring.slots.folder)
        peer.send(pack(Kind.WELCOME, 0, position, len(self._schedule.members), folder))

    def _drop(self, peer: Connection) -> None:
        """Free everything held by a member that has left or died."""
        was_member = self._hellos.pop(peer, None) is not None
        self._free(self._schedule.leave(peer))
        self._resize()
        if was_member and not self.server.peers - {peer}:
            self._last = peer  # `close` closes its connection after the cleanup
            self.server.peers.discard(peer)
        else:
            self.server.drop(peer)

    def _send(self, grant: Grant) -> None:
        peer, serial, number = grant
        members, count = len(self._schedule.members), self._pool.ring.count
        spare = count - max(1, min(self._schedule.ahead, count // 2)) - members
        keep = max(0, min(_SLOTS_PER_MEMBER - 1, spare // max(1, members)))  # so that slots for new batches remain
        self._delivered = time.monotonic()
        peer.send(pack(Kind.BATCH, serial, number, keep, self._ready[number][1]))

    def _explain(self, batch: int) -> str:
        """Return why a batch is not ready, as text for a message."""
        task, names = self._tasks.get(batch), ", ".join(map(self._describe, self._schedule.laggards()))
        if task is not None:
            return f"it is with {self._pool.describe(task)}; its samples are {task.ids.tolist()}"
        return f"the ring is full of batches that {names} did not take" if names else "it has not been started"

    def _describe(self, member: Connection) -> str:
        return f"process {member.pid} ({self._hellos[member].name})"

    # -- batches ------------------------------------------------------------------------------------------------------

    def _start_more(self) -> None:
        """Start as many batches as the slots and the limit in flight allow."""
        while (number := self._schedule.next_to_start()) is not None and len(self._tasks) < self._schedule.ahead:
            if not self._pool.room and not self._make_room():
                return
            self._blocked = None
            if (number := self._schedule.next_to_start()) is not None:
                self._start(number)
        self._blocked = None

    def _make_room(self) -> bool:
        """Return whether a batch can be started though all slots are full. Laggards are dropped after a while."""
        if self._tasks or not self._schedule.has_waiting:
            self._blocked = None
            return False
        if dropped := self._schedule.drop_one():
            self._free(dropped)
            return True
        now = time.monotonic()
        self._blocked = now if self._blocked is None else self._blocked
        if now - self._blocked < self._setup.lag_seconds:
            return False
        for member in self._schedule.laggards():
            text = f"{self._describe(member)} has held up the group {self._name!r} for {self._setup.lag_seconds:g} s"
            log.warning("%s: it gets no more batches. Close the loader of a job that has finished", text)
            member.send(pack(Kind.DROPPED, body=text.encode()))
            self._free(self._schedule.drop(member))
        return True  # if all slots are held for good, the batch is made without one

    def _start(self, number: int) -> None:
        self._schedule.start(number)
        epoch, batch = divmod(number, self._schedule.batches)
        if epoch > self._noted:
            self._noted = epoch
            _note_epoch(self._setup.folder, epoch)
        ids = self._plan(epoch)[batch]
        task = self._tasks[number] = Task(epoch + 1, batch, NO_SLOT, epoch, ids)  # tokens distinguish the epochs
        self._pool.submit(task, gather=self._pool.builder.can_gather(ids))

    def _collect(self, result: Result) -> None:
        """Store a finished batch, and send it to the members that wait for it."""
        number = (result.token - 1) * self._schedule.batches + result.number
        task = self._tasks[number]
        if result.status == UNDONE:
            task.slot = result.slot
            self._pool.submit(task, gather=False)
            return
        del self._tasks[number]
        if result.size > self._largest:
            self._largest = result.size
            self._resize()
        slot = result.slot
        if result.status in (FAILED, EMPTY):
            self._pool.ring.give(slot)
            slot = NO_SLOT
        self._ready[number] = slot, b"".join(result.pack())
        grants, freed = self._schedule.finish(number)
        for grant in grants:
            self._send(grant)
        self._free(freed)

    def _free(self, numbers: list[int]) -> None:
        """Free the slots of batches that are no longer needed."""
        for number in numbers:
            self._pool.ring.give(self._ready.pop(number)[0])

    def _resize(self) -> None:
        """Resize the ring to the slots that the members need, within the limit of bytes."""
        count = self._schedule.ahead + _SLOTS_PER_MEMBER * max(1, len(self._schedule.members))
        staging = self._setup.options.staging
        if staging is not None:
            count = min(count, max(2, staging * 8 // 9 // max(self._largest, 1)))
        self._pool.ring.resize(count)

    def close(self) -> None:
        """Stop the workers, close the connections and remove the ring."""
        self.server.close()  # first, so that members look for another coordinator
        self._pool.close()
        self._members_lock.close()
        self._folder.close()
        if self._last is not None:
            self._last.close()


def _next_epoch(folder: Path) -> int:
    """Return the epoch after the last one of which a batch was prepared."""
    try:
        return int((folder / "epoch").read_text()) + 1
    except (OSError, ValueError):
        return 0


def _note_epoch(folder: Path, epoch: int) -> None:
    """Record that a batch of this epoch was prepared; newcomers to the next coordinator start after it."""
    with contextlib.suppress(OSError):
        draft = folder / f"epoch-{os.getpid()}"
        draft.write_text(str(epoch))
        draft.rename(folder / "epoch")
