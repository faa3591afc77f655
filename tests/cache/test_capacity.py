"""A cache stays within what it was given, and within what there is: clear errors, one warning, never SIGBUS."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stallfree as sf
from cache_tools import PAGE, make, problems
from children import Child
from stallfree.cache import capacity as limits
from stallfree.cache.policies import POLICIES
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.errors import CapacityError
from stallfree.units import format_size

MIB = 1 << 20
SAMPLE = np.arange(250 * 1000, dtype=np.uint8)


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


def occupied(folder: Path) -> int:
    """Bytes that a folder takes."""
    return sum(path.stat().st_blocks * 512 for path in [folder, *folder.rglob("*")])


def fill(cache: SampleCache, ids: range) -> int:
    """Put `SAMPLE` for `ids`; how many are stored. Every one that is must be right."""
    for start in range(ids.start, ids.stop, 10):
        batch = range(start, min(start + 10, ids.stop))
        cache.put_many(batch, [SAMPLE] * len(batch))
    resident = [id for id in ids if cache.resident([id])[0]]
    for value in cache.get_many(resident):
        assert value is not MISS
        assert (value == SAMPLE).all()
    return len(resident)


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (-1, "is negative"),
        ("-4GiB", "is negative"),
        ("much", "is no size"),
        (None, "is no size"),
        (1.5, "is no size"),
        (True, "is no size"),
        ("20KB", r"capacity=19.5 KiB holds no record: the index of 10 samples takes .* Give .* or more"),
    ],
)
def test_capacities_that_are_none(capacity: Any, message: str, store_root: Path) -> None:
    with pytest.raises(CapacityError, match=message):
        SampleCache(10, capacity=capacity, fingerprint="x", name="none")
    assert not (store_root / "none").exists()


def test_the_capacity_that_the_message_names_is_enough() -> None:
    with pytest.raises(CapacityError) as caught:
        SampleCache(1000, capacity=1, fingerprint="x", example=SAMPLE)
    words = str(caught.value).split("Give ")[1].split()
    with SampleCache(1000, capacity=f"{words[0]}{words[1]}", fingerprint="x", example=SAMPLE) as cache:
        assert cache.put_many([0], [SAMPLE]).all()


@pytest.mark.parametrize("example", [SAMPLE, b"x", MISS])
@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("policy", ["minio", "lru", "importance"])
def test_no_capacity_is_an_index_without_samples(policy: str, place: str, example: Any, tmp_path: Path) -> None:
    """As in front of a store whose samples are elsewhere: scores, counts and uncached steps are still shared."""
    store = "memory" if place == "memory" else tmp_path
    with SampleCache(10, capacity=0, fingerprint="x", policy=policy, store=store, example=example) as cache:
        if policy == "importance":
            cache.set_scores([1], [5.0])
        assert not cache.put_many([1, 2], [SAMPLE, b"x"]).any()
        assert cache.get_many([1, 2]) == [MISS, MISS]
        outs = [np.empty((2, leaf.nbytes), np.uint8) for leaf in cache.structure.leaves] if cache.structure else []
        assert not cache.gather([1, 2], outs).any()
        borrowed = cache.borrow([1, 2])
        assert borrowed is None or borrowed.values == [MISS, MISS]
        cache.drop([1])
        cache.clear()
        cache.count_fetch(2, 20)
        cache.count_tier(5, 3)
        assert cache.uncache_steps(2)
        with pickle.loads(pickle.dumps(cache)) as other:
            assert (other.uncached_steps, other.capacity, other.complete, other.full) == (2, 0, False, True)
            assert not other.resident(range(10)).any()
            stats = other.stats()
        assert (stats.rejected, stats.storage_bytes, stats.resident_items, stats.capacity_bytes) == (2, 20, 0, 0)
        assert (stats.tier_hits, stats.tier_rejected) == (5, 3)
        assert problems(cache) == []


def test_more_than_there_is_says_how_much_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_memory", lambda: 5 * MIB)
    with pytest.raises(CapacityError, match=r"capacity=6.0 MiB for the cache .* exceeds the 5.0 MiB of free memory"):
        SampleCache(10, capacity="6MiB", fingerprint="x")
    monkeypatch.undo()
    with pytest.raises(CapacityError, match="GiB of free memory"):
        SampleCache(10, capacity="900TiB", fingerprint="x")
    assert 0 < limits.free_memory() < 1 << 50


GROUPS = {  # the lines of a control group with a limit of 64 MiB, of which 60 MiB are used, 50 MiB by files
    "version 2": (
        "0::/job",
        "job",
        "memory.max",
        "memory.current",
        "anon {anon}\nactive_file 0\ninactive_file {files}\n",
    ),
    "version 2, files read twice": ("0::/job", "job", "memory.max", "memory.current", "active_file {files}\n"),
    "version 1": (
        "4:cpu,memory:/job",
        "memory/job",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "inactive_file 0\ntotal_inactive_file {files}\n",
    ),
}


def control_group(group: str, limit: int, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put this process into a control group whose files are below `tmp_path`; returns its folder."""
    line, name, limit_file, used_file, _ = GROUPS[group]
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (tmp_path / "own").write_text(f"{line}\n")
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    monkeypatch.setattr(limits, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(limits, "_GROUPS", tmp_path)
    return folder


def test_a_cache_of_2_gib_opens_in_a_container_of_4_of_which_3_5_are_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_available", lambda: 64 * 1024 * MIB)  # of the host
    monkeypatch.setattr(limits, "free_space", lambda folder: 64 * 1024 * MIB)
    folder = control_group("version 2", 4096 * MIB, 4000 * MIB, tmp_path, monkeypatch)
    (folder / "memory.stat").write_text(f"anon {416 * MIB}\nactive_file {MIB}\ninactive_file {3583 * MIB}\n")
    with SampleCache(10_000, capacity="2GiB", fingerprint="x", example=SAMPLE) as cache:
        assert cache.put_many([1], [SAMPLE]).all()
    with pytest.raises(CapacityError, match=r"exceeds the 3.6 GiB of free memory"):
        SampleCache(10_000, capacity="4GiB", fingerprint="x", example=SAMPLE)


@pytest.mark.parametrize("group", GROUPS)
def test_files_in_the_page_cache_of_a_container_take_no_memory(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over the data fills the control group with pages that the kernel gives up when memory is asked for."""
    *_, stat = GROUPS[group]
    folder = control_group(group, 64 * MIB, 60 * MIB, tmp_path, monkeypatch)
    with pytest.raises(CapacityError, match=r"exceeds the 4.0 MiB of free memory"):
        sf.CachedDataset([1, 2], capacity="8MiB")
    (folder / "memory.stat").write_text(stat.format(files=50 * MIB, anon=10 * MIB))
    sf.CachedDataset([1, 2], capacity="8MiB").close()
    with pytest.raises(CapacityError, match=r"exceeds the 54.0 MiB of free memory"):
        sf.CachedDataset([1, 2], capacity="60MiB")


@pytest.mark.parametrize(
    ("policy", "place", "sizes"),
    [
        ("minio", "memory", "uniform"),
        ("lfu", "memory", "varied"),
        ("lru", "disk", "varied"),
        ("oracle", "disk", "uniform"),
    ],
)
def test_it_never_takes_more_than_its_capacity(policy: str, place: str, sizes: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    example = np.zeros(5000, np.uint8)
    for capacity in (200_000, 1_234_567):
        with SampleCache(
            500,
            capacity=capacity,
            fingerprint="x",
            policy=policy,
            store="memory" if place == "memory" else str(tmp_path),
            example=example if sizes == "uniform" else b"x" * 1000,
        ) as cache:
            for _ in range(30):
                ids = rng.integers(0, 500, 40)
                size = 5000 if sizes == "uniform" else int(rng.integers(0, 9000))
                cache.put_many(ids, [np.zeros(size, np.uint8)] * 40)
            assert occupied(cache.path) <= capacity
            assert capacity * 0.7 < cache.stats().used_bytes <= cache.stats().capacity_bytes <= capacity


def test_an_item_larger_than_the_cache_passes_through_and_costs_nobody_else() -> None:
    for policy in sorted(POLICIES):
        with make(10, 20, policy=policy, example=b"x" * 300, name=f"large-{policy}") as cache:
            for id in range(3):
                cache.put_many([id], [b"small"])
            assert cache.put_many([3, 4], [bytes(MIB), b"small"]).tolist() == [False, True]
            assert cache.resident(range(5)).tolist() == [True, True, True, False, True]
            assert (cache.stats().rejected, cache.stats().evictions) == (1, 0)
            assert problems(cache) == []


# --- small and full file systems -------------------------------------------------------------------------------------


def test_a_small_shared_memory_means_a_smaller_cache_with_one_warning(tmpfs: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with SampleCache(1000, capacity="1GiB", fingerprint="x", example=SAMPLE) as cache:
            stored = fill(cache, range(1000))
            assert 230 < stored < 260
            stats = cache.stats()
            assert stats.used_bytes <= stats.capacity_bytes < 64 * MIB
            assert stats.rejected == 1000 - stored
    assert len(caught) == 1
    assert f"takes {format_size(stats.capacity_bytes)} instead of the requested 1.0 GiB" in str(caught[0].message)
    assert "--shm-size" in str(caught[0].message)
    assert list(tmpfs.iterdir()) == []


@pytest.mark.parametrize(("policy", "left"), [("minio", 0), ("lru", 5 * MIB), ("minio", 20 * MIB)])
def test_a_file_system_that_fills_up_meanwhile(tmpfs: Path, policy: str, left: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        with SampleCache(1000, capacity="40MiB", fingerprint="x", policy=policy, example=SAMPLE) as cache:
            assert not cache.gather(range(10), [np.zeros((10, len(SAMPLE)), np.uint8)]).any()
            with open(tmpfs / "other", "wb") as file:
                space = os.statvfs(tmpfs).f_bavail * PAGE
                os.posix_fallocate(file.fileno(), 0, space - left)

            def use() -> None:
                stored = fill(cache, range(300))
                assert stored == cache.stats().resident_items
                assert 0.8 * left <= stored * len(SAMPLE) <= left
                outs = [np.zeros((300, len(SAMPLE)), np.uint8)]
                assert cache.gather(range(300), outs).sum() == stored

            use()
            assert Child(fill, cache, range(300, 600)).wait() == 0
            assert problems(cache) == []
            assert cache.stats().used_bytes <= 40 * MIB
            os.unlink(tmpfs / "other")
    full = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(full) == 1
    assert "is full: the cache is limited to" in full[0]


def test_no_room_even_for_the_index(tmpfs: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CapacityError, match=r"of 2\.0 GiB has no space: .* which is less than its index"):
            SampleCache(100_000_000, capacity="2GiB", fingerprint="x")
    assert list(tmpfs.iterdir()) == []


def test_a_cache_that_is_there_with_another_capacity_warns() -> None:
    arguments = {"fingerprint": "f", "name": "sized", "example": SAMPLE}
    with SampleCache(10, capacity="4MiB", **arguments) as first:
        with pytest.warns(RuntimeWarning, match=r"'sized' already exists with .* 4\.0 MiB: .* 8\.0 MiB are ignored"):
            second = SampleCache(10, capacity="8MiB", **arguments)
        assert second.meta.capacity == first.meta.capacity
        second.close()


def test_a_file_system_without_space_for_the_index_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_space", lambda folder: 64 << 10)
    with (
        pytest.warns(RuntimeWarning, match="has only 64.0 KiB free"),
        pytest.raises(CapacityError, match=r"of 60\.0 MiB has no space: .* can hold 60\.0 KiB, .*--shm-size"),
    ):
        SampleCache(300, capacity="60MiB", fingerprint="f", example=np.zeros(80_000, np.uint8))
