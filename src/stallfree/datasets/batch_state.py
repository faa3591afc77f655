"""The state of one batch under construction: its samples that are read, fetched, stored and prepared."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stallfree.cache.records import MISS, Borrowed
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.sample_access import Pending, SampleAccess
from stallfree.datasets.split import Reclassified
from stallfree.errors import CodecError
from stallfree.loader.batch_buffer import BatchBuffer
from stallfree.notes import note_sample, raisable
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.values import as_cached, payload_bytes, private


@dataclass
class Samples:
    """The samples of a batch, with their statistics.

    Attributes:
        ids: ids of the samples, without the skipped ones.
        values: the samples; empty if they are in the batch buffer.
        whole: whether `values` is a batch of any type, which the data set made.
        hits, misses: number of samples that were in the cache, and that were not.
        storage_bytes: bytes fetched from the source.
        fetch_seconds: seconds spent waiting for fetches.
        skipped: errors of the skipped samples.
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
        """Add the error of sample `id`, which is being handled, to `skipped`; without `skip`, raise it again."""
        note_sample(error, source, id, doing)
        if not skip:
            raise
        self.skipped.append(raisable(error))

    def estimate_bytes(self) -> None:
        """Set `storage_bytes` to the size of the first sample times the number of samples."""
        try:
            if self.whole:
                self.storage_bytes = payload_bytes(self.values)
            elif self.values:
                self.storage_bytes = payload_bytes(self.values[0]) * len(self.values)
        except RecursionError:  # a sample that contains itself
            pass


class BatchState:
    """Makes the samples of one batch.

    Args:
        reader: access to the data set.
        pending: the reads and fetches that were started.
        seed, epochs: seed of the random draws, and the epoch of each sample.
        skip: skip samples that fail.
        buffer: buffer in which the samples are prepared, or None.
    """

    def __init__(
        self,
        reader: SampleAccess,
        pending: Pending,
        seed: int,
        epochs: Sequence[int],
        skip: bool,
        buffer: BatchBuffer | None,
    ) -> None:
        self.reader, self.pending, self.seed, self.epochs = reader, pending, seed, epochs
        self.skip, self.buffer = skip, buffer
        self.ids: list[int] = pending.ids.tolist()
        self.samples = Samples()
        self._found: list[Any] = []
        self._borrowed: Borrowed | None = None
        self._own: set[int] = set()  # positions of values that are not views of the cache
        self._failed: dict[int, Exception] = {}
        self._reads = self._read_bytes = 0

    def make(self) -> Samples:
        """Make the samples of the batch. Raises `Reclassified` and the error of a sample; see `Reader.finish`."""
        missing = self._read()
        if missing:
            self._fill(missing)
        if self.buffer is None:
            self._prepare()
        else:
            self._prepare_in_place(self.buffer)
        return self.samples

    def fill(self) -> int:
        """Fetch and store the samples that the cache lacks; returns how many failed."""
        self._fill(self._read())
        return len(self.samples.skipped)

    # -- hits ---------------------------------------------------------------------------------------------------------

    def _read(self) -> list[int]:
        """Read the samples that the cache has; returns the positions of the missing ones."""
        reader, cache = self.reader, self.reader.cache
        self._found = [MISS] * len(self.ids)
        if cache is not None and reader.current:
            if self.buffer is not None:
                self._borrowed = cache.borrow(self.pending.ids)
            self._found = cache.get_many(self.pending.ids) if self._borrowed is None else self._borrowed.values
            self._own = {at for at, value in enumerate(self._found) if value is MISS}
            if self._own and cache.tier is not None:
                self._take_from_tier(cache)
            if cache.uncached_steps != reader.split.uncached:  # the values may be outputs of another split
                raise Reclassified
        missing = [at for at, value in enumerate(self._found) if value is MISS]
        self._own.update(missing)
        self.samples.hits, self.samples.misses = len(self.ids) - len(missing), len(missing)
        return missing

    def _take_from_tier(self, cache: SampleCache) -> None:
        """Put what the tier holds in place of `MISS`, and store it in memory."""
        asked, pending = dict[int, Any](), self.pending
        if pending.uncached != self.reader.split.uncached:  # they were made with a step that has proved random since
            pending.asked, pending.uncached = [], self.reader.split.uncached
        for ids, future in pending.asked:
            with contextlib.suppress(CancelledError):  # by another loader of this process, which has ended
                asked.update(zip(ids.tolist(), future.result(), strict=True))
        missing = {self.ids[at]: at for at in sorted(self._own, reverse=True)}
        left = np.array([id for id in missing if id not in asked], np.int64)  # evicted since the start
        if len(left):
            asked.update(zip(left.tolist(), self.reader.ask(left, pending), strict=True))
        stored = {id: value for id in missing if (value := asked[id]) is not MISS}
        if not stored:
            return
        hits = [at for at in self._own if self.ids[at] in stored]
        cache.count_tier(len(hits), 0)
        if not cache.full:
            cache.put_many(list(stored), list(stored.values()), uncached=self.reader.split.uncached)
        for at in hits:
            value = stored[self.ids[at]]
            self._found[at] = value if at == missing[self.ids[at]] else private(value)

    # -- misses -------------------------------------------------------------------------------------------------------

    def _fill(self, missing: list[int]) -> None:
        """Fetch the samples at the positions `missing`, apply the steps before the cache, and store them.

        Samples that fail stay `MISS`.
        """
        reader = self.reader
        first: dict[int, int] = {}
        for at in missing:
            first.setdefault(self.ids[at], at)
        if len(first) > 1:
            reader.fetch(list(first), self.pending)  # those that were evicted since the start
        failed: Exception | None = None
        try:
            states = reader.split.watch() if reader.caches else None
            try:
                for id, at in first.items():
                    self._fill_one(id, at)
            except Reclassified:
                raise
            except Exception as error:
                failed = error
            if states is not None and first and states.moved():
                reader.split.confirm(list(first))
        except Reclassified:  # the values must not be stored
            if reader.cache is not None and self._reads:
                reader.cache.count_fetch(self._reads, self._read_bytes)
            raise
        self._store(first)
        if failed is not None:
            raise failed
        for at in missing:
            if at != first[self.ids[at]]:
                self._repeat(at, first[self.ids[at]])

    def _fill_one(self, id: int, at: int) -> None:
        try:
            value = self._value(id)
        except Reclassified:
            raise
        except Exception as error:
            if not self.skip:
                raise
            self._failed[id] = raisable(error)
            self.samples.skipped.append(self._failed[id])
        else:
            self._found[at] = as_cached(value) if self.reader.caches else value

    def _value(self, id: int) -> Any:
        """Return sample `id` as the cache holds it."""
        reader, split = self.reader, self.reader.split
        steps = split.deterministic
        record = self._record(id)
        try:
            if reader.caches and split.takes_look():
                return split.make_twice(record, id, steps.transforms)
            return steps(record)
        except Reclassified:
            raise
        except Exception as error:
            note_sample(error, reader.source, id, "preparing")
            raise

    def _record(self, id: int) -> Any:
        """Return the record of sample `id`."""
        record = self._fetched(id, self.pending.fetches.pop(id, None))
        size = payload_bytes(record)
        self._reads += 1
        self._read_bytes += size
        self.samples.storage_bytes += size
        return record if self.reader.cache is None else private(record)  # the source may keep a reference

    def _fetched(self, id: int, future: Future[Any] | None) -> Any:
        source, started = self.reader.source, time.perf_counter()
        try:
            if future is not None:
                with contextlib.suppress(CancelledError):  # by another loader of this process, which has ended
                    return future.result()
            return source.fetch(id)
        except Exception as error:
            note_sample(error, source, id, "fetching")
            raise
        finally:
            self.samples.fetch_seconds += time.perf_counter() - started

    def _repeat(self, at: int, first: int) -> None:
        """Copy the sample at `first` to `at`, since its id occurs twice in the batch."""
        if self._found[first] is MISS:
            self.samples.skipped.append(self._failed[self.ids[at]])
        else:
            self._found[at] = private(self._found[first])

    def _store(self, first: dict[int, int]) -> None:
        reader, cache = self.reader, self.reader.cache
        if cache is None:
            return
        if self._reads:
            cache.count_fetch(self._reads, self._read_bytes)
        new = [(id, self._found[at]) for id, at in first.items() if self._found[at] is not MISS]
        try:
            reader.store([id for id, _ in new], [value for _, value in new])
        except CodecError:
            for id, value in new:
                try:
                    reader.store([id], [value])
                except CodecError as error:
                    note_sample(error, reader.source, id, "storing")
                    raise

    # -- the steps after the cache ------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Apply the remaining steps to all values."""
        reader, samples = self.reader, self.samples
        rest = reader.rest
        if not len(rest) and not samples.skipped:
            samples.ids, samples.values = self.ids, self._found
            return
        for id, value, epoch in zip(self.ids, self._found, self.epochs, strict=True):
            if value is MISS:
                continue
            try:
                if reader.seeds:
                    reader.randomness.seed(self.seed, epoch, id)
                samples.values.append(rest(value))
                samples.ids.append(id)
            except Exception as error:
                samples.add_failure(error, reader.source, id, "preparing", skip=self.skip)

    def _prepare_in_place(self, buffer: BatchBuffer) -> None:
        """Prepare the samples in the buffer, directly from the memory of the cache and without copies."""
        for at in range(len(self.ids)):
            if not self._prepare_row(at, buffer):  # overwritten by another process meanwhile
                self._fetch_again(at)
                self._prepare_row(at, buffer)
        if not buffer.whole:
            self.samples.values[:0] = buffer.copied()

    def _prepare_row(self, at: int, buffer: BatchBuffer) -> bool:
        """Prepare one sample. Returns False if its record was overwritten during the read; then do it again."""
        value, id, problem, written = self._found[at], self.ids[at], None, False
        if value is MISS:
            return True
        try:
            if self.reader.seeds:
                self.reader.randomness.seed(self.seed, self.epochs[at], id)
            sample = self.reader.rest.into(value, buffer.row())
            written = buffer.put(sample)
            if not written:
                sample = private(sample)
        except Exception as error:
            problem = error
        if self._borrowed is not None and at not in self._own and not self._borrowed.unchanged(at):
            return False
        if problem is not None:
            self.samples.add_failure(problem, self.reader.source, id, "preparing", skip=self.skip)
            return True
        if written:
            buffer.next()
        else:
            self.samples.values.append(sample)
        self.samples.ids.append(id)
        return True

    def _fetch_again(self, at: int) -> None:
        cache = self.reader.cache
        assert cache is not None
        cache.count_changed(1)
        self._found[at] = MISS
        self._own.add(at)
        self.samples.hits -= 1
        self.samples.misses += 1
        self._fill([at])
