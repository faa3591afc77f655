"""Memory over a local disk over the source: who is read from where, now and in the next job."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import stallfree as sf
from stallfree.cache import MISS
from stallfree.errors import CapacityError, InputError, StorageError
from stallfree.stores import DiskTier, TieredCache
from stallfree.testing import ThrottledSource
from tier_tools import (
    COUNT,
    SIZE,
    Samples,
    all_of,
    dataset_of,
    disk_of,
    held,
    ids_of,
    is_right,
    open_tiers,
    put,
    room_of,
    sample,
    sound,
)

# --- who is read from where, against a model --------------------------------------------------------------------------


class Model:
    """What lies where: a memory that never evicts, or that of least recent use, over a disk that never evicts."""

    def __init__(self, memory: int, disk: int, *, lru: bool) -> None:
        self.room, self.disk_room, self.lru = memory, disk, lru
        self.memory: OrderedDict[int, None] = OrderedDict()
        self.disk: set[int] = set()
        self.counts = [0, 0, 0]  # hits of memory, hits of the disk, misses

    def put(self, ids: Sequence[int]) -> None:
        self._up(ids)
        for id in ids:
            if (self.lru or id not in self.memory) and len(self.disk) < self.disk_room:
                self.disk.add(id)

    def get(self, ids: Sequence[int]) -> list[bool]:
        there = [id for id in ids if id in self.memory]
        below = [id for id in ids if id in self.disk and id not in self.memory]
        for id in there:
            self.memory.move_to_end(id)
        for place, number in enumerate((len(there), len(below), len(ids) - len(there) - len(below))):
            self.counts[place] += number
        if self.lru:
            self._up(below)
        else:
            self.disk -= set(self._up(below))
        return [id in there or id in below for id in ids]

    def drop(self, ids: Sequence[int]) -> None:
        for id in ids:
            self.memory.pop(id, None)
        self.disk -= set(ids)

    def lose_memory(self) -> None:
        self.memory.clear()

    def _up(self, ids: Sequence[int]) -> list[int]:
        new = [id for id in ids if id not in self.memory]
        if not self.lru:
            new = new[: self.room - len(self.memory)]
        for _ in range(len(self.memory) + len(new) - self.room):
            self.memory.popitem(last=False)
        self.memory.update(dict.fromkeys(new))
        return new


batches = st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=8, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), batches),
        st.tuples(st.just("get"), batches),
        st.tuples(st.just("drop"), batches),
        st.tuples(st.just("lose_memory"), st.just([0])),
    ),
    max_size=25,
)
everyday = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
# The copy that would give way first has been dropped since, and there are new ones.
STALE = [
    ("put", [20, 22]),
    ("put", [0, 1, 2, 16, 17, 18, 19, 21]),
    ("put", [8, 9, 10, 11, 12, 13, 14, 15]),
    ("put", [3, 4, 5, 6, 7]),
    ("drop", [0, 1]),
    ("put", [0, 2, 3, 1]),
]

PASSES = [(step, list(range(at, at + 8))) for _ in range(2) for step in ("put", "get") for at in range(0, COUNT, 8)]


@pytest.fixture(params=["minio", "lru"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredCache]:
    with open_tiers(tmp_path, 12, 20, policy=request.param) as cache:
        yield cache


@everyday
@given(steps=steps)
@example(steps=PASSES)
def test_each_sample_comes_from_where_the_model_says(tiers: TieredCache, steps: list[tuple[str, list[int]]]) -> None:

    rooms = [room_of(tier) for tier in (tiers.upper, disk_of(tiers))]
    tiers.clear()
    model = Model(*rooms, lru=tiers.policy.evicts)
    before = tiers.stats()
    for step, ids in steps:
        if step == "put":
            put(tiers, ids)
            model.put(ids)
        elif step == "get":
            found, expected = tiers.get_many(ids), model.get(ids)
            assert [value is not MISS for value in found] == expected
            assert all(is_right(id, value) for id, value in zip(ids, found, strict=True) if value is not MISS)
        elif step == "drop":
            tiers.drop(ids)
            model.drop(ids)
        else:
            tiers.upper.clear()
            model.lose_memory()
        assert held(tiers.upper) == set(model.memory)
        assert held(disk_of(tiers)) == model.disk
    now = tiers.stats()
    from_disk = now.lower_hits - before.lower_hits
    assert [now.hits - before.hits - from_disk, from_disk, now.misses - before.misses] == model.counts


@given(steps=steps)
@everyday
@example(steps=PASSES)
@example(steps=STALE)
def test_with_persist_copies_on_the_disk_give_way(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int]]]
) -> None:
    """All that is put is held while there is room in either tier, and the disk has copies while it has room."""
    folder = tmp_path_factory.mktemp("persist")
    with open_tiers(folder, 12, 20, keep=True) as cache:
        rooms = [room_of(tier) for tier in (cache.upper, disk_of(cache))]
        for step, ids in steps:
            if step == "put":
                put(cache, ids)
                lost = set(ids) - held(cache.upper) - held(disk_of(cache))
                full = len(held(cache.upper)) == rooms[0] and len(held(disk_of(cache))) == rooms[1]
                assert not lost or (full and not held(cache.upper) & held(disk_of(cache)))
                if len(held(disk_of(cache))) < rooms[1]:
                    assert set(ids) <= held(disk_of(cache))
            elif step == "get":
                both = held(cache.upper) | held(disk_of(cache))
                found = cache.get_many(ids)
                assert [value is not MISS for value in found] == [id in both for id in ids]
                assert held(cache.upper) | held(disk_of(cache)) == both
            elif step == "drop":
                cache.drop(ids)
            else:
                cache.upper.clear()
        sound(cache)
    shutil.rmtree(folder)


# --- under loaders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def source() -> Iterator[ThrottledSource]:
    """The samples, with counters that all processes share."""
    with_counters = ThrottledSource(Samples())
    yield with_counters
    with_counters.close()


@pytest.mark.parametrize(
    ("workers", "context", "disk"),
    [
        (0, None, 30),
        (2, "fork", COUNT),
        pytest.param(2, "spawn", 30, marks=pytest.mark.slow),
    ],
)
def test_epochs_read_from_the_source_what_neither_tier_holds(
    tmp_path: Path, source: ThrottledSource, workers: int, context: str | None, disk: int
) -> None:
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context, "shuffle": True}
    options["persistent_workers"] = context == "spawn"  # whose start takes long
    with (
        dataset_of(source, tmp_path, 20, disk) as dataset,
        sf.DataLoader(dataset, 8, **options) as loader,
    ):
        all_of(loader)
        dataset.cache.stack.drain(np.arange(COUNT))  # what workers that live on have on its way
        stats = dataset.stats()
        absent = COUNT - stats.resident_items - stats.lower.resident_items
        assert 15 < stats.resident_items < 25
        assert (absent == 0) == (disk == COUNT)
        assert stats.storage_reads == source.requests == COUNT
        for epoch in (1, 2):
            all_of(loader)
            now = dataset.stats()
            assert source.requests == COUNT + epoch * absent
            assert now.lower_hits == epoch * stats.lower.resident_items
            assert now.resident_items == stats.resident_items
        assert loader.stats().hits == now.hits


def test_the_loader_of_torch(tmp_path: Path, source: ThrottledSource) -> None:
    """Its workers end with the epoch, and lose nothing that they had on its way to the disk."""
    with dataset_of(source, tmp_path, 20, COUNT) as dataset:
        loader = torch.utils.data.DataLoader(dataset, 8, shuffle=True, num_workers=2)
        for _ in range(3):
            all_of(loader)
        assert source.requests == COUNT


def test_a_batch_is_gathered_without_workers_if_all_of_it_is_in_memory(tmp_path: Path, source: ThrottledSource) -> None:
    with dataset_of(source, tmp_path, 20, COUNT) as dataset:
        all_of(sf.DataLoader(dataset, 8))
        there = dataset.cache.resident(np.arange(COUNT))
        above, below = np.flatnonzero(there).tolist()[:16], np.flatnonzero(~there).tolist()[:8]
        for ids, workers in ((above, 0), (above[:15] + below[:1], 1)):
            with sf.DataLoader(dataset, 8, sampler=ids, num_workers=1, persistent_workers=True) as loader:
                assert ids_of(loader) == sorted(ids)
                assert len(multiprocessing.active_children()) == workers


def test_the_disk_is_read_when_a_batch_is_started(tmp_path: Path, source: ThrottledSource) -> None:
    """That is batches ahead of its use: then the disk is not needed any more, nor the source."""
    with dataset_of(source, tmp_path, 20, COUNT) as dataset:
        all_of(sf.DataLoader(dataset, 8))
        dataset.cache.flush()
        below = np.flatnonzero(~dataset.cache.resident(np.arange(COUNT)))
        fetched: list[int] = []
        with ThreadPoolExecutor(2) as pool:
            reading = dataset.cache.begin_read(below, lambda: pool, fetched.extend)
        os.truncate(disk_of(dataset.cache).path / "data", 0)
        assert all(is_right(id, value) for id, value in zip(below.tolist(), reading.result(), strict=True))
        assert fetched == []


def test_the_whole_room_decides_on_the_form(tmp_path: Path) -> None:
    """Prepared samples are four times as large: they fit into both tiers together, and into neither alone."""

    def widen(value: Any) -> Any:
        return value[0].astype(np.float32), value[1]

    sf.mark_deterministic(widen)
    given: dict[str, Any] = {"transform": widen, "capacity": COUNT * 4 * SIZE * 3 // 5}
    with sf.CachedDataset(Samples(), **given) as dataset:
        assert dataset.form == "fetched"
    with sf.CachedDataset(Samples(), store=DiskTier(tmp_path, capacity=given["capacity"]), **given) as dataset:
        assert dataset.form == "prepared"


# --- the next job -----------------------------------------------------------------------------------------------------


def test_the_next_job_begins_with_what_lies_on_the_disk(tmp_path: Path, source: ThrottledSource) -> None:
    with dataset_of(source, tmp_path, 20, COUNT, keep=True) as dataset:
        all_of(sf.DataLoader(dataset, 8, shuffle=True))
        assert dataset.stats().lower.resident_items == COUNT
    source.reset()
    with dataset_of(source, tmp_path, 40, COUNT, keep=True) as dataset:  # more memory than before
        made = source.requests
        all_of(sf.DataLoader(dataset, 8, shuffle=True))
        stats = dataset.stats()
        assert source.requests == made <= 8  # what is read when a data set is made
        assert 35 < stats.resident_items < 45  # they moved up as they were read
        assert stats.lower.resident_items == COUNT
        all_of(sf.DataLoader(dataset, 8, shuffle=True))
        assert dataset.stats().lower_hits == stats.lower_hits + COUNT - stats.resident_items
    shutil.rmtree(disk_of(dataset.cache).path)


def test_what_another_process_moves_up_meanwhile_comes_from_memory(tmp_path: Path) -> None:
    with open_tiers(tmp_path, 12, 40) as cache:
        put(cache, range(40))
        ids = np.array(sorted(held(disk_of(cache)))[:5])
        cache.upper.drop(sorted(held(cache.upper))[:5])
        pieces = cache.stack.parts(ids)
        with pickle.loads(pickle.dumps(cache)) as other:
            other.get_many(ids)
        assert not disk_of(cache).resident(ids).any()
        values = [value for piece in pieces for value in cache.stack.read(piece)]
        assert all(is_right(id, value) for id, value in zip(ids.tolist(), values, strict=True))
        assert cache.stats().misses == 0


# --- what is given ---------------------------------------------------------------------------------------------------


def test_data_sets_in_one_folder_are_apart_and_leave_nothing(tmp_path: Path) -> None:
    one, other = dataset_of(Samples(), tmp_path, 20, COUNT), dataset_of(Samples(50), tmp_path, 20, COUNT)
    folder = disk_of(one.cache).path.parent
    all_of(sf.DataLoader(one, 8))
    assert ids_of(sf.DataLoader(other, 8)) == list(range(50))
    assert (one.stats().lower.resident_items > 70, other.stats().lower.resident_items < 50) == (True, True)
    one.close()
    assert list(folder.iterdir()) == [disk_of(other.cache).path]
    del other
    gc.collect()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "capacity", "error", "message"),
    [
        *[(folder, "1GiB", InputError, "give the path of a folder") for folder in ("memory", "", None, sf.RedisStore)],
        ("ssd", "much", CapacityError, "capacity"),
        ("ssd", 3000, CapacityError, r"DiskTier\(.*holds no record.*Give .* or more"),
        ("file", "1MiB", StorageError, "cannot be made"),
    ],
)
def test_a_disk_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Any, capacity: Any, error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(error, match=message):
        sf.CachedDataset(Samples(), capacity="1MiB", store=DiskTier(folder, capacity=capacity))


# --- others that use caches -------------------------------------------------------------------------------------------


def test_values_by_key(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, capacity="2MiB")
    with sf.CacheLoader(capacity="200KiB", store=tier, name="keys", policy="lru") as cache:
        for _ in range(2):
            for key in range(100):
                assert np.array_equal(cache.get(key, sample)[0], sample(key)[0])
        stats = cache.stats()
        assert stats.storage_reads == 100
        assert stats.lower_hits > 50
