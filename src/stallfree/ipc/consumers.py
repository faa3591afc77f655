"""One process serves batches to several consumers through a Unix socket.

`Server` is the serving end; it never waits for a consumer. `Connection` is a consumer's end. The first message of each
connection carries the consumer's protocol version; a mismatch is answered with an error. `Leases` tracks which
consumers still use which batches.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from stallfree.errors import StallfreeError
from stallfree.ipc import sockets
from stallfree.ipc.channel import Channel
from stallfree.ipc.fork_guard import keep_from_children
from stallfree.ipc.remote import pack_error, unpack_error

HELLO, ERROR = 1, 2
"""Message kinds of all protocols: a consumer's first message, and an error that ends the connection."""

VISITOR = -2
"""Sent in place of a consumer's number: the connection is for a single request."""

_HEAD = struct.Struct("<4q")


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: kind of the message; 3 and above are specific to the protocol.
        serial: serial of the request or epoch that it belongs to; in a HELLO, the protocol version.
        number: number of a batch or a consumer.
        value: another number.
        body: bytes.
    """

    kind: int
    serial: int = 0
    number: int = 0
    value: int = 0
    body: bytes | memoryview = b""


def pack(kind: int, serial: int = 0, number: int = 0, value: int = 0, body: bytes = b"") -> bytes:
    """Return a message as bytes."""
    return _HEAD.pack(kind, serial, number, value) + body


def unpack(data: bytearray) -> Message:
    """Return the message in `data`; its body is a view of `data`."""
    kind, serial, number, value = _HEAD.unpack_from(data)
    return Message(kind, serial, number, value, memoryview(data)[_HEAD.size :])


class Gone(Exception):
    """Raised when the process at the other end has ended."""


class _End:
    """One end of a connection.

    Attributes:
        pid: PID at the other end; of a server, the process that created the socket. 0 in another PID namespace.
        process: descriptor that becomes readable when that process ends, or -1.
    """

    def __init__(self, connection: socket.socket, watch: bool = True) -> None:
        keep_from_children(connection)
        self._socket = connection
        self.pid = sockets.process_of(connection)
        self.process = -1
        if watch:
            with contextlib.suppress(OSError, AttributeError):
                self.process = os.pidfd_open(self.pid)
        self.channel = Channel(connection)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that are readable when there is a message, or the other end is closed."""
        return [fd for fd in (self.channel.fileno(), self.process) if fd >= 0]

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self.channel.fileno() < 0

    def close(self) -> None:
        """End the connection, also for inherited copies of this end. Idempotent."""
        if self.closed:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        if self.process >= 0:
            os.close(self.process)


# -- the serving process ----------------------------------------------------------------------------------------------


class Peer(_End):
    """A connected process.

    Attributes:
        greeted: whether its first message has been accepted.
        dropped: whether the server has dropped it.
    """

    greeted = dropped = False


class Poller(Protocol):
    """`select.poll` or `select.epoll`; an `epoll` may change its descriptors while another thread waits."""

    def register(self, fd: Any, eventmask: int) -> None: ...

    def modify(self, fd: Any, eventmask: int) -> None: ...

    def unregister(self, fd: Any) -> None: ...


class Server:
    """Accepts consumers and exchanges messages with them.

    Args:
        listener: socket that the consumers connect to.
        version: protocol version.
        protocol: name of the protocol, for messages.
        poller: poller that the descriptors are registered with; its results go to `receive`.
    """

    def __init__(self, listener: socket.socket, version: int, protocol: str, poller: Poller) -> None:
        keep_from_children(listener)
        listener.setblocking(False)
        self._listener, self._version, self._protocol, self._poller = listener, version, protocol, poller
        self.peers: set[Peer] = set()
        """All connected peers."""
        self._owners: dict[int, Peer] = {}  # by descriptor
        poller.register(listener, select.POLLIN)

    def receive(self, ready: Iterable[tuple[int, int]]) -> Iterator[tuple[Peer, Message | None]]:
        """Yield the consumers' messages, and None for each one that is gone; a dropped peer yields no more."""
        for fd, events in ready:
            peer = self._owners.get(fd)
            if peer is None:
                if fd == self._listener.fileno():
                    self._accept()
                continue
            if events & select.POLLOUT:
                peer.channel.flush()
                self._watch_output(peer)
            gone = fd == peer.process
            try:
                while not peer.dropped and (data := peer.channel.receive()) is not None:
                    message = unpack(data)
                    if peer.greeted or self._greet(peer, message):
                        yield peer, message
            except (EOFError, struct.error):
                gone = True
            if gone and not peer.dropped:
                yield peer, None
                self.drop(peer)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            peer = Peer(connection)
            self.peers.add(peer)
            for fd in peer.descriptors:
                self._owners[fd] = peer
                self._poller.register(fd, select.POLLIN)

    def _greet(self, peer: Peer, message: Message) -> bool:
        """Return whether the first message of a consumer is valid; refuse the consumer otherwise."""
        peer.greeted = message.kind == HELLO and message.serial == self._version
        if not peer.greeted:
            error = StallfreeError(
                f"process {peer.pid} uses version {message.serial} of the {self._protocol}'s protocol, this one uses "
                f"{self._version}: install the same release for all",
                page="release-mismatch",
            )
            self.refuse(peer, error)
        return peer.greeted

    def send(self, peer: Peer, kind: int, serial: int = 0, number: int = 0, value: int = 0, body: bytes = b"") -> None:
        """Send a message; `receive` sends what cannot be sent now."""
        peer.channel.send(pack(kind, serial, number, value, body))
        if peer.channel.writing:
            self._watch_output(peer)

    def _watch_output(self, peer: Peer) -> None:
        self._poller.modify(peer.channel.fileno(), select.POLLIN | (select.POLLOUT if peer.channel.writing else 0))

    def refuse(self, peer: Peer, error: Exception) -> None:
        """Send an error, which the consumer raises, and end the connection."""
        peer.channel.send(pack(ERROR, body=pack_error(error)))
        self.drop(peer)

    def drop(self, peer: Peer, *, disconnect: bool = True) -> None:
        """Forget a peer; with `disconnect=False` the caller closes the connection."""
        if not peer.dropped:
            peer.dropped = True
            self.peers.discard(peer)
            for fd in peer.descriptors:
                del self._owners[fd]
                self._poller.unregister(fd)
        if disconnect:
            peer.close()

    def stop_listening(self) -> None:
        """Accept no more consumers; the listener becomes ready in the poller. Callable in any thread."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for peer in list(self.peers):
            self.drop(peer)
        if self._listener.fileno() >= 0:
            self._poller.unregister(self._listener)
            self._listener.close()


class Leases:
    """Tracks which consumers hold which batches."""

    def __init__(self) -> None:
        self._holders: dict[int, set[Any]] = {}

    def grant(self, batch: int, consumer: Any) -> None:
        """Lease `batch` to `consumer`."""
        self._holders.setdefault(batch, set()).add(consumer)

    def holders(self, batch: int) -> set[Any]:
        """Return the consumers that hold a batch."""
        return self._holders.get(batch, set())

    def release(self, batch: int, consumer: Any) -> bool:
        """Release a consumer's lease on `batch`; returns whether it was the last one."""
        holders = self.holders(batch)
        if consumer not in holders:
            return False
        holders.remove(consumer)
        if not holders:
            del self._holders[batch]
        return not holders

    def leave(self, consumer: Any) -> list[int]:
        """Release all leases of a consumer; returns the batches of which it was the last holder."""
        return [batch for batch in list(self._holders) if self.release(batch, consumer)]


# -- a consumer -------------------------------------------------------------------------------------------------------


class Connection(_End):
    """The connection of a consumer. Neither `send`, nor `receive` with an expired deadline, blocks."""

    def __init__(self, connection: socket.socket, watch: bool = True) -> None:
        super().__init__(connection, watch)
        self._poller = select.poll()
        for fd in self.descriptors:
            self._poller.register(fd, select.POLLIN)

    @classmethod
    def open(
        cls,
        folder: Path,
        version: int,
        number: int = 0,
        value: int = 0,
        body: bytes = b"",
        *,
        watch: bool = True,
    ) -> Self | None:
        """Connect to the server in `folder` and send the first message; returns None if there is no server.

        Args:
            folder: folder that holds the server's socket.
            version: protocol version.
            number, value, body: fields of the message.
            watch: also detect the death of the process that created the socket, not only the end of the connection.
        """
        connection = sockets.connect(folder)
        if connection is None:
            return None
        made = cls(connection, watch)
        made.channel.send(pack(HELLO, version, number, value, body))
        return made

    def send(self, kind: int, serial: int = 0, number: int = 0, value: int = 0, body: bytes = b"") -> None:
        """Send a message as far as possible without blocking. It is lost if the server has ended."""
        self.channel.send(pack(kind, serial, number, value, body))

    def receive(self, deadline: float = 0.0) -> Message | None:
        """Return the next message, or None at `deadline` (`time.monotonic`).

        Raises `Gone` if the server has ended, and the error that the server sent to end the connection.
        """
        while True:
            try:
                data = self.channel.receive()
            except EOFError:
                raise Gone from None
            if data is not None:
                message = unpack(data)
                if message.kind != ERROR:
                    return message
                raise unpack_error(message.body)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._wait(left)

    def _wait(self, seconds: float) -> None:
        fd = self.channel.fileno()
        self._poller.modify(fd, select.POLLIN | (select.POLLOUT if self.channel.writing else 0))
        ready = dict(self._poller.poll(1000 * seconds))
        if self.channel.writing:
            self.flush()
        if self.process in ready and not ready.get(fd, 0) & select.POLLIN:
            raise Gone

    def flush(self) -> None:
        """Send pending data as far as possible."""
        self.channel.flush()

    @property
    def ended(self) -> bool:
        """Whether the server has ended, even if messages are still unread."""
        return self.closed or any(fd == self.process or events & select.POLLHUP for fd, events in self._poller.poll(0))


def request(folder: Path, version: int, kind: int, number: int, seconds: float) -> Message | None:
    """Send one request to the server in `folder`; returns its answer, or None after `seconds`. Raises `Gone`."""
    connection = Connection.open(folder, version, VISITOR)
    if connection is None:
        raise Gone
    with contextlib.closing(connection):
        connection.send(kind, number=number)
        return connection.receive(time.monotonic() + seconds)
