"""The life of a cache: attach by name, leave, persist, be swept, be refused; what may be stored and under which id."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from children import Child, Holder
from stallfree.cache import MISS, SampleCache
from stallfree.errors import FingerprintError, InputError, StorageError
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
