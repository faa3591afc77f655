"""One process serves batches to several others, its consumers, through a Unix socket.

`Server` is the end of the process that serves; it never waits for a consumer. `Connection` is the end of a consumer.
The first message of each connection says which version of its protocol the consumer speaks; what is wrong with it, the
consumer receives as an error. `Leases` counts who still uses which batch.
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
from typing import Any, NamedTuple, Protocol, TypeVar

from stallfree.errors import StallfreeError
from stallfree.ipc import sockets
from stallfree.ipc.channel import Channel
from stallfree.ipc.fork_guard import keep_from_children
from stallfree.ipc.remote import RemoteTraceback, pack_plain_error, unpack_plain_error

HELLO, ERROR = 1, 2
"""Kinds of messages that all protocols have: the first one of a consumer, and an error that ends the connection."""

VISITOR = -2
"""In the place of a consumer's number: the connection is for one question."""

_HEAD = struct.Struct("<4q")
_Connection = TypeVar("_Connection", bound="Connection")


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: says what the rest means; 3 and above are the protocol's own.
        serial: of what it belongs to, a request or an epoch; in a HELLO, the version of the protocol.
        number: of a batch, or of a consumer.
        value: another number.
        body: bytes.
    """

    kind: int
    serial: int = 0
    number: int = 0
    value: int = 0
    body: bytes | memoryview = b""


def pack(kind: int, serial: int = 0, number: int = 0, value: int = 0, body: bytes = b"") -> bytes:
    """A message as bytes."""
    return _HEAD.pack(kind, serial, number, value) + body


def unpack(data: bytearray) -> Message:
    """The message in `data`, whose body it keeps."""
    kind, serial, number, value = _HEAD.unpack_from(data)
    return Message(kind, serial, number, value, memoryview(data)[_HEAD.size :])


class Gone(Exception):
    """The process at the other end has ended."""


class _End:
    """One end of a connection.

    Attributes:
        pid: the process at the other end; of a server, the one that began to listen. 0 if it is in another name space.
        process: a descriptor that is readable when that process has ended, or -1.
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
        """Readable when there is a message, or the other end is gone."""
        return [fd for fd in (self.channel.fileno(), self.process) if fd >= 0]

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self.channel.fileno() < 0

    def close(self) -> None:
        """End the connection, for whoever has a copy of this end too. May be called twice."""
        if self.closed:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        if self.process >= 0:
            os.close(self.process)


# -- the process that serves ------------------------------------------------------------------------------------------


class Peer(_End):
    """A process that has connected.

    Attributes:
        greeted: whether its first message has come.
        dropped: whether the server has forgotten it.
    """

    greeted = dropped = False


class Poller(Protocol):
    """`select.poll` or `select.epoll`; with the latter another thread may wait while its descriptors change."""

    def register(self, fd: Any, eventmask: int) -> None: ...

    def modify(self, fd: Any, eventmask: int) -> None: ...

    def unregister(self, fd: Any) -> None: ...


class Server:
    """Accepts consumers, and exchanges messages with them.

    Args:
        listener: to which they come.
        version: of the protocol.
        protocol: its name, for messages.
        poller: where the descriptors are registered. What it finds is for `receive`.
    """

    def __init__(self, listener: socket.socket, version: int, protocol: str, poller: Poller) -> None:
        keep_from_children(listener)
        listener.setblocking(False)
        self._listener, self._version, self._protocol, self._poller = listener, version, protocol, poller
        self.peers: set[Peer] = set()
        """All that are connected."""
        self._owners: dict[int, Peer] = {}  # of descriptors
        poller.register(listener, select.POLLIN)

    def receive(self, ready: Iterable[tuple[int, int]]) -> Iterator[tuple[Peer, Message | None]]:
        """The messages of consumers, and None for each one that is gone; no more of one that is dropped meanwhile."""
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
        """Whether the first message of a consumer is right."""
        peer.greeted = message.kind == HELLO and message.serial == self._version
        if not peer.greeted:
            error = StallfreeError(
                f"process {peer.pid} speaks version {message.serial} of the {self._protocol}'s protocol, this one "
                f"{self._version}: install the same release for all"
            )
            self.refuse(peer, error)
        return peer.greeted

    def send(self, peer: Peer, kind: int, serial: int = 0, number: int = 0, value: int = 0, body: bytes = b"") -> None:
        """Send a message; what cannot be sent now, `receive` sends later."""
        peer.channel.send(pack(kind, serial, number, value, body))
        if peer.channel.writing:
            self._watch_output(peer)

    def _watch_output(self, peer: Peer) -> None:
        self._poller.modify(peer.channel.fileno(), select.POLLIN | (select.POLLOUT if peer.channel.writing else 0))

    def refuse(self, peer: Peer, error: Exception, trace: str = "") -> None:
        """Send an error, which the consumer raises, and end the connection."""
        peer.channel.send(pack(ERROR, body=pack_plain_error(error, trace)))
        self.drop(peer)

    def drop(self, peer: Peer, *, hang_up: bool = True) -> None:
        """Forget a peer; end the connection, unless the caller does that."""
        if not peer.dropped:
            peer.dropped = True
            self.peers.discard(peer)
            for fd in peer.descriptors:
                del self._owners[fd]
                self._poller.unregister(fd)
        if hang_up:
            peer.close()

    def stop_listening(self) -> None:
        """Accept no more consumers; the poller finds the listener ready. In any thread."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections. May be called twice."""
        for peer in list(self.peers):
            self.drop(peer)
        if self._listener.fileno() >= 0:
            self._poller.unregister(self._listener)
            self._listener.close()


class Leases:
    """Which consumers hold which batches."""

    def __init__(self) -> None:
        self._holders: dict[int, set[Any]] = {}

    def grant(self, batch: int, consumer: Any) -> None:
        """`consumer` holds `batch` from now on."""
        self._holders.setdefault(batch, set()).add(consumer)

    def holders(self, batch: int) -> set[Any]:
        """Those that hold a batch."""
        return self._holders.get(batch, set())

    def release(self, batch: int, consumer: Any) -> bool:
        """`consumer` does not hold `batch` any more. Whether it was the last one."""
        holders = self.holders(batch)
        if consumer not in holders:
            return False
        holders.remove(consumer)
        if not holders:
            del self._holders[batch]
        return not holders

    def leave(self, consumer: Any) -> list[int]:
        """`consumer` does not hold anything any more. The batches of which it was the last holder."""
        return [batch for batch in list(self._holders) if self.release(batch, consumer)]


# -- a consumer -------------------------------------------------------------------------------------------------------


class Connection(_End):
    """The connection of a consumer. Neither `send` nor `receive` with a deadline that has passed waits."""

    def __init__(self, connection: socket.socket, watch: bool = True) -> None:
        super().__init__(connection, watch)
        self._poller = select.poll()
        for fd in self.descriptors:
            self._poller.register(fd, select.POLLIN)

    @classmethod
    def open(
        cls: type[_Connection],
        folder: Path,
        version: int,
        number: int = 0,
        value: int = 0,
        body: bytes = b"",
        *,
        watch: bool = True,
    ) -> _Connection | None:
        """Connect to the server in `folder`, and send the first message; None if there is no server.

        Args:
            folder: with its socket.
            version: of the protocol.
            number, value, body: of the message.
            watch: look for the death of the process that began to listen, and not for the end of the connection only.
        """
        connection = sockets.connect(folder)
        if connection is None:
            return None
        made = cls(connection, watch)
        made.channel.send(pack(HELLO, version, number, value, body))
        return made

    def send(self, kind: int, serial: int = 0, number: int = 0, value: int = 0, body: bytes = b"") -> None:
        """Send a message, or what can be sent of it now. To a server that is gone it is lost."""
        self.channel.send(pack(kind, serial, number, value, body))

    def receive(self, deadline: float = 0.0) -> Message | None:
        """The next message; None at `deadline` of `time.monotonic`.

        Raises `Gone` when there will be none, and the error that the server sent to end the connection.
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
                error, trace = unpack_plain_error(message.body)
                raise error from (RemoteTraceback(trace) if trace else None)
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
        """Send what has not been sent."""
        self.channel.flush()

    @property
    def ended(self) -> bool:
        """Whether the server is gone, whatever of its messages was not received."""
        return self.closed or any(fd == self.process or events & select.POLLHUP for fd, events in self._poller.poll(0))


def ask(folder: Path, version: int, kind: int, number: int, seconds: float) -> Message | None:
    """The answer to one question to the server in `folder`; None if there is none in time. Raises `Gone`."""
    connection = Connection.open(folder, version, VISITOR)
    if connection is None:
        raise Gone
    with contextlib.closing(connection):
        connection.send(kind, number=number)
        return connection.receive(time.monotonic() + seconds)
