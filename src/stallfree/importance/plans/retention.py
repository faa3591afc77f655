"""The scores that decide what a cache of the policy "importance" keeps while a plan is served.

The paper's H-cache (Chen et al., "iCACHE", HPCA 2023, algorithm 1) is a min-heap by importance, with a shadow heap that
is built for each new H-list. Here the scores of all samples are set at once, and the eviction queue is sorted again at
the next eviction, so no shadow structure is needed.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.errors import WaitError
from stallfree.frames import users_level
from stallfree.importance.plans.jobs import Jobs
from stallfree.importance.plans.probabilities import generator, ranks
from stallfree.importance.plans.reduce import is_first_here, wait_for_all
from stallfree.importance.plans.sampling_plans import Draw

Array = npt.NDArray[Any]

FRESH = 1e9
"""Score of a record that must not be evicted before it is served in this epoch: above all others."""


class Retention:
    """Decides what the cache keeps for this job, and for other importance-sampling jobs that use it.

    If the residents rotate, each fetched sample is admitted, and evicts any record that was already served: the
    residents change slowly, at no cost in addition to the fetches of the plan, and all served records are equally
    likely to be evicted. Otherwise the most important samples are kept. In both cases no record is evicted before it is
    served, so that no fetch is wasted.

    Args:
        cache: of the policy "importance".
        rotating: whether its residents rotate.
    """

    def __init__(self, cache: Any, rotating: bool) -> None:
        self._cache, self._rotating = cache, rotating
        self._jobs: Jobs | None = None
        self._warned = False
        self._late: list[tuple[Array, Array]] = []
        # Of the active epoch, by id: the score of a sample once it is served, and whether it must be set then.
        self._after: Array | None = None
        self._due = np.empty(0, bool)

    def begin(self, draw: Draw, losses: Array, benefit: float, seed: int) -> None:
        """Begin an epoch. The first rank of each host publishes the losses and sets the scores; the others wait."""
        first, count = is_first_here(), len(losses)
        mine = np.zeros(count, np.float32) if self._rotating else ranks(losses)
        jobs = self._jobs_here(count)
        if first:
            if jobs is not None:
                jobs.publish(mine, 0.0 if self._rotating else benefit)
            self._set(np.arange(count), self._scores(draw, self._importance(mine, jobs), seed))
        wait_for_all()  # no rank stores anything before all caches have the scores
        if not first:
            self._scores(draw, self._importance(mine, jobs), seed)

    def _scores(self, draw: Draw, importance: Array, seed: int) -> Array:
        """The scores of all samples for an epoch in which none has been served yet."""
        if self._rotating:
            self._after = generator(seed, draw.plan.epoch, 2).random(len(importance))
            self._due = draw.resident
            return np.where(draw.resident, FRESH, 1.0)
        waiting = np.zeros(len(importance), bool)
        waiting[draw.plan.ids] = True
        waiting &= draw.resident
        self._after, self._due = importance, waiting | draw.low  # L-samples may be admitted during the epoch
        return np.where(waiting, FRESH, importance)

    def served(self, ids: Array) -> None:
        """Make the delivered `ids` evictable."""
        if self._after is None:  # another process began the epoch
            return
        done = ids[self._due[ids]]
        if len(done):
            self._set(done, self._after[done])

    def _set(self, ids: Array, scores: Array) -> None:
        """Set the scores of `ids`. If the writer lock of the cache times out, they are set at the next call."""
        late, self._late = self._late, []
        ids, scores = (np.concatenate(column) for column in zip(*late, (ids, scores), strict=True))
        try:
            self._cache.set_scores(ids, scores)
        except WaitError:
            self._late = [(ids, scores)]

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

    def __getstate__(self) -> dict[str, Any]:
        """A copy is another job."""
        return {**self.__dict__, "_jobs": None}

    def close(self) -> None:
        """Unregister this job from the cache. It is registered again when another epoch begins."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None
