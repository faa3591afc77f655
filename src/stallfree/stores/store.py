"""`RedisStore`: servers of Redis or Valkey as a store; and `open_cache` for any chain of stores."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Union

from stallfree.cache import Cache, Policy, SampleCache
from stallfree.cache.policies import make_policy
from stallfree.cache.tiers.tiered import TieredCache
from stallfree.errors import (
    InputError,
    MissingExtraError,
    MissingServerError,
    argument_conflict,
    object_closed,
    server_address,
    text_of,
)
from stallfree.frames import users_level
from stallfree.ipc.folders import check_name
from stallfree.platform import need_linux, shares_memory
from stallfree.stores.addresses import EXAMPLE, Address, load_client
from stallfree.stores.disk_tier import DiskTier
from stallfree.stores.launch.place import find_interface, find_place
from stallfree.stores.launch.rendezvous import NodeAddresses
from stallfree.stores.launch.server import NodeServer
from stallfree.stores.redis_cache import RedisCache
from stallfree.stores.servers import Servers, Standalone, find_servers
from stallfree.units import format_size, parse_size


class CacheStore(Protocol):
    """Protocol of a user-defined store, which creates the caches of data sets."""

    def attach(
        self,
        num_ids: int,
        *,
        capacity: int,
        fingerprint: str,
        policy: str | Policy,
        name: str,
        persist: bool,
        example: Any,
    ) -> Cache:
        """The cache of a data set; the caller closes it. The arguments are those of `SampleCache`."""


Store = Union[str, Path, "RedisStore", DiskTier, Sequence[Any], CacheStore]


def open_cache(
    store: Store,
    num_ids: int,
    *,
    capacity: int,
    fingerprint: str,
    policy: str | Policy,
    name: str,
    persist: bool,
    example: Any,
) -> Cache:
    """The cache of a data set in a store.

    Args:
        store: "memory", a folder, a `DiskTier`, a `RedisStore`, or the last two in a list. Any other object with
            `attach` creates the cache itself.
        num_ids: number of samples of the data set.
        capacity: bytes of memory; 0, only with a `RedisStore`, means no memory tier above the servers.
        fingerprint, policy, name, persist, example: as for `SampleCache`.
    """
    disk, servers = _tiers(store)
    policy = make_policy(policy)
    if servers is not None and persist:
        raise argument_conflict(
            "persist=True with a RedisStore: leave persist out. Servers given by hosts= keep samples"
        )
    if not capacity and policy.evicts and not policy.given:
        raise argument_conflict(
            f"policy={policy.name!r} with capacity=0: servers do not evict by this policy. Leave policy out, or give a "
            "capacity for a memory tier"
        )
    own_name = name != f"{fingerprint[:20]}-{policy.name}-{capacity}"
    common: dict[str, Any] = {"fingerprint": fingerprint, "policy": policy, "name": name}
    memory = common | {"capacity": capacity, "persist": persist, "example": example}
    with contextlib.ExitStack() as undo:
        below = None
        if servers is not None:
            below = servers.attach(num_ids, own_name=own_name, **common)
            undo.callback(below.close)
        found: Cache
        if disk is not None:
            found = disk.attach(num_ids, below=below, **memory)
        elif below is None and hasattr(store, "attach"):
            found = store.attach(num_ids, **memory)
        elif below is None:
            found = SampleCache(num_ids, store=store, **memory)  # type: ignore[arg-type]
        elif capacity:
            found = TieredCache(SampleCache(num_ids, allow_pickle=below.allow_pickle, **memory), below)
        else:
            found = below
        undo.pop_all()
    return found


def _tiers(store: Store) -> tuple[DiskTier | None, RedisStore | None]:
    if isinstance(store, (list, tuple)):
        if len(store) != 2 or not isinstance(store[0], DiskTier) or not isinstance(store[1], RedisStore):
            raise InputError(f"store={store!r:.80}: a list must be [DiskTier(...), RedisStore(...)]")
        return store[0], store[1]
    return (store if isinstance(store, DiskTier) else None), (store if isinstance(store, RedisStore) else None)


def parse_capacity(capacity: Any, store: Store) -> int:
    """`capacity` in bytes; 0 only if the store is a single `RedisStore`. Raises `CapacityError`."""
    if isinstance(store, RedisStore) and not isinstance(capacity, bool) and capacity in (0, "0"):
        return 0
    return parse_size(capacity, "capacity")


def room_of(store: Store, capacity: int) -> int:
    """Total bytes of all tiers, with `capacity` in the memory of each node."""
    disk, servers = _tiers(store)
    return capacity + (disk.capacity if disk else 0) + (servers.room if servers else 0)


def stores_in(store: Store) -> list[RedisStore]:
    """The `RedisStore` in `store`, if there is one."""
    servers = _tiers(store)[1]
    return [] if servers is None else [servers]


def default_store(capacity: int, unknown: Sequence[str] = ()) -> tuple[Store, int]:
    """The store for `capacity` bytes per node, and the bytes of the memory tier above it.

    Returns a `RedisStore` and 0 if the job has several nodes, a server is installed, and the data set has no `unknown`
    objects. Without a fingerprint of these objects, nodes could not find each other's samples. Otherwise returns
    "memory" and `capacity`, with a warning in a job of several nodes.
    """
    if not shares_memory() or find_place().count == 1:
        return "memory", capacity
    try:
        if not unknown:
            return RedisStore(capacity_per_node=capacity, name="auto"), 0
        why = f"{unknown[0]} has no fingerprint. To share samples, give name=, another name for each data set"
    except (MissingServerError, MissingExtraError) as error:
        why = text_of(error)
    warnings.warn(f"each node caches samples separately: {why}", RuntimeWarning, stacklevel=users_level())
    return "memory", capacity


class RedisStore:
    """Redis or Valkey servers, as one store for all nodes of a job.

    The first process of a node starts a server of Valkey or Redis, which stops with the last. Every sample is stored on
    one of the servers, determined by its id and the names of the nodes. The `capacity` of a data set is the memory tier
    of each node above the servers, 0 for none. Servers listen on one TCP port: allow `port` in the firewall.

    The nodes of a job find each other through the variables that torchrun sets, and its key-value store at
    MASTER_ADDR:MASTER_PORT (or that of `torch.distributed.init_process_group`).

    With `hosts`, no server is started: the samples are stored in running servers, and stay there when the job ends.
    Samples that these servers evict by their own `maxmemory-policy` are misses. Of a Redis Cluster, give one or more
    nodes: all masters are used, with user, password and TLS of the first node.

    Args:
        hosts: None, or the servers, each a dict such as `{"host": "node1", "port": 6379, "password": "..."}`. Further
            keys are "path" (of a Unix socket), "username", "db", "ssl", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile".
            An ACL user needs at least `~stallfree:* +ping +info +get +mget +set +unlink +scan +cluster|slots`, and
            `+select` for another database than 0.
        capacity_per_node: memory limit of the server of each node, as an int or a string like "64GiB". With `hosts`:
            storing on a server stops at this memory use; None for the servers' own `maxmemory`.
        name: of the store; the processes of a node with the same name share its server.
        interface: network interface, by name or address, at which other nodes reach this one.
        port: of the server; 0: a free port, which changes when the server is restarted.
        timeout: seconds without an answer after which a server temporarily counts as lost.
        allow_pickle: whether samples that can only be pickled are stored and loaded. Any process that can write to a
            server could then run code here.

    Raises:
        InputError: for invalid arguments.
        CapacityError: for more than the free memory.
        MissingServerError: if neither `valkey-server` nor `redis-server` is installed.
        WaitError: if other nodes of the job do not open the store within 300 s.
        StorageError: if a server cannot be started or does not answer.

    Example:
        ```python
        # needs Redis
        store = sf.RedisStore(capacity_per_node="64GiB")
        cached = sf.CachedDataset(dataset, capacity="16GiB", store=store, name="imagenet-train")
        loader = sf.DataLoader(cached, batch_size=64, ranks="auto")
        ```
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        *,
        capacity_per_node: int | str | None = None,
        name: str = "default",
        interface: str | None = None,
        port: int = 0,
        timeout: float = 0.25,
        allow_pickle: bool = False,
    ) -> None:
        need_linux("RedisStore", "use store='memory'")
        load_client()
        if capacity_per_node is None and hosts is None:
            raise argument_conflict(
                "RedisStore() without capacity_per_node: give the bytes that each node's server may use"
            )
        self.capacity = None if capacity_per_node is None else parse_size(capacity_per_node, "capacity_per_node")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise InputError(f"timeout={timeout!r}: give seconds above 0")
        self.name, self.timeout, self.allow_pickle = check_name(name), timeout, allow_pickle
        self._closed = False
        self._server: NodeServer | None = None
        self._addresses: NodeAddresses | None = None
        self._given: list[Address] = []
        if hosts is not None:
            if not isinstance(hosts, (list, tuple)) or not hosts:
                shown = {**hosts, "password": "..."} if isinstance(hosts, Mapping) and "password" in hosts else hosts
                raise server_address(f"hosts={shown!r:.80}: give a list of servers, such as [{EXAMPLE}]")
            self._given = [Address.of(host) for host in hosts]
            find_servers(self._given, timeout).close()  # raises errors early
            return
        assert self.capacity is not None
        place = find_place()
        if place.count > 1:
            interface = interface or find_interface(place)
        self._server = NodeServer(name, memory=self.capacity, interface=interface, port=port)
        try:
            self._addresses = NodeAddresses(self._server, name, place)
        except BaseException:
            self._server.close()
            raise

    def attach(
        self, num_ids: int, *, fingerprint: str, policy: str | Policy = "minio", name: str, own_name: bool = True
    ) -> RedisCache:
        """The samples of one data set in this store.

        Data sets of the same name cannot read each other's samples: the keys contain the fingerprint.

        Args:
            num_ids: number of its samples.
            fingerprint: of its source and preparation.
            policy: "importance" and "oracle" evict samples of low score; others have no effect in servers.
            name: of the data set.
            own_name: whether the user set the name; else it is derived from the fingerprint only.

        Raises `InputError` if the store is closed.
        """
        if self._closed:
            raise object_closed(f"the store {self.name!r} is closed: make a new one, and close it after training")
        return RedisCache(
            num_ids,
            servers=self._servers(),
            name=name if own_name else fingerprint[:20],
            fingerprint=fingerprint,
            policy=policy,
            me=self._addresses.me if self._addresses is not None else None,
            limit=self.capacity if self._given else None,
            allow_pickle=self.allow_pickle,
        )

    def _servers(self) -> Servers:
        if self._addresses is None:
            return find_servers(self._given, self.timeout)
        addresses = self._addresses
        locations = [NodeLocation(addresses, place) for place in range(len(addresses.names))]
        return Standalone(addresses.names, locations, self.timeout)

    @property
    def room(self) -> int:
        """Total bytes of all servers, within the limits set here."""
        return (self.capacity or 0) * max(len(self._given), self.num_nodes)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the job, each with a server."""
        return 1 if self._addresses is None else len(self._addresses.names)

    def close(self) -> None:
        """Detach from the store. Idempotent.

        Its server stops after the last process of the node has detached.
        """
        self._closed = True
        if self._addresses is not None:
            self._addresses.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> RedisStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"{len(self._given)} servers" if self._given else f"{self.num_nodes} nodes"
        each = "" if self.capacity is None else f", {format_size(self.capacity)} on each"
        return f"RedisStore({self.name!r}, {where}{each})"


class NodeLocation:
    """The location of the server of one node."""

    fixed = False

    def __init__(self, addresses: NodeAddresses, place: int) -> None:
        self._addresses, self._place = addresses, place

    def find(self) -> tuple[int, Address] | None:
        """See `shard.Location`."""
        return self._addresses.of(self._place)

    def confirm(self, after: int) -> None:
        """See `shard.Location`."""
        self._addresses.confirm(self._place, after)
