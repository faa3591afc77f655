"""The process that prepares a group's batches: it has the ring and the workers, and gives each batch to every member.

It is a child of one of the jobs, started by whoever finds none, and ends with that process, or when no member is left.
It keeps nothing that could be lost with it: every batch can be made again from its number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from stallfree.channel import Channel
from stallfree.errors import StorageError
from stallfree.folders import SharedFolder
from stallfree.generator_lock import check_generator
from stallfree.loader.crew import Crew, Options, new_counts
from stallfree.loader.messages import EMPTY, FAILED, NO_SLOT, UNDONE, Ids, Result, Task
from stallfree.loader.order import Order
from stallfree.locks import FileLock
from stallfree.platform import begin_child
from stallfree.remote import unpack_error
from stallfree.shared.closing import forget, keep_from_children
from stallfree.shared.last_epoch import next_epoch, note_epoch
from stallfree.shared.protocol import Hello, Kind, answer, kind_of, pack_error, unpack_hello, unpack_request
from stallfree.shared.schedule import Alone, Answer, Grant, Schedule
from stallfree.sockets import listen, process_of

SLOTS_PER_MEMBER = 4
"""Slots for each member beyond those under way: batches that it may hold, and one on its way to it."""

KEPT = SLOTS_PER_MEMBER - 1

_RETURN_SECONDS = 1.0
"""How long a new conductor waits for the members of the one before, whose locks say that they live."""

_FIRST_WAIT = 60.0
_CHECK_SECONDS = 1.0

log = logging.getLogger("stallfree")


@dataclass
class Setup:
    """What a conductor is started with.

    Attributes:
        folder: of the group.
        options: how batches are made.
        base_seed: of the workers' own generators.
        order: of the chunks.
        detach: leave laggards behind at once.
        lag_seconds: else, how long they may hold up the others.
    """

    folder: Path
    options: Options
    base_seed: int
    order: Order
    detach: bool
    lag_seconds: float


@dataclass
class _Peer:
    """A connection. It is a member once it has said hello and was welcomed."""

    channel: Channel
    process: int  # descriptor that tells the end of the process, or -1
    hello: Hello | None = None
    inside: bool = False


@dataclass
class _Made:
    """A batch that is there: what members are told of it, and its slot."""

    slot: int
    message: bytes


def conduct(lifeline: Connection, setup: Setup, attached: SharedFolder | None) -> None:
    """The life of a conductor.

    Args:
        lifeline: ends with the process that started this one. A byte is sent when members may come.
        setup: what to do.
        attached: the parent's attachment to the folder, which a fork brought along.
    """
    begin_child()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    check_generator()  # before workers are forked
    torch.set_num_threads(1)  # those of the parent are not here, and OpenMP would wait for them
    with contextlib.suppress(OSError):
        os.setsid()  # stopping one job from its terminal must not stop the others
    if attached is not None:
        attached.close()
    conductor = None
    try:
        conductor = Conductor(lifeline, setup)
        with contextlib.suppress(OSError):  # the process that started this one is gone: `run` will find out
            lifeline.send_bytes(b"r")
        conductor.run()
    except Exception as error:
        note = pack_error(error, traceback.format_exc())
        if conductor is not None:
            conductor.break_off(note)
        with contextlib.suppress(OSError):
            lifeline.send_bytes(note)
        raise
    finally:
        if conductor is not None:
            conductor.close()
        sys.stdout.flush()
        sys.stderr.flush()


class Conductor:
    """See the module."""

    def __init__(self, lifeline: Connection, setup: Setup) -> None:
        self._setup = setup
        self._name = setup.folder.name.removeprefix("group-")
        self._lifeline = lifeline
        self._ended = False  # the process that started this one
        self._folder = SharedFolder(setup.folder.name, root=setup.folder.parent, initialize=_must_exist)
        self._members_lock = FileLock(setup.folder / "members")
        self._counts = {**new_counts(), "num_workers": setup.options.workers}
        self._crew = Crew(setup.options, setup.base_seed, self._counts, slots=setup.options.ahead + SLOTS_PER_MEMBER)
        self._schedule = Schedule(len(setup.order), setup.options.ahead)
        self._peers: dict[int, _Peer] = {}
        self._made: dict[int, _Made] = {}
        self._tasks: dict[int, Task] = {}
        self._largest = 0
        self._epoch = -1
        self._plan: list[Ids] = []  # of that epoch
        self._begun = time.monotonic()
        self._going = False
        self._had_members = False
        self._blocked: float | None = None
        self._listener = listen(setup.folder)
        keep_from_children(self._listener.fileno())
        self._poller = select.poll()
        self._poller.register(self._listener, select.POLLIN)
        self._poller.register(lifeline, select.POLLIN)
        self._owners: dict[int, int] = {}  # of the descriptors of peers
        self._numbers = 0
        self._last: _Peer | None = None

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until no member is left, or the process that started this one ends, or no worker can be started here."""
        while not self._over():
            if self._crew.stuck:
                log.warning("workers of the group %s hang at their start: it gets other processes", self._name)
                return
            self._begin_when_all_are_back()
            self._start_more()
            self._publish()
            self._wait()
            self._collect()

    def _over(self) -> bool:
        if self._ended:
            return True
        if self._peers:
            if self._last is not None:  # somebody came just then
                self._hang_up(self._last)
                self._last = None
            return False
        return self._had_members or time.monotonic() - self._begun > _FIRST_WAIT

    def _wait(self) -> None:
        nothing = not self._crew.prepare_wait()
        lanes = self._crew.descriptors
        for fd, events in lanes:
            self._poller.register(fd, events)
        ready = self._poller.poll(self._patience() if nothing else 0)
        for fd, _ in lanes:
            self._poller.unregister(fd)
        if not ready:
            self._crew.check()
        for fd, _ in ready:
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._lifeline.fileno():
                self._ended = True
            elif (number := self._owners.get(fd)) is not None:
                self._hear(number, dead=fd == self._peers[number].process)

    def _patience(self) -> float:
        """Milliseconds until something is to be looked after."""
        seconds = _CHECK_SECONDS
        if not self._going:
            seconds = 0.01
        if self._blocked is not None:
            limit = 0.0 if self._setup.detach else self._setup.lag_seconds
            seconds = min(seconds, max(0.001, self._blocked + limit - time.monotonic()))
        return seconds * 1000

    def _publish(self) -> None:
        now = time.monotonic()
        if now >= self._crew.status.due:
            self._crew.status.publish(now, max(0, self._schedule.epoch), self._counts)

    # -- members ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            process = -1
            with contextlib.suppress(OSError, AttributeError):
                process = os.pidfd_open(process_of(connection))
            keep_from_children(connection.fileno())
            self._numbers += 1
            self._peers[self._numbers] = _Peer(Channel(connection), process)
            for fd in (connection.fileno(), process):
                if fd >= 0:
                    self._poller.register(fd, select.POLLIN)
                    self._owners[fd] = self._numbers

    def _hear(self, number: int, dead: bool) -> None:
        peer = self._peers[number]
        if peer.channel.writing:
            peer.channel.flush()
            self._watch(peer)
        try:
            while number in self._peers and (message := peer.channel.receive()) is not None:
                if kind_of(message) == Kind.HELLO:
                    peer.hello = unpack_hello(message)
                    self._welcome()
                else:
                    self._serve(number, peer, message)
        except EOFError:
            dead = True
        except Exception as error:  # nonsense from one member is not the others' fault
            log.warning("a member of the group %s is put out: %s", self._setup.folder.name, error)
            dead = True
        if dead and number in self._peers:
            self._drop(number)

    def _drop(self, number: int) -> None:
        """A member has left, or died: all that it held is free."""
        peer = self._peers.pop(number)
        self._unwatch(peer)
        if peer.inside:
            self._free(self._schedule.leave(number))
            self._resize()
        if not self._peers:
            self._last = peer  # it hears of the end when all is cleaned up
        else:
            self._hang_up(peer)

    def _hang_up(self, peer: _Peer) -> None:
        forget(peer.channel.fileno())
        peer.channel.close()
        if peer.process >= 0:
            os.close(peer.process)

    def _unwatch(self, peer: _Peer) -> None:
        for fd in (peer.channel.fileno(), peer.process):
            if fd >= 0:
                self._poller.unregister(fd)
                del self._owners[fd]

    def _begin_when_all_are_back(self) -> None:
        """At first, wait for the members that another conductor left behind, but not for long."""
        if self._going:
            return
        back = sum(peer.hello is not None for peer in self._peers.values())
        if back and (back >= self._members_lock.count_claims() or time.monotonic() - self._begun > _RETURN_SECONDS):
            self._going = True
            self._schedule.begin(next_epoch(self._setup.folder))
            self._welcome()

    def _welcome(self) -> None:
        """Let those in who wait: newcomers when the group is going, ranks of one job all at once."""
        for number, peer in list(self._peers.items()):
            hello = peer.hello
            if hello is None or peer.inside:
                continue
            if hello.position >= 0:
                self._let_in(number, peer, hello)
        if not self._going:
            return
        for peer in list(self._peers.values()):
            if peer.hello is None or peer.inside:
                continue
            team = [
                (number, other, other.hello)
                for number, other in self._peers.items()
                if other.hello is not None and not other.inside and other.hello.job == peer.hello.job
            ]
            if len(team) >= peer.hello.ranks:
                for number, other, hello in team:
                    self._let_in(number, other, hello)

    def _let_in(self, number: int, peer: _Peer, hello: Hello) -> None:
        position = None if hello.position < 0 else hello.position
        epoch = self._schedule.join(number, position=position, catchup=hello.catchup)
        peer.inside = self._had_members = True
        self._resize()
        folder = os.fsencode(self._crew.ring.slots.folder)
        self._send(peer, answer(Kind.WELCOME, 0, epoch, sum(p.inside for p in self._peers.values()), folder))

    def _serve(self, number: int, peer: _Peer, message: bytearray) -> None:
        kind, serial, batch, taken = unpack_request(message)
        if kind == Kind.BYE:
            if len(self._peers) > 1:
                self._send(peer, answer(Kind.FAREWELL))
            self._drop(number)
        elif kind == Kind.WHY:
            self._send(peer, answer(Kind.BECAUSE, serial, body=self._explain(batch).encode()))
        elif kind == Kind.ASK:
            told = self._schedule.ask(number, serial, batch)
            if told is not None:
                self._tell(told)
            if not isinstance(told, Grant):
                self._free(self._schedule.free())
        elif kind == Kind.SKIP:
            self._free(self._schedule.skip(number, batch, taken))
        elif kind == Kind.RELEASE:
            self._free(self._schedule.release(number, batch))

    def _tell(self, told: Answer) -> None:
        peer = self._peers[told.member]
        if isinstance(told, Grant):
            made = self._made[told.number]
            self._send(peer, answer(Kind.BATCH, told.serial, told.number, self._keep(), made.message))
        elif isinstance(told, Alone):
            self._send(peer, answer(Kind.ALONE, told.serial, told.start))
        else:
            self._send(peer, answer(Kind.MOVED, told.serial, told.epoch))

    def _send(self, peer: _Peer, message: bytes) -> None:
        peer.channel.send(message)
        if peer.channel.writing:
            self._watch(peer)

    def _watch(self, peer: _Peer) -> None:
        self._poller.modify(peer.channel.fileno(), select.POLLIN | (select.POLLOUT if peer.channel.writing else 0))

    def _explain(self, batch: int) -> str:
        """Who is being waited for, in words."""
        task = self._tasks.get(batch)
        if task is not None:
            return f"it is with {self._crew.describe(task)}; its samples are {task.ids.tolist()}"
        behind = [self._peers[number].hello for number in self._schedule.laggards()]
        names = ", ".join(f"process {hello.pid} ({hello.name})" for hello in behind if hello is not None)
        return f"the ring is full, and not all of it was taken by {names}" if names else "it has not been started"

    # -- batches ------------------------------------------------------------------------------------------------------

    def _start_more(self) -> None:
        if not self._going:
            return
        while True:
            number = self._schedule.next_to_start()
            if number is None or len(self._tasks) >= self._setup.options.ahead:
                self._blocked = None
                return
            if self._crew.room:
                self._blocked = None
                self._start(number)
            elif not self._make_room():
                return

    def _make_room(self) -> bool:
        """No slot is free: whether something has been done about it. If nobody waits, nothing need be done."""
        if self._tasks or not self._schedule.hungry:
            self._blocked = None
            return False
        now = time.monotonic()
        self._blocked = now if self._blocked is None else self._blocked
        if not self._setup.detach and now - self._blocked < self._setup.lag_seconds:
            return False
        laggards = self._schedule.laggards()
        for number in laggards:
            hello = self._peers[number].hello
            if hello is not None and not self._setup.detach:
                log.warning(
                    "process %d (%s) has held up the group %s for %g s: it prepares the rest of its epoch by itself. "
                    "A job that has ended its training should close its loader",
                    *(hello.pid, hello.name, self._name, self._setup.lag_seconds),
                )
            self._free(self._schedule.leave_behind(number))
        coming = self._schedule.next_to_start()
        if not laggards and coming is not None:  # all slots are held for good: go on without them
            self._start(coming)
        return True

    def _start(self, number: int) -> None:
        self._schedule.start(number)
        epoch, batch = divmod(number, self._schedule.batches)
        if epoch != self._epoch:
            self._epoch = epoch
            self._plan = list(self._setup.order.batches(epoch, 0))
            note_epoch(self._setup.folder, epoch)
        ids = self._plan[batch]
        # The token tells epochs apart: two may be under way at once.
        self._submit(number, Task(epoch + 1, batch, NO_SLOT, epoch, ids), self._crew.filler.can_gather(ids))

    def _submit(self, number: int, task: Task, gather: bool) -> None:
        if not gather and task.slot == NO_SLOT:
            slot = self._crew.ring.take()
            task = task if slot is None else replace(task, slot=slot)
        self._tasks[number] = task
        self._crew.submit(task, gather=gather)

    def _collect(self) -> None:
        for result in self._crew.poll():
            number = (result.token - 1) * self._schedule.batches + result.number
            task = self._tasks.pop(number)
            if result.status == UNDONE:
                self._counts["retries"] += 1
                self._submit(number, replace(task, slot=result.slot), gather=False)
                continue
            self._finish(number, result)

    def _finish(self, number: int, result: Result) -> None:
        counts = self._counts
        counts["batches"] += 1
        counts["samples"] += len(result.ids)
        for name in ("hits", "misses", "storage_bytes", "fetch_seconds", "prep_seconds"):
            counts[name] += getattr(result, name)
        counts["skips"] += result.skipped
        if result.status == FAILED:
            error, trace = (result.value, "") if result.value is not None else unpack_error(result.note)
            result = replace(result, note=pack_error(error, trace), value=None)
        if result.size > self._largest:
            self._largest = result.size
            self._resize()
        slot = result.slot
        if result.status in (FAILED, EMPTY):
            self._crew.ring.give(slot)
            slot = NO_SLOT
        self._made[number] = _Made(slot, b"".join(result.pack()))
        grants, freed = self._schedule.finish(number)
        for told in grants:
            self._tell(told)
        self._free(freed)

    def _free(self, numbers: list[int]) -> None:
        for number in numbers:
            self._crew.ring.give(self._made.pop(number).slot)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _resize(self) -> None:
        """As many slots as the members need, or as their bytes allow."""
        members = sum(peer.inside for peer in self._peers.values())
        count = self._setup.options.ahead + SLOTS_PER_MEMBER * max(1, members)
        staging = self._setup.options.staging
        if staging is not None:
            count = min(count, max(2, staging * 8 // 9 // max(self._largest, 1)))
        self._crew.ring.resize(count)

    def _keep(self) -> int:
        """How many batches a member may hold, so that slots are left to go on with."""
        members, count = sum(peer.inside for peer in self._peers.values()), self._crew.ring.count
        spare = count - max(1, min(self._setup.options.ahead, count // 2)) - members
        return max(0, min(KEPT, spare // max(1, members)))

    # -- the end ------------------------------------------------------------------------------------------------------

    def break_off(self, note: bytes) -> None:
        """Tell all members that it cannot go on, and why."""
        for peer in self._peers.values():
            self._send(peer, answer(Kind.BROKEN, body=note))

    def close(self) -> None:
        """End workers and connections, remove the ring."""
        peers, self._peers = list(self._peers.values()), {}
        forget(self._listener.fileno())
        self._listener.close()
        for peer in peers:  # now: they look for another conductor
            self._hang_up(peer)
        self._crew.close()
        self._members_lock.close()
        self._folder.close()
        if self._last is not None:
            self._hang_up(self._last)


def _must_exist(folder: Path) -> None:
    raise StorageError(f"the group's folder {folder} is gone: the job that made it has ended. Make a new loader")
