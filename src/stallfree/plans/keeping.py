"""What a cache of the policy "importance" is to keep while a plan is served: the scores of its records.

The paper's H-cache (Chen et al., "iCACHE", HPCA 2023, algorithm 1) is a min-heap by importance; when a new H-list
comes, a shadow heap is built beside the old one. Here the scores of all samples are set at once, and the queue of
victims is sorted anew when the next one is looked for, so there is nothing to wait for and nothing to build beside.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree.errors import WaitError
from stallfree.plans.draws import generator
from stallfree.plans.rules import Draw

Array = npt.NDArray[Any]

FRESH = 1e9
"""Score of a record that is still to be served in this epoch and must not go before: above all others."""


class ScoredCache(Protocol):
    """A cache whose records of lowest score go first."""

    def resident(self, ids: Any) -> Array:
        """Which of `ids` are in it, as an array of bool."""

    def set_scores(self, ids: Any, scores: Any) -> None:
        """How much each of `ids` is worth."""


class _Telling:
    """Sets scores. What cannot be told, because writers of the cache hold its lock for long, is told the next time."""

    def __init__(self, cache: ScoredCache) -> None:
        self._cache = cache
        self._late: list[tuple[Array, Array]] = []

    def tell(self, ids: Array, scores: Array) -> None:
        """Let `scores` be those of `ids`, after what could not be told before."""
        late, self._late = self._late, []
        ids, scores = (np.concatenate(column) for column in zip(*late, (ids, scores), strict=True))
        try:
            self._cache.set_scores(ids, scores)
        except WaitError:
            self._late = [(ids, scores)]


class Rotating:
    """What the epoch fetches comes in, and in its place goes any record that was served already.

    So the residents change slowly, at no cost beside what the plan fetches anyway; none is lost before its turn, and
    each one that was served is as likely to go as the next.

    Attributes:
        seed: of the order in which they go. Set before the first epoch.
    """

    def __init__(self, cache: ScoredCache) -> None:
        self.seed = 0
        self._telling = _Telling(cache)
        self._resident: Array | None = None  # when the epoch began
        self._luck = np.empty(0)

    def begin(self, draw: Draw, importance: Array, *, first: bool = True) -> None:
        """A new epoch: nothing that is resident has been served. Only the `first` rank of a host tells the cache."""
        count = len(draw.resident)
        self._resident = draw.resident
        self._luck = generator(self.seed, draw.plan.epoch, 2).random(count)
        if first:
            self._telling.tell(np.arange(count), np.where(draw.resident, FRESH, 1.0))

    def served(self, ids: Array) -> None:
        """These may go now, if they were resident when the epoch began."""
        if self._resident is None:  # an epoch that another process began
            return
        old = ids[self._resident[ids]]
        if len(old):
            self._telling.tell(old, self._luck[old])


class Ranked:
    """The most important samples stay; who is in the plan stays until served, so that nobody is fetched for nothing."""

    def __init__(self, cache: ScoredCache) -> None:
        self._telling = _Telling(cache)
        self._importance = np.empty(0)
        self._low: Array | None = None
        self._waiting = np.empty(0, bool)

    def begin(self, draw: Draw, importance: Array, *, first: bool = True) -> None:
        """A new epoch. Only the `first` rank of a host tells the cache; each tells it later what was served."""
        count = len(draw.low)
        self._low = draw.low
        self._importance = importance
        self._waiting = np.zeros(count, bool)
        self._waiting[draw.plan.ids] = True
        self._waiting &= draw.resident
        if first:
            self._telling.tell(np.arange(count), np.where(self._waiting, FRESH, importance))

    def served(self, ids: Array) -> None:
        """These may go now, L-samples too that came in since."""
        if self._low is None:  # an epoch that another process began
            return
        done = ids[self._waiting[ids] | self._low[ids]]
        if len(done):
            self._telling.tell(done, self._importance[done])
