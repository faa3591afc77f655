"""`CachedDataset(form="files")`: the files that `__getitem__` opens are cached, and its augmentation stays fresh."""

import builtins
import contextlib
import gzip
import inspect
import io
import json
import os
import pickle
import random
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

import stallfree as sf
from cached_data import Numbers
from cases import half
from children import Child
from loader_data import same
from opened_files import gone, opens_below
from stallfree.errors import InputError
from stallfree.sources import file_opens

COUNT = 12
nibabel = pytest.importorskip("nibabel")


def picture(id: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(id).integers(0, 256, (8, 8, 3), np.uint8)


def by_open(path: str) -> Any:
    with open(f"{path}.raw", "rb") as file:
        return np.frombuffer(file.read(), np.uint8)


def by_lines(path: str) -> Any:
    with open(f"{path}.txt", encoding="utf-8") as file:
        return np.array([int(word) for line in file for word in line.split()])


def by_zip(path: str) -> Any:
    with zipfile.ZipFile(f"{path}.zip") as archive:
        return np.frombuffer(archive.read("data"), np.uint8)


def by_descriptor(path: str) -> Any:
    with open(f"{path}.raw", "rb") as file:
        file.seek(100)
        return np.fromfile(file, np.uint8)


def by_fsspec(path: str, protocol: str = "file") -> Any:
    with fsspec.open(f"{protocol}://{path}.raw") as file:
        return np.frombuffer(file.read(), np.uint8)


def by_pathlib(path: str) -> Any:
    with Path(f"{path}.raw").open("rb", 0) as file:
        assert file.name.endswith(".raw")  # type: ignore[attr-defined]
        return np.frombuffer(file.readall(), np.uint8)  # type: ignore[attr-defined]


def for_writing(path: str) -> Any:
    with open(f"{path}.raw", "rb") as file, contextlib.suppress(io.UnsupportedOperation):
        file.write(b"more")
    return type(file).__name__


WAYS: dict[str, Callable[[str], Any]] = {
    "open": by_open, "lines": by_lines, "pathlib": by_pathlib, "descriptor": by_descriptor, "zip": by_zip,
    "numpy": lambda path: np.load(f"{path}.npy"), "torch": lambda path: torch.load(f"{path}.pt"),
    "map": lambda path: np.array(np.load(f"{path}.npy", mmap_mode="r")),
    "gzip": lambda path: len(gzip.open(f"{path}.gz").read()),  # noqa: SIM115
    "pillow": lambda path: np.asarray(Image.open(f"{path}.png")),
    "imread": lambda path: cv2.imread(f"{path}.png", cv2.IMREAD_COLOR),
    "volume": lambda path: np.asarray(nibabel.load(f"{path}.nii.gz").dataobj),
    "fsspec": by_fsspec, "fsspec, memory": lambda path: by_fsspec(path, "memory"),
    "opened for reading": for_writing,
    "torchvision": lambda path: sys.modules["torchvision.io.image"].read_image(f"{path}.raw"),
}  # fmt: skip
ON_DISK = [*WAYS][:-3]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for id in range(COUNT):
        array, path = picture(id), str(folder / str(id))
        write(Path(f"{path}.raw"), array.tobytes())
        write(Path(f"{path}.txt"), "\r\n".join(" ".join(map(str, row)) for row in array[:, :, 0].tolist()).encode())
        np.save(f"{path}.npy", array)
        torch.save(torch.from_numpy(array), f"{path}.pt")
        write(Path(f"{path}.gz"), gzip.compress(array.tobytes()))
        with zipfile.ZipFile(f"{path}.zip", "w") as archive:
            archive.writestr("data", array.tobytes())
        Image.fromarray(array).save(f"{path}.png")
        nibabel.save(nibabel.Nifti1Image(array.astype(np.int16), np.eye(4)), f"{path}.nii.gz")
    for file in folder.iterdir():
        os.utime(file, (1e9, 1e9 + 0.5))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for id in range(COUNT):
        write(folder / f"{id}.raw", picture(id).tobytes())
    return folder


def write(path: Path, data: bytes, time: float = 1e9) -> None:
    path.write_bytes(data)
    os.utime(path, (time, time + 0.5))


class Files:
    """Reads a file in one way, and adds noise of each global generator."""

    def __init__(self, folder: Path, way: str = "open") -> None:
        self.folder, self.way = str(folder), way

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        noise = random.random(), np.random.rand(), torch.rand(()).item()
        return WAYS[self.way](f"{self.folder}/{id}"), id, *noise


class Mosaics(Files):
    def __getitem__(self, id: int) -> Any:
        with open(f"{self.folder}/index.json") as file:
            names = json.load(file)
        return [by_open(f"{self.folder}/{names[at]}") for at in (id, *random.sample(range(COUNT), 3))]


def epochs(data: Any, count: int = 3, **options: Any) -> list[list[Any]]:
    options = {"batch_size": 5, "shuffle": True, "seed": 1} | options
    with sf.DataLoader(data, **options) as loader:
        return [list(loader) for _ in range(count)]


def cached(data: Any, **options: Any) -> sf.CachedDataset[Any]:
    return sf.CachedDataset(data, **{"capacity": "4MiB", "form": "files", **options})


@pytest.mark.parametrize("way", ON_DISK)
def test_each_way_to_open_a_file(kept: Path, way: str) -> None:
    with cached(Files(kept, way)) as data, sf.DataLoader(data, 5, num_workers=0) as loader:
        found = [list(loader)]
        assert data.stats().storage_reads == COUNT
        with opens_below(kept) as opened:
            found += [list(loader), list(loader)]
        assert not opened
        assert data.stats().storage_reads == COUNT
    plain = [torch.as_tensor(Files(kept, way)[id][0]) for id in range(COUNT)]
    assert all(same([value for values, *_ in epoch for value in values], plain) for epoch in found)
    assert len({noise for epoch in found for batch in epoch for noise in batch[2].tolist()}) == 3 * COUNT


SPAWN = pytest.param(1, "spawn", marks=pytest.mark.slow)


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), SPAWN])
def test_batches_are_those_of_workers_without_a_cache(kept: Path, workers: int, method: str | None) -> None:
    plain = epochs(Files(kept), 2, num_workers=1)
    with cached(Files(kept)) as data:
        assert (data.form, len(data)) == ("files", COUNT)
        assert same(epochs(data, 2, num_workers=workers, multiprocessing_context=method), plain)
        stats = data.stats()
    assert (stats.storage_reads, stats.resident_items, stats.hits + stats.misses) == (COUNT, COUNT, 2 * COUNT)


def test_samples_share_files(folder: Path) -> None:
    write(folder / "index.json", json.dumps(list(range(COUNT))).encode())
    plain = epochs(Mosaics(folder), num_workers=1, batch_size=None)
    with cached(Mosaics(folder)) as data:
        assert same(epochs(data, num_workers=2, batch_size=None), plain)
        stats = data.stats()
    assert COUNT + 1 <= stats.storage_reads <= 2 * COUNT + 2  # two workers may read the same file at once
    assert stats.resident_items == COUNT + 1


def test_a_file_that_is_read_at_once_is_stored_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = file_opens.stamp_of

    def meanwhile(status: os.stat_result) -> str:
        monkeypatch.setattr(file_opens, "stamp_of", stamp)
        return [stamp(status), data[id]][0]

    with cached(Files(kept)) as data:
        for id in range(COUNT):
            monkeypatch.setattr(file_opens, "stamp_of", meanwhile)
            assert same(data[id][0], by_open(f"{kept}/{id}"))
        assert data.stats().resident_items == COUNT < data.stats().storage_reads


def test_a_transform_and_a_subset(kept: Path) -> None:
    with cached(Subset(Files(kept), [7, 2, 5]), transform=itemgetter(slice(2))) as data:
        assert same([data[id] for id in range(3)], [Files(kept)[id][:2] for id in (7, 2, 5)])


CHANGES: dict[str, Callable[[Path], object]] = {
    "other bytes": lambda path: path.write_bytes(bytes(192)), "smaller": lambda path: path.write_bytes(bytes(100)),
    "replaced": lambda path: (path.with_suffix(".new").write_bytes(bytes(192)), path.with_suffix(".new").replace(path)),
}  # fmt: skip


def check_files(data: Any, folder: Path, workers: int) -> None:
    """The samples of a new loader are the files as they are now, in each of two epochs."""
    files = [(folder / f"{id}.raw").read_bytes() for id in range(COUNT)]
    for epoch in epochs(data, 2, batch_size=None, shuffle=False, num_workers=workers):
        assert [values.numpy().tobytes() for values, *_ in epoch] == files


@pytest.mark.parametrize(("change", "workers"), half(CHANGES, [0, 1]))
def test_a_new_loader_reads_what_has_changed(folder: Path, change: str, workers: int) -> None:
    with cached(Files(folder)) as data:
        check_files(data, folder, workers)
        CHANGES[change](folder / "3.raw")
        check_files(data, folder, workers)


@pytest.mark.parametrize(("change", "kept", "workers"), [("other bytes", "memory", 1), ("replaced", "disk", 0)])
def test_the_next_job_reads_a_file_that_has_changed(
    folder: Path, tmp_path: Path, change: str, kept: str, workers: int
) -> None:
    on_disk = {"store": tmp_path / "store", "persist": True} if kept == "disk" else {}

    def job() -> None:
        with cached(Files(folder), name="changed", **on_disk) as data:
            check_files(data, folder, workers)
            assert data.stats().hits >= COUNT == data.stats().resident_items, "the second epoch comes from the cache"

    with cached(Files(folder), name="changed", **on_disk):  # keeps the cache in memory between the jobs
        assert Child(job).wait() == 0
        CHANGES[change](folder / "3.raw")
        assert Child(job).wait() == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_vanished(folder: Path, workers: int) -> None:
    with cached(Files(folder)) as data:
        epochs(data, 1, num_workers=workers)
        (folder / "7.raw").unlink()
        with pytest.raises(FileNotFoundError, match=r"7\.raw'\n.*sample 7") as caught:
            epochs(data, 1, num_workers=workers)
        assert caught.value.filename == f"{folder}/7.raw"
        write(folder / "7.raw", bytes(5))
        assert epochs(data, 1, batch_size=None, shuffle=False)[0][7][0].tolist() == [0] * 5


class Writes(Files):
    """Writes a file, by Python's `open` or unseen, and reads it; it may remove it."""

    def __getitem__(self, id: int) -> Any:
        by_open(f"{self.folder}/{id}")
        number, path, unseen = random.randrange(256), f"{self.folder}/{id}.written", "unseen" in self.way
        with open(os.open(path, os.O_WRONLY | os.O_CREAT), "wb") if unseen else open(path, "wb") as file:
            file.write(bytes([number]))
        os.utime(path, None if unseen else (1e9, 1e9 + 0.5))
        with open(path, "rb") as file:
            found = file.read()[0]
        if "removed" in self.way:
            os.remove(path)
        return number, found


@pytest.mark.parametrize("way", ["seen", "unseen", "unseen, removed"])
def test_files_that_the_data_set_writes(folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_opens, "TICK", 20_000_000)
    with cached(Writes(folder, way)) as data:
        for epoch in epochs(data):
            assert all(torch.equal(numbers, found) for numbers, found in epoch)


class Parts(Files):
    def __getitem__(self, id: int) -> Any:
        with open(f"{self.folder}/{id}.raw", "rb") as file:
            file.seek(10)
            return file.read(int(self.way))


@pytest.mark.parametrize(("size", "most", "stored"), [(20, 1 << 20, 1), (90_000, 1 << 20, COUNT), (90_000, 1000, 1)])
def test_large_files_are_stored_if_most_of_them_is_read(
    folder: Path, size: int, most: int, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_opens, "SMALL", 1000)
    monkeypatch.setattr(file_opens, "MOST_BYTES", most)
    write(folder / "0.raw", bytes(800))
    for id in range(1, COUNT):
        write(folder / f"{id}.raw", bytes([id]) * 100_000)
    with warnings.catch_warnings(action="ignore"), cached(Parts(folder, str(size))) as data:
        for _ in range(2):
            for id in range(1, COUNT):
                assert data[id] == bytes([id]) * size
        assert data.stats().resident_items == stored


@pytest.mark.parametrize(("policy", "workers"), [("minio", 0), ("lru", 1)])
def test_a_cache_that_is_full(tmp_path: Path, policy: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are right, and large files are not read twice."""
    monkeypatch.setattr(file_opens, "SMALL", 1000)
    for id in range(COUNT):
        write(tmp_path / f"{id}.raw", bytes([id]) * 100_000)
    with cached(Files(tmp_path), capacity="700KiB", policy=policy) as data:
        for _ in range(2):
            with opens_below(tmp_path) as opened:
                for values, ids, *_ in epochs(data, 1, num_workers=workers)[0]:
                    assert (values == ids[:, None]).all()
            assert len(opened) == len(set(opened))
        assert 0 < data.stats().resident_items < COUNT


class Captures(Files):
    def __getitem__(self, id: int) -> Any:
        self.captured = [open, io.open, cv2.imread]
        self.shown = inspect.isroutine(open), inspect.signature(open)
        return super().__getitem__(id)


def test_open_is_untouched_outside_of_samples(kept: Path) -> None:
    before = [open, io.open, cv2.imread, os.stat, threading.Thread.start]
    plain = Captures(kept)
    with cached(plain) as data:
        epochs(data, 1, num_workers=0)
        assert [builtins.open, io.open, cv2.imread, os.stat, threading.Thread.start] == before
        assert plain.shown == (True, inspect.signature(open))
        assert pickle.loads(pickle.dumps(plain.captured)) == before[:3]
        plain.opener, type(plain).opener = plain.captured[0], plain.captured[0]
        for opener in (plain.opener, Captures.opener):
            with pytest.raises(FileNotFoundError, match="nowhere"):
                opener("nowhere")


def test_a_file_opened_for_reading_is_not_written(kept: Path) -> None:
    with cached(Files(kept, "opened for reading")) as data:
        assert data[0][0] == "ServedFile"
        assert by_open(f"{kept}/0").tolist() == picture(0).ravel().tolist()


class Waits(Files):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __getitem__(self, id: int) -> Any:
        if id == 5:
            self.inside.set()
            self.go_on.wait()
        return super().__getitem__(id)

    def __reduce__(self) -> Any:
        return Waits, (Path(self.folder),)


def test_other_threads_read_storage(folder: Path) -> None:
    waits = Waits(folder)
    waits.go_on.set()
    with cached(waits, name=f"threads-{os.getpid()}") as data:
        epochs(data, 1)
        waits.inside.clear(), waits.go_on.clear()
        values: list[Any] = []
        thread = threading.Thread(target=lambda: values.append(data[5]))
        thread.start()
        waits.inside.wait()
        write(folder / "5.raw", b"new")
        assert (folder / "5.raw").read_bytes() == b"new"
        with cached(Files(folder)) as other:
            assert len(other[4]) == 5  # begins and ends while the first one goes on
        waits.go_on.set()
        thread.join()
        assert values[0][0].tolist() == picture(5).ravel().tolist()
        assert builtins.open is io.open is sys.modules["_io"].open


def test_files_of_fsspec_elsewhere(kept: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe({f"{kept}/{id}.raw": picture(id).tobytes() for id in range(COUNT)})
    try:
        with cached(Files(kept, "fsspec, memory")) as data, sf.DataLoader(data, 5) as loader:
            first = list(loader)
            fs.rm(str(kept), recursive=True)
            second = list(loader)
            assert data.stats().storage_reads == COUNT
            assert same([batch[0] for batch in first], [batch[0] for batch in second])
            with pytest.raises(FileNotFoundError):
                epochs(data, 1)
    finally:
        fs.store.clear()


def test_pictures_of_torchvision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the same shape: `read_image` decodes what `read_file` reads natively."""
    module: Any = ModuleType("torchvision.io.image")
    code = """
import torch
def read_file(path): return torch.from_file(path, size=192, dtype=torch.uint8)
def read_image(path): return read_file(path) + 1
"""
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "torchvision.io.image", module)
    with cached(Files(folder, "torchvision")) as data, sf.DataLoader(data, 5) as loader:
        first = [batch[0] for batch in loader]
        with gone(folder):
            assert same([batch[0] for batch in loader], first)
    with pytest.raises(RuntimeError, match="nowhere"):
        module.read_file("nowhere")


class PartlyNative(Files):
    native = 30_000

    def __getitem__(self, id: int) -> Any:
        file = os.open(self.folder + "/archive", os.O_RDONLY)
        data = os.pread(file, self.native, 0)
        os.close(file)
        return by_open(f"{self.folder}/{id}"), len(data)


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/io"), reason="the kernel does not count reads")
def test_bytes_that_are_read_natively_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "archive").write_bytes(bytes(30_000))
    words = r"99% of the bytes of PartlyNative\[0\] do not: a library opens files itself. Instead, .*h5py.File"
    with pytest.warns(sf.StallfreeWarning, match=words) as caught:
        cached(PartlyNative(folder)).close()
    assert caught[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        monkeypatch.setattr(PartlyNative, "native", 0)
        cached(PartlyNative(folder)).close()


class Native(Files):
    def __getitem__(self, id: int, read: Any = cv2.imread) -> Any:
        return read(f"{self.folder}/{id}.png")


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (Native, {}, r"opened none of up to 64 MiB. If a library opens its files, .*cv2.imdecode"),
        (lambda folder: Numbers(), {}, "and Numbers keeps .* use form='fetched'"),
        (lambda folder: Subset(Numbers(), [1]), {}, "SubsetSource"),  # type: ignore[arg-type]
        (lambda folder: sf.testing.ThrottledSource(Files(folder)), {}, "ThrottledSource"),
        (lambda folder: 3, {}, "has no __getitem__"),
        (Files, {"policy": "importance"}, "policy='importance'"),
        (Files, {"store": sf.DiskTier("/tmp/nowhere", capacity="1MiB")}, "with a tier"),
    ],
)
def test_what_cannot_be_cached_in_this_form(kept: Path, make: Any, options: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        cached(make(kept), **options)


def test_samples_that_fail(folder: Path) -> None:
    (folder / "0.raw").unlink()
    with cached(Files(folder)) as data:
        with pytest.raises(FileNotFoundError, match="fetching sample 0"):
            data[0]
        with warnings.catch_warnings(action="ignore"), sf.DataLoader(data, 4, on_error="skip") as loader:
            assert sorted(id for _, ids, *_ in loader for id in ids.tolist()) == list(range(1, COUNT))
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match="fetching sample 0"):
        cached(Files(folder))
