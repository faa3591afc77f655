"""The counter of a node: where its clerk hands out samples to other processes, which ask as they would ask a server.

It speaks RESP2, so that connections are made and replies are read by what is there for servers (wire.py). A request is
a command; nothing but AUTH is listened to before the password of the node was given.

    PING                                    a sign of life
    ROOM key                                1 if more samples of the data set are taken in, else 0
    ASK key milliseconds ids                an array: for each id (int64, little-endian) its value, or an empty string
    COUNT key milliseconds                  how many samples of the data set are held
    CLEAR key milliseconds                  drop them
    SETTLE milliseconds                     1 when what was handed in before is put away, 0 if that takes longer

What was handed in before a question counts, if it is put away within so many milliseconds; else the answer is of what
is there by then. Values are sent out of the arena itself. One that is overwritten while it is on its way has the wrong
checksum, and is a miss for the asker.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from stallfree.cache import SampleCache
from stallfree.errors import StallfreeError
from stallfree.platform import resource
from stallfree.stores.values import HEAD_SIZE, DataKey, pack_head

ROOM, ASK, COUNT, CLEAR, SETTLE = b"ROOM", b"ASK", b"COUNT", b"CLEAR", b"SETTLE"

_SEND_SECONDS = 5.0
"""How long an asker may take nothing before its connection is closed."""

_MOST_CONNECTIONS = 4096
_OTHER_DESCRIPTORS = 256
"""That the clerk may need beside those of its connections."""

_STRANGER_SECONDS = 5.0
"""Until the password must have come."""

_STRANGER_BYTES = 1024
_MOST_BYTES = 64 << 20
_MOST_MILLISECONDS = 60_000
_IOV_MAX = 1024


class _Nonsense(Exception):
    """What came is no command."""


class _Incoming(io.RawIOBase):
    """What comes on a connection. It is waited for until a moment, on the clock of `time.monotonic`; 0 for ever."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self.until = until

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        if self.until:
            left = self.until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
        return self._connection.recv_into(memory)


class Counter:
    """Answer in threads of its own: one per listener, and one per connection.

    Args:
        listeners: sockets that listen.
        password: of the node.
        find: gives this node's part of a data set; None if it holds none of it.
        settle: wait until what was handed in before is put away, for so many seconds at most; whether it is.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        password: str,
        find: Callable[[DataKey], SampleCache | None],
        settle: Callable[[float], bool],
    ) -> None:
        self._password, self._find, self._settle = password.encode(), find, settle
        self._free = threading.BoundedSemaphore(_room_for_connections())
        for listener in listeners:
            threading.Thread(target=self._accept, args=(listener,), name="stallfree-counter", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # no descriptor is free: the asker waits in the queue, or gives up
                threading.Event().wait(0.1)
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="stallfree-asker", daemon=True).start()
            except RuntimeError:
                self._free.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            incoming = _Incoming(connection, time.monotonic() + _STRANGER_SECONDS)
            with contextlib.suppress(OSError, _Nonsense), connection, io.BufferedReader(incoming) as requests:
                if not self._greet(connection, requests):
                    return
                incoming.until = 0
                connection.settimeout(None)
                limit = struct.pack("ll", *divmod(round(_SEND_SECONDS * 1e6), 1_000_000))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
                while (request := _read(requests, _MOST_BYTES)) is not None:
                    _send(connection, self._answer(request))
        finally:
            self._free.release()

    def _greet(self, connection: socket.socket, requests: Any) -> bool:
        """Wait for the password; whether it was given."""
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        while (request := _read(requests, _STRANGER_BYTES)) is not None:
            if request[0].upper() != b"AUTH":
                _send(connection, [b"-NOAUTH the password of the node is needed first\r\n"])
            elif not hmac.compare_digest(request[-1], self._password):
                _send(connection, [b"-WRONGPASS this is not the password of the node\r\n"])
            else:
                _send(connection, [b"+OK\r\n"])
                return True
        return False

    def _answer(self, request: list[bytes]) -> list[Any]:
        """The reply, in pieces."""
        name, *given = request
        try:
            match name.upper(), given:
                case b"PING", []:
                    return [b"+PONG\r\n"]
                case b"ROOM", [key]:
                    cache = self._find(key)
                    return [b":%d\r\n" % (cache is None or not cache.full)]
                case b"ASK", [key, wait, ids]:
                    return self._values(key, _seconds(wait), np.frombuffer(ids, "<i8").astype(np.int64, copy=False))
                case b"COUNT", [key, wait]:
                    self._settle(_seconds(wait))
                    cache = self._find(key)
                    return [b":%d\r\n" % (0 if cache is None else cache.stats().resident_items)]
                case b"CLEAR", [key, wait]:
                    self._settle(_seconds(wait))
                    cache = self._find(key)
                    if cache is not None:
                        cache.clear()
                    return [b"+OK\r\n"]
                case b"SETTLE", [wait]:
                    return [b":%d\r\n" % self._settle(_seconds(wait))]
        except (StallfreeError, ValueError) as error:  # of one request, which takes no other with it
            return [b"-ERR %b\r\n" % " ".join(str(error).split()).encode()[:200]]
        return [b"-ERR unknown command\r\n"]

    def _values(self, key: DataKey, seconds: float, ids: Any) -> list[Any]:
        cache = self._find(key)
        known = cache is not None and len(ids) > 0 and ids.min() >= 0 and ids.max() < cache.num_ids
        if cache is None or not known:
            return [b"*%d\r\n" % len(ids) + b"$0\r\n\r\n" * len(ids)]
        if not cache.full and not cache.resident(ids).all():
            self._settle(seconds)
        views = cache.view_records(ids)
        heads = [pack_head(key, id, parts) for id, parts in zip(ids.tolist(), views.parts, strict=True)]
        pieces: list[Any] = []
        small = bytearray(b"*%d\r\n" % len(ids))
        for head, parts, good in zip(heads, views.parts, views.unchanged().tolist(), strict=True):
            if good:
                small += b"$%d\r\n%b" % (HEAD_SIZE + sum(map(len, parts)), head)
                pieces += [small, *parts]
                small = bytearray(b"\r\n")
            else:
                small += b"$0\r\n\r\n"
        return [*pieces, small]


def _read(requests: Any, most: int) -> list[bytes] | None:
    """The next command, of `most` bytes at most; None at the end. Raises `_Nonsense`."""
    line = requests.readline(32)
    if not line:
        return None
    given = []
    for _ in range(_number(line, b"*", 16)):
        size = _number(requests.readline(32), b"$", most)
        most -= size
        text = requests.read(size + 2)
        if len(text) != size + 2 or text[-2:] != b"\r\n":
            raise _Nonsense
        given.append(text[:-2])
    if not given:
        raise _Nonsense
    return given


def _number(line: bytes, kind: bytes, most: int) -> int:
    if line[:1] != kind or line[-2:] != b"\r\n" or not line[1:-2].isdigit() or int(line[1:-2]) > most:
        raise _Nonsense
    return int(line[1:-2])


def _seconds(milliseconds: bytes) -> float:
    return min(int(milliseconds), _MOST_MILLISECONDS) / 1000


def _room_for_connections() -> int:
    """How many this process may have. The usual limit of 1024 descriptors is raised if the system lets us."""
    wished = _MOST_CONNECTIONS + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wished:
        soft = wished if hard == resource.RLIM_INFINITY else min(wished, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wished, soft if soft >= 0 else wished) - _OTHER_DESCRIPTORS)


def _send(connection: socket.socket, pieces: list[Any]) -> None:
    left = [memoryview(piece) for piece in pieces if len(piece)]
    at = 0
    while at < len(left):
        sent = connection.sendmsg(left[at : at + _IOV_MAX], (), socket.MSG_NOSIGNAL)
        while at < len(left) and sent >= len(left[at]):
            sent -= len(left[at])
            at += 1
        if sent:
            left[at] = left[at][sent:]
