"""Who is fetched when a training run draws its samples by recorded losses: the plans of this library, and their rivals.

The plans, the serving and the decisions of the cache are the library's own code; there is no data, and every sample has
the same size. What happens in the background (packing, reading packages, loading Quiver's next package) is done between
two batches, as if storage always kept pace: these are counts, not times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stallfree import ImportanceSampler
from stallfree.analysis.replay import SimulatedCache
from stallfree.cache.policies import make_policy
from stallfree.datasets.epoch_source import make_plan
from stallfree.importance.epoch import FRESH, Serving
from stallfree.importance.plans import Draw, generator, ranks

Array = npt.NDArray[Any]

BATCH = 256
PACKAGE = 64
"""Samples in a package."""

_FIRST_REGION = 0.1
_WORTH = 4
_AHEAD = 10


@dataclass
class Counts:
    """What one epoch did.

    Attributes:
        served: samples handed out.
        trained: those of them whose gradient counts.
        asked: samples asked for; one that is deferred is asked for again.
        own: those of them that were resident themselves.
        fetched: samples fetched one by one because they were not resident when handed out.
        loaded: samples fetched one by one in the background (into a package that is packed, or into Quiver's).
        written: packages written.
        read: packages read, each in one go.
    """

    served: int = 0
    trained: int = 0
    asked: int = 0
    own: int = 0
    fetched: int = 0
    loaded: int = 0
    written: int = 0
    read: int = 0

    @property
    def operations(self) -> int:
        """Storage operations: whatever was fetched one by one, and packages read and written."""
        return self.fetched + self.loaded + self.written + self.read


class Contestant(Protocol):
    """Somebody who serves epochs."""

    def epoch(self, number: int, losses: Array) -> Counts:
        """Serve an epoch in which the samples have these losses (by id)."""


class CountedCache:
    """The decisions of a cache that has room for `room` samples, as much of a `SampleCache` as plans want.

    Attributes:
        num_ids: number of samples.
        policy: decides who goes.
    """

    def __init__(self, samples: int, room: int, policy: str, folder: Path) -> None:
        self.num_ids = samples
        self.policy = make_policy(policy)
        self._keeper = SimulatedCache(folder, samples, self.policy, room, None)

    def resident(self, ids: Array) -> Array:
        return self._keeper.holds(ids)

    def set_scores(self, ids: Array, scores: Array) -> None:
        self._keeper.set_scores(ids, scores)

    def use(self, ids: Array) -> int:
        """A batch is asked for, and what is missing is fetched and offered to the cache; how many that were."""
        return len(self._keeper.use(ids))

    @property
    def size(self) -> int:
        """Samples in it."""
        return len(self._keeper.resident())


class Sampled:
    """An `ImportanceSampler` and a cache, served as the loader does.

    Args:
        cache: its cache.
        sampler: draws, and is told the losses of what was served.
        packages: what packs and reads packages, or None.
        trains: draws the samples that are trained on; None: all that are served.
        relative: the rank of a loss within its batch is its score, as in SHADE.
    """

    def __init__(
        self,
        cache: CountedCache,
        sampler: ImportanceSampler,
        packages: Packages | None = None,
        trains: ImportanceSampler | None = None,
        *,
        relative: bool = False,
    ) -> None:
        self.cache, self.sampler, self._packages = cache, sampler, packages
        self._trains, self._relative = trains, relative
        self._low_share = _FIRST_REGION

    def epoch(self, number: int, losses: Array) -> Counts:
        sampler, counts = self.sampler, Counts()
        region = max(round(self._low_share * self.cache.size), PACKAGE)
        begun = sampler.begin(number, BATCH)
        if self._packages is not None:
            self._packages.begin(begun.draw, region, counts)
        rng = generator(sampler.seed, number, 3)
        serving = Serving(begun.batches, begun.draw.low, self.cache, sampler.on_miss, rng, self._packages)
        chosen = np.ones(self.cache.num_ids, bool)
        if self._trains is not None:
            chosen[:] = False
            chosen[self._trains.plan(number).ids] = True
        for ids in serving:
            counts.fetched += self.cache.use(ids)
            counts.served += len(ids)
            counts.trained += int(np.count_nonzero(chosen[ids]))
            begun.served(ids)
            scores = ranks(losses[ids]) if self._relative else losses[ids]
            for one in (sampler, self._trains):
                if one is not None:
                    one.update(ids, scores)
        begun.end()
        counts.asked = serving.high_requests + serving.low_requests
        counts.own = serving.high_hits + serving.low_hits
        self._low_share = serving.low_requests / max(1, counts.asked)
        return counts


class Packages:
    """Packs and reads packages by the rules of `stallfree.importance.packages`, between two batches.

    L-samples that are to come and are neither resident nor packed are fetched, missed ones first, and written in
    packages of `PACKAGE`. While fewer of those to come are resident than the region holds, the package that brings most
    of them is read.
    """

    def __init__(self, cache: CountedCache, seed: int) -> None:
        self._cache, self._rng = cache, np.random.default_rng([seed, 1])
        self._package_of = np.full(cache.num_ids, -1)
        self._number = 0
        self._low = self._pending = self._missed = np.zeros(cache.num_ids, bool)
        self._region, self._counts = 0, Counts()
        self._refused = -1  # how many were resident when the cache took no more

    def begin(self, draw: Draw, region: int, counts: Counts) -> None:
        """A new epoch, whose operations go into `counts`."""
        self._low, self._missed = draw.low, np.zeros(len(draw.low), bool)
        self._pending = np.zeros(len(draw.low), bool)
        self._pending[draw.plan.ids] = True
        self._region, self._counts, self._refused = region, counts, -1
        self.wake()

    def served(self, ids: Array) -> None:
        self._pending[ids] = self._missed[ids] = False
        self.wake()

    def missed(self, ids: Array) -> None:
        self._missed[ids] = True

    def wake(self) -> None:
        self._pack()
        self._read()

    def _pack(self) -> None:
        wanted = np.flatnonzero(self._low & self._pending & (self._package_of < 0))
        wanted = self._rng.permutation(wanted[~self._cache.resident(wanted)])
        wanted = wanted[np.argsort(~self._missed[wanted], kind="stable")]
        for at in range(0, len(wanted) - PACKAGE + 1, PACKAGE):
            self._package_of[wanted[at : at + PACKAGE]] = self._number
            self._number += 1
            self._counts.loaded += PACKAGE
            self._counts.written += 1

    def _read(self) -> None:
        wanted = np.flatnonzero(self._low & self._pending)
        there = self._cache.resident(wanted)
        resident, absent = int(there.sum()), wanted[~there]
        absent = absent[self._package_of[absent] >= 0]
        if resident >= self._region or 0 <= self._refused <= resident or len(absent) == 0:
            return
        numbers = self._package_of[absent]
        use = np.bincount(numbers, minlength=self._number)
        missed = np.bincount(numbers[self._missed[absent]], minlength=self._number)
        worth = np.flatnonzero((missed > 0) | (_WORTH * use >= PACKAGE))
        for number in worth[np.argsort(-(use + missed)[worth], kind="stable")].tolist():
            if resident >= self._region:
                return
            ids = absent[numbers == number]
            self._counts.read += 1
            self._cache.set_scores(ids, np.full(len(ids), FRESH))
            self._cache.use(ids)
            brought = self._cache.resident(ids)
            resident += int(brought.sum())
            if not brought.all():
                self._cache.set_scores(ids[~brought], np.zeros(int((~brought).sum())))
                self._refused = resident
                return


class Quiver:
    """Substitutable hits out of two packages that take turns, each half of the cache; all samples in each epoch.

    After Kumar and Sivathanu, "Quiver: An Informed Storage Cache for Deep Learning", FAST 2020, for one job. The data
    set is cut into packages at random, once. A job trains on whatever is in the cache, in any order, as long as each
    sample comes once per epoch: it looks for the samples of the next ten batches of its shuffled order, takes those
    that are there, and fills up with others that are. For each sample it uses, one of the next package is loaded in the
    background; when a package is used up, the next one is there, and takes its place. So storage gives each sample once
    per epoch, before it is asked for.

    Args:
        samples: number of samples.
        room: samples that the cache holds.
        seed: of the packages and of the order.
    """

    def __init__(self, samples: int, room: int, seed: int) -> None:
        self._seed, self._rng = seed, np.random.default_rng([seed, 2])
        size = max(1, room // 2)
        order = self._rng.permutation(samples)
        self._packages = [order[at : at + size] for at in range(0, samples, size)]
        self._samples = samples
        self._first: Array | None = None  # loaded before the epoch begins

    def epoch(self, number: int, losses: Array) -> Counts:
        counts = Counts(served=self._samples, trained=self._samples, asked=self._samples)
        packages = [self._packages[at] for at in self._rng.permutation(len(self._packages))]
        if self._first is None:
            counts.loaded += len(packages[0])
        else:  # the one that was loaded while the epoch before ended
            packages = [self._first, *(package for package in packages if package is not self._first)]
        there, pending = np.zeros(self._samples, bool), np.ones(self._samples, bool)
        there[packages[0]] = True
        coming, loaded = np.concatenate([np.empty(0, np.int64), *packages[1:]]), 0
        plan = make_plan(self._samples, shuffle=True, seed=self._seed, epoch=number).ids
        while len(plan):
            plan = plan[pending[plan]]
            asked = plan[: _AHEAD * BATCH]
            counts.own += int(there[asked[:BATCH]].sum())
            ids = asked[there[asked]][:BATCH]
            if len(ids) < BATCH:
                others = np.flatnonzero(there & pending)
                others = self._rng.permutation(np.setdiff1d(others, ids, assume_unique=True))
                ids = np.concatenate((ids, others[: BATCH - len(ids)]))
            pending[ids] = False
            there[coming[loaded : loaded + len(ids)]] = True
            counts.loaded += len(coming[loaded : loaded + len(ids)])
            loaded += len(ids)
        self._first = self._packages[int(self._rng.integers(len(self._packages)))]
        counts.loaded += len(self._first)  # loaded while the last package is used up
        return counts


Maker = Callable[[int, int, Path, int], Contestant]
"""Makes a contestant for (samples, room, folder, seed)."""


def sampled(
    policy: str,
    *,
    packages: bool = False,
    everything: bool = False,
    trains: str = "",
    relative: bool = False,
    **options: Any,
) -> Maker:
    """A maker of `Sampled`: an `ImportanceSampler` with these options, a cache of that policy.

    With `everything` the cache has room for all samples. `trains` is the plan that draws those to train on.
    """

    def make(samples: int, room: int, folder: Path, seed: int) -> Contestant:
        cache = CountedCache(samples, samples if everything else room, policy, folder)
        sampler = ImportanceSampler(samples, cache=cache, seed=seed, **options)
        chooser = ImportanceSampler(samples, plan=trains, seed=seed) if trains else None
        return Sampled(cache, sampler, Packages(cache, seed) if packages else None, chooser, relative=relative)

    return make


def quiver(samples: int, room: int, folder: Path, seed: int) -> Contestant:
    """A maker of `Quiver`."""
    return Quiver(samples, room, seed)
