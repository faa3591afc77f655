"""The samples of a data set in servers of Redis or Valkey, as a tier.

A sample lies under `stallfree:LABEL:ID`, with a header that says which sample it is and its checksum (values.py). Which
server owns it follows from its id and the names of the servers (partitioning.py), or from the key in a Redis Cluster.
The key `stallfree:LABEL:random` says that a step turned out to be random, so that nothing of the data set is used.

A server that is lost, slow or full costs hits and never an error: what cannot be read is a miss, what cannot be stored
is not stored. What is stored is written by a thread in the background.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.checks import EVERY_STEP, MISS, checked_ids, checked_scores
from stallfree.cache.counters import Count
from stallfree.cache.policies import Policy, make_policy
from stallfree.cache.tiers.write_behind import Record, WriteBehind
from stallfree.errors import InputError
from stallfree.pipeline.codec import record_size
from stallfree.stats import CacheStats
from stallfree.stores.node_state import NodeState
from stallfree.stores.redis_values import RedisValues
from stallfree.stores.redis_writer import RedisWriter
from stallfree.stores.servers import Servers
from stallfree.stores.values import HEAD_SIZE, data_key

Array = npt.NDArray[Any]

_PATIENCE = 0.25
"""Seconds that one batch waits for room among the writes under way, while they make progress."""


@dataclass(frozen=True)
class ServerStatus:
    """A server as `RedisCache.status` found it.

    Attributes:
        name: address of the server.
        lost: whether it counts as lost; the numbers are 0 then.
        used_bytes: memory it uses, for all of its data.
        capacity_bytes: the most that it may use; 0 for no limit.
        hits: keys that were found, of all clients since its start.
        misses: keys that were not.
    """

    name: str
    lost: bool
    used_bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    misses: int = 0


class RedisTier:
    """Attach to the samples of a data set in `servers`: a `LowerTier`.

    Args:
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        servers: where the samples lie; the same in all processes.
        name: of the data set; part of the keys.
        fingerprint: says which samples these are. Others of the same name are not read.
        policy: "minio" (what is stored stays), or "importance" or "oracle" (samples of low score make room). Others
            have no effect here.
        me: the place of this node among the servers, if each node has one.
        limit: bytes of memory that a server may use when something is stored there; None for its own limit.
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
            raise InputError(f"num_ids={num_ids}: a cache needs a data set of at least one sample")
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
        self._writer = WriteBehind(
            self._storing.write, self._node.moving, target=f"servers of {name!r}", patience=_PATIENCE
        )
        self._last: CacheStats | None = None
        self._leave = weakref.finalize(self, _leave, servers, self._node)

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Nodes that have a server each; 1 for given servers."""
        return len(self._servers.names) if self.me is not None else 1

    def known(self, ids: Array) -> Array:
        """Which of `ids` are believed to be stored on servers that are not lost: an array of bool. No request."""
        known: Array = self._node.known[ids] != 0
        if self._servers.names:
            lost = np.array([shard.lost for shard in self._servers.shards])
            if lost.any():
                known &= ~lost[self._node.owner[ids]]
        return known

    def owner(self, ids: Any) -> Array:
        """The place of the server that owns each of `ids` (integers): int16. Only for servers that stand alone."""
        return self._node.owner[checked_ids(ids, self.num_ids)]

    def verify(self, ids: Array) -> Array:
        """Which of `ids` are stored, by request; the same is `known` then. Only those that this node's server owns.

        With given servers, of all. Waits for what processes of this node are about to store.
        """
        self.drain(ids)
        there = np.zeros(len(ids), bool)
        mine = np.arange(len(ids)) if self.me is None else np.flatnonzero(self._node.owner[ids] == self.me)
        for shard, at, names in self._values.split(self._node.owner, ids[mine]):
            chosen = mine[at]
            there[chosen] = self._values.exist(shard, names, self._node.known[ids[chosen]] != 0)
        self._node.known[ids[mine]] = there[mine]
        return there

    def learn(self, there: Array) -> None:
        """Believe that those samples are stored for which `there`, a bool per id, is true."""
        self._node.known[:] = there

    def stats(self) -> CacheStats:
        """The counts over the processes of this node; after `close`, those of that moment.

        Items are those that this node has stored or read; other nodes may have stored more. Their bytes are estimated
        from the last value that was stored. What the servers use is in `status`.
        """
        if self._last is not None:
            return self._last
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
        """Samples of this data set on all servers that can be reached. Looks through all of their keys."""
        return sum(len({key for keys in self._values.scan(shard) for key in keys}) for shard in self._servers.shards)

    @property
    def uncached_steps(self) -> int:
        """See `SampleCache.uncached_steps`. 0, or `EVERY_STEP`: this cache is then not used any more."""
        return int(self._node.uncached[0])

    def uncache_steps(self, count: int = EVERY_STEP) -> bool:
        """Do not use this data set's samples any more, on any node; whether they were used until now."""
        new = self._node.uncache(EVERY_STEP)
        if new:
            self._values.switch_off()  # first, as other nodes read until then, and removing may take long
            self.clear()
        return new

    # -- reading ------------------------------------------------------------------------------------------------------

    def parts(self, ids: Array) -> list[Array]:
        """`ids` by the server that owns them; one list for a cluster."""
        if not len(ids):
            return []
        if not self._servers.names:
            return [ids]
        owner = self._node.owner[ids]
        return [ids[owner == place] for place in np.unique(owner).tolist()]

    def read(self, ids: Array) -> list[Any]:
        """The samples of `ids`, `MISS` for those that are not there. Servers are read one after the other.

        They may share memory, which lives as long as any of them.
        """
        self._check_process()
        values: list[Any] = [MISS] * len(ids)
        for found in self._values.read(self._node.owner, ids):
            if found.off:
                self._node.uncache(EVERY_STEP)
            if found.damaged:  # or nothing would ever be stored in their place
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
        """Wait until no process of this node is about to store any of `ids`, 250 ms at most. Returns True for each."""
        self._writer.drain(ids)
        return np.ones(len(ids), bool)

    def moved_up(self, ids: Array) -> None:
        """Does nothing: other nodes read `ids` here."""

    # -- writing ------------------------------------------------------------------------------------------------------

    @property
    def takes(self) -> bool:
        """Whether any server may take samples now."""
        return bool(self._taking().any())

    def _taking(self) -> Array:
        """Which servers may take samples now: an array of bool."""
        return np.array([not shard.lost and self._storing.takes(shard) for shard in self._servers.shards])

    def put_records(self, ids: Array, records: Sequence[Record]) -> Array:
        """Hand over `records` to be stored as the samples of `ids`; which of them were taken, as an array of bool.

        What is there already stays as it is. Whatever is in the way (no room, a server that is lost or refuses) is
        counted as rejected.
        """
        self._check_process()
        taken = np.zeros(len(ids), bool)
        left = self._node.known[ids] == 0
        if left.any() and not self.uncached_steps:
            self._node.typical[0] = HEAD_SIZE + record_size(*records[0])
            taking = self._taking()
            at = np.flatnonzero(left & (taking[self._node.owner[ids]] if self._servers.names else taking.any()))
            at = at[: self._writer.add(ids[at], [records[position] for position in at.tolist()])]
            taken[at] = True
        taken |= self._node.known[ids] != 0
        self._node.counters.add((Count.REJECTED, int((~taken).sum())))
        return taken

    # -- importance ---------------------------------------------------------------------------------------------------

    def set_scores(self, ids: Any, scores: Any) -> None:
        """How much each of `ids` is worth: with the policy "importance", those of low score make room."""
        wanted = checked_ids(ids, self.num_ids)
        self._node.scores[wanted] = checked_scores(scores, len(wanted))

    def drop(self, ids: Any) -> None:
        """Remove `ids` from the servers."""
        wanted = checked_ids(ids, self.num_ids)
        for shard, _, names in self._values.split(self._node.owner, wanted):
            self._values.remove(shard, names)
        self._node.known[wanted] = 0

    def clear(self) -> None:
        """Remove all samples of this data set from all servers that can be reached, and those of no other.

        The key that says that a step turned out to be random stays: another node may not have read it yet.
        """
        self._check_process()
        self._node.known[:] = 0
        for shard in self._servers.shards:
            for names in self._values.scan(shard):
                self._values.remove(shard, names)

    # -- the life of it -----------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if self._last is not None:
            raise InputError(f"the cache {self.name!r} is closed: make a new one")
        self._node.counters.follow_fork()

    def flush(self) -> None:
        """Wait until all that this process has handed over is written."""
        self._writer.flush()

    def close(self) -> None:
        """Write what was handed over and leave the cache. May be called twice."""
        if self._last is None:
            self._writer.close()
            self._last = self.stats()
            self._leave()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again, ()


def _leave(servers: Servers, node: NodeState) -> None:
    servers.close()
    node.close()
