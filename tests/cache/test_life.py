"""The life of a cache: attach by name, leave, persist, be swept, be refused; what may be stored and under which id."""

from __future__ import annotations

import gc
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from children import Child, Holder
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.errors import FingerprintError, InputError, StorageError
from warm import Interpreter


def cache_of(name: str | None = "life", **arguments: Any) -> SampleCache:
    given: dict[str, Any] = {"capacity": "2MiB", "fingerprint": "data", "name": name, **arguments}
    return SampleCache(given.pop("num_ids", 100), **given)


def test_the_last_one_out_removes_it() -> None:
    first, second = cache_of(), cache_of()
    first.put_many([3], ["three"])
    first.close()
    first.close()
    assert second.get_many([3])[0] == "three"
    second.close()
    assert not second.path.exists()
    with cache_of() as third:
        assert third.get_many([3])[0] is MISS


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
    first.put_many([3], ["three"])
    path = first.path
    with cache_of() as second:
        first.close()
        assert second.get_many([3])[0] == "three"
    with cache_of() as third:
        assert third.get_many([3])[0] == "three"
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
        cache.put_many([3], ["three"])

        def child() -> None:
            assert cache.get_many([3])[0] == "three"
            assert cache.put_many([4], ["four"]).all()
            cache.close()
            with pytest.raises(InputError, match="is closed"):
                cache.get_many([3])[0]

        assert Child(child).wait() == 0
        assert cache.path.is_dir()
        assert cache.get_many([4])[0] == "four"


def test_a_pickled_cache_is_attached_to() -> None:
    with cache_of() as cache:
        cache.put_many([3], ["three"])
        with pickle.loads(pickle.dumps(cache)) as other:
            assert other.get_many([3])[0] == "three"
            assert other.policy.name == cache.policy.name
        data = pickle.dumps(cache)
    with pytest.raises(StorageError, match="does not exist any more: the process that created it has closed it"):
        pickle.loads(data)
    assert pickle.loads(pickle.dumps(MISS)) is MISS
    assert repr(MISS) == "MISS"


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
        cache.put_many([3], ["three"])
        with pytest.raises(FingerprintError, match=message):
            cache_of(**other)
        assert cache.get_many([3])[0] == "three"


def test_without_a_name_jobs_with_the_same_data_meet() -> None:
    with cache_of(None) as first, cache_of(None) as second, cache_of(None, capacity="3MiB") as third:
        assert first.path == second.path != third.path


def test_a_data_set_without_samples() -> None:
    with pytest.raises(InputError, match="at least one sample"):
        cache_of(num_ids=0)
