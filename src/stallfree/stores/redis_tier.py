"""The samples of a data set in Redis or Valkey servers, as a tier.

A sample is stored under `stallfree:LABEL:ID`, with a header that identifies it and holds its checksum (values.py). Its
id and the names of the servers determine its server (partitioning.py), in a Redis Cluster its key does. The key
`stallfree:LABEL:random` marks that a step proved random, so that no samples of the data set are used.

A server that is lost, slow or full reduces hits and never raises an error: a failed read is a miss, and a failed write
is dropped. A background thread performs the writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.layout import Count
from stallfree.cache.policies import Policy, make_policy
from stallfree.cache.records import MISS, checked_ids, checked_scores
from stallfree.cache.sample_cache import EVERY_STEP
from stallfree.cache.tiers.write_behind import Record, WriteBehind
from stallfree.errors import dataset_empty, object_closed
from stallfree.pipeline.codec import record_size
from stallfree.stats import CacheStats
from stallfree.stores.node_state import NodeState
from stallfree.stores.redis_values import RedisValues
from stallfree.stores.redis_writer import RedisWriter
from stallfree.stores.servers import Servers
from stallfree.stores.values import HEAD_SIZE, data_key

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ServerStatus:
    """The state of a server, from `RedisCache.status`.

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
    """Attaches to the samples of a data set in `servers`: a `LowerTier`.

    Args:
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        servers: that hold the samples; the same in all processes.
        name: of the data set; part of the keys.
        fingerprint: identifies the samples. Others of the same name are not read.
        policy: "minio" (stored samples stay), or "importance" or "oracle" (samples of low score are evicted). Others
            have no effect here.
        me: the index of this node among the servers, if each node has one.
        limit: memory limit of a server in bytes for storing; None for its own limit.
        allow_pickle: whether samples that can only be pickled are stored and loaded. Any process that can write to a
            server could then run code here.
    """

    inclusive = True

    def __init__(
        self,
        num_ids: int,
        *,
        servers: Servers,
        name: str,
        fingerprint: str,
        policy: str | Policy = "minio",
        me: int | None = None,
        limit: int | None = None,
        allow_pickle: bool = False,
    ) -> None:
        if num_ids < 1:
            raise dataset_empty(f"num_ids={num_ids}: a cache needs a data set of at least one sample")
        self.num_ids, self.name, self.fingerprint, self.allow_pickle = num_ids, name, fingerprint, allow_pickle
        self.policy, self.me = make_policy(policy), me
        self._servers = servers
        self._again = partial(
            type(self),
            num_ids,
            servers=servers,
            name=name,
            fingerprint=fingerprint,
            policy=self.policy,
            me=me,
            limit=limit,
            allow_pickle=allow_pickle,
        )
        self._values = RedisValues(servers, name, fingerprint, allow_pickle=allow_pickle)
        places = " ".join(servers.names) or "cluster"
        self._node = NodeState(data_key(self._values.key.hex(), f"{num_ids} {places}"), num_ids, servers.names)
        self.path = self._node.path
        if servers.names:
            self._node.share([shard.breaker for shard in servers.shards])
        self._storing = RedisWriter(self._values, servers, self._node, self.policy, limit)
        self._writer = WriteBehind(self._storing.write, self._node.moving, target=f"servers of {name!r}")
        self._final_stats: CacheStats | None = None
        self._leave = weakref.finalize(self, _leave, servers, self._node)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """The number of nodes, each with a server; 1 for user-provided servers."""
        return len(self._servers.names) if self.me is not None else 1

    def known(self, ids: Array) -> Array:
        """Which of `ids` are assumed stored on servers that are not lost: an array of bool. No request."""
        known: Array = self._node.known[ids] != 0
        if self._servers.names:
            lost = np.array([shard.lost for shard in self._servers.shards])
            if lost.any():
                known &= ~lost[self._node.owner[ids]]
        return known

    def owner(self, ids: Any) -> Array:
        """The index of the server that owns each of `ids` (integers): int16. Only for standalone servers."""
        return self._node.owner[checked_ids(ids, self.num_ids)]

    def verify(self, ids: Array) -> Array:
        """Which of `ids` are stored, by request; updates `known`. Only ids that this node's server owns.

        With user-provided servers, all ids. Waits for writes of this node that are in flight.
        """
        self.drain(ids)
        shards, mine = self._servers.shards, np.ones(len(ids), bool)
        if self.me is not None:
            shards, mine = [shards[self.me]], self._node.owner[ids] == self.me
        found = [self._values.stored(shard) for shard in shards]
        there: Array = mine & np.isin(ids, np.concatenate([np.empty(0, np.int64), *found]))
        self._node.known[ids[mine]] = there[mine]
        return there

    def set_known(self, there: Array) -> None:
        """Assume that exactly the samples with True in `there`, a bool per id, are stored."""
        self._node.known[:] = there

    def stats(self) -> CacheStats:
        """The counts over the processes of this node; after `close`, those at that time.

        Items are the samples that this node has stored or read; other nodes may have stored more. Their bytes are
        estimated from the last stored value. `status` has the memory use of the servers.
        """
        if self._final_stats is not None:
            return self._final_stats
        items = int(np.count_nonzero(self._node.known))
        size = items * int(self._node.typical[0])
        return self._node.counters.stats(resident_items=items, resident_bytes=size, capacity_bytes=0, used_bytes=0)

    def status(self) -> list[ServerStatus]:
        """Every server with its memory and hits, by request."""
        names = ("used_memory", "maxmemory", "keyspace_hits", "keyspace_misses")
        found = [(shard, self._values.info(shard)) for shard in self._servers.shards]
        return [
            ServerStatus(str(shard), shard.lost, *(int(numbers.get(name, 0)) for name in names))
            for shard, numbers in found
        ]

    def num_keys(self) -> int:
        """The number of samples of this data set on all reachable servers. Scans all of their keys."""
        return sum(len(self._values.stored(shard)) for shard in self._servers.shards)

    @property
    def uncached_steps(self) -> int:
        """See `SampleCache.uncached_steps`. 0, or `EVERY_STEP` if this cache is disabled."""
        return int(self._node.uncached[0])

    def uncache_steps(self, count: int = EVERY_STEP) -> bool:
        """Disable this data set's samples on all nodes; return whether they were in use."""
        new = self._node.uncache(EVERY_STEP)
        if new:
            self._values.switch_off()  # first, because other nodes read until then, and removal may be slow
            self.clear()
        return new

    # -- reading ------------------------------------------------------------------------------------------------------

    def parts(self, ids: Array) -> list[Array]:
        """`ids`, grouped by owner server; one list for a cluster."""
        if not len(ids):
            return []
        if not self._servers.names:
            return [ids]
        owner = self._node.owner[ids]
        return [ids[owner == place] for place in np.unique(owner).tolist()]

    def read(self, ids: Array) -> list[Any]:
        """The samples of `ids`, `MISS` for absent ones. Servers are read sequentially.

        They may share memory, which is freed with the last of them.
        """
        self._check_process()
        values: list[Any] = [MISS] * len(ids)
        for found in self._values.read(self._node.owner, ids):
            if found.off:
                self._node.uncache(EVERY_STEP)
            if found.damaged:  # else no value would ever replace them
                dropped = self._values.remove(found.shard, found.damaged)
                self._node.counters.add((Count.DAMAGED, sum(reply == 1 for reply in dropped)))
            self._node.known[ids[found.at]] = [position in found.values for position in found.at]
            for position, value in found.values.items():
                values[position] = value
        if self.uncached_steps:
            values = [MISS] * len(ids)
        hits = sum(value is not MISS for value in values)
        self._node.counters.add((Count.HITS, hits), (Count.MISSES, len(values) - hits))
        return values

    def drain(self, ids: Array) -> Array:
        """Wait, for 250 ms at most, for writes of `ids` by processes of this node. Returns True for each."""
        self._writer.drain(ids)
        return np.ones(len(ids), bool)

    def promoted(self, ids: Array) -> None:
        """Do nothing: other nodes read `ids` here."""

    # -- writing ------------------------------------------------------------------------------------------------------

    @property
    def accepts(self) -> bool:
        """Whether any server currently accepts samples."""
        return bool(self._accepting().any())

    def _accepting(self) -> Array:
        """Which servers currently accept samples: an array of bool."""
        return np.array([not shard.lost and self._storing.accepts(shard) for shard in self._servers.shards])

    def put_records(self, ids: Array, records: Sequence[Record]) -> Array:
        """Queue `records` as the samples of `ids`; return which were accepted, as an array of bool.

        Values that are already stored are unchanged. Failures (no space, a server that is lost or refuses) are counted
        as rejected.
        """
        self._check_process()
        taken = np.zeros(len(ids), bool)
        left = self._node.known[ids] == 0
        if left.any() and not self.uncached_steps:
            self._node.typical[0] = HEAD_SIZE + record_size(*records[0])
            taking = self._accepting()
            at = np.flatnonzero(left & (taking[self._node.owner[ids]] if self._servers.names else taking.any()))
            at = at[: self._writer.add(ids[at], [records[position] for position in at.tolist()])]
            taken[at] = True
        taken |= self._node.known[ids] != 0
        self._node.counters.add((Count.REJECTED, int((~taken).sum())))
        return taken

    # -- importance ---------------------------------------------------------------------------------------------------

    def set_scores(self, ids: Any, scores: Any) -> None:
        """Set the scores of `ids`: with the policy "importance", samples of low score are evicted."""
        wanted = checked_ids(ids, self.num_ids)
        self._node.scores[wanted] = checked_scores(scores, len(wanted))

    def drop(self, ids: Any) -> None:
        """Remove `ids` from the servers."""
        wanted = checked_ids(ids, self.num_ids)
        for shard, _, names in self._values.split(self._node.owner, wanted):
            self._values.remove(shard, names)
        self._node.known[wanted] = 0

    def clear(self) -> None:
        """Remove all samples of this data set, and of no other, from all reachable servers.

        The key that marks a random step is kept: another node may not have read it yet.
        """
        self._check_process()
        self._node.known[:] = 0
        for shard in self._servers.shards:
            for names in self._values.scan(shard):
                self._values.remove(shard, names)

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if self._final_stats is not None:
            raise object_closed(f"the cache {self.name!r} is closed: make a new one")
        self._node.counters.follow_fork()

    def flush(self) -> None:
        """Wait until all queued records of this process are written."""
        self._writer.flush()

    def close(self) -> None:
        """Drain the queue and detach from the cache. Idempotent."""
        if self._final_stats is None:
            self._writer.close()
            self._final_stats = self.stats()
            self._leave()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again, ()


def _leave(servers: Servers, node: NodeState) -> None:
    servers.close()
    node.close()
