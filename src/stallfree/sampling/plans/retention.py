"""What a cache of the policy "importance" keeps while a plan is served: the scores of its records.

The paper's H-cache (Chen et al., "iCACHE", HPCA 2023, algorithm 1) is a min-heap by importance; when a new H-list
comes, a shadow heap is built beside the old one. Here the scores of all samples are set at once, and the queue of
victims is sorted anew when the next one is looked for, so there is nothing to wait for and nothing to build beside.
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
"""Score of a record that is still to be served in this epoch and must not go before: above all others."""


class ScoredCache(Protocol):
    """A cache whose records of lowest score go first."""

    def set_scores(self, ids: Any, scores: Any) -> None:
        """How much each of `ids` is worth."""


class _Scores:
    """Sets scores. If writers of the cache hold its lock for long, they are set the next time."""

    def __init__(self, cache: ScoredCache) -> None:
        self._cache = cache
        self._late: list[tuple[Array, Array]] = []

    def set(self, ids: Array, scores: Array) -> None:
        """Let `scores` be those of `ids`, after those that could not be set before."""
        late, self._late = self._late, []
        ids, scores = (np.concatenate(column) for column in zip(*late, (ids, scores), strict=True))
        try:
            self._cache.set_scores(ids, scores)
        except WaitError:
            self._late = [(ids, scores)]


class Rotating(_Scores):
    """What the epoch fetches comes in, and in its place goes any record that was served already.

    So the residents change slowly, at no cost beside what the plan fetches anyway; none is lost before its turn, and
    each one that was served is as likely to go as the next.

    Attributes:
        seed: of the order in which they go. Set before the first epoch.
    """

    def __init__(self, cache: ScoredCache) -> None:
        super().__init__(cache)
        self.seed = 0
        self._resident: Array | None = None  # when the epoch began
        self._luck = np.empty(0)

    def begin(self, draw: Draw, importance: Array, *, first: bool = True) -> None:
        """A new epoch: nothing that is resident has been served. Only the `first` rank of a host sets scores."""
        count = len(draw.resident)
        self._resident = draw.resident
        self._luck = generator(self.seed, draw.plan.epoch, 2).random(count)
        if first:
            self.set(np.arange(count), np.where(draw.resident, FRESH, 1.0))

    def served(self, ids: Array) -> None:
        """These may go now, if they were resident when the epoch began."""
        if self._resident is None:  # an epoch that another process began
            return
        old = ids[self._resident[ids]]
        if len(old):
            self.set(old, self._luck[old])


class Ranked(_Scores):
    """The most important samples stay; those in the plan stay until served, so that none is fetched for nothing."""

    def __init__(self, cache: ScoredCache) -> None:
        super().__init__(cache)
        self._importance = np.empty(0)
        self._low: Array | None = None
        self._waiting = np.empty(0, bool)

    def begin(self, draw: Draw, importance: Array, *, first: bool = True) -> None:
        """A new epoch. Only the `first` rank of a host sets scores now; each does for what it serves."""
        count = len(draw.low)
        self._low = draw.low
        self._importance = importance
        self._waiting = np.zeros(count, bool)
        self._waiting[draw.plan.ids] = True
        self._waiting &= draw.resident
        if first:
            self.set(np.arange(count), np.where(self._waiting, FRESH, importance))

    def served(self, ids: Array) -> None:
        """These may go now, L-samples too that came in since."""
        if self._low is None:  # an epoch that another process began
            return
        done = ids[self._waiting[ids] | self._low[ids]]
        if len(done):
            self.set(done, self._importance[done])


class Retention:
    """What the cache keeps for this job, and for the others that use it with importance.

    Args:
        cache: of the policy "importance".
        rotating: whether its residents rotate, else the most important ones stay.
    """

    def __init__(self, cache: Any, rotating: bool) -> None:
        self._cache, self._rotating = cache, rotating
        self._scores = Rotating(cache) if rotating else Ranked(cache)
        self._jobs: Jobs | None = None
        self._warned = False

    def begin(self, draw: Draw, losses: Array, benefit: float, seed: int) -> None:
        """A new epoch. The first rank of each host publishes the losses and sets the scores; the others wait for it."""
        if isinstance(self._scores, Rotating):
            self._scores.seed = seed
        first = ranks_of_job().first_here
        mine = np.zeros(len(losses), np.float32) if self._rotating else ranks(losses)
        jobs = self._jobs_here(len(losses))
        if first:
            if jobs is not None:
                jobs.publish(mine, 0.0 if self._rotating else benefit)
            self._scores.begin(draw, self._importance(mine, jobs))
        wait_for_all()  # no rank stores anything before the caches of all have the scores
        if not first:
            self._scores.begin(draw, self._importance(mine, jobs), first=False)

    def _jobs_here(self, num_ids: int) -> Jobs | None:
        """The jobs that use the cache, if it has a folder."""
        path = getattr(self._cache, "path", None)
        if self._jobs is None and path is not None:
            self._jobs = Jobs(path, num_ids)
        return self._jobs

    def _importance(self, mine: Array, jobs: Jobs | None) -> Array:
        """How important each sample is to the jobs that use the cache."""
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
        """`ids` were delivered, and may go now."""
        self._scores.served(ids)

    def close(self) -> None:
        """This job is no longer one of those that use the cache. It is again, when another epoch begins."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None
