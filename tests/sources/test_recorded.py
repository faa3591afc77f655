"""Reads of files, recorded and served: always what plain files give."""

# ruff: noqa: SIM115  # files that are left open are a part of what is tested

from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import lzma
import mmap
import os
import pathlib
import pickle
import random
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from reads_data import contents, gone, opens_below, outcome, recorded, served
from stallfree.sources.reads import open_calls, tracked_file
from stallfree.sources.reads import recorded as records
from stallfree.sources.reads.open_calls import Tracker
from stallfree.sources.reads.recorded import Block, FileChanged

TEXT = "first line\nsecond, with ü and 漢\r\nthird\rfourth\n\nno end"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "text").write_bytes(TEXT.encode())
    (folder / "small").write_bytes(bytes(range(256)) * 4)
    (folder / "large").write_bytes(random.Random(0).randbytes(700_000))
    (folder / "empty").touch()
    return folder


def check(read: Callable[[], Any], folder: Path) -> Any:
    """`read` gives the same with plain, recorded and served files, of which the last are not needed. Returns that."""
    plain = outcome(read)
    with_record, record = recorded(read)
    assert with_record == plain
    with gone(folder):
        assert served(read, record)[0] == plain
    return plain[1]


def test_modes_and_types(folder: Path) -> None:
    def facts(*args: Any, **kwargs: Any) -> Any:
        with open(*args, **kwargs) as file:
            first = file.read(3)
            names = ("name", "mode", "encoding", "errors", "line_buffering", "closed")
            calls = (file.tell, file.readable, file.writable, file.seekable, file.isatty, file.read)
            inner = type(getattr(file, "buffer", None))
            attributes = [getattr(file, name, None) for name in names]
            return [type(file), inner, repr(file), first, *attributes, *(call() for call in calls)]

    text, small = str(folder / "text"), folder / "small"
    for args, kwargs in [
        ((text,), {}),
        ((text, "r"), {"encoding": "utf-8", "newline": ""}),
        ((text, "rt", -1, "latin-1"), {"newline": "\n"}),
        ((text, "r", 1), {"encoding": "ascii", "errors": "replace"}),
        ((text, "tr", 100), {"encoding": "utf-8", "errors": "strict", "newline": "\r"}),
        ((small, "rb"), {}),
        ((os.fsencode(small), "br"), {"buffering": 16}),
        ((text,), {"mode": "rb", "closefd": True, "opener": None}),
    ]:
        check(lambda args=args, kwargs=kwargs: facts(*args, **kwargs), folder)


def test_unbuffered(folder: Path) -> None:
    def read() -> Any:
        with open(folder / "small", "rb", buffering=0) as file:
            assert isinstance(file, io.RawIOBase)
            into = bytearray(5)
            parts = [file.read(3), file.tell(), file.readinto(into), bytes(into), file.seek(-4, 2), file.read(9)]
            return [*parts, file.seek(1000), file.readall(), file.seek(2000), file.readall(), file.read(1), repr(file)]

    check(read, folder)


def test_reading(folder: Path) -> None:
    def binary() -> Any:
        with open(folder / "large", "rb") as file:
            parts: list[Any] = [file.read(10), file.peek(1)[:1], file.seek(600_000), file.read(200_000)]
            parts += [file.seek(-5, os.SEEK_CUR), file.readline(), file.seek(0), file.readlines()[:3], file.tell()]
            return parts

    def text() -> Any:
        with open(folder / "text", encoding="utf-8") as file:
            first = next(file)
            rest = list(file)
            file.seek(0)
            line = file.readline()
            at = file.tell()
            return first, rest, line, at, file.readlines(), file.seek(at), file.read(), file.newlines

    check(binary, folder)
    check(text, folder)
    check(lambda: (folder / "text").read_text("utf-8"), folder)
    check(lambda: (folder / "small").read_bytes(), folder)
    check(lambda: open(folder / "empty").read(), folder)
    check(lambda: io.open(folder / "small", "rb").read(), folder)  # noqa: UP020
    check(lambda: pathlib.Path(folder, "text").open("rb").readlines(), folder)


def test_errors_are_those_of_open(folder: Path) -> None:
    closed = open(folder / "small", "rb")
    closed.close()
    (folder / "secret").touch(0)
    reads: list[Callable[[], Any]] = [
        lambda: open(folder / "missing"),
        lambda: open(folder / "missing" / "below", "rb"),
        lambda: open(folder),
        lambda: open(folder, "rb"),
        lambda: open(folder / "text", "rz"),
        lambda: open(folder / "text", "rb", encoding="utf-8"),
        lambda: open(folder / "text", buffering=0),
        lambda: open(folder / "text", encoding="no such"),
        lambda: open(folder / "text", newline="x"),
        lambda: open(folder / "text", encoding="ascii").read(),
        lambda: open("a\0b"),
        lambda: open(None),  # type: ignore[call-overload]
        lambda: open(),  # type: ignore[call-overload]
        lambda: open(folder / "text", "rb", -1, None, None, None, True, None, None),  # type: ignore[call-overload]
        lambda: open(folder / "text", wrong=1),  # type: ignore[call-overload]
        lambda: open(folder / "text", "rb").write(b""),
        lambda: open(folder / "text", "rb").truncate(),
        lambda: open(folder / "text", "rb").seek(-1),
        lambda: open(folder / "text", "rb", 0).seek(-1),
        lambda: open(folder / "text", "rb").seek(0, 9),
        lambda: closed.read(),
        lambda: pickle.dumps(open(folder / "text", "rb")),
        lambda: open("rel"),
    ]
    if os.getuid() != 0:
        reads.append(lambda: open(folder / "secret"))
    for read in reads:
        plain = outcome(read)
        assert plain[0] != "value", reads.index(read)
        result, record = recorded(read)
        assert result == plain
        assert served(read, record)[0] == plain

    def after_close(buffering: int) -> Any:
        file = open(folder / "text", "rb", buffering)
        file.read(1)
        file.close()
        return [outcome(call) for call in (file.read, file.tell, file.fileno, file.readable, lambda: file.seek(0))]

    check(lambda: after_close(-1), folder)
    check(lambda: after_close(0), folder)


@pytest.mark.skipif(os.getuid() != 0, reason="takes another user")
def test_permission_error(folder: Path) -> None:
    (folder / "secret").touch(0)
    os.chmod(folder.parent, 0o755)
    plain = outcome(lambda: _as_nobody(folder / "secret"))
    assert plain[0] is PermissionError
    assert recorded(lambda: _as_nobody(folder / "secret"))[0] == plain


def _as_nobody(path: Path) -> Any:
    os.seteuid(65534)
    try:
        return open(path)
    finally:
        os.seteuid(0)


def test_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)

    class Fancy:
        def __fspath__(self) -> str:
            return str(folder / "small")

    (folder / "sub").mkdir()
    os.symlink(folder / "sub", folder / "link")
    (folder / "name\udcff").write_bytes(b"odd")
    for path in ("small", b"small", Path("small"), Fancy(), "link/../small", folder / "name\udcff", b"name\xff"):

        def read(path: Any = path) -> Any:
            with open(path, "rb") as file:
                return file.name, file.read()

        plain = outcome(read)
        result, record = recorded(read)
        assert result == plain
        with opens_below(folder) as found:
            assert served(read, record)[0] == plain
        assert not found
    os.symlink(folder.parent, folder / "up")
    (folder.parent / "small").write_bytes(b"another")  # `up/../small` is not `small`
    (folder.parent.parent / "small").write_bytes(b"a third")
    _, record = recorded(lambda: open("small", "rb").read())
    assert served(lambda: open("up/../small", "rb").read(), record)[0] == outcome(
        lambda: open("up/../small", "rb").read()
    )


def test_what_is_no_regular_file_is_opened_plainly(folder: Path) -> None:
    os.mkfifo(folder / "fifo")

    def fifo() -> Any:
        writer = threading.Thread(target=lambda: (folder / "fifo").write_bytes(b"through"))
        writer.start()
        with open(folder / "fifo", "rb") as file:
            found = file.read(), type(file), type(file.raw), file.name
        writer.join()
        return found

    def by_number() -> Any:
        number = os.open(folder / "small", os.O_RDONLY)
        with open(number, "rb") as file:
            return file.read()

    def with_opener() -> Any:
        with open(folder / "small", "rb", opener=os.open) as file:
            return file.read(), type(file.raw)

    for read in (fifo, by_number, with_opener, lambda: type(open("/proc/self/status", "rb").raw)):
        plain = outcome(read)
        result, record = recorded(read)
        assert result == plain
        assert contents(record) == {}
        assert served(read, record)[0] == plain
    os.symlink("/proc/self/comm", folder / "comm")
    assert contents(recorded(lambda: open(folder / "comm").read())[1]) == {}
    assert contents(recorded(lambda: open("/dev/null").read())[1]) == {}
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        assert contents(recorded(lambda: open(file.name).read())[1]) == {Path(file.name).name: ([], b"")}


def test_files_that_are_written_are_left_out(folder: Path) -> None:
    tracker = Tracker()

    def count() -> str:
        with open(folder / "small", "rb") as file:
            file.read()
        with open(folder / "counter", "a") as file:
            file.write("x")
        with open(folder / "counter") as file:
            return file.read()

    assert recorded(count, tracker)[0][1] == "x"
    result, record = recorded(count, tracker)
    assert result[1] == "xx"
    assert served(count, record, tracker)[0][1] == "xxx"

    def update() -> bytes:
        with open(folder / "small", "rb") as file:
            before = file.read(2)
        with open(folder / "small", "r+b") as file:
            file.write(bytes([before[0] + 1]))
        with open(folder / "small", "rb") as file:
            return file.read(2)

    result, record = recorded(update)
    assert result[1] == b"\1\1"
    assert served(update, record)[0][1] == b"\2\1"


def test_libraries(folder: Path) -> None:
    array = np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8)
    np.save(folder / "a.npy", array)
    np.savez(folder / "a.npz", one=array, two=array[0])
    np.savetxt(folder / "a.csv", array[:, :, 0], delimiter=",")
    torch.save({"w": torch.from_numpy(array)}, folder / "a.pt")
    torch.save(torch.arange(30.0), folder / "old.pt", _use_new_zipfile_serialization=False)
    for kind in ("jpg", "png", "bmp", "tiff", "gif", "webp"):
        Image.fromarray(array).save(folder / f"a.{kind}")
    for module, name in ((gzip, "a.gz"), (bz2, "a.bz2"), (lzma, "a.xz")):
        with module.open(folder / name, "wt") as file:  # type: ignore[attr-defined]
            file.write("packed\n" * 3000)
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.write(folder / "large", "inside")
    with tarfile.open(folder / "a.tar", "w") as tar:
        tar.add(folder / "small", "first")
        tar.add(folder / "large", "second")

    def tar_member() -> bytes:
        with tarfile.open(folder / "a.tar") as tar:
            member = tar.extractfile("second")
            assert member is not None
            return member.read()

    def mapped() -> bytes:
        with open(folder / "large", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return memory[100:200]

    def from_file() -> Any:
        with open(folder / "large", "rb") as file:
            head = file.read(5)
            body = np.fromfile(file, np.uint8, 1000).tolist()
            return head, body, file.tell(), file.read(10)

    reads: list[Callable[[], Any]] = [
        lambda: np.load(folder / "a.npy").tolist(),
        lambda: np.load(folder / "a.npy", mmap_mode="r")[3].tolist(),
        lambda: np.load(folder / "a.npz")["two"].tolist(),
        lambda: np.fromfile(folder / "large", np.int16, 100, offset=7).tolist(),
        from_file,
        lambda: np.memmap(folder / "large", np.uint8, "r", shape=(300,)).tolist(),
        mapped,
        lambda: torch.load(folder / "a.pt")["w"].tolist(),
        lambda: torch.load(folder / "old.pt").tolist(),
        lambda: gzip.open(folder / "a.gz", "rt").read(),
        lambda: bz2.open(folder / "a.bz2").read(),
        lambda: lzma.open(folder / "a.xz").read(),
        lambda: zipfile.ZipFile(folder / "a.zip").read("inside"),
        tar_member,
        lambda: subprocess.run(["cat"], stdin=open(folder / "small"), capture_output=True, check=True).stdout,
        lambda: os.fstat(open(folder / "large").fileno()).st_size,
        lambda: os.fstat(open(folder / "large").fileno()).st_mtime_ns,
        lambda: list(os.pread(open(folder / "small").fileno(), 9, 3)),
    ]
    for kind in ("jpg", "png", "bmp", "tiff", "gif", "webp"):
        reads.append(lambda kind=kind: Image.open(folder / f"a.{kind}").convert("RGB").tobytes())  # type: ignore[misc]
    for read in reads:
        check(read, folder)
    for load in (np.loadtxt, np.genfromtxt):  # which look first whether the file exists
        result, record = recorded(lambda load=load: load(folder / "a.csv", delimiter=",").tolist())  # type: ignore[misc]
        with opens_below(folder) as found:
            assert served(lambda load=load: load(folder / "a.csv", delimiter=",").tolist(), record)[0] == result  # type: ignore[misc]
        assert not found


def test_arrays_from_file_objects(folder: Path) -> None:
    """Also cut short, and of kinds that have to be read natively."""
    pair = np.dtype([("a", "<u2"), ("b", "S3")])
    calls: list[Callable[[Any], Any]] = [
        lambda file: np.fromfile(file, np.uint8, 10),
        lambda file: np.fromfile(file, ">i4", count=3),
        lambda file: np.fromfile(file, np.float64, count=np.int64(1000)),
        lambda file: np.fromfile(file, dtype=pair, count=4),
        lambda file: np.fromfile(file, np.dtype((np.uint8, (2, 2))), 3),
        lambda file: np.fromfile(file, np.uint8, 0),
        lambda file: np.fromfile(file, np.uint16),
        lambda file: np.fromfile(file, np.uint8, 5, offset=4),
        lambda file: np.fromfile(file, "S0", 2),
        lambda file: np.fromfile(file, object, 2),
        lambda file: np.fromfile(file, np.uint8, -2),
        lambda file: np.fromfile(file, np.uint8, count="x"),
        lambda file: np.fromfile(file, np.uint8, count=2.0),
    ]

    def read(call: Callable[[Any], Any], skipped: int) -> Any:
        with open(folder / "small", "rb") as file:
            file.read(skipped)
            kind, found = outcome(lambda: call(file))[:2]
            if isinstance(found, np.ndarray):
                found = found.tobytes(), found.dtype, found.shape, found.flags.writeable, found.flags.owndata
            return kind, found, file.tell(), file.read(5)

    for call in calls:
        for skipped in (0, 3, 1023, 1024):
            check(partial(read, call, skipped), folder)


def test_the_raw_file_beneath_a_buffer(folder: Path) -> None:
    """Used directly, before and after its descriptor was asked for, and detached."""

    def read(numbered: bool, detached: bool, buffering: int) -> Any:
        file: Any = open(folder / "small", "rb", buffering)
        with file:
            found = [file.fileno() > 0] if numbered else []
            raw = file if not buffering else file.detach() if detached else file.raw
            found += [raw.seek(50), raw.read(4), raw.readline(7), raw.tell(), raw.seek(-3, 2), list(raw), raw.read()]
            for call in (
                lambda: raw.write(b"XXXX"),
                lambda: raw.truncate(3),
                lambda: raw.seek(-1),
                lambda: raw.seek(1 << 63),
                lambda: raw.seek(-(1 << 64), 2),
            ):
                found.append(outcome(call)[0])
            found += [raw.seek(1 << 40), raw.read(1), raw.readall(), raw.seek(0), raw.readall()]
            if detached and buffering:
                raw.close()
                found.append(outcome(lambda: raw.read(1))[0])
                return found
        return found

    for numbered in (False, True):
        for detached in (False, True):
            for buffering in (-1, 0, 100):
                check(partial(outcome, partial(read, numbered, detached, buffering)), folder)


def test_a_descriptor_shares_the_position(folder: Path) -> None:
    def read(buffering: int) -> Any:
        with open(folder / "small", "rb", buffering) as file:
            file.seek(3)
            number = file.fileno()
            parts = [os.read(number, 2), file.tell(), file.read(2), os.lseek(number, 0, os.SEEK_CUR)]
            return [
                *parts,
                file.seek(-1, 2),
                os.read(number, 5),
                file.read(),
                stat.S_ISREG(os.fstat(number).st_mode),
            ]

    check(partial(read, 0), folder)
    check(partial(read, -1), folder)


# --- records ---------------------------------------------------------------------------------------------------------


def test_only_what_was_read_is_recorded_and_the_rest_comes_from_storage(folder: Path) -> None:
    content = (folder / "large").read_bytes()

    def part(start: int, size: int) -> bytes:
        with open(folder / "large", "rb", buffering=0) as file:
            file.seek(start)
            return file.read(size)

    _, record = recorded(lambda: (part(100, 50), part(150, 50), part(120, 10), part(500_000, 7)))
    assert contents(record) == {"large": ([100, 200, 500_000, 500_007], content[100:200] + content[500_000:500_007])}
    with opens_below(folder) as found:
        assert served(lambda: (part(110, 90), part(500_001, 3)), record)[0][1] == (
            content[110:200],
            content[500_001:][:3],
        )
    assert not found
    with opens_below(folder) as found:
        result, block = served(lambda: part(0, 600_000), record)
    assert result[1] == content[:600_000]
    assert found == [str(folder / "large")]
    assert block.storage_bytes == 600_000
    with gone(folder):
        assert served(lambda: part(0, 10), record)[0][0] is FileNotFoundError


def test_a_buffered_reader_of_a_large_file_reads_little_more_than_it_is_asked_for(folder: Path) -> None:
    def read() -> bytes:
        with open(folder / "large", "rb") as file:
            file.seek(300_000)
            return file.read(100)

    assert len(contents(recorded(read)[1])["large"][1]) <= 2 * io.DEFAULT_BUFFER_SIZE


@pytest.mark.parametrize("change", ["grow", "shrink", "touch", "replace"])
def test_a_file_that_has_changed_is_never_mixed(folder: Path, change: str) -> None:
    path = folder / "large"

    def halves() -> Any:
        with open(path, "rb", buffering=0) as file:
            return file.read(1000), file.read(1000)

    def first() -> Any:
        with open(path, "rb", buffering=0) as file:
            return file.read(1000)

    old, record = recorded(first)
    content = bytes(len(path.read_bytes()))
    if change == "grow":
        path.write_bytes(content + b"more")
    elif change == "shrink":
        path.write_bytes(content[:5000])
    elif change == "touch":
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
    else:
        (folder / "new").write_bytes(content)
        os.replace(folder / "new", path)
    assert served(first, record)[0] == old
    result, block = served(halves, record)
    assert result[0] is FileChanged
    assert block.stale

    def careless() -> Any:
        with open(path, "rb", buffering=0) as file:
            try:
                return file.read(2000)
            except OSError:
                return file.read(10)

    result, block = served(careless, record)
    assert block.stale  # whatever becomes of the error


def test_a_file_that_changes_while_it_is_recorded_is_left_out(folder: Path) -> None:
    def read() -> Any:
        with open(folder / "small", "rb", buffering=0) as file:
            first = file.read(10)
            os.utime(folder / "small", ns=(5, 5))
            return first, file.read(10)

    assert contents(recorded(read)[1]) == {}


def test_large_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_BYTES", 500_000)
    monkeypatch.setattr("stallfree.sources.reads.tracked_file.MOST_BYTES", 500_000)

    def read() -> Any:
        return (folder / "small").read_bytes(), (folder / "large").read_bytes()

    plain = outcome(read)
    result, record = recorded(read)
    assert result == plain
    assert contents(record) == {"small": ([0, 1024], plain[1][0])}
    assert served(read, record)[0] == plain
    assert contents(recorded(lambda: np.fromfile(folder / "large", np.uint8).sum())[1]) == {}


def test_many_ranges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_RANGES", 10)

    def read() -> Any:
        with open(folder / "large", "rb", buffering=0) as file:
            return [(file.seek(1000 * at), file.read(1)) for at in range(11)]

    assert contents(recorded(read)[1]) == {}


def test_what_many_samples_read_is_stored_with_few_of_them(folder: Path) -> None:
    tracker = Tracker()

    def read(id: int) -> Any:
        with open(folder / "large", "rb", buffering=0) as file:
            index = file.read(100_000)
            file.seek(200_000 + 70_000 * (id % 5))
            return index, file.read(70_000), (folder / "small").read_bytes()

    def size(record: Any) -> int:
        return sum(len(data) for _, data in contents(record).values())

    sizes = [size(recorded(lambda id=id: read(id), tracker, id)[1]) for id in range(12)]  # type: ignore[misc]
    assert sizes == [171_024] * 8 + [71_024] * 4
    tracker = Tracker()
    again = [size(recorded(lambda: read(3), tracker, 3)[1]) for _ in range(12)]
    assert again == [171_024] * 12  # one sample that is read often


def test_malformed_records_raise(folder: Path) -> None:
    _, record = recorded(lambda: (folder / "small").read_bytes())
    damaged = record.copy()
    damaged[3] = 200
    bad: list[Any] = [
        record[:0],
        record[:50],
        record[:1000],
        damaged,
        record.astype(np.int16),
        b"",
    ]
    for value in [*bad, "text", 3, (b"",)]:
        with pytest.raises((ValueError, TypeError)):
            Block(value)


def test_files_that_outlive_a_record_that_was_lent(folder: Path) -> None:
    content = (folder / "large").read_bytes()
    _, record = recorded(lambda: (folder / "large").read_bytes())
    block = Block(record, lent=True)
    kept = Tracker().run(block, open, folder / "large", "rb")
    closed = Block(record, lent=True)
    lost = Tracker().run(closed, open, folder / "large", "rb")
    closed.close_files()
    record[:] = 0
    with gone(folder), kept:
        assert kept.read() == content
    with pytest.raises(ValueError, match="closed"):
        lost.read()


# --- threads and handles ---------------------------------------------------------------------------------------------


def test_threads_that_are_started_in_a_block_are_in_it(folder: Path) -> None:
    def in_threads() -> Any:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda name: (folder / name).read_bytes(), ("small", "large", "text")))

    check(in_threads, folder)

    async def both() -> Any:
        return await asyncio.gather(*(asyncio.to_thread((folder / name).read_bytes) for name in ("small", "large")))

    check(lambda: asyncio.run(both()), folder)


def test_threads_of_a_pool_that_lives_on(folder: Path) -> None:
    tracker = Tracker()
    with ThreadPoolExecutor(1) as pool:

        def read(name: str) -> bytes:
            return pool.submit((folder / name).read_bytes).result()

        _, small = recorded(lambda: read("small"), tracker)
        _, large = recorded(lambda: read("large"), tracker)
        assert [*contents(small), *contents(large)] == ["small", "large"]
        with opens_below(folder) as found:
            assert served(lambda: read("large"), large, tracker)[0][1] == (folder / "large").read_bytes()
        assert len(found) == 1  # the one outside of the block
        assert len(read("small")) == 1024


def test_other_threads_are_not_in_a_block(folder: Path) -> None:
    inside, done = threading.Event(), threading.Event()
    found: list[Any] = []

    def other() -> None:
        inside.wait(10)
        with open(folder / "small", "rb") as file:
            found.append((type(file.raw), file.read(1)))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def read() -> bytes:
        inside.set()
        done.wait(10)
        return (folder / "small").read_bytes()[:1]

    _, record = recorded(lambda: (folder / "small").read_bytes())
    (folder / "small").write_bytes(b"new")
    assert served(read, record)[0][1] == b"\0"
    thread.join()
    assert found == [(io.FileIO, b"n")]


def read_kept(folder: Path, kept: list[Any], at: int) -> bytes:
    """Read 20,000 bytes at a position of the large file, which is opened once and kept open."""
    if not kept:
        kept.append(open(folder / "large", "rb", buffering=8192))
    kept[0].seek(at)
    found: bytes = kept[0].read(20_000)
    return found


def test_a_file_that_is_kept_open_serves_later_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_file, "LEFT_OPEN", 0)
    kept: list[Any] = []
    content = (folder / "large").read_bytes()
    read = partial(read_kept, folder, kept)

    _, first = recorded(lambda: read(0))
    _, second = recorded(lambda: read(300_000))
    assert len(contents(second)["large"][1]) >= 20_000
    kept.pop().close()
    with gone(folder):
        assert served(lambda: read(300_000), second)[0][1] == content[300_000:320_000]
        assert served(lambda: read(0), first)[0][1] == content[:20_000]
        kept[0].seek(300_010)
        assert kept[0].read(10) == content[300_010:300_020]  # of the record that it was opened with
    assert read(400_000) == content[400_000:420_000]
    (folder / "large").write_bytes(bytes(700_000))
    assert served(lambda: read(0), first)[0][1] == content[:20_000]
    result, block = served(lambda: read(500_000), first)
    assert result[0] is FileChanged
    assert block.stale
    assert served(lambda: read(0), first)[0][1] == bytes(20_000)  # the handle is on the new file from then on
    kept.pop().close()


def test_the_gaps_of_a_small_file_are_recorded_if_most_was_read(folder: Path) -> None:
    content = (folder / "large").read_bytes()

    def read(*ranges: tuple[int, int]) -> Any:
        with open(folder / "large", "rb", buffering=0) as file:
            return [(file.seek(start), file.read(stop - start)) for start, stop in ranges]

    most = (100_000, 300_000), (310_000, 650_000), (20_000, 99_000)
    _, record = recorded(lambda: read(*most))
    assert contents(record)["large"][1] == content
    tracker, block = Tracker(), Block()
    tracker.run(block, lambda: read(*most))
    assert block.storage_bytes == len(content)
    _, record = recorded(lambda: read((0, 100_000)))
    assert len(contents(record)["large"][1]) == 100_000


def test_a_whole_file_that_is_kept_open_is_recorded_by_later_blocks(folder: Path) -> None:
    tracker, kept = Tracker(), []

    def read() -> Any:
        if not kept:
            kept.append(open(folder / "large", "rb"))
        kept[0].seek(5)
        return kept[0].read()

    plain = (folder / "large").read_bytes()[5:]
    _, first = recorded(lambda: open(folder / "large", "rb").read())
    served(read, first, tracker)
    result, later = recorded(read, tracker)
    kept.pop().close()
    assert result == ("value", plain)
    with gone(folder):
        assert served(read, later)[0] == result
    kept.pop().close()


def test_a_kept_file_that_has_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_file, "LEFT_OPEN", 0)
    kept: list[Any] = []
    read = partial(read_kept, folder, kept)

    tracker = Tracker()
    _, first = recorded(lambda: read(0), tracker)
    kept.pop().close()
    served(lambda: read(0), first, tracker)
    (folder / "large").write_bytes(bytes(700_000))
    block = Block()
    assert tracker.run(block, outcome, lambda: read(10_000))[0] is FileChanged
    assert block.stale
    assert recorded(lambda: read(10_000), tracker)[0][1] == bytes(20_000)
    kept.pop().close()


def test_blocks_are_left_and_nested(folder: Path) -> None:
    outer, inner = Tracker(), Tracker()

    def read() -> Any:
        _, record = recorded(lambda: (folder / "text").read_bytes(), inner)
        with pytest.raises(ZeroDivisionError):
            inner.run(Block(), lambda: 1 // 0)
        return (folder / "small").read_bytes(), contents(record)["text"][1]

    result, record = recorded(read, outer)
    assert list(contents(record)) == ["small"]
    assert result[1] == (contents(record)["small"][1], TEXT.encode())
    assert type(open(folder / "small", "rb").raw) is io.FileIO


def test_the_replacement_looks_like_open(folder: Path) -> None:
    recorded(lambda: None)
    assert pickle.loads(pickle.dumps(open)) is open
    assert open is io.open is tarfile.bltn_open  # type: ignore[attr-defined]
    assert open.__name__ == "open"
    assert "open" in repr(open)

    class Holder:
        opener = open

    assert Holder().opener(folder / "small", "rb").read(1) == b"\0"
    assert open_calls._installed


def test_the_status_of_files_that_are_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "large"
    (folder / "link").symlink_to(path)
    os.utime(path, ns=(1_700_000_000_123_456_789, 1_600_000_000_987_654_321))

    def read() -> Any:
        status = [os.stat(name) for name in (path, str(path), os.fsencode(path), folder / "link")]
        size = path.stat().st_size, os.path.getsize(path), os.path.getmtime(path), path.is_file(), os.path.isdir(path)
        link = (folder / "link").read_bytes()
        return (
            [(*each, each.st_mtime, each.st_mtime_ns, each.st_blocks) for each in status],
            size,
            path.read_bytes(),
            link,
        )

    path.read_bytes()  # from now on, the time of access stays
    check(read, folder)
    monkeypatch.chdir(folder)
    _, record = recorded(read)
    path.unlink()
    assert served(lambda: (os.path.exists("large"), os.path.exists("none")), record)[0] == ("value", (True, False))


def test_the_status_of_other_files_is_that_of_storage(folder: Path) -> None:
    def read() -> Any:
        (folder / "small").read_bytes()
        (folder / "written").write_bytes(b"12")
        (folder / "written").read_bytes()
        (folder / "written").write_bytes(b"123")
        with open(folder / "text", "rb") as file:
            by_number = os.stat(file.fileno()).st_size
        return (
            by_number,
            os.stat(folder / "written").st_size,
            os.lstat(folder / "small").st_size,
            os.stat(folder).st_mode,
        )

    _, record = recorded(read)
    assert served(read, record)[0] == outcome(read)
    (folder / "small").unlink()
    with pytest.raises(FileNotFoundError):
        os.stat(folder / "small")
    assert served(lambda: os.stat(folder / "small").st_size, record)[0] == ("value", 1024)
    assert served(lambda: os.stat(folder / "small", follow_symlinks=False), record)[0][0] is FileNotFoundError


def test_a_picture_that_is_decoded_after_the_block(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "picture.png")
    (_, picture), record = recorded(lambda: Image.open(folder / "picture.png"))
    assert np.array_equal(pixels, picture)
    with gone(folder):
        assert np.array_equal(pixels, served(lambda: Image.open(folder / "picture.png"), record)[0][1])


def test_what_a_record_has_not_counts_as_read_from_storage(folder: Path) -> None:
    _, record = recorded((folder / "small").read_bytes)
    _, block = served(lambda: ((folder / "small").read_bytes(), (folder / "large").read_bytes()), record)
    assert block.storage_bytes == 700_000


def test_the_replacement_looks_like_stat() -> None:
    recorded(lambda: None)
    assert pickle.loads(pickle.dumps(os.stat)) is os.stat
    assert os.stat in os.supports_follow_symlinks
    assert os.stat in os.supports_fd


def test_a_forked_child_is_in_no_block(folder: Path) -> None:
    def read() -> int:
        child = os.fork()
        if child == 0:
            os._exit(0 if type(open(folder / "small", "rb").raw) is io.FileIO else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert recorded(read)[0][1] == 0


# --- random sequences ------------------------------------------------------------------------------------------------

_BINARY = ("read", "readline", "readinto", "seek", "seek_end", "seek_on", "tell", "readlines", "next", "fileno", "all")
_TEXT = ("read", "readline", "readlines", "next", "rewind", "back", "all")
_step = st.tuples(st.integers(0, 10), st.one_of(st.integers(0, 60), st.integers(0, 12_000)))
_use = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "b", "c"]),
        "mode": st.sampled_from(["rb", "r", "raw", "rb16"]),
        "encoding": st.sampled_from(["latin-1", "utf-8", "utf-16"]),
        "newline": st.sampled_from([None, "", "\n", "\r", "\r\n"]),
        "steps": st.lists(_step, max_size=8),
        "thread": st.booleans(),
    }
)


def _binary_step(file: Any, kind: str, number: int) -> Any:
    if kind == "read":
        return file.read(number)
    if kind == "readline":
        return file.readline(number or -1)
    if kind == "readinto":
        into = bytearray(number)
        return file.readinto(into), bytes(into)
    if kind == "seek":
        return file.seek(number)
    if kind == "seek_end":
        return file.seek(-number, 2)
    if kind == "seek_on":
        return file.seek(number // 2 - 20, 1)
    if kind == "tell":
        return file.tell()
    if kind == "readlines":
        return file.readlines(number)
    if kind == "next":
        return next(file, None)
    if kind == "fileno":
        return os.pread(file.fileno(), number, 0)
    return file.read()


def _text_step(file: Any, kind: str, number: int, marks: list[int]) -> Any:
    if kind == "read":
        return file.read(number)
    if kind == "readline":
        marks.append(file.tell())
        return file.readline()
    if kind == "readlines":
        return file.readlines(number)
    if kind == "next":
        return file.readline(number or -1)
    if kind == "rewind":
        return file.seek(0)
    if kind == "back":
        file.seek(marks[-1] if marks else 0)
        return file.read(5)
    return file.read()


def _used(folder: Path, use: dict[str, Any]) -> list[Any]:
    path, mode, found = folder / use["name"], use["mode"], []
    if mode == "r":
        kwargs: dict[str, Any] = {"encoding": use["encoding"], "newline": use["newline"]}
    else:
        kwargs = {"mode": "rb", "buffering": {"rb": -1, "raw": 0, "rb16": 16}[mode]}
    with open(path, **kwargs) as file:
        marks: list[int] = []
        for step, number in use["steps"]:
            if mode == "r":
                kind = _TEXT[step % len(_TEXT)]
                found.append(outcome(lambda kind=kind, number=number: _text_step(file, kind, number, marks)))
            else:
                kind = _BINARY[step % len(_BINARY)]
                found.append(outcome(lambda kind=kind, number=number: _binary_step(file, kind, number)))
    return found


def _all_used(folder: Path, uses: list[dict[str, Any]]) -> list[Any]:
    results: list[Any] = [None] * len(uses)

    def one(at: int) -> None:
        results[at] = _used(folder, uses[at])

    threads = [threading.Thread(target=one, args=(at,)) for at, use in enumerate(uses) if use["thread"]]
    for thread in threads:
        thread.start()
    for at, use in enumerate(uses):
        if not use["thread"]:
            one(at)
    for thread in threads:
        thread.join()
    return results


def _content(at: int, size: int) -> bytes:
    rng = random.Random(at)
    return b"".join(rng.choice([b"ab", b"\n", b"\r\n", b"\r", b"x" * 30, "ü".encode()]) for _ in range(size))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "data"
    folder.mkdir()
    for at, (name, size) in enumerate([("a", 30), ("b", 1500), ("c", 5000)]):
        (folder / name).write_bytes(_content(at, size))
    return folder


def _fuzz(folder: Path, uses: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Recorded, served without storage, and another sequence served from the same record: all as plain files."""
    plain = _all_used(folder, uses)
    result, record = recorded(lambda: _all_used(folder, uses))
    assert result == ("value", plain)
    with gone(folder):
        assert served(lambda: _all_used(folder, uses), record)[0] == ("value", plain)
    assert served(lambda: _all_used(folder, others), record)[0] == ("value", _all_used(folder, others))


_uses = st.lists(_use, min_size=1, max_size=4)


@given(uses=_uses, others=_uses)
@settings(max_examples=100)
def test_random_reads(fuzzed: Path, uses: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    _fuzz(fuzzed, uses, others)


@pytest.mark.slow
@given(uses=_uses, others=_uses)
@settings(max_examples=2000)
def test_many_random_reads(fuzzed: Path, uses: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    _fuzz(fuzzed, uses, others)


def test_an_import_in_a_block_works(folder: Path) -> None:
    (folder / "some_module_of_a_user.py").write_text("VALUE = 7\n")
    sys.path.insert(0, str(folder))
    try:
        assert recorded(lambda: __import__("some_module_of_a_user").VALUE)[0][1] == 7
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("some_module_of_a_user", None)
