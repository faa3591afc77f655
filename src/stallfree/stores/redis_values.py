"""The values of one data set on servers of Redis or Valkey: keys, reading and checking, storing, removing."""

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
"""Bytes of values that are sent to a server, or received from it, in memory taken at once."""

_TYPICAL = 128 << 10
"""Bytes of a value before one was seen."""

_REFUSED_SECONDS = 10.0
"""Pause in storing on a server that has refused a request."""

_KEYS = 1000
"""Keys of one request that does not carry values."""


@dataclass
class Found:
    """What one server has of a batch.

    Attributes:
        shard: the server.
        at: the positions of the ids that it owns.
        values: the samples by position, which may share memory that lives as long as any of them.
        damaged: the keys of values that are not what was stored.
        off: whether the data set was switched off.
    """

    shard: Shard
    at: list[int]
    values: dict[int, Any]
    damaged: list[bytes]
    off: bool = False


class RedisValues:
    """The values of a data set, in the process that uses them. Safe in threads and after a fork.

    Args:
        servers: where they lie.
        name: of the data set; part of the keys.
        fingerprint: says which samples these are.
        allow_pickle: whether pickled samples are loaded.

    Attributes:
        key: 16 bytes that stand for the data set.
        typical: bytes of a value, as of the last one read.
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
        """Whether a server has refused a request lately: nothing is stored there for a while."""
        return self._refusals.get(shard, 0.0) > time.monotonic()

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, owner: Array, ids: Array) -> Iterator[Found]:
        """Read samples, server by server.

        Yields for each server that is not lost what it has of `ids`. `owner` is that of every sample.
        """
        names = self.names(ids)
        if self._servers.names:
            parts = [(shard, [*at.tolist(), -1]) for shard, at in self._servers.split(owner[ids], names)]
        else:  # one of the masters has the key that is not a sample's
            split = self._servers.split(owner, [*names, self._off])
            parts = [(shard, [-1 if at == len(names) else at for at in some.tolist()]) for shard, some in split]
        names.append(self._off)  # which is at the position -1
        for shard, at in parts:
            found = self._read(shard, ids, names, at)
            if found is not None:
                yield found

    def _read(self, shard: Shard, ids: Array, names: list[bytes], at: list[int]) -> Found | None:
        """What one server has at the positions `at` of `names`; None if it is lost or refuses."""
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
                found.off = True
            elif record is None:
                found.damaged.append(names[position])
            else:
                self.typical = len(value)
                with contextlib.suppress(CodecError):  # of another version, or a pickle: it is fetched
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

    def exist(self, shard: Shard, names: list[bytes], believed: Array) -> Array:
        """Which of `names` a server has: an array of bool.

        The keys are requested in groups of 1,000, for which the server returns how many of them exist. Only the keys of
        a group that is there in part are then requested one by one. So those that are `believed` to exist, an array of
        bool, are in other groups than the rest.
        """
        there = np.zeros(len(names), bool)
        if self._servers.names:
            groups = [
                group
                for some in (np.flatnonzero(believed), np.flatnonzero(~believed))
                for group in np.split(some, range(_KEYS, len(some), _KEYS))
                if len(group)
            ]
        else:
            groups = list(np.arange(len(names))[:, None])  # keys of several slots cannot be in one request
        unsure = [np.empty(0, np.int64)]
        counts = self.send(shard, [("EXISTS", *(names[at] for at in group.tolist())) for group in groups])
        for group, count in zip(groups, counts, strict=False):
            if isinstance(count, int) and count in (0, len(group)):
                there[group] = count > 0
            elif isinstance(count, int):
                unsure.append(group)
        left = np.concatenate(unsure).tolist()
        for at, reply in zip(left, self.send(shard, [("EXISTS", names[at]) for at in left]), strict=False):
            there[at] = reply == 1
        return there

    def scan(self, shard: Shard) -> Iterator[list[bytes]]:
        """The keys of this data set on a server, in lists; one may come twice."""
        cursor: Any = b"0"
        while True:
            replies = self.send(shard, [("SCAN", cursor, "MATCH", self._prefix + b"[0-9]*", "COUNT", _KEYS)])
            if not replies or isinstance(replies[0], Exception):
                return
            cursor, keys = replies[0]
            yield keys
            if cursor == b"0":
                return

    def info(self, shard: Shard) -> dict[str, str]:
        """A server's figures of its memory and hits; empty if it is lost or this user may not request them."""
        found: dict[str, str] = {}
        for text in self.send(shard, [("INFO", "memory"), ("INFO", "stats")]):
            lines = text.decode().split("\r\n") if isinstance(text, bytes) else []
            found |= dict(line.split(":", 1) for line in lines if ":" in line)
        return found

    # -- storing ------------------------------------------------------------------------------------------------------

    def commands(self, ids: Array, records: Sequence[Record], sizes: Array) -> list[Any]:
        """The commands that store records, whose values have `sizes` bytes with their headers.

        The reply to each: b"OK", or None if there is a value already.
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
        """Remove keys; the reply for each: 1 if it was there. Empty if the server is lost."""
        return self.send(shard, [("UNLINK", name) for name in names])

    def switch_off(self) -> None:
        """Set the key at which all nodes stop to use the values of this data set."""
        owning = [shard for shard, _ in self._servers.split(np.empty(0), [self._off])]
        for shard in self._servers.shards if self._servers.names else owning:
            self.send(shard, [("SET", self._off, b"1")])

    def send(self, shard: Shard, commands: list[Any]) -> list[Any]:
        """The replies of a server, errors among them as exceptions; none if it is lost or refuses the connection."""
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
        """Note that a server refuses a request, and warn once per server. Raises any other error."""
        from redis.exceptions import ResponseError

        if not isinstance(error, ResponseError):
            raise error
        if self._servers.moved(error):
            return
        self._refusals[shard] = time.monotonic() + _REFUSED_SECONDS
        if str(shard) not in self._warned:
            self._warned.add(str(shard))
            warnings.warn(
                f"the server {shard} refuses samples of {self._name!r}: {error}. Nothing is stored there for a while",
                RuntimeWarning,
                stacklevel=2,
            )


class _Memory:
    """Standing memory for the records of one batch."""

    def __init__(self, buffers: Buffers, count: int) -> None:
        self._buffers, self._left = buffers, count
        self._memory, self._at = np.empty(0, np.uint8), 0

    def copy(self, record: Array) -> Array:
        """A copy of `record` at a multiple of 64."""
        stride = len(record) + 63 & ~63
        if self._at + stride > len(self._memory):
            self._memory = self._buffers.take(max(stride, min(LOT_BYTES, stride * max(1, self._left))))
            self._at = 0
        copy = self._memory[self._at : self._at + len(record)]
        copy[:] = record
        self._at, self._left = self._at + stride, self._left - 1
        return copy
