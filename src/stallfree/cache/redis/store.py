"""`RedisStore`: servers of Redis or Valkey as a store of tiers; and the samples of one data set in them, as a tier.

A sample is stored under `stallfree:NAME-KEY:ID`, with a header that identifies it and holds its checksum.
Its id and the names of the servers determine its server, in a Redis Cluster its key does. A batch costs one MGET per
server.

A server that is lost or full reduces hits, and raises no error. One that refuses requests, for instance because of
missing rights, raises `StorageError`.

A value is a header of 64 bytes, then the record:

    u64 checksum, magic "SFV1", u32 flags (0), key of the data set (16 bytes), u64 id, u64 length of the record, zeros

The checksum is the xxh3_64 of the record, seeded with the id; the reader can compute all other fields. So a value that
is truncated, has flipped bits, or belongs to another data set or sample is detected, and counts as a miss. This does
not protect against forged values.

All numbers are little-endian.

The owner of an id is determined by rendezvous hashing with equal shares. Every server has a score for every id, a hash
of both, and the server with the highest score owns the id (Thaler and Ravishankar, "Using name-based mappings to
increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998, section III). So any process can compute the owner
without a directory, and no ids move between the other servers when a server joins or leaves. Random shares are uneven,
by 2% for 2,000 ids on two servers, and a cache of exactly the required size would overflow on one of them. So the
surplus ids of a server are assigned to servers with less than their share.
"""

import contextlib
import re
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stallfree import errors
from stallfree.cache.capacity import check_free_memory
from stallfree.cache.policies import Array, mixed
from stallfree.cache.records import MISS
from stallfree.cache.redis.launch import NodeServer
from stallfree.cache.redis.servers import ID, Cluster, Server, Servers, checked_addresses, load_client
from stallfree.ipc.folders import SharedFolder, check_name, default_root, sweep
from stallfree.ipc.process import finalize_here
from stallfree.pipeline.codec import read_record
from stallfree.platform import need_linux
from stallfree.raising import short_traceback
from stallfree.typevars import Closing
from stallfree.units import parse_number, parse_size, parse_whole

HEAD_SIZE = 64
"""Bytes of the header."""

_HEAD = struct.Struct("<Q4sI16sQQ16s")
_digest: Any = xxhash.xxh3_64_intdigest  # accepts arrays, though not typed so, and is faster than with their `.data`
_MAGIC = b"SFV1"
_ZEROS = bytes(16)

_HASHED = 1 << 20
"""Ids hashed per step, which bounds the memory."""

_FULL_SECONDS = 1.0
"""Pause in storing on a full server."""

_STEP = 10_000
"""Ids per request of `clear`."""


class RedisStore(Closing):
    """Redis or Valkey servers, as one store for all nodes of a job.

    The first process of a node starts a server of Valkey or Redis, which ends with that process. Every sample is stored
    on one of the servers, determined by its id. Processes of a node use a Unix socket; other nodes use one TCP port:
    allow `port` in the firewall. A server that dies is replaced by an empty one when the next epoch begins.

    The nodes of a job find each other through the variables that torchrun sets, and its key-value store at
    MASTER_ADDR:MASTER_PORT (or that of `torch.distributed.init_process_group`).

    With `hosts`, no server is started: the samples are stored in running servers, and stay there when the job ends.
    Samples that these servers evict by their own `maxmemory-policy` are misses. Of a Redis Cluster, give one node: its
    other nodes are found by `redis.RedisCluster`.

    Args:
        hosts: None, or the servers, each a dict such as `{"host": "node1", "port": 6379, "password": "..."}`. Further
            keys are "path" (of a Unix socket), "username", "db", "ssl", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile".
            An ACL user needs at least `~stallfree:* +ping +info +get +mget +set +unlink`, `+select` for another
            database than 0, and `+cluster +command` for a Redis Cluster.
        capacity_per_node: memory limit of the server of each node, as an int or a string like "64GiB". With `hosts`:
            storing on a server stops at this memory use; None for the servers' own `maxmemory`.
        name: of the store; the processes of a node with the same name share its server.
        port: of the server; 0: a free port.
        timeout: seconds without an answer after which a server temporarily counts as lost.
        allow_pickle: whether samples that can only be pickled are loaded. Any process that can write to a server could
            then run code here.

    Raises:
        InputError: for invalid arguments.
        CapacityError: for more than the free memory.
        MissingServerError: if neither `valkey-server` nor `redis-server` is installed.
        WaitError: if other nodes of the job do not open the store within 300 s.
        StorageError: if a server does not answer.

    Example:
        ```python
        # needs Redis
        store = sf.RedisStore(capacity_per_node="64GiB")
        cached = sf.CachedDataset(dataset, capacity="16GiB", store=store, name="imagenet-train")
        loader = sf.DataLoader(cached, batch_size=64, ranks="auto")
        ```
    """

    @short_traceback
    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        *,
        capacity_per_node: int | str | None = None,
        name: str = "default",
        port: int = 0,
        timeout: float = 0.25,
        allow_pickle: bool = False,
    ) -> None:
        need_linux("RedisStore", "use store='memory'")
        load_client()
        self.capacity = None if capacity_per_node is None else parse_size(capacity_per_node, "capacity_per_node")
        if not self.capacity and hosts is None:
            raise errors.argument_conflict("RedisStore() without capacity_per_node: give the bytes of a node's server")
        parse_number(timeout, "timeout")
        port = parse_whole(port, "port", 0)
        self.name, self.allow_pickle = check_name(name), allow_pickle
        sweep(default_root())
        if hosts is not None:
            self._servers = _given_servers(hosts, timeout, self.capacity)
        else:
            folder = SharedFolder(f"redis-{name}", initialize=self._initialize)
            try:
                self._servers = NodeServer(folder, self.capacity or 0, port, name, timeout).servers
            except BaseException:
                folder.close()
                raise
        self._finish = finalize_here(self, self._servers.close)

    def _initialize(self, folder: Path) -> None:
        check_free_memory(self.capacity or 0, f"capacity_per_node={self.capacity}")
        (folder / ID).write_text(secrets.token_hex(16))

    def attach(self, num_ids: int, *, fingerprint: str, name: str, example: Any = None) -> "RedisTier":
        """Return the samples of one data set in this store.

        Data sets of the same name cannot read each other's samples: the keys contain the fingerprint.

        Args:
            num_ids: number of its samples.
            fingerprint: of its source and preparation.
            name: of the data set.
            example: not used.

        Raises `InputError` if the store is closed.
        """
        if not self._finish.alive:
            raise errors.object_closed(f"the store {self.name!r} is closed: make a new one, close it after training")
        limit = self.capacity if self._servers.me is None else None
        tier = RedisTier(num_ids, self._servers, name, fingerprint, limit, self.allow_pickle)
        tier.store = self  # which ends its server when it is collected
        return tier

    @property
    def sample_bytes(self) -> int:
        """Total bytes of all servers, within the limits set here."""
        return (self.capacity or 0) * len(self._servers.all)

    def close(self) -> None:
        """Detach from the store; its tiers have only misses then. Idempotent.

        The server of this node ends if this process has started it.
        """
        self._finish()

    def __repr__(self) -> str:
        return f"RedisStore({self.name!r}, {', '.join(self._servers.names)})"


def _given_servers(hosts: Sequence[Mapping[str, Any]], timeout: float, limit: int | None) -> Servers:
    """Attach to servers given by the user. Raises errors of their addresses and of servers that do not answer."""
    addresses = checked_addresses(hosts)
    given, name = [*addresses.values()], xxhash.xxh3_64_hexdigest(" ".join(addresses).encode())
    folder = SharedFolder(f"redis-given-{name}", initialize=lambda folder: None)
    try:
        servers = Servers(folder, timeout, given)
        if not servers.check():
            return servers
        if limit is not None:
            raise errors.argument_conflict("capacity_per_node with a Redis Cluster: set the maxmemory of its servers")
        return Servers(folder, timeout, given[:1], Cluster)
    except BaseException:
        folder.close()
        raise


# -- the samples of one data set --------------------------------------------------------------------------------------


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
                        with contextlib.suppress(errors.CodecError):  # of another version, or a pickle
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


# -- the format of values, and the owners of ids -----------------------------------------------------------------------


def data_key(name: str, fingerprint: str) -> bytes:
    """Return a 16-byte key of a data set, from its name and the fingerprint of its source and preparation."""
    return xxhash.xxh3_128_digest(f"{name}\0{fingerprint}".encode(errors="surrogatepass"))


def pack_head(key: bytes, id: int, record: bytes | Array) -> bytes:
    """Return the header for a record.

    Args:
        key: of the data set, from `data_key`.
        id: of the sample, from 0 to 2**64 - 1.
        record: contiguous bytes.
    """
    return _HEAD.pack(_digest(record, id), _MAGIC, 0, key, id, len(record), _ZEROS)


def check_value(memory: Array, key: bytes, id: int) -> Array | None:
    """Return the record in `memory`, as a view; None for any but an intact value of this sample.

    Args:
        memory: the value, 1-D and contiguous.
        key: of the data set.
        id: of the sample.
    """
    size = memory.size - HEAD_SIZE
    if size < 0:
        return None
    checksum, *fields = _HEAD.unpack_from(memory.data)
    if fields != [_MAGIC, 0, key, id, size, _ZEROS]:
        return None
    record = memory[HEAD_SIZE:]
    return record if _digest(record, id) == checksum else None


def owners(num_ids: int, names: Sequence[str]) -> Array:
    """Return the owner of each id from 0 to `num_ids` - 1: its index in `names`, int16.

    No server owns more than `num_ids` / number of servers, rounded up. The order of `names` affects only the returned
    indices.

    Args:
        num_ids: number of samples of the data set.
        names: distinct names of the servers, which determine the owners.
    """
    owner = np.zeros(num_ids, np.int16)
    by_name = sorted(range(len(names)), key=names.__getitem__)
    seeds = [xxhash.xxh3_64_intdigest(names[index].encode()) for index in by_name]
    for start in range(0, num_ids, _HASHED):
        ids = np.arange(start, min(start + _HASHED, num_ids), dtype=np.uint64)
        scores = np.stack([mixed(ids, seed) for seed in seeds])
        owner[start : start + len(ids)] = np.array(by_name)[scores.argmax(axis=0)]
    most = -(-num_ids // len(names))
    owned = [np.flatnonzero(owner == index) for index in by_name]
    surplus = np.concatenate([ids[most:] for ids in owned])
    free = np.repeat(np.array(by_name, np.int16), [max(0, most - len(ids)) for ids in owned])
    owner[surplus] = free[: len(surplus)]
    return owner
