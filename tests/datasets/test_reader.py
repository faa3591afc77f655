"""`Reader`: the samples of a batch."""

from __future__ import annotations

import contextlib
import pickle
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stallfree as sf
from cached_data import Given, Meeting, Numbers, doubled_in_place, with_draws
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.reader import IO_THREADS, Reader
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.values import private

NOTHING = Compose([])


def ids(*given: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(given, np.int64)


@contextlib.contextmanager
def reading(
    source: Any, *, cached: bool = True, rest: Any = (), fresh: bool = False, **options: Any
) -> Iterator[Reader]:
    """Return a reader that caches the outputs of the source's steps."""
    cache = SampleCache(len(source), capacity="1MiB", fingerprint="tested", **options) if cached else None
    reader = Reader(source, cache, source.pipeline, Compose(rest))
    try:
        yield reader
    finally:
        reader.close()
        if cache is not None:
            cache.close()


def test_fetches_are_under_way_together() -> None:
    with reading(Meeting(IO_THREADS, IO_THREADS), cached=False) as reader:
        assert reader.finish(reader.start(np.arange(IO_THREADS)), 0, 0, skip=False).values == list(range(IO_THREADS))


def test_fetches_of_two_batches_are_under_way_together() -> None:
    with reading(Meeting(8, 8)) as reader:
        one, two = reader.start(ids(0, 1, 2, 3)), reader.start(ids(4, 5, 6, 7))
        assert reader.finish(one, 0, 0, skip=False).values == [0, 1, 2, 3]
        assert reader.finish(two, 0, 0, skip=False).values == [4, 5, 6, 7]


def test_what_was_evicted_since_the_start_is_fetched_together() -> None:
    with reading(Meeting(4, 4), policy="lru") as reader:
        assert reader.cache is not None
        reader.cache.put_many(range(4), range(4))
        pending = reader.start(np.arange(4))
        assert not pending.fetches
        reader.cache.clear()
        assert reader.finish(pending, 0, 0, skip=False).values == [0, 1, 2, 3]


def test_a_source_that_forbids_threads_is_read_in_this_one() -> None:
    class Shy(Given):
        threads = False

        def _record(self, id: int) -> Any:
            return threading.get_ident()

    with reading(Shy([None] * 4)) as reader:
        pending = reader.start(np.arange(4))
        assert not pending.fetches
        assert set(reader.finish(pending, 0, 0, skip=False).values) == {threading.get_ident()}


def test_what_a_batch_cost() -> None:
    with reading(Given([b"12", b"345", b"6", b"78"])) as reader:
        first = reader.finish(reader.start(ids(0, 1, 0)), 0, 0, skip=False)
        assert (first.hits, first.misses, first.storage_bytes) == (0, 3, 5)
        second = reader.finish(reader.start(ids(1, 2)), 0, 0, skip=False)
        assert (second.hits, second.misses, second.storage_bytes) == (1, 1, 1)
        assert (second.ids, second.values) == ([1, 2], [b"345", b"6"])
        assert reader.cache is not None
        stats = reader.cache.stats()
        assert (stats.storage_reads, stats.storage_bytes) == (3, 6)


def test_the_error_of_a_fetch_names_the_sample() -> None:
    for cached in (True, False):
        with (
            reading(Given([1, OSError("gone"), 3]), cached=cached) as reader,
            pytest.raises(OSError, match=r"gone\n.*fetching sample 1 \(given/1\)"),
        ):
            reader.finish(reader.start(ids(0, 1, 2)), 0, 0, skip=False)


def test_the_error_of_a_third_party_source_gets_the_id() -> None:
    class Foreign:
        pipeline = NOTHING

        def __len__(self) -> int:
            return 2

        def __getitem__(self, id: int) -> Any:
            return self.fetch(id)

        def fetch(self, id: int) -> Any:
            raise ZeroDivisionError("oh")

        def where(self, id: int) -> str:
            return "nowhere"

        def fingerprint(self) -> str:
            return ""

    with (
        reading(Foreign()) as reader,
        pytest.raises(ZeroDivisionError, match=r"oh\n.*fetching sample 1 \(nowhere\)"),
    ):
        reader.finish(reader.start(ids(1)), 0, 0, skip=False)


def odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError(f"{value} is even")
    return value


@pytest.mark.parametrize(("cached", "where"), [(True, "deterministic"), (False, "rest")])
def test_skipped_samples_are_left_out_and_told(cached: bool, where: str) -> None:
    source = Given([1, 2, OSError("gone"), 3, 5], [odd] if where == "deterministic" else [])
    with reading(source, cached=cached, rest=[odd] if where == "rest" else []) as reader:
        for _ in range(2):
            samples = reader.finish(reader.start(ids(4, 1, 2, 0, 1, 3, 2)), 0, 0, skip=True)
            assert (samples.ids, samples.values) == ([4, 0, 3], [5, 1, 3])
            assert Counter(type(error) for error in samples.skipped) == {ValueError: 2, OSError: 2}
        for id in (1, 2):
            with pytest.raises((ValueError, OSError), match=f"sample {id} "):
                reader.finish(reader.start(ids(0, id)), 0, 0, skip=False)
        assert reader.finish(reader.start(ids(1, 2)), 0, 0, skip=True).values == []


def test_what_was_read_before_an_error_is_kept() -> None:
    with reading(Given([1, OSError("gone"), 3])) as reader:
        with pytest.raises(OSError, match="gone"):
            reader.finish(reader.start(ids(0, 1, 2)), 0, 0, skip=False)
        assert reader.cache is not None
        assert reader.cache.resident(ids(0, 1)).tolist() == [True, False]


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


def test_a_batch_outlives_the_closing_of_the_threads() -> None:
    with reading(Numbers(40)) as reader:
        pending = reader.start(np.arange(40))
        reader.close()
        assert [label for _, label in reader.finish(pending, 0, 0, skip=False).values] == list(range(40))


def test_after_the_end_there_is_nothing_to_be_had() -> None:
    with reading(Numbers(4)) as reader:
        pending = reader.start(ids(1))
        reader.end("it is over")
        for use in (lambda: reader.start(ids(2)), lambda: reader.finish(pending, 0, 0, skip=True)):
            with pytest.raises(sf.InputError, match="it is over"):
                use()


@pytest.mark.parametrize("cached", [True, False])
def test_randomness_is_a_function_of_seed_epoch_and_id(cached: bool) -> None:
    def draws(reader: Reader, seed: int, epoch: int | list[int], *wanted: int) -> list[Any]:
        samples = reader.finish(reader.start(ids(*wanted)), seed, epoch, skip=False)
        return [sample[2:] for sample in samples.values]

    with reading(Numbers(6), cached=cached, rest=[with_draws]) as reader:
        state = random.getstate()
        one = draws(reader, 1, 2, 0, 1, 2)
        assert random.getstate() == state
        assert draws(reader, 1, 2, 2, 3, 0) == [one[2], *draws(reader, 1, 2, 3), one[0]]
        assert len({*one, *draws(reader, 1, 3, 0, 1, 2), *draws(reader, 2, 2, 0, 1, 2)}) == 9
        assert draws(reader, 1, [3, 2, 2], 1, 1, 2) == [*draws(reader, 1, 3, 1), one[1], one[2]]


def test_a_step_that_works_in_place_works_once() -> None:
    source = Numbers(6, [doubled_in_place])
    with reading(source, rest=[doubled_in_place]) as reader:
        for _ in range(3):
            samples = reader.finish(reader.start(ids(5, 5, 2)), 0, 0, skip=False)
            assert [array.tolist() for array, _ in samples.values] == [[20] * 16, [20] * 16, [8] * 16]
    assert all((record == id).all() for id, record in enumerate(source.records))


def test_it_can_be_sent_while_its_threads_are_at_work() -> None:
    with reading(Numbers(6)) as reader:
        reader.finish(reader.start(ids(1, 2)), 0, 0, skip=False)
        there = pickle.loads(pickle.dumps(reader))
        assert there.finish(there.start(ids(1)), 0, 0, skip=False).hits == 1
        there.close()
        there.cache.close()


def test_a_private_copy_shares_nothing() -> None:
    import torch

    base = torch.zeros(4, 1000)
    array = np.zeros(3)
    value = {"a": [base[1], array], "b": (b"fixed", {"c": array}), "lock": threading.Lock()}
    copied = private(value)
    copied["a"][0][...] = 1
    copied["a"][1][...] = 1
    copied["b"][1]["c"][...] = 1
    assert not base.any()
    assert not array.any()
    assert copied["a"][0].untyped_storage().nbytes() == 4000
    assert copied["lock"] is value["lock"]
    leaf = torch.zeros(2, requires_grad=True)
    assert private(leaf).requires_grad
    assert private(leaf).is_leaf
