"""One look at the caches and loaders of this host, and the next."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stallfree as sf
from children import Holder
from stallfree.cache import SampleCache
from stallfree.observe import jobs
from stallfree.observe.jobs import Jobs
from stallfree.stats import LoaderStats
from stallfree.workers.status import LoaderStatus
from stallfree.workers.worker_pool import new_counts

needs_locks = pytest.mark.skipif(not os.access("/proc/locks", os.R_OK), reason="the kernel does not list locks")


def make_cache(name: str = "pictures", policy: str = "minio") -> SampleCache:
    return SampleCache(100, capacity="1MiB", fingerprint="test", name=name, policy=policy)


def test_nothing() -> None:
    look = Jobs().look()
    assert not look
    assert (look.caches, look.loaders) == ([], [])


def test_hits_of_a_cache_in_all_and_since_the_look_before() -> None:
    watched = Jobs()
    with closing(make_cache()) as cache:
        (row,) = watched.look().caches
        assert (row.name, row.policy, row.samples, row.resident_items) == ("pictures", "minio", 100, 0)
        assert (row.hits, row.misses, row.hit_ratio, row.recent_hit_ratio) == (0, 0, None, None)
        cache.put_many([1, 2, 3], [b"one", b"two", b"three"])
        cache.get_many([1, 2, 3, 4])
        (row,) = watched.look().caches
        assert (row.resident_items, row.hits, row.misses) == (3, 3, 1)
        assert (row.hit_ratio, row.recent_hit_ratio) == (0.75, 0.75)
        assert row.used_bytes == cache.stats().used_bytes
        assert row.capacity_bytes == cache.stats().capacity_bytes
        cache.get_many([1, 5, 6, 7])
        (row,) = watched.look().caches
        assert (row.hit_ratio, row.recent_hit_ratio) == (0.5, 0.25)
        assert watched.look().caches[0].recent_hit_ratio is None
        assert Jobs().look().caches[0].recent_hit_ratio is None
    assert not watched.look()


def test_evictions() -> None:
    watched = Jobs()
    with closing(make_cache(policy="lru")) as cache:
        watched.look()
        for id in range(100):
            cache.put_many([id], [bytes(100_000)])
        (row,) = watched.look().caches
        assert row.evictions == row.recent_evictions == cache.stats().evictions > 50
        assert watched.look().caches[0].recent_evictions == 0


def test_another_cache_of_the_same_name() -> None:
    watched = Jobs()
    with closing(make_cache()) as cache:
        cache.get_many([1, 2])
        watched.look()
    with closing(make_cache()) as cache:
        cache.get_many([1])
        (row,) = watched.look().caches
        assert (row.misses, row.recent_hit_ratio) == (1, None)


@needs_locks
def test_attached_processes_are_counted() -> None:
    def attach() -> Callable[[], None]:
        return make_cache().close

    with closing(make_cache()):
        assert Jobs().look().caches[0].processes == 1
        holders = [Holder(attach) for _ in range(2)]
        assert Jobs().look().caches[0].processes == 3
        holders[0].kill()
        assert Jobs().look().caches[0].processes == 2
        holders[1].end()
        assert Jobs().look().caches[0].processes == 1


def test_a_kernel_that_lists_no_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jobs, "_LOCKS", tmp_path / "none")
    with closing(make_cache()):
        assert Jobs().look().caches[0].processes is None


def test_a_cache_that_cannot_be_read(store_root: Path) -> None:
    with closing(make_cache()):
        meta = store_root / "pictures" / "meta.json"
        whole = meta.read_bytes()
        meta.write_text("no json")
        (row,) = Jobs().look().caches
        assert (row.name, row.capacity_bytes, row.hits, row.hit_ratio) == ("pictures", 0, None, None)
        meta.write_bytes(whole)


def status(at: float, begun: float = 100.0, pid: int = 7, **counts: float) -> LoaderStatus:
    stats = LoaderStats(**{**new_counts(), "num_workers": 2, **counts})
    return LoaderStatus(f"{pid}-{begun}", pid, "train.py", "Pictures", 3, begun, at, stats)


def test_rates_and_stalls_of_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    now = status(110.0, batches=10, samples=640, wait_seconds=5.0, fetch_seconds=6.0, queue_depth=1)
    found = [now]
    monkeypatch.setattr(jobs, "running_loaders", lambda root: found)
    watched = Jobs()
    (row,) = watched.look().loaders  # since it was made: 10 s, of which 3 s (6 s of two workers) for fetches
    assert (row.pid, row.script, row.dataset, row.epoch, row.workers) == (7, "train.py", "Pictures", 3, 2)
    assert (row.batches, row.samples, row.queue_depth) == (10, 640, 1)
    assert (row.samples_per_second, row.fetch_stall, row.prep_stall) == (64.0, 0.3, 0.2)
    assert row.silent_seconds == pytest.approx(time.monotonic() - 110.0, abs=60)
    # 2 s later: 100 samples, 1 s waited, hardly a fetch.
    now = status(112.0, batches=12, samples=740, wait_seconds=6.0, fetch_seconds=6.2)
    found[:] = [now]
    for _ in range(2):  # a look that finds nothing new shows the same
        (row,) = watched.look().loaders
        assert (row.samples_per_second, row.samples) == (50.0, 740)
        assert row.fetch_stall == pytest.approx(0.05)
        assert row.prep_stall == pytest.approx(0.45)
    found[:] = [status(113.0, batches=12, samples=740, wait_seconds=7.0, fetch_seconds=9.0), status(110.0, 110.0, 8)]
    row, fresh = watched.look().loaders
    assert (row.samples_per_second, row.fetch_stall, row.prep_stall) == (0.0, 1.0, 0.0)
    assert (fresh.samples_per_second, fresh.fetch_stall, fresh.prep_stall) == (None, None, None)


def test_a_loader_that_runs() -> None:
    loader = sf.DataLoader(list(torch.arange(20)), 4, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    (row,) = Jobs().look().loaders
    assert (row.pid, row.dataset, row.workers) == (os.getpid(), "list", 1)
    assert 0 <= row.silent_seconds
    assert len(list(iterator)) == 4
    assert Jobs().look().loaders == []
    assert replace(loader.stats(), batches=0).samples == 20
