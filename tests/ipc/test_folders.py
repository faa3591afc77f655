"""Shared folders: complete or missing, removed with the last process, and safe from other users."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from children import Child, Holder
from stallfree.errors import InputError, StorageError, WaitError
from stallfree.ipc import folders
from stallfree.ipc.folders import (
    SharedFolder,
    default_root,
    in_use,
    is_persistent,
    is_root,
    remove_unused,
    sweep,
    user_root,
)


def contents(folder: Path) -> None:
    (folder / "data").write_text("whole")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    return root


def open_folder(root: Path, name: str = "one", *, persist: bool = False) -> SharedFolder:
    return SharedFolder(name, root=root, initialize=contents, persist=persist)


def other_process(root: Path) -> Holder:
    """Another process that stays attached until it is asked to leave, or killed."""
    return Holder(lambda: open_folder(root).close)


def test_the_first_makes_it_and_the_last_one_out_removes_it(root: Path) -> None:
    first, second = open_folder(root), open_folder(root)
    assert (first.created, second.created) == (True, False)
    assert (second.path / "data").read_text() == "whole"
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    first.close()
    first.close()
    assert in_use(second.path)
    second.close()
    assert list(root.iterdir()) == []


def test_another_process_keeps_it(root: Path) -> None:
    other = other_process(root)
    mine = open_folder(root)
    assert not mine.created
    mine.close()
    assert in_use(root / "one")
    assert sweep(root) == []
    assert not remove_unused(root / "one")
    other.end()
    assert list(root.iterdir()) == []


def test_what_a_killed_process_leaves_is_swept(root: Path) -> None:
    other = other_process(root)
    other.kill()
    assert (root / "one").is_dir()
    assert not in_use(root / "one")
    assert sweep(root) == ["one"]
    assert list(root.iterdir()) == []


def test_persistent_folders_stay_whoever_leaves_last(root: Path) -> None:
    first = open_folder(root, persist=True)
    second = open_folder(root)
    first.close()
    second.close()
    assert is_persistent(root / "one")
    assert sweep(root) == []
    assert remove_unused(root / "one")


def test_persistence_can_be_asked_for_later(root: Path) -> None:
    first = open_folder(root)
    second = open_folder(root, persist=True)
    second.close()
    first.close()
    assert (root / "one" / "data").exists()
    assert remove_unused(root / "one")


def test_a_forked_child_does_not_remove_its_parents_folder(root: Path) -> None:
    folder = open_folder(root)
    assert Child(folder.close).wait() == 0
    assert in_use(folder.path)
    folder.close()
    assert list(root.iterdir()) == []


def test_nobody_sees_half_of_one(root: Path) -> None:
    """Threads attach and leave: an attached thread finds the folder complete, and in the end it is removed."""
    errors: list[BaseException] = []

    def come_and_go() -> None:
        try:
            for _ in range(25):
                folder = open_folder(root)
                assert (folder.path / "data").read_text() == "whole"
                folder.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(root.iterdir()) == []


def test_a_failure_while_it_is_made_leaves_nothing(root: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "data").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"one cannot be made: .*No space left.*Give another folder"):
        SharedFolder("one", root=root, initialize=full)
    with pytest.raises(KeyboardInterrupt):
        SharedFolder("one", root=root, initialize=lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    assert list(root.iterdir()) == []


def test_folders_killed_while_they_were_made_or_removed_are_swept(root: Path) -> None:
    gone = Child(lambda: None)
    gone.wait()
    for name in (f".new-{gone.pid}-aa", f".del-{gone.pid}-bb", f".del-{os.getpid()}-cc"):
        (root / name).mkdir()
        (root / name / "attached").touch()
    (root / f".new-{os.getpid()}-dd").mkdir()  # its maker is alive
    sweep(root)
    assert [path.name for path in root.iterdir()] == [f".new-{os.getpid()}-dd"]


def test_what_is_not_ours_is_left_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "photos").mkdir()
    (root / "photos" / "cat.jpg").write_text("meow")
    (root / "notes.txt").write_text("mine")
    (root / "link").symlink_to(root / "photos")
    assert sweep(root) == []
    monkeypatch.setattr(folders, "ATTACH_SECONDS", 0.01)
    for name in ("photos", "notes.txt", "link"):
        assert not remove_unused(root / name)
        with pytest.raises(WaitError, match="or no stallfree folder: give another name"):
            open_folder(root, name)
    assert (root / "photos" / "cat.jpg").read_text() == "meow"


def test_a_folder_that_must_exist(root: Path) -> None:
    with pytest.raises(StorageError, match="one is gone, with the process that made it"):
        SharedFolder("one", root=root, initialize=None)
    first = open_folder(root)
    second = SharedFolder("one", root=root, initialize=None)
    assert not second.created
    second.close()
    first.close()


def test_a_wait_has_a_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "ATTACH_SECONDS", 0.05)
    folder = open_folder(root, persist=True)
    folder.close()
    fd = os.open(folder.path / "attached", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(WaitError, match="one is locked by a process, or no stallfree folder"):
        open_folder(root)
    os.close(fd)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "../up", "x" * 121, "é", "a\n", None, 5]
)
def test_bad_names(root: Path, name: object) -> None:
    with pytest.raises(InputError, match="cannot name a cache"):
        SharedFolder(name, root=root, initialize=contents)  # type: ignore[arg-type]


# -- the root ---------------------------------------------------------------------------------------------------------


def test_the_folders_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = f"stallfree-{os.getuid()}"
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("STALLFREE_ROOT", str(tmp_path / "link" / "new"))
    assert default_root() == tmp_path / "new" / mine
    monkeypatch.delenv("STALLFREE_ROOT")
    assert default_root().name == mine
    assert user_root(tmp_path / "link") == tmp_path / mine


@pytest.mark.parametrize("store", ["redis://localhost:6379", Path("redis://localhost"), "localhost:6379", "", "a\0b"])
def test_a_store_that_is_no_folder(store: object) -> None:
    with pytest.raises(InputError, match=r"^store=.*: give 'memory', the path of a folder, a DiskTier or a RedisStore"):
        user_root(store)  # type: ignore[arg-type]


def test_the_root_and_what_is_above_it_are_made_private(tmp_path: Path) -> None:
    umask = os.umask(0o002)
    open_folder(tmp_path / "a" / "b").close()
    os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")} == {0o700}


def test_a_root_that_is_a_file_or_a_link(tmp_path: Path, root: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(root)
    for name in ("file", "link"):
        with pytest.raises(StorageError, match="cannot be made"):
            open_folder(tmp_path / name)
        assert not is_root(tmp_path / name)
