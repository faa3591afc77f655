"""The coordinator process: prepares a group's batches and grants each to every member.

It is a child process of one of the jobs, started by the first job that finds none. It ends with that job, or when no
member is left. It holds no state that could be lost: every batch can be recomputed from its number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time

import torch

from stallfree.ipc.channel import ERROR, Connection, Message, Server, pack
from stallfree.ipc.folders import SharedFolder
from stallfree.ipc.locks import FileLock
from stallfree.ipc.process import Parent
from stallfree.ipc.remote import pack_error
from stallfree.shared.preparation import Preparation, Setup
from stallfree.shared.protocol import Hello, Kind, unpack_hello
from stallfree.shared.schedule import Answer

_RETURN_SECONDS = 1.0
"""Seconds a new coordinator waits for its predecessor's members, whose locks show that they are alive."""

_FIRST_WAIT = 60.0
_CHECK_SECONDS = 1.0

log = logging.getLogger("stallfree")


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
        if coordinator is not None:
            coordinator.send_error(error)
        with contextlib.suppress(OSError):
            parent.send(pack_error(error))
        raise
    finally:
        if coordinator is not None:
            coordinator.close()
        sys.stdout.flush()
        sys.stderr.flush()


class Coordinator:
    """Serves the members of one group and prepares its batches. See the module."""

    def __init__(self, parent: Parent, setup: Setup) -> None:
        self._setup = setup
        self._name = setup.folder.name.removeprefix("group-")
        self._folder = SharedFolder(setup.folder.name, root=setup.folder.parent, initialize=None)
        self._members_lock = FileLock(setup.folder / "members")
        self._preparation = Preparation(setup, self._warn_detached)
        self._pool, self._schedule = self._preparation.pool, self._preparation.schedule
        self._hellos: dict[Connection, Hello] = {}  # of members and of pending members
        self._begun = time.monotonic()
        self._started_serving = self._had_members = False
        self._ended = False  # the parent
        self._last: Connection | None = None
        self._server, self._parent = Server(setup.folder), parent

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until no member is left, the parent ends, or no worker can be started."""
        preparation = self._preparation
        while not self._is_over():
            if not self._started_serving:
                self._begin_when_all_are_back()
            if self._started_serving:
                preparation.start_more()
            self._wait()
            for answer in preparation.collect():
                self._send(answer)
            if self._pool.stuck:
                log.warning("workers of the group %s hang at their start: the coordinator is replaced", self._name)
                return

    def _is_over(self) -> bool:
        if self._ended:
            return True
        if self._server.peers:
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
        for fd, events in [*self._pool.descriptors, *self._server.descriptors]:
            poller.register(fd, events)
        seconds = min(_CHECK_SECONDS if self._started_serving else 0.01, self._preparation.lag_seconds_left)
        if not poller.poll(1000 * seconds if nothing else 0):
            self._pool.check()
        self._receive()
        self._ended = self._parent.wait(0.0)

    # -- members ------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for peer, message in self._server.receive():
            try:
                if message is not None:
                    self._serve(peer, message)
                else:
                    self._drop(peer)
            except Exception as error:  # an error of one member must not end the others
                log.warning("a member of the group %s is dropped after an error: %s", self._name, error)
                self._drop(peer)

    def _drop(self, peer: Connection) -> None:
        """Free everything held by a member that has left or died."""
        was_member = self._hellos.pop(peer, None) is not None
        self._preparation.free(self._schedule.leave(peer))
        self._preparation.resize()
        last = was_member and not self._server.peers - {peer}
        if last:
            self._last = peer  # `close` closes its connection after the cleanup
            self._server.peers.discard(peer)
        else:
            self._server.drop(peer)

    def _begin_when_all_are_back(self) -> None:
        """Start once the previous coordinator's members are back, or after `_RETURN_SECONDS`."""
        back = len(self._hellos)
        if back and (back >= self._members_lock.count_claims() or time.monotonic() - self._begun > _RETURN_SECONDS):
            self._started_serving = True
            self._preparation.begin()
            self._admit_newcomers()

    def _greet(self, peer: Connection, message: Message) -> None:
        """Register a process as a pending member; a member of the previous coordinator is admitted at once."""
        self._hellos[peer] = unpack_hello(message.body)
        if message.number >= 0:
            self._admit(peer, message.number)
        self._admit_newcomers()

    def _admit_newcomers(self) -> None:
        """Admit newcomers once the group has started; the ranks of one job are admitted together."""
        for hello in set(self._hellos.values()) if self._started_serving else ():
            job = [
                peer
                for peer, other in self._hellos.items()
                if other.job == hello.job and peer not in self._schedule.members
            ]
            if len(job) >= hello.ranks:
                for peer in job:
                    self._admit(peer, None)

    def _admit(self, peer: Connection, position: int | None) -> None:
        epoch = self._schedule.join(peer, position=position, catchup=self._hellos[peer].catchup)
        self._had_members = True
        self._preparation.resize()
        folder = os.fsencode(self._pool.ring.slots.folder)
        peer.send(pack(Kind.WELCOME, 0, epoch, len(self._schedule.members), folder))

    def _serve(self, peer: Connection, message: Message) -> None:
        kind, serial, number, value, _ = message
        if kind == Kind.REQUEST:
            answer = self._schedule.request(peer, serial, number)
            if answer is not None:
                self._send(answer)
            if value >= 0:
                self._preparation.free(self._schedule.release(peer, value))
            if answer is None or answer.kind != Kind.BATCH:
                self._preparation.free(self._schedule.free())
        elif kind == Kind.RELEASE:
            self._preparation.free(self._schedule.release(peer, number))
        elif kind == Kind.SKIP:
            self._preparation.free(self._schedule.skip(peer, number, value))
        elif kind == Kind.HELLO:
            self._greet(peer, message)
        elif kind == Kind.EXPLAIN:
            peer.send(pack(Kind.EXPLANATION, body=self._explain(number).encode()))
        elif kind == Kind.LEAVE:
            if len(self._server.peers) > 1:
                peer.send(pack(Kind.LEFT))
            self._drop(peer)

    def _send(self, answer: Answer) -> None:
        kind, peer, serial, number = answer
        keep, body = 0, b""
        if kind == Kind.BATCH:
            keep, body = self._preparation.keep, self._preparation.message(number)
        peer.send(pack(kind, serial, number, keep, body))

    def _explain(self, batch: int) -> str:
        """Return why a batch is not ready, as text for a message."""
        names = ", ".join(map(self._describe, self._schedule.laggards()))
        held = f"the ring is full of batches that {names} did not take" if names else "it has not been started"
        return self._preparation.explain(batch) or held

    def _describe(self, member: Connection) -> str:
        return f"process {member.pid} ({self._hellos[member].name})"

    def _warn_detached(self, member: Connection) -> None:
        if not self._setup.detach:
            log.warning(
                "%s has delayed the group %s for %g s: it is detached and prepares the rest of its epoch locally. "
                "Close the loader of a job that has finished its training",
                *(self._describe(member), self._name, self._setup.lag_seconds),
            )

    # -- the end ------------------------------------------------------------------------------------------------------

    def send_error(self, error: Exception) -> None:
        """Send all members the error that ends this coordinator."""
        for peer in self._server.peers:
            peer.send(pack(ERROR, body=pack_error(error)))

    def close(self) -> None:
        """Stop the workers, close the connections and remove the ring."""
        self._server.close()  # first, so that members look for another coordinator
        self._pool.close()
        self._members_lock.close()
        self._folder.close()
        if self._last is not None:
            self._last.close()
