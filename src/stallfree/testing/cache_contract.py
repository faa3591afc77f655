"""`CacheContract`: the test suite that every cache passes."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
import torch

from stallfree.cache import MISS, Cache
from stallfree.errors import CodecError, InputError
from stallfree.pipeline.codec import encode

COUNT = 32
AMPLE = 1 << 20
LITTLE = 64 << 10
_SECONDS = 60.0

KINDS: list[Any] = [
    *(None, False, True, 0, -(1 << 60), 3.5, "", "text", b"", b"bytes", (), [], {}),
    *((1, "a", None), [[1], []], {"a": [1, 2.0], "b": (None,)}, np.float32(2), np.bool_(True)),
    *(np.zeros((0, 3)), np.arange(12.0).reshape(3, 4), np.array(5), np.arange(20_000, dtype=np.int16)),
    *(torch.zeros(0), torch.tensor(7), torch.arange(10).view(2, 5), {"x": torch.ones(2, 3), "y": [np.arange(3), "z"]}),
]
_STEPS = ("put", "get", "begin_read", "gather", "drop", "look")

Steps = Sequence[tuple[str, Sequence[int]]]


class MakeCache(Protocol):
    """The fixture `make_cache`: creates an empty cache that shares nothing with earlier ones."""

    def __call__(self, num_ids: int, capacity: int, *, example: Any = MISS, allow_pickle: bool = True) -> Cache: ...


class NeedsPickle:
    """A value that the codec does not support."""


class CacheContract:
    """The test suite that every `stallfree.cache.Cache` passes, for pytest.

    A subclass defines the fixture `make_cache`, a function that creates an empty cache, with these arguments:

    | argument | meaning |
    | --- | --- |
    | `num_ids` | number of samples of the data set |
    | `capacity` | bytes: 1 MiB if all samples must fit; 64 KiB if the cache should become full, if possible |
    | `example` | a sample of the kind that is put, or `MISS`; a cache may derive its `structure` from it |
    | `allow_pickle` | whether the cache may pickle values |

    If Hypothesis is installed, it generates the sequences of calls that are compared with a dict.

    Attributes:
        picklable: whether the cache can be pickled.

    Example:
        ```python
        class TestMyCache(sf.testing.CacheContract):
            @pytest.fixture
            def make_cache(self):
                with contextlib.ExitStack() as stack:
                    yield lambda ids, capacity, **_: stack.enter_context(MyCache(ids, capacity))
        ```
    """

    picklable = True

    @pytest.fixture
    def make_cache(self) -> MakeCache:
        """Override this fixture."""
        raise NotImplementedError("override the fixture make_cache: see stallfree.testing.CacheContract")

    # -- put and get --------------------------------------------------------------------------------------------------

    def test_a_new_cache_is_empty(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        assert cache.num_ids == COUNT
        assert cache.get_many(range(COUNT)) == [MISS] * COUNT
        assert not cache.resident(range(COUNT)).any()
        assert (cache.complete, cache.uncached_steps) == (False, 0)
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.resident_items, stats.evictions) == (0, COUNT, 0, 0)

    def test_values_of_all_kinds_come_back(self, make_cache: MakeCache) -> None:
        cache = make_cache(len(KINDS), AMPLE)
        put(cache, range(len(KINDS)), KINDS)
        order = np.random.default_rng(0).permutation(len(KINDS)).tolist()
        for id, value in zip(order, cache.get_many(order), strict=True):
            assert same(value, KINDS[id]), f"{KINDS[id]!r} came back as {value!r}"

    def test_integers_of_any_type_are_ids(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        put(cache, range(3), [sample(id) for id in range(3)])
        arrays = np.array([2, 0], np.uint8), np.array([2, 0], np.uint64), torch.tensor([2, 0])
        for ids in ([2, 0], (2, 0), range(2, -1, -2), *arrays):
            assert all(is_right(id, value) for id, value in zip([2, 0], cache.get_many(ids), strict=True))
        assert cache.get_many([]) == []
        assert cache.put_many([], []).tolist() == cache.resident([]).tolist() == []

    def test_stored_values_are_unchanged_and_the_first_of_equal_ids_counts(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        put(cache, [1, 2, 1], [sample(1, 7), sample(2), sample(1, 8)])
        put(cache, [2, 3], [sample(2, 9), sample(3)])
        assert [value[1] for value in cache.get_many([1, 2, 3])] == [7, 0, 0]

    def test_changed_values_affect_neither_cache_nor_other_values(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        given = [sample(id) for id in range(4)]
        put(cache, range(4), given)
        for array, _ in given:
            array[:] = 0
        ids = [1, 1, 2, 1, 3, 3]
        for read in (cache.get_many, lambda ids: begin(cache, ids)[0], cache.get_many):
            values = read(ids)
            for at, (array, _) in enumerate(values):
                assert is_right(ids[at], (array, 0)), "changing one value has changed another"
                array[:] = 0

    def test_invalid_ids_raise(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        put(cache, [1], [sample(1)])
        calls: list[Callable[[Any], Any]] = [
            cache.get_many,
            cache.resident,
            cache.drop,
            lambda ids: cache.put_many(ids, [sample(0)] * (len(ids) if isinstance(ids, list) else 1)),
            lambda ids: cache.gather(ids, rows_for(cache, 1)),
        ]
        for call, ids in itertools.product(calls, ([COUNT], [1, -1], [0, 2**62])):
            with pytest.raises(InputError, match="outside of the data set") as caught:
                call(ids)
            assert isinstance(caught.value, IndexError)
        for call, wrong in itertools.product(calls, ([1.5], ["a"], [[1], [2]], [[1], [2, 3]], [True], [None], 5)):
            with pytest.raises(InputError):
                call(wrong)
        with pytest.raises(InputError, match="outside of the data set"):
            cache.begin_read(np.array([1, COUNT]), no_pool, print)
        assert there(cache) == {1}

    def test_each_id_needs_a_value(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        with pytest.raises(InputError, match="2 ids and 1 values"):
            cache.put_many([1, 2], [sample(1)])

    def test_pickle_is_refused_unless_allowed(self, make_cache: MakeCache) -> None:
        careful, trusting = make_cache(COUNT, AMPLE, allow_pickle=False), make_cache(COUNT, AMPLE, allow_pickle=True)
        assert (careful.allow_pickle, trusting.allow_pickle) == (False, True)
        with pytest.raises(CodecError):
            careful.put_many([1, 2], [sample(1), NeedsPickle()])
        careful.flush()
        assert careful.get_many([1, 2]) == [MISS, MISS]
        put(trusting, [1], [NeedsPickle()])
        assert type(trusting.get_many([1])[0]) is NeedsPickle

    def test_threads_use_a_cache_concurrently(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)

        def use(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(30):
                ids = rng.sample(range(COUNT), 8)
                missing = [id for id, value in zip(ids, cache.get_many(ids), strict=True) if not found(id, value)]
                cache.put_many(missing, [sample(id) for id in missing])

        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(use, seed) for seed in range(4)]:
                done.result()
        cache.flush()
        assert all(found(id, value) for id, value in enumerate(cache.get_many(range(COUNT))))

    # -- removal ------------------------------------------------------------------------------------------------------

    def test_drop_and_clear(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        put(cache, range(6), [sample(id) for id in range(6)])
        cache.drop([1, 3, 3, COUNT - 1])
        assert there(cache) == {0, 2, 4, 5}
        put(cache, [1], [sample(1, 5)])
        assert cache.get_many([1])[0][1] == 5
        cache.clear()
        assert there(cache) == set()
        assert cache.stats().evictions == 0

    def test_a_full_cache_loses_only_evicted_samples(self, make_cache: MakeCache) -> None:
        cache, lost = make_cache(200, LITTLE, example=sample(0)), 0
        for ids in np.arange(200).reshape(25, 8).tolist():
            before = there(cache)
            stored = cache.put_many(ids, [sample(id) for id in ids])
            cache.flush()
            now = there(cache)
            assert not now & {id for id, kept in zip(ids, stored.tolist(), strict=True) if not kept}
            assert cache.policy.evicts or before <= now
            lost += len(before - now)
        stats = cache.stats()
        assert now
        assert lost <= stats.evictions
        assert stats.used_bytes <= stats.capacity_bytes

    def test_scores_determine_evictions(self, make_cache: MakeCache) -> None:
        cache = make_cache(200, LITTLE, example=sample(0))
        if not cache.policy.given:
            pytest.skip("the policy of this cache computes its own scores")
        cache.set_scores(range(200), [1.0] * 100 + [0.0] * 50 + [2.0] * 50)
        for ids in np.arange(200).reshape(25, 8).tolist():
            before = there(cache)
            put(cache, ids, [sample(id) for id in ids], all_stored=False)
            gone = before - there(cache)
            assert all(id < 150 for id in gone), "samples of high score were evicted"
            assert not gone or max(ids) >= 150, "samples of low score have replaced others"
        for scores in ([1.0], [1.0, float("nan")], ["a", "b"]):
            with pytest.raises(InputError):
                cache.set_scores([1, 2], scores)

    def test_uncaching_a_step_removes_all_samples(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        ids, values = range(4), [sample(id) for id in range(4)]
        assert not cache.put_many(ids, values, uncached=1).any(), "other steps prepared these values"
        put(cache, ids, values)
        assert cache.uncache_steps(1)
        assert there(cache) == set()
        assert not cache.resident(ids).any()
        now = cache.uncached_steps
        assert now >= 1
        assert not cache.uncache_steps(1), "the step was uncached before"
        assert not cache.put_many(ids, values).any(), "other steps prepared these values"
        cache.flush()
        assert there(cache) == set()
        stored = cache.put_many(ids, values, uncached=now)
        cache.flush()
        assert there(cache) == {id for id, kept in zip(ids, stored.tolist(), strict=True) if kept}

    # -- gather and begin_read ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("with_example", [True, False])
    def test_gather_copies_the_values_of_get_many(self, make_cache: MakeCache, with_example: bool) -> None:
        cache = make_cache(COUNT, AMPLE, example=sample(0) if with_example else MISS)
        put(cache, range(8), [sample(id) for id in range(8)])
        put(cache, [8], ["of another structure"])
        ids = [3, 3, 20, 8, 0, 7]
        outs = rows_for(cache, len(ids))
        for into in (outs, cache.aim(outs)):
            for out in outs:
                out[:] = 255
            good = cache.gather(ids, into)
            assert good.dtype == bool
            assert not good[[2, 3]].any()
            assert not (good & ~cache.resident(ids)).any()
            for at in np.flatnonzero(good).tolist():
                arrays = encode(cache.get_many([ids[at]])[0])[1]
                assert all(np.array_equal(out[at], array) for out, array in zip(outs, arrays, strict=True))
            if cache.structure is None:
                assert not good.any()

    def test_begin_read_returns_stored_samples_and_fetches_the_others(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        put(cache, range(0, COUNT, 2), [sample(id) for id in range(0, COUNT, 2)])
        ids = [*range(COUNT), 1, 2, 2]
        values, fetched = begin(cache, ids)
        assert sorted(fetched) == list(range(1, COUNT, 2))
        assert [found(id, value) for id, value in zip(ids, values, strict=True)] == [id % 2 == 0 for id in ids]

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_an_executor_shutdown_loses_no_sample(self, make_cache: MakeCache, when: str) -> None:
        cache = ample(make_cache)
        put(cache, range(0, COUNT, 2), [sample(id) for id in range(0, COUNT, 2)])
        executor, fetched = ThreadPoolExecutor(1), list[int]()
        with occupied(executor):
            if when == "before":
                executor.shutdown(wait=False)
            reading = cache.begin_read(np.arange(COUNT), lambda: executor, fetched.extend)
            executor.shutdown(wait=False, cancel_futures=True)
        values = reading.result()
        assert [found(id, value) for id, value in enumerate(values)] == [id % 2 == 0 for id in range(COUNT)]
        assert sorted(fetched) == list(range(1, COUNT, 2))

    def test_samples_changed_during_a_read_are_read_or_fetched(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        put(cache, range(8), [sample(id) for id in range(8)])
        fetched: list[int] = []
        with ThreadPoolExecutor(2) as executor:
            reading = cache.begin_read(np.arange(12), lambda: executor, fetched.extend)
            cache.drop(range(4))
            put(cache, range(8, 10), [sample(id) for id in range(8, 10)])
            for _ in range(2):
                values = reading.result()
                absent = [id for id, value in enumerate(values) if not found(id, value)]
                assert set(absent) <= set(fetched)
                assert len(set(fetched)) == len(fetched)
                assert set(range(4, 8)).isdisjoint(absent)
        assert {10, 11} <= set(fetched)

    def test_a_cancelled_reading_stops_fetching(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        put(cache, range(4), [sample(id) for id in range(4)])
        fetched: list[int] = []
        with ThreadPoolExecutor(1) as executor, occupied(executor):
            reading = cache.begin_read(np.arange(COUNT), lambda: executor, fetched.extend)
            reading.cancel()
            reading.cancel()
            before = list(fetched)
        assert fetched == before
        assert there(cache) == set(range(4))

    # -- against a model ----------------------------------------------------------------------------------------------

    def test_calls_have_the_results_of_a_dict(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        try:
            from hypothesis import given, settings
            from hypothesis import strategies as st
        except ImportError:
            rng = random.Random(0)
            for _ in range(25):
                walk(cache, [(rng.choice(_STEPS), rng.choices(range(COUNT), k=rng.randrange(9))) for _ in range(20)])
        else:
            ids = st.lists(st.integers(0, COUNT - 1), max_size=8)
            steps = st.lists(st.tuples(st.sampled_from(_STEPS), ids), max_size=20)
            compare: Any = given(steps)(lambda steps: walk(cache, steps))
            settings(max_examples=25, deadline=None)(compare)()

    def test_counts(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        put(cache, range(5), [sample(id) for id in range(5)])
        reads: list[Callable[[Any], Any]] = [cache.get_many, lambda ids: begin(cache, ids)]
        for number, read in enumerate(reads, 1):
            read(range(9))
            stats = cache.stats()
            assert (stats.hits, stats.misses) == (5 * number, 4 * number)
        cache.count_fetch(3, 100)
        cache.count_fetch(1, 20)
        stats = cache.stats()
        assert (stats.storage_reads, stats.storage_bytes, stats.evictions, stats.damaged) == (4, 120, 0, 0)

    # -- processes ----------------------------------------------------------------------------------------------------

    def test_a_forked_child_reads_samples_of_its_parent(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        if "fork" not in multiprocessing.get_all_start_methods():
            pytest.skip("this system cannot fork")
        put(cache, range(8), [sample(id) for id in range(8)])
        child = multiprocessing.get_context("fork").Process(target=_read_and_leave, args=(cache,))
        child.start()
        child.join(_SECONDS)
        assert child.exitcode == 0
        assert there(cache) == set(range(8))

    def test_a_pickled_cache_holds_the_same_samples(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        if not self.picklable:
            pytest.skip("this cache cannot be pickled")
        put(cache, range(8), [sample(id) for id in range(8)])
        other: Cache = pickle.loads(pickle.dumps(cache))
        assert (other.num_ids, other.name, other.fingerprint) == (cache.num_ids, cache.name, cache.fingerprint)
        assert there(other) == set(range(8))
        other.close()
        assert there(cache) == set(range(8))

    def test_use_after_close_raises(self, make_cache: MakeCache) -> None:
        cache = ample(make_cache)
        put(cache, range(8), [sample(id) for id in range(8)])
        cache.get_many([1, 9])
        before = cache.stats()
        cache.close()
        cache.close()
        assert cache.stats() == before
        for use in (
            lambda: cache.get_many([1]),
            lambda: cache.put_many([1], [sample(1)]),
            lambda: cache.begin_read(np.arange(2), no_pool, print).result(),
        ):
            with pytest.raises(InputError, match="closed"):
                use()


def ample(make_cache: MakeCache) -> Cache:
    """Create an empty cache with room for all samples."""
    return make_cache(COUNT, AMPLE, example=sample(0))


def sample(id: int, number: int = 0) -> tuple[npt.NDArray[np.uint8], int]:
    """Return a sample whose content is determined by its id, with a number."""
    return np.random.default_rng(id).integers(0, 256, 1000, np.uint8), number


def is_right(id: int, value: Any) -> bool:
    """Return whether a value is the sample of `id`."""
    return isinstance(value, tuple) and np.array_equal(value[0], sample(id)[0])


def found(id: int, value: Any) -> bool:
    """Return whether a value is not `MISS`; fails for a value of another sample."""
    assert value is MISS or is_right(id, value), f"not the sample {id}: {value!r:.100}"
    return value is not MISS


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same types and the same content."""
    (structure, arrays), (others, parts) = encode(one), encode(other)
    return structure is others and all(map(np.array_equal, arrays, parts))


def put(cache: Cache, ids: Sequence[int], values: Sequence[Any], *, all_stored: bool = True) -> None:
    """Store `values` and flush the cache."""
    stored = cache.put_many(ids, values)
    assert stored.shape == (len(ids),)
    assert stored.dtype == bool
    assert stored.all() or not all_stored
    cache.flush()


def there(cache: Cache) -> set[int]:
    """Return the ids of the cached samples, after checking their values."""
    return {id for id, value in enumerate(cache.get_many(range(cache.num_ids))) if found(id, value)}


def begin(cache: Cache, ids: Sequence[int]) -> tuple[list[Any], list[int]]:
    """Read `ids` with `begin_read`; returns the values, and the ids passed to `fetch`."""
    fetched: list[int] = []
    with ThreadPoolExecutor(2) as executor:
        values = cache.begin_read(np.array(ids, np.int64), lambda: executor, fetched.extend).result()
    return values, fetched


@contextlib.contextmanager
def occupied(executor: ThreadPoolExecutor) -> Iterator[None]:
    """Keep the only thread of an executor busy."""
    waits, go = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        go.wait(_SECONDS)

    executor.submit(wait)
    assert waits.wait(_SECONDS)
    try:
        yield
    finally:
        go.set()


def no_pool() -> ThreadPoolExecutor:
    """Placeholder for an executor that must not be used."""
    raise AssertionError("no thread was needed")


def rows_for(cache: Cache, count: int) -> list[npt.NDArray[np.uint8]]:
    """Return target arrays for a gather of `count` samples; empty if the cache has no structure."""
    structure = cache.structure
    return [] if structure is None else [np.zeros((count, leaf.nbytes), np.uint8) for leaf in structure.leaves]


def walk(cache: Cache, steps: Steps) -> None:
    """Run the same calls on a cache, emptied first, and on a dict, and compare the results."""
    cache.clear()
    model: dict[int, int] = {}
    numbers = itertools.count()
    for step, ids in steps:
        if step == "put":
            new = [next(numbers) for _ in ids]
            put(cache, ids, [sample(id, number) for id, number in zip(ids, new, strict=True)])
            for id, number in zip(ids, new, strict=True):
                model.setdefault(id, number)
        elif step == "drop":
            cache.drop(ids)
            for id in ids:
                model.pop(id, None)
        elif step == "gather":
            outs = rows_for(cache, len(ids))
            good = cache.gather(ids, outs)
            for at in np.flatnonzero(good).tolist():
                parts = encode(sample(ids[at], model[ids[at]]))[1]
                assert all(np.array_equal(out[at], part) for out, part in zip(outs, parts, strict=True))
        elif step == "look":
            resident = cache.resident(range(COUNT))
            assert {int(id) for id in np.flatnonzero(resident)} <= set(model)
            assert cache.complete == resident.all()
        else:
            values, fetched = (cache.get_many(ids), None) if step == "get" else begin(cache, ids)
            assert [value[1] if found(id, value) else None for id, value in zip(ids, values, strict=True)] == [
                model.get(id) for id in ids
            ]
            assert fetched is None or sorted(fetched) == sorted(set(ids) - set(model))


def _read_and_leave(cache: Cache) -> None:
    assert there(cache) == set(range(8))
    assert all(found(id, value) == (id < 8) for id, value in enumerate(begin(cache, range(COUNT))[0]))
    cache.close()
