"""The epoch of an `ImportanceSampler`: what the cache keeps, and the order in which samples are served.

The paper's H-cache (Chen et al., "iCACHE", HPCA 2023, algorithm 1) is a min-heap by importance, with a shadow heap that
is built for each new H-list. Here the scores of all samples are set at once, and the eviction queue is sorted again at
the next eviction, so no shadow structure is needed.

Serving does not wait for a missing sample of low importance (an *L-sample*), but serves a resident one instead. Section
IV-C of the paper serves any unused one and drops the missing one ("substitute"). By default, the resident one is taken
from the rest of the plan and exchanged with the missing one ("swap"), so each sample of the plan is still served
exactly once.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from stallfree.datasets.epoch_source import Plan
from stallfree.errors import WaitError
from stallfree.importance.jobs import Jobs, is_first_here, ranks_of_job, wait_for_all
from stallfree.importance.losses import pack, pack_mask, unpack, unpack_mask
from stallfree.importance.plans import Draw, generator, ranks
from stallfree.raising import users_level

Array = np.ndarray[Any, np.dtype[Any]]

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
        self._jobs: Jobs | None = None  # those that use the cache, if it has a folder
        self._warned = False
        self._late: list[tuple[Array, Array]] = []
        # Of the active epoch, by id: the score of a sample once it is served, and whether it must be set then.
        self._after: Array | None = None
        self._due = np.empty(0, bool)

    def begin(self, draw: Draw, losses: Array, benefit: float, seed: int) -> None:
        """Begin an epoch. The first rank of each host publishes the losses and sets the scores; the others wait."""
        first, count = is_first_here(), len(losses)
        mine = np.zeros(count, np.float32) if self._rotating else ranks(losses)
        if self._jobs is None and (path := getattr(self._cache, "path", None)) is not None:
            self._jobs = Jobs(path, count)
        if first:
            if self._jobs is not None:
                self._jobs.publish(mine, 0.0 if self._rotating else benefit)
            self._set(np.arange(count), self._scores(draw, self._importance(mine), seed))
        wait_for_all()  # no rank stores anything before all caches have the scores
        if not first:
            self._scores(draw, self._importance(mine), seed)

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

    def _importance(self, mine: Array) -> Array:
        """The importance of each sample to the jobs that use the cache."""
        worth, count = (mine, 0) if self._jobs is None else self._jobs.combined()
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


class Marks:
    """The samples that were actually served, where they differ from the plan.

    A plan counts as served when it is drawn, which is correct if the sampler is only iterated. If a loader marks the
    samples that it serves, the next plan corrects the difference.

    Attributes:
        served: bool per id: delivered for training in the active epoch.
        ended: whether that epoch has ended; array of one bool.
        begun: number of epochs started.
    """

    def __init__(self, count: int) -> None:
        self.served = np.zeros(count, bool)
        self.ended = np.zeros(1, bool)
        self.begun = 0
        # Of the active epoch, and of the plan drawn last: epoch, planned samples, last epoch that served each before.
        self._epoch, self._planned, self._before = -1, np.zeros(count, bool), np.full(count, -1, np.int32)
        self._newest = self._epoch, self._planned, self._before

    def plan(self, plan: Plan, drawn: Array) -> None:
        """Record all samples of a plan as served, in `drawn`: int32 per id, the last epoch that served it."""
        planned = np.zeros(len(drawn), bool)
        planned[plan.ids] = True
        self._newest = plan.epoch, planned, drawn.copy()
        drawn[plan.ids] = np.maximum(drawn[plan.ids], plan.epoch)

    def begin(self) -> None:
        """Begin the epoch of the plan drawn last."""
        self.begun += 1
        self._epoch, self._planned, self._before = self._newest
        self.served[:] = self.ended[:] = False

    def apply(self, drawn: Array) -> None:
        """Correct `drawn`, if the active epoch has ended."""
        if self.ended.all():
            left, extra = self._planned & ~self.served, self.served & ~self._planned
            left &= drawn == self._epoch
            drawn[left] = self._before[left]
            drawn[extra] = np.maximum(drawn[extra], self._epoch)
            self.ended[:] = False

    def state(self) -> dict[str, Any]:
        """The state, serializable as JSON."""
        plans = (self._epoch, self._planned, self._before), self._newest
        return {
            "served": pack_mask(self.served),
            "ended": bool(self.ended.all()),
            "plans": [[epoch, pack_mask(planned), pack(before)] for epoch, planned, before in plans],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        count = len(self.served)
        self.served[:], self.ended[:] = unpack_mask(state["served"], count), state["ended"]
        (self._epoch, self._planned, self._before), self._newest = (
            (epoch, unpack_mask(planned, count), unpack(before, np.int32)) for epoch, planned, before in state["plans"]
        )


class ActiveEpoch:
    """An epoch that is being served.

    Args:
        draw: the plan and its L-samples.
        batches: the ids of each batch of this rank, as planned.
        marks: records the served samples.
        retention: controls what the cache keeps, or None.

    Attributes:
        draw, batches: as given.
        excluded: ids that only other ranks may serve: those of their batches, and their part of the ids in no batch.
    """

    def __init__(self, draw: Draw, batches: list[Array], marks: Marks, retention: Retention | None) -> None:
        self.draw, self.batches = draw, batches
        self._marks, self._number, self._retention = marks, marks.begun, retention
        plan, samples, (rank, count) = draw.plan, len(draw.low), ranks_of_job()
        self._weights = np.ones(samples, np.float32)
        if plan.weights is not None:
            self._weights[plan.ids] = plan.weights * np.float32(len(plan.ids) / samples)
        others = np.arange(samples) % count != rank
        others[plan.ids] = True
        for ids in batches:
            others[ids] = False
        self.excluded = np.flatnonzero(others)

    def served(self, ids: Array) -> torch.Tensor:
        """Mark `ids` as delivered. Returns their weights, float32."""
        self._marks.served[ids] = True
        if self._retention is not None:
            self._retention.served(ids)
        return torch.from_numpy(self._weights[ids])

    def end(self) -> None:
        """End the epoch: nothing more of it is served, here or after a resume. Idempotent."""
        if self._number == self._marks.begun:  # else another epoch has begun since
            self._marks.ended[:] = True


ON_MISS = ("swap", "substitute", "fetch")

_PATIENCE = 16
"""Batches until the next search for residents after one found none."""


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
        flags: its `served` and `missed` receive ids, as a `Packager`'s; or None.
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
        flags: Any = None,
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
        return np.concatenate([np.empty(0, np.int64), *found])

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
        return self._pending[ids] if self._on_miss == "swap" else ~self._used[ids]

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
