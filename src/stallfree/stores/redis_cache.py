"""The sample cache of a data set in servers of Redis or Valkey.

A sample lies under `stallfree:LABEL:ID`, with a header that says which sample it is and its checksum (values.py). Which
server owns it follows from its id and the names of the servers (partitioning.py), or from the key in a Redis Cluster.
The key `stallfree:LABEL:random` says that a step turned out to be random, so that nothing of the data set is used.

A server that is lost, slow or full costs hits and never an error: what cannot be read is a miss, what cannot be stored
is not stored. What is stored is written by a thread in the background.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.checks import EVERY_STEP, MISS, checked_ids, checked_scores
from stallfree.cache.counters import Count
from stallfree.cache.policies import Policy, make_policy
from stallfree.errors import CodecError, InputError
from stallfree.pipeline.codec import encode, read_record, record_size, write_record
from stallfree.platform import at_fork
from stallfree.stats import CacheStats
from stallfree.stores.buffers import Buffers
from stallfree.stores.node_state import NodeState
from stallfree.stores.servers import Servers
from stallfree.stores.shard import Shard
from stallfree.stores.values import HEAD_SIZE, check_value, data_key, pack_head
from stallfree.stores.write_behind import Record, WriteBehind

Array = npt.NDArray[Any]

_PATIENCE = 0.25
"""Seconds that one batch waits for room among the writes under way, while they make progress."""

_TYPICAL = 128 << 10
"""Bytes of a value before one was seen."""

_LOT_BYTES = 8 << 20
"""Bytes of values sent to a server at once."""

_FULL_SECONDS = 1.0
"""Pause in storing on a server that has no room."""

_REFUSED_SECONDS = 10.0
"""Pause in storing on a server that refuses it for another reason."""

_KEYS = 1000
"""Keys of one request that does not carry values."""


@dataclass(frozen=True)
class ServerStatus:
    """A server as `RedisCache.servers` finds it.

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


class RedisCache:
    """Attach to the samples of a data set in `servers`.

    Args:
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        servers: where the samples lie; the same in all processes.
        name: of the data set; part of the keys.
        fingerprint: says which samples these are. Others of the same name are not read.
        policy: "minio" (what is stored stays) or "importance" (samples of low score make room); of others only that
            they have no effect here.
        me: the place of this node among the servers, if each node has one.
        limit: bytes of memory that a server may use when something is stored there; None for its own limit.
        allow_pickle: whether samples that can only be pickled are stored and loaded. Whoever can write to a server
            could then run code here.
    """

    inclusive = True
    structure = None
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
        self._servers, self._limit = servers, limit
        self._given = (num_ids, servers, name, fingerprint, self.policy, me, limit, allow_pickle)
        self._key = data_key(name, fingerprint)
        self._prefix = b"stallfree:%b-%b:" % (name.encode(), self._key.hex()[:8].encode())
        self._off = self._prefix + b"random"
        places = " ".join(servers.names) or "cluster"
        self._node = NodeState(data_key(self._key.hex(), f"{num_ids} {places}"), num_ids, servers.names)
        if servers.names:
            self._node.share([shard.breaker for shard in servers.shards])
        self._buffers = Buffers()
        self._typical = _TYPICAL
        self._full: dict[Shard, float] = {}  # until when a server counts as full, or as one that refuses samples
        self._refused: dict[Shard, float] = {}
        self._warned: set[str] = set()
        self._writer = WriteBehind(self._write, self._node.moving, target=f"servers of {name!r}", patience=_PATIENCE)
        self._pid, self._threads = os.getpid(), None
        self._last: CacheStats | None = None
        self._leave = weakref.finalize(self, _leave, servers, self._node)

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Bytes of memory in this process's host: none."""
        return 0

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
        keys = self._keys(ids[mine])
        for shard, at in self._servers.split(self._owners(ids[mine]), keys):
            there[mine[at]] = self._exist(shard, ids[mine[at]], [keys[position] for position in at.tolist()])
        self._node.known[ids[mine]] = there[mine]
        return there

    def _exist(self, shard: Shard, ids: Array, keys: list[bytes]) -> Array:
        """Which of `keys` a server has. What is believed is confirmed by one request for 1,000 keys."""
        known, there = self._node.known[ids] != 0, np.zeros(len(ids), bool)
        if self._servers.names:
            groups = [
                group
                for some in (np.flatnonzero(known), np.flatnonzero(~known))
                for group in np.split(some, range(_KEYS, len(some), _KEYS))
                if len(group)
            ]
        else:
            groups = [np.array([at]) for at in range(len(keys))]  # keys of several slots cannot be in one request
        counts = self._send(shard, [("EXISTS", *(keys[at] for at in group.tolist())) for group in groups])
        unsure = [np.empty(0, np.int64)]
        for group, count in zip(groups, counts, strict=False):
            if count in (0, len(group)):
                there[group] = count > 0
            elif isinstance(count, int):
                unsure.append(group)
        left = np.concatenate(unsure)
        for at, reply in zip(left.tolist(), self._send(shard, [("EXISTS", keys[at]) for at in left]), strict=False):
            there[at] = reply == 1
        return there

    def learn(self, there: Array) -> None:
        """Believe that those samples are stored for which `there`, a bool per id, is true."""
        self._node.known[:] = there

    def stats(self) -> CacheStats:
        """The counts over the processes of this node; after `close`, those of that moment.

        Items are those that this node believes to be stored; bytes are not known without a request (`status`).
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
            resident_bytes=items * self._typical,
            capacity_bytes=0,
            used_bytes=0,
        )

    @property
    def servers(self) -> RedisCache:
        """This cache itself; of a `TieredCache`, its tier in servers."""
        return self

    @property
    def path(self) -> Path:
        """The folder of what the processes of this node share."""
        return self._node.path

    def status(self) -> list[ServerStatus]:
        """Every server with its memory and hits, by request."""
        return [self._status(shard) for shard in self._servers.shards]

    def _status(self, shard: Shard) -> ServerStatus:
        with contextlib.suppress(Exception):
            found = _info(shard)
            if found:
                return ServerStatus(
                    str(shard),
                    False,
                    *(int(found[key]) for key in ("used_memory", "maxmemory", "keyspace_hits", "keyspace_misses")),
                )
        return ServerStatus(str(shard), True)

    def num_keys(self) -> int:
        """Samples of this data set on all servers that can be reached. Looks through all of their keys."""
        return sum(len({key for keys in self._scan(shard) for key in keys}) for shard in self._servers.shards)

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
            self.clear()
            named = bool(self._servers.names)
            masters = [] if named else [shard for shard, _ in self._servers.split(self._node.owner, [self._off])]
            for shard in self._servers.shards if named else masters:
                self._send(shard, [("SET", self._off, b"1")])
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
        keys = self._keys(ids)
        if self._servers.names:
            for shard, at in self._servers.split(self._owners(ids), keys):
                self._read(shard, ids, [*keys, self._off], [*at.tolist(), len(ids)], values)
        else:
            keys.append(self._off)
            for shard, at in self._servers.split(self._node.owner, keys):
                self._read(shard, ids, keys, at.tolist(), values)
        hits = sum(value is not MISS for value in values)
        self._node.counters.add((Count.HITS, hits), (Count.MISSES, len(values) - hits))
        return values

    def _read(self, shard: Shard, ids: Array, keys: list[bytes], at: list[int], values: list[Any]) -> None:
        """Read the `keys` at the positions `at`, which one server owns, into `values`.

        Those are the keys of `ids`, and that which says that a step turned out to be random.
        """
        damaged: list[bytes] = []
        memory = _Memory(self._buffers, len(at))

        def use(number: int, value: Any) -> None:
            position = at[number]
            if value is None:
                return
            if not isinstance(value, bytes):
                if not self._servers.moved(value):
                    self._refuse(shard, value, 0)
            elif position == len(ids):
                self._node.uncache(EVERY_STEP)
            elif (record := check_value(np.frombuffer(value, np.uint8), self._key, int(ids[position]))) is None:
                damaged.append(keys[position])
            else:
                self._typical = len(value)
                with contextlib.suppress(CodecError):  # of another version, or a pickle: it is fetched
                    values[position] = read_record(memory.copy(record), copy=False, allow_pickle=self.allow_pickle)

        requests = self._servers.requests([keys[position] for position in at], self._typical)
        try:
            if shard.read(requests, use):
                own = [position for position in at if position < len(ids)]
                self._node.known[ids[own]] = [values[position] is not MISS for position in own]
        except Exception as error:
            self._raise_unknown(error)
            self._refuse(shard, error, 0)
        if self.uncached_steps:
            values[:] = [MISS] * len(values)
        if damaged:
            self._drop_damaged(shard, damaged)

    def _drop_damaged(self, shard: Shard, keys: list[bytes]) -> None:
        """Remove damaged values, or nothing would ever be stored in their place."""
        dropped = self._send(shard, [("UNLINK", key) for key in keys])
        self._node.counters.add((Count.DAMAGED, sum(reply == 1 for reply in dropped)))

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

    def get(self, id: int) -> Any:
        """One sample, or `MISS`."""
        return self.get_many([id])[0]

    def get_here(self, ids: Array) -> list[Any]:
        """`MISS` for all of `ids`: nothing is in memory."""
        return [MISS] * len(ids)

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
        now = time.monotonic()
        return any(not shard.lost and not self._pauses(shard, now) for shard in self._servers.shards)

    def _pauses(self, shard: Shard, now: float) -> bool:
        """Whether nothing is stored on a server now. One that is full still takes samples of higher score."""
        full = not self.policy.given and self._full.get(shard, 0.0) > now
        return full or self._refused.get(shard, 0.0) > now

    def put_many(self, ids: Any, values: Sequence[Any]) -> Array:
        """Hand over `values` to be stored as the samples of `ids`; which of them were taken, as an array of bool.

        What is there already stays as it is. Raises `CodecError` for a value that would need pickle where it is not
        allowed, and `InputError` for ids outside of the data set; then nothing is stored. Whatever else is in the way
        (no room, a server that is lost or refuses) is counted as rejected.
        """
        wanted = checked_ids(ids, self.num_ids)
        if len(wanted) != len(values):
            raise InputError(f"put_many was given {len(wanted)} ids and {len(values)} values: give one for each")
        return self.put_records(wanted, [encode(value, allow_pickle=self.allow_pickle) for value in values])

    def put(self, id: int, value: Any) -> bool:
        """Hand over one sample; whether it was taken."""
        return bool(self.put_many([id], [value])[0])

    def put_records(self, ids: Array, records: Sequence[Record]) -> Array:
        """As `put_many`, for values that are encoded already."""
        self._check_process()
        taken = np.zeros(len(ids), bool)
        at = np.flatnonzero(self._node.known[ids] == 0)
        if len(at) and self.takes and not self.uncached_steps:
            at = at[: self._writer.add(ids[at], [records[position] for position in at.tolist()])]
            taken[at] = True
        taken |= self._node.known[ids] != 0
        self._node.counters.add((Count.REJECTED, int((~taken).sum())))
        return taken

    def _write(self, ids: Array, records: Sequence[Record]) -> None:
        """Store samples, in the thread of the writer."""
        sizes = np.array([HEAD_SIZE + record_size(*record) for record in records])
        keys = self._keys(ids)
        for shard, at in self._servers.split(self._owners(ids), keys):
            ends = np.cumsum(sizes[at])
            for lot in np.split(at, np.flatnonzero(np.diff(ends // _LOT_BYTES)) + 1):
                if len(lot) and not self._pauses(shard, time.monotonic()):
                    self._store(shard, ids[lot], [records[position] for position in lot.tolist()], sizes[lot])

    def _store(self, shard: Shard, ids: Array, records: Sequence[Record], sizes: Array) -> None:
        """Store samples on one server: without room, in place of others of lower score."""
        memory = self._buffers.take(int((sizes + 63 & ~63).sum()))
        commands, at = [], 0
        for id, record, size in zip(ids.tolist(), records, sizes.tolist(), strict=True):
            value = memory[at : at + size]
            write_record(*record, value[HEAD_SIZE:])
            value[:HEAD_SIZE] = np.frombuffer(pack_head(self._key, id, [value[HEAD_SIZE:]]), np.uint8)
            commands.append(("SET", self._name(id), value.data, "NX"))
            at += size + 63 & ~63
        full = self._full.get(shard, 0.0) > time.monotonic() or not self._has_room(shard)
        left = np.arange(len(ids)) if full else self._set(shard, ids, commands)
        if len(left) and self.policy.given:
            left = left[self._make_room(shard, ids[left])]
            left = left[self._set(shard, ids[left], [commands[position] for position in left.tolist()])]
        if len(left):
            if not full:
                self._full[shard] = time.monotonic() + _FULL_SECONDS
            self._node.counters.add((Count.REJECTED, len(left)))

    def _set(self, shard: Shard, ids: Array, commands: list[Any]) -> Array:
        """Send SETs; the positions of those for which there was no room."""
        from redis.exceptions import OutOfMemoryError

        replies, left = self._send(shard, commands), []
        for position, reply in enumerate(replies):
            if isinstance(reply, OutOfMemoryError):
                left.append(position)
            elif isinstance(reply, Exception):
                if not self._servers.moved(reply):
                    self._refuse(shard, reply, _REFUSED_SECONDS)
            else:  # stored, or there already
                self._node.known[ids[position]] = 1
        return np.array(left, np.int64)

    def _has_room(self, shard: Shard) -> bool:
        """Whether a given server uses less memory than the user granted, if there is a limit."""
        if self._limit is None:
            return True
        try:
            found = _info(shard)
        except Exception as error:
            self._raise_unknown(error)
            self._refuse(shard, error, _REFUSED_SECONDS)
            return False
        if found and int(found["used_memory"]) >= self._limit:
            self._full[shard] = time.monotonic() + _FULL_SECONDS
            return False
        return True

    # -- importance ---------------------------------------------------------------------------------------------------

    def set_scores(self, ids: Any, scores: Any) -> None:
        """How much each of `ids` is worth: with the policy "importance", those of low score make room."""
        wanted = checked_ids(ids, self.num_ids)
        self._node.scores[wanted] = checked_scores(scores, len(wanted))

    def _make_room(self, shard: Shard, ids: Array) -> Array:
        """Remove samples of lower score than `ids` from a server: the positions of those of `ids` that find room."""
        scores = self._node.scores
        best_first, removed = np.argsort(-scores[ids], kind="stable"), 0
        while removed < len(ids):
            worst = self._worst(shard, len(ids) - removed)
            gains = scores[ids[best_first[removed : removed + len(worst)]]] > scores[worst]
            victims = worst if gains.all() else worst[: int(np.argmin(gains))]
            replies = self._send(shard, [("UNLINK", self._name(id)) for id in victims.tolist()])
            if not replies:
                break
            self._node.known[victims] = 0
            removed += sum(reply == 1 for reply in replies)  # another node may have removed some of them
        self._node.counters.add((Count.EVICTIONS, removed))
        return np.sort(best_first[:removed])

    def _worst(self, shard: Shard, count: int) -> Array:
        """Up to `count` samples of a server that have the lowest scores, lowest first."""
        scores, there = self._node.scores, np.flatnonzero(self._node.known)
        some = count
        if self._servers.names:
            there = there[self._node.owner[there] == self._servers.shards.index(shard)]
        else:
            some *= 2 * len(self._servers.shards)  # of a cluster, half of its share of them is enough
        if some < len(there):
            there = there[np.argpartition(scores[there], some)[:some]]
        there = there[np.argsort(scores[there], kind="stable")]
        if not self._servers.names:
            parts = self._servers.split(self._node.owner, self._keys(there))
            there = next((there[at] for master, at in parts if master is shard), there[:0])
        return there[:count]

    def drop(self, ids: Any) -> None:
        """Remove `ids` from the servers."""
        wanted = checked_ids(ids, self.num_ids)
        keys = self._keys(wanted)
        for shard, at in self._servers.split(self._owners(wanted), keys):
            self._send(shard, [("UNLINK", keys[position]) for position in at.tolist()])
        self._node.known[wanted] = 0

    def clear(self) -> None:
        """Remove all samples of this data set from all servers that can be reached, and those of no other."""
        self._check_process()
        self._node.known[:] = 0
        for shard in self._servers.shards:
            for keys in self._scan(shard):
                self._send(shard, [("UNLINK", key) for key in keys])

    def _scan(self, shard: Shard) -> Any:
        """The keys of this data set on a server, in lists; one may come twice."""
        cursor: Any = b"0"
        while True:
            replies = self._send(shard, [("SCAN", cursor, "MATCH", self._prefix + b"[0-9]*", "COUNT", 1000)])
            if not replies or isinstance(replies[0], Exception):
                return
            cursor, keys = replies[0]
            yield keys
            if cursor == b"0":
                return

    # -- servers ------------------------------------------------------------------------------------------------------

    def _name(self, id: int) -> bytes:
        return b"%b%d" % (self._prefix, id)

    def _keys(self, ids: Array) -> list[bytes]:
        prefix = self._prefix
        return [b"%b%d" % (prefix, id) for id in ids.tolist()]

    def _owners(self, ids: Array) -> Array:
        return self._node.owner[ids] if self._servers.names else self._node.owner

    def _send(self, shard: Shard, commands: list[Any]) -> list[Any]:
        """The replies of a server, errors among them; none if it is lost or refuses all."""
        from redis.exceptions import NoPermissionError

        try:
            replies = shard.send(commands) or []
        except Exception as error:
            self._raise_unknown(error)
            self._refuse(shard, error, _REFUSED_SECONDS)
            return []
        denied = next((reply for reply in replies if isinstance(reply, NoPermissionError)), None)
        if denied is not None:
            self._refuse(shard, denied, 0)
        return replies

    def _raise_unknown(self, error: Exception) -> None:
        from redis.exceptions import ResponseError

        if not isinstance(error, ResponseError):
            raise error

    def _refuse(self, shard: Shard, error: Exception, seconds: float) -> None:
        """Warn once per server that it refuses requests; store nothing there for a while."""
        self._refused[shard] = max(self._refused.get(shard, 0.0), time.monotonic() + seconds)
        if str(shard) not in self._warned:
            self._warned.add(str(shard))
            warnings.warn(
                f"the server {shard} refuses samples of {self.name!r}: {error}. Nothing is stored there for a while",
                RuntimeWarning,
                stacklevel=2,
            )

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

    def __enter__(self) -> RedisCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Memory:
    """Standing memory for the records of one batch."""

    def __init__(self, buffers: Buffers, count: int) -> None:
        self._buffers, self._left = buffers, count
        self._memory, self._at = np.empty(0, np.uint8), 0

    def copy(self, record: Array) -> Array:
        """A copy of `record` at a multiple of 64."""
        stride = len(record) + 63 & ~63
        if self._at + stride > len(self._memory):
            self._memory = self._buffers.take(max(stride, min(_LOT_BYTES, stride * max(1, self._left))))
            self._at = 0
        copy = self._memory[self._at : self._at + len(record)]
        copy[:] = record
        self._at, self._left = self._at + stride, self._left - 1
        return copy


_after_fork = threading.RLock()
at_fork(before=_after_fork.acquire, after_in_parent=_after_fork.release, after_in_child=_after_fork.release)


def _info(shard: Shard) -> dict[str, str]:
    """What a server says of its memory and hits; empty if it is lost."""
    found: dict[str, str] = {}
    for section in ("memory", "stats"):
        text = shard.call("INFO", section)
        lines = text.decode().split("\r\n") if isinstance(text, bytes) else []
        found |= dict(line.split(":", 1) for line in lines if ":" in line)
    return found


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
