"""A cache on a disk survives restarts and distrusts what it finds: damage gives misses, never a wrong value."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cache_tools import is_signed, problems, signed
from children import Child
from stallfree.cache.layout import Field, Index, Meta
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.errors import StorageError

NUM_IDS = 40
SIZES = {"uniform": (1000,), "varied": (50, 1000, 9000)}
both = pytest.mark.parametrize("kind", ["uniform", "varied"])


def open_cache(store: Path, kind: str, **arguments: Any) -> SampleCache:
    given: dict[str, Any] = {"policy": "lru", "persist": True, "name": "disk", "capacity": "400KB", **arguments}
    example = signed(0, 0, 1000) if kind == "uniform" else b"x" * 1000
    return SampleCache(NUM_IDS, fingerprint="data", store=str(store), example=example, **given)


def value(id: int, kind: str) -> Any:
    return signed(id, 0, SIZES[kind][id % len(SIZES[kind])])


def make_disk(store: Path, kind: str, ids: range = range(30)) -> Path:
    """A cache with some records that no process is attached to; its folder."""
    with open_cache(store, kind) as cache:
        assert cache.put_many(ids, [value(id, kind) for id in ids]).all()
        cache.drop([3, 4])
    return cache.path


def right_or_missing(cache: SampleCache) -> int:
    """Reads everything, twice; a hit must be right. The number of hits."""
    hits = 0
    for id, found in enumerate(cache.get_many(range(NUM_IDS))):
        assert found is MISS or is_signed(id, found), f"id {id}"
        hits += found is not MISS
    assert cache.resident(range(NUM_IDS)).sum() == hits  # what cannot be read does not stay
    if cache.structure is not None:
        outs = [np.zeros((NUM_IDS, leaf.nbytes), np.uint8) for leaf in cache.structure.leaves]
        good = cache.gather(range(NUM_IDS), outs)
        for id in np.flatnonzero(good).tolist():
            assert (outs[2][id] == value(id, "uniform")[2].numpy()).all()
    return hits


def usable(cache: SampleCache, kind: str) -> None:
    """After whatever happened, the cache stores and gives, and its bookkeeping is right."""
    assert problems(cache) == []
    cache.put_many(range(NUM_IDS), [value(id, kind) for id in range(NUM_IDS)])
    right_or_missing(cache)
    assert cache.resident(range(NUM_IDS)).any()
    assert problems(cache) == []


@both
def test_it_survives_a_restart(tmp_path: Path, kind: str) -> None:
    make_disk(tmp_path, kind)
    with open_cache(tmp_path, kind) as cache:
        assert right_or_missing(cache) == 28
        assert cache.stats().resident_items == 28
        assert cache.stats().damaged == 0
        usable(cache, kind)


def test_only_the_first_to_attach_checks(tmp_path: Path) -> None:
    """Checking takes time and the lock: a worker that joins must not do it again."""

    def recoveries(cache: SampleCache) -> int:
        meta = Meta.load(cache.path)
        index = Index(cache.path, meta)
        return int(index.header[Field.RECOVERIES])

    make_disk(tmp_path, "uniform")
    with open_cache(tmp_path, "uniform") as cache:
        before = recoveries(cache)
        assert before == 1

        def join() -> None:
            open_cache(tmp_path, "uniform").close()

        assert Child(join).wait() == 0
        assert recoveries(cache) == before


# --- damage ----------------------------------------------------------------------------------------------------------


@both
def test_every_damaged_record_is_a_miss_is_counted_and_dropped(tmp_path: Path, kind: str) -> None:
    path = make_disk(tmp_path, kind)
    (path / "data").write_bytes(b"\x5a" * (path / "data").stat().st_size)
    with open_cache(tmp_path, kind) as cache:
        assert cache.get_many(range(NUM_IDS)) == [MISS] * NUM_IDS
        assert cache.stats().damaged == 28
        assert cache.stats().resident_items == 0
        assert (cache.stats().hits, cache.stats().misses) == (0, NUM_IDS)
        usable(cache, kind)


def test_gather_finds_damage_too(tmp_path: Path) -> None:
    path = make_disk(tmp_path, "uniform")
    (path / "data").write_bytes(bytes((path / "data").stat().st_size))
    with open_cache(tmp_path, "uniform") as cache:
        outs = [np.zeros((3, leaf.nbytes), np.uint8) for leaf in cache.structure.leaves]  # type: ignore[union-attr]
        assert not cache.gather([7, 8, 7], outs).any()
        assert cache.stats().damaged == 2
        assert not cache.resident([7, 8]).any()


@both
def test_damage_while_it_is_open(tmp_path: Path, kind: str) -> None:
    path = make_disk(tmp_path, kind)
    with open_cache(tmp_path, kind) as cache:
        assert right_or_missing(cache) == 28
        os.truncate(path / "data", 5000)
        right_or_missing(cache)
        assert cache.stats().damaged > 10
        usable(cache, kind)


def test_a_record_in_the_place_of_another_is_no_hit(tmp_path: Path) -> None:
    """The checksum says whose record it is."""
    path = make_disk(tmp_path, "uniform")
    meta = Meta.load(path)
    index = Index(path, meta)
    index.first[[10, 11]] = index.first[[11, 10]]
    assert index.checksum is not None
    index.checksum[[10, 11]] = index.checksum[[11, 10]]
    del index
    with open_cache(tmp_path, "uniform") as cache:
        assert cache.get_many([10, 11]) == [MISS, MISS]
        assert cache.stats().damaged == 2


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_disk(tmp_path_factory.mktemp(kind), kind) for kind in SIZES}


def damaged_copy(template: Path, tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    path = tmp_path / "store" / template.parent.name / template.name
    path.parent.mkdir(mode=0o700, parents=True)
    shutil.copytree(template, path)
    return path


def reopen(tmp_path: Path, kind: str) -> None:
    with open_cache(tmp_path / "store", kind) as cache:
        right_or_missing(cache)
        usable(cache, kind)


ARRAYS = ["header", "first", "length", "generation", "checksum", "next", "free", "victims", "score"]
numbers = st.sampled_from([0, 1, 2, 100, 255, 1 << 31, (1 << 32) - 1]) | st.integers(0, (1 << 32) - 1)
garbage = st.lists(st.tuples(st.integers(0, 1 << 20), numbers), min_size=1, max_size=200)


@pytest.mark.filterwarnings("ignore:.*an empty one replaces it")
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(kind=st.sampled_from(sorted(SIZES)), where=st.sampled_from(["index", "data", *ARRAYS]), garbage=garbage)
@example(kind="varied", where="first", garbage=[(4, (1 << 32) - 1)])  # the mark of a free block, in a chain
@example(kind="varied", where="next", garbage=[(4, (1 << 32) - 1)])
def test_garbage_in_the_files(templates: dict[str, Path], tmp_path: Path, kind: str, where: str, garbage: list) -> None:
    """Changes bytes of a file, or numbers in an array of the index."""
    path = damaged_copy(templates[kind], tmp_path)
    if where in ("index", "data"):
        data = np.memmap(path / where, np.uint8)
        for place, number in garbage:
            data[place % len(data)] ^= number % 255 + 1
    else:
        index = Index(path, Meta.load(path))
        data = getattr(index, where).view(np.uint32)
        for place, number in garbage:
            data[place % len(data)] = number
        del index
    del data
    reopen(tmp_path, kind)


@both
def test_a_data_file_of_another_length(templates: dict[str, Path], tmp_path: Path, kind: str) -> None:
    for size in (0, 4096, 100_000, 10_000_000):
        os.truncate(damaged_copy(templates[kind], tmp_path) / "data", size)
        reopen(tmp_path, kind)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def other_number(path: Path) -> None:
    fields = json.loads(path.read_text())
    fields["block"] += 64
    path.write_text(json.dumps(fields))


DAMAGE: list[tuple[str, Callable[[Path], Any]]] = [
    ("index", cut),
    ("index", Path.unlink),
    ("data", Path.unlink),
    ("meta.json", cut),
    ("meta.json", Path.unlink),
    ("meta.json", other_number),
    ("meta.json", lambda path: path.write_text("[]")),
    ("meta.json", lambda path: path.write_bytes(b"\xff\xfe")),
]


@pytest.mark.parametrize(("file", "damage"), DAMAGE)
def test_a_cache_beyond_repair_is_made_anew_with_a_warning(
    templates: dict[str, Path], tmp_path: Path, file: str, damage: Callable[[Path], Any]
) -> None:
    path = damaged_copy(templates["varied"], tmp_path)
    (path.parent / "photos").mkdir()
    (path.parent / "photos" / "cat.jpg").write_text("meow")
    damage(path / file)
    with pytest.warns(RuntimeWarning, match="No process uses this cache, so an empty one replaces it") as caught:
        cache = open_cache(tmp_path / "store", "varied")
    assert len(caught) == 1
    assert cache.stats().resident_items == 0
    usable(cache, "varied")
    cache.close()
    assert (path.parent / "photos" / "cat.jpg").read_text() == "meow"


def test_a_cache_beyond_repair_that_someone_uses_is_an_error(tmp_path: Path) -> None:
    make_disk(tmp_path, "varied")
    with open_cache(tmp_path, "varied") as cache:
        (cache.path / "meta.json").write_text("{")
        with pytest.raises(
            StorageError, match=r"the cache in .* cannot be read .*remove it with `stallfree cache rm disk`"
        ):
            open_cache(tmp_path, "varied")
        assert right_or_missing(cache) == 28


def test_a_cache_of_another_version_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stallfree.cache import layout

    path = make_disk(tmp_path, "varied")
    monkeypatch.setattr(layout, "VERSION", 99)
    with pytest.raises(StorageError, match=r"created by another version .*its format is \d+, this version's is 99\)"):
        open_cache(tmp_path, "varied")
    assert path.is_dir()
