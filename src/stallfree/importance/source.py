"""Epochs of an `ImportanceSampler`: plans drawn from losses, served preferably from the cache."""

import tempfile
import time
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.context import BaseContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from stallfree.datasets.epoch_source import EpochPlan, EpochSource, Ids, Position, SourceSetup
from stallfree.datasets.reader import Reader
from stallfree.errors import StorageError, argument_conflict, sampler_mismatch, state_mismatch, text_of
from stallfree.importance.epoch import ActiveEpoch, Serving
from stallfree.importance.jobs import benefit
from stallfree.importance.packages import LOW, MISSED, PENDING, Field, SharedFlags, package_main
from stallfree.importance.plans import Draw, generator
from stallfree.importance.sampler import ImportanceSampler
from stallfree.ipc.process import Child, Owner, end_all
from stallfree.platform import how_it_ended
from stallfree.raising import log, users_level
from stallfree.stats import ImportanceStats

PACKAGE_BYTES = 1 << 20
"""Minimum bytes of records in a package: a disk or a server reads this amount at full speed."""

LIVES = 4
"""Maximum number of starts of the process."""

_STOP_SECONDS = 5.0


class Packager:
    """Packs L-samples into packages, and reads packages into the cache, in a separate process.

    The process selects flagged samples that are neither resident nor in a package, `MISSED` ones first, and writes them
    as soon as they fill a package. While fewer than `Field.REGION` `LOW` and `PENDING` samples are resident, it reads
    the package with the most absent ones and puts these into the cache with the score `FRESH`, so it exceeds the region
    by less than one package.

    Training does not depend on the process: the loader handles all samples that it does not. The next `wake` restarts
    it if it died, without its packages; after `LIVES` deaths packaging ends, with one logged warning. It exits with
    this object or with the training process, whichever ends first. In a forked child this object does nothing.

    Args:
        reader: of the loader; its cache has the policy "importance".
        folder: of the packages; created if missing.
        write_budget: maximum bytes to write.
        context: `multiprocessing` context that starts the process.
        package_bytes: minimum bytes of records in a package.

    Attributes:
        shared: the flags of the samples, and the counts.

    Raises `StorageError` if the folder or shared memory is not usable.
    """

    def __init__(
        self, reader: Reader, folder: Path, write_budget: int, context: BaseContext, package_bytes: int = PACKAGE_BYTES
    ) -> None:
        assert reader.cache is not None  # of the policy "importance", as the sampler has checked
        path, self._cache = _prepare(folder), reader.cache
        self.shared = SharedFlags(self._cache.num_ids)
        self._arguments = reader, self.shared, path, write_budget, package_bytes
        self._context, self._lives, self._owner = context, LIVES, Owner()
        self._running: list[Child] = []  # the process, if it was started
        self._end = weakref.finalize(self, end_all, self._running, _STOP_SECONDS)

    def begin(self, draw: Draw, batches: list[Ids], share: float) -> None:
        """Begin an epoch in which the L-region may have `share` of the cache, and at least one package."""
        flags = np.where(draw.low, LOW, 0).astype(np.uint8)
        for ids in batches:
            flags[ids] |= PENDING
        stats = self._cache.stats()
        package = max(1, PACKAGE_BYTES * stats.resident_items // max(1, stats.resident_bytes))
        self.shared.flags[:] = flags
        self.shared.fields[Field.REGION] = max(round(share * stats.resident_items), package)
        self.shared.fields[Field.EPOCH] = draw.plan.epoch
        self.wake()

    def served(self, ids: Ids) -> None:
        """Mark `ids` as no longer pending."""
        self.shared.flags[ids] &= LOW
        self.wake()

    def missed(self, ids: Ids) -> None:
        """Mark `ids` as requested but not resident; they are deferred."""
        self.shared.flags[ids] |= MISSED

    def wake(self) -> None:
        """Make the process check the flags; start it if it is not running. Never raises."""
        self.shared.fields[Field.STEP] += 1
        if not self._end.alive or not self._owner.is_here or any(child.alive for child in self._running):
            return
        problem = ""
        for dead in self._running:
            dead.end(0.0)
            problem = f"its process died {LIVES} times, the last time {how_it_ended(dead.exit_code)}"
        self._running.clear()
        if self._lives:
            self._lives -= 1
            try:
                child = Child(package_main, *self._arguments, context=self._context, name="stallfree-pack")
                self._running.append(child)
                return
            except Exception as error:
                problem = f"its process cannot be started: {text_of(error)}"
        log.warning("packaging is off: %s. Unimportant samples are fetched one by one from now on", problem)
        self._end()

    def stats(self) -> ImportanceStats:
        """Counts of packages written and read so far."""
        return ImportanceStats(**self.shared.stats())

    def close(self) -> None:
        """Stop the process, and kill it if it does not exit in 5 s. The packages are removed. Idempotent."""
        self._end()
        self.shared.close()


def _prepare(folder: Path) -> Path:
    """Create the folder for packages with mode 0700 if missing. Raises `StorageError` if it is not usable."""
    path = folder.expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise StorageError(f"the folder {path} for packages cannot be used: {error}. Give another folder") from error
    return path


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
        if self._packager is None and low.any() and sampler.packages is not None and self._reader.cache is not None:
            budget, context = sampler.write_budget, self._setup.context
            self._packager = Packager(self._reader, sampler.packages, write_budget=budget, context=context)
        if self._packager is not None:
            self._packager.begin(active.draw, active.batches, self._low_share)
        assert sampler.seed is not None  # drawn with the plan
        rng = generator(sampler.seed, active.draw.plan.epoch, 3)
        # With a tier, also the samples that this node assumes to be in it, without a request.
        residents: Any = SimpleNamespace(resident=getattr(sampler.cache, "known", sampler.cache.resident))
        self._serving = Serving(active.batches, low, residents, sampler.on_miss, rng, self._packager, active.excluded)
        return self._serving

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
            self._sampler.benefit = benefit(step, hit, miss, workers=now["num_workers"], batch_size=self._setup.size)

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
    cache: Any = setup.reader.cache
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
