"""A folder in which another user could replace a cache is refused; in all others none can."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf
from children import Child
from stallfree.errors import FingerprintError
from stallfree.ipc.folders import SharedFolder, default_root, is_root, prepare_root, sweep

STRANGER, OVERFLOW = 12345, 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    base.mkdir(mode=0o700)
    return base


USES: dict[str, Callable[[], Any]] = {
    "cache": lambda: sf.CachedDataset([0] * 8, capacity="1MiB"),
    "group": lambda: sf.SharedLoader([0] * 8, group="owned", batch_size=2),
    "loader": lambda: list(sf.DataLoader([0] * 8, num_workers=1)),
    "list": lambda: is_root(default_root()),
    "sweep": lambda: sweep(default_root()),
}


@pytest.mark.parametrize("use", USES)
def test_a_root_that_others_may_replace(base: Path, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALLFREE_ROOT", str(base))
    default_root().mkdir(mode=0o700)
    base.chmod(0o777)
    with pytest.raises(FingerprintError, match=rf"other users may write to the folder {base} .*mode 777.*`chmod go-w"):
        USES[use]()
    assert list(default_root().iterdir()) == []


@pytest.mark.parametrize("mode", [0o1777, 0o1770, 0o755, 0o700, 0o711])
def test_folders_that_are_taken(base: Path, mode: int) -> None:
    base.chmod(mode)
    assert prepare_root(base / "mine") == base / "mine"


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
def test_folders_that_are_refused(base: Path, mode: int) -> None:
    (base / "mine").mkdir(mode=0o700)
    base.chmod(mode)
    for root in (base / "mine", base / "a" / "b"):
        with pytest.raises(FingerprintError, match=rf"the folder {base} above {root} \(mode {mode:o}\)"):
            prepare_root(root)
    for sticky in (0, 0o1000):  # which would let others write to the root itself
        base.chmod(mode | sticky)
        with pytest.raises(FingerprintError, match=rf"other users may write to the folder {base} \(mode"):
            prepare_root(base)


def test_an_acl_that_lets_another_user_write(base: Path) -> None:
    """It shows in the mode of the group."""
    set_acl = shutil.which("setfacl")
    if set_acl is None or subprocess.run([set_acl, "-m", f"u:{STRANGER}:rwx", base], capture_output=True).returncode:
        pytest.skip("no ACLs here")
    with pytest.raises(FingerprintError, match="other users may write"):
        prepare_root(base / "mine")


@as_root
def test_folders_of_another_user(base: Path) -> None:
    os.chown(base, STRANGER, -1)
    for mode in (0o700, 0o1777):  # the owner may rename in a sticky folder too
        base.chmod(mode)
        with pytest.raises(FingerprintError, match=f"{base} above .* belongs to user {STRANGER}, who could replace"):
            prepare_root(base / "mine")
    with pytest.raises(FingerprintError, match=rf"{base} belongs to user {STRANGER}, .*; you are user 0"):
        SharedFolder("one", root=base, initialize=None)


@as_root
def test_the_host_in_a_container_with_users_of_its_own(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(base, OVERFLOW, -1)
    with pytest.raises(FingerprintError, match=f"belongs to user {OVERFLOW}"):
        prepare_root(base / "mine")
    monkeypatch.setattr(Path, "read_text", lambda path: " 0 1000 1\n 1 100000 65536\n")
    assert prepare_root(base / "mine").is_dir()
    with pytest.raises(FingerprintError, match=f"belongs to user {OVERFLOW}"):
        prepare_root(base)


def test_a_link_is_followed_once(base: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(base)
    assert prepare_root(tmp_path / "link" / "mine") == base / "mine"


# -- the swap ---------------------------------------------------------------------------------------------------------


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

        def with_swap(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **named: Any) -> Any:
                if next(count) == number:  # noqa: B023
                    results.append(Child(swap, place).wait())  # noqa: B023
                return call(*arguments, **named)

            return wrapped

        with monkeypatch.context() as patch:
            for call in ("open", "mkdir", "stat", "lstat", "fstat", "listdir", "rename"):
                patch.setattr(os, call, with_swap(getattr(os, call)))
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
