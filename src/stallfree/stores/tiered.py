"""Tiers of one cache: memory over a local disk, over servers that other hosts use too, or over both.

Each tier is slower and larger than the one above. The upper one is a `SampleCache`; what it lacks of a batch is read
from the tiers below by the threads that fetch, as soon as a worker has the ids of the batch. Lower tiers write in the
background.

A lower tier says whether it is `inclusive`. One that is gets every sample; another only what the tiers above have no
room for, so that the room of both adds up. A sample that was read from a tier is stored in those above, as far as they
have room.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree.cache import MISS, Aim, SampleCache
from stallfree.cache.checks import EVERY_STEP
from stallfree.errors import InputError
from stallfree.pipeline.codec import encode
from stallfree.pipeline.structure import Structure
from stallfree.stats import CacheStats, TierStats
from stallfree.stores.write_behind import Record

Array = npt.NDArray[Any]

_FULL_SECONDS = 1.0
"""Pause after the upper tier has had no room for samples of the tiers below."""


class LowerTier(Protocol):
    """A tier below another one. An `OSError` of `read`, `put_records` and `moved_up` costs hits only.

    Ids are arrays of int64 within the data set.

    Attributes:
        allow_pickle: whether it stores samples that the codec does not know.
        inclusive: whether it is given every sample now, also those that a tier above holds.
        takes: whether it may store samples now: it is not full, and it works.
        uncached_steps: see `SampleCache.uncached_steps`. 0, or `EVERY_STEP`: this tier is not used any more.
    """

    allow_pickle: bool

    @property
    def inclusive(self) -> bool: ...
    @property
    def takes(self) -> bool: ...
    @property
    def uncached_steps(self) -> int: ...

    def known(self, ids: Array) -> Array:
        """Which of `ids` are believed to be there, without a request: an array of bool."""

    def parts(self, ids: Array) -> list[Array]:
        """Those of `ids` that are worth a request, in pieces that several threads `read` at the same time."""

    def read(self, ids: Array) -> list[Any]:
        """The samples of `ids`, one or more pieces; `MISS` for those that are not there. Counts hits and misses.

        They may share memory, which lives as long as any of them.
        """

    def put_records(self, ids: Array, records: Sequence[Record]) -> Array:
        """Write `records` in the background; which of them were taken or are there. The bytes are copied."""

    def settle(self, ids: Array) -> object:
        """Wait until none of `ids` is on its way there from a process of this host, for 250 ms at most."""

    def moved_up(self, ids: Array) -> None:
        """Note that a tier above holds `ids` now: one that is not `inclusive` drops them."""

    def drop(self, ids: Array) -> None:
        """Remove the records of `ids`."""

    def flush(self) -> None:
        """Wait until all that this process has handed over is written."""

    def stats(self) -> CacheStats:
        """The counts over all processes of this host; after `close`, those of that moment."""

    def uncache_steps(self, count: int) -> bool:
        """Do not use this tier any more, on this host, whatever `count` is. Returns whether it was used until now."""

    def close(self) -> None:
        """Write what was handed over, and leave."""


class TieredCache:
    """Tiers as one cache, as one process sees it. Has the methods of `SampleCache` that loaders use.

    `resident`, `structure`, `complete`, `aim` and `gather` concern the upper tier only. Samples of lower tiers are read
    with `read`, one of the `parts` at a time, so that several threads can read.

    Args:
        upper: the first tier, with any policy.
        lower: the tiers below, fastest first: one or more.

    Attributes:
        num_ids: samples of the data set.
        name: of the upper tier.
        policy: of the upper tier.
        fingerprint: identifies the samples.
        path: the folder of the upper tier.
        capacity: bytes of the upper tier.
        allow_pickle: whether samples that the codec does not know are pickled.
    """

    def __init__(self, upper: SampleCache, *lower: LowerTier) -> None:
        self.upper, self.lower = upper, lower
        self.num_ids, self.name, self.path = upper.num_ids, upper.name, upper.path
        self.policy, self.fingerprint, self.capacity = upper.policy, upper.fingerprint, upper.capacity
        self.allow_pickle = upper.allow_pickle
        self._full_until = 0.0
        self._last: TierStats | None = None

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def structure(self) -> Structure | None:
        """The structure that all samples share, or None if there is none."""
        return self.upper.structure

    @property
    def complete(self) -> bool:
        """Whether all samples are in the upper tier."""
        return self.upper.complete

    def resident(self, ids: Any) -> Array:
        """Which of `ids` (integers) are in the upper tier: an array of bool."""
        return self.upper.resident(ids)

    @property
    def servers(self) -> Any:
        """The tier in servers that other hosts use too (`RedisCache`); None if there is none."""
        return next((tier for tier in self.lower if hasattr(tier, "verify")), None)

    def populate(self) -> None:
        """As `SampleCache.populate`."""
        self.upper.populate()

    def stats(self) -> TierStats:
        """The counts over all processes; after `close`, those of that moment."""
        if self._last is not None:
            return self._last
        *between, lower = [tier.stats() for tier in self.lower]
        for tier in reversed(between):
            lower = _over(tier, lower, hits=tier.hits + lower.hits, misses=lower.misses, lower_hits=lower.hits)
        upper = self.upper.stats()
        return _over(upper, lower, hits=upper.hits, misses=upper.misses, lower_hits=self.upper.other_hits)

    def count_fetch(self, reads: int, size: int) -> None:
        """Count `reads` fetches from the source that brought `size` bytes."""
        self.upper.count_fetch(reads, size)

    def set_scores(self, ids: Any, scores: Any) -> None:
        """As `SampleCache.set_scores`, for the upper tier and the one in servers."""
        self.upper.set_scores(ids, scores)
        if self.servers is not None:
            self.servers.set_scores(ids, scores)

    @property
    def uncached_steps(self) -> int:
        """See `SampleCache.uncached_steps`. 0, or `EVERY_STEP`: this kind of cache is then not used any more."""
        return max([self.upper.uncached_steps, *[tier.uncached_steps for tier in self.lower]])

    def uncache_steps(self, count: int) -> bool:
        """Do not use this cache any more, on this host; whether it was used until now. See `SampleCache`."""
        used = [tier.uncache_steps(EVERY_STEP) for tier in self.lower]
        return self.upper.uncache_steps(EVERY_STEP) or any(used)

    # -- reading ------------------------------------------------------------------------------------------------------

    def parts(self, ids: Array) -> list[Array]:
        """Those of the distinct `ids` that are worth a `read`, in pieces that several threads read at the same time."""
        parts: list[Array] = []
        for tier in self.lower:
            found = tier.parts(ids)
            parts += found
            ids = np.setdiff1d(ids, _joined(found), assume_unique=True)
        return parts

    def read(self, ids: Array) -> list[Any]:
        """The samples of `ids`, which are one of the `parts`; `MISS` for those that no lower tier has.

        They may share memory, which lives as long as any of them.
        """
        return self._read(ids, _worth_reading)[0]

    def settle(self, ids: Array) -> Array:
        """Wait until none of `ids` is on its way to a tier; which of them no tier is known to hold, as bools."""
        for tier in self.lower:
            tier.settle(ids)
        return ~(self.upper.resident(ids) | self._known(ids))

    def get_here(self, ids: Array) -> list[Any]:
        """The samples of `ids`, `MISS` for those that no tier is known to hold."""
        return self._get(ids, lambda tier, left: left[tier.known(left)])

    def get_many(self, ids: Any) -> list[Any]:
        """The samples of `ids`, `MISS` for those that no tier holds. Raises `InputError` for ids out of range."""
        return self._get(self.upper.checked(ids), _worth_reading)

    def get(self, id: int) -> Any:
        """One sample, or `MISS`."""
        return self.get_many([id])[0]

    def aim(self, outs: Sequence[Array]) -> Aim:
        """As `SampleCache.aim`."""
        return self.upper.aim(outs)

    def gather(self, ids: Any, into: Aim | Sequence[Array]) -> Array:
        """As `SampleCache.gather`: out of the upper tier."""
        return self.upper.gather(ids, into)

    def _known(self, ids: Array) -> Array:
        """Which of `ids` a lower tier is known to hold: an array of bool."""
        known: Array = np.logical_or.reduce([tier.known(ids) for tier in self.lower])
        return known

    def _get(self, ids: Array, choose: Callable[[LowerTier, Array], Array]) -> list[Any]:
        """The samples of `ids` out of any tier; of the lower ones, those that `choose` selects are read."""
        values: list[Any] = [MISS] * len(ids)
        at = np.flatnonzero(self.upper.resident(ids))
        _fill(values, at, self.upper.get_many(ids[at]))
        left = _missing(values)
        if not len(left):
            return values
        self.settle(ids[left])
        found, counted = self._read(ids[left], choose)
        _fill(values, left, found)
        vanished = len(left) - (len(ids) - len(at))  # the upper tier has counted these as misses
        self.upper.count_others(0, len(left) - vanished - counted)
        return values

    def _read(self, ids: Array, choose: Callable[[LowerTier, Array], Array]) -> tuple[list[Any], int]:
        """The samples of `ids` that were below, including those that moved up meanwhile; and how many are counted."""
        values: list[Any] = [MISS] * len(ids)
        if len(set(ids.tolist())) < len(ids):  # each of several equal ids gets a value of its own
            _, first = np.unique(ids, return_index=True)
            again = np.setdiff1d(np.arange(len(ids)), first)
            (once, counted), (twice, others) = self._read(ids[first], choose), self._read(ids[again], choose)
            _fill(values, first, once)
            _fill(values, again, twice)
            return values, counted + others
        left = np.arange(len(ids))
        for level, tier in enumerate(self.lower):
            chosen = set(choose(tier, ids[left]).tolist()) if len(left) else ()
            if chosen:
                at = left[[id in chosen for id in ids[left].tolist()]]
                with contextlib.suppress(OSError):
                    _fill(values, at, tier.read(ids[at]))
                self._move_up(level, ids, values, at)
            left = _missing(values)
        hits = len(ids) - len(left)
        self.upper.count_others(hits, 0)
        moved = left[self.upper.resident(ids[left])]
        if len(moved):
            _fill(values, moved, self.upper.get_many(ids[moved]))
        return values, hits + len(moved)

    def _move_up(self, level: int, ids: Array, values: Sequence[Any], at: Array) -> None:
        """Store what was read from the lower tier number `level` in the tiers above it, as their policies say."""
        at = at[[values[position] is not MISS for position in at.tolist()]]
        if not len(at):
            return
        ids, found = ids[at], [values[position] for position in at.tolist()]
        taken = np.zeros(len(ids), bool)
        if self.policy.evicts or not (self.upper.full or time.monotonic() < self._full_until):
            taken = self.upper.put_many(ids, found)
            if taken.any():
                with contextlib.suppress(OSError):
                    self.lower[level].moved_up(ids[taken])
            else:
                self._full_until = time.monotonic() + _FULL_SECONDS
        if any(tier.takes for tier in self.lower[:level]):
            self._hand_down(self.lower[:level], ids, self._encoded(found), taken)

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any]) -> Array:
        """Store `values` as the samples of `ids`; which of them were taken by any tier, as an array of bool.

        What goes to lower tiers is copied and written in the background. While there is too much of it on its way, it
        is not taken. Raises like `SampleCache.put_many`.
        """
        wanted = self.upper.checked(ids)
        if len(wanted) != len(values):
            raise InputError(f"put_many was given {len(wanted)} ids and {len(values)} values: give one for each")
        if not any(tier.takes for tier in self.lower):
            return self.upper.put_many(wanted, values) | self._known(wanted)
        records = self._encoded(values)
        if self.policy.evicts:  # the tiers below come first: what the upper one takes may be evicted at once
            below = self._hand_down(self.lower, wanted, records, np.zeros(len(wanted), bool))
            return self.upper.put_records(wanted, records) | below
        return self._hand_down(self.lower, wanted, records, self.upper.put_records(wanted, records))

    def put(self, id: int, value: Any) -> bool:
        """Store one sample; whether it was taken."""
        return bool(self.put_many([id], [value])[0])

    def _encoded(self, values: Sequence[Any]) -> list[Record]:
        return [encode(value, allow_pickle=self.allow_pickle) for value in values]

    def _hand_down(self, tiers: Sequence[LowerTier], ids: Array, records: list[Record], taken: Array) -> Array:
        """Hand records to lower tiers, of which `taken` are in tiers above; which are taken then, as bools."""
        for tier in tiers:
            at = np.arange(len(ids)) if tier.inclusive else np.flatnonzero(~taken)
            if len(at) and tier.takes:
                with contextlib.suppress(OSError):
                    taken[at] |= tier.put_records(ids[at], [records[position] for position in at.tolist()])
        return taken | self._known(ids)

    def flush(self) -> None:
        """Wait until all that this process has handed to lower tiers is written."""
        for tier in self.lower:
            tier.flush()

    def drop(self, ids: Any) -> None:
        """Make `ids` absent in all tiers, but for what other processes have on its way to lower ones.

        Raises `WaitError` if a lock is not free in 2 s.
        """
        wanted = self.upper.checked(ids)
        self.flush()
        self.upper.drop(wanted)
        for tier in self.lower:
            tier.drop(wanted)

    def clear(self) -> None:
        """Drop all records of all tiers, as `drop` does."""
        self.drop(np.arange(self.num_ids))

    # -- the life of it -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is on its way to lower tiers, and leave all tiers. May be called twice."""
        if self._last is not None:
            return
        with contextlib.ExitStack() as leave:
            leave.callback(self.upper.close)
            for tier in self.lower:
                leave.callback(tier.close)
            try:
                self.flush()
            finally:
                self._last = self.stats()

    def __reduce__(self) -> tuple[Any, ...]:
        return TieredCache, (self.upper, *self.lower)

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _worth_reading(tier: LowerTier, ids: Array) -> Array:
    return _joined(tier.parts(ids))


def _joined(parts: Sequence[Array]) -> Array:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _missing(values: Sequence[Any]) -> Array:
    """The positions of `MISS`."""
    return np.array([at for at, value in enumerate(values) if value is MISS], np.int64)


def _fill(values: list[Any], at: Array, found: Sequence[Any]) -> None:
    """Put `found` into `values` at the positions `at`."""
    for position, value in zip(at.tolist(), found, strict=True):
        values[position] = value


def _over(tier: CacheStats, lower: CacheStats, *, hits: int, misses: int, lower_hits: int) -> TierStats:
    """The counts of `tier` and of those below it."""
    own = {field.name: getattr(tier, field.name) for field in fields(CacheStats)}
    own |= {"hits": hits, "misses": misses, "damaged": tier.damaged + lower.damaged}
    return TierStats(**own, lower_hits=lower_hits, lower=lower)
