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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stallfree.pipeline.codec import record_size, write_record
from stallfree.pipeline.structure import Structure
from stallfree.stores.breaker import Breaker
from stallfree.stores.buffers import Buffers
from stallfree.stores.endpoint import Address, Endpoint
from stallfree.stores.values import HEAD_SIZE, DataKey, check_value, pack_head
from stallfree.stores.wire import Refused, Wire, command

Array = npt.NDArray[Any]
Record = tuple[Structure, list[Array]]
T = TypeVar("T")

POST = b"post"
ASK, COUNT, CLEAR, ECHO = b"SFA1", b"SFN1", b"SFC1", b"SFE1"
REQUEST = struct.Struct("<8s4s4x16s")
GO = b"go"
"""The first item of every answer."""

MOST = 8 << 20
"""Bytes of one answer, and of one lot that is handed in, if no sample is larger."""

_NO_KEY = bytes(16)
_NO_IDS = np.empty(0, np.int64)


class Silence(Exception):
    """The server answers, and the clerk does not."""


class _Busy:
    """The server has no room for more messages."""


BUSY = _Busy()


def _push(wire: Wire, values: list[Any]) -> int:
    return int(wire.call("RPUSH", POST, *values))


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
        self._clerk = Breaker(self._echo)
        self._buffers = Buffers()

    def ask(self, key: DataKey, ids: Array, typical: int) -> list[Array | None]:
        """The records of `ids` in the order of `ids`; None for those that the node has not, and if it is lost.

        Args:
            key: of the data set.
            ids: of samples that the node owns.
            typical: bytes of a usual record: so many are asked for at once that the answer is about 8 MiB at most.
        """
        step = max(1, MOST // (typical + HEAD_SIZE))
        records: list[Array | None] = []
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            values = self._question(ASK, key, some)
            if values is None:
                return records + [None] * (len(ids) - start)
            for id, value in zip(some.tolist(), values, strict=True):
                records.append(None if value is None else check_value(value, key, id))
        return records

    def hand_in(
        self, key: DataKey, ids: Sequence[int], records: Sequence[tuple[Structure, list[Array]]]
    ) -> bool | _Busy:
        """Hand in samples that the node owns: whether they are on their way; `BUSY` when its server has no room.

        Args:
            key: of the data set.
            ids: of the samples.
            records: what `pipeline.codec.encode` made of them.
        """
        sizes = [record_size(structure, arrays) for structure, arrays in records]
        done = 0
        while done < len(ids):
            end, size = done + 1, sizes[done]
            while end < len(ids) and size + sizes[end] <= MOST:
                size += sizes[end]
                end += 1
            lot = range(done, end)
            memory = self._buffers.take(sum(-(-sizes[at] // 64) * 64 for at in lot))
            values: list[Any] = []
            start = 0
            for at in lot:
                record = memory[start : start + sizes[at]]
                record[:] = 0  # what lies between the leaves is nobody's
                write_record(*records[at], record)
                values.append([pack_head(key, ids[at], [record]), record])
                start += -(-sizes[at] // 64) * 64
            answer = self._call(partial(_push, values=values))
            if answer is None or answer is BUSY:
                return False if answer is None else BUSY
            done = end
        return True

    def num_keys(self, key: DataKey) -> int:
        """How many samples of the data set the node holds; 0 if it is lost."""
        answer = self._question(COUNT, key, _NO_IDS, 1)
        return 0 if answer is None or answer[0] is None else int(answer[0].tobytes())

    def clear(self, key: DataKey) -> None:
        """Have the node drop its samples of the data set."""
        request = REQUEST.pack(bytes(8), CLEAR, key)
        self._call(lambda wire: wire.call("RPUSH", POST, request))

    def _call(self, call: Callable[[Wire], T]) -> T | _Busy | None:
        try:
            return self._endpoint.run(call)
        except Refused:
            return BUSY

    def _question(self, kind: bytes, key: DataKey, ids: Array, count: int | None = None) -> list[Array | None] | None:
        """What the clerk answers; None if there is no answer."""
        if not self._clerk.closed:
            return None
        try:
            return self._endpoint.run(partial(self._answer, kind=kind, key=key, ids=ids, count=count))
        except Silence:
            self._clerk.trip()
        except Refused:  # there is no room for the question, or none for its answer
            pass
        return None

    def _answer(
        self, wire: Wire, kind: bytes, key: DataKey, ids: Array, count: int | None = None
    ) -> list[Array | None] | None:
        """What the clerk answers to a request: `count` items, one for each of `ids` if None. Raises `Silence`."""
        token = secrets.token_bytes(8)
        answer = answer_key(token)
        wire.send(
            [
                *command("RPUSH", POST, REQUEST.pack(token, kind, key) + ids.tobytes()),
                *command("BLPOP", answer, f"{self._timeout:.3f}"),
                *command("LRANGE", answer, 0, -1),
                *command("UNLINK", answer),
            ],
            replies=4,
        )
        wire.integer()
        wire.expect(self._timeout)
        if wire.array() is None:
            wire.skip()
            wire.skip()
            raise Silence
        wire.skip()
        wire.skip()
        values = wire.values(len(ids) if count is None else count, self._buffers)
        wire.integer()
        return values

    def _echo(self) -> None:
        if self._endpoint.run(partial(self._answer, kind=ECHO, key=_NO_KEY, ids=_NO_IDS)) is None:
            raise Silence

    def wait(self, seconds: float) -> bool:
        """Wait until the clerk answers, for so many seconds at most; whether it does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(Silence, Refused):
                self._echo()
                return True
            time.sleep(0.01)
        return False

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._clerk.forget()
        self._endpoint.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return PostOffice, (self._address, self._timeout)
