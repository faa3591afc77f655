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
from stallfree.errors import FingerprintError, InputError, StorageError, WaitError
from stallfree.ipc import folders
from stallfree.ipc.folders import SharedFolder, default_root, in_use, is_persistent, remove_unused, sweep, user_root


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


def test_a_folder_that_is_removed_while_it_is_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is removed under another name, file by file: a partial listing is not a foreign folder."""
    first = open_folder(root)
    listdir = os.listdir

    def late(fd: int) -> list[str]:
        monkeypatch.setattr(os, "listdir", listdir)
        first.close()
        return ["data"]

    attach = SharedFolder._attach
    monkeypatch.setattr(
        SharedFolder, "_attach", lambda self: (monkeypatch.setattr(SharedFolder, "_attach", attach), None)[1]
    )
    monkeypatch.setattr(os, "listdir", late)
    second = open_folder(root)
    assert second.created
    second.close()


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


def test_what_is_not_ours_is_left_alone(root: Path) -> None:
    (root / "photos").mkdir()
    (root / "photos" / "cat.jpg").write_text("meow")
    (root / "notes.txt").write_text("mine")
    (root / "link").symlink_to(root / "photos")
    assert sweep(root) == []
    for name in ("photos", "notes.txt"):
        assert not remove_unused(root / name)
        with pytest.raises(StorageError, match="exists and is no stallfree folder"):
            open_folder(root, name)
    assert (root / "photos" / "cat.jpg").read_text() == "meow"


def test_an_empty_folder_of_that_name_is_taken(root: Path) -> None:
    (root / "one").mkdir()
    folder = open_folder(root)
    assert folder.created
    folder.close()


def test_a_wait_has_a_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "ATTACH_SECONDS", 0.05)
    folder = open_folder(root, persist=True)
    folder.close()
    fd = os.open(folder.path / "attached", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(WaitError, match=r"another process has locked .*one for more than"):
        open_folder(root)
    os.close(fd)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "../up", "x" * 121, "é", "a\n", None, 5]
)
def test_bad_names(root: Path, name: object) -> None:
    with pytest.raises(InputError, match="cannot name a cache"):
        SharedFolder(name, root=root, initialize=contents)  # type: ignore[arg-type]


# --- the root --------------------------------------------------------------------------------------------------------


def test_the_root_is_made_private(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    folder.close()


def test_where_others_may_write_we_take_a_folder_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("STALLFREE_ROOT", str(shared))
    assert default_root() == shared / f"stallfree-{os.getuid()}"
    shared.chmod(0o755)
    assert default_root() == shared
    monkeypatch.setenv("STALLFREE_ROOT", str(tmp_path / "new"))
    assert default_root() == tmp_path / "new"
    monkeypatch.delenv("STALLFREE_ROOT")
    assert default_root().name == f"stallfree-{os.getuid()}"
    assert user_root(tmp_path) == tmp_path / f"stallfree-{os.getuid()}"


def test_the_mode_of_a_root_that_is_there_is_not_changed(root: Path) -> None:
    root.chmod(0o755)
    open_folder(root).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    root.chmod(0o777)
    with pytest.raises(FingerprintError, match="other users may write"):
        open_folder(root)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_root_of_another_user(root: Path) -> None:
    os.chown(root, 12345, -1)
    with pytest.raises(FingerprintError, match=r"belongs to user 12345, and you are user 0"):
        open_folder(root)
    assert list(root.iterdir()) == []


def test_a_root_that_is_a_file_or_a_link(tmp_path: Path, root: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(root)
    for name in ("file", "link"):
        with pytest.raises(StorageError, match="cannot be made"):
            open_folder(tmp_path / name)
