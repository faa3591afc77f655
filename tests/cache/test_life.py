"""The life of a cache: attach by name, leave, persist, be listed and removed; counts are exact over all processes."""

import gc
import os
import pickle
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_tools import MISS, SampleCache, make
from children import Child, Holder, run_threads
from stallfree.cache.layout import Count, Counters
from stallfree.cache.store import caches_root, list_caches, remove
from stallfree.errors import FingerprintError, InputError, StorageError
from stallfree.ipc.folders import sweep
from stallfree.ipc.locks import FileLock


def cache_of(name: str | None = "life", **arguments: Any) -> SampleCache:
    given: dict[str, Any] = {"capacity": "2MiB", "fingerprint": "data", "name": name, **arguments}
    return SampleCache(given.pop("num_ids", 100), **given)


def test_the_last_one_out_removes_it_unless_it_persists(store_root: Path) -> None:
    for persist in (False, True):
        first, second = cache_of(persist=persist), cache_of()
        first.put_many([3], ["three"])
        first.close()
        first.close()
        assert second.get_many([3]) == ["three"]
        del second
        gc.collect()
        assert (store_root / "life").exists() == persist
        with cache_of() as third:
            assert third.get_many([3]) == (["three"] if persist else [MISS])
    remove(store_root, "life")
    Holder(lambda: cache_of("killed").close).kill()
    with cache_of("next"):
        assert not (store_root / "killed").exists(), "a new cache sweeps"


def test_a_forked_child_that_closes_does_not_remove_its_parents_cache() -> None:
    with cache_of() as cache:
        cache.put_many([3], ["three"])

        def child() -> None:
            assert cache.get_many([3]) == ["three"]
            assert cache.put_many([4], ["four"]).all()
            cache.close()
            with pytest.raises(InputError, match="is closed"):
                cache.get_many([3])

        assert Child(child).wait() == 0
        assert cache.get_many([3, 4]) == ["three", "four"]


def test_a_pickled_cache_is_attached_to() -> None:
    with cache_of() as cache:
        cache.put_many([3], ["three"])
        with pickle.loads(data := pickle.dumps(cache)) as other:
            assert (other.get_many([3]), other.policy.name) == (["three"], cache.policy.name)
    with pytest.raises(StorageError, match="does not exist any more: the process that created it has closed it"):
        pickle.loads(data)
    assert pickle.loads(pickle.dumps(MISS)) is MISS


def test_a_name_belongs_to_one_data_set_and_equal_data_have_one_name() -> None:
    with cache_of() as cache:
        for other, message in (
            ({"fingerprint": "elsewhere"}, r"its fingerprint is data, yours is elsewhere.*`stallfree cache rm life`"),
            ({"num_ids": 99}, "its number of samples is 100, yours is 99"),
            ({"policy": "lru"}, "its policy is minio, yours is lru"),
        ):
            with pytest.raises(FingerprintError, match=message):
                cache_of(**other)
        assert cache.put_many([3], ["three"]).all()
    with cache_of(None) as first, cache_of(None) as second, cache_of(None, capacity="3MiB") as third:
        assert first.path == second.path != third.path
    with pytest.raises(InputError, match="at least one sample"):
        cache_of(num_ids=0)


def test_what_is_no_cache_is_not_removed(tmp_path: Path) -> None:
    """`stallfree cache` shows the rest: caches are listed, and removed if they are not in use."""
    with cache_of("one", store=tmp_path):
        root = caches_root(tmp_path)
        (root / "photos").mkdir()
        (root / "photos" / "cat.jpg").write_text("meow")
        (root / "notes.txt").write_text("mine")
        (root / "link").symlink_to(root / "photos")
        for name in ("photos", "../photos", "notes.txt", ".new-1-a", "link", "two"):
            with pytest.raises(InputError, match=r"cannot name a cache|there is no cache"):
                remove(root, name)
        assert [info.name for info in list_caches(root)] == ["one"]
    assert sweep(root) == list_caches(root) == list_caches(tmp_path / "nothing") == []
    assert {path.name for path in root.rglob("*")} == {"photos", "cat.jpg", "notes.txt", "link"}


ROUNDS = 10


def work(cache: SampleCache) -> None:
    """Each round: two hits, one miss, one fetch of ten bytes, one sample that is too large and rejected."""
    for _ in range(ROUNDS):
        cache.get_many([0, 9, 1])
        cache.count_fetch(1, 10)
        cache.put_many([9], [bytes(1 << 20)])


def test_processes_living_and_dead_and_threads_are_all_counted() -> None:
    with make(10, 4, example=b"x" * 300, name="counts") as cache, make(10, 4, example=b"x", name="counts") as other:
        cache.put_many([0, 1], [b"zero", b"one"])
        assert cache.stats().hit_ratio == 0
        sent = pickle.dumps(cache)

        def attach(how: Callable[[], SampleCache], dies: bool) -> None:
            mine = how()
            work(mine)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            mine.close()

        ways = lambda: cache, lambda: cache_of("counts", capacity=0, num_ids=10), lambda: pickle.loads(sent)
        children = [Child(attach, how, dies) for how in ways for dies in (False, True)]
        run_threads(*(lambda one=one: work(one) for one in (cache, other, cache)))
        assert [child.wait() for child in children] == [0, -signal.SIGKILL] * 3
        for stats in (cache.stats(), other.stats()):
            counted = stats.hits, stats.misses, stats.storage_reads, stats.storage_bytes, stats.rejected
            assert counted == tuple(9 * ROUNDS * each for each in (2, 1, 1, 10, 1))
            assert stats.hit_ratio == pytest.approx(2 / 3)


def test_more_processes_than_rows_still_count(tmp_path: Path) -> None:
    rows, lock = np.zeros((3, 16), np.int64), FileLock(tmp_path / "lock")
    for one in (counters := [Counters(rows) for _ in range(4)]):
        one.claim(lock)
        one.add((Count.HITS, 1), (Count.MISSES, 2))
    assert counters[0].totals()[:3] == [4, 8, 0]
    lock.close()


def test_a_limit_on_the_size_of_files() -> None:
    """Nothing counts as stored that was not written."""

    def child() -> None:
        example = np.zeros(50_000, np.uint8)
        with SampleCache(100, capacity="4MiB", fingerprint="f", example=example) as cache:
            cache.put_many([99], [example])
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
            assert cache.put_many(range(20), [np.full(50_000, id + 1, np.uint8) for id in range(20)]).any()
            values = cache.get_many(range(20))
            assert all(value is MISS or (value == id + 1).all() for id, value in enumerate(values))

    assert Child(child).wait() == 0


def test_a_record_in_scattered_blocks_is_lent_whole() -> None:
    with SampleCache(100, capacity="4MiB", fingerprint="f") as cache:
        cache.put_many(range(40), [np.full(15_000, id, np.uint8) for id in range(40)])
        cache.drop(range(0, 40, 2))
        large = np.arange(150_000).astype(np.uint8)
        assert cache.put_many([50], [large]).all()
        assert ((lent := cache.borrow([50])).values[0] == large).all()
        assert lent.unchanged(0)
