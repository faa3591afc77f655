"""A disk is written without the writer lock: however slow, it delays nobody else, and every sample is stored."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_tools import is_signed, make, problems, signed
from children import Child
from stallfree.cache.arena import DiskArena
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache

COUNT = 40
EXAMPLE = signed(0, 0)
SECONDS = 60


def on_disk(folder: Path, blocks: int = COUNT, **options: Any) -> SampleCache:
    return make(COUNT, blocks, example=EXAMPLE, store=folder, name="slow", **options)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SampleCache]:
    with on_disk(tmp_path) as cache:
        yield cache


def stored(cache: SampleCache) -> set[int]:
    """The ids of the stored samples, after checking all."""
    values = cache.get_many(range(COUNT))
    assert all(value is MISS or is_signed(id, value) for id, value in enumerate(values))
    return {id for id, value in enumerate(values) if value is not MISS}


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
        future = executor.submit(cache.put_many, range(4), [signed(id, 0) for id in range(4)])
        assert begun.wait(SECONDS)
        try:
            yield go.set, future
        finally:
            go.set()


def test_others_read_store_and_drop_meanwhile(cache: SampleCache, writing: Any) -> None:
    go, future = writing
    assert cache.put_many([2, 10], [signed(2, 1), signed(10, 0)]).all()
    assert stored(cache) == {2, 10}
    cache.drop([10])
    go()
    assert future.result(SECONDS).all()
    assert stored(cache) == {0, 1, 2, 3}
    assert cache.get_many([2])[0][1] == 1, "the first that is published stays"
    assert (cache.stats().rejected, problems(cache)) == (0, [])


def test_nothing_is_stored_after_a_step_proved_random_meanwhile(cache: SampleCache, writing: Any) -> None:
    go, future = writing
    assert cache.uncache_steps(1)
    go()
    assert not future.result(SECONDS).any()
    assert (stored(cache), cache.stats().rejected, problems(cache)) == (set(), 4, [])


def test_a_recovery_meanwhile_costs_another_write(cache: SampleCache, writing: Any) -> None:
    """It frees the blocks, and others may have got them."""
    go, future = writing
    with cache._changing("recovering"):
        cache._space.recover()
    assert cache.put_many([20], [signed(20, 0)]).all()
    go()
    assert future.result(SECONDS).all()
    assert stored(cache) in ({0, 1, 2, 3}, {0, 1, 2, 3, 20}), "a late write into the block of 20 is found"
    assert problems(cache) == []


def test_a_disk_that_fails(cache: SampleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no device")

    with monkeypatch.context() as patch:
        patch.setattr(DiskArena, "write", fail)
        assert not cache.put_many([1, 2], [signed(1, 0), signed(2, 0)]).any()
    assert (cache.stats().rejected, problems(cache)) == (2, [])
    assert cache.put_many([1], [signed(1, 0)]).all()


@pytest.mark.parametrize(("blocks", "policy"), [(COUNT, "minio"), (25, "minio"), (25, "lru")])
def test_eight_processes_at_once(blocks: int, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 20 ms a write, which is 0.8 s in all under one lock. What is not stored was rejected because of no space."""
    write = DiskArena.write
    monkeypatch.setattr(DiskArena, "write", lambda *arguments: (time.sleep(0.02), write(*arguments)))
    with on_disk(tmp_path, blocks, policy=policy) as cache:
        parts = np.arange(COUNT).reshape(8, -1)
        writers = [Child(cache.put_many, ids, [signed(id, 0) for id in ids.tolist()]) for ids in parts]
        assert [writer.wait() for writer in writers] == [0] * 8
        stats = cache.stats()
        assert len(stored(cache)) == stats.resident_items == min(COUNT, cache.meta.num_blocks)
        assert stats.resident_items + stats.rejected + stats.evictions == COUNT
        assert problems(cache) == []


def test_blocks_of_a_killed_writer_are_free_again_when_the_next_process_attaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_disk(tmp_path, persist=True) as cache:
        cache.put_many([30], [signed(30, 0)])

        def put_and_die() -> None:
            monkeypatch.setattr(DiskArena, "write", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            cache.put_many(range(4), [signed(id, 0) for id in range(4)])

        assert Child(put_and_die).wait() == -signal.SIGKILL
        assert stored(cache) == {30}
        assert [problem for problem in problems(cache) if "lost" not in problem] == []
    with on_disk(tmp_path) as cache:
        assert (stored(cache), problems(cache)) == ({30}, [])
