"""The samples of one data set in Redis or Valkey servers, as a tier.

A sample is stored under `stallfree:NAME-KEY:ID`, with a header that identifies it and holds its checksum (values.py).
Its id and the names of the servers determine its server, in a Redis Cluster its key does. A batch costs one MGET per
server.

A server that is lost or full reduces hits, and raises no error. One that refuses requests, for instance because of
missing rights, raises `StorageError`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.records import MISS
from stallfree.cache.redis.servers import Server, Servers
from stallfree.cache.redis.values import check_value, data_key, owners, pack_head
from stallfree.errors import CodecError
from stallfree.pipeline.codec import read_record

Array = npt.NDArray[Any]

_FULL_SECONDS = 1.0
"""Pause in storing on a full server."""

_STEP = 10_000
"""Ids per request of `clear`."""


@dataclass(frozen=True)
class ServerStatus:
    """The state of a server.

    Attributes:
        name: address of the server.
        lost: whether it counts as lost; the numbers are then 0.
        used_bytes: memory used by all of its data.
        capacity_bytes: its memory limit; 0 for no limit.
        hits: keys found, for all clients since its start.
        misses: keys not found.
    """

    name: str
    lost: bool
    used_bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    misses: int = 0


class RedisTier:
    """The samples of a data set in `servers`: a `Tier`. Picklable.

    Args:
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        servers: that hold the samples.
        name: of the data set; part of the keys.
        fingerprint: identifies the samples. Others of the same name are not read.
        limit: memory limit of a server in bytes for storing; None for its own limit.
        allow_pickle: whether pickled samples are stored and loaded.

    Attributes:
        me: the index of this node's server; None for servers given by the user.
        num_nodes: number of nodes that have a server; 1 for servers given by the user.
    """

    def __init__(
        self, num_ids: int, servers: Servers, name: str, fingerprint: str, limit: int | None, allow_pickle: bool
    ) -> None:
        self._arguments = num_ids, servers, name, fingerprint, limit, allow_pickle
        self._servers, self._limit, self.allow_pickle = servers, limit, allow_pickle
        self.me, self.num_nodes = servers.me, 1 if servers.me is None else len(servers.all)
        self._key, label = data_key(name, fingerprint), re.sub(r"[^0-9A-Za-z._-]", "_", name)
        self._prefix = f"stallfree:{label}-{self._key.hex()[:8]}:".encode()
        self._owner = owners(num_ids, servers.names)
        self.store: Any = None  # the `RedisStore` of this process; None in copies
        self._full: dict[int, float] = {}  # time until which a server counts as full

    def __reduce__(self) -> tuple[Any, ...]:
        return RedisTier, self._arguments

    def owner(self, ids: Array) -> Array:
        """Return the index of the server that owns each of `ids`, as int16; 0 for a Redis Cluster."""
        return self._owner[ids]

    def parts(self, ids: Array) -> list[Array]:
        """Return `ids` grouped by server, so that threads can read them concurrently."""
        return [ids[at] for _, _, at in self._by_server(ids)]

    def _by_server(self, ids: Array) -> list[tuple[int, Server, Array]]:
        owner = self._owner[ids]
        return [(at, self._servers.all[at], np.flatnonzero(owner == at)) for at in np.unique(owner).tolist()]

    def _keys(self, ids: Array) -> list[bytes]:
        return [b"%b%d" % (self._prefix, id) for id in ids.tolist()]

    def begin_epoch(self) -> None:
        """Start the server of this node again if it has died. Call it at the start of each epoch; it never raises."""
        if self._servers.node is not None:
            self._servers.node.begin_epoch()

    def get_many(self, ids: Array) -> list[Any]:
        """Return the values of `ids`, `MISS` for absent ones. Servers are read one after the other.

        Values that are damaged or not of this data set are removed. Raises `StorageError` if a server refuses.
        """
        values: list[Any] = [MISS] * len(ids)
        for _, server, at in self._by_server(ids):
            found, damaged = server.read(self._keys(ids[at])), []
            if not isinstance(found, list) or len(found) != len(at):  # lost, or not a reply to this request
                continue
            found.reverse()
            for position in at.tolist():
                value = found.pop()  # its memory is used for the next sample: fresh pages cost more than the copy
                if isinstance(value, bytes):
                    record = check_value(np.frombuffer(value, np.uint8), self._key, int(ids[position]))
                    if record is None:
                        damaged.append(position)
                    else:
                        with contextlib.suppress(CodecError):  # of another version, or a pickle
                            values[position] = read_record(record, copy=True, allow_pickle=self.allow_pickle)
            if damaged:
                self.drop(ids[damaged])
        return values

    def put_many(self, ids: Array, records: Sequence[Array]) -> Array:
        """Store `records`. Return which of `ids` are stored now, as an array of bool.

        A full or lost server stores nothing. Raises `StorageError` if a server refuses for another reason.
        """
        stored = np.zeros(len(ids), bool)
        for index, server, at in self._by_server(ids):
            if self._is_full(index, server):
                continue
            heads = {i: pack_head(self._key, int(ids[i]), records[i]) for i in at.tolist()}
            keys = zip(self._keys(ids[at]), heads.items(), strict=True)
            replies = server.send([("SET", key, b"".join((head, records[i]))) for key, (i, head) in keys])
            refused = np.array([isinstance(reply, Exception) for reply in replies], bool)
            stored[at[: len(replies)]] = ~refused
            if refused.any():
                self._full[index] = time.monotonic() + _FULL_SECONDS
        return stored

    def _is_full(self, index: int, server: Server) -> bool:
        if self._limit is not None and server.info().get("used_memory", self._limit) >= self._limit:
            return True
        return time.monotonic() < self._full.get(index, 0.0)

    def drop(self, ids: Array) -> None:
        """Remove `ids` from the servers that are not lost. Raises `StorageError` if a server refuses."""
        for _, server, at in self._by_server(ids):
            server.send([("UNLINK", key) for key in self._keys(ids[at])])

    def clear(self) -> None:
        """Remove all samples of this data set, and of no other, from the servers that are not lost."""
        ids = np.arange(len(self._owner))
        for start in range(0, len(ids), _STEP):
            self.drop(ids[start : start + _STEP])

    def status(self) -> list[ServerStatus]:
        """Return the memory and hits of every server, by request. A Redis Cluster is one row without numbers."""
        names = ("used_memory", "maxmemory", "keyspace_hits", "keyspace_misses")
        rows = [(server, server.info()) for server in self._servers.all]
        return [ServerStatus(server.name, server.lost, *(info.get(name, 0) for name in names)) for server, info in rows]

    def close(self) -> None:
        """Close the connections of a copy in another process; those of this process belong to the store."""
        if self.store is None:
            self._servers.close()
