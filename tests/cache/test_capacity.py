"""A cache stays within what it was given, and within what there is: clear errors, one warning, never SIGBUS."""

import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stallfree as sf
from cache_tools import MISS, PAGE, SampleCache, gathered, make, problems
from children import Child
from stallfree.cache import capacity as limits
from stallfree.cache.policies import POLICIES
from stallfree.units import format_size

MIB = 1 << 20
SAMPLE = np.arange(250 * 1000, dtype=np.uint8)


def cache_of(count: int, capacity: Any, **options: Any) -> SampleCache:
    return SampleCache(count, capacity=capacity, fingerprint="x", **options)


def test_a_capacity_that_holds_no_record(store_root: Path) -> None:
    with pytest.raises(sf.CapacityError, match=r"capacity=1 B holds no record: the index of 1,000 samples") as caught:
        cache_of(1000, 1, example=SAMPLE, name="none")
    assert not (store_root / "none").exists()
    enough = "".join(str(caught.value).split("Give ")[1].split()[:2])
    with cache_of(1000, enough, example=SAMPLE) as cache:
        assert cache.put_many([0], [SAMPLE]).all()


@pytest.mark.parametrize("example", [SAMPLE, b"x", MISS], ids=["uniform", "varied", "none"])
@pytest.mark.parametrize("policy", ["minio", "importance"])
def test_no_capacity_is_an_index_without_samples(policy: str, example: Any, tmp_path: Path) -> None:
    """As in front of a store whose samples are elsewhere: scores, counts and uncached steps are still shared."""
    with cache_of(10, 0, policy=policy, store="memory" if policy == "minio" else tmp_path, example=example) as cache:
        if policy == "importance":
            cache.set_scores([1], [5.0])
        assert not cache.put_many([1, 2], [SAMPLE, b"x"]).any()
        assert cache.get_many([1, 2]) == [MISS, MISS]
        assert gathered(cache, [1, 2]) == []
        borrowed = cache.borrow([1, 2])
        assert borrowed is None or borrowed.values == [MISS, MISS]
        cache.clear()
        cache.count_tier(5, 3)
        assert cache.uncache_steps(2)
        with pickle.loads(pickle.dumps(cache)) as other:
            assert (other.uncached_steps, other.capacity, other.complete, other.full) == (2, 0, False, True)
            stats = other.stats()
        assert (stats.rejected, stats.resident_items, stats.capacity_bytes) == (2, 0, 0)
        assert (stats.tier_hits, stats.tier_rejected) == (5, 3)
        assert problems(cache) == []


@pytest.mark.parametrize(("policy", "on_disk", "sizes"), [
    ("minio", False, "uniform"), ("lfu", False, "varied"), ("lru", True, "varied"), ("oracle", True, "uniform"),
])  # fmt: skip
def test_it_never_takes_more_than_its_capacity(policy: str, on_disk: bool, sizes: str, tmp_path: Path) -> None:
    rng, example = np.random.default_rng(0), np.zeros(5000, np.uint8) if sizes == "uniform" else b"x" * 1000
    for capacity in (200_000, 1_234_567):
        with cache_of(500, capacity, example=example, policy=policy, store=tmp_path if on_disk else "memory") as cache:
            for _ in range(30):
                size = 5000 if sizes == "uniform" else int(rng.integers(0, 9000))
                cache.put_many(rng.integers(0, 500, 40), [np.zeros(size, np.uint8)] * 40)
            assert sum(path.stat().st_blocks * 512 for path in [cache.path, *cache.path.rglob("*")]) <= capacity
            assert capacity * 0.7 < cache.stats().used_bytes <= cache.stats().capacity_bytes <= capacity


def test_an_item_larger_than_the_cache_passes_through_and_costs_nobody_else() -> None:
    for policy in sorted(POLICIES):
        with make(10, 20, policy=policy, example=b"x" * 300, name=f"large-{policy}") as cache:
            cache.put_many(range(3), [b"small"] * 3)
            assert cache.put_many([3, 4], [bytes(MIB), b"small"]).tolist() == [False, True]
            assert cache.resident(range(5)).tolist() == [True, True, True, False, True]
            assert (cache.stats().rejected, cache.stats().evictions) == (1, 0)
            assert problems(cache) == []


def test_a_cache_that_is_there_with_another_capacity_warns() -> None:
    with cache_of(10, "4MiB", name="sized", example=SAMPLE) as first:
        with pytest.warns(RuntimeWarning, match=r"'sized' already exists with .* 4\.0 MiB: .* 8\.0 MiB are ignored"):
            second = cache_of(10, "8MiB", name="sized", example=SAMPLE)
        assert second.meta.capacity == first.meta.capacity
        second.close()


V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize(("line", "name", "files", "stat"), [
    ("0::/job", "job", V2, "anon 99\nactive_file 0\ninactive_file {files}\n"),
    ("0::/job", "job", V2, "active_file {files}\n"),  # files that were read twice
    ("4:cpu,memory:/job", "memory/job", V1, "inactive_file 0\ntotal_inactive_file {files}\n"),
])  # fmt: skip
def test_files_in_the_page_cache_of_a_container_take_no_memory(
    line: str, name: str, files: tuple[str, str], stat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over the data fills the control group with pages that the kernel gives up when memory is asked for."""
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (tmp_path / "own").write_text(f"{line}\n")
    for file, size in zip(files, (4096, 4000), strict=True):
        (folder / file).write_text(f"{size * MIB}\n")
    monkeypatch.setattr(limits, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(limits, "_GROUPS", tmp_path)
    monkeypatch.setattr(limits, "_available", lambda: 64 * 1024 * MIB)  # of the host
    monkeypatch.setattr(limits, "free_space", lambda folder: 64 * 1024 * MIB)
    with pytest.raises(sf.CapacityError, match=r"exceeds the 96.0 MiB of free memory"):
        sf.CachedDataset([1, 2], capacity="2GiB")
    (folder / "memory.stat").write_text(stat.format(files=3584 * MIB))
    with cache_of(10_000, "2GiB", example=SAMPLE) as cache:
        assert cache.put_many([1], [SAMPLE]).all()
    with pytest.raises(sf.CapacityError, match=r"capacity=4.0 GiB for the cache .* exceeds the 3.6 GiB of free memory"):
        sf.CachedDataset([1, 2], capacity="4GiB")
    monkeypatch.undo()
    assert 0 < limits.free_memory() < 1 << 50


@pytest.fixture
def tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 64 MiB in memory, as in a container, in which the caches of this test lie."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mount = shutil.which("mount")
    command = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", str(folder)]
    if not mount or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here: that takes root")
    monkeypatch.setenv("STALLFREE_ROOT", str(folder))
    root = folder / f"stallfree-{os.getuid()}"
    root.mkdir(mode=0o700)
    yield root
    subprocess.run(["umount", str(folder)], check=True)


def fill(cache: SampleCache, ids: range) -> int:
    """Put `SAMPLE` for `ids`, a multiple of ten; how many are stored. Every one that is must be right."""
    for batch in np.array(ids).reshape(-1, 10):
        cache.put_many(batch, [SAMPLE] * 10)
    values = cache.get_many(np.array(ids)[cache.resident(ids)])
    assert all(value is not MISS and (value == SAMPLE).all() for value in values)
    return len(values)


def test_a_small_shared_memory_means_a_smaller_cache_with_one_warning(tmpfs: Path) -> None:
    smaller = pytest.warns(RuntimeWarning, match="--shm-size")
    with smaller as caught, cache_of(1000, "1GiB", example=SAMPLE) as cache:
        stored = fill(cache, range(1000))
        assert 230 < stored < 260
        stats = cache.stats()
        assert stats.used_bytes <= stats.capacity_bytes < 64 * MIB
        assert stats.rejected == 1000 - stored
    (warning,) = caught
    assert f"takes {format_size(stats.capacity_bytes)} instead of the requested 1.0 GiB" in str(warning.message)
    no_space = pytest.raises(sf.CapacityError, match=r"2\.0 GiB has no space: .* less than its index.*--shm-size")
    with pytest.warns(RuntimeWarning, match="free"), no_space:
        cache_of(100_000_000, "2GiB")
    assert list(tmpfs.iterdir()) == []


@pytest.mark.parametrize(("policy", "left"), [("minio", 0), ("lru", 5 * MIB), ("minio", 20 * MIB)])
def test_a_file_system_that_fills_up_meanwhile(tmpfs: Path, policy: str, left: int) -> None:
    full = pytest.warns(RuntimeWarning, match="is full: the cache is limited to")
    with full as caught, cache_of(1000, "40MiB", policy=policy, example=SAMPLE) as cache:
        assert not cache.gather(range(10), [np.zeros((10, len(SAMPLE)), np.uint8)]).any()
        with open(tmpfs / "other", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(tmpfs).f_bavail * PAGE - left)
        stored = fill(cache, range(300))
        assert stored == cache.stats().resident_items
        assert 0.8 * left <= stored * len(SAMPLE) <= left
        assert os.statvfs(tmpfs).f_bavail * PAGE >= left // 20, "a part is left to others"
        assert cache.gather(range(300), [np.zeros((300, len(SAMPLE)), np.uint8)]).sum() == stored
        assert Child(fill, cache, range(300, 600)).wait() == 0
        assert problems(cache) == []
        assert cache.stats().used_bytes <= 40 * MIB
        os.unlink(tmpfs / "other")
    assert [one.category for one in caught].count(RuntimeWarning) == 1
