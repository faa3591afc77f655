"""Tiers behind memory: what they hold is not fetched again; a tier that fails costs hits, and never wrong samples."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import stallfree as sf
from children import Child, until
from loader_data import Made
from stallfree.cache import tier as tiers
from stallfree.cache.policies import make_policy
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.store import open_cache
from stallfree.cache.tier import decode
from stallfree.testing import ThrottledSource

COUNT = 96
SIZE = 4000
SOME = 60_000  # bytes of memory for a few samples


def sample(id: int) -> tuple[Any, int]:
    return np.random.default_rng(id).integers(0, 256, SIZE, np.uint8), id


def is_right(id: int, value: Any) -> bool:
    return value is not MISS and value[1] == id and np.array_equal(value[0], sample(id)[0])


SAMPLES = sf.mark_deterministic(Made(COUNT, sample))


class DictStore:
    """A place for tiers in a dict of this process, whose methods may be replaced. It may be held up in its writes."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.writing, self.go = threading.Event(), threading.Event()
        self.go.set()

    def attach(self, num_ids: int, *, fingerprint: str, name: str, example: Any) -> "DictStore":
        return self

    def get_many(self, ids: Any) -> list[Any]:
        return [decode(self.records[id]) if id in self.records else MISS for id in ids.tolist()]

    def put_many(self, ids: Any, records: Any) -> Any:
        self.writing.set()
        assert self.go.wait(60)
        for id, record in zip(ids.tolist(), records, strict=True):
            self.records.setdefault(id, bytes(record))
        return np.ones(len(ids), bool)

    def drop(self, ids: Any) -> None:
        for id in ids.tolist():
            self.records.pop(id, None)

    def close(self) -> None:
        pass


def cache_of(store: Any, *, name: str | None = None) -> SampleCache:
    options: dict[str, Any] = {"fingerprint": "data" * 10, "policy": make_policy("minio"), "persist": False}
    return open_cache(store, COUNT, capacity=SOME, name=name, example=sample(0), **options)


def put(cache: SampleCache, *ids: int, uncached: int = 0, flush: bool = True) -> None:
    cache.tier.put_many(np.array(ids), [sample(id) for id in ids], uncached)
    if flush:
        cache.tier.flush()


def get(cache: SampleCache, *ids: int) -> Any:
    return cache.tier.get_many(np.array(ids), cache.uncached_steps)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the queue of a process is waited for, however busy the machine is."""
    monkeypatch.setattr(tiers, "_DRAIN_SECONDS", 60.0)


def written(cached: sf.CachedDataset[Any]) -> None:
    """Wait until no process has samples in its queue."""
    until(lambda: not (cached.cache.tier._state & tiers._MOVING).any())


@pytest.fixture
def source() -> Iterator[ThrottledSource]:
    with closing(ThrottledSource(SAMPLES)) as with_counters:
        yield with_counters


@pytest.fixture
def disk(tmp_path: Path) -> sf.DiskTier:
    return sf.DiskTier(tmp_path / "disk", capacity="2MiB")


def read_all(loader: Any) -> None:
    samples = [sample for bodies, ids in loader for sample in zip(bodies, ids.tolist(), strict=True)]
    assert all(is_right(id, (np.asarray(body), id)) for body, id in samples)
    assert sorted(id for _, id in samples) == list(range(COUNT))


@pytest.mark.parametrize(
    ("library", "workers", "context"),  # torch's workers end with the epoch, and lose nothing that they had in queues
    [(sf, 0, None), (sf, 2, "fork"), (sf, 2, "forkserver"), (torch.utils.data, 2, "fork")],
)
def test_after_the_first_epoch_nothing_is_fetched(
    disk: sf.DiskTier, source: ThrottledSource, library: Any, workers: int, context: str | None
) -> None:
    persistent = library is sf and workers > 0
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context, "shuffle": True}
    with sf.CachedDataset(source, capacity=SOME, store=disk) as cached:
        written(cached)  # what the first look has read
        loader = library.DataLoader(cached, 8, persistent_workers=persistent, **options)
        for _ in range(3):
            read_all(loader)
            written(cached)
            stats = cached.stats()
            assert source.requests == stats.storage_reads == COUNT
        if library is sf:
            assert loader.stats().hits == stats.hits
            loader.close()
        assert 0 < stats.resident_items < COUNT
        assert stats.tier_hits >= 2 * (COUNT - stats.resident_items)
        assert stats.tier_rejected == 0


def test_the_next_job_begins_with_what_is_on_the_disk(tmp_path: Path, source: ThrottledSource) -> None:
    store = sf.DiskTier(tmp_path / "disk", capacity="2MiB", persist=True)
    for _ in range(2):
        with sf.CachedDataset(source, capacity=SOME, store=store) as cached:
            first_look = source.requests
            written(cached)
            read_all(sf.DataLoader(cached, 8))
            written(cached)
    assert source.requests == first_look <= COUNT + 8
    shutil.rmtree(store.folder)


@pytest.mark.usefixtures("patient")
def test_values_by_key(disk: sf.DiskTier) -> None:
    with sf.CacheLoader(capacity="200KiB", store=disk, name="keys", policy="lru") as cache:
        for _ in range(2):
            for key in range(100):
                assert is_right(key, cache.get(key, sample))
        stats = cache.stats()
        assert (stats.storage_reads, stats.hits, stats.misses) == (100, 100, 100)
        assert stats.tier_hits > 50
        cache.clear()
        assert 5 not in cache


def test_stores_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, capacity, error, message in (
        ("memory", "1GiB", sf.InputError, "give the path of a folder"),
        (tmp_path, 3000, sf.CapacityError, r"DiskTier\(.*holds no record.*Give .* or more"),
        (tmp_path / "file", "1MiB", sf.StorageError, "cannot be made"),
    ):
        with pytest.raises(error, match=message):
            sf.CachedDataset(SAMPLES, capacity="1MiB", store=sf.DiskTier(folder, capacity=capacity))
    disk = sf.DiskTier(tmp_path, capacity="1MiB")
    with pytest.raises(sf.InputError, match="memory has at most one tier behind it"):
        sf.CachedDataset(SAMPLES, capacity="1MiB", store=[disk, disk])  # type: ignore[arg-type]


@pytest.mark.parametrize("at", ["get_many", "put_many"])
def test_a_tier_that_fails_is_paused(at: str, source: ThrottledSource, caplog: pytest.LogCaptureFixture) -> None:
    store, fail = DictStore(), Mock(side_effect=lambda *_: 1 / 0)
    with sf.CachedDataset(source, capacity=SOME, store=store) as cached:
        setattr(store, at, fail)
        for _ in range(2):
            read_all(sf.DataLoader(cached, 8))
            cached.cache.tier.flush()
        assert fail.call_count == caplog.text.count("ZeroDivisionError: division by zero")
        assert 3 <= fail.call_count < COUNT // 8, "three in a row, and those that other threads had begun"
        assert "failed 3 times in a row: it is not used for 10 s" in caplog.text
        assert at == "get_many" or cached.stats().tier_rejected >= COUNT - 8


WRONG: dict[str, Callable[[Any, list[Any]], Any]] = {
    "bytes": lambda ids, values: [b"noise"] * len(ids), "None": lambda ids, values: [None] * len(ids),
    "arrays": lambda ids, values: [(values, values[0], values[0])] * len(ids), "no values": lambda ids, values: [],
    "no list": lambda ids, values: 3, "a dict": lambda ids, values: dict(zip(ids.tolist(), values, strict=True)),
    "other samples": lambda ids, values: values[::-1],
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_tier_that_returns_something_else(kind: str) -> None:
    store = DictStore()
    with sf.CachedDataset(SAMPLES, capacity=SOME, store=store) as cached:
        read_all(sf.DataLoader(cached, 8))
        cached.cache.tier.flush()
        right, store.get_many = store.get_many, lambda ids: WRONG[kind](ids, right(ids))  # type: ignore[method-assign]
        for _ in range(2):
            assert all(is_right(id, value) for id, value in enumerate(cached.__getitems__(range(COUNT))))


def test_a_tier_that_hangs_or_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiers, "CLOSE_SECONDS", 0.01)
    store = DictStore()
    store.go.clear()
    store.close = lambda: 1 / 0  # type: ignore
    with sf.CacheLoader(capacity=SOME, store=store, name="values") as cache:
        cache.get(1, sample)
        cache.clear()
        store.go.set()
    assert "stallfree could not close" in caplog.text


def test_a_full_tier_rejects(tmp_path: Path) -> None:
    store = sf.DiskTier(tmp_path / "disk", capacity=250_000)
    with sf.CachedDataset(SAMPLES, capacity=SOME, store=store) as cached:
        read_all(sf.DataLoader(cached, 8))
        cached.cache.tier.flush()
        stored = cached.cache.tier.tier.records.stats().resident_items
        assert 20 < stored < COUNT
        assert cached.stats().tier_rejected == COUNT - stored


@pytest.mark.usefixtures("patient")
def test_a_damaged_record_comes_from_the_source(disk: sf.DiskTier, source: ThrottledSource) -> None:
    with sf.CachedDataset(source, capacity=0, store=disk) as cached:
        read_all(sf.DataLoader(cached, 8))
        cached.cache.tier.flush()
        one, other = cached.__getitems__([5, 5])
        one[0][:] = 0
        assert is_right(5, other), "equal ids of a batch are separate samples"
        (data,) = disk.folder.glob("*/*/data")
        with open(data, "r+b") as file:
            file.write(bytes(10_000))  # two records and a part of a third
        for _ in range(2):
            read_all(sf.DataLoader(cached, 8))
            assert source.requests == COUNT + 3, "they are stored again"
        assert cached.stats().resident_items == 0, "there is no memory in front"


def test_a_full_queue_rejects(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tiers, "_QUEUE_BYTES", 3 * SIZE)
    store = DictStore()
    with cache_of(store) as cache:
        store.go.clear()
        put(cache, 0, flush=False)
        assert store.writing.wait(60)
        put(cache, 1, 2, 3, flush=False)
        assert "samples arrive faster than" in caplog.text
        assert cache.stats().tier_rejected == 2
        store.go.set()
        cache.tier.flush()
        put(cache, *range(10, 20))  # an empty queue takes more than its limit
        assert sorted(store.records) == [0, 1, *range(10, 20)]
        assert cache.stats().tier_rejected == 2


def test_a_sample_in_a_queue_is_copied_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_DRAIN_SECONDS", 60.0)
    store = DictStore()
    with cache_of(store) as cache:
        store.go.clear()
        value = sample(1)
        cache.tier.put_many(np.array([1]), [value], 0)
        value[0][:] = 0
        assert store.writing.wait(60)
        threading.Timer(0.05, store.go.set).start()
        assert is_right(1, get(cache, 1)[0])


def test_a_forked_child_has_a_queue_of_its_own_and_one_that_is_killed_loses_it(disk: sf.DiskTier) -> None:
    with cache_of(disk) as cache:
        put(cache, *range(4))

        def child() -> None:
            put(cache, *range(4, 8))
            cache.close()

        def die() -> None:
            cache.tier.tier.records.put_many = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            put(cache, 8, 9)

        assert [Child(work).wait() for work in (child, die)] == [0, -signal.SIGKILL]
        assert all(is_right(id, value) for id, value in enumerate(get(cache, *range(8))))
        assert cache.tier.known(np.arange(8)).all()
        assert get(cache, 8, 9, 10) == [MISS] * 3
        assert not cache.tier.known(np.arange(8, 11)).any()
        put(cache, 8, 9)
        assert all(is_right(id, value) for id, value in zip((8, 9), get(cache, 8, 9), strict=True))


def test_another_host_and_a_later_job_learn_of_a_random_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two caches of different names on one tier are two hosts."""
    monkeypatch.setattr(tiers, "_FOLLOW_SECONDS", -1.0)
    store = DictStore()
    with cache_of(store, name="one") as one, cache_of(store, name="two") as two:
        put(one, 1, 2, 3)
        one.uncache_steps(2)
        assert get(one, 1) == [MISS], "it was made with the random step"
        put(one, 2, 4, uncached=2)
        get(two, 2)
        assert two.uncached_steps == 2
        assert get(two, 3) == [MISS]
        assert is_right(4, get(two, 4)[0])
        put(two, 1, uncached=2)
        assert is_right(1, get(one, 1)[0])
    with cache_of(store, name="three") as three:
        assert three.uncached_steps == 2
        assert is_right(4, get(three, 4)[0])


@sf.mark_deterministic
def doubled(value: Any) -> Any:
    return value[0].astype(np.int64) * 2


@pytest.mark.filterwarnings("ignore::stallfree.errors.StallfreeWarning")
def test_what_the_tier_returned_before_a_step_proved_random_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what it returned for a batch under way, nor what a newer job has stored and this one cannot adopt."""

    def locked(self: SampleCache, count: int) -> bool:
        raise sf.WaitError("another process writes")

    expected, options = sample(5)[0].astype(np.int64) * 2, {"form": "prepared", "transform": doubled}
    with sf.CachedDataset(SAMPLES, capacity=0, store=DictStore(), **options) as cached:
        for _ in range(2):
            cached.__getitems__(range(COUNT))
        cached.cache.tier.flush()
        pending = cached.reader.start(np.array([5]))
        assert [value is MISS for _, future in pending.asked for value in future.result()] == [False]
        cached.cache.uncache_steps(1)
        (value,) = cached.reader.finish(pending, 0, 0, skip=False).values
        assert np.array_equal(value, expected)
    with sf.CachedDataset(SAMPLES, capacity=0, store=DictStore(), **options) as cached:
        put(cached.cache, 5, uncached=1)  # without the step
        monkeypatch.setattr(SampleCache, "uncache_steps", locked)
        assert np.array_equal(cached[5], expected)


class Taking:
    """Takes whatever it is given, and keeps nothing."""

    allow_pickle = False

    def get_many(self, ids: Any) -> list[Any]:
        return [MISS] * len(ids)

    def put_many(self, ids: Any, records: Any) -> Any:
        return np.ones(len(ids), bool)

    def attach(self, *_: Any, **__: Any) -> Any:
        return self

    def drop(self, ids: Any) -> None: ...

    def close(self) -> None: ...


def test_what_needs_pickle_counts_as_rejected() -> None:
    rows = [{1, id} if id % 2 else id for id in range(10)]  # a set can only be pickled
    with sf.CachedDataset(rows, capacity="1MiB", store=Taking(), name="sets") as cached:
        [cached[id] for id in range(10)]
        cached.cache.tier.flush()
        assert cached.stats().tier_rejected == 5


def test_a_sample_of_the_tier_that_comes_twice_is_two_hits(tmp_path: Path) -> None:
    rows, store = [np.full(100, id) for id in range(8)], sf.DiskTier(tmp_path, capacity="4MiB")
    with sf.CachedDataset(rows, capacity="1MiB", store=store, name="twice") as cached:
        [cached[id] for id in range(8)]
        cached.cache.tier.flush()
        cached.cache.clear()  # of the memory alone
        before = cached.stats()
        list(sf.DataLoader(cached, 4, sampler=[1, 1, 1, 2]))
        after = cached.stats()
    assert (after.tier_hits - before.tier_hits, after.hits - before.hits, after.misses - before.misses) == (4, 4, 0)
