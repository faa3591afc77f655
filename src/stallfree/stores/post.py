"""The post office of a node: how its samples are asked for, and how samples that it owns are handed in.

What is handed in lies in the list `post` of the node's server until the node's clerk (clerk.py) takes it, in the order
in which it came: values with their headers (values.py). What is asked for comes from the clerk itself (counter.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy.typing as npt

from stallfree.pipeline.codec import record_size, write_record
from stallfree.pipeline.structure import Structure
from stallfree.stores.buffers import Buffers
from stallfree.stores.counter import ASK, CLEAR, COUNT, ROOM, SETTLE
from stallfree.stores.endpoint import Address, Endpoint
from stallfree.stores.link import Piece
from stallfree.stores.values import HEAD_SIZE, DataKey, Expected, pack_head
from stallfree.stores.wire import Lost, Refused, Wire, command

Array = npt.NDArray[Any]
Record = tuple[Structure, list[Array]]
T = TypeVar("T")

POST = b"post"

MOST = 2 << 20
"""Bytes of one lot that is handed in, if no sample is larger. What a server holds of these at a time stays in the
processor's caches."""

_REQUEST = 1 << 20
"""Bytes that are asked for at once."""

_MUCH, _MANY = 32 << 20, 4096
"""Bytes, and messages, beyond which who hands in waits for the clerk: more would be 100 ms of work for it."""

_LOOK_SECONDS = 0.002
"""Between two looks whether the clerk has made room."""

_buffers = Buffers()


class _Busy:
    """The server has no room for more messages."""


BUSY = _Busy()


class PostOffice:
    """The post office of a node, as one process sees it. Safe in threads and after a fork; can be pickled.

    While the node is lost, every question has no answer, at once. Its server may live when its clerk does not: then
    samples can be handed in all the same.

    Args:
        server: where its server is.
        clerk: where its clerk is.
        timeout: seconds that its server, and its clerk, may take to say anything.
    """

    def __init__(self, server: Address, clerk: Address, timeout: float) -> None:
        self._given = server, clerk, timeout
        self._server, self._clerk = Endpoint(server, timeout), Endpoint(clerk, timeout)
        self._patience = max(1, round(timeout * 500))  # milliseconds for what has to be put away before an answer
        self._full: set[DataKey] = set()

    def share(self, server: memoryview[float], clerk: memoryview[float]) -> None:
        """Know from now on whether they are lost as all processes do that share these cells: `Breaker.share`."""
        self._server.breaker.share(server)
        self._clerk.breaker.share(clerk)

    @property
    def lost(self) -> bool:
        """Whether questions have no answer at present."""
        return not self._clerk.breaker.closed

    def ask(self, key: DataKey, ids: Array, typical: int) -> list[Array | None]:
        """The records of `ids` in the order of `ids`; None for those that the node has not, and if it is lost.

        Args:
            key: of the data set.
            ids: of samples that the node owns.
            typical: bytes of a usual record: so many are asked for in one request that its answer is about 1 MiB, and
                the next one is sent when the answer begins to come.
        """
        found = self._ask_clerk(partial(self._ask, key=key, ids=ids, typical=typical)) if len(ids) else None
        return [None] * len(ids) if found is None else found

    def _ask_clerk(self, call: Callable[[Wire], T]) -> T | None:
        with contextlib.suppress(Refused):
            return self._clerk.run(call)
        return None

    def _ask(self, wire: Wire, key: DataKey, ids: Array, typical: int) -> list[Array | None]:
        step = max(1, _REQUEST // (typical + HEAD_SIZE))
        wanted = ids.astype("<i8", copy=False)

        def ask(start: int) -> tuple[list[Piece], int]:
            question = command(ASK, key, self._patience, wanted[start : start + step])
            if start + step < len(ids):
                return question, 1
            return [*question, *command(ROOM, key)], 2

        records = wire.in_turn(len(ids), step, ask, _buffers, Expected(key, ids.tolist()))
        if wire.integer():
            self._full.discard(key)
        else:
            self._full.add(key)
        return records

    def hand_in(self, key: DataKey, ids: Sequence[int], records: Sequence[Record], until: float = 0.0) -> bool | _Busy:
        """Hand in samples that the node owns: whether they are on their way; `BUSY` when its server has no room.

        While the clerk is behind, it is waited for: a source that is quicker than the clerk shall not fill the server.
        A node that has said that it is full gets none.

        Args:
            key: of the data set.
            ids: of the samples.
            records: what `pipeline.codec.encode` made of them.
            until: when to wait no longer, on the clock of `time.monotonic`; by default at once.
        """
        if key in self._full:
            return False
        sizes = [record_size(structure, arrays) for structure, arrays in records]
        done = 0
        while done < len(ids):
            end, size = done + 1, sizes[done]
            while end < len(ids) and size + sizes[end] <= MOST:
                size += sizes[end]
                end += 1
            most = min(_MANY, _MUCH * (end - done) // max(1, size))
            values = _values(key, ids[done:end], records[done:end], sizes[done:end])
            try:
                length = self._server.run(partial(_push, values=values))
            except Refused:
                if size <= MOST:
                    time.sleep(10 * _LOOK_SECONDS)  # each try costs the server as much as a success
                    if not self._wait_for_room(most, until):
                        return BUSY
                    continue
            else:
                if length is None:
                    return False
                if length > most:
                    self._wait_for_room(most, until)
            done = end
        return True

    def _wait_for_room(self, most: int, until: float) -> bool:
        """Wait until no more than `most` messages lie in the post office; whether it came so before `until`."""
        while self._clerk.breaker.closed and time.monotonic() < until:
            length = self._server.run(lambda wire: wire.call("LLEN", POST))
            if length is None or length <= most:
                return length is not None
            time.sleep(_LOOK_SECONDS)
        return False

    def num_keys(self, key: DataKey) -> int:
        """How many samples of the data set the node holds; 0 if it is lost."""
        return self._ask_clerk(lambda wire: _number(wire, COUNT, key, self._patience)) or 0

    def clear(self, key: DataKey) -> None:
        """Have the node drop its samples of the data set."""
        self._full.discard(key)
        self._ask_clerk(lambda wire: wire.call(CLEAR, key, self._patience))

    def settle(self) -> None:
        """Come back when the clerk has put away what was handed in until now; soon if it is lost, or far behind."""
        self._ask_clerk(lambda wire: wire.call(SETTLE, self._patience))

    def wait(self, seconds: float) -> bool:
        """Wait until the clerk answers, for so many seconds at most; whether it does."""
        _, address, timeout = self._given
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            wire = Wire(partial(address.connection, timeout), timeout)
            with contextlib.suppress(Lost, Refused):
                wire.call(b"PING")
                return True
            time.sleep(0.01)
        return False

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._server.close()
        self._clerk.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return PostOffice, self._given


def _number(wire: Wire, *arguments: Any) -> int:
    wire.send(command(*arguments))
    return wire.integer()


def _push(wire: Wire, values: list[Any]) -> Any:
    try:
        return wire.call("RPUSH", POST, *values)
    except Refused:
        wire.close()  # or the server would keep the memory for it a while, and have even less room
        raise


def _values(key: DataKey, ids: Sequence[int], records: Sequence[Record], sizes: Sequence[int]) -> list[Any]:
    """What is to be sent of samples: header and record of each, in standing memory."""
    memory = _buffers.take(sum(-(-size // 64) * 64 for size in sizes))
    values = []
    start = 0
    for id, record, size in zip(ids, records, sizes, strict=True):
        out = memory[start : start + size]
        write_record(*record, out)
        values.append([pack_head(key, id, [out]), out])
        start += -(-size // 64) * 64
    return values
