"""The coordinator process: prepares a group's batches once, and grants each to every member.

It is a child process of one of the jobs, started by the first job that finds none. It ends with that job, or when no
member is left. It holds no state that could be lost: every batch can be prepared again from its number.
"""

import contextlib
import json
import os
import select
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from stallfree.ipc.channel import ERROR, Connection, Message, Server, pack, pack_error
from stallfree.ipc.folders import SharedFolder
from stallfree.ipc.process import Parent
from stallfree.loader.messages import EMPTY, FAILED, NO_SLOT, UNDONE, Ids, Result, Task
from stallfree.loader.order import Order
from stallfree.loader.pool import Options, WorkerPool, new_counts
from stallfree.raising import log
from stallfree.shared.link import Hello, Kind
from stallfree.shared.schedule import Entry, Schedule

_SLOTS_PER_MEMBER = 4
"""Slots per member beyond the batches in flight: the batches that it may hold, and one being sent to it."""

_EPOCH = "epoch-"
"""Prefix of the files whose names are the begun epochs, after which newcomers to the next coordinator start."""

_FIRST_WAIT = 60.0
_CHECK_SECONDS = 1.0


@dataclass
class GroupSetup:
    """The configuration of a coordinator.

    Attributes:
        folder: the group's folder.
        options: options of the worker pool.
        base_seed: seed of the workers' own generators.
        order: order of the chunks.
    """

    folder: Path
    options: Options
    base_seed: int
    order: Order


def coordinate(parent: Parent, setup: GroupSetup, attached: SharedFolder | None) -> None:
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


class Coordinator:
    """Serves the members of one group and prepares its batches. See the module."""

    def __init__(self, parent: Parent, setup: GroupSetup) -> None:
        self._setup, self._parent = setup, parent
        self._name = setup.folder.name.removeprefix("group-")
        ahead = setup.options.ahead
        self._pool = WorkerPool(setup.options, setup.base_seed, new_counts(), slots=ahead + _SLOTS_PER_MEMBER)
        self._schedule = Schedule(len(setup.order), ahead, _next_epoch(setup.folder))
        self._plan = lru_cache(2)(self._begin_epoch)
        self._largest = 0
        self._lag_seconds = setup.options.seconds / 2  # for laggards; less than the others wait
        self._hellos: dict[Connection, Hello] = {}  # of members and of pending members
        self._delivered = time.monotonic()
        self._unblocked = self._delivered  # the last time that a slot was free, or no member waited
        self._idle_until = self._delivered + _FIRST_WAIT  # end then, unless a process is connected
        self._last: Connection | None = None  # the last member, which waits until this process has ended
        self.server = Server(setup.folder)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until no member is left, the parent ends, or no worker can be started."""
        while not self._parent.wait(0.0) and self._last is None:
            if not self.server.peers and time.monotonic() > self._idle_until:
                return
            self._start_more()
            self._wait()
            for result in self._pool.poll():
                self._collect(result)
            if self._pool.stuck:
                log.warning("workers of the group %s hang at their start: the coordinator is replaced", self._name)
                return

    def _wait(self) -> None:
        """Wait for the next event, for a bounded time."""
        nothing = not self._pool.prepare_wait()
        poller = select.poll()
        poller.register(self._parent, select.POLLIN)
        for fd, events in [*self._pool.descriptors, *self.server.descriptors]:
            poller.register(fd, events)
        seconds = min(_CHECK_SECONDS, self._lag_seconds / 4) if nothing else 0.0
        if not poller.poll(1000 * seconds):
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

    # -- members ------------------------------------------------------------------------------------------------------

    def _serve(self, peer: Connection, message: Message) -> None:
        kind, number, value, _ = message
        if kind == Kind.REQUEST:
            if self._schedule.request(peer, number, waits=bool(value)):
                self._send(peer, number)
            else:
                self._free(self._schedule.free())
        elif kind == Kind.RELEASE:
            self._free(self._schedule.release(peer, number, kept=bool(value)))
        elif kind == Kind.HELLO:
            self._greet(peer, message)
        elif kind == Kind.EXPLAIN:
            ago = int(1000 * (time.monotonic() - self._delivered))
            peer.send(pack(Kind.EXPLANATION, value=ago, body=self._explain(number).encode()))
        elif kind == Kind.LEAVE:
            if self.server.peers == {peer}:
                self._last = peer
                self.server.peers.remove(peer)
            else:
                self._drop(peer, "it has left")

    def _greet(self, peer: Connection, message: Message) -> None:
        """Admit a process that returns, or resumes an epoch; a newcomer with all ranks of its job."""
        hello, first = Hello(*json.loads(bytes(message.body))), message.number
        self._hellos[peer], members, epoch = hello, self._schedule.members, self._schedule.epoch
        if first < 0:
            job = [other for other in self._hellos if self._hellos[other].job == hello.job and other not in members]
            for rank in job if len(job) >= hello.ranks else ():
                self._admit(rank, epoch * self._schedule.batches)
        elif not message.value and self._schedule.is_behind(first):  # it was not in the group before
            text = f"this job continues epoch {first // self._schedule.batches}, and the group {self._name!r} is in"
            self._drop(peer, f"{text} epoch {epoch}: continue it with a group of its own")
        else:
            self._admit(peer, first)

    def _admit(self, peer: Connection, position: int) -> None:
        self._schedule.join(peer, position)
        self._resize()
        folder = os.fsencode(self._pool.ring.slots.folder)
        peer.send(pack(Kind.WELCOME, number=position, value=len(self._schedule.members), body=folder))

    def _drop(self, peer: Connection, why: str = "") -> None:
        """Free everything held by a member that has left or died, or is told `why` it gets no more batches."""
        if why:
            peer.send(pack(Kind.DROPPED, body=why.encode()))
        if peer in self._schedule.members:
            self._idle_until = 0.0
        self._hellos.pop(peer, None)
        self._free(self._schedule.leave(peer))
        self._resize()
        self.server.drop(peer)

    def _send(self, peer: Connection, number: int) -> None:
        members, count = len(self._schedule.members), self._pool.ring.count
        spare = count - max(1, min(self._schedule.ahead, count // 2)) - members
        most = max(0, min(_SLOTS_PER_MEMBER - 1, spare // members))  # so that slots for new batches remain
        self._delivered = time.monotonic()
        peer.send(pack(Kind.BATCH, number=number, value=most, body=self._schedule.entries[number].packed))

    def _explain(self, batch: int) -> str:
        """Return why a batch is not ready, as text for a message."""
        entry = self._schedule.entries.get(batch)
        names = ", ".join(f"process {member.pid}" for member in self._schedule.laggards())
        if entry is not None:
            return f"it is with {self._pool.describe(entry.task)}; its samples are {entry.task.ids.tolist()}"
        return f"the ring is full of batches that {names} did not take" if names else "it has not been started"

    # -- batches ------------------------------------------------------------------------------------------------------

    def _start_more(self) -> None:
        """Start as many batches as the slots and the limit in flight allow."""
        while self._schedule.in_flight < self._schedule.ahead and self._schedule.next_to_start() is not None:
            if not self._pool.ring.free and not self._free_a_slot():
                return
            if (number := self._schedule.next_to_start()) is not None:  # of the members that remain
                self._start(number)
        self._unblocked = time.monotonic()

    def _free_a_slot(self) -> bool:
        """Return whether a batch can be started though all slots are full. Laggards are dropped after a while."""
        now = time.monotonic()
        if self._schedule.in_flight or self._schedule.lowest_awaited is None:
            self._unblocked = now
            return False
        if dropped := self._schedule.drop_one():
            self._free(dropped)
            return True
        if now - self._unblocked < self._lag_seconds:
            return False
        for member in self._schedule.laggards():
            text = f"process {member.pid} has held up the group {self._name!r} for {self._lag_seconds:g} s"
            log.warning("%s: it gets no more batches. Close the loader of a job that has finished", text)
            self._drop(member, text)
        return True  # if all slots are held for good, the batch is made without one

    def _start(self, number: int) -> None:
        epoch, batch = divmod(number, self._schedule.batches)
        ids = self._plan(epoch)[batch]
        task = Task(epoch + 1, batch, NO_SLOT, epoch, ids)  # tokens distinguish the epochs
        self._schedule.start(number, task)
        self._pool.submit(task, gather=self._pool.builder.can_gather(ids))

    def _begin_epoch(self, epoch: int) -> list[Ids]:
        """Note that an epoch has begun, and return its batches."""
        with contextlib.suppress(OSError):
            (self._setup.folder / f"{_EPOCH}{epoch}").touch()
        return list(self._setup.order.batches(epoch, 0))

    def _collect(self, result: Result) -> None:
        """Store a finished batch, and send it to the members that wait for it."""
        number = (result.token - 1) * self._schedule.batches + result.number
        if result.status == UNDONE:
            task = self._schedule.entries[number].task
            task.slot = result.slot
            self._pool.submit(task, gather=False)
            return
        if result.size > self._largest:
            self._largest = result.size
            self._resize()
        slot = result.slot
        if result.status in (FAILED, EMPTY):
            self._pool.ring.give(slot)
            slot = NO_SLOT
        waiting, freed = self._schedule.finish(number, slot, b"".join(result.pack()))
        for peer in waiting:
            self._send(peer, number)
        self._free(freed)

    def _free(self, entries: list[Entry]) -> None:
        """Free the slots of batches that are no longer needed."""
        for entry in entries:
            free = self._pool.ring.retire if entry.kept else self._pool.ring.give
            free(NO_SLOT if entry.slot is None else entry.slot)

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
        if self._last is not None:
            self._last.close()


def _next_epoch(folder: Path) -> int:
    """Return the epoch after the last one of which a batch was prepared."""
    return 1 + max((int(path.name.removeprefix(_EPOCH)) for path in folder.glob(f"{_EPOCH}*")), default=-1)
