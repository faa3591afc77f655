"""Shared folders: complete or missing, removed with the last process, and safe from other users."""

import fcntl
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf
from children import Child, Holder, run_threads
from stallfree.errors import FingerprintError, InputError, StorageError, WaitError
from stallfree.ipc import folders
from stallfree.ipc.folders import SharedFolder, default_root, in_use, is_root, prepare_root, remove_unused, sweep


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    return root


def open_folder(root: Path, name: str = "one", *, persist: bool = False) -> SharedFolder:
    return SharedFolder(name, root=root, initialize=lambda path: (path / "data").write_text("whole"), persist=persist)


def test_the_first_makes_it_and_the_last_one_out_removes_it(root: Path) -> None:
    first, second = open_folder(root), open_folder(root)
    assert (first.created, second.created) == (True, False)
    assert (second.path / "data").read_text() == "whole"
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    first.close()
    first.close()
    assert Child(second.close).wait() == 0
    assert (second.path / "data").exists(), "a forked child removes nothing"
    other = Holder(lambda: open_folder(root).close)
    second.close()
    assert (in_use(root / "one"), sweep(root), remove_unused(root / "one")) == (True, [], False)
    other.end()
    assert list(root.iterdir()) == []
    Holder(lambda: open_folder(root).close).kill()
    assert ((root / "one").is_dir(), in_use(root / "one")) == (True, False)
    assert sweep(root) == ["one"]
    assert list(root.iterdir()) == []


def test_persistent_folders_stay_whoever_leaves_last_and_asked_for_it(root: Path) -> None:
    for later in (False, True):
        first, second = open_folder(root, persist=not later), open_folder(root, persist=later)
        first.close()
        second.close()
        assert (folders.is_persistent(root / "one"), sweep(root), remove_unused(root / "one")) == (True, [], True)


def test_nobody_sees_half_of_one(root: Path) -> None:
    """Threads attach and leave: an attached thread finds the folder complete, and in the end it is removed."""

    def come_and_go() -> None:
        for _ in range(25):
            folder = open_folder(root)
            assert (folder.path / "data").read_text() == "whole"
            folder.close()

    run_threads(*[come_and_go] * 4)
    assert list(root.iterdir()) == []


def test_one_that_is_removed_while_another_attaches_is_made_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, flock = open_folder(root), fcntl.flock

    def lock_after_removal(fd: int, kind: int) -> None:
        monkeypatch.undo()
        first.close()
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", lock_after_removal)
    second = open_folder(root)
    assert second.created
    assert (second.path / "data").read_text() == "whole"
    second.close()


def test_a_failure_or_death_while_it_is_made_or_removed_leaves_nothing(root: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "data").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"one cannot be made: .*No space left.*Give another folder"):
        SharedFolder("one", root=root, initialize=full)
    with pytest.raises(KeyboardInterrupt):
        SharedFolder("one", root=root, initialize=lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    assert list(root.iterdir()) == []
    dead = Child(lambda: None)
    dead.wait()
    for name in (f".new-{dead.pid}-aa", f".del-{dead.pid}-bb", f".del-{os.getpid()}-cc"):
        (root / name).mkdir()
        (root / name / "attached").touch()
    (root / f".new-{os.getpid()}-dd").mkdir()  # its maker is alive
    sweep(root)
    assert [path.name for path in root.iterdir()] == [f".new-{os.getpid()}-dd"]


def test_what_is_not_ours_is_left_alone_and_a_wait_has_a_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "photos").mkdir()
    (root / "photos" / "cat.jpg").write_text("meow")
    (root / "notes.txt").write_text("mine")
    (root / "link").symlink_to(root / "photos")
    assert sweep(root) == []
    monkeypatch.setattr(folders, "ATTACH_SECONDS", 0.01)
    (folder := open_folder(root, "locked", persist=True)).close()
    fd = os.open(folder.path / "attached", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    for name in ("photos", "notes.txt", "link", "locked"):
        assert not remove_unused(root / name)
        with pytest.raises(WaitError, match=f"{name} is locked by a process, or no stallfree folder: give another"):
            open_folder(root, name)
    os.close(fd)
    assert (root / "photos" / "cat.jpg").read_text() == "meow"


def test_names_and_places_that_cannot_be_used(tmp_path: Path, root: Path) -> None:
    for name in ("", ".", "..", ".hidden", "-x", "a/b", "a b", "../up", "x" * 121, "é", "a\n", None, 5):
        with pytest.raises(InputError, match="cannot name a cache"):
            open_folder(root, name)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="one is gone, with the process that made it"):
        SharedFolder("one", root=root, initialize=None)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(root)
    for name in ("file", "link"):
        with pytest.raises(StorageError, match="cannot be made"):
            open_folder(tmp_path / name)
        assert not is_root(tmp_path / name)


STRANGER, OVERFLOW = 12345, 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def test_the_folders_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = f"stallfree-{os.getuid()}"
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("STALLFREE_ROOT", str(tmp_path / "link" / "new"))
    assert default_root() == tmp_path / "new" / mine
    monkeypatch.delenv("STALLFREE_ROOT")
    assert default_root().name == mine
    assert folders.user_root(tmp_path / "link") == tmp_path / mine
    assert prepare_root(tmp_path / "link" / "mine") == tmp_path / "mine"
    umask = os.umask(0o002)
    open_folder(tmp_path / "a" / "b").close()
    os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")} == {0o700}


@pytest.mark.parametrize("use", [
    lambda: sf.CachedDataset([0] * 8, capacity="1MiB"), lambda: sf.SharedLoader([0] * 8, group="owned", batch_size=2),
    lambda: list(sf.DataLoader([0] * 8, num_workers=1)), lambda: is_root(default_root()), lambda: sweep(default_root()),
])  # fmt: skip
def test_a_root_that_others_may_replace(root: Path, use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALLFREE_ROOT", str(root))
    default_root().mkdir(mode=0o700)
    root.chmod(0o777)
    with pytest.raises(FingerprintError, match=rf"the folder {root} above .* the mode 777.*`chmod go-w"):
        use()
    assert list(default_root().iterdir()) == []


def test_modes_of_folders(root: Path) -> None:
    for mode in (0o1777, 0o1770, 0o755, 0o700, 0o711):
        root.chmod(mode)
        assert prepare_root(root / "mine") == root / "mine"
    for mode in (0o777, 0o757, 0o775):
        root.chmod(mode)
        for below in (root / "mine", root / "a" / "b"):
            with pytest.raises(FingerprintError, match=rf"{root} above {below} belongs .* the mode {mode:o} "):
                prepare_root(below)
        for sticky in (0, 0o1000):  # which would let others write to the root itself
            root.chmod(mode | sticky)
            with pytest.raises(FingerprintError, match=rf"the folder {root} belongs"):
                prepare_root(root)


@as_root
def test_folders_of_another_user_and_of_a_container_with_users_of_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(root, STRANGER, -1)
    for mode in (0o700, 0o1777):  # the owner may rename in a sticky folder too
        root.chmod(mode)
        with pytest.raises(FingerprintError, match=f"{root} above .* belongs to user {STRANGER} "):
            prepare_root(root / "mine")
    with pytest.raises(FingerprintError, match=rf"{root} belongs to user {STRANGER} .*you are user 0"):
        SharedFolder("one", root=root, initialize=None)
    os.chown(root, OVERFLOW, -1)
    with pytest.raises(FingerprintError, match=f"belongs to user {OVERFLOW}"):
        prepare_root(root / "mine")
    monkeypatch.setattr(Path, "read_text", lambda path: " 0 1000 1\n 1 100000 65536\n")
    assert prepare_root(root / "mine").is_dir()
    with pytest.raises(FingerprintError, match=f"belongs to user {OVERFLOW}"):
        prepare_root(root)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that another user can access."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def swap(place: Path) -> None:
    """The actions with which another user could put a forged folder in place of the victim's."""
    os.setuid(STRANGER)
    try:
        (place / "mine").rename(place / "away")
        (place / "forged").rename(place / "mine")
    except OSError:
        os._exit(1)


@as_root
@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_a_swap_between_any_two_system_calls(public: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run swaps the folder before another one of the calls that inspect a path."""
    for number in itertools.count():
        place, count = public / str(number), itertools.count()
        for name, owner in (("mine", 0), ("forged", STRANGER)):
            root = place / name
            root.mkdir(mode=0o700, parents=True)
            SharedFolder("one", root=root, initialize=lambda path: path.chmod(0o700), persist=True).close()
            (root / "one" / "data").write_text(name)
            os.chown(root, owner, -1)
        place.chmod(mode)
        results: list[int] = []

        def with_swap(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            if next(count) == number:  # noqa: B023
                results.append(Child(swap, place).wait())  # noqa: B023
            return call(*arguments, **named)

        with monkeypatch.context() as patch:
            for call in ("open", "mkdir", "stat", "lstat", "fstat", "listdir", "rename"):
                patch.setattr(os, call, partial(with_swap, getattr(os, call)))
            try:
                folder = SharedFolder("one", root=place / "mine", initialize=None)
            except FingerprintError:
                assert mode == 0o777
            else:
                assert mode == 0o1777
                assert (folder.path / "data").read_text() == "mine"
                folder.close()
        if not results:
            assert number > 5
            return
        assert results == [0 if mode == 0o777 else 1]
