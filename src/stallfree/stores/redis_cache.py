"""The sample cache of a data set in servers of Redis or Valkey.

A sample lies under `stallfree:LABEL:ID`, with a header that says which sample it is and its checksum (values.py). Which
server owns it follows from its id and the names of the servers (partitioning.py), or from the key in a Redis Cluster.
The key `stallfree:LABEL:random` says that a step turned out to be random, so that nothing of the data set is used.

A server that is lost, slow or full costs hits and never an error: what cannot be read is a miss, what cannot be stored
is not stored. What is stored is written by a thread in the background.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.base import BaseCache
from stallfree.cache.checks import EVERY_STEP, MISS, checked_ids, checked_scores
from stallfree.cache.counters import Count
from stallfree.cache.policies import Policy, make_policy
from stallfree.cache.protocol import Fetch, Pool, Reading
from stallfree.cache.tiers.reading import TierReading, fill
from stallfree.cache.tiers.write_behind import Record, WriteBehind
from stallfree.errors import InputError
from stallfree.pipeline.codec import encode, record_size
from stallfree.platform import at_fork
from stallfree.stats import CacheStats
from stallfree.stores.node_state import NodeState
from stallfree.stores.redis_values import RedisValues
from stallfree.stores.redis_writer import RedisWriter
from stallfree.stores.servers import Servers
from stallfree.stores.shard import Shard
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


class RedisCache(BaseCache):
    """Attach to the samples of a data set in `servers`.

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
    capacity = 0
    complete = False

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
        self._given = (num_ids, servers, name, fingerprint, self.policy, me, limit, allow_pickle)
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
        self._pid = os.getpid()
        self._threads: ThreadPoolExecutor | None = None
        self._last: CacheStats | None = None
        self._leave = weakref.finalize(self, _leave, servers, self._node)

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Nodes that have a server each; 1 for given servers."""
        return len(self._servers.names) if self.me is not None else 1

    def resident(self, ids: Any) -> Array:
        """False for all of `ids`: what is read needs a request."""
        return np.zeros(len(checked_ids(ids, self.num_ids)), bool)

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
        self.settle(ids)
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
        sums = self._node.counters.totals()
        items = int(np.count_nonzero(self._node.known))
        return CacheStats(
            hits=sums[Count.HITS],
            misses=sums[Count.MISSES],
            evictions=sums[Count.EVICTIONS],
            rejected=sums[Count.REJECTED],
            damaged=sums[Count.DAMAGED],
            storage_reads=sums[Count.READS],
            storage_bytes=sums[Count.BYTES],
            resident_items=items,
            resident_bytes=items * int(self._node.typical[0]),
            capacity_bytes=0,
            used_bytes=0,
        )

    @property
    def servers(self) -> RedisCache:
        """This cache itself; of a `TieredCache`, its tier in servers."""
        return self

    def status(self) -> list[ServerStatus]:
        """Every server with its memory and hits, by request."""
        return [self._status(shard) for shard in self._servers.shards]

    def _status(self, shard: Shard) -> ServerStatus:
        found = self._values.info(shard)
        numbers = (int(found.get(key, 0)) for key in ("used_memory", "maxmemory", "keyspace_hits", "keyspace_misses"))
        return ServerStatus(str(shard), shard.lost, *numbers)

    def num_keys(self) -> int:
        """Samples of this data set on all servers that can be reached. Looks through all of their keys."""
        return sum(len({key for keys in self._values.scan(shard) for key in keys}) for shard in self._servers.shards)

    def count_fetch(self, reads: int, size: int) -> None:
        """Count `reads` fetches from the source that brought `size` bytes."""
        self._check_process()
        self._node.counters.add((Count.READS, reads), (Count.BYTES, size))

    def populate(self) -> None:
        """Does nothing: no memory of this host is used."""

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

    def get_many(self, ids: Any) -> list[Any]:
        """The samples of `ids`, `MISS` for those that are not there. The servers are read at the same time.

        Each call gives values of its own; those of one call may share memory, which lives as long as any of them.
        Raises `InputError` for ids outside of the data set.
        """
        self._check_process()
        wanted = checked_ids(ids, self.num_ids)
        parts = self.parts(wanted)
        if len(parts) < 2:
            return self.read(wanted) if len(wanted) else []
        found: dict[int, Any] = {}
        values: list[Any] = []
        for part, got in zip(parts, self._pool().map(self.read, parts), strict=True):
            for id, value in zip(part.tolist(), got, strict=True):
                found.setdefault(id, []).append(value)
        for id in wanted.tolist():
            values.append(found[id].pop())
        return values

    def begin_read(self, ids: Array, pool: Pool, fetch: Fetch) -> Reading:
        """See `Cache`. The servers are read at the same time."""
        self._check_process()
        return TierReading(self, ids, pool, fetch)

    def get_known(self, ids: Array) -> list[Any]:
        """See `reading.ReadInParts`."""
        values: list[Any] = [MISS] * len(ids)
        at = np.flatnonzero(self.known(ids))
        if len(at):
            fill(values, at, self.read(ids[at]))
        return values

    def settle(self, ids: Array) -> Array:
        """Wait until no process of this node is about to store any of `ids`, 250 ms at most. Returns True for each."""
        self._writer.settle(ids)
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

    def put_many(self, ids: Any, values: Sequence[Any], *, uncached: int = 0) -> Array:
        """Hand over `values` to be stored as the samples of `ids`; which of them were taken, as an array of bool.

        What is there already stays as it is. Raises `CodecError` for a value that would need pickle where it is not
        allowed, and `InputError` for ids outside of the data set; then nothing is stored. Whatever else is in the way
        (no room, a server that is lost or refuses) is counted as rejected.
        """
        wanted = checked_ids(ids, self.num_ids)
        if len(wanted) != len(values):
            raise InputError(f"put_many was given {len(wanted)} ids and {len(values)} values: give one for each")
        if uncached != self.uncached_steps:
            return np.zeros(len(wanted), bool)
        return self.put_records(wanted, [encode(value, allow_pickle=self.allow_pickle) for value in values])

    def put_records(self, ids: Array, records: Sequence[Record]) -> Array:
        """As `put_many`, for values that are encoded already."""
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

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            count = min(32, len(self._servers.shards))
            self._threads = ThreadPoolExecutor(count, thread_name_prefix="stallfree-servers")
        return self._threads

    def _check_process(self) -> None:
        if self._last is not None:
            raise InputError(f"the cache {self.name!r} is closed: make a new one")
        if self._pid != os.getpid():
            with _after_fork:
                if self._pid != os.getpid():
                    self._node.claim()
                    self._pid, self._threads = os.getpid(), None

    def flush(self) -> None:
        """Wait until all that this process has handed over is written."""
        if self._pid == os.getpid():
            self._writer.flush()

    def close(self) -> None:
        """Write what was handed over and leave the cache. May be called twice."""
        if self._last is None:
            if self._pid == os.getpid():
                self._writer.close()
                if self._threads is not None:
                    self._threads.shutdown()
            self._last = self.stats()
            self._leave()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, self._given


_after_fork = threading.RLock()
at_fork(before=_after_fork.acquire, after_in_parent=_after_fork.release, after_in_child=_after_fork.release)


def _leave(servers: Servers, node: NodeState) -> None:
    servers.close()
    node.close()


def _attach(
    num_ids: int,
    servers: Servers,
    name: str,
    fingerprint: str,
    policy: Policy,
    me: int | None,
    limit: int | None,
    allow_pickle: bool,
) -> RedisCache:
    """A cache as it comes to a worker."""
    return RedisCache(
        num_ids,
        servers=servers,
        name=name,
        fingerprint=fingerprint,
        policy=policy,
        me=me,
        limit=limit,
        allow_pickle=allow_pickle,
    )
