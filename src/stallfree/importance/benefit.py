"""Measures the benefit of a cache for a job: see `sampling.plans.jobs`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.cache.policies import Policy
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.clock import Clock, SystemClock
from stallfree.datasets.cached_dataset import CachedDataset
from stallfree.datasets.reader import Reader
from stallfree.errors import InputError, cache_required
from stallfree.loader.arguments import check_numbers
from stallfree.loader.dataloader import DataLoader

Array = npt.NDArray[Any]


def measure_benefit(
    dataset: CachedDataset,
    step: Callable[[Any], object],
    *,
    batch_size: int,
    workers: int,
    batches: int = 20,
    clock: Clock | None = None,
) -> float:
    """The ratio of the epoch time without the cache to that with it.

    It is measured on batches that bypass the cache and on batches that hit it.

    This is the probe of iCACHE (Chen et al., HPCA 2023, section IV-E), prep and steps included. Both runs use a
    `DataLoader`, and `batches` of each are timed, after two batches per worker (but at least one) have filled its
    queues. The run that bypasses the cache fetches random samples, counted in `dataset.stats()`, without storing them.
    The other run reads resident samples, repeatedly if there are few.

    Args:
        dataset: with the cache, which must not be empty.
        step: trains on a batch of the loader. It changes the model: pass a copy to avoid that. It need not wait for the
            device.
        batch_size: samples per batch.
        workers: worker processes.
        batches: number of timed batches per run.
        clock: None for that of the host.

    Raises `InputError` for invalid arguments and if no sample is resident; exceptions of the loader and `step`
    propagate.

    Example:
        ```python
        with sf.CachedDataset(dataset, capacity="8MiB") as cached:
            samples = [cached[id] for id in range(len(cached))]
            ratio = sf.measure_benefit(cached, step, batch_size=4, workers=0, batches=3)
        ```
    """
    if not isinstance(dataset, CachedDataset) or dataset.form == "files":
        raise cache_required(f"dataset={dataset!r:.80} has no cache of samples: give a CachedDataset")
    if not callable(step):
        raise InputError(f"step={step!r:.80} cannot be called: give a function that trains on a batch")
    _check(workers, batch_size)
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
        raise InputError(f"batches={batches!r}: give a whole number, 1 or more")
    reader, cache = dataset.reader, dataset.cache
    resident = np.flatnonzero(cache.resident(np.arange(len(dataset))))
    if len(resident) == 0:
        raise cache_required(
            "nothing is in the cache yet, so what it gains cannot be measured: train for an epoch first"
        )
    past = copy.copy(dataset)
    nothing: Any = _Nothing(cache)
    past.reader = Reader(reader.source, nothing, reader.deterministic, reader.rest)
    probe = _Probe(step, batch_size, workers, batches, clock or SystemClock())
    rng = np.random.default_rng((dataset.seed or 0) & (2**64 - 1))
    return probe.seconds(past, rng.permutation(len(dataset))) / probe.seconds(dataset, rng.permutation(resident))


def _check(workers: Any, batch_size: Any) -> None:
    check_numbers(workers, batch_size, 0, None, False)
    if batch_size is None:
        raise InputError("batch_size=None: what is timed are batches, so give an int of 1 or more")


class _Probe:
    """Times batches of chosen samples."""

    def __init__(
        self, step: Callable[[Any], object], batch_size: int, workers: int, batches: int, clock: Clock
    ) -> None:
        self._step = step
        self._batch_size, self._workers, self._batches = batch_size, workers, batches
        self._first = max(1, 2 * workers)
        self._clock = clock

    def seconds(self, dataset: CachedDataset, ids: Array) -> float:
        """The time of the batches after the warm-up, from `ids` repeated as needed."""
        wanted = np.resize(ids, (self._first + self._batches) * self._batch_size).tolist()
        times = []
        with DataLoader(dataset, self._batch_size, sampler=wanted, num_workers=self._workers) as loader:
            for number, batch in enumerate(loader, 1):
                self._step(batch)
                if number in (self._first, self._first + self._batches):
                    _wait_for_devices()
                    times.append(self._clock.now())
        return times[1] - times[0]


class _Nothing:
    """A cache that is always empty. Fetches are counted in the real cache."""

    uncached_steps = 0
    complete = False
    tier = structure = None
    policy = Policy()

    def __init__(self, cache: SampleCache) -> None:
        self._cache, self.num_ids, self.name = cache, cache.num_ids, cache.name

    def borrow(self, ids: Array) -> None:
        return None

    def populate(self) -> None: ...

    def resident(self, ids: Array) -> Array:
        return np.zeros(len(ids), bool)

    def get_many(self, ids: Array) -> list[Any]:
        return [MISS] * len(ids)

    def put_many(self, ids: Any, values: Any, *, uncached: int = 0) -> Array:
        return np.zeros(len(ids), bool)

    def count_fetch(self, reads: int, size: int) -> None:
        self._cache.count_fetch(reads, size)


def _wait_for_devices() -> None:
    """Synchronize all devices in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if torch.backends.mps.is_available():
        torch.mps.synchronize()
