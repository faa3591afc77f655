"""The server of a `ProcessPrefetcher`'s consumers, in the loading process: tracks connections and slot leases.

A thread handles the consumers' messages and the end of the parent process, independently of the loader. It shares one
lock with the loader's thread; the lock is never held while the loader works.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from stallfree.device.protocol import VERSION, Kind
from stallfree.errors import consumer_process
from stallfree.ipc.consumers import HELLO, VISITOR, Leases, Message, Peer, Server
from stallfree.ipc.process import Parent
from stallfree.ipc.remote import pack_error

END_SECONDS = 5
"""Seconds for the loader to finish its work at the end; then the kernel kills the process."""


@dataclass(eq=False)
class _Consumer:
    """The state of one consumer.

    Attributes:
        peer: its connection.
        number: number of the consumer.
        requested: whether it has requested the next epoch.
        token: token sent with that request.
        active: whether it takes part in the active epoch.
        slots: the memory of each slot that it has received.
    """

    peer: Peer
    number: int
    requested: bool = False
    token: int = 0
    active: bool = False
    slots: dict[int, torch.Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"consumer {self.number} (process {self.peer.pid})"


class ConsumerServer:
    """Tracks the consumers and the slots that they hold.

    Args:
        parent: the parent process; this process ends with it.
        listener: socket that the consumers connect to.
        consumers: number of consumers.
        slots: number of slots.
    """

    def __init__(self, parent: Parent, listener: socket.socket, consumers: int, slots: int) -> None:
        self._changed = threading.Condition()
        self._poller = select.epoll()
        self._server = Server(listener, VERSION, "prefetcher", self._poller)
        self._parent_descriptors = parent.descriptors
        for fd in self._parent_descriptors:
            self._poller.register(fd, select.EPOLLIN)
        self._consumers: dict[Peer, _Consumer] = {}
        self._awaited = set(range(consumers))  # numbers that have not connected yet
        self._awaiting_length: set[Peer] = set()  # peers that wait for the length
        self.free = deque(range(slots))
        """Slots that no consumer holds."""
        self._leases = Leases()  # of slots
        self._numbers = [0] * slots  # of the batch in each slot
        self._epoch = self._number = -1
        self._running = False  # an epoch is active
        self._full = False  # no slot is free
        self._stopped = False
        self._length: bytes | None = None
        self._thread = threading.Thread(target=self._run, name="stallfree-consumers", daemon=True)
        self._thread.start()

    # -- called by the loader's thread --------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Wait until all consumers have requested an epoch, and start it; returns False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._all_have_requested())
            if self._stopped:
                return False
            self._epoch += 1
            self._number = -1
            self._running = True
            for consumer in self._consumers.values():
                consumer.requested, consumer.active = False, True
                self._send(consumer.peer, Kind.START, consumer.token)
            return True

    def take(self) -> int | None:
        """Wait for a free slot; returns None if no consumer takes part in the epoch any more."""
        with self._changed:
            self._number += 1
            self._full = True
            self._changed.wait_for(lambda: self.free or not self._active())
            self._full = False
            return self.free.popleft() if self._active() else None

    def announce(self, slot: int, memory: torch.Tensor, share: Callable[[int], bytes], body: bytes) -> None:
        """Send the batch in `slot` to all participants; `share` returns handles of its `memory` for one consumer."""
        with self._changed:
            active = self._active()
            new = {each: share(each.number) for each in active if each.slots.get(slot) is not memory}
            self._grant(slot, active)
            for each in active:
                if each in new:
                    each.slots[slot] = memory
                    self._send(each.peer, Kind.SLOT, 0, slot, new[each])
                self._send(each.peer, Kind.BATCH, self._number, slot, body)

    def fail(self, slot: int, error: BaseException) -> None:
        """Send an error in place of a batch to all participants."""
        body = pack_error(error)
        with self._changed:
            active = self._active()
            self._grant(slot, active)
            for each in active:
                self._send(each.peer, Kind.FAILED, self._number, slot, body)

    def end(self, slot: int | None) -> None:
        """End the epoch; `slot` was not used."""
        with self._changed:
            if slot is not None:
                self.free.appendleft(slot)
            self._running = False
            for consumer in self._active():
                consumer.active = False
                self._send(consumer.peer, Kind.END)

    def set_length(self, length: bytes) -> None:
        """Set the packed length, and send it to the peers that wait for it."""
        with self._changed:
            self._length = length
            for peer in self._awaiting_length:
                self._send(peer, Kind.LENGTH, body=length)
            self._awaiting_length.clear()

    def is_connected(self, number: int) -> bool:
        """Return whether a consumer is connected."""
        return any(consumer.number == number for consumer in list(self._consumers.values()))

    def close(self) -> None:
        """Close all connections."""
        with self._changed:
            self._stop()
        self._server.stop_listening()  # this wakes the thread
        self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                ready = self._poller.poll()
                with self._changed:
                    for peer, message in self._server.receive(ready):
                        self._handle(peer, message)
                    if any(fd in self._parent_descriptors for fd, _ in ready):
                        self._stop()
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._stop()
                self._changed.notify_all()
                self._server.close()  # later connections fail at once
                self._poller.close()

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            signal.alarm(END_SECONDS)

    def _handle(self, peer: Peer, message: Message | None) -> None:
        consumer = self._consumers.get(peer)
        kind = None if message is None else message.kind
        if message is None:
            self._awaiting_length.discard(peer)
            if consumer is not None:
                self._leave(consumer)
        elif kind == HELLO and message.number != VISITOR:
            self._welcome(peer, message.number)
        elif kind == Kind.REQUEST_STATE:
            self._send(peer, Kind.STATE, body=self._state(message.number).encode())
        elif kind == Kind.REQUEST_LENGTH and self._length is None:
            self._awaiting_length.add(peer)
        elif kind == Kind.REQUEST_LENGTH and self._length is not None:
            self._send(peer, Kind.LENGTH, body=self._length)
        elif kind == Kind.RETURN and consumer is not None:
            current = message.serial == self._epoch and message.number == self._numbers[message.value]
            if current and self._leases.release(message.value, consumer):
                self.free.append(message.value)
        elif kind in (Kind.BREAK, Kind.BEGIN) and consumer is not None:
            consumer.active, consumer.requested, consumer.token = False, kind == Kind.BEGIN, message.number
            self.free += self._leases.leave(consumer)

    def _welcome(self, peer: Peer, number: int) -> None:
        if number in self._awaited:
            self._awaited.remove(number)
            self._consumers[peer] = _Consumer(peer, number)
            self._send(peer, Kind.WELCOME, os.getpid())
            return
        there = [each.peer.pid for each in self._consumers.values() if each.number == number]
        why = f"belongs to process {there[0]} already" if there else "has left, and cannot connect again"
        self._server.refuse(peer, consumer_process(f"consumer {number} {why}: give each process a separate number"))

    def _leave(self, consumer: _Consumer) -> None:
        """Remove a consumer whose connection has ended."""
        del self._consumers[consumer.peer]
        self.free += self._leases.leave(consumer)
        if not self._awaited and not self._consumers:
            self._stop()

    # -- called by both threads, with the lock held -------------------------------------------------------------------

    def _send(self, peer: Peer, kind: Kind, number: int = 0, slot: int = 0, body: bytes = b"") -> None:
        self._server.send(peer, kind, self._epoch, number, slot, body)

    def _active(self) -> list[_Consumer]:
        return [each for each in self._consumers.values() if each.active and not self._stopped]

    def _all_have_requested(self) -> bool:
        """Return whether all consumers have requested the next epoch."""
        consumers = self._consumers.values()
        return not self._awaited and bool(consumers) and all(each.requested for each in consumers)

    def _grant(self, slot: int, consumers: list[_Consumer]) -> None:
        """Lease a slot to consumers."""
        self._numbers[slot] = self._number
        for consumer in consumers:
            self._leases.grant(slot, consumer)
        if not consumers:
            self.free.append(slot)

    def _state(self, number: int) -> str:
        """Return what a consumer waits for, as text."""
        waiting = next((each for each in self._consumers.values() if each.number == number), None)
        if waiting is None:
            return "it has left"
        late = [str(each) for each in self._consumers.values() if each.active]
        if self._running and not waiting.active:
            return f"the previous epoch is not over for {', '.join(late)}" if late else "the loader ends its epoch"
        if not waiting.active:
            late = [f"consumer {number} (not connected)" for number in sorted(self._awaited)]
            late += [str(each) for each in self._consumers.values() if not each.requested]
            return (
                f"an epoch starts when all consumers have requested it, and {', '.join(late)} did not: close it, or "
                "iterate it"
            )
        if not self._full:
            return f"the loader is at batch {self._number} of epoch {self._epoch}"
        oldest = min(range(len(self._numbers)), key=self._numbers.__getitem__)
        late = [str(each) for each in self._leases.holders(oldest)]
        return f"{', '.join(late)} did not return batch {self._numbers[oldest]} of epoch {self._epoch}"
