"""Samples of an iterable data set: each worker iterates over a copy of its own, as under torch's loader.

The id of the sample at `position` of stream `number` is `position * streams + number`. A stream begins with the task
that has its position 0, and cannot be read again: each of its tasks goes to the same process, in order, and only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, IterDataPipe

from stallfree.batches.batch_buffer import BatchBuffer
from stallfree.batches.batch_state import Samples, raise_from
from stallfree.batches.reader import Reader, reader_of
from stallfree.batches.sample_access import Pending
from stallfree.batches.stream_recorder import Recorder
from stallfree.errors import iterable_unsupported
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.protocol import sample_error
from stallfree.platform import shares_memory
from stallfree.sources.throttle import payload_bytes

FAILURES = 100
"""Samples in a row that may fail with `on_error="skip"`: an iterator may fail for ever."""

Ids = npt.NDArray[np.int64]


def stream_ids(number: int, streams: int, first: int, count: int) -> Ids:
    """The ids of `count` samples of stream `number`, from position `first` on."""
    return np.arange(first, first + count, dtype=np.int64) * streams + number


def loader_reader(dataset: Any, workers: int, *, drop_last: bool) -> Reader:
    """The reader of a loader: of streams for an iterable data set, else that of `reader_of`."""
    if not isinstance(dataset, IterableDataset):
        return reader_of(dataset)
    if isinstance(dataset, IterDataPipe):
        raise iterable_unsupported(
            f"{type(dataset).__name__} is an IterDataPipe, of which torch's loader changes the graph: give torch's "
            "DataLoader, or write it as an IterableDataset"
        )
    return StreamReader(dataset, workers if shares_memory() else 0, drop_last)


class StreamSource:
    """An iterable data set in the place of a source: names its samples in messages.

    Attributes:
        dataset: the data set.
        streams: number of streams.
    """

    threads = False

    def __init__(self, dataset: Any, streams: int) -> None:
        self.dataset, self.streams = dataset, streams
        self.pipeline = Compose([])

    def __len__(self) -> int:
        """0, as there are no ids to draw."""
        return 0

    def fetch(self, id: int) -> Any:
        """Raises `InputError`: a stream has no random access."""
        name = type(self.dataset).__name__
        raise iterable_unsupported(
            f"{name} is an IterableDataset, whose samples are not had by their ids: give a map-style data set"
        )

    __getitem__ = fetch

    def where(self, id: int) -> str:
        """The position of a sample."""
        position, number = divmod(id, self.streams)
        return f"position {position} of the stream of worker {number}"

    def fingerprint(self) -> str:
        """Raises `InputError`, as `fetch`."""
        return str(self.fetch(0))


class StreamReader(Reader):
    """Takes samples from an iterator over a data set, with the generators as they are.

    Args:
        dataset: an iterable data set.
        workers: number of worker processes.
        drop_last: leave out an incomplete last batch of each stream.

    Attributes:
        recorder: stores the samples, or None.
        table: the ids of all samples, if a cache holds them; else None.
    """

    indexes = False  # samples are delivered as under torch

    def __init__(self, dataset: Any, workers: int, drop_last: bool) -> None:
        self.streams = max(1, workers)
        self._stream = StreamSource(dataset, self.streams)
        super().__init__(self._stream, None, Compose([]), Compose([]))
        self.recorder: Recorder | None = None
        self.table: Ids | None = None
        self._drop_last = drop_last
        self._iterator: Iterator[Any] | None = None
        self._fresh = False
        self._failures = 0

    def begin(self) -> None:
        """Begin the stream of this process; else its first task does."""
        self._iterator = None
        with self._recorded():
            self._iterator = iter(self._stream.dataset)
        self._fresh = True

    def finish(
        self, pending: Pending, seed: int, epoch: Any, *, skip: bool, buffer: BatchBuffer | None = None
    ) -> Samples:
        """The next samples of the stream: as many as there are ids, or fewer at its end."""
        self.check()
        ids = pending.ids.tolist()
        with self._recorded():
            samples, end = self._take(ids, skip)
        if self.recorder is not None:
            self.recorder.store(samples, self.streams, end)
        if samples.ended and self._drop_last and len(samples.ids) + len(samples.skipped) < len(ids):
            return Samples(skipped=samples.skipped, ended=True)
        samples.misses = len(samples.ids)
        if samples.values:
            samples.storage_bytes = payload_bytes(samples.values[0]) * len(samples.values)
        return samples

    def _take(self, ids: list[int], skip: bool) -> tuple[Samples, int | None]:
        """The samples of `ids`, and the id at which the iterator has ended."""
        samples, end = Samples(), None
        for id in ids:
            try:
                if id < self.streams and not self._fresh:
                    self.begin()
                self._fresh = False
                if self._iterator is None:
                    break
                samples.values.append(next(self._iterator))
                samples.ids.append(id)
                self._failures = 0
            except StopIteration:
                self._iterator, end = None, id
                break
            except Exception as error:
                problem = sample_error(error, self.source, id, "fetching")
                self._failures += 1
                if not skip or self._failures >= FAILURES:
                    raise_from(problem, error)
                samples.skipped.append(problem)
        samples.ended = self._iterator is None
        return samples, end

    def _recorded(self) -> AbstractContextManager[object]:
        return nullcontext() if self.recorder is None else self.recorder

    def close(self) -> None:
        """End the stream, which may hold open files."""
        super().close()
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_iterator": None}
