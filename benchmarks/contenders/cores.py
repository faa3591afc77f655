"""The rates of torch's loader and of stallfree's with 1, 2, 4, ... workers, in one process per kind of work.

Rates are of an epoch with `each` samples per worker, so that all epochs would take the same time if each worker had a
core of its own. The first epoch of a loader is not timed, but for the fill of a cache.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

import stallfree as sf
from benchmarks.contender import Task, emit, make_samples
from benchmarks.contenders.fast_prep import Files
from benchmarks.contenders.pairs import Pairs
from benchmarks.prep_steps import SIDE, PrepTask, find_photos
from stallfree.vision import native

Json = dict[str, Any]
Rates = list[float]
BATCH = 64
JOBS = 8


def options(workers: int) -> Json:
    """What all loaders are given."""
    return {
        "batch_size": BATCH,
        "shuffle": True,
        "num_workers": workers,
        "persistent_workers": True,
        "drop_last": True,
    }


def rate(loader: Iterable[Any]) -> float:
    """Samples/s of an epoch."""
    begun, count = time.perf_counter(), 0
    for _batch in loader:
        count += BATCH
    return count / (time.perf_counter() - begun)


def warm_rate(loader: Iterable[Any], epochs: int) -> float:
    """The median of `epochs` epochs after the first."""
    rate(loader)
    return statistics.median(rate(loader) for _ in range(epochs))


def prepared(given: Json) -> dict[str, Rates]:
    """Pictures of 224x224 in memory: whole batches out of the cache, or one tensor at a time by torch's loader."""
    task = Task(side=224, samples=given["pictures"], batch=BATCH, workers=0, seconds=0, folder=given["folder"])
    make_samples(task)
    pairs = Pairs(task)
    found: dict[str, Rates] = {"torch": [], "stallfree": []}
    with sf.CachedDataset(pairs, capacity="8GiB", name="cores-prepared") as cached:
        for workers in given["workers"]:
            found["torch"].append(warm_rate(torch.utils.data.DataLoader(pairs, **options(workers)), given["epochs"]))
            with sf.DataLoader(cached, **options(workers)) as loader:
                found["stallfree"].append(warm_rate(loader, given["epochs"]))
    return found


class Repeated:
    """The photographs of a folder, `each` per worker: the same files again and again."""

    def __init__(self, given: Json, workers: int) -> None:
        self.task = PrepTask(given["photos"], BATCH, workers, 0)
        paths = find_photos(self.task)
        count = given["each"] * workers
        self.paths = (paths * -(-count // len(paths)))[:count]

    def files(self) -> Files:
        """For torch's loader: read, decode, cut and resize."""
        files = Files(self.task)
        files.paths = self.paths
        return files

    @contextlib.contextmanager
    def cached(self, name: str) -> Iterator[sf.CachedDataset[Any]]:
        """Encoded in a cache of stallfree."""
        prep = sf.DecodeRandomResizedCrop(SIDE, flip=0.5)
        data = sf.FileDataset(self.paths, list(range(len(self.paths))), prep)
        with sf.CachedDataset(data, capacity="6GiB", form="fetched", name=name) as cached:
            yield cached


def photographs(given: Json) -> dict[str, Rates]:
    """JPEG, decoded, cut at random, resized, mirrored: from files in memory, and out of the cache as it fills."""
    found: dict[str, Rates] = {"torch": [], "stallfree, first epoch": [], "stallfree": []}
    for workers in given["workers"]:
        data = Repeated(given, workers)
        theirs = torch.utils.data.DataLoader(data.files(), **options(workers))
        found["torch"].append(warm_rate(theirs, given["epochs"]))
        name = f"cores-{workers}"
        with data.cached(name) as cached, sf.DataLoader(cached, **options(workers)) as loader:
            found["stallfree, first epoch"].append(rate(loader))
            found["stallfree"].append(statistics.median(rate(loader) for _ in range(given["epochs"])))
    return found


def shared(given: Json) -> dict[str, Rates]:
    """The same for 8 jobs at once through a `SharedLoader`: samples/s of each job, the mean."""
    found: Rates = []
    context = multiprocessing.get_context("fork")
    for workers in given["workers"]:
        ready, rates = context.Barrier(JOBS), context.SimpleQueue()
        jobs = [context.Process(target=_job, args=(given, workers, ready, rates.put)) for _ in range(JOBS)]
        for job in jobs:
            job.start()
        found.append(statistics.mean(rates.get() for _ in jobs))
        for job in jobs:
            job.join()
            if job.exitcode:
                raise AssertionError(f"a job ended with {job.exitcode}")
    return {f"stallfree, {JOBS} jobs": found}


def _job(given: Json, workers: int, ready: Barrier, tell: Callable[[float], None]) -> None:
    torch.set_num_threads(1)
    with Repeated(given, workers).cached(f"shared-{workers}") as cached:
        kinds = {key: value for key, value in options(workers).items() if key != "persistent_workers"}
        with sf.SharedLoader(cached, group=f"cores-{workers}", **kinds) as loader:
            first = iter(loader)
            ready.wait()
            for _batch in first:
                pass
            ready.wait()
            found = statistics.median(rate(loader) for _ in range(given["epochs"]))
            ready.wait()
    tell(found)


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    part = {each.__name__: each for each in (prepared, photographs, shared)}[given["part"]]
    found = {"rates": part(given), "native": native.library() is not None}
    emit(found, stallfree=version("stallfree"), torch=torch.__version__)


if __name__ == "__main__":
    main()
