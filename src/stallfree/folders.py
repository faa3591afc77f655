"""Folders that several processes share, and that vanish with the last of them.

A cache, a staging ring and a throttle each live in a folder of their own below a root that belongs to one user (mode
0700). Every attached process holds a shared `flock` on the file `attached`; the kernel drops it when the process dies,
so whoever can get the lock for itself alone knows that nobody is attached. The last one out removes the folder, and
what killed processes left behind is removed by the next `sweep`.

A folder is made under another name and renamed when it is whole: nobody ever sees half of one. Folders that lack the
file `attached` are not ours and are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stallfree.errors import FingerprintError, InputError, StorageError, WaitError

ATTACH_SECONDS = 10.0
"""Longest wait for a folder that another process is just making or removing."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,119}")
_ATTACHED = "attached"
_PERSIST = "persist"
_MAKING = ".new-"
_REMOVING = ".del-"


def default_root() -> Path:
    """The folder of this user's shared memory: `$STALLFREE_ROOT`, else one in `/dev/shm`, else a temporary one.

    Where others may write too, it is the folder `stallfree-UID` in there.
    """
    if given := os.environ.get("STALLFREE_ROOT"):
        base = Path(given).absolute()
        if not _open_to_others(base):
            return base
    else:
        base = Path("/dev/shm")
        if not os.access(base, os.W_OK):
            base = Path(tempfile.gettempdir())
    return base / f"stallfree-{os.getuid()}"


def _open_to_others(path: Path) -> bool:
    try:
        return bool(os.stat(path).st_mode & 0o022)
    except OSError:
        return False


def user_root(store: str | Path) -> Path:
    """The folder of this user's caches below the folder `store` on a disk."""
    return Path(store).expanduser().absolute() / f"stallfree-{os.getuid()}"


def prepare_root(root: Path) -> None:
    """Make `root` with mode 0700 if it is missing. Raises `FingerprintError` if it is not this user's alone."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(root)
    except OSError as error:
        raise StorageError(f"the folder {root} for shared data cannot be made: {error}. Give another folder") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise FingerprintError(
            f"{root} belongs to user {found.st_uid} or is no folder, and you are user {os.getuid()}: "
            "a cache is read by its own user only. Give another folder"
        )
    if found.st_mode & 0o022:
        raise FingerprintError(
            f"other users may write to {root} (mode {stat.S_IMODE(found.st_mode):o}): "
            f"a cache is written by its own user only. Give another folder, or `chmod 700 {root}`"
        )


def check_name(name: str) -> str:
    """`name` if it can be the name of a folder, else `InputError`."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InputError(
            f"name={name!r} cannot name a cache: use 1 to 120 of the letters a-z and A-Z, digits, '.', '_' and '-', "
            "not starting with '.' or '-'"
        )
    return name


class SharedFolder:
    """Attach to the folder `name` below `root`, making it if it is not there.

    Args:
        name: letters, digits, `.`, `_` and `-`.
        root: the folder above; `default_root()` if None.
        initialize: called with the path of a new, still private folder to put files into it. Not called when the folder
            exists.
        persist: keep the folder when the last process leaves. Once anyone has asked for that, it holds for all.

    Attributes:
        path: the folder.
        created: whether this call made it.

    A forked child shares its parent's attachment and must not close it for the parent: `close` in a child only drops
    the child's part. Raises `WaitError` when another process has been making or removing the folder for 10 s,
    `StorageError` when something else has that name or the folder cannot be made.
    """

    def __init__(
        self, name: str, *, root: str | Path | None = None, initialize: Callable[[Path], None], persist: bool = False
    ) -> None:
        self.root = default_root() if root is None else Path(root)
        self.path = self.root / check_name(name)
        self.persist = persist
        self.created = False
        self._owner = os.getpid()
        prepare_root(self.root)
        self._fd = self._attach_or_create(initialize)

    def _attach_or_create(self, initialize: Callable[[Path], None]) -> int:
        deadline = time.monotonic() + ATTACH_SECONDS
        while True:
            fd = self._attach()
            if fd is not None:
                if self.persist:
                    _keep(self.path)
                return fd
            if self._is_free():
                fd = self._create(initialize)
                if fd is not None:
                    self.created = True
                    return fd
            if time.monotonic() > deadline:
                raise WaitError(f"another process holds {self.path} for itself for more than {ATTACH_SECONDS:.0f} s")
            time.sleep(0.001)

    def _attach(self) -> int | None:
        file = self.path / _ATTACHED
        try:
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        if _lock(fd, fcntl.LOCK_SH) and _same_file(fd, file):
            return fd
        os.close(fd)
        return None

    def _is_free(self) -> bool:
        """Whether there is nothing at `path`, or an empty folder. Raises `StorageError` if something else is there."""
        moved = False
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                found = os.listdir(fd)
                moved = not _same_file(fd, self.path)  # and being emptied under another name
            finally:
                os.close(fd)
        except FileNotFoundError:
            found = [self.path.name] if self.path.is_symlink() else []
        except OSError:
            found = [self.path.name]
        if moved:
            return False
        if found and _ATTACHED not in found:
            raise StorageError(f"{self.path} exists and is no stallfree folder: give another name or store")
        return not found

    def _create(self, initialize: Callable[[Path], None]) -> int | None:
        making = self.root / f"{_MAKING}{os.getpid()}-{secrets.token_hex(6)}"
        fd = -1
        try:
            making.mkdir(mode=0o700)
            fd = os.open(making / _ATTACHED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _lock(fd, fcntl.LOCK_SH)
            if self.persist:
                _keep(making)
            initialize(making)
            if _renamed(making, self.path):
                return fd
        except BaseException as error:
            _discard(fd, making)
            if not isinstance(error, OSError) or isinstance(error, StorageError):
                raise
            raise StorageError(f"the folder {self.path} cannot be made: {error}. Give another folder") from error
        _discard(fd, making)
        return None

    def close(self) -> None:
        """Leave the folder; the last one out removes it unless it persists. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if os.getpid() == self._owner and _lock(fd, fcntl.LOCK_EX) and not is_persistent(self.path):
                _remove(self.path, fd)
        finally:
            os.close(fd)


class Unheld:
    """A folder that others hold, and that this does not hold: it may vanish. Raises `StorageError` if it has already.

    Attributes:
        path: the folder.
        created: False.
    """

    created = False

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / _ATTACHED).exists():
            raise StorageError(f"{path} is gone: nobody uses it any more")

    def close(self) -> None:
        """Nothing."""


def _keep(path: Path) -> None:
    with contextlib.suppress(OSError):
        (path / _PERSIST).touch(mode=0o600)


def _renamed(making: Path, path: Path) -> bool:
    """Give the new folder its name; False if another process was faster."""
    try:
        os.rename(making, path)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    return True


def _discard(fd: int, making: Path) -> None:
    if fd >= 0:
        os.close(fd)
    shutil.rmtree(making, ignore_errors=True)


def sweep(root: Path) -> list[str]:
    """Remove the folders below `root` that no process is attached to and that need not persist; their names."""
    removed: list[str] = []
    with contextlib.suppress(OSError):
        for entry in list(root.iterdir()):
            if entry.is_symlink() or not entry.is_dir():
                continue
            if entry.name.startswith(_REMOVING):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(_MAKING):
                # Whoever makes it may not have locked it yet, so its number counts too.
                if not _pid_alive(entry.name) and not in_use(entry):
                    shutil.rmtree(entry, ignore_errors=True)
            elif not is_persistent(entry) and remove_unused(entry):
                removed.append(entry.name)
    return removed


def is_persistent(path: Path) -> bool:
    """Whether the folder `path` stays when nobody is attached to it."""
    return (path / _PERSIST).exists()


def in_use(path: Path) -> bool:
    """Whether any process is attached to the folder `path`."""
    try:
        fd = os.open(path / _ATTACHED, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


@contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Another path of `folder`: the address of a socket has room for 107 bytes."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def remove_unused(path: Path) -> bool:
    """Remove the folder `path` if no process is attached to it; whether it was removed."""
    try:
        fd = os.open(path / _ATTACHED, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _lock(fd, fcntl.LOCK_EX) and _remove(path, fd)
    finally:
        os.close(fd)


def _remove(path: Path, fd: int) -> bool:
    if not _same_file(fd, path / _ATTACHED):
        return False
    away = path.parent / f"{_REMOVING}{os.getpid()}-{secrets.token_hex(6)}"
    try:
        os.rename(path, away)
    except OSError:
        return False
    shutil.rmtree(away, ignore_errors=True)
    return True


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except OSError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _pid_alive(name: str) -> bool:
    try:
        os.kill(int(name.split("-")[1]), 0)
    except (ValueError, IndexError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
