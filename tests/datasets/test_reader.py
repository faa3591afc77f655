"""`Reader`: the samples of a batch."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cached_data import Given, Meeting
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.reader import IO_THREADS, Reader
from stallfree.pipeline.compose import Compose


def ids(*given: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(given, np.int64)


@contextlib.contextmanager
def reading(source: Any, *, cached: bool = True, **options: Any) -> Iterator[Reader]:
    cache = SampleCache(len(source), capacity="1MiB", fingerprint="tested", **options) if cached else None
    reader = Reader(source, cache, source.pipeline, Compose([]))
    with cache or contextlib.nullcontext(), contextlib.closing(reader):
        yield reader


def test_fetches_are_under_way_together() -> None:
    with reading(Meeting(IO_THREADS, IO_THREADS), cached=False) as reader:
        assert reader.finish(reader.start(np.arange(IO_THREADS)), 0, 0, skip=False).values == list(range(IO_THREADS))


def test_what_was_evicted_since_the_start_is_fetched_together() -> None:
    with reading(Meeting(4, 4), policy="lru") as reader:
        assert reader.cache is not None
        reader.cache.put_many(range(4), range(4))
        pending = reader.start(np.arange(4))
        assert not pending.fetches
        reader.cache.clear()
        assert reader.finish(pending, 0, 0, skip=False).values == [0, 1, 2, 3]


def test_fetches_that_are_not_needed_are_cancelled_or_counted() -> None:
    started, go = threading.Event(), threading.Event()

    class Slow(Given):
        def _record(self, id: int) -> Any:
            started.set()
            go.wait(60)
            return super()._record(id)

    source = Slow([b"%d" % id for id in range(4 * IO_THREADS)])
    with reading(source) as reader:
        assert reader.cache is not None
        pending = reader.start(np.arange(len(source)))
        futures = list(pending.fetches.values())
        started.wait(60)
        reader.cache.put_many(range(len(source)), source.records)  # as another process may
        assert reader.finish(pending, 0, 0, skip=False).values == source.records
        assert sum(future.cancelled() for future in futures) >= 3 * IO_THREADS
        go.set()
        reader.close()
        assert reader.cache.stats().storage_reads == len(source.fetched) > 0
        assert reader.cache.stats().storage_bytes == sum(len(source.records[id]) for id in source.fetched)


def test_what_was_read_before_an_error_is_kept() -> None:
    with reading(Given([1, OSError("gone"), 3])) as reader:
        with pytest.raises(OSError, match="gone"):
            reader.finish(reader.start(ids(0, 1, 2)), 0, 0, skip=False)
        assert reader.cache is not None
        assert reader.cache.resident(ids(0, 1)).tolist() == [True, False]
