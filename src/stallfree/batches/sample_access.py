"""Access to the samples of a data set: source, cache, transforms, seeds and active fetches."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stallfree.batches.transform_split import TransformSplit
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.errors import StallfreeError, object_closed
from stallfree.ipc.fetch_threads import FetchThreads
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.in_place import works_in_place
from stallfree.pipeline.marks import drew
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.randomness import Randomness
from stallfree.pipeline.settings import Settings, warn_of_changes
from stallfree.pipeline.values import payload_bytes
from stallfree.sources.mapped import MapSource, SubsetSource

_Access = TypeVar("_Access", bound="SampleAccess")

IO_THREADS = 8
"""Concurrent fetches of one process. They wait for storage, so there may be more of them than cores."""

_NOTHING = Compose([])


@dataclass
class Pending:
    """A batch whose reads and fetches have been started.

    Attributes:
        ids: ids of its samples.
        fetches: fetches from the source, by id. Some are added when the tier reports a miss.
        asked: ids that the tier was asked for, and what it returned.
        uncached: the number of uncached steps of the samples that it was asked for.
        pool: threads that read and fetch, or None.
    """

    ids: npt.NDArray[np.int64]
    fetches: dict[int, Future[Any]] = field(default_factory=dict)
    asked: list[tuple[npt.NDArray[np.int64], Future[list[Any]]]] = field(default_factory=list)
    uncached: int = 0
    pool: Executor | None = None

    def cancel(self) -> None:
        """Cancel the reads and fetches that have not begun."""
        for future in [*self.fetches.values(), *(future for _, future in self.asked)]:
            future.cancel()


class SampleAccess:
    """Access to the samples of one data set. Its subclass `Reader` makes the samples.

    Args:
        source: source of the records.
        cache: cache of the outputs of `deterministic`, with its tier; or None.
        deterministic: steps applied to a record before it is cached.
        rest: steps applied to a cached value each time it is read.
        share: share of the samples that are cached prepared; the others are cached as fetched. See `is_prepared`.
        whole: steps applied to a sample that is cached as fetched, each time it is read.
        steps: all steps in the order that the user gave, which determines the seeds of their generators;
            `deterministic` and `rest` if None.

    Attributes:
        split: the steps before and after the cache. It changes when a step turns out to be random.
        threads: whether threads fetch the records.
        seeds_fetch: whether generators are seeded before a fetch, since the source may draw random numbers.
    """

    single = whole = False  # batches are single samples; `__getitems__` returns batches, and not lists of samples

    def __init__(
        self,
        source: Source,
        cache: SampleCache | None,
        deterministic: Compose,
        rest: Compose,
        *,
        share: float = 1.0,
        whole: Compose = _NOTHING,
        steps: Compose | None = None,
    ) -> None:
        self.source, self.cache = source, cache
        self.io_threads = IO_THREADS
        beneath = plain_beneath(source, 0)
        self._dataset = None if beneath is None else beneath[0].dataset
        origin = source if beneath is None else self._dataset
        self.split = TransformSplit(source, cache, origin, deterministic, rest, share, whole)
        copied = cache is None and type(source) is not MapSource
        notices = copied or cache is not None
        self.settings = Settings(source, *deterministic, *rest) if notices else Settings()
        self._pipeline = (*deterministic, *rest) if steps is None else (*steps,)
        self._pool: Executor | None = None
        self._pid = -1
        self._ended = ""
        self._drawing: Callable[[Any], Any] | None = None
        self._randomness: Randomness | None = None
        self._update_seeding()

    def _update_seeding(self) -> None:
        """Determine which generators are seeded, and whether threads may fetch."""
        self._seeded_split = self.split.uncached
        # Without a cache, a plain data set may augment its samples itself, so it is indexed in the thread that is
        # seeded. The same holds for a source that one thread reads, or whose `fetch` was observed to draw.
        threads = bool(getattr(self.source, "threads", True))
        may_draw = drew(self.split.origin) or (self.cache is None and not threads)
        dataset = self.source if self._dataset is None and may_draw else self._dataset
        self.seeds_fetch = dataset is not None and not self.caches
        self.threads = threads and not self.seeds_fetch
        steps = Compose([*self.rest, *self.split.whole])
        drawing: Callable[[Any], Any] | None = steps if len(steps) else None
        if self.seeds_fetch:
            drawing = _Drawing(dataset, self.rest)
        self.seeds = drawing is not None
        self._drawing, self._randomness = drawing, None

    @property
    def randomness(self) -> Randomness:
        """Seeds the random draws. Its generators are searched for on first use, in the data set too."""
        if self._randomness is None:
            self._randomness = Randomness(self._drawing, [self._dataset, *self._pipeline], lazy=True)
        return self._randomness

    @property
    def deterministic(self) -> Compose:
        """The steps applied before the cache."""
        return self.split.deterministic

    @property
    def rest(self) -> Compose:
        """The steps applied after the cache."""
        return self.split.rest

    @property
    def caches(self) -> bool:
        """Whether samples are stored."""
        return self.cache is not None and self.split.caches

    @property
    def plain(self) -> bool:
        """Whether a cached value is the finished sample."""
        return self.caches and not self.rest.transforms and self.split.share == 1

    @property
    def current(self) -> bool:
        """Whether the cached values are outputs of this reader's `deterministic` steps."""
        return self.caches and self.cache is not None and self.cache.uncached_steps == self.split.uncached

    @property
    def in_place(self) -> bool:
        """Whether all steps after the cache can write into a batch buffer. See `Reader.finish`."""
        split = self.split
        if not split.rest.transforms:
            return False
        steps = [*split.rest, *split.whole]
        return (split.share == 1 or len(split.whole) > 0) and all(map(works_in_place, steps))

    @property
    def direct(self) -> bool:
        """Whether the preparing thread indexes the data set: no reads or fetches are started ahead."""
        return not self.caches and not self.threads

    @property
    def indexes(self) -> bool:
        """Whether samples are the return values of `dataset[id]`, to which the data set may keep references."""
        return self.direct

    # -- a batch ------------------------------------------------------------------------------------------------------

    def start(self, ids: npt.NDArray[np.int64]) -> Pending:
        """Start to read and fetch `ids` without waiting. Raises `InputError` after `end`."""
        self.check()
        pending = Pending(ids)
        if self.cache is not None and self.caches:
            resident = self.cache.resident(ids)
            if not resident.all():
                self.request(ids[~resident], pending)
        elif self.threads:
            self.fetch(ids.tolist(), pending)
        return pending

    def request(self, ids: npt.NDArray[np.int64], pending: Pending) -> None:
        """Start to ask the tier for `ids`, and to fetch those that it does not hold."""
        tier = None if self.cache is None else self.cache.tier
        if tier is None:
            self.fetch(ids.tolist(), pending)
            return
        ids, pool = np.array(list(dict.fromkeys(ids.tolist())), np.int64), self._pool_of(pending)
        pending.uncached = self.split.uncached
        with contextlib.suppress(RuntimeError):  # the pool is closed, so the batch is not needed any more
            for part in tier.parts(ids):
                pending.asked.append((part, pool.submit(self.ask, part, pending)))

    def ask(self, ids: npt.NDArray[np.int64], pending: Pending) -> list[Any]:
        """Return what the tier holds of the distinct `ids`, and start to fetch the others."""
        assert self.cache is not None
        values: list[Any] = self.cache.tier.get_many(ids, pending.uncached)
        self.fetch([id for id, value in zip(ids.tolist(), values, strict=True) if value is MISS], pending)
        return values

    def fetch(self, ids: Sequence[int], pending: Pending) -> None:
        """Start fetches of `ids` in threads, unless they are started already."""
        if self.threads and len(ids):
            pool = self._pool_of(pending)
            with contextlib.suppress(RuntimeError):  # the pool is closed, so the batch is not needed any more
                for id in ids:
                    if id not in pending.fetches:
                        pending.fetches[id] = pool.submit(self.source.fetch, id)

    def _pool_of(self, pending: Pending) -> Executor:
        """Return the threads of a batch; they stay the same if the reader is closed meanwhile."""
        if pending.pool is None:
            if self._pool is None or self._pid != os.getpid():
                self._pool = FetchThreads(self.io_threads)
                self._pid = os.getpid()
            pending.pool = self._pool
        return pending.pool

    def store(self, ids: list[int], values: list[Any]) -> None:
        """Store outputs of `deterministic` in the cache and in its tier. Raises `CodecError`."""
        if self.cache is not None and self.caches and ids:
            self.cache.put_many(ids, values, uncached=self.split.uncached)
            if self.cache.tier is not None:
                self.cache.tier.put_many(np.array(ids, np.int64), values, self.split.uncached)

    def _cancel(self, pending: Pending) -> None:
        """Cancel reads and fetches; fetches that have begun are still counted as reads."""
        for _, future in pending.asked:
            future.cancel()
        for future in list(pending.fetches.values()):
            if not future.cancel() and self.cache is not None:
                future.add_done_callback(partial(_count_unused, self.cache))
        pending.fetches.clear()

    # -- the split ----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Adopt a split that changed here or in another process that shares the cache."""
        self.split.follow()
        if self._seeded_split != self.split.uncached:
            self._update_seeding()

    def check_settings(self) -> None:
        """Warn of attributes of the data set and its steps that changed after samples were cached."""
        if self.cache is not None:
            warn_of_changes(self.settings)

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `InputError` after `end`."""
        if self._ended:
            raise object_closed(self._ended)

    def close(self) -> None:
        """Stop the fetching threads after their active fetches, within some seconds. They restart on demand."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown()

    def end(self, why: str) -> None:
        """Close permanently: `start` and `finish` raise `InputError(why)` from now on."""
        self._ended = why
        self.close()

    def __copy__(self: _Access) -> _Access:
        """Return a reader of the same cache with separate threads and a separate split."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, split=copy.copy(self.split), _pool=None, _pid=-1)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_pid": -1}


def _count_unused(cache: SampleCache, future: Future[Any]) -> None:
    """Count a fetch whose record was not used."""
    if not future.cancelled() and future.exception() is None:
        with contextlib.suppress(StallfreeError, ValueError):  # the cache may be closed already
            cache.count_fetch(1, payload_bytes(future.result()))


class _Drawing:
    """A plain data set and its steps as one callable, which is searched for generators."""

    def __init__(self, dataset: Any, rest: Compose) -> None:
        self.dataset = dataset
        self.rest = rest

    def __call__(self, id: int) -> Any:
        return self.rest(self.dataset[id])


def plain_beneath(source: Source, id: int) -> tuple[MapSource, int] | None:
    """Return the plain data set from which `source` reads sample `id`, and the id in it; None if there is none."""
    inner: Any = source
    while isinstance(inner, SubsetSource) or getattr(type(inner), "passes_through", False):
        if isinstance(inner, SubsetSource):
            id = int(inner.indices[id])
        inner = inner.source
    return (inner, id) if isinstance(inner, MapSource) else None
