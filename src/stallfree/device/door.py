"""Who the consumers of a `ProcessPrefetcher` are, where they are, and which slots they hold.

The door has a thread of its own, in the process that loads: it hears what the consumers and the process that started
this one have to say, whatever the loader is doing. It shares one lock with the loader's thread, which is never held
over work of the loader.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from stallfree.device.crossing import Kind, Line, Message, keep_from_children
from stallfree.remote import pack_error

END_SECONDS = 5
"""For the loader to finish what it does when the process shall end; then the kernel ends it."""


@dataclass(eq=False)
class _Peer:
    """A connection. It is a consumer once it has said hello and was welcomed.

    Attributes:
        line: to it.
        number: of the consumer, or -1.
        process: of the consumer.
        curious: whether it wants to know the length, and no batches.
        asked: whether it wants the next epoch.
        token: that it gave with that.
        inside: whether it takes part in the one that is under way.
        slots: of which slot it knows which memory.
    """

    line: Line
    number: int = -1
    process: int = 0
    curious: bool = False
    asked: bool = False
    token: int = 0
    inside: bool = False
    slots: dict[int, torch.Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"consumer {self.number} (process {self.process})"


class Door:
    """Who the consumers are, where they are, and which slots they hold.

    Args:
        lifeline: ends with the process that started this one.
        listener: to which the consumers come.
        consumers: how many there will be.
        slots: how many there are.
    """

    def __init__(self, lifeline: socket.socket, listener: socket.socket, consumers: int, slots: int) -> None:
        self._changed = threading.Condition()
        self._lifeline, self._listener = lifeline, listener
        self._poller = select.epoll()  # what one thread changes holds for the other, which waits, at once
        for end in (lifeline, listener):
            keep_from_children(end)
            self._poller.register(end, select.EPOLLIN)
        listener.setblocking(False)
        self._peers: dict[int, _Peer] = {}  # by descriptor
        self._places: list[_Peer | None] = [None] * consumers
        self._awaited = set(range(consumers))  # those who have not come yet
        self.free = deque(range(slots))
        """Slots that nobody holds."""
        self._holders: list[set[int]] = [set() for _ in self.free]
        self._numbers = [0 for _ in self.free]  # of the batches in the slots
        self._epoch = self._number = -1
        self._running = False  # an epoch
        self._full = False  # and no slot is free
        self._stopped = False
        self._length: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="stallfree-door", daemon=True)
        self._thread.start()

    # -- what the main thread asks for --------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Wait until an epoch begins; False at the end."""
        with self._changed:
            while not (self._stopped or self._ready()):
                self._changed.wait()
            if self._stopped:
                return False
            self._epoch += 1
            self._number = -1
            self._running = True
            for peer in self._members():
                peer.asked, peer.inside = False, True
                self._tell(peer, Kind.START, peer.token)
            return True

    def take(self) -> int | None:
        """Wait for a free slot; None when nobody wants the epoch any more."""
        with self._changed:
            self._number += 1
            self._full = True
            while self._inside() and not self.free:
                self._changed.wait()
            self._full = False
            return self.free.popleft() if self._inside() else None

    def announce(self, slot: int, memory: torch.Tensor, share: Callable[[int], bytes], body: bytes) -> None:
        """Tell all who take part that a batch is in a slot, which is `memory`; `share` gives a consumer its handles."""
        with self._changed:
            new = {peer: share(peer.number) for peer in self._inside() if peer.slots.get(slot) is not memory}
            for peer in self._hand_out(slot):
                if peer in new:
                    peer.slots[slot] = memory
                    self._tell(peer, Kind.SLOT, slot=slot, body=new[peer])
                self._tell(peer, Kind.BATCH, self._number, slot, body)

    def fail(self, slot: int, error: BaseException) -> None:
        """Tell all who take part of an error in the place of a batch."""
        body = pack_error(error)
        with self._changed:
            for peer in self._hand_out(slot):
                self._tell(peer, Kind.ERROR, self._number, slot, body)

    def end(self, slot: int | None) -> None:
        """The epoch is over; `slot` was not needed."""
        with self._changed:
            if slot is not None:
                self.free.appendleft(slot)
            self._running = False
            for peer in self._inside():
                peer.inside = False
                self._tell(peer, Kind.END)

    def tell_length(self, length: bytes) -> None:
        """What consumers are told who ask for it."""
        with self._changed:
            first, self._length = self._length is None, length
            for peer in self._peers.values() if first else ():
                if peer.curious:
                    self._tell(peer, Kind.LENGTH, body=length)

    def lives(self, consumer: int) -> bool:
        """Whether a consumer is there."""
        return self._places[consumer] is not None

    def close(self) -> None:
        """End all connections."""
        with self._changed:
            self._stop()
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)  # the thread hears of that
        self._thread.join()
        self._lifeline.close()

    # -- what the door's own thread does ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                ready = self._poller.poll()
                with self._changed:
                    for fd, events in ready:
                        self._hear(fd, events)
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._stop()
                self._changed.notify_all()
                for peer in self._peers.values():
                    peer.line.close()
                self._poller.close()
            self._listener.close()  # whoever comes now hears at once that it is too late

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            signal.alarm(END_SECONDS)

    def _hear(self, fd: int, events: int) -> None:
        if fd == self._lifeline.fileno():
            self._stop()
        elif fd == self._listener.fileno():
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                self._peers[connection.fileno()] = _Peer(Line(connection))
                self._poller.register(connection, select.EPOLLIN)
        else:
            self._hear_peer(fd, events)

    def _hear_peer(self, fd: int, events: int) -> None:
        peer = self._peers[fd]
        if events & select.EPOLLOUT:
            peer.line.flush()
            if not peer.line.writing:
                self._poller.modify(fd, select.EPOLLIN)
        try:
            while (message := peer.line.hear()) is not None:
                self._answer(peer, message)
        except EOFError:
            self._leave(fd)

    def _answer(self, peer: _Peer, message: Message) -> None:
        kind = message.kind
        if kind == Kind.BACK:
            if message.number == self._numbers[message.slot] and message.epoch == self._epoch:
                self._give(message.slot, peer)
        elif kind in (Kind.BREAK, Kind.BEGIN):
            peer.inside, peer.asked = False, kind == Kind.BEGIN
            peer.token = message.number
            self._give_all(peer)
        elif kind == Kind.HELLO:
            self._welcome(peer, message)
        elif kind == Kind.ASK_STATE:
            self._tell(peer, Kind.STATE, body=self._state(self._places[message.number]).encode())
        elif kind == Kind.ASK_LENGTH:
            peer.curious = True
            if self._length is not None:
                self._tell(peer, Kind.LENGTH, body=self._length)

    def _welcome(self, peer: _Peer, message: Message) -> None:
        if message.number not in self._awaited:
            there = self._places[message.number]
            why = "has left, and none can come twice"
            if there is not None:
                why = f"belongs to process {there.process} already"
            self._tell(peer, Kind.REFUSED, body=why.encode())
            return
        peer.number, peer.process = message.number, message.epoch
        self._places[peer.number] = peer
        self._awaited.discard(peer.number)
        self._tell(peer, Kind.WELCOME, os.getpid())

    def _leave(self, fd: int) -> None:
        """A connection has ended."""
        self._poller.unregister(fd)
        peer = self._peers.pop(fd)
        peer.line.close()
        if peer.number >= 0:
            self._places[peer.number] = None
            peer.inside = False
            self._give_all(peer)
            if not self._awaited and not self._members():
                self._stop()

    # -- both, with the lock held -------------------------------------------------------------------------------------

    def _tell(self, peer: _Peer, kind: Kind, number: int = 0, slot: int = 0, body: bytes = b"") -> None:
        """Send a message; what cannot be sent now, the thread sends later."""
        peer.line.tell(kind, self._epoch, number, slot, body)
        if peer.line.writing:
            self._poller.modify(peer.line, select.EPOLLIN | select.EPOLLOUT)

    def _members(self) -> list[_Peer]:
        return [peer for peer in self._places if peer is not None]

    def _inside(self) -> list[_Peer]:
        return [peer for peer in self._members() if peer.inside and not self._stopped]

    def _ready(self) -> bool:
        """Whether all have asked for the next epoch."""
        members = self._members()
        return not self._awaited and bool(members) and all(peer.asked for peer in members)

    def _hand_out(self, slot: int) -> list[_Peer]:
        """Give a slot to all who take part."""
        inside = self._inside()
        self._numbers[slot] = self._number
        self._holders[slot] = {peer.number for peer in inside}
        if not inside:
            self.free.append(slot)
        return inside

    def _give(self, slot: int, peer: _Peer) -> None:
        holders = self._holders[slot]
        if peer.number in holders:
            holders.remove(peer.number)
            if not holders:
                self.free.append(slot)

    def _give_all(self, peer: _Peer) -> None:
        for slot in range(len(self._holders)):
            self._give(slot, peer)

    def _state(self, asking: _Peer | None) -> str:
        """What a consumer waits for."""
        if asking is None:
            return "it has left"
        late = [str(peer) for peer in self._members() if peer.inside]
        if self._running and not asking.inside:
            return f"the epoch before is not over for {', '.join(late)}" if late else "the loader ends its epoch"
        if not asking.inside:
            late = [f"consumer {number} (which has not come)" for number in sorted(self._awaited)]
            late += [str(peer) for peer in self._members() if not peer.asked]
            return (
                f"an epoch begins when all have asked for it, which {', '.join(late)} did not: close it, or iterate it"
            )
        if not self._full:
            return f"the loader works at batch {self._number} of epoch {self._epoch}"
        oldest = min(range(len(self._holders)), key=self._numbers.__getitem__)
        late = [str(peer) for peer in self._members() if peer.number in self._holders[oldest]]
        return f"{', '.join(late)} did not give back batch {self._numbers[oldest]} of epoch {self._epoch}"
