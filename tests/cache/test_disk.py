"""A cache on a disk survives restarts, distrusts what it finds, and is written without holding up others."""

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cache_tools import MISS, SampleCache, gathered, hits, make, problems, signed
from children import Child
from stallfree.cache import layout
from stallfree.cache.arena import DiskArena
from stallfree.cache.layout import Field, Index, Meta
from stallfree.errors import StorageError

NUM_IDS = 40
ALL = range(NUM_IDS)
SIZES = {"uniform": (1000,), "varied": (50, 1000, 9000)}
both = pytest.mark.parametrize("kind", ["uniform", "varied"])


@pytest.fixture
def kind() -> str:
    """Of the records, where a test does not try both."""
    return "varied"


def open_cache(store: Path, kind: str) -> SampleCache:
    example = signed(0, 0, 1000) if kind == "uniform" else b"x" * 1000
    options: dict[str, Any] = {"policy": "lru", "persist": True, "name": "disk", "capacity": "400KB"}
    return SampleCache(NUM_IDS, fingerprint="data", store=store, example=example, **options)


def fill(cache: SampleCache, kind: str, count: int = NUM_IDS) -> Any:
    return cache.put_many(range(count), [signed(id, 0, SIZES[kind][id % len(SIZES[kind])]) for id in range(count)])


@pytest.fixture
def disk(kind: str, tmp_path: Path) -> Path:
    """A cache of 28 records that no process is attached to."""
    with open_cache(tmp_path, kind) as cache:
        assert fill(cache, kind, 30).all()
        cache.drop([3, 4])
    return cache.path


def usable(cache: SampleCache, kind: str) -> None:
    """After whatever happened, the cache stores and gives, and its bookkeeping is right."""
    assert 0 <= cache.uncached_steps < 1 << 20
    hits(cache)
    assert problems(cache) == []
    fill(cache, kind)
    assert hits(cache)
    assert problems(cache) == []


@both
def test_it_survives_a_restart_and_only_the_first_to_attach_checks(disk: Path, tmp_path: Path, kind: str) -> None:
    with open_cache(tmp_path, kind) as cache:
        assert len(hits(cache)) == cache.stats().resident_items == 28
        assert cache.stats().damaged == 0
        assert Child(lambda: open_cache(tmp_path, kind).close()).wait() == 0
        assert Index(disk, Meta.load(disk)).header[Field.RECOVERIES] == 1
        usable(cache, kind)


@both
def test_every_damaged_record_is_a_miss_is_counted_and_dropped(disk: Path, tmp_path: Path, kind: str) -> None:
    (disk / "data").write_bytes(b"\x5a" * (disk / "data").stat().st_size)
    with open_cache(tmp_path, kind) as cache:
        if cache.structure is not None:
            assert gathered(cache, [7, 8, 7]) == []
            assert (cache.stats().damaged, cache.resident([7, 8]).any()) == (2, False)
        before = cache.stats().misses
        assert cache.get_many(ALL) == [MISS] * NUM_IDS
        stats = cache.stats()
        assert (stats.damaged, stats.resident_items, stats.hits, stats.misses - before) == (28, 0, 0, NUM_IDS)
        usable(cache, kind)


@both
def test_a_data_file_of_another_length(disk: Path, tmp_path: Path, kind: str) -> None:
    right = (disk / "data").stat().st_size
    for size in (0, 4096, 100_000, 10_000_000):
        os.truncate(disk / "data", size)
        with open_cache(tmp_path, kind) as cache:
            usable(cache, kind)
        assert (disk / "data").stat().st_size == right
    with open_cache(tmp_path, kind) as cache:
        os.truncate(disk / "data", 5000)  # while it is open
        hits(cache)
        assert cache.stats().damaged > 10
        usable(cache, kind)


@pytest.mark.parametrize("kind", ["uniform"])
def test_a_record_in_the_place_of_another_is_no_hit(disk: Path, tmp_path: Path, kind: str) -> None:
    """The checksum says whose record it is."""
    index = Index(disk, Meta.load(disk))
    assert index.checksum is not None
    for array in (index.first, index.checksum):
        array[[10, 11]] = array[[11, 10]]
    del index, array
    with open_cache(tmp_path, kind) as cache:
        assert cache.get_many([10, 11]) == [MISS, MISS]
        assert cache.stats().damaged == 2


ARRAYS = ["header", "first", "length", "generation", "checksum", "next", "free", "victims", "score"]
numbers = st.sampled_from([0, 1, 2, 100, 255, 1 << 31, (1 << 32) - 1]) | st.integers(0, (1 << 32) - 1)
garbage = st.lists(st.tuples(st.integers(0, 1 << 20), numbers), min_size=1, max_size=200)


@pytest.mark.filterwarnings("ignore:.*an empty one replaces it")
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(where=st.sampled_from(["index", "data", *ARRAYS]), garbage=garbage)
@example(where="first", garbage=[(4, (1 << 32) - 1)])  # the mark of a free block, in a chain
@example(where="next", garbage=[(4, (1 << 32) - 1)])
@example(where="header", garbage=[(2 * Field.UNCACHED + 1, 255)])
@both
def test_garbage_in_the_files(disk: Path, tmp_path: Path, kind: str, where: str, garbage: list) -> None:
    store = Path(tempfile.mkdtemp(dir=tmp_path))
    path = store / disk.parent.name / disk.name
    path.parent.mkdir(mode=0o700)
    shutil.copytree(disk, path)
    if where in ("index", "data"):
        data = np.memmap(path / where, np.uint8)
        for position, number in garbage:
            data[position % len(data)] ^= number % 255 + 1
    else:
        data = getattr(Index(path, Meta.load(path)), where).view(np.uint32)
        for position, number in garbage:
            data[position % len(data)] = number
    del data
    with open_cache(store, kind) as cache:
        usable(cache, kind)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: list[tuple[str, Callable[[Path], Any]]] = [
    *[("index", cut), ("index", Path.unlink), ("data", Path.unlink), ("meta.json", cut), ("meta.json", Path.unlink)],
    ("meta.json", lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"capacity": 1 << 20}))),
    ("meta.json", lambda path: path.write_text("[]")), ("meta.json", lambda path: path.write_bytes(b"\xff\xfe")),
]  # fmt: skip


@pytest.mark.parametrize(("file", "damage"), DAMAGE)
def test_a_cache_beyond_repair_is_made_anew_with_a_warning(
    file: str, damage: Callable[[Path], Any], kind: str, disk: Path, tmp_path: Path
) -> None:
    (disk.parent / "cat.jpg").write_text("meow")
    damage(disk / file)
    with pytest.warns(RuntimeWarning, match="No process uses this cache, so an empty one replaces it") as caught:
        cache = open_cache(tmp_path, kind)
    assert (len(caught), cache.stats().resident_items) == (1, 0)
    usable(cache, kind)
    cache.close()
    assert (disk.parent / "cat.jpg").read_text() == "meow"


def test_one_that_others_use_or_of_another_version_is_an_error(
    kind: str, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(layout, "VERSION", 99)
        with pytest.raises(StorageError, match=r"by another version .*its format is \d+, this version's is 99\)"):
            open_cache(tmp_path, kind)
    with open_cache(tmp_path, kind) as cache:
        (disk / "meta.json").write_text("{")
        with pytest.raises(StorageError, match=r"cannot be read .*remove it with `stallfree cache rm disk`"):
            open_cache(tmp_path, kind)
        assert len(hits(cache)) == 28


SECONDS = 60


def slow_cache(folder: Path, blocks: int = NUM_IDS, **options: Any) -> SampleCache:
    return make(NUM_IDS, blocks, example=signed(0, 0), store=folder, name="slow", **options)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SampleCache]:
    with slow_cache(tmp_path) as made:
        yield made


def put(cache: SampleCache, *ids: int, nonce: int = 0) -> Any:
    return cache.put_many(ids, [signed(id, nonce) for id in ids])


@pytest.fixture
def writing(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[[], None], Future[Any]]]:
    """A thread that stores the samples 0 to 3, and that waits in its first write until the first item is called."""
    write, begun, go = DiskArena.write, threading.Event(), threading.Event()

    def slowly(arena: DiskArena, *arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and not begun.is_set():
            begun.set()
            assert go.wait(SECONDS)
        write(arena, *arguments)

    monkeypatch.setattr(DiskArena, "write", slowly)
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(put, cache, 0, 1, 2, 3)
        assert begun.wait(SECONDS)
        yield go.set, future
        go.set()


def test_others_read_store_and_drop_while_one_writes(cache: SampleCache, writing: Any) -> None:
    go, future = writing
    assert put(cache, 2, 10, nonce=1).all()
    assert hits(cache) == [2, 10]
    cache.drop([10])
    go()
    assert future.result(SECONDS).all()
    assert hits(cache) == [0, 1, 2, 3]
    assert cache.get_many([2])[0][1] == 1, "the first that is published stays"
    assert (cache.stats().rejected, problems(cache)) == (0, [])


def test_nothing_is_stored_after_a_step_proved_random_meanwhile(cache: SampleCache, writing: Any) -> None:
    go, future = writing
    assert cache.uncache_steps(1)
    go()
    assert not future.result(SECONDS).any()
    assert (hits(cache), cache.stats().rejected, problems(cache)) == ([], 4, [])


def test_a_recovery_meanwhile_costs_another_write(cache: SampleCache, writing: Any) -> None:
    """It frees the blocks, and others may have got them."""
    go, future = writing
    with cache._changing("recovering"):
        cache._space.recover()
    assert put(cache, 20).all()
    go()
    assert future.result(SECONDS).all()
    assert {*hits(cache)} - {20} == {0, 1, 2, 3}, "a late write into the block of 20 is found"
    assert problems(cache) == []


def test_a_disk_that_fails(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DiskArena, "write", Mock(side_effect=OSError))
        assert not put(cache, 1, 2).any()
    assert (cache.stats().rejected, problems(cache)) == (2, [])
    assert put(cache, 1).all()


@pytest.mark.parametrize(("blocks", "policy"), [(NUM_IDS, "minio"), (25, "minio"), (25, "lru")])
def test_eight_processes_at_once(blocks: int, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 20 ms a write, which is 0.8 s in all under one lock. What is not stored was rejected because of no space."""
    write = DiskArena.write
    monkeypatch.setattr(DiskArena, "write", lambda *arguments: (time.sleep(0.02), write(*arguments)))
    with slow_cache(tmp_path, blocks, policy=policy) as cache:
        writers = [Child(put, cache, *ids) for ids in np.arange(NUM_IDS).reshape(8, -1).tolist()]
        assert [writer.wait() for writer in writers] == [0] * 8
        stats = cache.stats()
        assert len(hits(cache)) == stats.resident_items == min(NUM_IDS, cache.meta.num_blocks)
        assert stats.resident_items + stats.rejected + stats.evictions == NUM_IDS
        assert problems(cache) == []


def test_blocks_of_a_killed_writer_are_free_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_cache(tmp_path, persist=True) as cache:
        put(cache, 30)

        def put_and_die() -> None:
            monkeypatch.setattr(DiskArena, "write", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            put(cache, 0, 1, 2, 3)

        assert Child(put_and_die).wait() == -signal.SIGKILL
        assert hits(cache) == [30]
        assert [problem for problem in problems(cache) if "lost" not in problem] == []
    with slow_cache(tmp_path) as cache:
        assert (hits(cache), problems(cache)) == ([30], [])
