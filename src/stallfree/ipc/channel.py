"""Messages between processes, of which one must not wait for the other.

The end of a process that serves others, or trains, is a `Channel`: it never waits for a process that does not read, or
that was stopped in the middle of a message; it neither blocks nor counts on whole messages. The other end may block: it
is for a process, or a thread, that does nothing else meanwhile.

On the wire a message is its length (8 bytes) and its bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Protocol

_HEAD = struct.Struct("<Q")
_SMALL = 16384
"""Bytes below which a message is sent in one piece."""

_PIECE = 4096
"""Bytes that are read at once: as many small messages as there are, or the beginning of a large one."""


class Endpoint(Protocol):
    """A connection of `multiprocessing`, or a socket."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Channel:
    """The end that does not block."""

    def __init__(self, connection: Endpoint) -> None:
        self._connection = connection
        self._fd = connection.fileno()
        os.set_blocking(self._fd, False)
        self._socket = connection if isinstance(connection, socket.socket) else None
        self._out: deque[memoryview] = deque()
        self._finished = False
        self._read, self._at = b"", 0  # what was read, and where the next message begins in it
        self._drained = False  # whether that was all that there was
        self._body: bytearray | None = None  # of a message that is larger
        self._missing = memoryview(b"")  # the part of it that was not read

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    @property
    def writing(self) -> bool:
        """Whether a message is still to be sent: call `flush` when the descriptor is writable."""
        return bool(self._out)

    def send(self, *messages: bytes) -> None:
        """Send messages, or what can be sent of them now. To a process that is gone they vanish; `receive` tells."""
        framed = [part for message in messages for part in (_HEAD.pack(len(message)), message)]
        self._out.append(memoryview(b"".join(framed)))
        self.flush()

    def flush(self) -> None:
        """Send what has not been sent."""
        while self._out:
            part = self._out[0]
            try:
                sent = self._write(part)
            except BlockingIOError:
                return
            except OSError:
                self._out.clear()
                return
            if sent < len(part):
                self._out[0] = part[sent:]
            else:
                self._out.popleft()
        if self._finished and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def _write(self, part: memoryview) -> int:
        if self._socket is None:
            return os.write(self._fd, part)
        return self._socket.send(part, socket.MSG_NOSIGNAL)  # a script may have SIGPIPE end it

    def finish(self) -> None:
        """Nothing more is sent: the other end receives the end after the last message."""
        self._finished = True
        self.flush()

    def receive(self) -> bytearray | None:
        """The next message, or None if it is not there yet. Raises `EOFError` at the end.

        None does not say that nothing has come since the last message: wait until the descriptor is readable.
        """
        while True:
            if self._body is None:
                end = self._at + _HEAD.size
                size = _HEAD.unpack_from(self._read, self._at)[0] if end <= len(self._read) else 0
                if end + size <= len(self._read):
                    self._at = end + size
                    return bytearray(memoryview(self._read)[end : self._at])
                if end < len(self._read):
                    self._body = bytearray(size)
                    start = memoryview(self._read)[end:]
                    self._body[: len(start)] = start
                    self._missing = memoryview(self._body)[len(start) :]
                    self._read, self._at = b"", 0
            if self._drained:
                self._drained = False
                return None
            if not self._fill():
                return None
            if self._body is not None and not len(self._missing):
                body, self._body = self._body, None
                return body

    def _fill(self) -> bool:
        """Read what is there; False if nothing is."""
        try:
            if self._body is None:
                piece = os.read(self._fd, _PIECE)
                self._read, self._at = self._read[self._at :] + piece, 0
                got, self._drained = len(piece), len(piece) < _PIECE
            else:
                got = os.readv(self._fd, [self._missing])
                self._missing = self._missing[got:]
        except BlockingIOError:
            return False
        except OSError as error:
            raise EOFError from error
        if got == 0:
            raise EOFError
        return True

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        self._out.clear()
        self._fd = -1  # another thread may be about to receive
        self._connection.close()


def send_message(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    """The end that blocks: send a message that consists of `pieces`. Raises `OSError` when the other end is gone."""
    size = sum(map(len, pieces))
    head = _HEAD.pack(size)
    for part in [b"".join((head, *pieces))] if size < _SMALL else (head, *pieces):
        rest = memoryview(part)
        while len(rest):
            rest = rest[os.write(fd, rest) :]


def receive_message(fd: int) -> bytearray:
    """The end that blocks: wait for the next message. Raises `EOFError` or `OSError` when the other end is gone."""
    return _read(fd, _HEAD.unpack(_read(fd, _HEAD.size))[0])


def _read(fd: int, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while len(rest):
        got = os.readv(fd, [rest])
        if got == 0:
            raise EOFError
        rest = rest[got:]
    return data
