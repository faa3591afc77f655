"""The samples of a data set in Redis or Valkey servers as a cache without a memory tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.base import BaseCache
from stallfree.cache.layout import Count
from stallfree.cache.protocol import Fetch, Pool, Reading
from stallfree.cache.records import MISS, checked_ids, checked_pairs
from stallfree.cache.tiers.reading import TierReading, fill
from stallfree.pipeline.codec import encode
from stallfree.stores.redis_tier import RedisTier

Array = npt.NDArray[Any]


class RedisCache(RedisTier, BaseCache):
    """A `RedisTier` as a `Cache`. It has the same arguments."""

    capacity = 0
    complete = False

    @property
    def servers(self) -> RedisCache:
        """This cache itself. (In a `TieredCache`, its tier in servers.)"""
        return self

    def resident(self, ids: Any) -> Array:
        """False for all of `ids`: every read needs a request."""
        return np.zeros(len(checked_ids(ids, self.num_ids)), bool)

    def count_fetch(self, reads: int, size: int) -> None:
        """See `Cache`."""
        self._check_process()
        self._node.counters.add((Count.READS, reads), (Count.BYTES, size))

    def get_many(self, ids: Any) -> list[Any]:
        """See `Cache`. Servers are read sequentially; `begin_read` reads them concurrently."""
        self._check_process()
        wanted = checked_ids(ids, self.num_ids)
        return self.read(wanted) if len(wanted) else []

    def begin_read(self, ids: Array, pool: Pool, fetch: Fetch) -> Reading:
        """See `Cache`. The servers are read concurrently."""
        self._check_process()
        return TierReading(self, ids, pool, fetch)

    def get_known(self, ids: Array) -> list[Any]:
        """See `reading.ReadInParts`."""
        values: list[Any] = [MISS] * len(ids)
        at = np.flatnonzero(self.known(ids))
        if len(at):
            fill(values, at, self.read(ids[at]))
        return values

    def put_many(self, ids: Any, values: Sequence[Any], *, uncached: int = 0) -> Array:
        """See `Cache`. Samples that servers do not store are counted as rejected."""
        wanted = checked_pairs(ids, values, self.num_ids)
        if uncached != self.uncached_steps:
            return np.zeros(len(wanted), bool)
        return self.put_records(wanted, [encode(value, allow_pickle=self.allow_pickle) for value in values])
