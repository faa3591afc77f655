"""Listing, removing and sweeping caches, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from children import Holder
from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.store import caches_root, list_caches, remove
from stallfree.errors import InputError
from stallfree.ipc.folders import default_root, sweep, user_root


def cache_of(store: Path, name: str, persist: bool = False) -> SampleCache:
    return SampleCache(9, capacity="1MiB", fingerprint="data", name=name, store=str(store), persist=persist)


def test_where_caches_lie(tmp_path: Path) -> None:
    assert caches_root() == default_root()
    assert caches_root(tmp_path) == user_root(tmp_path)
    assert list_caches(tmp_path / "nothing") == []
    assert sweep(tmp_path / "nothing") == []


def test_a_cache_is_described(tmp_path: Path) -> None:
    with cache_of(tmp_path, "one") as cache:
        cache.put_many([1, 2], ["a", "b"])
        (info,) = list_caches(caches_root(tmp_path))
        stats = cache.stats()
    assert (info.name, info.path, info.in_use, info.persist) == ("one", cache.path, True, False)
    assert (info.samples, info.resident_items, info.policy, info.fingerprint) == (9, 2, "minio", "data")
    assert (info.used_bytes, info.capacity_bytes) == (stats.used_bytes, 1 << 20)


def test_caches_are_listed_by_name_and_damaged_ones_too(tmp_path: Path) -> None:
    root = caches_root(tmp_path)
    cache_of(tmp_path, "b", persist=True).close()
    cache_of(tmp_path, "a", persist=True).close()
    (root / "a" / "meta.json").unlink()
    (root / "photos").mkdir()
    (root / ".new-1-a").mkdir()
    (root / "notes.txt").touch()
    first, second = list_caches(root)
    assert (first.name, first.fingerprint, first.persist, first.in_use) == ("a", "", True, False)
    assert (second.name, second.fingerprint) == ("b", "data")
    remove(root, "a")
    assert [info.name for info in list_caches(root)] == ["b"]


def test_only_unused_caches_are_removed(tmp_path: Path) -> None:
    root = caches_root(tmp_path)
    cache = cache_of(tmp_path, "one", persist=True)
    with pytest.raises(InputError, match=r"'one' in .* is in use: end the processes"):
        remove(root, "one")
    cache.close()
    remove(root, "one")
    with pytest.raises(InputError, match=r"no cache 'one' in .*: give one of the existing caches"):
        remove(root, "one")


@pytest.mark.parametrize("name", ["photos", "../photos", "notes.txt", ".hidden", "link"])
def test_what_is_no_cache_is_not_removed(tmp_path: Path, name: str) -> None:
    root = caches_root(tmp_path)
    cache_of(tmp_path, "one", persist=True).close()
    for folder in (root / "photos", tmp_path / "photos"):
        folder.mkdir()
        (folder / "cat.jpg").write_text("meow")
    (root / "notes.txt").write_text("mine")
    (root / "link").symlink_to(root / "photos")
    with pytest.raises(InputError):
        remove(root, name)
    assert sweep(root) == []
    assert (root / "photos" / "cat.jpg").exists()
    assert (root / "notes.txt").exists()


def test_garbage_is_what_killed_processes_left(tmp_path: Path) -> None:
    root = caches_root(tmp_path)
    cache_of(tmp_path, "kept", persist=True).close()
    Holder(lambda: cache_of(tmp_path, "persistent", persist=True).close).kill()
    lost = Holder(lambda: cache_of(tmp_path, "lost").close)
    with cache_of(tmp_path, "used"):
        lost.kill()
        assert sweep(root) == ["lost"]
        assert [info.name for info in list_caches(root)] == ["kept", "persistent", "used"]
