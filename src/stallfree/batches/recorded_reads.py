"""Samples of a data set whose reads of files are cached: it is indexed anew each time, and its files come from records.

Nothing of what the data set returns is cached, so nothing is classified, and random numbers are drawn afresh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stallfree.batches.batch_state import Samples, raise_from
from stallfree.cache import MISS, Lends
from stallfree.pipeline.protocol import sample_error
from stallfree.sources.mapped import MapSource
from stallfree.sources.open_calls import Tracker
from stallfree.sources.recorded import Block, FileChanged, Record

if TYPE_CHECKING:
    from stallfree.batches.reader import Pending, Reader

_ATTEMPTS = 4
"""Runs for one sample, should files change again and again."""


class RecordedReads:
    """Makes the samples of one batch; see `Reader.finish`.

    Args:
        reader: of the data set, which is a `MapSource`.
        tracker: records and serves.
        pending: the reads from the cache that were started.
        seed, epochs: of the randomness; one epoch per sample.
        skip: leave samples out that cannot be had.
    """

    def __init__(
        self, reader: Reader, tracker: Tracker, pending: Pending, seed: int, epochs: Sequence[int], *, skip: bool
    ) -> None:
        assert isinstance(reader.source, MapSource)
        self.reader, self.tracker, self.pending, self.skip = reader, tracker, pending, skip
        self.seed, self.epochs = seed, epochs
        self.dataset = reader.source.dataset
        self.samples = Samples()
        self._new: dict[int, Record] = {}
        self._outdated: list[int] = []
        self._reads = 0
        self._doing = ""

    def make(self) -> Samples:
        """Make the samples, and store the records of those that the cache has not. Raises `SampleError`."""
        reader, cache, samples = self.reader, self.reader.cache, self.samples
        assert cache is not None
        found = (self.pending.reading or reader.begin_read(self.pending, cache)).result()
        try:
            for id, epoch, record in zip(self.pending.ids.tolist(), self.epochs, found, strict=True):
                try:
                    value = self._sample(id, epoch, None if record is MISS else record)
                except Exception as error:
                    problem = sample_error(error, reader.source, id, self._doing)
                    if not self.skip:
                        raise_from(problem, error)
                    samples.skipped.append(problem)
                else:
                    samples.ids.append(id)
                    samples.values.append(value)
        finally:
            self._store()
        return samples

    def _sample(self, id: int, epoch: int, record: Record | None) -> Any:
        """The sample of `id`, with its files out of `record`; without one, the reads of its files are recorded."""
        record = self._new.get(id) if record is None else record
        self.samples.hits += record is not None
        self.samples.misses += record is None
        for _ in range(_ATTEMPTS):
            block = _block(record)
            value, problem = None, None
            try:
                value = self.tracker.run(block, self._run, id, epoch)
            except Exception as error:
                problem = error
            self.samples.storage_bytes += block.storage_bytes
            self.samples.fetch_seconds += block.seconds
            if not block.stale:
                break
            if record is not None:
                self._outdate(id)
                record = None
        else:
            raise problem or FileChanged(f"files of sample {id} changed {_ATTEMPTS} times while they were read")
        if problem is not None:
            raise problem
        if block.recording:
            self._reads += 1
            self._new[id] = block.record(id, self.tracker.shared)
        return value

    def _run(self, id: int, epoch: int) -> Any:
        reader = self.reader
        self._doing = "fetching"
        reader.randomness.seed(self.seed, epoch, id)
        value = self.dataset[id]
        if len(reader.rest):
            self._doing = "preparing"
            reader.randomness.seed(self.seed, epoch, id)
            value = reader.rest(value)
        return value

    def _outdate(self, id: int) -> None:
        """A file has changed since the record of `id` was made: it counts as a miss."""
        self._outdated.append(id)
        self._new.pop(id, None)
        self.samples.hits -= 1
        self.samples.misses += 1

    def _store(self) -> None:
        cache = self.reader.cache
        assert cache is not None
        if self._outdated:
            cache.drop(self._outdated)
            if isinstance(cache, Lends):
                cache.count_changed(len(self._outdated))
        if self._reads or self.samples.storage_bytes:
            cache.count_fetch(self._reads, self.samples.storage_bytes)
        self.reader.store(list(self._new), list(self._new.values()))


def _block(record: Record | None) -> Block:
    """The block that serves `record`. One that cannot be read is a miss."""
    if record is not None:
        with contextlib.suppress(ValueError, TypeError):
            return Block(record)
    return Block()


def record_sample(dataset: Any, id: int) -> tuple[Record, int]:
    """Index `dataset` once. Returns the record of what it read, and the bytes that it read from storage."""
    tracker, block = Tracker(), Block()
    tracker.run(block, lambda: dataset[id])
    return block.record(id, tracker.shared), block.storage_bytes
