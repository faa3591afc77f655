"""Messages between processes, of which one must not wait for the other.

The end of a process that serves others, or trains, is a `Channel`: it never waits for a process that does not read, or
that was stopped in the middle of a message; it neither blocks nor counts on whole messages. The other end may block: it
is for a process, or a thread, that does nothing else meanwhile.

On the wire a message is its length (8 bytes) and its bytes.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Sequence
from typing import Protocol

_HEAD = struct.Struct("<Q")
_SMALL = 16384


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
        self._out: deque[memoryview] = deque()
        self._head = bytearray(_HEAD.size)
        self._body: bytearray | None = None
        self._missing = memoryview(self._head)

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

    def _write(self, part: memoryview) -> int:
        return os.write(self._fd, part)

    def receive(self) -> bytearray | None:
        """The next message, or None if it is not there yet. Raises `EOFError` at the end."""
        while True:
            try:
                got = os.readv(self._fd, [self._missing])
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if got == 0:
                raise EOFError
            self._missing = self._missing[got:]
            if len(self._missing):
                continue
            if self._body is None:
                self._body = bytearray(_HEAD.unpack(self._head)[0])
                self._missing = memoryview(self._body)
            else:
                body, self._body = self._body, None
                self._missing = memoryview(self._head)
                return body

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        self._out.clear()
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
