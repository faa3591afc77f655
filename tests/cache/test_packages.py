"""Packages: what goes in comes out, whatever happens to the file, and nobody else's file is touched."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_tools import crc, is_signed, signed
from children import Child
from stallfree.cache import Packages, packages
from stallfree.errors import CodecError, InputError, StorageError
from stallfree.testing.cache_contract import KINDS

NUM_IDS = 1000
PLENTY = 1 << 40


class Odd:
    """Known to pickle only."""

    def __init__(self, number: int) -> None:
        self.number = number


def opened(folder: Path, fingerprint: str = "data", **arguments: Any) -> Packages:
    return Packages(folder, fingerprint, NUM_IDS, **{"allow_pickle": False, "write_budget": PLENTY, **arguments})


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def written(folder: Path, ids: Any = (3, 999, 0), size: int = 40) -> Path:
    """A package of signed samples."""
    before = set(files(folder))
    assert opened(folder).add(ids, [signed(id, 7, size) for id in ids])
    (path,) = set(files(folder)) - before
    return path


def read_all(some: Packages) -> dict[int, Any]:
    """Every sample that can be read, each of which is right."""
    found: dict[int, Any] = {}
    for number in range(len(some.sizes)):
        content = some.read(number)
        if content is not None:
            found.update(zip(content[0].tolist(), content[1], strict=True))
    assert all(is_signed(id, value) for id, value in found.items())
    return found


# -- round trips -------------------------------------------------------------------------------------------------------

values = st.sampled_from(KINDS) | st.binary(max_size=3000)
quick = settings(max_examples=15, suppress_health_check=list(HealthCheck))


@quick
@given(
    st.lists(st.lists(st.tuples(st.integers(0, NUM_IDS - 1), values), min_size=1, max_size=8), min_size=1, max_size=4)
)
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, contents: list[Any]) -> None:
    """Written by one, read by another that was there before, and by one that comes later."""
    folder = tmp_path_factory.mktemp("packages")
    ours, early = opened(folder), opened(folder, write_budget=0)
    newest: dict[int, int] = {}
    for content in contents:
        ids = [id for id, _ in content]
        newest.update(dict.fromkeys(ids, len(ours.sizes)))
        assert ours.add(ids, [value for _, value in content])
    early.refresh()
    for some in (ours, early, opened(folder)):
        assert some.holding(range(NUM_IDS)).tolist() == [newest.get(id, -1) for id in range(NUM_IDS)]
        assert some.sizes.tolist() == [len(content) for content in contents]
        for number, content in enumerate(contents):
            for _ in range(2):  # the first time they are changed
                found = some.read(number)
                assert found is not None
                assert found[0].tolist() == [id for id, _ in content]
                assert [type(value) for value in found[1]] == [type(value) for _, value in content]
                assert list(map(crc, found[1])) == [crc(value) for _, value in content]
                for value in found[1]:
                    if isinstance(value, torch.Tensor) and value.numel():
                        value.zero_()
        assert some.stats().packages_read == 2 * len(contents)
        assert some.stats().package_bytes_read == 2 * sum(file.stat().st_size for file in files(folder))
        assert some.stats().packages_dropped == 0
    stats = ours.stats()
    assert (stats.packages_written, stats.samples_packed) == (len(contents), sum(map(len, contents)))
    assert stats.package_bytes_written == sum(file.stat().st_size for file in files(folder))
    assert {stat.S_IMODE(file.stat().st_mode) for file in files(folder)} == {0o600}


def test_only_what_is_wanted_is_made(tmp_path: Path) -> None:
    written(tmp_path, range(100))
    found = opened(tmp_path).read(0, lambda ids: ids % 10 == 3)
    assert found is not None
    assert found[0].tolist() == list(range(3, 100, 10))
    assert all(is_signed(id, value) for id, value in zip(found[0].tolist(), found[1], strict=True))


def test_a_package_is_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, range(400), size=5000)
    some = opened(tmp_path)
    reads: list[int] = []
    readv = os.readv
    monkeypatch.setattr(os, "readv", lambda fd, into: reads.append(readv(fd, into)) or reads[-1])
    monkeypatch.setattr(os, "pread", None)
    monkeypatch.setattr(os, "read", None)
    assert some.read(0) is not None
    assert reads == [files(tmp_path)[0].stat().st_size]
    assert reads[0] > 2_000_000


def test_input_errors(tmp_path: Path) -> None:
    some = opened(tmp_path / "new")
    for ids, amount in (([], 0), ([1], 2), ([-1], 1), ([NUM_IDS], 1)):
        with pytest.raises(InputError, match="package"):
            some.add(ids, [0] * amount)
    with pytest.raises(CodecError, match="Odd"):
        some.add([1], [Odd(1)])
    assert files(tmp_path / "new") == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Give another folder"):
        opened(tmp_path / "file")


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_memory(store_root: Path) -> Iterator[Path]:
    """A folder where deleting is quick."""
    folder = store_root / "packages"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def tiny(folder: Path) -> Path:
    """A package of two numbers, as small as can be."""
    assert opened(folder).add([3, 999], [22, 6994])
    return files(folder)[0]


def noticed(folder: Path, before: Packages, damage: Callable[[], Any]) -> None:
    """Who knew the package, and who comes later, drops it: deleted, counted once, and no sample of it is read."""
    (path,) = files(folder)
    whole = path.read_bytes()
    damage()
    damaged = path.read_bytes()
    dropped = before.stats().packages_dropped
    assert before.read(int(before.holding([3])[0])) is None
    assert before.holding([3, 999]).tolist() == [-1, -1]
    assert before.stats().packages_dropped == dropped + 1
    assert files(folder) == []
    write(path, damaged)
    later = opened(folder)
    assert all(later.read(number) is None for number in range(len(later.sizes)))
    assert later.stats().packages_dropped == 1
    assert files(folder) == []
    write(path, whole)
    before.refresh()
    found = before.read(int(before.holding([999])[0]))
    assert found is not None
    assert (found[0].tolist(), found[1]) == ([3, 999], [22, 6994])


def write(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)


def test_flipped_bytes_are_noticed(in_memory: Path) -> None:
    path = tiny(in_memory)
    before = opened(in_memory)
    data = path.read_bytes()
    for at in range(0, len(data), 2):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        noticed(in_memory, before, lambda flipped=flipped: path.write_bytes(flipped))


def test_other_lengths_and_contents_are_noticed(in_memory: Path) -> None:
    path = tiny(in_memory)
    before, data = opened(in_memory), path.read_bytes()
    shorter = [data[:size] for size in range(0, len(data), 7)]
    for other in (*shorter, data + b"\0", data * 2, bytes(len(data)), os.urandom(len(data)), data[:64] * 100):
        noticed(in_memory, before, lambda other=other: path.write_bytes(other))


def test_a_bad_sector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    some = opened(tmp_path)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(os, "readv", broken)
    assert some.read(0) is None
    assert some.stats().packages_dropped == 1
    assert files(tmp_path) == []


def test_a_package_that_others_deleted_is_forgotten(tmp_path: Path) -> None:
    paths = [written(tmp_path, ids) for ids in ((1, 2), (3, 4), (5, 6))]
    some = opened(tmp_path)
    paths[0].unlink()
    assert some.read(0) is None
    paths[1].unlink()
    some.refresh()
    assert some.holding(range(7)).tolist() == [-1, -1, -1, -1, -1, 2, 2]
    assert some.sizes.tolist() == [0, 0, 2]
    assert some.read(1) is None
    assert read_all(some).keys() == {5, 6}
    assert some.stats().packages_dropped == 0
    paths[2].unlink()
    tmp_path.rmdir()
    some.refresh()
    assert (some.holding(range(7)) == -1).all()


# -- files of others ---------------------------------------------------------------------------------------------------


def test_packages_of_other_data_are_left_alone(tmp_path: Path) -> None:
    theirs = opened(tmp_path, "other data")
    assert theirs.add([1], [signed(1, 1)])
    (path,) = files(tmp_path)
    ours = opened(tmp_path)
    assert len(ours.sizes) == 0
    renamed = tmp_path / path.name.replace(theirs._stem, ours._stem)
    path.rename(renamed)  # even under a name of ours
    ours.refresh()
    later = opened(tmp_path)
    assert (ours.holding([1])[0], later.holding([1])[0]) == (-1, -1)
    assert ours.stats().packages_dropped == later.stats().packages_dropped == 0
    assert renamed.exists()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path, [1])
    data, stem, end = path.read_bytes(), path.name[:-33], path.name[-17:]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = elsewhere / path.name
    write(target, data)
    for name in ("notes.txt", ".notes.new", "x" + path.name, path.name + "~", f".{path.name}.tmp", "a.package"):
        write(tmp_path / name, b"mine")
    (tmp_path / f"{stem}{1:016x}{end}").symlink_to(target)
    (tmp_path / f"{stem}{2:016x}{end}").mkdir()
    os.mkfifo(tmp_path / f"{stem}{3:016x}{end}", 0o600)
    write(open_to_all := tmp_path / f"{stem}{4:016x}{end}", b"not even a package")
    open_to_all.chmod(0o644)
    (tmp_path / f".{stem}{5:016x}{end}.new").symlink_to(target)  # like a draft
    os.mkfifo(tmp_path / f".{stem}{6:016x}{end}.new", 0o600)
    everything = files(tmp_path)
    some = opened(tmp_path)
    assert sum(some._name.fullmatch(file.name) is not None for file in everything) == 5
    for _ in range(2):
        assert len(some.sizes) == 1
        assert read_all(some).keys() == {1}
        some._stamp = -1
        some.refresh()
    assert files(tmp_path) == everything
    assert target.read_bytes() == data
    assert some.stats().packages_dropped == 0


def test_files_of_another_user_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [1])
    draft = tmp_path / f".{path.name}.new"
    write(draft, b"")
    some = opened(tmp_path, write_budget=0)
    write(draft, b"")
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert some.read(0) is None
    assert len(opened(tmp_path).sizes) == 0
    assert files(tmp_path) == [draft, path]


def test_pickles(tmp_path: Path) -> None:
    loose = opened(tmp_path, allow_pickle=True)
    assert loose.add([1, 2, 3], [Odd(1), signed(2, 2), Odd(3)])
    found = loose.read(0)
    assert found is not None
    assert [found[1][0].number, found[1][2].number] == [1, 3]
    strict = opened(tmp_path)
    found = strict.read(0)
    assert found is not None
    assert found[0].tolist() == [2]
    assert is_signed(2, found[1][0])
    assert strict.holding([1, 2, 3]).tolist() == [-1, 0, -1]
    assert strict.stats().packages_dropped == 0
    files(tmp_path)[0].chmod(0o640)
    assert loose.read(0) is None  # others might have written it


# -- budget and full disks ---------------------------------------------------------------------------------------------


def test_the_budget_is_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As many bytes as were allowed, and whatever still fits is written."""
    (tmp_path / "one").mkdir()
    size = written(tmp_path / "one", [1], 1000).stat().st_size
    for more, stored in ((-1, 1), (0, 2), (1, 2)):
        some = opened(tmp_path / f"{more}", write_budget=2 * size + more)
        taken = [some.add([id], [signed(id, 7, length)]) for id, length in ((1, 1000), (2, 1000), (3, 1000), (4, 9))]
        assert taken == [True, stored == 2, False, stored == 1]
        assert some.left == 2 * size + more - sum(file.stat().st_size for file in files(tmp_path / f"{more}"))
    assert caplog.text.count("is spent") == len(caplog.records) == 3, "once each"


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel ends the write in the middle."""

    def work() -> None:
        some = opened(tmp_path)
        assert some.add([1], [bytes(100)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        for _ in range(2):
            assert not some.add([2], [bytes(100_000)])
            assert len(files(tmp_path)) == 1
        assert some.stats().package_bytes_written == files(tmp_path)[0].stat().st_size
        assert some.add([3], [bytes(100)])
        assert caplog.text.count("it cannot be written: [Errno 27] File too large") == len(caplog.records) == 1

    assert Child(work).wait() == 0
    assert opened(tmp_path).holding([1, 2, 3]).tolist() == [0, -1, 1]


# -- several processes -------------------------------------------------------------------------------------------------


def test_drafts_go_when_their_writer_is_dead_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, at_rename = os.pipe()

    def stop(*_: Any) -> None:
        os.write(at_rename, b"x")
        signal.pause()

    counts = np.zeros(len(packages.Count), np.int64)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", stop)
        child = Child(lambda: opened(tmp_path).add([1], [signed(1, 1)]))
    try:
        assert os.read(reached, 1) == b"x"
        (draft,) = files(tmp_path)
        assert len(opened(tmp_path, counts=counts).sizes) == 0
        assert files(tmp_path) == [draft]
    finally:
        child.kill()
        os.close(reached)
        os.close(at_rename)
    assert len(opened(tmp_path, "other data").sizes) == 0
    assert files(tmp_path) == []


def test_a_draft_taken_for_a_dead_writers_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process looks just between making the file and locking it."""
    some, lock = opened(tmp_path), packages._locked
    swept = []

    def late(fd: int) -> bool | None:
        if len(swept) < 2:
            swept.append(files(tmp_path)[0])
            with monkeypatch.context() as patch:
                patch.setattr(packages, "_locked", lock)
                packages._sweep(tmp_path)
            assert files(tmp_path) == []
        return lock(fd)

    monkeypatch.setattr(packages, "_locked", late)
    assert some.add([1], [signed(1, 1)])
    assert len(set(swept)) == 2
    assert len(files(tmp_path)) == 1
    assert read_all(some).keys() == {1}


def test_two_write_and_one_reads(tmp_path: Path) -> None:
    def work(first: int) -> None:
        some = opened(tmp_path)
        for id in range(first, first + 40, 4):
            assert some.add(range(id, id + 4), [signed(each, first) for each in range(id, id + 4)])

    some = opened(tmp_path)
    writers = [Child(work, first) for first in (0, 40)]
    found: dict[int, Any] = {}
    while len(found) < 80:
        some.refresh()
        ids = [id for id in np.flatnonzero(some.holding(range(80)) >= 0).tolist() if id not in found]
        if not ids:
            codes = [os.waitpid(writer.pid, os.WNOHANG)[0] for writer in writers if not found]
            assert not any(codes)
            continue
        content = some.read(int(some.holding(ids[0])))
        assert content is not None
        found.update(zip(content[0].tolist(), content[1], strict=True))
    assert [writer.wait() for writer in writers] == [0, 0]
    assert all(is_signed(id, value) for id, value in found.items())
    assert len(some.sizes) == len(files(tmp_path)) == 20
    assert some.stats().packages_dropped == 0
