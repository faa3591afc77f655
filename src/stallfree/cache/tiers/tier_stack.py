"""A stack of tiers: reads samples from any tier, and moves samples between tiers.

Each tier is slower and larger than the one above. An `inclusive` tier receives every sample; any other tier only those
that do not fit into the tiers above, so that their capacities add up. A sample read from a tier is stored in the tiers
above if they have space.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree.cache import MISS, SampleCache
from stallfree.cache.tiers.reading import fill, missing
from stallfree.cache.tiers.write_behind import Record
from stallfree.pipeline.codec import encode
from stallfree.stats import CacheStats

Array = npt.NDArray[Any]

_FULL_SECONDS = 1.0
"""Pause after the upper tier had no space for samples of lower tiers."""


class LowerTier(Protocol):
    """A tier below another one. An `OSError` of `read`, `put_records` and `promoted` only reduces hits.

    Methods without a description are as in `Cache`. Ids are arrays of distinct int64 within the data set.
    """

    @property
    def allow_pickle(self) -> bool: ...

    @property
    def inclusive(self) -> bool:
        """Whether it currently receives every sample, including those in tiers above."""

    @property
    def accepts(self) -> bool:
        """Whether it can currently store samples: it is not full, and it works."""

    @property
    def uncached_steps(self) -> int: ...

    def known(self, ids: Array) -> Array:
        """Returns which of `ids` are assumed resident, without a request: an array of bool."""

    def parts(self, ids: Array) -> list[Array]:
        """See `reading.ReadInParts`."""

    def read(self, ids: Array) -> list[Any]:
        """Returns the samples of `ids`, one or more parts; `MISS` for absent ones. Counts hits and misses.

        They may share memory, which is freed with the last of them.
        """

    def put_records(self, ids: Array, records: Sequence[Record]) -> Array:
        """Writes `records` in the background. Returns which were accepted or are resident. The bytes are copied."""

    def drain(self, ids: Array) -> object:
        """Waits, for 250 ms at most, for writes of `ids` by processes of this host."""

    def promoted(self, ids: Array) -> None:
        """Notifies the tier that a tier above now holds `ids`: a tier that is not `inclusive` drops them."""

    def drop(self, ids: Array) -> None: ...
    def flush(self) -> None: ...
    def stats(self) -> CacheStats: ...
    def uncache_steps(self, count: int) -> bool: ...
    def close(self) -> None: ...


Choose = Callable[[LowerTier, Array], Array]
"""Selects the ids to read from a tier: an array of bool."""


class TierStack:
    """Reads samples from any tier, and stores samples read from lower tiers in those above.

    Ids are arrays of int64 within the data set.

    Args:
        upper: the first tier.
        lower: the tiers below, fastest first.
    """

    def __init__(self, upper: SampleCache, lower: Sequence[LowerTier]) -> None:
        self._upper, self._lower = upper, lower
        self._full_until = 0.0

    def resident(self, ids: Any) -> Array:
        """See `Cache`."""
        return self._upper.resident(ids)

    def known(self, ids: Array) -> Array:
        """Which of `ids` a lower tier is assumed to hold: an array of bool."""
        known: Array = np.logical_or.reduce([tier.known(ids) for tier in self._lower])
        return known

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, ids: Array) -> list[Any]:
        """The samples of `ids`, `MISS` for those in no tier. Lower tiers are read sequentially."""
        return self._get(ids, _worth_reading)

    def get_known(self, ids: Array) -> list[Any]:
        """See `reading.ReadInParts`."""
        return self._get(ids, lambda tier, left: tier.known(left))

    def parts(self, ids: Array) -> list[Array]:
        """See `reading.ReadInParts`."""
        parts: list[Array] = []
        for tier in self._lower:
            found = tier.parts(ids)
            parts += found
            ids = np.setdiff1d(ids, _joined(found), assume_unique=True)
        return parts

    def read(self, ids: Array) -> list[Any]:
        """See `reading.ReadInParts`."""
        return self._read(ids, _worth_reading)[0]

    def drain(self, ids: Array) -> Array:
        """See `reading.ReadInParts`."""
        for tier in self._lower:
            tier.drain(ids)
        return ~(self._upper.resident(ids) | self.known(ids))

    def _get(self, ids: Array, choose: Choose) -> list[Any]:
        """The samples of `ids` from any tier; `choose` selects the ids to read from each lower tier."""
        values: list[Any] = [MISS] * len(ids)
        at = np.flatnonzero(self._upper.resident(ids))
        fill(values, at, self._upper.get_many(ids[at]))
        left = missing(values)
        if not len(left):
            return values
        vanished = len(left) - (len(ids) - len(at))  # the upper tier has counted these as misses
        once = left[np.unique(ids[left], return_index=True)[1]]
        self.drain(ids[once])
        found, counted = self._read(ids[once], choose)
        fill(values, once, found)
        self._upper.count_lower(0, len(once) - vanished - counted)
        again = np.setdiff1d(left, once)  # equal ids get separate values
        if len(again):
            fill(values, again, self._get(ids[again], choose))
        return values

    def _read(self, ids: Array, choose: Choose) -> tuple[list[Any], int]:
        """The samples of `ids` from lower tiers, including those promoted in the meantime; and how many are counted."""
        values: list[Any] = [MISS] * len(ids)
        left = np.arange(len(ids))
        for level, tier in enumerate(self._lower):
            at = left[choose(tier, ids[left])]
            if len(at):
                with contextlib.suppress(OSError):
                    fill(values, at, tier.read(ids[at]))
                self._promote(level, ids, values, at)
                left = missing(values)
        hits = len(ids) - len(left)
        self._upper.count_lower(hits, 0)
        moved = left[self._upper.resident(ids[left])]
        fill(values, moved, self._upper.get_many(ids[moved]))
        return values, hits + len(moved)

    # -- moving -------------------------------------------------------------------------------------------------------

    def _promote(self, level: int, ids: Array, values: Sequence[Any], at: Array) -> None:
        """Store samples read from the lower tier number `level` in the tiers above it, subject to their policies."""
        at = at[[values[position] is not MISS for position in at.tolist()]]
        if not len(at):
            return
        upper, ids, found = self._upper, ids[at], [values[position] for position in at.tolist()]
        taken = np.zeros(len(ids), bool)
        if upper.policy.evicts or not (upper.full or time.monotonic() < self._full_until):
            taken = upper.put_many(ids, found)
            if taken.any():
                with contextlib.suppress(OSError):
                    self._lower[level].promoted(ids[taken])
            else:
                self._full_until = time.monotonic() + _FULL_SECONDS
        if any(tier.accepts for tier in self._lower[:level]):
            records = [encode(value, allow_pickle=upper.allow_pickle) for value in found]
            self._write_lower(self._lower[:level], ids, records, taken)

    def put_many(self, ids: Array, values: Sequence[Any], uncached: int) -> Array:
        """See `Cache`. Writes to lower tiers are rejected while their queue is full."""
        upper = self._upper
        if not any(tier.accepts for tier in self._lower):
            return upper.put_many(ids, values, uncached=uncached) | self.known(ids)
        records = [encode(value, allow_pickle=upper.allow_pickle) for value in values]
        if upper.policy.evicts:  # lower tiers first: the upper tier may evict it immediately
            below = self._write_lower(self._lower, ids, records, np.zeros(len(ids), bool))
            return upper.put_records(ids, records, uncached=uncached) | below
        return self._write_lower(self._lower, ids, records, upper.put_records(ids, records, uncached=uncached))

    def _write_lower(self, tiers: Sequence[LowerTier], ids: Array, records: list[Record], taken: Array) -> Array:
        """Write records to lower tiers; returns which are accepted or stored, as bools.

        `taken` marks the records that tiers above have stored.
        """
        for tier in tiers:
            at = np.arange(len(ids)) if tier.inclusive else np.flatnonzero(~taken)
            if len(at) and tier.accepts:
                with contextlib.suppress(OSError):  # only reduces hits
                    taken[at] |= tier.put_records(ids[at], [records[position] for position in at.tolist()])
        return taken | self.known(ids)


def _worth_reading(tier: LowerTier, ids: Array) -> Array:
    return np.isin(ids, _joined(tier.parts(ids)))


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate([np.empty(0, np.int64), *parts])
