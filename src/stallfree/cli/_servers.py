"""The Redis or Valkey servers that this user's stores have started on this host."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stallfree.ipc.folders import in_use, is_root

_SECONDS = 0.25


@dataclass(frozen=True)
class RunningServer:
    """A server that a store has started.

    Attributes:
        store: name of its store.
        lost: whether it did not answer within 0.25 s; the numbers are then 0.
        hits, misses: keys found and not found, for all nodes since its start.
        keys: values in it.
        used_bytes, capacity_bytes: memory.
    """

    store: str
    lost: bool
    hits: int = 0
    misses: int = 0
    keys: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0


def running_servers(root: Path) -> list[RunningServer]:
    """Return the servers of all stores that are in use and whose folders are below `root`.

    Connects by their sockets only: a port may by now belong to another program, which would receive the password.
    """
    folders = sorted(root.glob("redis-*/servers.json")) if is_root(root) else []
    return [_query(file.parent) for file in folders if in_use(file.parent)]


def _query(folder: Path) -> RunningServer:
    store, fd = folder.name.removeprefix("redis-"), os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        from redis import Redis

        id, records = (folder / "id").read_text(), json.loads((folder / "servers.json").read_text())
        password: Any = next(record["password"] for record in records if record["id"] == id)
        path = f"/proc/self/fd/{fd}/socket"  # a socket address has room for 107 bytes
        options: Any = {"socket_timeout": _SECONDS, "socket_connect_timeout": _SECONDS, "retry": None}
        with Redis(unix_socket_path=path, password=password, **options) as client:
            values, keys = dict(client.info("everything")), int(client.dbsize())
    except Exception:  # of the file system, the socket or redis-py: the server starts, ends or is lost
        return RunningServer(store, lost=True)
    finally:
        os.close(fd)
    names = ("keyspace_hits", "keyspace_misses", "used_memory", "maxmemory")
    hits, misses, used, capacity = (int(values[name]) for name in names)
    return RunningServer(store, False, hits, misses, keys, used, capacity)
