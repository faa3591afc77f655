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

from stallfree.device.crossing import (
    ASK_LENGTH,
    ASK_STATE,
    BACK,
    BATCH,
    BEGIN,
    BREAK,
    END,
    ERROR,
    HELLO,
    LAYOUT,
    LENGTH,
    REFUSED,
    SLOT,
    START,
    STATE,
    WELCOME,
    Line,
    Message,
    keep_from_children,
    pack,
    pack_error,
)  # fmt: skip

END_SECONDS = 5
"""For the loader to finish what it does when the process shall end; then the kernel ends it."""

_ASKING = -2
"""The number of who wants to know the length, and no batches."""


@dataclass(eq=False)
class _Peer:
    """A connection. It is a consumer once it has said hello and was welcomed.

    Attributes:
        line: to it.
        number: of the consumer, or -1.
        process: of the consumer.
        asked: whether it wants the next epoch.
        token: that it gave with that.
        inside: whether it takes part in the one that is under way.
        slots: of which slot it knows which memory.
        layouts: serial numbers of those that it knows.
    """

    line: Line
    number: int = -1
    process: int = 0
    asked: bool = False
    token: int = 0
    inside: bool = False
    slots: dict[int, torch.Tensor] = field(default_factory=dict)
    layouts: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"consumer {self.number} (process {self.process})"


@dataclass(frozen=True)
class Told:
    """What consumers are told of a batch.

    Attributes:
        memory: of the slot.
        share: gives its handles to a consumer.
        serial, layout: of the layout, with what it is.
        oldest: layouts before this one are not used any more.
        body: values that are no tensors.
    """

    memory: torch.Tensor
    share: Callable[[int], bytes]
    serial: int
    layout: bytes
    oldest: int
    body: bytes


class Door:
    """Who the consumers are, where they are, and which slots they hold."""

    def __init__(self, lifeline: socket.socket, listener: socket.socket, consumers: int, slots: int) -> None:
        self._changed = threading.Condition()
        self._lifeline, self._listener = lifeline, listener
        keep_from_children(lifeline)
        keep_from_children(listener)
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
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        for fd in (lifeline.fileno(), listener.fileno(), self._wake):
            self._poller.register(fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="stallfree-door", daemon=True)
        self._thread.start()

    # What the main thread asks for.

    def begin(self) -> int | None:
        """Wait until an epoch begins, and give its number; None at the end."""
        with self._changed:
            while not (self._stopped or self._ready()):
                self._changed.wait()
            if self._stopped:
                return None
            self._epoch += 1
            self._number = -1
            self._running = True
            for peer in self._members():
                peer.asked, peer.inside = False, True
                peer.line.send(pack(START, self._epoch, peer.token))
            return self._epoch

    def take(self) -> int | None:
        """Wait for a free slot; None when nobody wants the epoch any more."""
        with self._changed:
            self._number += 1
            self._full = True
            while self._inside() and not self.free:
                self._changed.wait()
            self._full = False
            return self.free.popleft() if self._inside() else None

    def announce(self, slot: int, told: Told) -> None:
        """Tell all who take part that a batch is there."""
        with self._changed:
            new = {peer: told.share(peer.number) for peer in self._inside() if peer.slots.get(slot) is not told.memory}
            for peer in self._hand_out(slot):
                data = b""
                if peer in new:
                    peer.slots[slot] = told.memory
                    data = pack(SLOT, slot=slot, body=new[peer])
                if told.serial not in peer.layouts:
                    peer.layouts = {serial for serial in peer.layouts if serial >= told.oldest} | {told.serial}
                    data += pack(LAYOUT, number=told.oldest, layout=told.serial, body=told.layout)
                peer.line.send(data + pack(BATCH, self._epoch, self._number, slot, told.serial, told.body))
            self._look_for_pending()

    def fail(self, slot: int, error: BaseException) -> None:
        """Tell all who take part of an error in the place of a batch."""
        message = pack(ERROR, self._epoch, self._number, slot, body=pack_error(error))
        with self._changed:
            for peer in self._hand_out(slot):
                peer.line.send(message)
            self._look_for_pending()

    def end(self, slot: int | None) -> None:
        """The epoch is over; `slot` was not needed."""
        with self._changed:
            if slot is not None:
                self.free.appendleft(slot)
            self._running = False
            for peer in self._inside():
                peer.inside = False
                peer.line.send(pack(END, self._epoch))
            self._look_for_pending()

    def tell_length(self, length: bytes) -> None:
        """What consumers are told who ask for it."""
        with self._changed:
            first, self._length = self._length is None, length
            if first:
                for peer in self._peers.values():
                    if peer.number == _ASKING:
                        peer.line.send(pack(LENGTH, body=length))

    def lives(self, consumer: int) -> bool:
        """Whether a consumer is there."""
        return self._places[consumer] is not None

    def close(self) -> None:
        """End all connections."""
        with self._changed:
            self._stop()
        self._thread.join()
        self._lifeline.close()
        os.close(self._wake)

    # What the door's own thread does.

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
            self._listener.close()  # whoever comes now hears at once that it is too late

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            signal.alarm(END_SECONDS)
            os.eventfd_write(self._wake, 1)

    def _hear(self, fd: int, events: int) -> None:
        if fd == self._lifeline.fileno():
            self._stop()
        elif fd == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
            for peer in self._peers.values():
                self._look_at(peer)
        elif fd == self._listener.fileno():
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                line = Line(connection)
                self._peers[line.fileno()] = peer = _Peer(line)
                self._look_at(peer)
        else:
            self._hear_peer(fd, events)

    def _hear_peer(self, fd: int, events: int) -> None:
        peer = self._peers[fd]
        if events & select.POLLOUT:
            peer.line.flush()
            self._look_at(peer)
        try:
            while (message := peer.line.receive()) is not None:
                self._answer(peer, message)
        except EOFError:
            self._leave(fd)

    def _answer(self, peer: _Peer, message: Message) -> None:
        kind = message.kind
        if kind == BACK:
            if message.number == self._numbers[message.slot] and message.epoch == self._epoch:
                self._give(message.slot, peer)
        elif kind in (BREAK, BEGIN):
            peer.inside, peer.asked = False, kind == BEGIN
            peer.token = message.number
            self._give_all(peer)
        elif kind == HELLO:
            self._welcome(peer, message)
        elif kind == ASK_STATE:
            peer.line.send(pack(STATE, body=self._state(self._places[message.number]).encode()))
        elif kind == ASK_LENGTH:
            peer.number = _ASKING
            if self._length is not None:
                peer.line.send(pack(LENGTH, body=self._length))

    def _welcome(self, peer: _Peer, message: Message) -> None:
        if message.number not in self._awaited:
            there = self._places[message.number]
            why = (
                "has left, and none can come twice" if there is None else f"belongs to process {there.process} already"
            )
            peer.line.send(pack(REFUSED, body=why.encode()))
            return
        peer.number, peer.process = message.number, message.epoch
        self._places[peer.number] = peer
        self._awaited.discard(peer.number)
        peer.line.send(pack(WELCOME, os.getpid()))

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

    def _look_for_pending(self) -> None:
        """Have the thread send what could not be sent."""
        if any(peer.line.writing for peer in self._members()):
            os.eventfd_write(self._wake, 1)

    def _look_at(self, peer: _Peer) -> None:
        """Wait for what a peer says, and until it can be told what there is to tell."""
        self._poller.register(peer.line, select.POLLIN | (select.POLLOUT if peer.line.writing else 0))

    # Both, with the lock held.

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
