"""One connection to a server, without what is said on it: opening, sending, receiving, time limits, forks.

redis-py opens it; what is large then travels by a path of our own. A client library makes fresh memory for each value
that it receives, and copies each piece of 32 or 64 KiB once more. Here a large value is received where it is to lie,
and small ones are cut out of larger pieces, which lie in standing memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from stallfree.errors import StallfreeError

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

Bytes = npt.NDArray[np.uint8]
Piece = bytes | bytearray | memoryview | Bytes

SLOWEST = 2e6
"""Bytes per second below which a connection counts as lost."""

STANDING = 512 << 10
"""Bytes of the buffer that small things are received to."""

DIRECT = 64 << 10
"""From so many bytes on, what is missing of a string is received where it is to lie."""

_IOV_MAX = 1024


class Lost(Exception):
    """The connection broke, the server was silent for too long, or it said what no server says. It is closed now."""


def octets(piece: Piece) -> memoryview:
    """The bytes of `piece`, which is contiguous."""
    view = piece.data if isinstance(piece, np.ndarray) else memoryview(piece)
    return view.cast("B") if view.nbytes else memoryview(b"")


class Link:
    """One connection, for one thread at a time; made when it is first needed, and again after it was lost.

    redis-py opens it and shakes hands (TCP, Unix sockets, TLS, passwords, users, databases); then its socket is taken
    over (`connection._sock`, which is no public name: another version of redis-py that lacks it is an error that says
    so). In a forked child the parent's socket is let go of, which the parent does not notice, and another one is made.

    Args:
        connect: makes a connection of redis-py that is not open yet, with `protocol=2`.
        timeout: seconds that the server may be silent, or take nothing, while something is expected of it. In all a
            command and its replies may take so long, and a second more for each 2 MB.
    """

    def __init__(self, connect: Callable[[], AbstractConnection], timeout: float = 0.25) -> None:
        self._connect = connect
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._poll = select.poll()
        self._tls = False
        self._pid = 0
        self._buffer = bytearray(STANDING)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what was received and not yet read
        self._due = 0  # replies that were not yet read
        self._spent = 0.0  # seconds waited since the last command
        self._allowed = 0.0
        self._patience = 0.0  # what the socket is set to
        self._typical = 0  # bytes of the last string that was not small

    # -- the connection -----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether all replies were read, so that another command may use it."""
        return self._socket is not None and self._due == 0 and self._start == self._end

    def usable(self) -> bool:
        """Whether it is open, idle, and the server has not closed it meanwhile."""
        if self._socket is None or self._pid != os.getpid() or not self.idle:
            return False
        return not self._poll.poll(0)

    def open(self) -> None:
        """Connect, if it is not connected. Raises `Lost` if the server is not there or does not let us in."""
        if self._socket is not None:
            if self._pid == os.getpid():
                return
            self.close()
        connection = self._connect()
        try:
            connection.connect()  # type: ignore[no-untyped-call]
        except Exception as error:  # a server that talks nonsense makes redis-py raise all sorts of them
            raise Lost(f"no connection: {error}") from error
        there = getattr(connection, "_sock", None)
        if not isinstance(there, socket.socket):
            import redis

            raise StallfreeError(
                f"redis-py {redis.__version__} keeps its socket under another name than stallfree knows: "
                "install a version from 5 to 8, or a newer stallfree"
            )
        connection._sock = None
        self._socket = there
        self._tls = isinstance(there, ssl.SSLSocket)
        self._pid = os.getpid()
        self._patience = 0.0
        self._poll = select.poll()
        # TLS has messages of its own, which are no sign of anything.
        self._poll.register(there, select.POLLRDHUP if self._tls else select.POLLIN | select.POLLRDHUP)
        if not self._tls:
            there.settimeout(None)  # the kernel keeps the time limits: one call of it per piece, and none to ask
            self._limit(socket.SO_SNDTIMEO, self._timeout)
        self._wait_at_most(self._timeout)

    def close(self) -> None:
        """Close the connection. Replies that were not read are gone. In a forked child the parent keeps its own."""
        there, self._socket = self._socket, None
        self._start = self._end = self._due = 0
        if there is not None:
            with contextlib.suppress(OSError):
                there.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _lost(self, why: str, error: BaseException | None = None) -> NoReturn:
        self.close()
        raise Lost(why) from error

    def _limit(self, option: int, seconds: float) -> None:
        assert self._socket is not None
        microseconds = max(1, round(seconds * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(microseconds, 1_000_000)))

    def _wait_at_most(self, seconds: float) -> None:
        if seconds != self._patience and self._socket is not None:
            self._patience = seconds
            if self._tls:
                self._socket.settimeout(seconds)
            else:
                self._limit(socket.SO_RCVTIMEO, seconds)

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, pieces: Sequence[Piece], replies: int = 1) -> None:
        """Send commands, one after the other; connects first if need be.

        Args:
            pieces: what `command` made, of one or more commands.
            replies: the number of commands.
        """
        self.open()
        self._due += replies
        self._spent, self._allowed = 0.0, self._timeout
        self._wait_at_most(self._timeout)
        left = [octets(piece) for piece in pieces]
        try:
            if self._tls:
                for view in left:
                    self._send_tls(view)
            else:
                self._send(left)
        except (BlockingIOError, TimeoutError) as error:
            self._lost(f"the server took nothing for {self._timeout:g} s", error)
        except OSError as error:
            self._lost(f"sending failed: {error}", error)

    def _send(self, left: list[memoryview]) -> None:
        assert self._socket is not None
        at = 0
        while at < len(left):
            began = time.monotonic()
            sent = self._socket.sendmsg(left[at : at + _IOV_MAX], (), socket.MSG_NOSIGNAL)
            self._account(began, sent)
            while sent:
                size = len(left[at])
                if sent < size:
                    left[at] = left[at][sent:]
                    break
                sent -= size
                at += 1
            while at < len(left) and not left[at]:
                at += 1

    def _send_tls(self, view: memoryview) -> None:
        assert self._socket is not None
        while view:
            began = time.monotonic()
            sent = self._socket.send(view[:STANDING])
            self._account(began, sent)
            view = view[sent:]

    def _account(self, began: float, size: int) -> None:
        self._spent += time.monotonic() - began
        self._allowed += size / SLOWEST
        if self._spent > self._allowed:
            self._lost(f"the server took {self._spent:.2f} s for less than it should")

    # -- receiving ----------------------------------------------------------------------------------------------------

    def expect(self, seconds: float) -> None:
        """The next byte may take `seconds` longer than usual, for instance after a command that waits."""
        self._wait_at_most(self._timeout + seconds)
        self._allowed += seconds

    def _more(self, at_most: int) -> None:
        """Receive more into the standing buffer, behind what is there."""
        if self._start == self._end:
            self._start = self._end = 0
        elif STANDING - self._end < DIRECT:
            size = self._end - self._start
            self._view[:size] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, size
        self._end += self._receive(self._view[self._end : self._end + at_most], None)

    def _receive(self, target: memoryview, extra: memoryview | None) -> int:
        """Receive to `target`, then to `extra`; how many bytes it were.

        With `extra` all of both is waited for, and less comes only with TLS or after a delay.
        """
        if self._socket is None:
            raise Lost("the connection was lost before all replies had come")
        began = time.monotonic()
        try:
            if extra is None or self._tls:
                size = self._socket.recv_into(target)
            else:
                size = self._socket.recvmsg_into([target, extra], 0, socket.MSG_WAITALL)[0]
        except (BlockingIOError, TimeoutError) as error:
            self._lost(f"the server was silent for {self._patience:g} s", error)
        except OSError as error:
            self._lost(f"receiving failed: {error}", error)
        if not size:
            self._lost("the server closed the connection")
        self._account(began, size)
        if self._patience != self._timeout:
            self._wait_at_most(self._timeout)
        return size
