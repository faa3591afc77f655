"""What the tests of importance sampling share: stand-ins for caches, a task with known gradients, a loader."""

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

import stallfree as sf
from stallfree.analysis.replay import SimulatedCache
from stallfree.cache.policies import make_policy
from stallfree.importance.epoch import Serving
from stallfree.importance.plans import generator, ranks

Array = npt.NDArray[Any]


class Residents:
    """Stands in for a cache of `num_ids` samples with the `resident` ids; `given` is as if by policy "importance"."""

    def __init__(self, num_ids: int, resident: Any = (), *, given: bool = False) -> None:
        self.num_ids = num_ids
        self.there = np.zeros(num_ids, bool)
        self.there[np.asarray(resident, np.int64)] = True
        self.policy = SimpleNamespace(name="importance" if given else "minio")
        self.scores = np.zeros(num_ids)

    def resident(self, ids: Any) -> Array:
        there: Array = self.there[np.asarray(ids, np.int64)]
        return there

    def set_scores(self, ids: Any, scores: Any) -> None:
        self.scores[ids] = scores


class Drifting(Residents):
    """A `share` of all ids is resident; with each question, a share `change` of all is drawn anew."""

    def __init__(self, count: int, seed: int, *, share: float = 0.5, change: float = 0.3, given: bool = False) -> None:
        super().__init__(count, given=given)
        self._rng, self._share, self._change = np.random.default_rng(seed), share, change
        self.there = self._rng.random(count) < share

    def resident(self, ids: Any) -> Array:
        some = self._rng.random(self.num_ids) < self._change
        self.there[some] = self._rng.random(int(some.sum())) < self._share
        return super().resident(ids)


class Kept:
    """A cache of `capacity` samples that decides as the live one does, without records; `fetched` counts misses."""

    def __init__(self, folder: Path, num_ids: int, capacity: int, policy: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.num_ids, self.policy, self.fetched = num_ids, make_policy(policy), 0
        self._books = SimulatedCache(folder, num_ids, self.policy, capacity, None)

    def resident(self, ids: Any) -> Array:
        there = np.zeros(self.num_ids, bool)
        there[self._books.resident()] = True
        found: Array = there[np.asarray(ids, np.int64)]
        return found

    def set_scores(self, ids: Any, scores: Any) -> None:
        ids = np.asarray(ids, np.int64)
        self._books.set_scores(ids, np.broadcast_to(np.asarray(scores, np.float64), ids.shape))

    def use(self, ids: Array) -> None:
        """Look `ids` up, and put in those that are missing."""
        self.fetched += len(self._books.use(ids))


class Served:
    """Serves the epochs of a sampler as a `DataLoader` does, but without samples.

    Iterate `epoch(number)`: ids and weights of each batch, each `late` batches after it was taken from the plan.
    """

    def __init__(self, sampler: sf.ImportanceSampler, size: int = 8, *, drop_last: bool = False, late: int = 2) -> None:
        self._sampler, self._batch_size, self._drop_last, self._late = sampler, size, drop_last, late

    def epoch(self, number: int) -> Iterator[tuple[Array, Array]]:
        sampler, waiting = self._sampler, deque[Array]()
        begun = sampler.begin(number, self._batch_size, drop_last=self._drop_last)
        batches: Iterable[Array] = begun.batches
        if sampler.cache is not None:
            rng = generator(sampler.seed, number, 3)
            batches = Serving(begun.batches, begun.draw.low, sampler.cache, sampler.on_miss, rng, None, begun.excluded)
        try:
            for ids in batches:
                waiting.append(ids)
                if len(waiting) > self._late:
                    ids = waiting.popleft()
                    yield ids, begun.served(ids).numpy()
            while waiting:
                ids = waiting.popleft()
                yield ids, begun.served(ids).numpy()
        finally:
            begun.end()


class Task:
    """Least squares on `count` samples: the loss of each, and its gradient, float64 of shape (count, 3)."""

    def __init__(self, count: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        inputs = rng.normal(size=(count, 3))
        error = inputs @ [1.0, -2.0, 0.5] - rng.normal(size=count) * rng.exponential(2.0, count)
        self.losses = (error**2).astype(np.float32)
        self.gradients = 2 * error[:, None] * inputs


def knowing(sampler: sf.ImportanceSampler, losses: Any) -> sf.ImportanceSampler:
    """The sampler, after a first epoch (all samples) in which it was told these losses."""
    assert len(sampler.plan(0).ids) == sampler.num_samples
    for ids in np.array_split(np.arange(sampler.num_samples), 16):
        sampler.update(ids, np.asarray(losses)[ids])
    return sampler


def chances_of(sampler: sf.ImportanceSampler, epoch: int) -> Array:
    """The probabilities that the plan of an epoch would be drawn with now."""
    known = sampler._known()
    return sampler.rule.chances(known, ranks(known.losses), sampler.seed, epoch)[0]


def z_score(draws: Any, expected: Any) -> float:
    """By how many of its standard errors the mean of independent draws is off; of several numbers, the most."""
    draws, expected = np.asarray(draws, np.float64), np.asarray(expected, np.float64)
    error = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
    return float(np.max(np.abs(draws.mean(axis=0) - expected) / error))
