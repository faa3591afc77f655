"""Training loops over pictures behind slow storage, each contender with its plan and its cache. The device is a sleep.

Each contender runs in a process of its own, forked from this one. With `jobs` = 2, two jobs with different models
train at once on one cache.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.photos import Pixels
from benchmarks.shared_team import Meet, Team
from stallfree.datasets import reader
from stallfree.sources.base import BaseSource

Ids = npt.NDArray[np.int64]

BATCH = 25
AHEAD = 8
"""Batches under way at once, whatever the number of workers."""

FREE = "free"
"""The storage of epochs that are not timed: no limit."""


@dataclass(frozen=True)
class Way:
    """What a contender draws, and what its cache keeps.

    Attributes:
        policy: of the cache.
        plan: of the `ImportanceSampler`; "": all samples in random order; "quiver": all, those that are resident first.
        trains: the plan of a sampler that draws those to train on; "": all that are served.
        on_miss: of the `ImportanceSampler`.
        packages: unimportant samples are packed in the background, and come in packages.
        apart: where several jobs use the cache, each tells it what matters to itself, as if there were no other.
    """

    policy: str
    plan: str = ""
    trains: str = ""
    on_miss: str = "fetch"
    packages: bool = False
    apart: bool = False


WAYS = {
    "default": Way("lru"),
    "base": Way("lru", "full", "icache"),
    "quiver": Way("fifo", "quiver"),
    "coordl": Way("minio"),
    "ilfu": Way("lfu", "icache"),
    "iis": Way("lru", "icache"),
    "hcache": Way("importance", "icache"),
    "icache": Way("importance", "icache", on_miss="swap"),
    "substitute": Way("importance", "icache", on_miss="substitute"),
    "packages": Way("importance", "icache", on_miss="swap", packages=True),
    "unbiased": Way("importance", "unbiased"),
    "unbiased_minio": Way("minio", "unbiased"),
    "apart": Way("importance", "icache", on_miss="swap", apart=True),
}


@sf.mark_random
class Flip:
    """Mirrored half the time, as a contiguous tensor (channels, height, width)."""

    def __call__(self, pixels: Pixels) -> torch.Tensor:
        picture = pixels[:, ::-1] if random.random() < 0.5 else pixels
        return torch.from_numpy(np.ascontiguousarray(picture.transpose(2, 0, 1)))


class Storage(BaseSource):
    """The pictures of a folder behind one of several storages, which may be changed while workers run.

    Args:
        folder: the pictures.
        kinds: the limits of a `ThrottledSource`, by name.
    """

    def __init__(self, folder: sf.ImageFolder, kinds: dict[str, dict[str, Any]]) -> None:
        self.pipeline = folder.pipeline
        self.names = [FREE, *kinds]
        self.sources = [sf.testing.ThrottledSource(folder, **kinds.get(name, {})) for name in self.names]
        self._which = get_context("fork").RawValue("i", 0)

    def use(self, name: str) -> None:
        """From now on records come from this storage."""
        self._which.value = self.names.index(name)

    def _record(self, id: int) -> Any:
        return self.sources[self._which.value].fetch(id)

    @property
    def reads(self) -> int:
        """Records that were fetched, from all storages."""
        return sum(source.requests for source in self.sources)

    def __len__(self) -> int:
        return len(self.sources[0])

    def _where(self, id: int) -> str:
        return self.sources[0].where(id)

    def fingerprint(self) -> str:
        return self.sources[0].fingerprint()


class Device:
    """Busy for so long per sample: a sleep. What a sleep takes too long is taken off the next one.

    Args:
        rate: samples/s.
    """

    def __init__(self, rate: float) -> None:
        self._seconds = 1 / rate
        self._owed = 0.0

    def train(self, samples: int) -> None:
        self._owed += samples * self._seconds
        if self._owed > 0:
            before = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - before


class Losses:
    """Losses such as training gives: heavy-tailed, for long high or low for the same samples, falling with each step.

    A sample has a level, log-normal, a tenth less after each time that it is trained; a loss is the level times
    log-normal noise. The levels of two jobs are alike, not the same.
    """

    def __init__(self, samples: int, job: int = 0) -> None:
        self._rng = np.random.default_rng([11, job])
        level = np.random.default_rng(10).normal(0, 0.8, samples) + self._rng.normal(0, 0.6, samples)
        self._level = np.exp(level)

    def of(self, ids: Ids) -> torch.Tensor:
        """The samples are trained: one loss for each."""
        self._level[ids] *= 0.9
        return torch.from_numpy((self._level[ids] * np.exp(self._rng.normal(0, 0.5, len(ids)))).astype(np.float32))


class Quiver:
    """A batch sampler: all samples, those that are resident first, in the order in which they came.

    The cache is two packages: while the samples of one are used, those that are next are fetched, as far ahead as half
    of the cache is large, and take the place of what was used.
    """

    def __init__(self, samples: int, cache: Any, ahead: int) -> None:
        self._rng, self._cache = np.random.default_rng(12), cache
        self._order: Ids = np.arange(samples)
        self.ahead = ahead

    def __iter__(self) -> Iterator[list[int]]:
        there = self._cache.resident(self._order)
        missing = self._rng.permutation(self._order[~there])
        self._order = np.concatenate([self._order[there], missing])
        for at in range(0, len(self._order), BATCH):
            yield self._order[at : at + BATCH].tolist()

    def __len__(self) -> int:
        return -(-len(self._order) // BATCH)


class Apart:
    """A cache as a plan wants it, without the folder where the jobs that use it meet."""

    def __init__(self, cache: Any) -> None:
        self.resident, self.set_scores = cache.resident, cache.set_scores
        self.policy, self.num_ids = cache.policy, cache.num_ids


@dataclass
class Job:
    """A training loop.

    Args:
        way: what it draws, and what the cache keeps.
        storage: where the pictures come from.
        share: capacity of the cache over all bytes of the pictures.
        number: of the job; its losses and its draws follow from it.
        name: of the cache, if jobs share it.
    """

    way: Way
    storage: Storage
    share: float
    number: int = 0
    name: str | None = None

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self._folder: str | None = None
        size = sum(Path(self.storage.where(id)).stat().st_size for id in range(len(self.storage)))
        index = 24 * len(self.storage)
        room = int(self.share * size * 1.04) + index  # records have a head, and lie in blocks
        self.data = sf.CachedDataset(
            self.storage, capacity=room, policy=self.way.policy, form="fetched", name=self.name, seed=self.number
        )
        self.losses = Losses(len(self.storage), self.number)
        self.sampler = self._sampler()
        self._chooser: sf.ImportanceSampler | None = None
        if self.way.trains:
            self._chooser = sf.ImportanceSampler(len(self.storage), plan=self.way.trains, seed=self.number)
        self._loader: sf.DataLoader | None = None
        self._threads = (0, 0)
        self._epoch = 0

    def _sampler(self) -> Any:
        way, count = self.way, len(self.storage)
        if way.plan == "quiver":
            return Quiver(count, self.data.cache, max(AHEAD, int(self.share * count / 2 / BATCH)))
        if not way.plan:
            return None
        more: dict[str, Any] = {}
        if way.packages:
            self._folder = tempfile.mkdtemp(prefix="packages-", dir=Path(self.storage.where(0)).parents[2])
            more["packages"] = self._folder
        return sf.ImportanceSampler(
            count,
            plan=way.plan,
            cache=Apart(self.data.cache) if way.apart else self.data.cache,
            on_miss=way.on_miss,
            seed=self.number,
            **more,
        )

    def loader(self, workers: int, threads: int) -> sf.DataLoader:
        """A loader with so many workers, each of which fetches in so many threads."""
        if self._loader is not None and self._threads == (workers, threads):
            return self._loader
        if self._loader is not None:
            self._loader.close()
        reader.IO_THREADS = threads  # forked workers take it along
        ahead = self.sampler.ahead if isinstance(self.sampler, Quiver) else AHEAD
        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}
        if isinstance(self.sampler, Quiver):
            options = {"batch_sampler": self.sampler}
        elif self.sampler is not None:
            options = {"batch_size": BATCH, "sampler": self.sampler}
        self._threads = (workers, threads)
        self._loader = sf.DataLoader(
            self.data,
            num_workers=workers,
            persistent_workers=True,
            prefetch_factor=-(-ahead // workers),
            with_ids=True,
            seed=self.number,
            **options,
        )
        return self._loader

    def epoch(self, loader: sf.DataLoader, device: Device | None) -> dict[str, float]:
        """One epoch: what it took."""
        loader.set_epoch(self._epoch)
        chosen = np.ones(len(self.storage), bool)
        if self._chooser is not None:
            chosen[:] = False
            chosen[self._chooser.plan(self._epoch).ids] = True
        self._epoch += 1
        learns = isinstance(self.sampler, sf.ImportanceSampler)
        served = trained = 0
        begun = time.perf_counter()
        for batch in loader:
            ids = batch.ids.numpy()
            served += len(ids)
            ids = ids[chosen[ids]]
            trained += len(ids)
            if device is not None:
                device.train(len(ids))
            if learns:
                losses = self.losses.of(ids)
                loader.update(torch.from_numpy(ids), losses)
                if self._chooser is not None:
                    self._chooser.update(ids, losses)
        return {"seconds": time.perf_counter() - begun, "served": served, "trained": trained}

    def warm_up(self, epochs: int) -> None:
        """Epochs from storage without a limit: the cache fills, losses come in."""
        self.storage.use(FREE)
        loader = self.loader(2, 8)
        for _ in range(epochs):
            self.epoch(loader, None)

    def phase(self, given: dict[str, Any]) -> dict[str, Any]:
        """Epochs that are timed, with one before them that is not if the workers are others."""
        fresh = self._threads != (given["workers"], given["threads"])
        loader = self.loader(given["workers"], given["threads"])
        if fresh:
            self.storage.use(FREE)
            self.epoch(loader, None)
        self.storage.use(given["storage"])
        device = Device(given["device"])
        found = []
        for _ in range(given["epochs"]):
            reads = self.storage.reads
            found.append(self.epoch(loader, device))
            found[-1]["reads"] = self.storage.reads - reads
        return {key: [each[key] for each in found] for key in found[0]}

    def resident(self) -> float:
        """Share of the samples that are in the cache."""
        return float(self.data.cache.resident(np.arange(len(self.storage))).mean())

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self.data.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def alone(
    number: int, meet: Meet, way: Way, storage: Storage, given: dict[str, Any], phases: list[dict[str, Any]]
) -> dict[str, Any]:
    """One contender, through all phases."""
    job = Job(way, storage, given["share"])
    try:
        job.warm_up(given["warm_up"] if isinstance(job.sampler, sf.ImportanceSampler) else 2)
        resident = job.resident()
        found = []
        for phase in phases:
            meet()  # tells that it goes on
            found.append(job.phase(phase))
        return {"phases": found, "resident": resident}
    finally:
        job.close()


def one_of_two(number: int, meet: Meet, way: Way, storage: Storage, given: dict[str, Any]) -> dict[str, Any]:
    """One of the jobs that train at once: its epochs while the others train too."""
    job = Job(way, storage, given["share"], number, "both")
    meet()
    try:
        loader = job.loader(1, 8)
        for _ in range(given["warm_up"]):
            job.epoch(loader, None)
            meet()  # neither is ahead of the other
        storage.use(given["storage"])
        device = Device(given["devices"][number])
        found: list[dict[str, float]] = []
        end = time.perf_counter() + given["seconds"]
        while time.perf_counter() < end or len(found) < 2:
            found.append(job.epoch(loader, device))
        meet()
        return {key: [each[key] for each in found] for key in found[0]}
    finally:
        job.close()


def two_jobs(way: Way, storage: Storage, given: dict[str, Any]) -> dict[str, Any]:
    """Two jobs at once: what each found, and the share of what they asked for that was read."""
    storage.use(FREE)
    with Team(2, one_of_two, way, storage, given) as team:
        for _ in range(1 + given["warm_up"]):
            team.meet()
        reads = storage.reads
        team.meet()
        reads = storage.reads - reads
        found = team.results()
    return {"jobs": found, "reads": reads / sum(sum(each["served"]) for each in found)}


def main() -> None:
    given = json.loads(sys.argv[1])
    storage = Storage(sf.ImageFolder(given["photos"], Flip()), given["storages"])
    results: dict[str, Any] = {}
    for who in given["who"]:
        way = WAYS[who]
        if given["jobs"] == 2:
            results[who] = two_jobs(way, storage, given)
        else:
            phases = given["who"][who]
            with Team(1, alone, way, storage, given, phases) as team:
                for _ in phases:
                    team.meet()
                results[who] = team.results()[0]
    emit({"found": results}, stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__)


if __name__ == "__main__":
    main()
