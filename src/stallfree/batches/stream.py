"""Makes samples of an iterable data set, over a copy of which each worker iterates, as in torch.

The sample at `position` of stream `number` has the id `position * streams + number`. A stream begins with the task that
contains its position 0. It cannot be rewound, so each of its tasks goes to the same process, in order, and only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, IterDataPipe

from stallfree.batches.batch_buffer import BatchBuffer
from stallfree.batches.batch_state import Samples
from stallfree.batches.reader import Reader, reader_of
from stallfree.batches.sample_access import Pending
from stallfree.batches.stream_recorder import Recorder
from stallfree.errors import iterable_unsupported
from stallfree.pipeline.compose import Compose
from stallfree.platform import shares_memory

FAILURES = 100
"""Consecutive samples that may fail with `on_error="skip"`, since an iterator may fail forever."""

Ids = npt.NDArray[np.int64]


def stream_ids(number: int, streams: int, first: int, count: int) -> Ids:
    """Return the ids of `count` samples of stream `number`, starting at position `first`."""
    return np.arange(first, first + count, dtype=np.int64) * streams + number


def loader_reader(dataset: Any, workers: int, *, drop_last: bool, divide: bool) -> Reader:
    """Return a `StreamReader` for an iterable data set, otherwise the result of `reader_of`."""
    if not isinstance(dataset, IterableDataset):
        return reader_of(dataset, divide=divide)
    if isinstance(dataset, IterDataPipe):
        raise iterable_unsupported(
            f"{type(dataset).__name__} is an IterDataPipe, whose graph torch's loader changes: use torch's "
            "DataLoader, or write it as an IterableDataset"
        )
    return StreamReader(dataset, workers if shares_memory() else 0, drop_last)


class StreamSource:
    """Adapts an iterable data set to the interface of a source, without random access.

    Attributes:
        dataset: the data set.
        streams: number of streams.
    """

    threads = False

    def __init__(self, dataset: Any, streams: int) -> None:
        self.dataset, self.streams = dataset, streams
        self.pipeline = Compose([])

    def __len__(self) -> int:
        """Return 0: the ids are not known in advance."""
        return 0

    def fetch(self, id: int) -> Any:
        """Raises `InputError`: a stream has no random access."""
        name = type(self.dataset).__name__
        raise iterable_unsupported(
            f"{name} is an IterableDataset, which has no random access by id: give a map-style data set"
        )

    __getitem__ = fetch

    def where(self, id: int) -> str:
        """Return the position of a sample as text."""
        position, number = divmod(id, self.streams)
        return f"position {position} of the stream of worker {number}"

    def fingerprint(self) -> str:
        """Raises `InputError`, like `fetch`."""
        return str(self.fetch(0))


class StreamReader(Reader):
    """Takes samples from an iterator over a data set, without seeding generators.

    Args:
        dataset: an iterable data set.
        workers: number of worker processes.
        drop_last: drop an incomplete last batch of each stream.

    Attributes:
        recorder: stores the samples, or None.
        table: ids of all samples if a cache holds them, otherwise None.
    """

    indexes = False  # samples are delivered without a copy, as in torch

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
        """Begin the stream of this process; otherwise its first task begins it."""
        self._iterator = None
        with self._recorded():
            self._iterator = iter(self._stream.dataset)
        self._fresh = True

    def finish(
        self, pending: Pending, seed: int, epoch: Any, *, skip: bool, buffer: BatchBuffer | None = None
    ) -> Samples:
        """Return the next samples of the stream: as many as there are ids, or fewer at its end."""
        self.check()
        ids = pending.ids.tolist()
        with self._recorded():
            samples, end = self._take(ids, skip)
        if self.recorder is not None:
            self.recorder.store(samples, self.streams, end)
        if samples.ended and self._drop_last and len(samples.ids) + len(samples.skipped) < len(ids):
            return Samples(skipped=samples.skipped, ended=True)
        samples.misses = len(samples.ids)
        samples.estimate_bytes()
        return samples

    def _take(self, ids: list[int], skip: bool) -> tuple[Samples, int | None]:
        """Return the samples of `ids`, and the id at which the iterator ended, or None."""
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
                self._failures += 1
                samples.add_failure(error, self.source, id, "fetching", skip=skip and self._failures < FAILURES)
        samples.ended = self._iterator is None
        return samples, end

    def _recorded(self) -> AbstractContextManager[object]:
        return nullcontext() if self.recorder is None else self.recorder

    def close(self) -> None:
        """Drop the iterator, which may hold open files."""
        super().close()
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_iterator": None}
