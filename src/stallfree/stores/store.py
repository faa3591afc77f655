"""`RedisStore`: where the caches of several hosts meet."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stallfree.cache import MISS, Policy, SampleCache
from stallfree.cache.policies import make_policy
from stallfree.errors import CapacityError, InputError, MissingExtraError, MissingServerError, StorageError
from stallfree.folders import check_name, default_root, in_use
from stallfree.frames import users_level
from stallfree.platform import need_linux, shares_memory
from stallfree.stores.disk_tier import DiskTier
from stallfree.stores.endpoint import EXAMPLE, Address
from stallfree.stores.keeper import LOG
from stallfree.stores.meet import Peer, find_interface, find_place, meet
from stallfree.stores.partition import PartitionedCache
from stallfree.stores.post import PostOffice
from stallfree.stores.registry import register, registered_bytes
from stallfree.stores.servers import ServerCache
from stallfree.stores.spawn import Node
from stallfree.stores.tiered import TieredCache
from stallfree.stores.values import data_key
from stallfree.units import format_size, parse_size

_CLERK_SECONDS = 120.0
_NO_LIMIT = 1 << 62
_CLERK = "stallfree.stores.clerk"


def open_cache(
    store: str | Path | RedisStore | DiskTier,
    num_ids: int,
    *,
    capacity: int,
    fingerprint: str,
    policy: str | Policy,
    name: str,
    persist: bool,
    example: Any,
) -> SampleCache | PartitionedCache | ServerCache | TieredCache:
    """The cache of a data set in any store: "memory", a folder on a disk, a `RedisStore` or a `DiskTier`."""
    if isinstance(store, RedisStore):
        if persist:
            raise InputError("persist=True with a RedisStore: its caches end with the job. Leave persist out")
        return store.attach(
            num_ids, capacity=capacity, fingerprint=fingerprint, policy=policy, name=name, example=example
        )
    if isinstance(store, DiskTier):
        return store.attach(
            num_ids,
            capacity=capacity,
            fingerprint=fingerprint,
            policy=policy,
            name=name,
            persist=persist,
            example=example,
        )
    return SampleCache(
        num_ids,
        capacity=capacity,
        fingerprint=fingerprint,
        policy=policy,
        store=store,
        name=name,
        persist=persist,
        example=example,
    )


def wished_store() -> RedisStore | None:
    """A store over the nodes of the job; None if there is only this one, or with a warning if it cannot be made."""
    if not shares_memory() or find_place().count == 1:
        return None
    try:
        return RedisStore(capacity_per_node=_NO_LIMIT, name="auto")
    except (MissingServerError, MissingExtraError) as error:
        warnings.warn(f"samples are cached on each node for itself: {error}", RuntimeWarning, stacklevel=users_level())
        return None


class RedisStore:
    """The memory of all nodes of a job, as one store for the caches of data sets.

        store = RedisStore(capacity_per_node="64GiB")
        dataset = CachedDataset(ds, capacity="64GiB", store=store, name="imagenet-train")

    Every node keeps the samples that it owns in its own shared memory, from which its processes read directly. Other
    nodes get them from a process beside it, and leave what they have fetched for this node in its server: one of Valkey
    or Redis per node, which the first process of a node starts, with that process, and which ends with the last. A
    server holds only what is on its way, 256 MiB at most. Both listen: let `port` and the next one through a firewall.
    Who owns a sample follows from its id and the names of the nodes. Samples of more than 64 MiB are not handed in.

    The nodes of a job find each other through the variables that torchrun sets, and the store that it keeps at
    MASTER_ADDR:MASTER_PORT (or the one of `torch.distributed.init_process_group`).

    With `hosts`, nothing is started: the samples lie in servers that run already, and all nodes read them from there.
    They stay when the job ends. `capacity` of a data set then means all servers together. One or more nodes of a Redis
    Cluster stand for all of its masters, and what is said of one node (user, password, TLS) holds for all of them.

    Args:
        hosts: None, or the servers, each a dict such as `{"host": "node1", "port": 6379, "password": "..."}`. Further
            keys are "path" (of a Unix socket), "username", "db", "ssl", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile".
            An ACL user needs at least `~stallfree* +ping +get +mget +set +strlen +unlink +del +hmget +hincrby +scan
            +cluster|slots`, and `+select` for another database than 0.
        capacity_per_node: bytes that the data sets of this store may take on each node, all together, as an int or such
            as "64GiB". With `hosts`: that one data set may take on each of them.
        cluster_mode: False keeps every node to itself: no server is started, and nothing is shared.
        name: of the store; the processes of a node that give the same name share it.
        interface: name or number of the network interface's address at which other nodes reach this one.
        port: for the server; the process beside it that hands samples out takes the next one. 0 for free ones.
        timeout: seconds that another node may be silent before it counts as lost, for a while.
        allow_pickle: whether samples that can only be pickled are stored and, coming from another node, loaded.
            Whoever can write to a server could then run code here.

    Raises `InputError` for arguments that cannot be used, `MissingServerError` when there is neither `valkey-server`
    nor `redis-server`, `WaitError` when other nodes of the job do not come, `StorageError` when no server can be
    started.
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        *,
        capacity_per_node: int | str,
        cluster_mode: bool = True,
        name: str = "default",
        interface: str | None = None,
        port: int = 0,
        timeout: float = 0.25,
        allow_pickle: bool = False,
    ) -> None:
        need_linux("RedisStore", "use store='memory'")
        self.capacity = parse_size(capacity_per_node, "capacity_per_node")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise InputError(f"timeout={timeout!r}: give seconds above 0")
        self.name, self.timeout, self.allow_pickle = check_name(name), timeout, allow_pickle
        self._node: Node | None = None
        self._peers: list[Peer] = []
        self._me = 0
        self._taken: dict[str, int] = {}
        if hosts is not None and not isinstance(hosts, (list, tuple)):
            raise InputError(f"hosts={hosts!r:.80}: give a list of servers, such as [{EXAMPLE}]")
        self._servers = None if hosts is None else [Address.of(host) for host in hosts]
        if self._servers is not None:
            if not self._servers:
                raise InputError("hosts=[] names no server: give one or more, or leave hosts out to start them")
        elif cluster_mode:
            place = find_place()
            alone = place.count == 1  # then nothing is gained but an open port
            self._node = Node(
                name,
                interface=None if alone else interface or find_interface(place),
                port=0 if alone else port,
            )
            try:
                self._wait_for_clerk(alone)
                self._peers, self._me = meet(self._node, name, place)
            except BaseException:
                self._node.close()
                raise

    def _wait_for_clerk(self, alone: bool) -> None:
        """Before the others are told of this node: then whoever knows of a node can ask it."""
        assert self._node is not None
        office = PostOffice(self._node.unix.server, self._node.unix.clerk, self.timeout)
        try:
            if not alone and not office.wait(_CLERK_SECONDS):
                raise StorageError(
                    f"the process {_CLERK} of the store {self.name!r} did not start within {_CLERK_SECONDS:.0f} s: see "
                    f"{self._node.folder / LOG}"
                )
        finally:
            office.close()

    def attach(
        self,
        num_ids: int,
        *,
        capacity: int,
        fingerprint: str,
        policy: str | Policy = "minio",
        name: str,
        example: Any = MISS,
    ) -> PartitionedCache | ServerCache:
        """The cache of one data set in this store; the arguments are those of `SampleCache`.

        The name alone never lets one data set read another's samples: the fingerprint is in the key. Raises
        `CapacityError` when the data sets of this node would take more than the store has.
        """
        key, folder = data_key(name, fingerprint), self.folder_of(name, fingerprint)
        if self._servers is not None:
            return self._attach_to_servers(num_ids, capacity, fingerprint, policy, name)
        if self._node is not None:
            taken = registered_bytes(self._node.folder, but=key)
        else:
            taken = sum(size for part, size in self._taken.items() if part != folder and in_use(default_root() / part))
        if taken + capacity > self.capacity:
            raise CapacityError(
                f"capacity={format_size(capacity)} for {name!r} is more than the store {self.name!r} has left on this "
                f"node: {format_size(self.capacity - taken)} of capacity_per_node={format_size(self.capacity)}: give "
                "less"
            )
        local = SampleCache(
            num_ids,
            capacity=capacity,
            fingerprint=fingerprint,
            policy=policy,
            name=folder,
            example=example,
            allow_pickle=self.allow_pickle,
        )
        try:
            self._taken[folder] = capacity
            if self._node is not None:
                register(self._node.folder, key, local)
            peers = self._peers if len(self._peers) > 1 else []
            offices = [PostOffice(peer.doors.server, peer.doors.clerk, self.timeout) for peer in peers]
            return PartitionedCache(local, [peer.name for peer in self._peers] or [""], self._me, offices, key)
        except BaseException:
            local.close()
            raise

    def _attach_to_servers(
        self, num_ids: int, capacity: int, fingerprint: str, policy: str | Policy, name: str
    ) -> ServerCache:
        assert self._servers is not None
        if make_policy(policy).name != "minio":
            raise InputError(
                f"policy={make_policy(policy).name!r} with hosts: leave it out, nothing is ever evicted there"
            )
        return ServerCache(
            num_ids,
            addresses=self._servers,
            capacity=capacity,
            name=name,
            fingerprint=fingerprint,
            per_server=self.capacity,
            allow_pickle=self.allow_pickle,
            timeout=self.timeout,
        )

    def folder_of(self, name: str, fingerprint: str) -> str:
        """The name of the folder in which this node keeps its part of a data set."""
        return f"{self.name}-{data_key(name, fingerprint).hex()[:16]}"

    @property
    def num_nodes(self) -> int:
        """Nodes of the job."""
        return max(1, len(self._peers))

    def close(self) -> None:
        """Leave the store. Its server ends when the last process of the node has left. May be called twice."""
        if self._node is not None:
            self._node.close()

    def __enter__(self) -> RedisStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"{self.num_nodes} nodes" if self._servers is None else f"{len(self._servers)} servers"
        return f"RedisStore({self.name!r}, {where}, {format_size(self.capacity)} on each)"
