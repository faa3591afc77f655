"""The scores that decide what a cache of the policy "importance" keeps while a plan is served.

The paper's H-cache (Chen et al., "iCACHE", HPCA 2023, algorithm 1) is a min-heap by importance, with a shadow heap that
is built for each new H-list. Here the scores of all samples are set at once, and the eviction queue is sorted again at
the next eviction, so no shadow structure is needed.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree.errors import WaitError
from stallfree.frames import users_level
from stallfree.sampling.plans.jobs import Jobs
from stallfree.sampling.plans.probabilities import generator, ranks
from stallfree.sampling.plans.reduce import ranks_of_job, wait_for_all
from stallfree.sampling.plans.sampling_plans import Draw

Array = npt.NDArray[Any]

FRESH = 1e9
"""Score of a record that must not be evicted before it is served in this epoch: above all others."""


class ScoredCache(Protocol):
    """A cache that evicts the records of lowest score first."""

    def set_scores(self, ids: Any, scores: Any) -> None:
        """Set the score of each of `ids`."""


class _Scores:
    """Sets scores. If the writer lock of the cache times out, they are set at the next call."""

    def __init__(self, cache: ScoredCache) -> None:
        self._cache = cache
        self._late: list[tuple[Array, Array]] = []

    def set(self, ids: Array, scores: Array) -> None:
        """Set the scores of `ids`, after those of calls that timed out."""
        late, self._late = self._late, []
        ids, scores = (np.concatenate(column) for column in zip(*late, (ids, scores), strict=True))
        try:
            self._cache.set_scores(ids, scores)
        except WaitError:
            self._late = [(ids, scores)]


class Rotating(_Scores):
    """Admits each fetched sample, and evicts any record that was already served.

    So the residents change slowly, at no cost in addition to the fetches of the plan. No record is evicted before it is
    served, and all served records are equally likely to be evicted.

    Attributes:
        seed: of the eviction order. Set before the first epoch.
    """

    def __init__(self, cache: ScoredCache) -> None:
        super().__init__(cache)
        self.seed = 0
        self._resident: Array | None = None  # at the start of the epoch
        self._luck = np.empty(0)

    def begin(self, draw: Draw, importance: Array, *, first: bool = True) -> None:
        """Begin an epoch, in which no resident has been served yet. Only the `first` rank of a host sets scores."""
        count = len(draw.resident)
        self._resident = draw.resident
        self._luck = generator(self.seed, draw.plan.epoch, 2).random(count)
        if first:
            self.set(np.arange(count), np.where(draw.resident, FRESH, 1.0))

    def served(self, ids: Array) -> None:
        """Make these evictable, if they were resident when the epoch began."""
        if self._resident is None:  # another process began the epoch
            return
        old = ids[self._resident[ids]]
        if len(old):
            self.set(old, self._luck[old])


class Ranked(_Scores):
    """Keeps the most important samples, and those in the plan until they are served, so that no fetch is wasted."""

    def __init__(self, cache: ScoredCache) -> None:
        super().__init__(cache)
        self._importance = np.empty(0)
        self._low: Array | None = None
        self._waiting = np.empty(0, bool)

    def begin(self, draw: Draw, importance: Array, *, first: bool = True) -> None:
        """Begin an epoch. Only the `first` rank of a host sets scores now; each rank does for its served samples."""
        count = len(draw.low)
        self._low = draw.low
        self._importance = importance
        self._waiting = np.zeros(count, bool)
        self._waiting[draw.plan.ids] = True
        self._waiting &= draw.resident
        if first:
            self.set(np.arange(count), np.where(self._waiting, FRESH, importance))

    def served(self, ids: Array) -> None:
        """Make these evictable, including L-samples admitted since the epoch began."""
        if self._low is None:  # another process began the epoch
            return
        done = ids[self._waiting[ids] | self._low[ids]]
        if len(done):
            self.set(done, self._importance[done])


class Retention:
    """Decides what the cache keeps for this job, and for other importance-sampling jobs that use it.

    Args:
        cache: of the policy "importance".
        rotating: whether its residents rotate; else the most important ones stay.
    """

    def __init__(self, cache: Any, rotating: bool) -> None:
        self._cache, self._rotating = cache, rotating
        self._scores = Rotating(cache) if rotating else Ranked(cache)
        self._jobs: Jobs | None = None
        self._warned = False

    def begin(self, draw: Draw, losses: Array, benefit: float, seed: int) -> None:
        """Begin an epoch. The first rank of each host publishes the losses and sets the scores; the others wait."""
        if isinstance(self._scores, Rotating):
            self._scores.seed = seed
        first = ranks_of_job().first_here
        mine = np.zeros(len(losses), np.float32) if self._rotating else ranks(losses)
        jobs = self._jobs_here(len(losses))
        if first:
            if jobs is not None:
                jobs.publish(mine, 0.0 if self._rotating else benefit)
            self._scores.begin(draw, self._importance(mine, jobs))
        wait_for_all()  # no rank stores anything before all caches have the scores
        if not first:
            self._scores.begin(draw, self._importance(mine, jobs), first=False)

    def _jobs_here(self, num_ids: int) -> Jobs | None:
        """The jobs that use the cache, if it has a folder."""
        path = getattr(self._cache, "path", None)
        if self._jobs is None and path is not None:
            self._jobs = Jobs(path, num_ids)
        return self._jobs

    def _importance(self, mine: Array, jobs: Jobs | None) -> Array:
        """The importance of each sample to the jobs that use the cache."""
        worth, count = (mine, 0) if jobs is None else jobs.combined()
        if not count:
            return mine
        if self._rotating and count > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"{count} jobs use this cache with importance, and plan='unbiased' lets its residents rotate, which is "
                "for one job at a time: each moves what the others keep. Give the cache another name, or "
                "policy='minio'",
                RuntimeWarning,
                stacklevel=users_level(),
            )
        return worth

    def served(self, ids: Array) -> None:
        """Make the delivered `ids` evictable."""
        self._scores.served(ids)

    def close(self) -> None:
        """Unregister this job from the cache. It is registered again when another epoch begins."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None
