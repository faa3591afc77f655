"""`CachedDataset(form="reads")`: what `__getitem__` reads is cached, and its augmentation stays fresh."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import stallfree as sf
from cached_data import Numbers
from loader_data import same
from reads_data import Crops, KeepsArchive, OwnGenerator, gone, opens_below, write_arrays
from stallfree.cache.records import Borrowed
from stallfree.errors import InputError
from stallfree.sources.reads import recorded as records
from stallfree.sources.throttle import ThrottledSource

EPOCHS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_arrays(tmp_path / "data")


def epochs(data: Any, count: int = EPOCHS, **options: Any) -> list[list[Any]]:
    """The batches of some epochs."""
    options = {"batch_size": 5, "shuffle": True, "seed": 1} | options
    with sf.DataLoader(data, **options) as loader:
        return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("kind", ["raw", "npy", "text"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_those_without_a_cache(folder: Path, workers: int, kind: str) -> None:
    plain = epochs(Crops(folder, kind), num_workers=1)
    with sf.CachedDataset(Crops(folder, kind), capacity="4MiB", form="reads") as data:
        assert data.form == "reads"
        found = epochs(data, num_workers=workers)
        stats = data.stats()
    assert same(found, plain)
    assert not same(found[0], found[1])
    assert stats.storage_reads == 12
    assert stats.resident_items == 12
    assert stats.hits + stats.misses == 12 * EPOCHS
    assert stats.misses == 11  # the first one was read when the data set was made


def test_batches_in_spawned_workers(folder: Path) -> None:
    plain = epochs(Crops(folder), 2, num_workers=1)
    with sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads") as data:
        found = epochs(data, 2, num_workers=1, multiprocessing_context="spawn")
        assert data.stats().hits == 13
    assert same(found, plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_from_the_second_epoch_on_storage_is_not_needed(folder: Path, workers: int) -> None:
    plain = epochs(Crops(folder), num_workers=1)
    with (
        sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads") as data,
        sf.DataLoader(data, 5, shuffle=True, seed=1, num_workers=workers) as loader,
    ):
        found = [list(loader)]
        with gone(folder):
            found += [list(loader), list(loader)]
    assert same(found, plain)


def test_a_miss_indexes_once_and_a_hit_opens_nothing(folder: Path) -> None:
    with sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads") as data:
        with opens_below(folder) as found:
            epochs(data, 1)
        assert sorted(found) == sorted(str(folder / f"{id}.raw") for id in range(1, 12))
        with opens_below(folder) as found:
            epochs(data, 2)
        assert not found


def test_augmentation_is_fresh_with_any_generator(folder: Path) -> None:
    plain = epochs(OwnGenerator(folder), num_workers=1)
    with sf.CachedDataset(OwnGenerator(folder), capacity="4MiB", form="reads") as data:
        assert same(epochs(data), plain)


def test_torchs_loader(folder: Path) -> None:
    with sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads", seed=4) as data:
        for workers in (0, 2):
            loader = DataLoader(data, batch_size=4, num_workers=workers)
            first = list(loader)
            with gone(folder):
                second, third = list(loader), list(loader)
            assert not same(first, second)
            assert not same(second, third)
            assert [batch[1].tolist() for batch in first] == [batch[1].tolist() for batch in third]
        data.set_epoch(0)
        again = data[3], data.__getitems__([3, 3])
        assert same(again[1], [again[0], again[0]])
        assert not same(data[3], data[4])
    with sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads", seed=4) as data:
        data.set_epoch(0)
        assert same(data[3], again[0])


def test_the_generators_of_the_process_stay_as_they_are(folder: Path) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads", seed=4) as data:
        data[0], data[5], data[5]
        drawn = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())


def test_a_transform_is_applied_each_time_anew(folder: Path) -> None:
    with sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads", transform=_shift, seed=2) as data:
        first, second = epochs(data, 2, shuffle=False, seed=None)
        assert not same(first, second)


def _shift(sample: Any) -> Any:
    return sample[0] + random.random(), sample[1]


def test_an_archive_that_is_kept_open(folder: Path) -> None:
    path = folder.parent / "archive"
    path.write_bytes(random.Random(0).randbytes(40 * 30_000))
    plain = epochs(KeepsArchive(path, 30_000), 2, num_workers=1)
    for workers in (0, 2):
        with sf.CachedDataset(KeepsArchive(path, 30_000), capacity="8MiB", form="reads") as data:
            assert same(epochs(data, 2, num_workers=workers), plain)


class _OwnThreads(Crops):
    """Starts threads for its first sample, and counts its samples."""

    pool: Any = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.pool, self.samples = None, 0

    def __getitem__(self, id: int) -> Any:
        if self.pool is None:
            self.pool, self.further = ThreadPoolExecutor(1), 1
        self.samples += 1
        return self.pool.submit(super().__getitem__, id).result()


def test_workers_do_not_inherit_what_is_made_for_the_first_sample(folder: Path) -> None:
    data_set = _OwnThreads(folder)
    with sf.CachedDataset(Subset(data_set, range(9)), capacity="4MiB", form="reads") as data:
        assert data_set.pool is None
        assert not hasattr(data_set, "further")
        assert data_set.samples == 0
        assert len(epochs(data, 2, num_workers=1)) == 2
        assert data.stats().storage_reads == 9


def test_a_subset(folder: Path) -> None:
    subset = Subset(Crops(folder), [7, 2, 5])
    with sf.CachedDataset(subset, capacity="4MiB", form="reads") as data:
        assert len(data) == 3
        assert same(epochs(data), epochs(subset, num_workers=1))


def test_a_cache_that_holds_few_samples(folder: Path) -> None:
    big = folder.parent / "big"
    big.mkdir()
    for id in range(12):
        (big / f"{id}.raw").write_bytes(bytes([id]) * 100_000 + bytes(44_000))
    for policy, workers in (("minio", 0), ("lru", 0), ("lru", 2)):
        with sf.CachedDataset(_Large(big), capacity="600KiB", policy=policy, form="reads") as data:
            assert same(epochs(data, num_workers=workers), epochs(_Large(big), num_workers=1))
            assert 0 < data.stats().resident_items < 12


class _Large(Crops):
    def __getitem__(self, id: int) -> Any:
        with open(f"{self.folder}/{id}.raw", "rb") as file:
            return file.read()[:100] + random.randbytes(2), id


def test_a_file_that_changes_is_read_again(folder: Path) -> None:
    data_set = _Halves(folder)
    with sf.CachedDataset(data_set, capacity="4MiB", form="reads", seed=1) as data:
        assert data[3] == bytes((folder / "3.raw").read_bytes()[:20])
        content = os.urandom(144)
        (folder / "3.raw").write_bytes(content)
        os.utime(folder / "3.raw", ns=(1, 1))
        data_set.more = True
        assert data[3] == content[:20] + content[100:120]
        data_set.more = False
        with gone(folder):
            assert data[3] == content[:20]
        stats = data.stats()
    assert (stats.hits, stats.misses) == (1, 2)


def test_a_record_that_is_overwritten_while_it_is_lent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads", seed=1) as data:
        data.set_epoch(0)
        right = data.__getitems__([2, 3, 4])
        before, cache = data.stats(), data.cache
        lend = type(cache).borrow

        def overwritten(self: Any, ids: Any) -> Any:
            lent = lend(self, ids)
            lent.values[1] = np.zeros_like(lent.values[1])
            return Borrowed(lent.values, lambda at: at == 0)

        monkeypatch.setattr(type(cache), "borrow", overwritten)
        assert same(data.__getitems__([2, 3, 4]), right)
        after = data.stats()
        assert after.storage_reads - before.storage_reads == 2


class _Halves(Crops):
    more = False

    def __getitem__(self, id: int) -> Any:
        with open(f"{self.folder}/{id}.raw", "rb", buffering=0) as file:
            first = file.read(20)
            if not self.more:
                return first
            file.seek(100)
            return first + file.read(20)


class _Holes(Crops):
    """Sample 4 cannot be had."""

    def __getitem__(self, id: int) -> Any:
        if id == 4:
            raise KeyError("four")
        return super().__getitem__(id)


def test_errors(folder: Path) -> None:
    (folder / "7.raw").unlink()
    with sf.CachedDataset(_Holes(folder), capacity="4MiB", form="reads") as data:
        with pytest.raises(KeyError, match="fetching sample 4"):
            data[4]
        with pytest.raises(FileNotFoundError, match=r"7\.raw'\n.*sample 7"):
            data[7]
        with warnings.catch_warnings(), sf.DataLoader(data, 4, on_error="skip", num_workers=0) as loader:
            warnings.simplefilter("ignore")
            assert sorted(id for _, ids in loader for id in ids.tolist()) == [0, 1, 2, 3, 5, 6, 8, 9, 10]
        with pytest.raises(IndexError):
            data[11]


class _Native(Crops):
    def __getitem__(self, id: int) -> Any:
        return torch.zeros(3)


class _Pictures(Crops):
    def __getitem__(self, id: int, read: Any = cv2.imread) -> Any:
        return read(f"{self.folder}/{id}.raw"), cv2.COLOR_BGR2RGB


class _Photographs(Crops):
    def __getitem__(self, id: int) -> Any:
        import cv2

        return cv2.imread(f"{self.folder}/{id}.png", cv2.IMREAD_GRAYSCALE) + np.uint8(random.randrange(9)), id


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_that_cv2_reads(folder: Path, workers: int) -> None:
    for id in range(12):
        cv2.imwrite(f"{folder}/{id}.png", np.fromfile(folder / f"{id}.raw", np.uint8).reshape(12, 12))
    plain = epochs(_Photographs(folder), num_workers=1)
    with (
        warnings.catch_warnings(),
        sf.CachedDataset(_Photographs(folder), capacity="4MiB", form="reads") as data,
        sf.DataLoader(data, 5, shuffle=True, seed=1, num_workers=workers) as loader,
    ):
        warnings.simplefilter("error")
        found = [list(loader)]
        with gone(folder):
            found += [list(loader), list(loader)]
    assert same(found, plain)


class _PartlyNative(Crops):
    def __getitem__(self, id: int) -> Any:
        array = np.load(f"{self.folder}/{id}.npy")
        file = os.open(self.folder + "/archive", os.O_RDONLY)
        data = os.pread(file, self.native, 0)
        os.close(file)
        return array, len(data)

    native = 30_000

    def _never(self) -> Any:
        import h5py  # type: ignore[import-not-found]

        return h5py


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/io"), reason="the kernel does not count reads")
def test_bytes_that_are_read_natively_are_reported(folder: Path) -> None:
    (folder / "archive").write_bytes(bytes(30_000))
    words = r"9\d% of the bytes of _PartlyNative\[0\] do not: h5py opens files itself. .* use h5py.File\(open\("
    with pytest.warns(sf.StallfreeWarning, match=words) as caught:
        sf.CachedDataset(_PartlyNative(folder), capacity="4MiB", form="reads").close()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _PartlyNative.native = 0
        sf.CachedDataset(_PartlyNative(folder), capacity="4MiB", form="reads").close()


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the kernel does not list mapped files")
def test_files_that_are_mapped_natively_are_reported(folder: Path) -> None:
    (folder / "data.mdb").write_bytes(bytes(30_000))
    with open(folder / "data.mdb", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        words = r"data\.mdb, which is mapped into memory, of _Mapped\[0\] does not: lmdb opens files itself"
        with pytest.warns(sf.StallfreeWarning, match=words):
            sf.CachedDataset(_Mapped(folder), capacity="4MiB", form="reads").close()


class _Mapped(Crops):
    def _never(self) -> Any:
        import lmdb  # type: ignore[import-not-found]

        return lmdb


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_Native, r"_Native\[0\] read no regular file"),
        (_Pictures, r"use cv2\.imdecode.*, if cv2 opens its files"),
        (lambda folder: Numbers(), "and Numbers keeps .* use form='fetched'"),
        (lambda folder: Subset(Numbers(), [1]), "SubsetSource"),  # type: ignore[arg-type]
        (lambda folder: ThrottledSource(Crops(folder)), "ThrottledSource"),
        (lambda folder: 3, "has no __getitem__"),
    ],
)
def test_what_cannot_be_cached_in_this_form(folder: Path, make: Callable[[Path], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        sf.CachedDataset(make(folder), capacity="1MiB", form="reads")


def test_the_first_sample_may_fail(folder: Path) -> None:
    (folder / "0.raw").unlink()
    with sf.CachedDataset(_From(folder), capacity="4MiB", form="reads") as data:
        assert data.stats().resident_items == 1
    for id in range(12):
        (folder / f"{id}.raw").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match="fetching sample 0"):
        sf.CachedDataset(_From(folder), capacity="4MiB", form="reads")


class _From(Crops):
    def __len__(self) -> int:
        return 12


def test_jobs_share_a_cache_only_with_the_same_form(folder: Path) -> None:
    with (
        sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads") as one,
        sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads") as two,
        sf.CachedDataset(_Plainly(folder), capacity="4MiB", form="reads") as reads,
        sf.CachedDataset(_Plainly(folder), capacity="4MiB", form="fetched") as fetched,
    ):
        assert one.cache.path == two.cache.path
        one[5]
        with gone(folder):
            two[5]
        assert reads.cache.path != fetched.cache.path
        assert repr(reads).startswith("CachedDataset(MapSource(_Plainly, 12 samples), reads")


class _Plainly(Crops):
    def __getitem__(self, id: int) -> Any:
        return torch.from_numpy(self._read(id).copy()), id


def test_on_a_disk(folder: Path, tmp_path: Path) -> None:
    plain = epochs(Crops(folder), num_workers=1)
    with sf.CachedDataset(Crops(folder), capacity="4MiB", form="reads", store=str(tmp_path / "cache")) as data:
        assert same(epochs(data, num_workers=1), plain)


def test_nothing_is_watched(folder: Path) -> None:
    """A data set that draws, makes generators and changes its attributes gives no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data_set = _Restless(folder)
        with sf.CachedDataset(data_set, capacity="4MiB", form="reads") as data:
            epochs(data, 2)


class _Restless(Crops, Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.calls = 0

    def __getitem__(self, id: int) -> Any:
        self.calls += 1
        rng = np.random.default_rng()
        return torch.tensor(rng.random()), super().__getitem__(id)


class _Writes:
    """Writes a file by other means than Python's open, and reads it."""

    def __init__(self, folder: Path, *, remove: bool, own: bool) -> None:
        self.folder, self.remove, self.own = folder, remove, own
        for id in range(4):
            (folder / str(id)).write_bytes(bytes([id]))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, id: int) -> tuple[int, int, int]:
        source = (self.folder / str(id)).read_bytes()[0]
        number = random.randrange(256)
        path = str(self.folder / (f"{id}-{number}" if self.own else f"{id}-written"))
        if not self.remove or not os.path.exists(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(descriptor, bytes([number]))
            os.close(descriptor)
        with open(path, "rb") as file:
            read = file.read()[0]
        if self.remove:
            os.remove(path)
        return source, number, read


@pytest.mark.parametrize(("remove", "own"), [(False, False), (True, False), (True, True)])
def test_files_that_the_data_set_writes_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: bool, own: bool
) -> None:
    monkeypatch.setattr(records, "TICK", 10_000_000)
    data = _Writes(tmp_path, remove=remove, own=own)
    with sf.CachedDataset(data, capacity="1MiB", form="reads") as cached:
        with sf.DataLoader(cached, batch_size=2) as loader:
            found = [torch.stack(batch, 1).tolist() for _ in range(3) for batch in loader]
        assert cached.stats().storage_reads == 4
    for rows in found:
        assert all(number == read for _, number, read in rows)
    assert [row[0] for rows in found for row in rows] == [0, 1, 2, 3] * 3


def test_an_archive_that_is_opened_with_the_first_import_of_its_library(tmp_path: Path) -> None:
    """In a process of its own: `zipfile` and what it imports are new there."""
    code = f"""
import zipfile, random
with zipfile.ZipFile({str(tmp_path / "a.zip")!r}, "w") as archive:
    for id in range(4):
        archive.writestr(str(id), bytes([id]) * 100)
class Zip:
    archive = None
    def __len__(self):
        return 4
    def __getitem__(self, id):
        if self.archive is None:
            self.archive = zipfile.ZipFile({str(tmp_path / "a.zip")!r})
        return self.archive.read(str(id))[0] + random.random()
import stallfree as sf
with sf.CachedDataset(Zip(), capacity="1MiB", form="reads") as cached:
    print([int(cached[id]) for id in range(4)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1, 2, 3]\n", done.stderr
