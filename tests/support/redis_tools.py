"""What the tests of samples in servers share: samples that show whose they are, and caches as nodes attach to them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis

from redis_servers import Server
from stallfree.cache import MISS
from stallfree.stores.redis_cache import RedisCache
from stallfree.stores.servers import Standalone, find_servers
from stallfree.stores.shard import FixedLocation

ENOUGH = 60.0  # seconds that a server may be silent where that is not what is tested
COUNT = 200
NAME = {"name": "train", "fingerprint": "f"}


def sample(id: int, salt: int = 0) -> tuple[np.ndarray, int]:
    """A sample of one of several data sets, of a size of its own; every number shows whose it is."""
    return np.arange(20 + id * 7 % 300) + (salt << 48 | id << 16), id


def samples(ids: Sequence[int], salt: int = 0) -> list[Any]:
    return [sample(id, salt) for id in ids]


def shown(values: Sequence[Any], salt: int = 0) -> list[int | None]:
    """The ids of samples; None for a miss. Fails for one that is not as it was made."""
    ids: list[int | None] = []
    for value in values:
        if value is not MISS:
            assert np.array_equal(value[0], sample(value[1], salt)[0])
        ids.append(None if value is MISS else value[1])
    return ids


def attach(servers: Sequence[Server], count: int = COUNT, *, timeout: float = ENOUGH, **options: Any) -> RedisCache:
    """The cache of a data set in given servers."""
    found = find_servers([server.tcp for server in servers], timeout)
    return RedisCache(count, servers=found, **(NAME | options))


def client(server: Server) -> redis.Redis:
    """A client of redis-py for a test's own commands."""
    return redis.Redis.from_url(f"unix://{server.path}")


def emptied(servers: list[Server]) -> list[Server]:
    """The same servers, without values and limits."""
    for server in servers:
        with client(server) as there:
            there.flushall()
            there.config_set("maxmemory", 0)
            there.config_set("maxmemory-policy", "noeviction")
    return servers


def keys_of(servers: Sequence[Server]) -> set[bytes]:
    """All keys of all servers."""
    found: set[bytes] = set()
    for server in servers:
        with client(server) as there:
            found |= set(there.keys("*"))
    return found


@contextlib.contextmanager
def node(folder: Path) -> Iterator[None]:
    """What is made within belongs to a node of its own, whose shared memory is `folder`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    before = os.environ["STALLFREE_ROOT"]
    os.environ["STALLFREE_ROOT"] = str(folder)
    try:
        yield
    finally:
        os.environ["STALLFREE_ROOT"] = before


@contextlib.contextmanager
def nodes(
    folder: Path, servers: Sequence[Server], count: int = COUNT, *, timeout: float = ENOUGH, **options: Any
) -> Iterator[list[RedisCache]]:
    """The cache of a data set as each of several nodes attaches to it, which have a server each."""
    names = [f"node{number}" for number in range(len(servers))]
    with contextlib.ExitStack() as stack:
        caches = []
        for me, name in enumerate(names):
            with node(folder / name):
                found = Standalone(names, [FixedLocation(server.tcp) for server in servers], timeout)
                caches.append(stack.enter_context(RedisCache(count, servers=found, me=me, **(NAME | options))))
        yield caches


def load(cache: RedisCache, ids: Sequence[int], salt: int = 0) -> list[int]:
    """Read `ids` and store those that are missing, as a loader does: the ids that were missing."""
    missing = [id for id, there in zip(ids, shown(cache.get_many(ids), salt), strict=True) if there is None]
    cache.put_many(missing, samples(missing, salt))
    cache.flush()
    return missing


def name_of(cache: RedisCache, id: int) -> bytes:
    """The key of a sample on its server."""
    return cache._values.names(np.array([id]))[0]
