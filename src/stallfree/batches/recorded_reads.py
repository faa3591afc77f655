"""Makes samples of a data set whose file reads are cached.

`dataset[id]` runs each time, on cached file contents. The values that the data set returns are not cached, so no
transform is classified, and each epoch draws fresh numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from stallfree.batches.batch_state import Samples
from stallfree.batches.sample_access import Pending, SampleAccess
from stallfree.cache.records import MISS, Borrowed
from stallfree.sources.mapped import MapSource
from stallfree.sources.reads.open_calls import Tracker
from stallfree.sources.reads.recorded import Block, FileChanged, Record

_ATTEMPTS = 4
"""Attempts to make one sample while its files change."""


class RecordedReads:
    """Makes the samples of one batch; see `Reader.finish`.

    Args:
        reader: access to the data set, whose source is a `MapSource`.
        tracker: records the file reads, and serves them from records.
        pending: the reads from the cache that were started.
        seed, epochs: seed of the random draws, and the epoch of each sample.
        skip: skip samples that fail.
    """

    def __init__(
        self, reader: SampleAccess, tracker: Tracker, pending: Pending, seed: int, epochs: Sequence[int], *, skip: bool
    ) -> None:
        assert isinstance(reader.source, MapSource)
        self.reader, self.tracker, self.pending, self.skip = reader, tracker, pending, skip
        self.seed, self.epochs = seed, epochs
        self.dataset = reader.source.dataset
        self.samples = Samples()
        self._lent: Borrowed | None = None
        self._new: dict[int, Record] = {}
        self._outdated: list[int] = []
        self._reads = self._changed = 0
        self._doing = ""

    def make(self) -> Samples:
        """Make the samples, and store the records that the cache lacks. Raises the error of a sample."""
        samples, found = self.samples, self._read()
        try:
            for at, (id, epoch, record) in enumerate(zip(self.pending.ids.tolist(), self.epochs, found, strict=True)):
                try:
                    value = self._sample(at, id, epoch, None if record is MISS else record)
                except Exception as error:
                    samples.add_failure(error, self.reader.source, id, self._doing, skip=self.skip)
                else:
                    samples.ids.append(id)
                    samples.values.append(value)
        finally:
            del found
            self._lent = None
            self._store()
        return samples

    def _read(self) -> list[Any]:
        """Return the cached records: views of the cache's memory if it does not evict, otherwise copies."""
        cache = self.reader.cache
        assert cache is not None
        if not cache.policy.evicts:
            self._lent = cache.borrow(self.pending.ids)
            if self._lent is not None:
                return self._lent.values
        return cache.get_many(self.pending.ids)

    def _sample(self, at: int, id: int, epoch: int, record: Record | None) -> Any:
        """Make sample `id` with the files in `record`; if that is None, record its file reads."""
        lent = record is not None and self._lent is not None
        block = _block(self._new.get(id) if record is None else record, lent)
        for attempt in range(_ATTEMPTS):
            value, problem = None, None
            try:
                value = self.tracker.run(block, self._run, id, epoch)
            except Exception as error:
                problem = error
            self.samples.storage_bytes += block.storage_bytes
            self.samples.fetch_seconds += block.seconds
            overwritten = lent and not block.recording and self._lent is not None and not self._lent.unchanged(at)
            if not (block.stale or overwritten or (block.doubtful and attempt == 0)):
                break
            block.wait()
            self._discard(block, id, overwritten=overwritten)
            block = Block()
        else:
            raise problem or FileChanged(f"files of sample {id} changed {_ATTEMPTS} times while they were read")
        self.samples.hits += not block.recording
        self.samples.misses += block.recording
        if problem is not None:
            raise problem
        if block.recording:
            self._reads += 1
            self._new[id] = block.record(id, self.tracker.shared)
        return value

    def _discard(self, block: Block, id: int, *, overwritten: bool) -> None:
        """Discard a block whose file has changed, or whose record was overwritten."""
        if block.recording:
            return
        self._changed += 1
        self._new.pop(id, None)
        if overwritten:
            block.close_files()
        else:
            self._outdated.append(id)

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

    def _store(self) -> None:
        cache = self.reader.cache
        assert cache is not None
        if self._outdated:
            cache.drop(self._outdated)
        if self._changed:
            cache.count_changed(self._changed)
        if self._reads or self.samples.storage_bytes:
            cache.count_fetch(self._reads, self.samples.storage_bytes)
        self.reader.store(list(self._new), list(self._new.values()))


def _block(record: Record | None, lent: bool) -> Block:
    """Return the block that serves `record`; an unreadable record counts as a miss."""
    if record is not None:
        with contextlib.suppress(ValueError, TypeError):
            return Block(record, lent=lent)
    return Block()


def record_sample(dataset: Any, id: int) -> tuple[Record, int]:
    """Index `dataset` once. Return the record of its file reads, and an upper bound of the bytes read."""
    tracker = Tracker()
    for attempt in range(_ATTEMPTS):
        block = Block()
        tracker.run(block, lambda: dataset[id])
        if not block.stale and not (block.doubtful and attempt == 0):
            break
        block.wait()
    return block.record(id, tracker.shared), block.storage_bytes + block.handed_bytes
