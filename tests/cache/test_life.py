"""The life of a cache: attach by name, leave, persist, be swept, be refused; what may be stored and under which id."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_tools import make

from children import Child, Holder
from stallfree.cache import MISS, SampleCache
from stallfree.errors import CodecError, FingerprintError, InputError, StorageError
from warm import Interpreter


def cache_of(name: str | None = "life", **arguments: Any) -> SampleCache:
    given: dict[str, Any] = {"capacity": "2MiB", "fingerprint": "data", "name": name, **arguments}
    return SampleCache(given.pop("num_ids", 100), **given)


def test_the_last_one_out_removes_it() -> None:
    first, second = cache_of(), cache_of()
    first.put(3, "three")
    first.close()
    first.close()
    assert second.get(3) == "three"
    second.close()
    assert not second.path.exists()
    with cache_of() as third:
        assert third.get(3) is MISS


def test_a_cache_that_was_not_closed_goes_with_its_last_object() -> None:
    cache = cache_of()
    path = cache.path
    del cache
    gc.collect()
    assert not path.exists()


def test_a_cache_that_was_not_closed_goes_with_the_process(store_root: Path, interpreter: Interpreter) -> None:
    code = "from stallfree.cache import SampleCache; c = SampleCache(9, capacity='1MiB', fingerprint='x', name='exit')"
    assert interpreter.run(code).code == 0
    assert not (store_root / "exit").exists()


def test_persistent_caches_stay_whoever_leaves_last() -> None:
    first = cache_of(persist=True)
    first.put(3, "three")
    path = first.path
    with cache_of() as second:
        first.close()
        assert second.get(3) == "three"
    with cache_of() as third:
        assert third.get(3) == "three"
    shutil.rmtree(path)


def test_what_a_killed_process_leaves_is_swept_by_the_next_cache(store_root: Path) -> None:
    other = Holder(lambda: cache_of("killed").close)
    assert (store_root / "killed").is_dir()
    other.kill()
    assert (store_root / "killed").is_dir()
    with cache_of("next"):
        assert not (store_root / "killed").exists()


def test_a_forked_child_that_closes_does_not_remove_its_parents_cache() -> None:
    with cache_of() as cache:
        cache.put(3, "three")

        def child() -> None:
            assert cache.get(3) == "three"
            assert cache.put(4, "four")
            cache.close()
            with pytest.raises(InputError, match="is closed"):
                cache.get(3)

        assert Child(child).wait() == 0
        assert cache.path.is_dir()
        assert cache.get(4) == "four"


def test_a_pickled_cache_is_attached_to() -> None:
    with cache_of() as cache:
        cache.put(3, "three")
        with pickle.loads(pickle.dumps(cache)) as other:
            assert other.get(3) == "three"
            assert other.policy.name == cache.policy.name
        data = pickle.dumps(cache)
    with pytest.raises(StorageError, match="is gone: whoever made it has closed it"):
        pickle.loads(data)
    assert pickle.loads(pickle.dumps(MISS)) is MISS
    assert repr(MISS) == "MISS"


def get_and_put(cache: SampleCache) -> None:
    assert cache.get(3) == "three"
    cache.put(4, "four")


def test_a_cache_travels_to_a_spawned_process() -> None:
    with cache_of() as cache:
        cache.put(3, "three")
        process = multiprocessing.get_context("spawn").Process(target=get_and_put, args=(cache,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert cache.get(4) == "four"
        assert (cache.stats().hits, cache.stats().misses) == (2, 0)


def test_a_closed_cache_says_so() -> None:
    cache = cache_of()
    cache.put(3, "three")
    cache.close()
    for use in (
        lambda: cache.get(3),
        lambda: cache.put(4, 4),
        lambda: cache.drop([3]),
        lambda: cache.count_fetch(1, 1),
    ):
        with pytest.raises(InputError, match="the cache 'life' is closed"):
            use()
    assert cache.stats().resident_items == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"fingerprint": "elsewhere"}, r"holds other data: its fingerprint is data, yours is elsewhere.*cache rm life"),
        ({"num_ids": 99}, "its number of samples is 100, yours is 99"),
        ({"policy": "lru"}, "its policy is minio, yours is lru"),
    ],
)
def test_a_name_that_belongs_to_other_data(other: dict[str, Any], message: str) -> None:
    with cache_of() as cache:
        cache.put(3, "three")
        with pytest.raises(FingerprintError, match=message):
            cache_of(**other)
        assert cache.get(3) == "three"


def test_without_a_name_jobs_with_the_same_data_meet() -> None:
    with cache_of(None) as first, cache_of(None) as second, cache_of(None, capacity="3MiB") as third:
        assert first.path == second.path != third.path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_store_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "stallfree-0").mkdir(mode=0o700)
    os.chown(tmp_path / "stallfree-0", 12345, -1)
    with pytest.raises(FingerprintError, match="belongs to user 12345"):
        cache_of(store=tmp_path)


def test_a_name_that_cannot_be_one() -> None:
    with pytest.raises(InputError, match="name='a/b' cannot name a cache"):
        cache_of("a/b")


def test_a_data_set_without_samples() -> None:
    with pytest.raises(InputError, match="at least one sample"):
        cache_of(num_ids=0)


# --- ids and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[100], [-1], [0, 2**63 - 1], np.array([2**63 + 5], np.uint64)])
def test_ids_outside_of_the_data_set(ids: Any) -> None:
    with cache_of() as cache:
        for use in (cache.get_many, cache.resident, cache.drop, lambda ids: cache.put_many(ids, [1] * len(ids))):
            with pytest.raises(InputError, match="is outside of the data set: ids are 0 to 99"):
                use(ids)
        assert cache.stats().resident_items == 0


@pytest.mark.parametrize("ids", [[1.5], ["a"], [[1], [2]], [[1], [2, 3]], [True], 5, [None]])
def test_what_is_no_id(ids: Any) -> None:
    with cache_of() as cache, pytest.raises(InputError, match=r"ids=.*: give a sequence of integers"):
        cache.get_many(ids)


def test_ids_in_every_form_of_integers() -> None:
    with cache_of() as cache:
        cache.put_many(range(3), ["a", "b", "c"])
        for ids in ([2, 0], (2, 0), np.array([2, 0], np.uint8), np.array([2, 0], np.uint64), torch.tensor([2, 0])):
            assert cache.get_many(ids) == ["c", "a"]
        assert cache.get_many([]) == []
        assert cache.put_many([], []).tolist() == []


def test_as_many_ids_as_values() -> None:
    with cache_of() as cache, pytest.raises(InputError, match="2 ids and 1 values"):
        cache.put_many([1, 2], ["one"])


def test_falsy_values_are_no_misses() -> None:
    values = [None, 0, False, "", (), [], {}, 0.0, b""]
    with cache_of() as cache:
        cache.put_many(range(len(values)), values)
        found = cache.get_many(range(len(values) + 1))
        assert found == [*values, MISS]
        assert [type(value) for value in found[:-1]] == [type(value) for value in values]


def test_what_is_there_stays_and_the_first_of_two_wins() -> None:
    with cache_of() as cache:
        assert cache.put_many([1, 2, 1], ["a", "b", "c"]).all()
        cache.put(2, "d")
        assert cache.get_many([1, 2, 2]) == ["a", "b", "b"]
        assert cache.stats().resident_items == 2


class NeedsPickle:
    pass


def test_a_value_that_needs_pickle_where_that_is_not_allowed() -> None:
    with cache_of(allow_pickle=False) as cache:
        with pytest.raises(CodecError, match="NeedsPickle: cannot be stored without pickle"):
            cache.put_many([1, 2], ["one", NeedsPickle()])
        assert not cache.resident([1, 2]).any()
    with cache_of() as cache:
        cache.put(1, NeedsPickle())
        assert isinstance(cache.get(1), NeedsPickle)


def test_gather_needs_a_structure() -> None:
    with cache_of() as cache, pytest.raises(InputError, match="use get_many"):
        cache.gather([1], [])


def test_gather_of_an_empty_cache_gives_nothing() -> None:
    with make(10, 10, example=np.zeros(100)) as cache:
        assert not cache.gather([1, 2], [np.zeros((2, 800), np.uint8)]).any()
