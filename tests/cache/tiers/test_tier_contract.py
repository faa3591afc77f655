"""Tiers of every kind, and servers alone, do what the protocol of caches says."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redis_servers import Server, needs_server
from redis_tools import attach, emptied
from stallfree.cache import Cache, SampleCache
from stallfree.stores import RedisCache, TieredCache
from stallfree.stores.disk_tier import DiskCache
from stallfree.testing import CacheContract
from stallfree.testing.cache_contract import LITTLE, MakeCache

_number = itertools.count()


@contextlib.contextmanager
def tiers(
    *, policy: str = "minio", disk: Path | None = None, keep: bool = False, servers: list[Server] | None = None
) -> Iterator[MakeCache]:
    """Makes caches with a little memory over a disk that has the `capacity`, or over servers, or over both."""
    with contextlib.ExitStack() as leave:

        def make(num_ids: int, capacity: int, **options: Any) -> Cache:
            given = {"name": f"contract-{next(_number)}", "fingerprint": "data", **options}
            memory = SampleCache(num_ids, capacity=LITTLE, policy=policy, **given)
            leave.callback(memory.close)
            lower: list[Any] = []
            if disk is not None:
                on_disk = SampleCache(num_ids, capacity=capacity, store=disk, **given)
                lower.append(DiskCache(on_disk, memory, persist=keep))
            if servers is not None:
                lower.append(remote(servers, num_ids, **given))
            return leave.enter_context(TieredCache(memory, *lower))

        yield make


def remote(servers: list[Server], num_ids: int, *, example: Any = None, **options: Any) -> RedisCache:
    return attach(servers, num_ids, **options)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with Server(tmp_path_factory.mktemp("one")) as one, Server(tmp_path_factory.mktemp("two")) as two:
        yield [one, two]


@pytest.fixture
def servers(both: list[Server]) -> list[Server]:
    return emptied(both)


@pytest.mark.parametrize(("policy", "keep"), [("minio", True), ("lru", False)])
class TestMemoryOverDisk(CacheContract):
    @pytest.fixture
    def make_cache(self, policy: str, keep: bool, tmp_path: Path) -> Iterator[MakeCache]:
        with tiers(policy=policy, disk=tmp_path, keep=keep) as make:
            yield make


@needs_server
class TestMemoryOverServers(CacheContract):
    @pytest.fixture
    def make_cache(self, servers: list[Server]) -> Iterator[MakeCache]:
        with tiers(policy="lru", servers=servers) as make:
            yield make


@needs_server
class TestThreeTiers(CacheContract):
    @pytest.fixture
    def make_cache(self, tmp_path: Path, servers: list[Server]) -> Iterator[MakeCache]:
        with tiers(disk=tmp_path, servers=servers) as make:
            yield make


@needs_server
class TestServers(CacheContract):
    @pytest.fixture
    def make_cache(self, servers: list[Server]) -> Iterator[MakeCache]:
        with contextlib.ExitStack() as leave:

            def make(num_ids: int, capacity: int, **options: Any) -> Cache:
                return leave.enter_context(remote(servers, num_ids, name=f"contract-{next(_number)}", **options))

            yield make
