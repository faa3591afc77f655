"""Makes the samples of one batch: reads hits, fetches and stores misses, and applies the steps after the cache.

A batch is made again from its start if a cached step proves random meanwhile (`Reclassified`).
"""

import contextlib
import operator
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from stallfree.cache.records import MISS, Borrowed
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.ranks import Ids
from stallfree.datasets.split import Reclassified
from stallfree.errors import CodecError, WaitError, batch_timeout
from stallfree.pipeline.compose import Source
from stallfree.pipeline.values import payload_bytes, private
from stallfree.raising import note_sample, note_samples, raisable
from stallfree.sources.mapped import MapSource

T = TypeVar("T")


@dataclass
class Pending:
    """A batch whose fetches have been started.

    Attributes:
        ids: ids of its samples.
        fetches: fetches from the source, by id. Some are added when the tier reports a miss.
        asked: ids that the tier was asked for, and what it returned.
        uncached: the number of uncached steps of the samples that it was asked for.
        pool: threads that fetch, or None.
        deadline: time (`time.monotonic`) until which fetches may take; None: no limit.
    """

    ids: Ids
    fetches: dict[int, Future[Any]] = field(default_factory=dict)
    asked: list[tuple[Ids, Future[list[Any]]]] = field(default_factory=list)
    uncached: int = 0
    pool: Executor | None = None
    deadline: float | None = None

    def cancel(self) -> None:
        """Cancel the fetches that have not begun."""
        for future in [*self.fetches.values(), *(future for _, future in self.asked)]:
            future.cancel()

    def result(self, future: Future[T]) -> T:
        """Wait for a fetch. Raises its error, `CancelledError`, and `WaitError` after the deadline."""
        if self.deadline is None or future.done():
            return future.result()
        try:
            return future.result(max(0.0, self.deadline - time.monotonic()))
        except TimeoutError:
            if future.done():  # the error is the data set's own
                raise
            raise batch_timeout(
                f"storage did not give the samples {self.ids.tolist()} in time. Give a larger timeout if it takes so "
                "long"
            ) from None


@dataclass
class Samples:
    """The samples of a batch, with their statistics.

    Attributes:
        ids: ids of the samples, without the skipped ones.
        values: the samples; empty if they are in the rows of the batch.
        hits, misses: number of samples that were in the cache, and that were not.
        storage_bytes: bytes fetched from the source.
        fetch_seconds: seconds spent waiting for fetches.
        skipped: errors of the skipped samples.
        whole: whether `values` is a batch of any type, which the data set made.
    """

    ids: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    storage_bytes: int = 0
    fetch_seconds: float = 0.0
    skipped: list[Exception] = field(default_factory=list)
    whole: bool = False

    def add_failure(self, error: Exception, source: Source, id: int, doing: str, *, skip: bool) -> None:
        """Add the error of sample `id` to `skipped`; without `skip`, raise it."""
        note_sample(error, source, id, doing)
        if not skip:
            raise error
        self.skipped.append(raisable(error))


class SampleBatch:
    """Makes the samples of one batch. Used once.

    Args:
        reader: the `Reader` of the data set, whose module imports this one.
        pending: the fetches that were started.
        seed, epochs: seed of the random draws, and the epoch of each sample.
        skip: skip samples that fail.
        buffer: the rows of the batch (`loader.collate.BatchBuffer`), in which the samples are prepared; or None.
    """

    def __init__(
        self, reader: Any, pending: Pending, seed: int, epochs: Sequence[int], skip: bool, buffer: Any = None
    ) -> None:
        self.reader, self.pending, self.seed, self.epochs = reader, pending, seed, epochs
        self.skip, self.buffer = skip, buffer
        self.ids: list[int] = pending.ids.tolist()
        self.samples = Samples()
        self._values: list[Any] = []
        self._borrowed: Borrowed | None = None

    def make(self, *, prepare: bool) -> Samples:
        """Make the samples; without `prepare`, only fill the cache.

        Raises `Reclassified` and the error of a sample; see `Reader.finish`.
        """
        if self.reader.direct and prepare:
            return self._index()
        if missing := self._read():
            self._fill(missing)
        if prepare:
            self._prepare()
        return self.samples

    # -- hits ---------------------------------------------------------------------------------------------------------

    def _read(self) -> Sequence[int]:
        """Read the samples that the cache has; returns the positions of the missing ones."""
        reader, cache, samples = self.reader, self.reader.cache, self.samples
        self._values = [MISS] * len(self.ids)
        missing: Sequence[int] = range(len(self.ids))
        if reader.caches and cache.uncached_steps == reader.split.uncached:  # else outputs of other steps
            if self.buffer is not None:
                self._borrowed = cache.borrow(self.pending.ids)
            self._values = cache.get_many(self.pending.ids) if self._borrowed is None else [*self._borrowed.values]
            missing = [at for at, value in enumerate(self._values) if value is MISS]
            if missing and cache.tier is not None:
                missing = self._take_from_tier(cache, missing)
            if cache.uncached_steps != reader.split.uncached:  # the values may be outputs of another split
                raise Reclassified
        samples.hits, samples.misses = len(self.ids) - len(missing), len(missing)
        return missing

    def _take_from_tier(self, cache: SampleCache, missing: Sequence[int]) -> Sequence[int]:
        """Put what the tier holds in place of `MISS`, and store it in memory; returns the positions that it lacks."""
        reader, pending, values = self.reader, self.pending, dict[int, Any]()
        if pending.uncached != reader.split.uncached:  # asked for samples of a step that has proved random since
            pending.asked = []
        wanted = dict.fromkeys(self.ids[at] for at in missing)
        asked = {id for ids, _ in pending.asked for id in ids.tolist()}
        reader.request([id for id in wanted if id not in asked], pending)  # those that were evicted since the start
        for ids, future in pending.asked:
            with contextlib.suppress(CancelledError):  # by another loader of this process, which has ended
                held = pending.result(future)
                pairs = zip(ids.tolist(), held, strict=True)
                values.update((id, value) for id, value in pairs if id in wanted and value is not MISS)
        if values:
            cache.count_tier(sum(self.ids[at] in values for at in missing), 0)
            if not cache.full:
                cache.put_many([*values], [*values.values()], uncached=reader.split.uncached)
        return self._use(values, missing)

    def _use(self, values: dict[int, Any], positions: Sequence[int]) -> Sequence[int]:
        """Put `values` by id in place of `MISS` at `positions`; returns the positions that have none.

        An id that occurs again in the batch has a copy.
        """
        unused, left = set(values), list[int]()
        for at in positions:
            id = self.ids[at]
            if id in values:
                self._values[at] = values[id] if id in unused else private(values[id])
                unused.discard(id)
            else:
                left.append(at)
        return left

    # -- misses -------------------------------------------------------------------------------------------------------

    def _fill(self, missing: Sequence[int]) -> None:
        """Fetch the samples at the positions `missing`, apply the steps before the cache, and store them.

        Samples that fail stay `MISS`.
        """
        reader, split = self.reader, self.reader.split
        ids = list(dict.fromkeys(self.ids[at] for at in missing))
        if len(ids) > 1 or self.pending.deadline is not None:
            reader.fetch(ids, self.pending)  # those that were evicted since the start
        values, failures = dict[int, Any](), dict[int, Exception]()
        states = split.watch() if reader.caches else None
        for id in ids:
            doing, started = "fetching", time.perf_counter()
            try:
                try:
                    record = reader.fetched(id, self.pending)
                finally:
                    self.samples.fetch_seconds += time.perf_counter() - started
                self.samples.storage_bytes += payload_bytes(record)
                doing = "preparing"
                values[id] = reader.cached_form(record, id)
            except (Reclassified, WaitError):
                raise
            except Exception as error:
                note_sample(error, reader.source, id, doing)
                failures[id] = raisable(error)
                if not self.skip:
                    break
        if states is not None and states.moved():
            split.confirm(ids)
        self._store(values)
        if failures and not self.skip:
            raise next(iter(failures.values()))
        failed = self._use(values, missing)
        self.samples.skipped += [failures[self.ids[at]] for at in failed]

    def _store(self, values: dict[int, Any]) -> None:
        """Store new samples. Raises `CodecError` with the id of the one that cannot be stored."""
        try:
            self.reader.store([*values], [*values.values()])
        except CodecError:
            for id, value in values.items():
                try:
                    self.reader.store([id], [value])
                except CodecError as error:
                    note_sample(error, self.reader.source, id, "storing")
                    raise

    # -- the steps after the cache ------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Apply the steps after the cache to all values, in the rows of the batch if there are any."""
        samples, buffer = self.samples, self.buffer
        if buffer is None and not self.reader.later_steps.transforms and not samples.skipped:
            samples.ids, samples.values = self.ids, self._values
            return
        for at in range(len(self.ids)):
            if not self._prepare_one(at):  # overwritten by another process meanwhile
                self.reader.cache.count_changed(1)
                samples.hits -= 1
                samples.misses += 1
                self._fill([at])
                self._prepare_one(at)
        if buffer is not None and not buffer.whole:
            samples.values[:0] = buffer.copied()

    def _prepare_one(self, at: int) -> bool:
        """Prepare one sample, with a buffer directly from the memory of the cache into its row.

        Returns False if its record was overwritten during the read; then do it again.
        """
        reader, samples, buffer, value, id = self.reader, self.samples, self.buffer, self._values[at], self.ids[at]
        if value is MISS:
            return True
        problem, written = None, False
        try:
            if reader.seeds:
                reader.randomness.seed(self.seed, self.epochs[at], id)
            if buffer is None:
                sample = reader.later_steps(value)
            else:
                sample = reader.later_steps.into(value, buffer.row())
                written = buffer.put(sample)
                sample = sample if written else private(sample)
        except Exception as error:
            problem = error
        borrowed = self._borrowed
        if borrowed is not None and value is borrowed.values[at] and not borrowed.unchanged(at):
            self._values[at] = borrowed.values[at] = MISS
            return False
        if problem is not None:
            samples.add_failure(problem, reader.source, id, "preparing", skip=self.skip)
            return True
        if written:
            buffer.next()
        else:
            samples.values.append(sample)
        samples.ids.append(id)
        return True

    # -- without a cache and without threads --------------------------------------------------------------------------

    def _index(self) -> Samples:
        """Index the data set in this thread. `storage_bytes` are estimated from the first sample.

        Calls `__getitems__` with all ids, as torch's loader does. If it returns samples that draw random numbers, these
        are made one by one: then they are a function of each id.
        """
        source = self.reader.source
        plain = type(source) is MapSource and not self.skip and not self.reader.later_steps.transforms
        samples = (self._index_all(source) if plain else None) or self._index_each()
        samples.misses = len(self.ids)
        with contextlib.suppress(RecursionError):  # a sample that contains itself
            if samples.whole:
                samples.storage_bytes = payload_bytes(samples.values)
            elif samples.values:
                samples.storage_bytes = payload_bytes(samples.values[0]) * len(samples.values)
        return samples

    def _index_all(self, source: MapSource) -> Samples | None:
        """Return the samples, or the batch that `__getitems__` made of them; None if each is to be made by itself."""
        reader, randomness, ids = self.reader, self.reader.randomness, self.ids
        several = None if reader.single else getattr(source.dataset, "__getitems__", None)
        if several is None:
            return Samples(ids, index_plainly(source.dataset, source, ids)) if randomness.draws is False else None
        if randomness.draws is True and not reader.makes_batches:
            return None
        randomness.seed(self.seed, self.epochs[0], ids[0])
        try:
            values = several(ids)
        except Exception as error:
            note_samples(error, ids, "fetching")
            raise
        reader.makes_batches = reader.makes_batches or not isinstance(values, list) or len(values) != len(ids)
        if reader.makes_batches:
            return Samples(ids, values, whole=True)
        return None if randomness.moved() else Samples(ids, values)

    def _index_each(self) -> Samples:
        reader, source = self.reader, self.reader.source
        steps, randomness = reader.later_steps, reader.randomness
        get = partial(operator.getitem, source.dataset) if type(source) is MapSource else source.fetch
        for id, epoch in zip(self.ids, self.epochs, strict=True):
            doing = "fetching"
            try:
                if reader.seeds_fetch:
                    randomness.seed(self.seed, epoch, id)
                value = get(id)
                if steps.transforms:
                    doing = "preparing"
                    if reader.seeds:
                        randomness.seed(self.seed, epoch, id)
                    value = steps(value)
            except Exception as error:
                self.samples.add_failure(error, source, id, doing, skip=self.skip)
            else:
                self.samples.ids.append(id)
                self.samples.values.append(value)
        return self.samples


def index_plainly(dataset: Any, source: Source, ids: list[int]) -> list[Any]:
    """Return `[dataset[id] for id in ids]`. An error has a note with the sample."""
    left = iter(ids)
    try:
        return [dataset[id] for id in left]
    except Exception as error:
        note_sample(error, source, ids[-1 - operator.length_hint(left)], "fetching")
        raise
