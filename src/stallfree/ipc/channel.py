"""Messages between processes of one user, and errors in them, without one waiting for the other.

A process that serves others, or trains, never waits for a process that does not read, or that was stopped in the middle
of a message: a `Channel` sends what the socket takes, keeps the rest, and receives what has arrived. A process that
does nothing else meanwhile may block (`send_all`). On the wire, a message is its length (8 bytes) and its bytes.

A `Server` exchanges messages with several processes (`Connection`) through a Unix socket in a shared folder. Only the
folder's user can reach the socket, since the folder has mode 0700.
"""

import contextlib
import io
import os
import pickle
import select
import socket
import struct
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from stallfree.errors import BatchError, StallfreeError, text_of
from stallfree.ipc.folders import short_path
from stallfree.platform import at_fork
from stallfree.raising import is_users, notes_of, users_traceback

_LENGTH = struct.Struct("<Q")
_FIELDS = struct.Struct("<3q")
_PIECE = 4096
"""Bytes read at once: several small messages, or the beginning of a large one."""

_kept: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets that /dev/null replaces in forked children.

An inherited copy of a connection would hide the end of this process from the other end. The copy is not closed, because
inherited objects would later close another file with the same number.
"""


def _replace_kept() -> None:
    if _kept:
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for kept in list(_kept):
            if kept.fileno() >= 0:
                os.dup2(null, kept.fileno(), inheritable=False)
        os.close(null)
        _kept.clear()


at_fork(after_in_child=_replace_kept)


class Channel:
    """One end of a connection.

    Attributes:
        pending: data that is still to be sent: call `flush` when the descriptor is writable.
    """

    def __init__(self, connection: socket.socket) -> None:
        _kept.add(connection)
        self._socket = connection
        self.pending, self._finished = bytearray(), False
        self._in, self._start, self._end = bytearray(_PIECE), 0, 0  # the unread part of the received data

    def fileno(self) -> int:
        """Return the descriptor, which is readable when there is a message or the other end is closed; -1 if closed."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """The `poll` events to wait for at the descriptor."""
        return select.POLLIN | (select.POLLOUT if self.pending else 0)

    def send(self, *messages: bytes) -> None:
        """Send messages as far as possible without blocking. They are lost if the other process has ended."""
        for message in messages:
            self.pending += _LENGTH.pack(len(message)) + message
        Channel.flush(self)  # one that takes a lock is for others

    def flush(self) -> None:
        """Send pending data as far as possible."""
        try:
            while self.pending:  # SIGPIPE may have its default action in a script
                del self.pending[: self._socket.send(self.pending, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)]
            if self._finished:
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self.pending.clear()

    def send_all(self, *pieces: bytes | memoryview) -> None:
        """Send a message made of `pieces`, blocking. Raises `OSError` if the other end is closed."""
        self._socket.sendall(b"".join((_LENGTH.pack(sum(map(len, pieces))), *pieces)), socket.MSG_NOSIGNAL)

    def finish(self) -> None:
        """Send nothing more: the other end reads the end of file after the last message."""
        self._finished = True
        self.flush()

    def receive(self, *, wait: bool = False) -> bytearray | None:
        """Return the next message, or None if it has not arrived completely. Raises `EOFError` at the end.

        With `wait`, block until it has arrived, or the time limit of the socket has passed.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            body, present = self._start + _LENGTH.size, self._end - self._start
            end = body
            if present >= _LENGTH.size:
                end += _LENGTH.unpack_from(self._in, self._start)[0]
                if end <= self._end:
                    self._start = end
                    return self._in[body:end]
            if end > len(self._in):
                memory = bytearray(max(end - self._start, _PIECE))
                memory[:present] = self._in[self._start : self._end]
                self._in, self._start, self._end = memory, 0, present
            try:
                received = self._socket.recv_into(memoryview(self._in)[self._end :], 0, flags)
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if not received:
                raise EOFError
            self._end += received

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`, or 1 s, for data or space for pending data; returns whether data has arrived."""
        poller = select.poll()
        poller.register(self, self.events)
        ready = poller.poll(1000 * min(seconds, 1.0))
        self.flush()
        return any(events & ~select.POLLOUT for _, events in ready)

    def receive_by(self, deadline: float) -> bytearray | None:
        """Return the next message, or None at `deadline` (`time.monotonic`). Raises `EOFError` at the end."""
        while (message := self.receive()) is None and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
        return message

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self.pending.clear()
        self._socket.close()


# -- several processes ------------------------------------------------------------------------------------------------

ERROR = 1
"""The kind of the message that carries an error; kinds of 2 and above are specific to a protocol."""


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: kind of the message.
        number: number of a batch or a process.
        value: another number.
        body: bytes.
    """

    kind: int
    number: int = 0
    value: int = 0
    body: bytes | memoryview = b""


def pack(kind: int, number: int = 0, value: int = 0, body: bytes = b"") -> bytes:
    """Return a message as bytes."""
    return _FIELDS.pack(kind, number, value) + body


def unpack(data: bytearray) -> Message:
    """Return the message in `data`; its body is a view of `data`."""
    return Message._make((*_FIELDS.unpack_from(data), memoryview(data)[_FIELDS.size :]))


class Connection(Channel):
    """A connection to a server or to one of its consumers.

    Attributes:
        pid: PID at the other end; of a server, the process that created the socket. 0 in another PID namespace.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.pid: int = struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4))[0]

    @classmethod
    def open(cls, folder: Path) -> Self | None:
        """Connect to the server in `folder`; returns None if there is none."""
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError), short_path(folder) as short:
            if connection.connect_ex(f"{short}/socket") == 0:
                return cls(connection)
        connection.close()
        return None

    def next_message(self, deadline: float = 0.0) -> Message | None:
        """Return the next message, or None at `deadline` (`time.monotonic`).

        Raises `EOFError` if the other process has ended, and the error that it sent.
        """
        data = self.receive_by(deadline)
        message = None if data is None else unpack(data)
        if message is not None and message.kind == ERROR:
            raise unpack_error(message.body)
        return message


class Server:
    """Listens in a folder, and exchanges messages with the processes that connect.

    Attributes:
        peers: the connected processes.
    """

    def __init__(self, folder: Path) -> None:
        self.peers: set[Connection] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        _kept.add(self._listener)
        with short_path(folder) as short:
            self._listener.bind(f"{short}/socket-{os.getpid()}")
            self._listener.listen(128)
            os.rename(f"{short}/socket-{os.getpid()}", f"{short}/socket")  # replaces that of an ended process
        self._listener.setblocking(False)

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """Descriptors to wait for, with events of `poll`; then call `receive`."""
        listener = (self._listener.fileno(), select.POLLIN)
        return [listener, *((peer.fileno(), peer.events) for peer in self.peers)]

    def receive(self) -> Iterator[tuple[Connection, Message | None]]:
        """Yield the messages, and None for each process that is gone; a dropped one yields no more."""
        with contextlib.suppress(OSError):
            while True:
                self.peers.add(Connection(self._listener.accept()[0]))
        for peer in list(self.peers):
            peer.flush()
            try:
                while peer in self.peers and (data := peer.receive()) is not None:
                    yield peer, unpack(data)
            except (EOFError, struct.error):
                yield peer, None
                self.drop(peer)

    def drop(self, peer: Connection) -> None:
        """End the connection to a process."""
        self.peers.discard(peer)
        peer.close()

    def close(self) -> None:
        """End all connections. Idempotent."""
        for peer in list(self.peers):
            self.drop(peer)
        self._listener.close()


# -- errors -----------------------------------------------------------------------------------------------------------
#
# An error arrives as it was raised: its class, arguments, attributes, notes, cause and context, but no constructor is
# called, since it may need other arguments than `args`. Its traceback arrives as a note.


def pack_error(error: BaseException) -> bytes:
    """Return the error as bytes.

    Attributes that have no pickle are left out, and arguments become text. An error whose class has none becomes a
    `BatchError` with the name of its type and its text.
    """
    return pickle.dumps((_text(error), _dumps(error)))


def unpack_error(packed: bytes | bytearray | memoryview) -> BaseException:
    """Return the packed error; a `BatchError` with its text if it cannot be made here."""
    text, data = pickle.loads(packed)
    try:
        return pickle.loads(data)  # type: ignore[no-any-return]
    except Exception:
        return _stand_in(text)


class _Pickler(pickle.Pickler):
    """Pickles errors in parts."""

    def reducer_override(self, value: Any) -> Any:
        """Return the parts of an error, which `_create` and `_restore` put together; other objects as usual."""
        if not isinstance(value, BaseException):
            return NotImplemented
        _, arguments, state = (*_builtin(type(value)).__reduce__(value), None)[:3]
        sent = tuple(argument if _dumps(argument) else text_of(argument) for argument in arguments)
        rebuild: Any = _create, (type(value), sent)
        own = object.__getstate__(value)  # with slots, a pair of which the second is theirs
        held = dict[str, Any](state or {}) | (own[1] if isinstance(own, tuple) else {})
        attributes = {name: attribute for name, attribute in held.items() if _dumps(attribute)}
        if not _dumps(type(value)):
            rebuild, attributes = (_stand_in, (_text(value),)), {}
        links = {name: getattr(value, name) for name in ("__cause__", "__context__", "__suppress_context__")}
        return *rebuild, links | attributes | {"__notes__": _notes(value)}, None, None, _restore


def _builtin(kind: type[BaseException]) -> Any:
    return next(parent for parent in kind.__mro__ if parent.__module__ == "builtins")


def _create(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    builtin = _builtin(kind)
    made: BaseException = builtin.__new__(kind, *arguments)
    builtin.__init__(made, *arguments)
    return made


def _stand_in(text: str) -> BatchError:
    return BatchError(f"{text} (an error of a class that cannot be sent from one process to another)")


def _restore(made: BaseException, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        with contextlib.suppress(Exception):  # one that cannot be set
            object.__setattr__(made, name, value)  # also of frozen classes


def _notes(error: BaseException) -> list[str]:
    """The notes of an error, and its traceback in this process; a stallfree error describes itself."""
    if error.__traceback__ is None or isinstance(error, StallfreeError):
        return notes_of(error)
    shown = users_traceback(error.__traceback__) if is_users(error) else error.__traceback__
    lines = "".join(traceback.format_tb(shown)).rstrip()
    return [*notes_of(error), f"Traceback in process {os.getpid()} (most recent call last):\n{lines}"]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"


def _dumps(value: object) -> bytes:
    """Return the pickle of `value`; empty if it has none, such as a cause that contains itself, or cannot be loaded."""
    stream = io.BytesIO()
    with contextlib.suppress(Exception):
        _Pickler(stream).dump(value)
        pickle.loads(stream.getvalue())
        return stream.getvalue()
    return b""
