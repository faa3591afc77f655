"""`Reader`: ids in, samples out. Fetches ahead in threads, and stores what the cache lacks.

A batch is made in two parts: `start` begins its fetches and does not wait; `finish` makes its samples (see `samples`).
"""

import contextlib
import copy
import os
from collections.abc import Sequence
from concurrent.futures import CancelledError, Executor
from functools import partial
from typing import Any

import numpy as np

from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.ranks import Ids
from stallfree.datasets.samples import Pending, SampleBatch, Samples
from stallfree.datasets.split import Reclassified, TransformSplit
from stallfree.errors import object_closed
from stallfree.ipc.fetch_threads import FetchThreads
from stallfree.pipeline.compose import Compose, Source, drew, works_in_place
from stallfree.pipeline.randomness import Drew, Randomness
from stallfree.pipeline.settings import Settings, warn_of_changes
from stallfree.pipeline.values import as_cached, payload_bytes, private
from stallfree.raising import raisable
from stallfree.sources.mapped import MapSource, SubsetSource, as_source

IO_THREADS = 8
"""Concurrent fetches of one process. They wait for storage, so there may be more of them than cores."""


class Reader:
    """Makes the samples of one data set. Only one thread of a process may call `finish` at a time.

    Args:
        source: source of the records.
        cache: cache of the outputs of `deterministic`, with its tier; or None.
        deterministic: steps applied to a record before it is cached.
        later_steps: steps applied to a cached value each time it is read.
        steps: all steps in the order that the user gave, which determines the seeds of their generators;
            `deterministic` and `later_steps` if None.

    Attributes:
        split: the steps before and after the cache. It changes when a step turns out to be random.
        settings: attributes of the data set and its steps, to notice changes.
        single: batches are single samples, for which `__getitems__` is not called.
        caches: whether samples are stored.
        plain: whether a cached value is the finished sample.
        in_place: whether all steps after the cache can write into the rows of a batch.
        threads: whether threads fetch the records.
        direct: whether the preparing thread indexes the data set: nothing is started ahead.
        seeds: whether generators are seeded before the steps after the cache.
        seeds_fetch: whether they are seeded before a fetch, since the source may draw random numbers.
    """

    single = makes_batches = False  # `__getitems__` returns batches, and not lists of samples

    def __init__(
        self,
        source: Source,
        cache: SampleCache | None,
        deterministic: Compose,
        later_steps: Compose,
        *,
        steps: Compose | None = None,
    ) -> None:
        self.source, self.cache = source, cache
        plain = plain_beneath(source)
        self._dataset: Any = None if plain is None else plain.dataset
        origin = source if plain is None else plain.dataset
        self.split = TransformSplit(source, cache, origin, deterministic, later_steps)
        watched = cache is not None or type(source) is not MapSource
        self.settings = Settings(source, *deterministic, *later_steps) if watched else Settings()
        self._pipeline = deterministic.transforms + later_steps.transforms if steps is None else steps.transforms
        self._pool: Executor | None = None
        self._pid, self._ended = -1, ""
        self._adopt_split()

    def _adopt_split(self) -> None:
        """Determine what follows from the split: what is cached, seeded, and fetched by threads."""
        split = self.split
        self._uncached, self.deterministic, self.later_steps = split.uncached, split.deterministic, split.later_steps
        steps = self.later_steps.transforms
        self.caches = self.cache is not None and split.caches
        self.plain = self.caches and not steps
        self.in_place = bool(steps) and all(map(works_in_place, steps))
        # Without a cache, a plain data set may augment its samples itself, so it is indexed in the thread that is
        # seeded. The same holds for a source that one thread reads, or whose `fetch` was observed to draw.
        threads = bool(getattr(self.source, "threads", True))
        may_draw = drew(split.origin) or (self.cache is None and not threads)
        dataset = self.source if self._dataset is None and may_draw else self._dataset
        self.seeds_fetch = dataset is not None and not self.caches
        self.threads = threads and not self.seeds_fetch
        self.direct = not self.caches and not self.threads
        self.seeds = self.seeds_fetch or bool(steps)
        self._drawing: Any = partial(_sample_of, dataset, self.later_steps) if self.seeds_fetch else self.later_steps
        self._randomness: Randomness | None = None

    @property
    def randomness(self) -> Randomness:
        """Seeds the random draws. Its generators are searched for on first use, in the data set too."""
        if self._randomness is None:
            self._randomness = Randomness(self._drawing, [self._dataset, *self._pipeline], lazy=True)
        return self._randomness

    # -- fetches ------------------------------------------------------------------------------------------------------

    def start(self, ids: Ids) -> Pending:
        """Start to fetch `ids` without waiting. Raises `InputError` after `end`."""
        self.check()
        pending = Pending(ids)
        if self.cache is not None and self.caches:
            resident = self.cache.resident(ids)
            if not resident.all():
                self.request(ids[~resident].tolist(), pending)
        elif self.threads:
            self.fetch(ids.tolist(), pending)
        return pending

    def request(self, ids: Sequence[int], pending: Pending) -> None:
        """Start to ask the tier for `ids`, and to fetch those that it does not hold."""
        tier = None if self.cache is None else self.cache.tier
        if tier is None:
            self.fetch(ids, pending)
        elif ids:
            pool, pending.uncached = self._pool_of(pending), self.split.uncached
            with contextlib.suppress(RuntimeError):  # the pool is closed, so the batch is not needed any more
                for part in tier.parts(np.array(list(dict.fromkeys(ids)), np.int64)):
                    pending.asked.append((part, pool.submit(self._ask, tier, part, pending)))

    def _ask(self, tier: Any, ids: Ids, pending: Pending) -> list[Any]:
        """Return what the tier holds of the distinct `ids`, and start to fetch the others."""
        values: list[Any] = tier.get_many(ids, pending.uncached)
        self.fetch([id for id, value in zip(ids.tolist(), values, strict=True) if value is MISS], pending)
        return values

    def fetch(self, ids: Sequence[int], pending: Pending) -> None:
        """Start fetches of `ids` in threads, unless they are started already."""
        if self.threads and len(ids):
            pool = self._pool_of(pending)
            with contextlib.suppress(RuntimeError):  # the pool is closed, so the batch is not needed any more
                for id in ids:
                    if id not in pending.fetches:
                        pending.fetches[id] = pool.submit(self._fetch_one, id)

    def _fetch_one(self, id: int) -> Any:
        record = self.source.fetch(id)
        if self.cache is not None:
            self.cache.count_fetch(1, payload_bytes(record))
        return record

    def fetched(self, id: int, pending: Pending) -> Any:
        """Return the record of `id`, after its fetch if that was started. Raises the error of the fetch."""
        future = pending.fetches.pop(id, None)
        if future is not None:
            with contextlib.suppress(CancelledError):  # by another loader of this process, which has ended
                return pending.result(future)
        return self._fetch_one(id)

    def cached_form(self, record: Any, id: int) -> Any:
        """Return what the steps before the cache make of the record of sample `id`. Some are made twice."""
        if not self.caches:
            return self.deterministic(record)
        record = private(record)  # the source may keep a reference
        if self.split.takes_look():
            return as_cached(self.split.make_twice(record, id, self.deterministic.transforms))
        value = self.deterministic(record)
        return as_cached(value if value is record else private(value))  # it may be a buffer that a step fills again

    def _pool_of(self, pending: Pending) -> Executor:
        """Return the threads of a batch; they stay the same if the reader is closed meanwhile."""
        if pending.pool is None:
            if self._pool is None or self._pid != os.getpid():
                self._pool, self._pid = FetchThreads(IO_THREADS), os.getpid()
            pending.pool = self._pool
        return pending.pool

    # -- samples ------------------------------------------------------------------------------------------------------

    def finish(
        self,
        pending: Pending,
        seed: int,
        epoch: int | Sequence[int],
        *,
        skip: bool,
        buffer: Any = None,
        prepare: bool = True,
    ) -> Samples:
        """Return the samples of a batch that was started.

        Args:
            pending: the started fetches.
            seed: seed of the random draws.
            epoch: epoch of the random draws, or one per sample.
            skip: skip samples that fail to be fetched or prepared.
            buffer: the rows of the batch (`loader.collate.BatchBuffer`), only for a reader that is `in_place`. If all
                samples fit into it, `values` is empty.
            prepare: apply the steps after the cache; otherwise the result has counts only.

        The caller owns the values; the values of one batch may share memory. Raises the error of the first
        sample that fails, unless `skip`, and `CodecError` for a sample that cannot be stored in any case.
        """
        self.check()
        ids = pending.ids
        epochs = [epoch] * len(ids) if isinstance(epoch, int) else epoch
        while True:
            self.follow()
            try:
                with self.randomness if prepare else contextlib.nullcontext():
                    return SampleBatch(self, pending, seed, epochs, skip, buffer).make(prepare=prepare)
            except StopIteration as error:
                raise raisable(error) from error
            except (Reclassified, Drew):  # repeat the batch without the random step's cached output, or with seeds
                if buffer is not None:
                    buffer.restart()
                    self.follow()
                    buffer = buffer if self.in_place else None
            finally:
                pending.cancel()
            pending = Pending(ids, deadline=pending.deadline)

    def fill(self, ids: Ids) -> None:
        """Fetch, prepare and store the samples of `ids` that the cache lacks, without those that fail."""
        self.finish(self.start(ids), 0, 0, skip=True, prepare=False)

    def store(self, ids: list[int], values: list[Any]) -> None:
        """Store outputs of `deterministic` in the cache and in its tier. Raises `CodecError`."""
        if self.cache is not None and self.caches and ids:
            self.cache.put_many(ids, values, uncached=self.split.uncached)
            if self.cache.tier is not None:
                self.cache.tier.put_many(np.array(ids, np.int64), values, self.split.uncached)

    def follow(self) -> None:
        """Adopt a split that changed here or in another process that shares the cache."""
        self.split.follow()
        if self._uncached != self.split.uncached:
            self._adopt_split()

    def check_settings(self) -> None:
        """Warn of attributes of the data set and its steps that changed after samples were cached.

        Raises `InputError` for a transform that was cut off and has been replaced.
        """
        if self.cache is not None:
            getattr(self.source, "check_watched", bool)()
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

    def __copy__(self) -> "Reader":
        """Return a reader of the same cache with separate threads and a separate split."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, split=copy.copy(self.split), _pool=None, _pid=-1)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_pid": -1}


def _sample_of(dataset: Any, steps: Compose, id: int) -> Any:
    """What draws the random numbers of a sample that is fetched and prepared in one piece."""
    return steps(dataset[id])


def plain_beneath(source: Source) -> MapSource | None:
    """Return the plain data set from which `source` reads its samples; None if there is none."""
    inner: Any = source
    while isinstance(inner, SubsetSource) or getattr(type(inner), "passes_through", False):
        inner = inner.source
    return inner if isinstance(inner, MapSource) else None


def reader_of(dataset: Any, *, divide: bool = True, empty: bool = False) -> Reader:
    """Return the reader of a stallfree data set; for any other data set, a reader without a cache.

    Without `divide`, it indexes an `ImageFolder` of torchvision instead of applying its transform itself. Raises
    `InputError` unless `empty` for a data set without samples.
    """
    reader = getattr(dataset, "reader", None)
    if isinstance(reader, Reader):
        return reader
    source = as_source(dataset, divide=divide, empty=empty)
    return Reader(source, None, Compose([]), source.pipeline)
