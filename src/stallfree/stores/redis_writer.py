"""Stores samples on servers of Redis or Valkey, in the thread of a `WriteBehind`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.layout import Count
from stallfree.cache.policies import Policy
from stallfree.cache.tiers.write_behind import Record
from stallfree.pipeline.codec import record_size
from stallfree.stores.node_state import NodeState
from stallfree.stores.redis_values import LOT_BYTES, RedisValues
from stallfree.stores.servers import Servers
from stallfree.stores.shard import Shard
from stallfree.stores.values import HEAD_SIZE

Array = npt.NDArray[Any]

_FULL_SECONDS = 1.0
"""Pause in storing on a full server."""


class RedisWriter:
    """Stores samples; on a full server, replaces samples of lower score.

    Args:
        values: of the data set.
        servers: that hold the values.
        node: state shared by the processes of this node.
        policy: if its scores are given ("importance"), samples of low score are evicted.
        limit: memory limit of a server in bytes for storing; None for its own limit.
    """

    def __init__(
        self, values: RedisValues, servers: Servers, node: NodeState, policy: Policy, limit: int | None
    ) -> None:
        self._values, self._servers, self._node, self._policy, self._limit = values, servers, node, policy, limit
        self._full: dict[Shard, float] = {}  # time until which a server counts as full

    def accepts(self, shard: Shard) -> bool:
        """Whether a server currently accepts samples. A full server still accepts samples of higher score."""
        return not self._values.refuses(shard) and (self._policy.given or not self._is_full(shard))

    def _is_full(self, shard: Shard) -> bool:
        return self._full.get(shard, 0.0) > time.monotonic()

    def write(self, ids: Array, records: Sequence[Record]) -> None:
        """Store as many records as fit."""
        sizes = np.array([HEAD_SIZE + record_size(*record) for record in records])
        for shard, at, _ in self._values.split(self._node.owner, ids):
            ends = np.cumsum(sizes[at])
            for lot in np.split(at, np.flatnonzero(np.diff(ends // LOT_BYTES)) + 1):
                if self.accepts(shard):
                    self._store(shard, ids[lot], [records[position] for position in lot.tolist()], sizes[lot])

    def _store(self, shard: Shard, ids: Array, records: Sequence[Record], sizes: Array) -> None:
        """Store samples on one server; if the server is full, replace samples of lower score."""
        commands = self._values.commands(ids, records, sizes)
        full = self._is_full(shard) or not self._has_room(shard)
        left = np.arange(len(ids)) if full else self._set(shard, ids, commands)
        if len(left) and self._policy.given:
            left = left[self._make_room(shard, ids[left])]
            left = left[self._set(shard, ids[left], [commands[position] for position in left.tolist()])]
        if len(left):
            if not full:
                self._full[shard] = time.monotonic() + _FULL_SECONDS
            self._node.counters.add((Count.REJECTED, len(left)))

    def _set(self, shard: Shard, ids: Array, commands: list[Any]) -> Array:
        """Send commands that store `ids`; return the positions of those that did not fit."""
        from redis.exceptions import OutOfMemoryError

        left = []
        for position, reply in enumerate(self._values.send(shard, commands)):
            if isinstance(reply, OutOfMemoryError):
                left.append(position)
            elif isinstance(reply, Exception):
                self._values.refuse(shard, reply)
            else:  # stored, now or before
                self._node.known[ids[position]] = 1
        return np.array(left, np.int64)

    def _has_room(self, shard: Shard) -> bool:
        """Whether a server uses less memory than the limit, if any. False if it does not report its memory."""
        if self._limit is None:
            return True
        used = self._values.info(shard).get("used_memory")
        if used is None or int(used) >= self._limit:
            self._full[shard] = time.monotonic() + _FULL_SECONDS
            return False
        return True

    def _make_room(self, shard: Shard, ids: Array) -> Array:
        """Remove samples of lower score than `ids` from a server; return the positions of those `ids` that fit."""
        scores = self._node.scores
        best_first, removed = np.argsort(-scores[ids], kind="stable"), 0
        while removed < len(ids):
            lowest = self._lowest(shard, len(ids) - removed)
            above = scores[ids[best_first[removed : removed + len(lowest)]]] > scores[lowest]
            victims = lowest if above.all() else lowest[: int(np.argmin(above))]
            replies = self._values.remove(shard, self._values.names(victims))
            if not replies:
                break
            self._node.known[victims] = 0
            removed += sum(reply == 1 for reply in replies)  # another node may have removed some of them
        self._node.counters.add((Count.EVICTIONS, removed))
        return np.sort(best_first[:removed])

    def _lowest(self, shard: Shard, count: int) -> Array:
        """Up to `count` samples of a server with the lowest scores, ascending."""
        scores, ids = self._node.scores, np.flatnonzero(self._node.known != 0)  # a copy: other processes change `known`
        some = count
        if self._servers.names:
            ids = ids[self._node.owner[ids] == self._servers.shards.index(shard)]
        else:
            some *= 2 * len(self._servers.shards)  # for a cluster, half of a server's share is enough
        if some < len(ids):
            ids = ids[np.argpartition(scores[ids], some)[:some]]
        ids = ids[np.argsort(scores[ids], kind="stable")]
        if not self._servers.names:
            parts = self._values.split(self._node.owner, ids)
            ids = next((ids[at] for master, at, _ in parts if master is shard), ids[:0])
        return ids[:count]
