"""Access to the samples of a data set: its source, cache, steps and randomness, and the fetches that are under way."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stallfree.batches.transform_split import TransformSplit
from stallfree.cache import Cache, Reading
from stallfree.errors import StallfreeError, object_closed
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.in_place import works_in_place
from stallfree.pipeline.marks import drew
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.randomness import Randomness
from stallfree.sources.detach import lazily_made
from stallfree.sources.mapped import MapSource, SubsetSource
from stallfree.sources.reads.open_calls import Tracker
from stallfree.sources.throttle import ThrottledSource, payload_bytes

_Access = TypeVar("_Access", bound="SampleAccess")

IO_THREADS = 8
"""Fetches under way at once in one process. They wait for storage, so there may be more of them than cores."""

_NOTHING = Compose([])


@dataclass
class Pending:
    """A batch whose reads and fetches have been started.

    Attributes:
        ids: of its samples.
        fetches: from the source, by id. More come while the tiers of a cache answer.
        reading: from the cache; None without one.
        pool: the threads that read and fetch, if any do.
    """

    ids: npt.NDArray[np.int64]
    fetches: dict[int, Future[Any]] = field(default_factory=dict)
    reading: Reading | None = None
    pool: ThreadPoolExecutor | None = None

    def cancel(self) -> None:
        """Do not begin what has not begun."""
        for future in list(self.fetches.values()):
            future.cancel()
        if self.reading is not None:
            self.reading.cancel()


class SampleAccess:
    """Access to the samples of one data set. See `Reader`, which makes them.

    Args:
        source: where records come from.
        cache: holds what `deterministic` gave for a record (or the record, when `deterministic` is in `rest`); or None.
        deterministic: applied to a record before it is cached.
        rest: applied to what is cached, each time it is read.
        share: of the samples that this holds for; the others are cached as they are fetched. See `is_prepared`.
        whole: what is applied to those, each time they are read.
        steps: all that is applied to a record, as the user gave it: the seeds of generators go by their places there.
            `deterministic` and `rest` if None.
        reads: the cache holds what the data set of `source`, a `MapSource`, reads from files while it is indexed.

    Attributes:
        split: which steps come before the cache and which after. It changes when a step turns out to be random.
        threads: whether records are fetched by threads.
        seeds_fetch: whether the source may draw random numbers that are to be fresh each time.
        tracker: records and serves what the data set reads, if that is what is cached; else None.
        streams: number of streams that samples are taken from, one per worker: see `batches.stream`. 0: samples are had
            by id, in any order.
    """

    streams = 0

    def __init__(
        self,
        source: Source,
        cache: Cache | None,
        deterministic: Compose,
        rest: Compose,
        *,
        share: float = 1.0,
        whole: Compose = _NOTHING,
        steps: Compose | None = None,
        reads: bool = False,
    ) -> None:
        self.source, self.cache = source, cache
        self.tracker = Tracker() if reads else None
        self.io_threads = IO_THREADS
        beneath = plain_beneath(source, 0)
        self._dataset = None if beneath is None else beneath[0].dataset
        origin = source if beneath is None else self._dataset
        watched = None if reads else cache  # whose records hold what the steps made
        self.split = TransformSplit(source, watched, origin, deterministic, rest, share, whole)
        if watched is not None:
            self.split.note_settings()
        self._pipeline = (*deterministic, *rest) if steps is None else (*steps,)
        self._pool: ThreadPoolExecutor | None = None
        self._pid = -1
        self._ended = ""
        self._see_randomness()

    def _see_randomness(self) -> None:
        """Which generators are seeded."""
        self._seen = self.split.uncached
        # Without a cache, a plain data set may augment its samples itself: they are drawn in the thread that is seeded.
        # So may a source, although its `fetch` should not: if it is read by one thread, or was seen to do so.
        threads = bool(getattr(self.source, "threads", True))
        may_draw = drew(self.split.origin) or (self.cache is None and not threads)
        dataset = self.source if self._dataset is None and may_draw else self._dataset
        self.seeds_fetch = dataset is not None and (not self.caches or self.tracker is not None)
        self.threads = threads and not self.seeds_fetch
        steps = Compose([*self.rest, *self.split.whole])
        drawing: Callable[[Any], Any] | None = steps if len(steps) else None
        if self.seeds_fetch:
            drawing = _Drawing(dataset, self.rest)
        self.seeds = drawing is not None
        self.randomness = Randomness(drawing, [self._dataset, *self._pipeline], lazy=True)

    @property
    def deterministic(self) -> Compose:
        """The steps before the cache."""
        return self.split.deterministic

    @property
    def rest(self) -> Compose:
        """The steps after it."""
        return self.split.rest

    @property
    def caches(self) -> bool:
        """Whether samples are stored."""
        return self.cache is not None and self.split.caches

    @property
    def plain(self) -> bool:
        """Whether a hit is the sample, with nothing left to do."""
        return self.caches and len(self.rest) == 0 and self.split.share == 1 and self.tracker is None

    @property
    def current(self) -> bool:
        """Whether what the cache holds was made by the steps that are in `deterministic` here."""
        return self.caches and self.cache is not None and self.cache.uncached_steps == self.split.uncached

    @property
    def in_place(self) -> bool:
        """Whether samples are made by steps that write into the buffer of a batch: see `Reader.finish`."""
        split = self.split
        if not len(split.rest) or self.tracker is not None:
            return False
        steps = [*split.rest, *split.whole]
        return (split.share == 1 or len(split.whole) > 0) and all(map(works_in_place, steps))

    @property
    def direct(self) -> bool:
        """Whether the data set is indexed sample by sample in the thread that prepares: there is nothing to start."""
        return not self.caches and not self.threads

    @property
    def indexes(self) -> bool:
        """Whether samples are what a data set gives that is indexed, which may keep them."""
        return self.direct or self.tracker is not None

    # -- a batch ------------------------------------------------------------------------------------------------------

    def start(self, ids: npt.NDArray[np.int64]) -> Pending:
        """Start reading and fetching `ids`. Returns at once. Raises `InputError` after `end`."""
        self.check()
        pending = Pending(ids)
        if self.cache is not None and self.caches:
            self.begin_read(pending, self.cache)
        elif self.threads:
            self.fetch(ids.tolist(), pending)
        return pending

    def begin_read(self, pending: Pending, cache: Cache) -> Reading:
        """Begin to read a batch from the cache; what no tier holds is fetched as soon as that is known."""

        def pool() -> ThreadPoolExecutor:
            return self._pool_of(pending)

        pending.reading = cache.begin_read(pending.ids, pool, lambda missing: self.fetch(missing, pending))
        return pending.reading

    def fetch(self, ids: Sequence[int], pending: Pending) -> None:
        """Have threads fetch `ids`, unless that is under way."""
        if self.threads and len(ids):
            pool = self._pool_of(pending)
            with contextlib.suppress(RuntimeError):  # the pool is being closed: the batch is not needed any more
                for id in ids:
                    if id not in pending.fetches:
                        pending.fetches[id] = pool.submit(self.source.fetch, id)

    def _pool_of(self, pending: Pending) -> ThreadPoolExecutor:
        """The threads of a batch, which stay the same should the reader be closed meanwhile."""
        if pending.pool is None:
            if self._pool is None or self._pid != os.getpid():
                self._pool = ThreadPoolExecutor(self.io_threads, thread_name_prefix="stallfree-fetch")
                self._pid = os.getpid()
            pending.pool = self._pool
        return pending.pool

    def store(self, ids: list[int], values: list[Any]) -> None:
        """Put what `deterministic` made into the cache. Raises `CodecError`."""
        if self.cache is not None and self.caches and ids:
            self.cache.put_many(ids, values, uncached=self.split.uncached)

    def _give_up(self, pending: Pending) -> None:
        """What has not begun is not needed any more; fetches that have begun are reads all the same."""
        if pending.reading is not None:
            pending.reading.cancel()
        for future in list(pending.fetches.values()):
            if not future.cancel() and self.cache is not None:
                future.add_done_callback(partial(_count_unused, self.cache))
        pending.fetches.clear()

    # -- the split ----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Apply steps afresh that are random, as found here or by a process that shares the cache."""
        self.split.follow()
        if self._seen != self.split.uncached:
            self._see_randomness()

    def check_settings(self) -> None:
        """Warn of attributes of the data set and its steps that have changed since samples were cached."""
        if self.cache is not None and self.tracker is None:
            self.split.check_settings()

    # -- the life of it -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `InputError` after `end`."""
        if self._ended:
            raise object_closed(self._ended)

    def close(self) -> None:
        """End the threads that fetch, once they are through. They are started again when they are needed."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=True, cancel_futures=True)

    def end(self, why: str) -> None:
        """Close for good: from now on `start` and `finish` raise `InputError(why)`."""
        self._ended = why
        self.close()

    def __copy__(self: _Access) -> _Access:
        """The same with threads and a split of its own, over the same cache."""
        other = object.__new__(type(self))
        tracker = copy.copy(self.tracker)
        other.__dict__.update(self.__dict__, split=copy.copy(self.split), tracker=tracker, _pool=None, _pid=-1)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_pid": -1}


def _count_unused(cache: Cache, future: Future[Any]) -> None:
    """Count a fetch whose record was not used."""
    if not future.cancelled() and future.exception() is None:
        with contextlib.suppress(StallfreeError, ValueError):  # the cache may have been closed meanwhile
            cache.count_fetch(1, payload_bytes(future.result()))


class _Drawing:
    """A plain data set and the steps after it: whatever may hold generators of random numbers."""

    def __init__(self, dataset: Any, rest: Compose) -> None:
        self.dataset = dataset
        self.rest = rest

    def __call__(self, id: int) -> Any:
        return self.rest(self.dataset[id])


def plain_beneath(source: Source, id: int) -> tuple[MapSource, int] | None:
    """The plain data set that `source` reads sample `id` from, and the id there; None when there is none."""
    inner: Any = source
    while isinstance(inner, (SubsetSource, ThrottledSource)):
        if isinstance(inner, SubsetSource):
            id = int(inner.indices[id])
        inner = inner.source
    return (inner, id) if isinstance(inner, MapSource) else None


@contextlib.contextmanager
def untouched(source: Source) -> Iterator[None]:
    """In the block, samples are fetched here; workers that are forked later inherit nothing that these made.

    A plain data set may open a file for its first sample and keep it. Workers that share its descriptor share its
    position too, and would read the data of other samples.
    """
    beneath = plain_beneath(source, 0)
    drop = None if beneath is None else lazily_made(beneath[0].dataset)
    try:
        yield
    finally:
        if drop is not None:
            drop()
