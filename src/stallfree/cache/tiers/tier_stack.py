"""Tiers as a stack: reads samples from any of them, and moves samples between them.

Each tier is slower and larger than the one above. A tier that is `inclusive` is given every sample; any other only
those that the tiers above have no room for, so that their capacities add up. A sample that was read from a tier is
stored in those above, as far as they have room.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree.cache import MISS, Cache
from stallfree.cache.tiers.reading import fill, missing
from stallfree.cache.tiers.write_behind import Record
from stallfree.pipeline.codec import encode
from stallfree.stats import CacheStats

Array = npt.NDArray[Any]

_FULL_SECONDS = 1.0
"""Pause after the upper tier has had no room for samples of the tiers below."""


class UpperTier(Cache, Protocol):
    """A cache that can be above others: it takes encoded samples, and counts for all tiers."""

    @property
    def full(self) -> bool:
        """Whether it would store nothing new."""

    @property
    def other_hits(self) -> int:
        """The hits that `count_others` has counted, over all processes."""

    def put_records(self, ids: Any, records: Sequence[Record], *, uncached: int = 0) -> Array:
        """As `put_many`, for samples that are encoded."""

    def count_others(self, hits: int, misses: int) -> None:
        """Count samples that were requested from lower tiers."""


class LowerTier(Protocol):
    """A tier below another one. An `OSError` of `read`, `put_records` and `moved_up` costs hits only.

    Methods without a description are those of a `Cache`. Ids are arrays of int64 within the data set, each of them
    once.
    """

    @property
    def allow_pickle(self) -> bool: ...

    @property
    def inclusive(self) -> bool:
        """Whether it is given every sample now, also those that a tier above holds."""

    @property
    def takes(self) -> bool:
        """Whether it may store samples now: it is not full, and it works."""

    @property
    def uncached_steps(self) -> int: ...

    def known(self, ids: Array) -> Array:
        """Returns which of `ids` are believed to be there, without a request: an array of bool."""

    def parts(self, ids: Array) -> list[Array]:
        """See `reading.ReadInParts`."""

    def read(self, ids: Array) -> list[Any]:
        """Returns the samples of `ids`, one or more parts; `MISS` for those that are not there. Counts hits and misses.

        They may share memory, which lives as long as any of them.
        """

    def put_records(self, ids: Array, records: Sequence[Record]) -> Array:
        """Writes `records` in the background. Returns which were taken or are there. The bytes are copied."""

    def drain(self, ids: Array) -> object:
        """Waits until none of `ids` is on its way there from a process of this host, for 250 ms at most."""

    def moved_up(self, ids: Array) -> None:
        """Notes that a tier above holds `ids` now: one that is not `inclusive` drops them."""

    def drop(self, ids: Array) -> None: ...
    def flush(self) -> None: ...
    def stats(self) -> CacheStats: ...
    def uncache_steps(self, count: int) -> bool: ...
    def close(self) -> None: ...


Choose = Callable[[LowerTier, Array], Array]
"""Which of some ids to read from a tier: an array of bool."""


class TierStack:
    """Reads samples from any tier, and stores in the tiers above what was read below.

    Ids are arrays of int64 within the data set.

    Args:
        upper: the first tier.
        lower: the tiers below, fastest first.
    """

    def __init__(self, upper: UpperTier, lower: Sequence[LowerTier]) -> None:
        self._upper, self._lower = upper, lower
        self._full_until = 0.0

    def resident(self, ids: Any) -> Array:
        """See `Cache`."""
        return self._upper.resident(ids)

    def known(self, ids: Array) -> Array:
        """Which of `ids` a lower tier is known to hold: an array of bool."""
        known: Array = np.logical_or.reduce([tier.known(ids) for tier in self._lower])
        return known

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, ids: Array) -> list[Any]:
        """The samples of `ids`, `MISS` for those that no tier holds. Lower tiers are read one after the other."""
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
        """The samples of `ids` out of any tier; of each lower one, those that `choose` selects are read."""
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
        self._upper.count_others(0, len(once) - vanished - counted)
        again = np.setdiff1d(left, once)  # each of several equal ids gets a value of its own
        if len(again):
            fill(values, again, self._get(ids[again], choose))
        return values

    def _read(self, ids: Array, choose: Choose) -> tuple[list[Any], int]:
        """The samples of `ids` that were below, including those that moved up meanwhile; and how many are counted."""
        values: list[Any] = [MISS] * len(ids)
        left = np.arange(len(ids))
        for level, tier in enumerate(self._lower):
            at = left[choose(tier, ids[left])]
            if len(at):
                with contextlib.suppress(OSError):
                    fill(values, at, tier.read(ids[at]))
                self._move_up(level, ids, values, at)
                left = missing(values)
        hits = len(ids) - len(left)
        self._upper.count_others(hits, 0)
        moved = left[self._upper.resident(ids[left])]
        fill(values, moved, self._upper.get_many(ids[moved]))
        return values, hits + len(moved)

    # -- moving -------------------------------------------------------------------------------------------------------

    def _move_up(self, level: int, ids: Array, values: Sequence[Any], at: Array) -> None:
        """Store what was read from the lower tier number `level` in the tiers above it, as their policies say."""
        at = at[[values[position] is not MISS for position in at.tolist()]]
        if not len(at):
            return
        upper, ids, found = self._upper, ids[at], [values[position] for position in at.tolist()]
        taken = np.zeros(len(ids), bool)
        if upper.policy.evicts or not (upper.full or time.monotonic() < self._full_until):
            taken = upper.put_many(ids, found)
            if taken.any():
                with contextlib.suppress(OSError):
                    self._lower[level].moved_up(ids[taken])
            else:
                self._full_until = time.monotonic() + _FULL_SECONDS
        if any(tier.takes for tier in self._lower[:level]):
            records = [encode(value, allow_pickle=upper.allow_pickle) for value in found]
            self._hand_down(self._lower[:level], ids, records, taken)

    def put_many(self, ids: Array, values: Sequence[Any], uncached: int) -> Array:
        """See `Cache`. What goes to lower tiers is not taken while there is too much of it on its way."""
        upper = self._upper
        if not any(tier.takes for tier in self._lower):
            return upper.put_many(ids, values, uncached=uncached) | self.known(ids)
        records = [encode(value, allow_pickle=upper.allow_pickle) for value in values]
        if upper.policy.evicts:  # the tiers below come first: what the upper one takes may be evicted at once
            below = self._hand_down(self._lower, ids, records, np.zeros(len(ids), bool))
            return upper.put_records(ids, records, uncached=uncached) | below
        return self._hand_down(self._lower, ids, records, upper.put_records(ids, records, uncached=uncached))

    def _hand_down(self, tiers: Sequence[LowerTier], ids: Array, records: list[Record], taken: Array) -> Array:
        """Hand records to lower tiers, of which `taken` are in tiers above. Returns which are taken then, as bools."""
        for tier in tiers:
            at = np.arange(len(ids)) if tier.inclusive else np.flatnonzero(~taken)
            if len(at) and tier.takes:
                with contextlib.suppress(OSError):
                    taken[at] |= tier.put_records(ids[at], [records[position] for position in at.tolist()])
        return taken | self.known(ids)


def _worth_reading(tier: LowerTier, ids: Array) -> Array:
    return np.isin(ids, _joined(tier.parts(ids)))


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate([np.empty(0, np.int64), *parts])
