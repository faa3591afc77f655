"""Statistics are exact over all processes, living and dead."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache_tools import make
from children import Child
from stallfree.cache.layout import Count, Counters
from stallfree.cache.sample_cache import SampleCache
from stallfree.ipc.locks import FileLock

ROUNDS = 10


def work(cache: SampleCache, rounds: int = ROUNDS) -> None:
    """Each round: two hits, one miss, one fetch of ten bytes, one sample that is too large and rejected."""
    for _ in range(rounds):
        cache.get_many([0, 9, 1])
        cache.count_fetch(1, 10)
        cache.put_many([9], [bytes(1 << 20)])


def counts(cache: SampleCache) -> tuple[int, ...]:
    stats = cache.stats()
    return stats.hits, stats.misses, stats.storage_reads, stats.storage_bytes, stats.rejected


def cache_of(name: str) -> SampleCache:
    cache = make(10, 4, example=b"x" * 300, name=name)
    cache.put_many([0, 1], [b"zero", b"one"])
    return cache


def expected(rounds: int) -> tuple[int, ...]:
    return 2 * rounds, rounds, rounds, 10 * rounds, rounds


def work_and_die(cache: SampleCache) -> None:
    work(cache)
    os.kill(os.getpid(), signal.SIGKILL)


def test_forked_processes_living_and_dead() -> None:
    with cache_of("counts") as cache:
        assert cache.stats().hit_ratio == 0
        children = [Child(work, cache), Child(work_and_die, cache), Child(work, cache)]
        work(cache)
        assert [child.wait() for child in children] == [0, -signal.SIGKILL, 0]
        assert counts(cache) == expected(4 * ROUNDS)
        assert cache.stats().hit_ratio == pytest.approx(2 / 3)


def test_processes_that_attach_by_name_or_by_a_pickle() -> None:
    with cache_of("counts") as cache:
        sent = pickle.dumps(cache)

        def attach(by_name: bool, end: Callable[[SampleCache], None]) -> None:
            cache = SampleCache(10, capacity=0, fingerprint="data", name="counts") if by_name else pickle.loads(sent)
            with cache:
                end(cache)

        for number, end in enumerate((work, work_and_die, work_and_die, work)):
            Child(attach, number % 2 == 0, end).wait()
        assert counts(cache) == expected(4 * ROUNDS)


def test_two_objects_and_threads_of_one_process() -> None:
    with cache_of("counts") as cache, cache_of("counts") as other:
        threads = [threading.Thread(target=work, args=(one,)) for one in (cache, other, cache, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts(cache) == counts(other) == expected(4 * ROUNDS)


def test_more_processes_than_rows_still_count(tmp_path: Path) -> None:
    rows = np.zeros((3, 16), np.int64)
    lock = FileLock(tmp_path / "lock")
    counters = [Counters(rows) for _ in range(4)]
    for one in counters:
        one.claim(lock)
        one.add((Count.HITS, 1), (Count.MISSES, 2))
    assert counters[0].totals()[:3] == [4, 8, 0]
    lock.close()
