"""A base folder in which another user could replace a cache is refused; in all others none can."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf
from children import Child
from stallfree.cache import SampleCache
from stallfree.cache.admin import caches_root, collect_garbage, list_caches, remove
from stallfree.errors import FingerprintError
from stallfree.ipc import owned
from stallfree.ipc.folders import default_root, prepare_root, user_root
from stallfree.ipc.shared_counts import SharedCounts
from stallfree.workers.status import running_loaders

STRANGER = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    base.mkdir()
    return base


def tier(base: Path) -> None:
    memory = {"capacity": 1 << 20, "fingerprint": "f", "policy": "minio", "name": "one"}
    sf.DiskTier(base, capacity="1MiB").attach(4, **memory)  # type: ignore[arg-type]


USES: dict[str, Callable[[Path], Any]] = {
    "cache": lambda base: SampleCache(4, capacity="1MiB", fingerprint="f", store=base),
    "tier": tier,
    "list": lambda base: list_caches(caches_root(base)),
    "remove": lambda base: remove(caches_root(base), "one"),
    "sweep": lambda base: collect_garbage(caches_root(base)),
}
IN_MEMORY: dict[str, Callable[[], Any]] = {
    "cache": lambda: SampleCache(4, capacity="1MiB", fingerprint="f"),
    "group": lambda: sf.SharedLoader([0] * 8, group="owned", batch_size=2),
    "loader": lambda: list(sf.DataLoader([0] * 8, num_workers=1)),
    "counts": lambda: SharedCounts(1),
    "list": lambda: list_caches(default_root()),
    "status": lambda: running_loaders(default_root()),
}


@pytest.mark.parametrize("use", USES)
def test_a_store_that_others_may_write_to(base: Path, use: str) -> None:
    user_root(base).mkdir(mode=0o700)
    base.chmod(0o777)
    with pytest.raises(FingerprintError, match=rf"other users may write to the folder {base} \(mode 777, not sticky\)"):
        USES[use](base)
    assert list(user_root(base).iterdir()) == []


@pytest.mark.parametrize("use", IN_MEMORY)
def test_a_root_in_memory_that_others_may_write_to(base: Path, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STALLFREE_ROOT", str(base))
    base.chmod(0o777)
    default_root().mkdir(mode=0o700)
    with pytest.raises(FingerprintError, match=rf"folder {base} \(mode 777, not sticky\).*`chmod \+t {base}`"):
        IN_MEMORY[use]()


@pytest.mark.parametrize("mode", [0o1777, 0o1770, 0o755, 0o700, 0o711])
def test_bases_that_are_taken(base: Path, mode: int) -> None:
    base.chmod(mode)
    assert prepare_root(base / "mine") == base / "mine"
    with SampleCache(4, capacity="1MiB", fingerprint="f", store=base) as cache:
        assert cache.path.is_relative_to(base)


def test_a_folder_far_above_that_others_may_write_to(base: Path) -> None:
    base.chmod(0o757)
    with pytest.raises(FingerprintError, match=rf"the folder {base} above {base}/a/b \(mode 757"):
        prepare_root(base / "a" / "b" / "mine")


def test_a_group(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that contains only this user may write, as on systems with private groups; no other group may."""
    base.chmod(0o775)
    monkeypatch.setattr(owned, "_is_own_group", lambda group: group == base.stat().st_gid)
    assert prepare_root(base / "mine").is_dir()
    monkeypatch.setattr(owned, "_has_acl", lambda fd: True)
    with pytest.raises(FingerprintError, match=r"mode 775, not sticky.*chmod go-w"):
        prepare_root(base / "mine")
    monkeypatch.undo()
    if os.getuid() == 0:
        os.chown(base, -1, STRANGER)
        with pytest.raises(FingerprintError, match="mode 775, not sticky"):
            prepare_root(base / "mine")


def test_whose_group_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    user = pwd.struct_passwd(("kim", "x", 7, 70, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    for name, members, own in (("kim", [], True), ("kim", ["kim"], True), ("kim", ["ann"], False), ("all", [], False)):
        monkeypatch.setattr(
            grp, "getgrgid", lambda _, name=name, members=members: grp.struct_group((name, "x", 70, members))
        )
        assert owned._is_own_group(70) is own
    assert not owned._is_own_group(71)


def test_a_base_of_another_user(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "_trusted", lambda: {STRANGER})
    with pytest.raises(FingerprintError, match=r"the folder / above .* belongs to user 0, who could replace"):
        prepare_root(base / "mine")


@as_root
def test_a_base_that_belongs_to_another_user(base: Path) -> None:
    user_root(base).mkdir(mode=0o700)
    os.chown(base, STRANGER, -1)
    for use in USES.values():
        with pytest.raises(FingerprintError, match=rf"{base} belongs to user {STRANGER}, who could replace"):
            use(base)
    base.chmod(0o1777)  # the owner may rename in a sticky folder too
    with pytest.raises(FingerprintError, match=f"belongs to user {STRANGER}"):
        USES["cache"](base)


def test_the_host_in_a_container_with_users_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/self/uid_map": " 0 1000 1\n 1 100000 65536\n", "/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[str(path)])
    assert 65534 in owned._trusted()
    texts["/proc/self/uid_map"] = " 0 0 4294967295\n"
    assert owned._trusted() == {0, os.getuid()}


def test_a_link_is_followed_once(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(base)
    assert prepare_root(tmp_path / "link" / "mine") == base / "mine"
    assert user_root(tmp_path / "link").parent == base
    monkeypatch.setenv("STALLFREE_ROOT", str(tmp_path / "link"))
    assert default_root() == base


# --- the swap --------------------------------------------------------------------------------------------------------


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that another user can access."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def make(store: Path, value: str, name: str = "one") -> None:
    with SampleCache(4, capacity="1MiB", fingerprint="f", store=store, name=name, persist=True) as cache:
        cache.put_many([0], [value])


def swap(public: Path) -> None:
    """The actions with which another user could put a forged cache in place of the victim's."""
    victims = user_root(public)
    os.setuid(STRANGER)
    try:
        victims.rename(public / "away")
        (public / "forged").rename(victims)
    except OSError:
        os._exit(1)


@as_root
@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_a_swap_between_any_two_system_calls(public: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run swaps the folder before another one of the calls that inspect a path."""
    calls = ("open", "mkdir", "stat", "lstat", "listdir", "rename")
    for value in ("true", "forged"):
        make(public / value, value)
    for number in itertools.count():
        place, count = public / str(number), itertools.count()
        shutil.copytree(user_root(public / "true"), user_root(place))
        shutil.copytree(user_root(public / "forged"), place / "forged")
        os.chown(place / "forged", STRANGER, -1)
        place.chmod(mode)
        results: list[int] = []

        def with_swap(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **named: Any) -> Any:
                if next(count) == number:  # noqa: B023
                    results.append(Child(swap, place).wait())  # noqa: B023
                return call(*arguments, **named)

            return wrapped

        with monkeypatch.context() as patch:
            for call in calls:
                patch.setattr(os, call, with_swap(getattr(os, call)))
            try:
                cache = SampleCache(4, capacity="1MiB", fingerprint="f", store=place, name="one")
            except FingerprintError:
                assert mode == 0o777
            else:
                assert cache.get_many([0]) == ["true"]
                assert mode == 0o1777
                cache.close()
        if not results:
            assert number > 5
            return
        assert results == [0 if mode == 0o777 else 1]
