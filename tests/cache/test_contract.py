"""Sample caches in memory and on a disk do what the protocol says."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stallfree.cache import SampleCache
from stallfree.testing import CacheContract
from stallfree.testing.cache_contract import MakeCache

_number = itertools.count()


@contextlib.contextmanager
def caches(**options: Any) -> Iterator[MakeCache]:
    """Makes sample caches with a name each."""
    with contextlib.ExitStack() as leave:

        def make(num_ids: int, capacity: int, **more: Any) -> SampleCache:
            name = f"contract-{next(_number)}"
            cache = SampleCache(num_ids, capacity=capacity, fingerprint="data", name=name, **options, **more)
            return leave.enter_context(cache)

        yield make


@pytest.mark.parametrize("policy", ["minio", "lru", "importance"])
class TestSampleCache(CacheContract):
    @pytest.fixture
    def make_cache(self, policy: str) -> Iterator[MakeCache]:
        with caches(policy=policy) as make:
            yield make


class TestOnDisk(CacheContract):
    @pytest.fixture
    def make_cache(self, tmp_path: Path) -> Iterator[MakeCache]:
        with caches(policy="lru", store=tmp_path) as make:
            yield make
