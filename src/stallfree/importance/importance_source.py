"""Epochs of an `ImportanceSampler`: plans drawn from losses, served preferably from the cache."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.epoch_source import EpochPlan, EpochSource, Ids, Position, SourceSetup
from stallfree.datasets.reader import Reader
from stallfree.errors import argument_conflict, sampler_mismatch, state_mismatch
from stallfree.frames import users_level
from stallfree.importance.packager import Packager
from stallfree.importance.plans.active_epoch import ActiveEpoch
from stallfree.importance.plans.importance import ImportanceSampler
from stallfree.importance.plans.jobs import benefit
from stallfree.importance.plans.probabilities import generator
from stallfree.importance.plans.serving import Serving
from stallfree.stats import ImportanceStats

_FIRST_REGION = 0.1
"""Share of the cache for L-samples before any requests are counted (Chen et al., iCACHE, HPCA 2023, section IV)."""

_REQUESTS = ("high_requests", "high_hits", "low_requests", "low_hits", "swaps", "substitutions")


class ImportanceSource(EpochSource):
    """Serves the plans of an `ImportanceSampler`.

    Args:
        setup: of the loader. Its `sampler` draws the plans; its `counts` measure the benefit of the cache.

    Raises `InputError` if the sampler and the data set do not match.
    """

    def __init__(self, setup: SourceSetup) -> None:
        _check(setup)
        self._sampler: ImportanceSampler = setup.sampler
        self._reader: Reader = setup.reader
        self._setup = setup
        self._loader_before: dict[str, Any] = {}
        self._packager: Packager | None = None
        self._packed = ImportanceStats()  # by the last packager
        self._requests = dict.fromkeys(_REQUESTS, 0)  # of the previous epochs
        self._serving: Serving | None = None
        self._low_share = _FIRST_REGION
        self._begun: tuple[int, int] | None = None  # the active epoch, and its batches

    @property
    def next_epoch(self) -> int:
        return self._sampler.next_epoch

    def num_batches(self, epoch: int) -> int:
        """The number of batches of an epoch. A single rank draws its plan if necessary."""
        if self._begun is not None and self._begun[0] == epoch:
            return self._begun[1]
        return self._sampler.num_batches(epoch, self._setup.size, drop_last=self._setup.drop_last)

    def describe(self) -> dict[str, Any]:
        return {"samples": self._setup.samples}

    def begin(self, epoch: int, resume: Position | None) -> EpochPlan:
        self._count_requests()
        if resume is not None and resume.rest is not None:
            rest = [np.asarray(ids, np.int64) for ids in resume.rest]
            return self._planned(self._sampler.resume(rest), rest, resume.batches)
        self._measure_benefit()
        active = self._sampler.begin(epoch, self._setup.size, drop_last=self._setup.drop_last)
        return self._planned(active, self._served(active), 0)

    def _planned(self, active: ActiveEpoch, batches: Iterable[Ids], first: int) -> EpochPlan:
        self._begun = active.draw.plan.epoch, first + len(active.batches)
        return EpochPlan(iter(batches), first, on_delivered=active.served, end=active.end)

    def _served(self, active: ActiveEpoch) -> Iterable[Ids]:
        """The batches of an epoch; missing samples are replaced if the sampler's `on_miss` requires it."""
        sampler, low = self._sampler, active.draw.low
        if sampler.cache is None:
            return active.batches
        packager = self._start_packager(sampler) if low.any() else None
        if packager is not None:
            packager.begin(active.draw, active.batches, self._low_share)
        assert sampler.seed is not None  # drawn with the plan
        rng = generator(sampler.seed, active.draw.plan.epoch, 3)
        # With a tier, also the samples that this node assumes to be in it, without a request.
        residents: Any = SimpleNamespace(resident=getattr(sampler.cache, "known", sampler.cache.resident))
        self._serving = Serving(active.batches, low, residents, sampler.on_miss, rng, packager, active.excluded)
        return self._serving

    def _start_packager(self, sampler: ImportanceSampler) -> Packager | None:
        if self._packager is None and sampler.packages is not None and self._reader.cache is not None:
            self._packager = Packager(
                self._reader, sampler.packages, write_budget=sampler.write_budget, context=self._setup.context
            )
        return self._packager

    def _measure_benefit(self) -> None:
        """Measure the benefit of the cache for this job from the previous epoch."""
        now = dict(self._setup.counts, at=time.monotonic())
        before, self._loader_before = self._loader_before, now
        if not before or not self._sampler.measures:
            return
        of = {name: now[name] - before[name] for name in before}
        if min(of["batches"], of["samples"], of["misses"]) <= 0:
            return
        step = max(0.0, of["at"] - of["wait_seconds"]) / of["batches"]
        hit = of["prep_seconds"] / of["samples"]
        miss = hit + of["fetch_seconds"] / of["misses"]
        if step + hit > 0:
            workers = now["num_workers"]
            self._sampler.benefit = benefit(step, hit, miss, workers=workers, batch_size=self._setup.size)

    def _count_requests(self) -> None:
        """Add the counts of the last epoch."""
        serving, self._serving = self._serving, None
        if serving is not None:
            for name in _REQUESTS:
                self._requests[name] += getattr(serving, name)
            self._low_share = serving.low_requests / max(1, serving.low_requests + serving.high_requests)

    def update(self, ids: Any, losses: Any) -> None:
        """See `ImportanceSampler`."""
        self._sampler.update(ids, losses)

    def stats(self) -> ImportanceStats:
        """Counts of requests, hits and substitutions."""
        counts = {name: self._requests[name] + getattr(self._serving, name, 0) for name in _REQUESTS}
        return replace(self._packed if self._packager is None else self._packager.stats(), **counts)

    def state_dict(self) -> dict[str, Any]:
        return {"importance": self._sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "importance" not in state:
            raise state_mismatch(
                "the state has no losses: it was taken without an ImportanceSampler. Leave that out here too"
            )
        self._sampler.load_state_dict(state["importance"])

    def __getstate__(self) -> dict[str, Any]:
        """A copy serves no epoch yet, and starts a packager of its own."""
        return {**self.__dict__, "_serving": None, "_packager": None}

    def close(self) -> None:
        """Stop the process that packs and reads packages, and unregister this job from the cache."""
        self._sampler.close()
        if self._packager is not None:
            self._packed = self._packager.stats()
            self._packager.close()
            self._packager = None


def _check(setup: SourceSetup) -> None:
    """Raise `InputError` if the sampler cannot be served."""
    sampler: ImportanceSampler = setup.sampler
    cache: SampleCache | None = setup.reader.cache
    if sampler.num_samples != setup.samples:
        raise sampler_mismatch(
            f"the sampler is of {sampler.num_samples} samples, the data set has {setup.samples}: "
            "give ImportanceSampler(len(dataset))"
        )
    given: Any = sampler.cache
    if cache is not None and getattr(given, "path", None) not in (None, getattr(cache, "path", None)):
        raise sampler_mismatch(
            f"the sampler has the cache {given.name!r}, the data set {cache.name!r}: give dataset.cache to both"
        )
    if given is None and cache is not None and sampler.rule.plan == "unbiased":
        warnings.warn(
            "the data set has a cache and the ImportanceSampler does not know it, so nothing counts as resident: give "
            "ImportanceSampler(..., cache=dataset.cache)",
            RuntimeWarning,
            stacklevel=users_level(),
        )
    if setup.batch_size is None:
        raise argument_conflict("batch_size=None gives single samples, which have no weights: give a batch_size")
