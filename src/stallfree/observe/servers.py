"""The Redis or Valkey servers started by this user's stores, on this host and on the other nodes of its jobs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stallfree.cache.redis.addresses import Address, load_client, open_client, shown_address
from stallfree.cache.redis.servers import node_servers

_SECONDS = 0.25

_MOST_THREADS = 32
"""Maximum number of servers probed concurrently."""


@dataclass(frozen=True)
class ServerRow:
    """A server in a snapshot.

    Attributes:
        store: name of its store.
        address: host and port, or the path of a Unix socket.
        lost: whether it did not answer within 0.25 s; the numbers are then 0.
        keys: values in it.
        used_bytes, capacity_bytes: memory.
        hits, misses: keys found and not found, for all nodes since its start.
        connections: current number of clients.
    """

    store: str
    address: str
    lost: bool
    keys: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    misses: int = 0
    connections: int = 0


def running_servers(root: Path) -> list[ServerRow]:
    """The servers of all stores whose folders are below `root`, this node's first.

    Sends two requests to each, to all servers concurrently.
    """
    found = node_servers(root)
    if not found:
        return []
    load_client()
    with ThreadPoolExecutor(min(_MOST_THREADS, len(found)), thread_name_prefix="stallfree-probe") as threads:
        return list(threads.map(_look, *zip(*found, strict=True)))


def _look(store: str, address: Address) -> ServerRow:
    from redis.exceptions import RedisError

    try:
        with open_client(address, _SECONDS) as client:
            found = dict(client.info("everything"))
            keys = client.dbsize()
    except (RedisError, OSError):
        return ServerRow(store, shown_address(address), True)
    names = ("used_memory", "maxmemory", "keyspace_hits", "keyspace_misses", "connected_clients")
    return ServerRow(store, shown_address(address), False, int(keys), *(int(found[name]) for name in names))
