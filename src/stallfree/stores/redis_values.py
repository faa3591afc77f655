"""Reads, verifies, stores and removes the values of one data set on servers of Redis or Valkey."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.tiers.buffers import Buffers
from stallfree.cache.tiers.write_behind import Record
from stallfree.errors import CodecError
from stallfree.pipeline.codec import read_record, write_record
from stallfree.stores.servers import Servers
from stallfree.stores.shard import REQUEST_BYTES, Shard
from stallfree.stores.values import HEAD_SIZE, check_value, data_key, pack_head

Array = npt.NDArray[Any]

LOT_BYTES = 8 << 20
"""Bytes of values per memory allocation when sending to or receiving from a server."""

_TYPICAL = 128 << 10
"""Assumed bytes of a value before one was seen."""

_REFUSED_SECONDS = 10.0
"""Pause in storing on a server after it refused a request."""

_KEYS = 1000
"""Keys per request without values."""


@dataclass
class Found:
    """The result of reading a batch from one server.

    Attributes:
        shard: the server.
        at: the positions of the ids that it owns.
        values: the samples by position, which may share memory that is freed with the last of them.
        damaged: the keys of damaged values.
        off: whether the data set was switched off.
    """

    shard: Shard
    at: list[int]
    values: dict[int, Any]
    damaged: list[bytes]
    off: bool = False


class RedisValues:
    """Reads and writes the values of a data set. Thread-safe and fork-safe.

    Args:
        servers: that hold the values.
        name: of the data set; part of the keys.
        fingerprint: identifies the samples.
        allow_pickle: whether pickled samples are loaded.

    Attributes:
        key: 16 bytes that identify the data set.
        typical: bytes of the last value read.
    """

    def __init__(self, servers: Servers, name: str, fingerprint: str, *, allow_pickle: bool) -> None:
        self.key, self.typical = data_key(name, fingerprint), _TYPICAL
        self._servers, self._name, self._allow_pickle = servers, name, allow_pickle
        self._prefix = b"stallfree:%b-%b:" % (name.encode(), self.key.hex()[:8].encode())
        self._off = self._prefix + b"random"
        self._buffers = Buffers()
        self._warned: set[str] = set()
        self._refusals: dict[Shard, float] = {}

    def names(self, ids: Array) -> list[bytes]:
        """The keys of `ids` on the servers."""
        prefix = self._prefix
        return [b"%b%d" % (prefix, id) for id in ids.tolist()]

    def split(self, owner: Array, ids: Array) -> list[tuple[Shard, Array, list[bytes]]]:
        """Each server that owns some of `ids`, with their positions and keys. `owner` is that of every sample."""
        names = self.names(ids)
        found = self._servers.split(owner[ids] if self._servers.names else owner, names)
        return [(shard, at, [names[position] for position in at.tolist()]) for shard, at in found]

    def refuses(self, shard: Shard) -> bool:
        """Whether a server has recently refused a request: storing on it is paused."""
        return self._refusals.get(shard, 0.0) > time.monotonic()

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, owner: Array, ids: Array) -> Iterator[Found]:
        """Read samples, server by server.

        Yields the result of each server that is not lost. `owner` is that of every sample.
        """
        names = self.names(ids)
        if self._servers.names:
            parts = [(shard, [*at.tolist(), -1]) for shard, at in self._servers.split(owner[ids], names)]
        else:  # one of the masters has the key of the switch
            split = self._servers.split(owner, [*names, self._off])
            parts = [(shard, [-1 if at == len(names) else at for at in some.tolist()]) for shard, some in split]
        names.append(self._off)  # at position -1
        for shard, at in parts:
            found = self._read(shard, ids, names, at)
            if found is not None:
                yield found

    def _read(self, shard: Shard, ids: Array, names: list[bytes], at: list[int]) -> Found | None:
        """The values of one server at the positions `at` of `names`; None if it is lost or refuses."""
        found = Found(shard, [position for position in at if position >= 0], {}, [])
        memory = _Memory(self._buffers, len(at))

        def use(number: int, value: Any) -> None:
            position, record = at[number], None
            if value is None:
                return
            if isinstance(value, bytes) and position >= 0:
                record = check_value(np.frombuffer(value, np.uint8), self.key, int(ids[position]))
            if isinstance(value, Exception):
                self.refuse(shard, value)
            elif position < 0:
                found.off = value == self.key  # anything else was not written by `switch_off`
            elif record is None:
                found.damaged.append(names[position])
            else:
                self.typical = len(value)
                with contextlib.suppress(CodecError):  # another version, or a pickle: the sample is fetched
                    copy = memory.copy(record)
                    found.values[position] = read_record(copy, copy=False, allow_pickle=self._allow_pickle)

        keys, step = [names[position] for position in at], max(1, REQUEST_BYTES // self.typical)
        requests = [self._servers.request(keys[start : start + step]) for start in range(0, len(keys), step)]
        try:
            done = shard.read(requests, use)
        except Exception as error:
            self.refuse(shard, error)
            return None
        return found if done else None

    def scan(self, shard: Shard) -> Iterator[list[bytes]]:
        """The keys of this data set on a server, in lists; may contain duplicates."""
        cursor: Any = b"0"
        while True:
            replies = self.send(shard, [("SCAN", cursor, "MATCH", self._prefix + b"[0-9]*", "COUNT", _KEYS)])
            if not replies or isinstance(replies[0], Exception):
                return
            cursor, keys = replies[0]
            yield keys
            if cursor == b"0":
                return

    def stored(self, shard: Shard) -> Array:
        """The ids of the samples of this data set on a server, ascending. Scans all of its keys."""
        numbers = (key[len(self._prefix) :] for keys in self.scan(shard) for key in keys)
        return np.unique(
            np.array([int(number) for number in numbers if number.isdigit() and len(number) < 19], np.int64)
        )

    def info(self, shard: Shard) -> dict[str, str]:
        """A server's memory and hit statistics; empty if it is lost or this user may not request them."""
        found: dict[str, str] = {}
        for text in self.send(shard, [("INFO", "memory"), ("INFO", "stats")]):
            lines = text.decode().split("\r\n") if isinstance(text, bytes) else []
            found |= dict(line.split(":", 1) for line in lines if ":" in line)
        return found

    # -- storing ------------------------------------------------------------------------------------------------------

    def commands(self, ids: Array, records: Sequence[Record], sizes: Array) -> list[Any]:
        """The commands that store records, whose values have `sizes` bytes including headers.

        The reply to each is b"OK", or None if the value exists.
        """
        memory = self._buffers.take(int((sizes + 63 & ~63).sum()))
        commands, at = [], 0
        for id, name, record, size in zip(ids.tolist(), self.names(ids), records, sizes.tolist(), strict=True):
            value = memory[at : at + size]
            write_record(*record, value[HEAD_SIZE:])
            value[:HEAD_SIZE] = np.frombuffer(pack_head(self.key, id, value[HEAD_SIZE:]), np.uint8)
            commands.append(("SET", name, value.data, "NX"))
            at += size + 63 & ~63
        return commands

    def remove(self, shard: Shard, names: Sequence[bytes]) -> list[Any]:
        """Remove keys; return the reply for each: 1 if it existed. Empty if the server is lost."""
        return self.send(shard, [("UNLINK", name) for name in names])

    def switch_off(self) -> None:
        """Set the key at which all nodes stop using the values of this data set."""
        owning = [shard for shard, _ in self._servers.split(np.empty(0), [self._off])]
        for shard in self._servers.shards if self._servers.names else owning:
            self.send(shard, [("SET", self._off, self.key)])

    def send(self, shard: Shard, commands: list[Any]) -> list[Any]:
        """The replies of a server, with errors as exceptions; none if it is lost or refuses the connection."""
        from redis.exceptions import NoPermissionError

        try:
            replies = shard.send(commands) or []
        except Exception as error:
            self.refuse(shard, error)
            return []
        denied = next((reply for reply in replies if isinstance(reply, NoPermissionError)), None)
        if denied is not None:
            self.refuse(shard, denied)
        return replies

    def refuse(self, shard: Shard, error: Exception) -> None:
        """Record that a server refuses a request, and warn once per server. Raises any other error."""
        from redis.exceptions import ResponseError

        if not isinstance(error, ResponseError):
            raise error
        if self._servers.moved(error):
            return
        self._refusals[shard] = time.monotonic() + _REFUSED_SECONDS
        if str(shard) not in self._warned:
            self._warned.add(str(shard))
            warnings.warn(
                f"the server {shard} refuses samples of {self._name!r}: {error}. Storing there is paused for "
                f"{_REFUSED_SECONDS:.0f} s at a time",
                RuntimeWarning,
                stacklevel=2,
            )


class _Memory:
    """Reusable memory for the records of one batch."""

    def __init__(self, buffers: Buffers, count: int) -> None:
        self._buffers, self._left = buffers, count
        self._memory, self._at = np.empty(0, np.uint8), 0

    def copy(self, record: Array) -> Array:
        """A 64-byte aligned copy of `record`."""
        stride = len(record) + 63 & ~63
        if self._at + stride > len(self._memory):
            self._memory = self._buffers.take(max(stride, min(LOT_BYTES, stride * max(1, self._left))))
            self._at = 0
        copy = self._memory[self._at : self._at + len(record)]
        copy[:] = record
        self._at, self._left = self._at + stride, self._left - 1
        return copy
