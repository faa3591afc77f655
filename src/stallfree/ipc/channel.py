"""Messages between processes, without one waiting for the other.

A process that serves others, or trains, uses the non-blocking end, `Channel`: it never waits for a process that does
not read, or that was stopped in the middle of a message. The other end may block (`send_message`, `receive_message`):
it is for a process or thread that does nothing else meanwhile.

On the wire, a message is its length (8 bytes) and its bytes.
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
"""Bytes below which a message is sent in one write."""

_PIECE = 4096
"""Bytes read at once: several small messages, or the beginning of a large one."""


class Endpoint(Protocol):
    """A `multiprocessing` connection, or a socket."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Channel:
    """The non-blocking end of a connection."""

    def __init__(self, connection: Endpoint) -> None:
        self._connection = connection
        self._fd = connection.fileno()
        os.set_blocking(self._fd, False)
        self._socket = connection if isinstance(connection, socket.socket) else None
        self._out: deque[memoryview] = deque()
        self._finished = False
        self._read, self._at = b"", 0  # the data read, and the offset of the next message in it
        self._drained = False  # whether the last read emptied the descriptor
        self._body: bytearray | None = None  # of a larger message
        self._missing = memoryview(b"")  # the part of it that is still to be read

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    @property
    def writing(self) -> bool:
        """Whether data is still to be sent: call `flush` when the descriptor is writable."""
        return bool(self._out)

    def send(self, *messages: bytes) -> None:
        """Send messages as far as possible without blocking. Data for an ended process is dropped; see `receive`."""
        framed = [part for message in messages for part in (_HEAD.pack(len(message)), message)]
        self._out.append(memoryview(b"".join(framed)))
        self.flush()

    def flush(self) -> None:
        """Send pending data as far as possible."""
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
        return self._socket.send(part, socket.MSG_NOSIGNAL)  # SIGPIPE may have its default action in a script

    def finish(self) -> None:
        """Send nothing more: the other end reads the end of file after the last message."""
        self._finished = True
        self.flush()

    def receive(self) -> bytearray | None:
        """Return the next message, or None if it is incomplete. Raises `EOFError` at the end.

        None does not mean that no data has arrived since the last message: wait until the descriptor is readable.
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
        """Read available data; returns False if there is none."""
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
        """Close the descriptor. Idempotent."""
        self._out.clear()
        self._fd = -1  # another thread may be about to call receive
        self._connection.close()


def send_message(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Send a message made of `pieces`, blocking. Raises `OSError` if the other end is closed."""
    size = sum(map(len, pieces))
    head = _HEAD.pack(size)
    for part in [b"".join((head, *pieces))] if size < _SMALL else (head, *pieces):
        rest = memoryview(part)
        while len(rest):
            rest = rest[os.write(fd, rest) :]


def receive_message(fd: int) -> bytearray:
    """Wait for the next message, blocking. Raises `EOFError` or `OSError` if the other end is closed."""
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
