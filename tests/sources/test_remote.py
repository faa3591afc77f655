"""Files of `fsspec` that are on other machines: recorded and served as those of this host are."""

from __future__ import annotations

import gzip
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from reads_data import contents, outcome, recorded, served
from stallfree.sources.reads.open_calls import Tracker
from stallfree.sources.reads.recorded import Block, FileChanged

fsspec: Any = pytest.importorskip("fsspec")

BUFFER = 128 * 1024  # at most; that of `gzip` from Python 3.12 on, and of `open` from 3.14 on
LARGE = random.Random(0).randbytes(100_000 + 4 * BUFFER)
TEXT = "first\nsecond, with ü\nthird"


@pytest.fixture
def fs() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.pipe({"/text": TEXT.encode(), "/large": LARGE, "/packed.gz": gzip.compress(LARGE), "/empty": b""})
    yield fs
    fs.store.clear()


def test_all_ways_to_read(fs: Any) -> None:
    def read() -> Any:
        found: list[Any] = []
        with fs.open("/large") as file:
            found += [
                file.size,
                file.path,
                file.seek(50_000),
                file.read(10),
                file.tell(),
                file.seek(-5, 2),
                file.read(),
            ]
            found += [file.readable(), file.seekable(), outcome(file.fileno)[0]]
        with fs.open("memory://text", "r", encoding="utf-8") as file:
            found += [file.readline(), list(file)]
        with fsspec.open("memory://packed.gz", compression="infer") as file:
            found.append(file.read(1000))
        with fsspec.open("memory://text", "rt") as file:
            found.append(file.read())
        found += [fs.open("/empty").read(), fs.read_text("/text")]
        return [*found, outcome(lambda: fs.open("/nothing"))[0], outcome(lambda: fs.open("/text", "no"))[0]]

    plain = outcome(read)
    with_record, record = recorded(read)
    assert with_record == plain
    names = ["empty", "large", "packed.gz", "text"]
    assert sorted(name.partition("#")[0] for name in contents(record)) == names
    assert sum(len(data) for _, data in contents(record).values()) < 60_000 + 3 * BUFFER  # not all of the large ones
    for name in names:
        fs.rm(f"/{name}")
    found, block = served(read, record)
    assert found == plain
    assert block.storage_bytes == 0


def test_arrays_of_remote_files(fs: Any) -> None:
    """They have no descriptor, so `numpy.fromfile` refuses them."""
    packed = io.BytesIO()
    np.save(packed, np.arange(3000.0))
    fs.pipe({"/array.npy": packed.getvalue()})

    def read() -> Any:
        with fs.open("/array.npy") as file:
            loaded = np.load(file).tobytes()
        with fs.open("/large") as file:
            return loaded, outcome(lambda: np.fromfile(file, np.uint8, 10))[0]

    plain = outcome(read)
    with_record, record = recorded(read)
    assert with_record == plain
    assert served(read, record)[0] == plain


def test_a_remote_file_is_not_asked_for_more_than_is_read(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = [], type(fs)._open
    monkeypatch.setattr(type(fs), "_open", lambda *args, **kwargs: opened.append(args[1]) or real(*args, **kwargs))

    def read() -> Any:
        with fs.open("/large") as file:
            return file.seek(10_000), file.raw.read(85_000)

    _, record = recorded(read)
    assert len(opened) == 1
    assert [len(data) for _, data in contents(record).values()] == [85_000]


def test_what_is_not_recorded(fs: Any) -> None:
    def read() -> Any:
        with fs.open("/new", "wb") as file:
            file.write(b"abc")
        with fs.open("/packed.gz", "rb", compression="gzip") as file:
            return file.read(), type(fs.open(b"/text".decode(), "rb", None))

    found, record = recorded(read)
    assert found[1][0] == LARGE
    assert not contents(record)
    assert fs.cat("/new") == b"abc"
    assert type(fs.open("/text")).__name__ == "MemoryFile"


def test_file_systems_with_other_options_have_other_files(fs: Any) -> None:
    other = fsspec.filesystem("memory", password="another")
    _, record = recorded(lambda: fs.open("/text").read())
    assert "another" not in str(recorded(lambda: other.open("/text").read())[1].tobytes())
    fs.pipe("/text", b"new")
    assert served(lambda: other.open("/text").read(), record)[0][1] == b"new"
    assert served(lambda: fs.open("/text").read(), record)[0][1] == TEXT.encode()


def test_a_file_of_another_size_is_a_miss(fs: Any) -> None:
    def read(size: int) -> bytes:
        with fs.open("/large") as file:
            data: bytes = file.read(size)
        return data

    _, record = recorded(lambda: read(10_000))
    fs.pipe("/large", bytes(2 * len(LARGE)))
    block = Block(record)
    with pytest.raises(FileChanged):
        Tracker().run(block, read, 50_000 + BUFFER)
    assert block.stale


def test_it_may_be_read_after_its_block(fs: Any) -> None:
    file = recorded(lambda: fs.open("/large"))[0][1]
    assert isinstance(file, io.BufferedReader)
    assert file.read() == LARGE
    file.close()
    assert file.closed
