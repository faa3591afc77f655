"""The serving order of a plan when L-samples are missing from the cache.

Serving does not wait for a missing sample of low importance (an *L-sample*), but serves a resident one instead. Chen et
al., "iCACHE", HPCA 2023, section IV-C, serve any unused one and drop the missing one ("substitute"). By default, the
resident one is taken from the rest of the plan and exchanged with the missing one ("swap"), so each sample of the plan
is still served exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ON_MISS = ("swap", "substitute", "fetch")

_PATIENCE = 16
"""Batches until the next search for residents after one found none."""


class Flags(Protocol):
    """Flags of requested samples for the process that loads them into the cache; see `importance.packager`."""

    def served(self, ids: Array) -> None:
        """Mark `ids` as no longer pending."""

    def missed(self, ids: Array) -> None:
        """Mark `ids` as requested but not resident; they are deferred."""


class Residents(Protocol):
    """The part of a cache that serving uses."""

    def resident(self, ids: Any) -> Array:
        """Which of `ids` are resident, as an array of bool."""


class Serving:
    """The batches of one epoch. Can be iterated once.

    Args:
        batches: the ids of each batch, as planned.
        low: bool per id: the L-samples.
        cache: reports residency.
        on_miss: "swap", "substitute" or "fetch" (serve the missing one).
        rng: selects the substitutes.
        flags: receives served and missed ids; or None.
        excluded: ids that other ranks of the job serve; they are never chosen here.

    Attributes:
        high_requests, high_hits: requests for H-samples, and those that were resident.
        low_requests, low_hits: the same for L-samples, before substitution.
        swaps: L-samples that were served earlier, in exchange for a missing one that is served later.
        substitutions: L-samples that were served instead of a missing one. If the substitute was in the plan itself,
            the missing one is served in its place later, so that the epoch keeps its length; else it is left out.
    """

    def __init__(
        self,
        batches: Sequence[Array],
        low: Array,
        cache: Residents,
        on_miss: str,
        rng: np.random.Generator,
        flags: Flags | None = None,
        excluded: Array | None = None,
    ) -> None:
        self._sizes = [len(ids) for ids in batches]
        self._queue = np.concatenate([np.empty(0, np.int64), *batches])
        self._low, self._cache, self._on_miss, self._rng, self._flags = low, cache, on_miss, rng, flags
        self._pending = np.zeros(len(low), bool)
        self._pending[self._queue] = True
        self._used = np.zeros(len(low), bool)
        if excluded is not None:
            self._used[excluded] = True
        self._deferred: list[Array] = []
        self._pool = np.empty(0, np.int64)  # candidates for substitution, if they are still pending and resident
        self._patience = 0
        self.high_requests = self.high_hits = self.low_requests = self.low_hits = 0
        self.swaps = self.substitutions = 0

    def __iter__(self) -> Iterator[Array]:
        for size in self._sizes:
            ids = self._next(size)
            self._used[ids] = True
            self._pending[ids] = False
            if self._flags is not None:
                self._flags.served(ids)
            yield ids

    def _next(self, size: int) -> Array:
        ids = self._take(size)
        there, low = self._cache.resident(ids), self._low[ids]
        self.low_requests += int(low.sum())
        self.low_hits += int((low & there).sum())
        self.high_requests += int((~low).sum())
        self.high_hits += int((~low & there).sum())
        missing = np.flatnonzero(low & ~there)
        if len(missing) == 0 or self._on_miss == "fetch":
            return ids
        self._used[ids] = True  # not to be chosen for this batch
        others, planned = self._choose(len(missing))
        replaced = ids[missing[: len(others)]]
        self._used[replaced] = False
        if planned.any():
            later = replaced[planned]
            self._pending[later] = True
            self._deferred.append(later)
            if self._flags is not None:
                self._flags.missed(later)
        self.swaps += int(planned.sum()) if self._on_miss == "swap" else 0
        self.substitutions += len(others) if self._on_miss == "substitute" else 0
        served: Array = ids.copy()
        served[missing[: len(others)]] = others
        return served

    def _take(self, size: int) -> Array:
        """The next `size` ids of the queue that are pending."""
        found: list[Array] = []
        need = size
        while need:
            if len(self._queue) == 0:
                self._queue, self._deferred = np.concatenate(self._deferred), []
            step = self._queue[: need + 64]
            good = np.flatnonzero(self._pending[step])[:need]
            end = len(step) if len(good) < need else int(good[-1]) + 1
            self._queue = self._queue[end:]
            found.append(step[good])
            self._pending[step[good]] = False  # an id that was deferred twice is in the queue twice
            need -= len(good)
        taken: Array = np.concatenate([np.empty(0, np.int64), *found])
        return taken

    def _choose(self, count: int) -> tuple[Array, Array]:
        """Up to `count` residents to serve now, and which of them are in the rest of the plan."""
        chosen: list[Array] = []
        planned: list[Array] = []
        filled = False
        while count:
            if len(self._pool) == 0:
                if filled or not self._fill():
                    break
                filled = True
            some, self._pool = self._pool[:count], self._pool[count:]
            some = some[self._may(some)]
            some = some[self._cache.resident(some)]
            planned.append(self._pending[some])
            self._pending[some] = False
            self._used[some] = True
            chosen.append(some)
            count -= len(some)
        return np.concatenate([np.empty(0, np.int64), *chosen]), np.concatenate([np.empty(0, bool), *planned])

    def _may(self, ids: Array) -> Array:
        """Which ids may be substitutes: "swap": the pending ones; else all that were not used yet."""
        may: Array = self._pending[ids] if self._on_miss == "swap" else ~self._used[ids]
        return may

    def _fill(self) -> bool:
        """Scan all samples for substitutes; return whether there are any. Too slow to run for every batch."""
        if self._patience > 0:
            self._patience -= 1
            return False
        candidates = np.flatnonzero(self._low)
        candidates = candidates[self._may(candidates)]
        candidates = candidates[self._cache.resident(candidates)]
        if self._on_miss == "substitute":  # first those that are not in the plan
            candidates = candidates[np.argsort(self._pending[candidates] + self._rng.random(len(candidates)))]
        else:
            candidates = candidates[self._rng.permutation(len(candidates))]
        self._pool = candidates
        self._patience = 0 if len(candidates) else _PATIENCE
        return len(candidates) > 0
