"""The post office of a node: how its samples are asked for, and how samples that it owns are handed in.

A post office is the list `post` of the node's server. Messages lie in it until the node's clerk (clerk.py) takes them,
in the order in which they came: so whoever asks for what was handed in before it gets it. An answer is a list of its
own, which the clerk fills at once and the asker takes away. A message is one of

    value       a sample that the node owns, with its header (values.py)
    request     token (8 bytes), kind (4 bytes), zeros, key of the data set (16 bytes), then what belongs to the kind

The kind of a value, at the same place, is its magic number.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.pipeline.codec import record_size, write_record
from stallfree.pipeline.structure import Structure
from stallfree.stores.breaker import Breaker
from stallfree.stores.buffers import Buffers
from stallfree.stores.endpoint import Address, Endpoint
from stallfree.stores.link import Piece
from stallfree.stores.values import HEAD_SIZE, DataKey, Expected, pack_head
from stallfree.stores.wire import Refused, Wire, command

Array = npt.NDArray[Any]
Record = tuple[Structure, list[Array]]

POST = b"post"
ASK, COUNT, CLEAR, ECHO = b"SFA1", b"SFN1", b"SFC1", b"SFE1"
KINDS = (ASK, COUNT, CLEAR, ECHO)
REQUEST = struct.Struct("<8s4s4x16s")
GO, FULL = b"go", b"full"
"""The first item of an answer: "full" if the data set's part is full and nothing more is taken in."""

MOST = 2 << 20
"""Bytes of one answer, and of one lot that is handed in, if no sample is larger. What a server holds of these at a time
stays in the processor's caches."""

_AHEAD = 4
"""Answers that are asked for at once."""

_NO_KEY = bytes(16)
_NO_IDS = np.empty(0, np.int64)
_TOKEN = 8
_buffers = Buffers()


class Silence(Exception):
    """The server answers, and the clerk does not."""


class _Busy:
    """The server has no room for more messages."""


BUSY = _Busy()


def answer_key(token: bytes) -> bytes:
    """The list that takes the answer to the request with `token`."""
    return b"answer:" + token


class PostOffice:
    """The post office of another node, as one process sees it. Safe in threads and after a fork; can be pickled.

    While the node is lost, every question has no answer, at once. Its server may live when its clerk does not: then
    samples can be handed in all the same.

    Args:
        address: of its server.
        timeout: seconds that its server, and its clerk, may take to say anything.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        self._endpoint = Endpoint(address, timeout)
        self._clerk = Breaker(self._ping)
        self._full: set[DataKey] = set()

    def ask(self, key: DataKey, ids: Array, typical: int) -> list[Array | None]:
        """The records of `ids` in the order of `ids`; None for those that the node has not, and if it is lost.

        Args:
            key: of the data set.
            ids: of samples that the node owns.
            typical: bytes of a usual record: so many are asked for in one request that its answer is about 2 MiB, and
                at most 4 requests are under way.
        """
        step = max(1, MOST // (typical + HEAD_SIZE))
        lots = [ids[start : start + step] for start in range(0, len(ids), step)]
        records: list[Array | None] = []
        if lots and self._clerk.closed:
            self._run(partial(self._ask, key=key, lots=lots, records=records))
        return records + [None] * (len(ids) - len(records))

    def _run(self, call: Any) -> None:
        """Talk to the clerk."""
        try:
            self._endpoint.run(call)
        except Silence:
            self._clerk.trip()
        except Refused:  # there is no room for a question
            pass

    def _ask(self, wire: Wire, key: DataKey, lots: list[Array], records: list[Array | None]) -> None:
        """Send requests some lots ahead, and append the answers to `records`. Raises `Silence`."""
        tokens = [secrets.token_bytes(_TOKEN) for _ in lots]

        def request(at: int) -> bytes:
            return REQUEST.pack(tokens[at], ASK, key) + lots[at].tobytes()

        ahead = min(_AHEAD, len(lots))
        wire.send([*command("RPUSH", POST, *map(request, range(ahead))), *self._take(tokens[0])], replies=4)
        for at, lot in enumerate(lots):
            if at == 0 or at + ahead <= len(lots):
                wire.integer()
            if at + 1 < len(lots):
                more = command("RPUSH", POST, request(at + ahead)) if at + ahead < len(lots) else []
                wire.send([*more, *self._take(tokens[at + 1])], replies=4 if more else 3)
            self._await(wire, key)
            records += wire.values(len(lot), _buffers, Expected(key, lot.tolist()))
            wire.integer()

    def _take(self, token: bytes) -> list[Piece]:
        """The commands that take an answer away."""
        answer = answer_key(token)
        return [
            *command("BLPOP", answer, f"{self._timeout:.3f}"),
            *command("LRANGE", answer, 0, -1),
            *command("UNLINK", answer),
        ]

    def _await(self, wire: Wire, key: DataKey) -> None:
        """Wait for the first item of an answer."""
        wire.expect(self._timeout)
        if wire.array() is None:
            raise Silence
        wire.skip()
        if wire.reply() == FULL:
            self._full.add(key)
        else:
            self._full.discard(key)

    def hand_in(self, key: DataKey, ids: Sequence[int], records: Sequence[Record]) -> bool | _Busy:
        """Hand in samples that the node owns: whether they are on their way; `BUSY` when its server has no room.

        A node that has said that it is full gets none.

        Args:
            key: of the data set.
            ids: of the samples.
            records: what `pipeline.codec.encode` made of them.
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
            values = _values(key, ids[done:end], records[done:end], sizes[done:end])
            try:
                if self._endpoint.run(partial(_push, values=values)) is None:
                    return False
            except Refused:
                if size <= MOST:
                    return BUSY
            done = end
        return True

    def num_keys(self, key: DataKey) -> int:
        """How many samples of the data set the node holds; 0 if it is lost."""
        found: list[int] = []

        def count(wire: Wire) -> None:
            self._request(wire, COUNT, key)
            (number,) = wire.values(1, _buffers)
            wire.integer()
            found.append(0 if number is None else int(number.tobytes()))

        if self._clerk.closed:
            self._run(count)
        return sum(found)

    def clear(self, key: DataKey) -> None:
        """Have the node drop its samples of the data set."""
        self._full.discard(key)
        request = REQUEST.pack(bytes(_TOKEN), CLEAR, key)
        self._run(lambda wire: wire.call("RPUSH", POST, request))

    def _request(self, wire: Wire, kind: bytes, key: DataKey) -> None:
        token = secrets.token_bytes(_TOKEN)
        wire.send([*command("RPUSH", POST, REQUEST.pack(token, kind, key)), *self._take(token)], replies=4)
        wire.integer()
        self._await(wire, key)

    def _echo(self, wire: Wire) -> bool:
        self._request(wire, ECHO, _NO_KEY)
        wire.skip()
        wire.skip()
        return True

    def _ping(self) -> None:
        if self._endpoint.run(self._echo) is None:
            raise Silence

    def settle(self) -> None:
        """Come back when the clerk has done what lay in the post office until now; at once if it is lost."""
        if self._clerk.closed:
            self._run(self._echo)

    def wait(self, seconds: float) -> bool:
        """Wait until the clerk answers, for so many seconds at most; whether it does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(Silence, Refused):
                self._ping()
                return True
            time.sleep(0.01)
        return False

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._clerk.forget()
        self._endpoint.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return PostOffice, (self._address, self._timeout)


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
