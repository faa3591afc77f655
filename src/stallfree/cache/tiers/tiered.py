"""Tiers as one cache: memory over a local disk, over servers shared by several hosts, or over both.

The upper tier is in the memory of this host. Its misses in a batch are read from the lower tiers as soon as the ids of
the batch are known (reading.py). Lower tiers write in the background. For sample placement see tier_stack.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache import Aim, BaseCache, Reading, SampleCache
from stallfree.cache.protocol import Fetch, Pool
from stallfree.cache.records import checked_ids, checked_pairs
from stallfree.cache.sample_cache import EVERY_STEP
from stallfree.cache.tiers.reading import TierReading
from stallfree.cache.tiers.tier_stack import LowerTier, TierStack
from stallfree.stats import CacheStats, TierStats

Array = npt.NDArray[Any]


class TieredCache(BaseCache):
    """Tiers as one `Cache`. `resident`, `structure`, `complete`, `capacity` and `gather` refer to the upper tier.

    Args:
        upper: the first tier, with any policy.
        lower: the tiers below, fastest first: one or more.

    Attributes:
        upper, lower: as given.
        stack: moves samples between them.
    """

    def __init__(self, upper: SampleCache, *lower: LowerTier) -> None:
        self.upper, self.lower, self.stack = upper, lower, TierStack(upper, lower)
        self._tiers: list[SampleCache | LowerTier] = [upper, *lower]
        self.num_ids, self.name, self.path = upper.num_ids, upper.name, upper.path
        self.policy, self.fingerprint, self.capacity = upper.policy, upper.fingerprint, upper.capacity
        self.allow_pickle, self.structure = upper.allow_pickle, upper.structure
        self._final_stats: TierStats | None = None

    @property
    def complete(self) -> bool:
        """See `Cache`."""
        return self.upper.complete

    @property
    def uncached_steps(self) -> int:
        """See `Cache`: 0, or more than any pipeline has if this cache is disabled."""
        return max(tier.uncached_steps for tier in self._tiers)

    @property
    def servers(self) -> Any:
        """The tier in servers shared with other hosts (`RedisCache`); None if there is none."""
        return next((tier for tier in self.lower if hasattr(tier, "verify")), None)

    def resident(self, ids: Any) -> Array:
        """See `Cache`."""
        return self.upper.resident(ids)

    def populate(self) -> None:
        """See `Cache`."""
        self.upper.populate()

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, ids: Any) -> list[Any]:
        """See `Cache`. Lower tiers are read sequentially; `begin_read` reads them concurrently."""
        return self.stack.get_many(checked_ids(ids, self.num_ids))

    def begin_read(self, ids: Array, pool: Pool, fetch: Fetch) -> Reading:
        """See `Cache`."""
        return TierReading(self.stack, ids, pool, fetch)

    def aim(self, outs: Sequence[Array]) -> Aim:
        """See `Cache`."""
        return self.upper.aim(outs)

    def gather(self, ids: Any, into: Aim | Sequence[Array]) -> Array:
        """See `Cache`."""
        return self.upper.gather(ids, into)

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any], *, uncached: int = 0) -> Array:
        """See `Cache`. Writes to lower tiers are rejected while their queue is full."""
        wanted = checked_pairs(ids, values, self.num_ids)
        if uncached != self.uncached_steps:
            return np.zeros(len(wanted), bool)
        return self.stack.put_many(wanted, values, uncached)

    def flush(self) -> None:
        """See `Cache`."""
        for tier in self.lower:
            tier.flush()

    def set_scores(self, ids: Any, scores: Any) -> None:
        """See `Cache`: in the upper tier and in servers."""
        self.upper.set_scores(ids, scores)
        if self.servers is not None:
            self.servers.set_scores(ids, scores)

    def drop(self, ids: Any) -> None:
        """See `Cache`. Writes of other processes to lower tiers that are in flight are not dropped.

        Raises `WaitError` if a lock is not free in 2 s.
        """
        wanted = checked_ids(ids, self.num_ids)
        self.flush()
        for tier in self._tiers:
            tier.drop(wanted)

    def uncache_steps(self, count: int) -> bool:
        """See `Cache`: disables this cache on this host, regardless of `count`."""
        used = [tier.uncache_steps(EVERY_STEP) for tier in reversed(self._tiers)]
        return any(used)

    # -- life ---------------------------------------------------------------------------------------------------------

    def count_fetch(self, reads: int, size: int) -> None:
        """See `Cache`."""
        self.upper.count_fetch(reads, size)

    def stats(self) -> TierStats:
        """See `Cache`."""
        if self._final_stats is not None:
            return self._final_stats
        *between, lower = [tier.stats() for tier in self.lower]
        for tier in reversed(between):
            lower = _combined(tier, lower, hits=tier.hits + lower.hits, misses=lower.misses, lower_hits=lower.hits)
        upper = self.upper.stats()
        return _combined(upper, lower, hits=upper.hits, misses=upper.misses, lower_hits=self.upper.lower_hits)

    def close(self) -> None:
        """See `Cache`."""
        if self._final_stats is not None:
            return
        with contextlib.ExitStack() as leave:
            for tier in self._tiers:
                leave.callback(tier.close)
            try:
                self.flush()
            finally:
                self._final_stats = self.stats()

    def __reduce__(self) -> tuple[Any, ...]:
        return TieredCache, (self.upper, *self.lower)


def _combined(tier: CacheStats, lower: CacheStats, *, hits: int, misses: int, lower_hits: int) -> TierStats:
    """The combined counts of `tier` and the tiers below it."""
    own = {field.name: getattr(tier, field.name) for field in fields(CacheStats)}
    own |= {"hits": hits, "misses": misses, "damaged": tier.damaged + lower.damaged}
    return TierStats(**own, lower_hits=lower_hits, lower=lower)
