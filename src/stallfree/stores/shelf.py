"""What one given server holds of a data set: reading it, storing it, counting it, dropping it."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stallfree.pipeline.codec import record_size, write_record
from stallfree.pipeline.structure import Structure
from stallfree.stores.buffers import Buffers
from stallfree.stores.cluster import Spot
from stallfree.stores.values import HEAD_SIZE, Bytes, DataKey, Expected, pack_head
from stallfree.stores.wire import Refused, Wire, command

T = TypeVar("T")
Encoded = tuple[Structure, list[npt.NDArray[Any]]]

_MOST = 8 << 20
"""Bytes that are sent at once."""

_TYPICAL = 128 << 10
"""Bytes of a value while none has been seen."""

_BACK_OFF = 50
"""Batches that are not stored on a server that is full or has refused one."""

_SCAN = 1000
"""Keys that are looked at, and dropped, at a time."""

_ON_THE_WAY = ("MOVED", "ASK", "TRYAGAIN")
"""Refusals of a cluster that gives a slot to another master. They end by themselves."""


class Shelf:
    """The samples of a data set that lie in one place. For several threads, and for forked children after `after_fork`.

    Args:
        spot: the server, and in a cluster the tag.
        key: of the data set.
        share: bytes that it may take here.
        timeout: seconds that the server may be silent before it counts as lost, for a while.
        buffers: where values are received.
        name: of the data set, for messages.

    Attributes:
        endpoint: the server.
        pause: batches that are not to be stored, since the server is full or has refused one.
    """

    def __init__(self, spot: Spot, key: DataKey, share: int, timeout: float, buffers: Buffers, name: str) -> None:
        self.endpoint = spot.endpoint(timeout)
        self.pause = 0
        self._key, self._share, self._buffers, self._name = key, share, buffers, name
        tag = f"{{{spot.tag}}}:" if spot.tag else ""
        self._prefix = f"stallfree:{key.hex()}:{tag}".encode()
        self._held = f"stallfree-held:{key.hex()}{':' if tag else ''}{tag[:-1]}".encode()
        self._clustered = bool(tag)
        self._typical = _TYPICAL
        self._owed = (0, 0)  # bytes and items to be added to what the server counts
        self._lock = threading.Lock()
        self._warned = False

    def after_fork(self) -> None:
        """In a forked child: what the parent owes is the parent's."""
        self._lock, self._owed = threading.Lock(), (0, 0)

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, ids: list[int]) -> tuple[list[Bytes | None], int]:
        """The records of `ids`, None for those that are not there, and how many damaged ones were dropped."""
        keys = [b"%b%d" % (self._prefix, id) for id in ids]
        expected = Expected(self._key, ids)
        records = self._run(lambda wire: wire.mget(keys, self._typical, self._buffers, expected))
        if records is None:
            return [None] * len(ids), 0
        sizes = [record.size for record in records if record is not None]
        if sizes:
            self._typical = sum(sizes) // len(sizes) + HEAD_SIZE
        return records, self._drop({keys[position] for position in expected.damaged})

    def _drop(self, keys: Iterable[bytes]) -> int:
        """Drop damaged values, or nothing would ever be stored in their place: how many it were."""
        dropped = 0
        for key in keys:
            size = self._call("STRLEN", key)
            if size and self._call("UNLINK", key):
                dropped += 1
                self._run(partial(self._count, -size, -1))
        return dropped

    # -- storing ------------------------------------------------------------------------------------------------------

    def store(self, ids: list[int], records: list[Encoded]) -> list[bool]:
        """Store samples as far as there is room and the server takes them: which of them are there now."""
        there: list[bool] = []
        sizes = [HEAD_SIZE + record_size(*record) for record in records]
        while len(there) < len(ids) and not self.pause:
            start = end = len(there)
            while end == start or (end < len(ids) and sum(sizes[start : end + 1]) <= _MOST):
                end += 1
            lot = slice(start, end)
            done = self._run(partial(self._write, ids[lot], records[lot], sizes[lot]))
            if done is None:
                break
            there += done
        return there + [False] * (len(ids) - len(there))

    def _write(self, ids: list[int], records: list[Encoded], sizes: list[int], wire: Wire) -> list[bool]:
        """Store what there is room for, in one request: which of them are there now."""
        total = sum(sizes)
        held = self._count(total, len(ids), wire)
        fitting = int(np.searchsorted(np.cumsum(sizes), self._share - (held - total), side="right"))
        there, refused = [False] * len(ids), None
        excess, items = total, len(ids)  # what is counted and not stored
        if fitting:
            wire.send(self._commands(ids[:fitting], records[:fitting], sizes[:fitting]), replies=fitting)
        for position in range(fitting):
            try:
                new = wire.reply() is not None  # nil: it was there
            except Refused as error:
                refused = error
                continue
            there[position] = True
            if new:
                excess -= sizes[position]
                items -= 1
        if fitting < len(ids):
            self.pause = _BACK_OFF
        if items:
            with contextlib.suppress(Refused):
                self._count(-excess, -items, wire)
        if refused is not None and not self.endpoint.moved(refused):
            self._refuse(refused)
        return there

    def _commands(self, ids: list[int], records: list[Encoded], sizes: list[int]) -> list[Any]:
        memory = self._buffers.take(sum(size + 63 & ~63 for size in sizes))
        pieces: list[Any] = []
        at = 0
        for id, record, size in zip(ids, records, sizes, strict=True):
            data = memory[at : at + size - HEAD_SIZE]
            write_record(*record, data)
            pieces += command("SET", b"%b%d" % (self._prefix, id), [pack_head(self._key, id, [data]), data], "NX")
            at += size + 63 & ~63
        return pieces

    def _count(self, size: int, items: int, wire: Wire) -> int:
        """Add to what is held on the server: the bytes that are held now. What it refuses is added the next time."""
        with self._lock:
            (more, others), self._owed = self._owed, (0, 0)
        fields = (("bytes", size + more), ("items", items + others))
        wire.send([piece for field in fields for piece in command("HINCRBY", self._held, *field)], replies=2)
        try:
            held = wire.integer()
            wire.integer()
        except Refused:
            wire.close()
            with self._lock:
                self._owed = (self._owed[0] + more + min(0, size), self._owed[1] + others + min(0, items))
            raise
        return held

    # -- all of it ----------------------------------------------------------------------------------------------------

    def held(self) -> tuple[int, int]:
        """Items and bytes, as they are counted on the server; none if it cannot be reached."""
        items, size = self._call("HMGET", self._held, "items", "bytes") or (0, 0)
        return int(items or 0), int(size or 0)

    def num_keys(self) -> int:
        """Samples that are there; 0 if the server cannot be reached. Looks through all of its keys."""
        return self._rest(lambda: sum(map(len, self._scan(once=True)))) or 0

    def clear(self) -> None:
        """Drop all of them, if the server can be reached."""
        self._rest(self._clear)

    def _clear(self) -> None:
        client = self.endpoint.client()
        for keys in self._scan():
            client.unlink(*keys)
        client.delete(self._held)
        self._owed, self.pause = (0, 0), 0

    def _scan(self, once: bool = False) -> Iterable[list[bytes]]:
        """The keys of this data set, in pieces. A server may name one more than once, unless `once`."""
        client, cursor, seen = self.endpoint.client(), -1, set[bytes]()
        while cursor:
            found: Any
            cursor, found = client.scan(max(cursor, 0), match=self._prefix + b"*", count=_SCAN)
            if once:
                found = [key for key in set(found) if key not in seen]
                seen.update(found)
            if found:
                yield found

    # -- the server ---------------------------------------------------------------------------------------------------

    def _run(self, call: Callable[[Wire], T]) -> T | None:
        """What `call` gives; None if the server is lost or refuses, which is warned of once."""
        for _ in range(2):  # where it was, and where it is now
            try:
                return self.endpoint.run(call)
            except Refused as error:
                refused = error
            if not self.endpoint.moved(refused):
                break
        self._refuse(refused)
        return None

    def _call(self, *arguments: Any) -> Any:
        return self._run(lambda wire: wire.call(*arguments))

    def _refuse(self, error: Refused) -> None:
        if self._clustered and error.code in _ON_THE_WAY:
            return
        self.pause = _BACK_OFF
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the server {self.endpoint.address} refuses samples of {self._name!r}: {error.text}. Nothing is "
                "stored there for a while",
                RuntimeWarning,
                stacklevel=2,
            )

    def _rest(self, call: Callable[[], T]) -> T | None:
        """What `call`, which uses the client library, gives; None if the server is lost."""
        from redis.exceptions import RedisError

        try:
            if self.endpoint.breaker.closed:
                self.endpoint.seek()
                return call()
        except RedisError:
            self.endpoint.breaker.trip()
        return None
