"""`RedisStore`: servers of Redis or Valkey as a store of tiers."""

from __future__ import annotations

import math
import secrets
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from stallfree import errors
from stallfree.cache.capacity import check_free_memory
from stallfree.cache.redis.launch import NodeServer
from stallfree.cache.redis.servers import EXAMPLE, ID, Cluster, Servers, checked_address, load_client, shown_address
from stallfree.cache.redis.tier import RedisTier
from stallfree.ipc.folders import SharedFolder, check_name, default_root, sweep
from stallfree.ipc.forked import Owner
from stallfree.platform import need_linux
from stallfree.units import parse_size, parse_whole


class RedisStore:
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
        if capacity_per_node is None and hosts is None:
            raise errors.argument_conflict("RedisStore() without capacity_per_node: give the bytes of a node's server")
        self.capacity = None if capacity_per_node is None else parse_size(capacity_per_node, "capacity_per_node")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise errors.InputError(f"timeout={timeout!r}: give seconds above 0")
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
        self._finish = weakref.finalize(self, _close, Owner(), self._servers)

    def _initialize(self, folder: Path) -> None:
        check_free_memory(self.capacity or 0, f"capacity_per_node={self.capacity}")
        (folder / ID).write_text(secrets.token_hex(16))

    def attach(self, num_ids: int, *, fingerprint: str, name: str, example: Any = None) -> RedisTier:
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
    def room(self) -> int:
        """Total bytes of all servers, within the limits set here."""
        return (self.capacity or 0) * len(self._servers.all)

    def close(self) -> None:
        """Detach from the store; its tiers have only misses then. Idempotent.

        The server of this node ends if this process has started it.
        """
        self._finish()

    def __enter__(self) -> RedisStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RedisStore({self.name!r}, {', '.join(self._servers.names)})"


def _given_servers(hosts: Sequence[Mapping[str, Any]], timeout: float, limit: int | None) -> Servers:
    """Attach to servers given by the user. Raises errors of their addresses and of servers that do not answer."""
    if not isinstance(hosts, (list, tuple)) or not hosts:
        shown = {**hosts, "password": "..."} if isinstance(hosts, Mapping) and "password" in hosts else hosts
        raise errors.server_address(f"hosts={shown!r:.80}: give a list of servers, such as [{EXAMPLE}]")
    addresses = {shown_address(address): address for address in map(checked_address, hosts)}
    if len(addresses) < len(hosts):
        raise errors.server_address(f"the servers {', '.join(addresses)}: give each of them once")
    given = [addresses[name] for name in sorted(addresses)]
    name = xxhash.xxh3_64_hexdigest(" ".join(sorted(addresses)).encode())
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


def _close(owner: Owner, servers: Servers) -> None:
    if owner.is_here:  # not in a forked child
        servers.close()
