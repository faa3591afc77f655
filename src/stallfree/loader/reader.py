"""Samples of a batch: out of the cache or the source, prepared, with their randomness. One per process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache import MISS, SampleCache
from stallfree.errors import SampleError
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.protocol import Source, sample_error
from stallfree.pipeline.randomness import Randomness
from stallfree.sources.throttle import payload_bytes

IO_THREADS = 8
"""Fetches under way at once in one process. They wait for storage, so there may be more of them than cores."""


@dataclass
class Pending:
    """A batch whose fetches have been started."""

    ids: npt.NDArray[np.int64]
    fetches: dict[int, Future[Any]]


@dataclass
class Samples:
    """The samples of a batch, and what they cost.

    `ids` are those really served: samples left out because of an error are in `skipped`.
    """

    ids: list[int]
    values: list[Any]
    hits: int = 0
    misses: int = 0
    storage_bytes: int = 0
    fetch_seconds: float = 0.0
    skipped: list[SampleError] = field(default_factory=list)


class Reader:
    """How samples of one data set come to be.

    Args:
        source: where records come from.
        cache: holds what `deterministic` gave for a record (or the record, when `deterministic` is in `rest`); or None.
        deterministic: applied to a record before it is cached.
        rest: applied to what is cached, each time anew.
        fresh: whether `rest`, or the source, draws random numbers.
    """

    def __init__(
        self, source: Source, cache: SampleCache | None, deterministic: Compose, rest: Compose, *, fresh: bool
    ) -> None:
        self.source = source
        self.cache = cache
        self.deterministic = deterministic
        self.rest = rest
        self.fresh = fresh
        self._threads = bool(getattr(source, "threads", True))
        drawing: Callable[[Any], Any] | None = rest if len(rest) else None
        if cache is None and not self._threads:
            drawing = _FromSource(source)
        self._randomness = Randomness(drawing if fresh else None)
        self._pool: ThreadPoolExecutor | None = None
        self._pid = -1

    @property
    def plain(self) -> bool:
        """Whether a hit is the sample, with nothing left to do."""
        return self.cache is not None and len(self.rest) == 0

    def start(self, ids: npt.NDArray[np.int64]) -> Pending:
        """Start fetching what `ids` miss. Returns at once."""
        fetches: dict[int, Future[Any]] = {}
        if self._threads:
            missing = ids if self.cache is None else ids[~self.cache.resident(ids)]
            pool = self._executor() if len(missing) else None
            for id in missing.tolist():
                if id not in fetches and pool is not None:
                    fetches[id] = pool.submit(self.source.fetch, id)
        return Pending(ids, fetches)

    def finish(self, pending: Pending, seed: int, epoch: int | Callable[[int], int], *, skip: bool) -> Samples:
        """The samples of a batch that was started.

        Raises `SampleError` for the first sample that cannot be had, unless `skip`: then it is left out.
        """
        ids = pending.ids.tolist()
        found = [MISS] * len(ids) if self.cache is None else self.cache.get_many(pending.ids)
        samples = Samples([], [])
        samples.misses = sum(value is MISS for value in found)
        samples.hits = len(ids) - samples.misses
        try:
            with self._randomness:
                if samples.misses:
                    self._fill(ids, found, pending.fetches, samples, seed, epoch, skip)
                for id, value in zip(ids, found, strict=True):
                    if value is not MISS:
                        self._prepare(id, value, samples, seed, epoch, skip)
        finally:
            for future in pending.fetches.values():
                future.cancel()
        return samples

    def _fill(
        self,
        ids: list[int],
        found: list[Any],
        fetches: dict[int, Future[Any]],
        samples: Samples,
        seed: int,
        epoch: int | Callable[[int], int],
        skip: bool,
    ) -> None:
        new_ids: list[int] = []
        new_values: list[Any] = []
        reads = 0
        try:
            for at, id in enumerate(ids):
                if found[at] is not MISS:
                    continue
                try:
                    self._seed(id, seed, epoch)
                    record = self._fetch(id, fetches.get(id), samples)
                    reads += 1
                    samples.storage_bytes += payload_bytes(record)
                    found[at] = self._apply(self.deterministic, record, id)
                except SampleError as error:
                    if not skip:
                        raise
                    samples.skipped.append(error)
                    continue
                new_ids.append(id)
                new_values.append(found[at])
        finally:
            if self.cache is not None:
                self.cache.count_fetch(reads, samples.storage_bytes)
                if new_ids:
                    self.cache.put_many(new_ids, new_values)

    def _fetch(self, id: int, future: Future[Any] | None, samples: Samples) -> Any:
        started = time.perf_counter()
        try:
            return self.source.fetch(id) if future is None else future.result()
        except Exception as error:
            raise sample_error(error, self.source, id, "fetching") from error
        finally:
            if self._threads:
                samples.fetch_seconds += time.perf_counter() - started

    def _prepare(
        self, id: int, value: Any, samples: Samples, seed: int, epoch: int | Callable[[int], int], skip: bool
    ) -> None:
        try:
            if len(self.rest):
                self._seed(id, seed, epoch)
                value = self._apply(self.rest, value, id)
        except SampleError as error:
            if not skip:
                raise
            samples.skipped.append(error)
            return
        samples.ids.append(id)
        samples.values.append(value)

    def _seed(self, id: int, seed: int, epoch: int | Callable[[int], int]) -> None:
        if self.fresh:
            self._randomness.seed(seed, epoch if isinstance(epoch, int) else epoch(id), id)

    def _apply(self, steps: Compose, value: Any, id: int) -> Any:
        if not len(steps):
            return value
        try:
            return steps(value)
        except Exception as error:
            raise sample_error(error, self.source, id, "preparing") from error

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pid != os.getpid():
            self._pool = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="stallfree-fetch")
            self._pid = os.getpid()
        return self._pool

    def close(self) -> None:
        """End the threads that fetch, once they are through."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_pid": -1}


class _FromSource:
    """The fetch of a plain data set, which may draw random numbers itself."""

    def __init__(self, source: Source) -> None:
        self.dataset = getattr(source, "dataset", source)

    def __call__(self, id: int) -> Any:
        return self.dataset[id]

