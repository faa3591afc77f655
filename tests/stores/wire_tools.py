"""A wire whose other end is a socket and no server, and an independent model of what servers say."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from stallfree.stores.wire import Refused, Wire

ENOUGH = 60.0  # seconds that a server may be silent where that is not what is tested


class Cut(socket.socket):
    """A socket that gives and takes at most so many bytes at once."""

    sizes: Iterator[int] = itertools.repeat(1 << 30)

    @staticmethod
    def arrived(size: int) -> None:
        """Told of each receiving."""

    def recv_into(self, target: Any, *_: Any) -> int:
        size = super().recv_into(memoryview(target)[: next(self.sizes)])
        self.arrived(size)
        return size

    def recvmsg_into(self, targets: Any, *_: Any) -> Any:
        left, some = next(self.sizes), []
        for target in targets:
            some.append(memoryview(target)[:left])
            left -= len(some[-1])
        answer = super().recvmsg_into([target for target in some if target])
        self.arrived(answer[0])
        return answer

    def sendmsg(self, pieces: Any, *_: Any) -> int:
        left, some = next(self.sizes), []
        for piece in pieces:
            some.append(memoryview(piece)[:left])
            left -= len(some[-1])
        return super().sendmsg([piece for piece in some if piece])


class Ready:
    """Stands for a connection of redis-py."""

    def __init__(self, there: Any) -> None:
        self._sock = there

    def connect(self) -> None:
        pass


@contextlib.contextmanager
def wire_to(
    data: bytes, sizes: list[int] | None = None, *, close: bool = True, timeout: float = ENOUGH
) -> Iterator[Wire]:
    """A wire on which `data` comes, in pieces of at most these sizes in turn; then its end, if `close`."""
    ours, theirs = socket.socketpair()
    cut = Cut(fileno=ours.detach())
    if sizes:
        cut.sizes = itertools.cycle(sizes)

    def feed() -> None:
        with contextlib.suppress(OSError):
            theirs.sendall(data)
            if close:
                theirs.shutdown(socket.SHUT_WR)

    feeder = threading.Thread(target=feed)
    feeder.start()
    made = Wire(lambda: Ready(cut), timeout)  # type: ignore[arg-type,return-value]
    try:
        yield made
    finally:
        made.close()
        feeder.join()
        theirs.close()


def asked(made: Wire, replies: int = 1) -> Wire:
    made.send([b""], replies)
    return made


def encoded(reply: Any) -> bytes:
    """A reply as a server sends it: an independent model."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, Refused):
        return b"-" + reply.text.encode() + b"\r\n"
    if isinstance(reply, Status):
        return b"+" + reply + b"\r\n"
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))


class Status(bytes):
    """A reply of one line."""


def plain(reply: Any) -> Any:
    """A reply in a form that can be compared."""
    if isinstance(reply, Refused):
        return ("refused", reply.code, reply.text)
    if isinstance(reply, (list, tuple)):
        return [plain(one) for one in reply]
    return bytes(reply) if isinstance(reply, (bytes, bytearray, np.ndarray)) else reply
