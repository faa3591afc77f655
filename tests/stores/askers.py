"""Those who ask a clerk, as they speak on the connection; and a counter in this process that answers them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from nodes import PASSWORD, PATIENCE, Office, is_right

from stallfree.cache import SampleCache
from stallfree.pipeline.codec import read_record
from stallfree.stores.counter import Counter
from stallfree.stores.values import check_value, data_key
from stallfree.stores.wire import command

KEY = data_key("data", "f")


class Asker:
    """One end of a connection to a counter, with a reading of replies that is its own."""

    def __init__(self, connection: socket.socket, password: str = PASSWORD) -> None:
        self.connection = connection
        connection.settimeout(PATIENCE)
        self._replies = connection.makefile("rb")
        if password:
            assert self.ask("AUTH", password) == b"OK"

    def say(self, *arguments: Any) -> None:
        self.connection.sendall(b"".join(map(bytes, command(*arguments))))

    def reply(self) -> Any:
        """The next reply; an error is a text. `EOFError` at the end."""
        line = self._replies.readline()
        if line[-2:] != b"\r\n":
            raise EOFError
        kind, text = line[:1], line[1:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(text))]
        if kind == b":":
            return int(text)
        if kind == b"-":
            return text.decode()
        if kind == b"$":
            value = self._replies.read(int(text) + 2)
            if len(value) != int(text) + 2:
                raise EOFError
            assert value[-2:] == b"\r\n"
            return value[:-2]
        assert kind == b"+"
        return text

    def ask(self, *arguments: Any) -> Any:
        self.say(*arguments)
        return self.reply()

    def values(self, *ids: int, key: bytes = KEY, wait: int = 0) -> list[bytes]:
        return self.ask("ASK", key, wait, np.array(ids, "<i8"))

    def is_over(self) -> bool:
        """Whether the other end has closed the connection, sooner or later; what it says before is dropped."""
        with contextlib.suppress(ConnectionError):
            while self.connection.recv(1 << 16):
                pass
        return True

    def close(self) -> None:
        self._replies.close()
        self.connection.close()


class Desk:
    """A counter in this process, with a thread for each connection, which ends with it.

    Args:
        caches: by the keys of their data sets.
        settle: what a clerk would do; by default there is nothing to put away.
    """

    def __init__(
        self, caches: dict[bytes, SampleCache], settle: Callable[[float], bool] = lambda seconds: True
    ) -> None:
        self.counter = Counter([], PASSWORD, caches.get, settle)
        self._made: list[tuple[Asker, threading.Thread]] = []

    def connect(self, password: str = PASSWORD) -> Asker:
        ours, theirs = socket.socketpair()
        assert self.counter._free.acquire(blocking=False)
        thread = threading.Thread(target=self.counter._serve, args=(theirs,), daemon=True)
        thread.start()
        asker = Asker(ours, password)
        self._made.append((asker, thread))
        return asker

    def close(self) -> None:
        for asker, thread in self._made:
            asker.close()
            thread.join(PATIENCE)
            assert not thread.is_alive()


def connect(office: Office, *, unix: bool = False, password: str = PASSWORD) -> Asker:
    """A connection to the clerk of an office, by one of its doors."""
    if not unix:
        where = office.doors.clerk
        return Asker(socket.create_connection((where.host, where.port), PATIENCE), password)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(office.unix.clerk.path)
    return Asker(connection, password)


def show(values: list[bytes], ids: Any) -> list[int | None]:
    """The ids that values tell, where `ids` are due; None for those that are empty or damaged."""
    found: list[int | None] = []
    for value, id in zip(values, ids, strict=True):
        record = check_value(np.frombuffer(value, np.uint8), KEY, id) if value else None
        if record is not None:
            numbers, label = read_record(record.copy(), copy=True)
            assert label == id
            assert is_right(numbers, id)
        found.append(None if record is None else id)
    return found
