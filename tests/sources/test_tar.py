"""Tar shards: what WebDataset makes of them, an index that is kept, and every way in which one can be wrong."""

import gzip
import io
import os
import pickle
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import stallfree as sf
from stallfree import StallfreeWarning
from stallfree.errors import InputError
from stallfree.sources import tar
from stallfree.sources.tar import TarDataset

FILES = [
    ("train/000.jpg", b"picture 0"), ("train/000.cls", b"3"), ("train/001.JPG", b"picture 1" * 1000),
    ("train/001.cls", b"1"), ("train/001.seg.png", b""), ("train/.hidden", b"left out"), ("README", b"left out"),
    ("__meta__/info.json", b"left out"), ("train/002.cls", b"2"), ("train/002.jpg", b"picture 2"),
]  # fmt: skip
SAMPLES = [
    {"__key__": "train/000", "jpg": b"picture 0", "cls": b"3"},
    {"__key__": "train/001", "jpg": b"picture 1" * 1000, "cls": b"1", "seg.png": b""},
    {"__key__": "train/002", "jpg": b"picture 2", "cls": b"2"},
]


def write(path: Path, files: list[tuple[str, bytes]] = FILES, form: int = tarfile.PAX_FORMAT, time: int = 0) -> Path:
    """A shard of these files, with a folder and a link between them."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in [("train", None), *files, ("train/003.jpg", None)]:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data or b""), time
            if data is None:
                member.type, member.linkname = (tarfile.SYMTYPE, "000.jpg") if "/" in name else (tarfile.DIRTYPE, "")
            tar.addfile(member, io.BytesIO(data or b""))
    return path


Make = Callable[..., TarDataset]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a data set whose indexes are kept in `tmp_path/index`."""
    return lambda shards, *args, **settings: TarDataset(shards, *args, **{"index": tmp_path / "index", **settings})


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples(tmp_path: Path, make: Make, form: int) -> None:
    data = make(write(tmp_path / "a.tar", form=form))
    assert list(data) == list(pickle.loads(pickle.dumps(data))) == SAMPLES
    assert data[-1] == data.fetch(np.int64(2)) == SAMPLES[2]
    assert data.where(1) == f"{tmp_path}/a.tar: train/001"
    with pytest.raises(IndexError):
        data[3]


@pytest.mark.parametrize(("keys", "samples"), [
    (("jpg", "cls"), [(sample["jpg"], sample["cls"]) for sample in SAMPLES]),
    (("cls", "JPG"), [(sample["cls"], sample["jpg"]) for sample in SAMPLES]),
    (["__key__"], [(sample["__key__"],) for sample in SAMPLES]),
    (("seg.png;cls", "jpg"), [(b"3", b"picture 0"), (b"", b"picture 1" * 1000), (b"2", b"picture 2")]),
    (("cls;seg.png", "cls"), [(b"3", b"3"), (b"1", b"1"), (b"2", b"2")]),
])  # fmt: skip
def test_keys(tmp_path: Path, make: Make, keys: Any, samples: list[Any]) -> None:
    assert list(make(write(tmp_path / "a.tar"), keys=keys)) == samples


def test_only_what_is_wanted_is_read(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [("0.a", b"a" * 100), ("0.b", b"b" * 200_000), ("0.c", b"c" * 100), ("0.d", b"d" * 50)]
    shard = write(tmp_path / "a.tar", files)
    reads, read = list[int](), tar.read_exactly
    monkeypatch.setattr(tar, "read_exactly", lambda file, size, start: (reads.append(size), read(file, size, start))[1])
    assert make(shard, keys=("a", "c", "d"))[0] == (b"a" * 100, b"c" * 100, b"d" * 50)
    assert reads == [100, 100, 50]
    assert make(shard, keys=("c", "d"))[0] == (b"c" * 100, b"d" * 50)
    assert reads[3:] == [1024 + 50]  # c, and d behind its header
    assert make(shard)[0]["b"] == b"b" * 200_000
    assert len(reads) == 5


def test_several_shards_with_the_same_names(tmp_path: Path, make: Make) -> None:
    for shard in range(12):
        write(tmp_path / f"s-{shard:03}.tar", [("0.x", b"%d" % shard), ("1.x", b"+")][: shard % 3])
    data = make(f"{tmp_path}/s-{{000..011}}.tar")  # every third has no sample
    assert b"".join(sample["x"] for sample in data) == b"12+45+78+1011+"
    data = make([tmp_path / "s-002.tar", f"{tmp_path}/s-{{010..011}}.tar"], keys=("x",))
    assert list(data) == [(b"2",), (b"+",), (b"10",), (b"11",), (b"+",)]


def test_a_transform_is_in_the_pipeline(tmp_path: Path, make: Make) -> None:
    data = make(write(tmp_path / "a.tar"), sf.Compose([sf.OnItem(0, len), sf.OnItem(1, int)]), keys=("jpg", "cls"))
    assert len(data.pipeline) == 2
    assert list(data) == [(9, 3), (9000, 1), (9, 2)]
    assert data.fetch(0) == (b"picture 0", b"3")
    with sf.CachedDataset(data, capacity="1MiB") as cached, sf.DataLoader(cached, batch_size=3) as loader:
        assert [[part.tolist() for part in batch] for batch in loader] == [[[9, 9000, 9], [3, 1, 2]]]


def test_urls(tmp_path: Path, make: Make) -> None:
    content = write(tmp_path / "a.tar").read_bytes()
    try:
        MemoryFileSystem().pipe("/shards/a.tar", content)
        data = make("memory://shards/a.tar")
        assert list(data) == SAMPLES
        MemoryFileSystem().pipe("/shards/a.tar", content[:2048])
        with pytest.raises(OSError, match=r"0 bytes came for the .* the file has been changed"):
            data[2]
        with pytest.raises(InputError, match="damaged, cut off"):
            make("memory://shards/a.tar")
    finally:
        MemoryFileSystem.store.clear()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose headers are read."""
    names: list[str] = []
    real = tar._read_headers
    monkeypatch.setattr(tar, "_read_headers", lambda shard, *more: names.append(shard[-5:]) or real(shard, *more))
    return names


def test_headers_are_read_once(tmp_path: Path, make: Make, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [write(tmp_path / name) for name in ("a.tar", "b.tar")]
    first, again = make(shards), make(shards)
    assert sorted(reads) == ["a.tar", "b.tar"]
    assert list(again) == list(first) == SAMPLES * 2
    assert again.fingerprint() == first.fingerprint()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    TarDataset(shards)
    assert len(list((tmp_path / "cache/stallfree/tar").iterdir())) == 2
    with pytest.warns(StallfreeWarning, match=r"cannot be kept in .*a\.tar.*give another folder with index="):
        assert list(make(shards[0], index=shards[0])) == SAMPLES  # no folder


def test_a_changed_shard_is_read_anew(tmp_path: Path, make: Make, reads: list[str]) -> None:
    shard = write(tmp_path / "a.tar", [("0.x", b"old"), ("1.x", b"old")])
    before = make(shard)
    write(shard, [("1.x", b"new"), ("0.x", b"new")])
    os.utime(shard, ns=(0, 123456789))  # of the same size
    with pytest.raises(OSError, match=r"was changed after its index was read: make a new TarDataset\n.*sample 0 "):
        before[0]
    after = make(shard)
    assert [sample["__key__"] for sample in after] == ["1", "0"]
    assert after.fingerprint() != before.fingerprint()
    assert len(reads) == 2


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path, make: Make) -> None:
    shard = write(tmp_path / "a.tar")
    prints = [make(shard).fingerprint(), make(shard, keys=("jpg",)).fingerprint()]
    os.utime(shard, ns=(0, 1))  # as a copy on another host would have
    assert make(shard).fingerprint() == prints[0]
    write(shard, time=1234)  # the same names and sizes, written later
    assert len({*prints, make(shard).fingerprint()}) == 3


def test_a_damaged_index_is_made_anew(tmp_path: Path, make: Make, reads: list[str]) -> None:
    """Whatever byte is flipped."""
    shard = write(tmp_path / "a.tar")
    make(shard)
    [file] = (tmp_path / "index").iterdir()
    content = file.read_bytes()
    damages = [content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :] for at in range(0, len(content), 23)]
    for damaged in [b"", content[: len(content) // 2], content[:-32], *damages]:
        file.write_bytes(damaged)
        assert list(make(shard)) == SAMPLES
        assert file.read_bytes() == content  # it was kept again


def test_several_processes_at_once(tmp_path: Path) -> None:
    """They make the indexes, and read the shards in threads."""
    shards = [write(tmp_path / f"{number}.tar") for number in range(6)]
    with get_context("fork").Pool(4) as pool:
        found = pool.starmap(_samples_of, [(shards, tmp_path / "index")] * 8, chunksize=1)
        pool.close()
        pool.join()
    assert found == [SAMPLES * 6] * 8
    assert len(os.listdir(tmp_path / "index")) == len([*(tmp_path / "index").glob("[!.]*.index")]) == 6


def _samples_of(shards: list[Path], index: Path) -> list[Any]:
    data = TarDataset(shards, index=index)
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(data.__getitem__, range(len(data))))


def test_cut_off_or_damaged_anywhere(tmp_path: Path, make: Make) -> None:
    content = write(tmp_path / "whole.tar").read_bytes()
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512  # of the last header, behind which all is zeros
    shard = tmp_path / "a.tar"
    damaged = [content[:length] for length in [*range(0, end + 1, 512), 100, 700, end + 100]]
    damaged += [content[:at] + b"\xff" * 512 + content[at + 512 :] for at in (0, 512, 1536)]  # wrong checksums
    for data in damaged:
        shard.write_bytes(data)
        with pytest.raises(InputError, match=r"a\.tar' is missing, compressed, damaged, cut off or no tar file"):
            make(shard)
    shard.write_bytes(content[: end + 512])  # one block of zeros is an end
    assert list(make(shard)) == SAMPLES
    shard.write_bytes(gzip.compress(content))
    with pytest.raises(InputError, match=r"a\.tar' is missing, compressed"):
        make(shard)


@pytest.mark.parametrize(("files", "settings", "message"), [
    ([("0.x", b""), ("0.X", b"")], {}, "'0' in .*a.tar' has two files 'x'"),
    ([("0.x", b""), ("1.x", b""), ("0.y", b"")], {}, "sample '0' occurs twice in .*a.tar', with others between"),
    ([("README", b"")], {}, "has length 0"), (FILES, {"keys": "jpg"}, "keys='jpg': give a tuple"),
    (FILES, {"keys": ("jpg", "txt")}, r"3 of 3 samples have no file 'txt'; the first is .*train/000, .* jpg, cls:"),
    ([], {"shards": []}, "no shards"), ([], {"shards": "a-{3..1}.tar"}, "no shards"),
    ([], {"shards": "missing.tar"}, r"missing\.tar' is missing"),
    ([], {"shards": "memory://missing.tar"}, "is missing, compressed"), ([], {"shards": [3]}, "is of type int"),
])  # fmt: skip
def test_what_cannot_be_used(tmp_path: Path, make: Make, files: Any, settings: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(**{"shards": write(tmp_path / "a.tar", files), **settings})
