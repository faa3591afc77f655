"""The clerk of a node: a process that takes what lies in its post office, and stands at its counter.

Samples that others hand in go into the arena of their data set; samples that are asked for go out of it (counter.py).
So a sample lies once on its node, in the arena, and the server holds only what is on its way.

Its node's keeper starts it: `python -m stallfree.stores.clerk FOLDER FD...`, with sockets that listen. Whatever it
cannot do is a miss for those who ask: they fetch the sample from the source.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from stallfree.cache import SampleCache
from stallfree.errors import CodecError, StallfreeError
from stallfree.pipeline.codec import split_record
from stallfree.stores.buffers import Buffers
from stallfree.stores.counter import Counter
from stallfree.stores.endpoint import Address, Endpoint
from stallfree.stores.post import POST
from stallfree.stores.registry import visit_registered
from stallfree.stores.spawn import read_server
from stallfree.stores.values import HEAD_SIZE, DataKey, check_value, owner_of
from stallfree.stores.wire import Lost, Refused, Wire, command

Array = npt.NDArray[Any]

_AT_ONCE = 16
"""Messages that are taken from the server together."""

_WAIT_SECONDS = 0.25
"""How long it waits for a message before it looks whether its data sets are still there."""

_SERVER_SECONDS = 5.0
_EARLY_BYTES = 128 << 20
"""What is kept of data sets that this node has not made yet, at most, and for how long: it may never make them."""

_EARLY = b"early:"
_EARLY_MILLISECONDS = 120_000
_MARK = b"mark:"
"""Begins a message of the clerk to itself: what came before it has been put away when it comes."""

_MARK_SECONDS = 0.1
"""How long the server may take for one."""


class Clerk:
    """What the process does.

    Args:
        folder: of the node.
        address: of the node's server.
    """

    def __init__(self, folder: Path, address: Address) -> None:
        self._folder = folder
        self._wire = Wire(partial(address.connection, _SERVER_SECONDS), _SERVER_SECONDS)
        self._buffers = Buffers()
        self._caches: dict[DataKey, SampleCache] = {}
        self._lock = threading.Lock()  # for the caches
        self._early: dict[DataKey, int] = {}
        self._looked = time.monotonic()
        self._marks: dict[bytes, threading.Event] = {}
        self._own_office = Endpoint(address, _MARK_SECONDS)

    def turn(self) -> None:
        """Wait for a message, and do it and those behind it. Raises `Lost` when the server is."""
        messages = self._take()
        at = 0
        while at < len(messages):
            lot = messages[at : at + 1]
            while at + len(lot) < len(messages) and _same_data(lot[0], messages[at + len(lot)]):
                lot.append(messages[at + len(lot)])
            at += len(lot)
            with contextlib.suppress(StallfreeError, Refused):  # no message takes another with it
                if len(lot[0]) >= HEAD_SIZE:
                    self._put_away(owner_of(lot[0])[0], lot)
                elif (done := self._marks.get(lot[0].tobytes())) is not None:
                    done.set()
        if time.monotonic() - self._looked > _WAIT_SECONDS:
            self._look()

    def settle(self, seconds: float) -> bool:
        """Wait until what lies in the post office now is put away, for so long at most; whether it is.

        Safe in threads.
        """
        mark, done = _MARK + secrets.token_bytes(8), threading.Event()
        self._marks[mark] = done
        try:
            if self._own_office.run(lambda wire: wire.call("RPUSH", POST, mark)) is None:
                return False  # what was handed in is lost with the server
            return done.wait(seconds)
        except Refused:
            return False
        finally:
            del self._marks[mark]

    def _take(self) -> list[Array]:
        wire = self._wire
        wire.send([*command("BLPOP", POST, f"{_WAIT_SECONDS:.3f}"), *command("LPOP", POST, _AT_ONCE)], replies=2)
        wire.expect(_WAIT_SECONDS)
        messages = []
        if wire.array() is not None:
            wire.skip()
            messages.append(wire.value(self._buffers))
        messages += [wire.value(self._buffers) for _ in range(wire.array() or 0)]
        return [message for message in messages if message is not None]

    # -- samples that come --------------------------------------------------------------------------------------------

    def _put_away(self, key: DataKey, values: list[Array]) -> None:
        cache = self.find(key)
        if cache is None:
            self._keep_early(key, values)
            return
        ids, records = [], []
        for value in values:
            id = owner_of(value)[1]
            record = check_value(value, key, id)
            if record is None or id >= cache.num_ids:
                continue
            with contextlib.suppress(CodecError):
                taken = split_record(record)
                if cache.allow_pickle or not taken[0].pickled:
                    ids.append(id)
                    records.append(taken)
        if ids:
            cache.put_records(ids, records)

    def _keep_early(self, key: DataKey, values: list[Array]) -> None:
        """This node may not have come so far as to make the data set: other nodes' samples wait in the server."""
        size = sum(value.size for value in values)
        if sum(self._early.values()) + size > _EARLY_BYTES:
            return
        self._early[key] = self._early.get(key, 0) + size
        early = _EARLY + key
        self._wire.send([*command("RPUSH", early, *values), *command("PEXPIRE", early, _EARLY_MILLISECONDS)], replies=2)
        for _ in range(2):
            self._wire.skip()

    def _look(self) -> None:
        """Let go of the memory of data sets that nobody uses any more; put away what came early."""
        self._looked = time.monotonic()
        with self._lock:
            for key in [key for key, cache in self._caches.items() if cache.gone]:
                del self._caches[key]  # and not closed: who uses it at this moment leaves it as the last one
        for early in self._wire.call("KEYS", _EARLY + b"*"):
            self._early.setdefault(early[len(_EARLY) :], 0)  # kept before this process was started again
        for key in list(self._early):
            if self.find(key) is None:
                if not self._wire.call("EXISTS", _EARLY + key):  # it has waited for too long
                    del self._early[key]
                continue
            while True:
                self._wire.send(command("LPOP", _EARLY + key, _AT_ONCE))
                values = [self._wire.value(self._buffers) for _ in range(self._wire.array() or 0)]
                if not values:
                    break
                with contextlib.suppress(StallfreeError):
                    self._put_away(key, [value for value in values if value is not None and len(value) >= HEAD_SIZE])
            del self._early[key]

    def find(self, key: DataKey) -> SampleCache | None:
        """This node's part of a data set; None if it holds none of it. Safe in threads."""
        with self._lock:
            cache = self._caches.get(key)
            if cache is not None and cache.gone:
                del self._caches[key]
                cache = None
            if cache is None:
                cache = visit_registered(self._folder, key)
                if cache is not None:
                    self._caches[key] = cache
            return cache


def _same_data(value: Array, message: Array) -> bool:
    """Whether both are samples of the same data set."""
    return min(len(value), len(message)) >= HEAD_SIZE and owner_of(value)[0] == owner_of(message)[0]


def main() -> None:
    """Serve until the keeper is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    folder, keeper = Path(sys.argv[1]), os.getppid()
    address = read_server(folder)
    clerk = Clerk(folder, address)
    listeners = [socket.socket(fileno=int(number)) for number in sys.argv[2:]]
    Counter(listeners, address.password, clerk.find, clerk.settle)
    while os.getppid() == keeper:
        try:
            clerk.turn()
        except (Lost, Refused):
            if not folder.exists():
                return
            time.sleep(0.05)


if __name__ == "__main__":
    main()
