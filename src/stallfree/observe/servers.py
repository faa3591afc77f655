"""The Redis or Valkey servers started by this user's stores, on this host and on the other nodes of its jobs."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stallfree.cache.redis.addresses import Address, load_client, open_client, shown_address
from stallfree.cache.redis.servers import ID, RECORDS, address_of, read_records

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
    found = _addresses(root)
    if not found:
        return []
    load_client()
    with ThreadPoolExecutor(min(_MOST_THREADS, len(found)), thread_name_prefix="stallfree-probe") as threads:
        return list(threads.map(_look, *zip(*found, strict=True)))


def _addresses(root: Path) -> list[tuple[str, Address]]:
    """The names of the stores and the addresses of their servers."""
    found = []
    for folder in sorted(file.parent for file in root.glob(f"redis-*/{RECORDS}")):
        with contextlib.suppress(OSError):  # it is being removed
            me = (folder / ID).read_text()
            for record in sorted(read_records(folder), key=lambda record: bool(record["id"] != me)):
                address = address_of(record, str(folder) if record["id"] == me else "")
                found.append((folder.name.removeprefix("redis-"), address))
    return found


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
