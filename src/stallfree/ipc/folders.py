"""Folders that several processes share; the last process removes them.

A cache, a staging ring and a throttle each have a folder below a root that belongs to one user (mode 0700). Every
attached process holds a shared `flock` on the file `attached`, which the kernel releases when the process dies. A
process that gets the lock exclusively is therefore the only one attached. The last process to leave removes the folder;
`sweep` removes the folders of killed processes.

No other user can replace the root (see ipc/owned.py) or anything in it, so paths below it stay valid. A folder is
created under a temporary name and renamed when complete, so no process sees a partial one. Folders without the file
`attached` do not belong to stallfree and are never touched.

Where processes share no memory (see `platform`), the root and its folders are private to this process.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import multiprocessing
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from stallfree.errors import (
    InputError,
    StallfreeError,
    StorageError,
    folder_gone,
    folder_owner,
    lock_held,
    name_invalid,
)
from stallfree.ipc.owned import opened_base
from stallfree.platform import OPEN, fcntl, need_linux, shares_memory, user_id

ATTACH_SECONDS = 10.0
"""Longest wait for a folder that another process is creating or removing, in seconds."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,119}")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|[\w.-]+:[0-9]+$")
"""Matches redis://localhost:6379 and localhost:6379, also after `Path` has merged the slashes."""
_ATTACHED = "attached"
_PERSIST = "persist"
_MAKING = ".new-"
_REMOVING = ".del-"
_IN_MEMORY = {"tmpfs", "ramfs"}

_users: Counter[Path] = Counter()  # attachments per folder, where folders are private to the process
_users_lock = threading.RLock()


def default_root() -> Path:
    """Return the folder of this user's shared memory: `$STALLFREE_ROOT`, else in `/dev/shm`, else a temporary one.

    If other users may write there, it is the subfolder `stallfree-UID`. A temporary folder on a disk causes one
    warning. Raises `StorageError` if no folder is writable.
    """
    if not shares_memory():
        return _own_root()
    if given := os.environ.get("STALLFREE_ROOT"):
        base = Path(os.path.realpath(given))
        if not _open_to_others(base):
            return base
    else:
        base = Path("/dev/shm")
        if not os.access(base, os.W_OK):
            base = _temporary()
    return base / f"stallfree-{user_id()}"


@lru_cache(maxsize=1)
def _temporary() -> Path:
    try:
        base = Path(tempfile.gettempdir())
    except OSError as error:
        raise StorageError(
            f"there is no folder for shared data: /dev/shm cannot be written to, and {error}. Make one of them "
            "writable, or set STALLFREE_ROOT to a folder that is, best one in memory"
        ) from error
    if multiprocessing.parent_process() is None and _file_system(base) not in _IN_MEMORY:
        warnings.warn(
            f"/dev/shm cannot be written to, so shared data lies in {base}, which is on a disk and may be slower. Make "
            "/dev/shm writable, or set STALLFREE_ROOT to a folder in memory",
            RuntimeWarning,
            stacklevel=2,
        )
    return base


def _file_system(path: Path) -> str:
    """Return the type of the file system of `path`, such as "tmpfs"; empty if it is unknown."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, here, *_ = line.split(" ")
            if len(place) >= best and path.resolve().is_relative_to(place):
                best, kind = len(place), here
    return kind


@lru_cache(maxsize=1)
def _own_root() -> Path:
    """Create a temporary folder for this process."""
    root = Path(tempfile.mkdtemp(prefix="stallfree-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def _open_to_others(path: Path) -> bool:
    try:
        return bool(os.stat(path).st_mode & 0o022)
    except OSError:
        return False


def is_path(value: object) -> bool:
    """Return whether `value` can be a file path: text or path-like, not empty, and without a null byte."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return isinstance(text, str) and text != "" and "\0" not in text


def is_address(value: object) -> bool:
    """Return whether `value` looks like a server address rather than a path."""
    return _ADDRESS.match(str(value)) is not None


def user_root(store: str | Path) -> Path:
    """Return the folder of this user's caches below the folder `store` on a disk.

    Raises `InputError` if `store` is not a path, `PlatformError` on systems other than Linux.
    """
    if is_address(store):
        raise InputError(
            f"store={str(store)!r:.80} is an address, but a string must be the path of a folder: give "
            "stallfree.RedisStore(hosts=[...], capacity_per_node=...) for servers of Redis or Valkey"
        )
    if not is_path(store):
        raise InputError(f"store={store!r:.80}: give 'memory', the path of a folder, a RedisStore or a DiskTier")
    need_linux(f"a cache on a disk (store={str(store)!r})", "use store='memory'")
    return Path(os.path.realpath(Path(store).expanduser())) / f"stallfree-{user_id()}"


def prepare_root(root: Path) -> Path:
    """Create `root` with mode 0700 if it is missing; returns its path without links.

    Raises `FingerprintError` if other users may write to it or could replace it.
    """
    if not shares_memory():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return root
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        return _checked_root(root, make=True)
    except OSError as error:
        raise StorageError(f"the folder {root} for shared data cannot be made: {error}. Give another folder") from error


def is_root(root: Path) -> bool:
    """Return whether the folder `root` exists. Raises like `prepare_root` if other users may write to it."""
    if not shares_memory():
        return root.is_dir()
    try:
        _checked_root(root, make=False)
    except OSError:
        return False
    return True


def _checked_root(root: Path, make: bool) -> Path:
    """Return the path of `root` without links, after checking the owners of `root` and of the folders above it."""
    base = Path(os.path.realpath(root.parent))
    with opened_base(base) as parent:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(root.name, 0o700, dir_fd=parent)
        fd = os.open(root.name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
    if found.st_uid != user_id():
        raise folder_owner(
            f"{root} belongs to user {found.st_uid}, and you are user {user_id()}: "
            "a cache is read by its own user only. Give another folder"
        )
    if found.st_mode & 0o022:
        raise folder_owner(
            f"other users may write to {root} (mode {stat.S_IMODE(found.st_mode):o}): "
            f"a cache is written by its own user only. Give another folder, or `chmod 700 {root}`"
        )
    return base / root.name


def check_name(name: str) -> str:
    """Return `name` if it is a valid folder name. Raises `InputError` otherwise."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise name_invalid(
            f"name={name!r} cannot name a cache: use 1 to 120 of the letters a-z and A-Z, digits, '.', '_' and '-', "
            "not starting with '.' or '-'"
        )
    return name


class SharedFolder:
    """An attachment to the folder `name` below `root`, which is created if it does not exist.

    Args:
        name: letters, digits, `.`, `_` and `-`.
        root: the parent folder; `default_root()` if None.
        initialize: called with the path of a new, still private folder to create its files. Not called if the folder
            exists.
        persist: keep the folder when the last process leaves. Once set by any process, it holds for all.

    Attributes:
        path: the folder.
        created: whether this call created it.

    A forked child shares its parent's attachment: `close` in the child drops only the child's part. Raises `WaitError`
    if another process has been creating or removing the folder for 10 s. Raises `StorageError` if the name is taken by
    something else, or the folder cannot be created.
    """

    def __init__(
        self, name: str, *, root: str | Path | None = None, initialize: Callable[[Path], None], persist: bool = False
    ) -> None:
        check_name(name)
        self.root = prepare_root(default_root() if root is None else Path(root))
        self.path = self.root / name
        self.persist = persist
        self.created = False
        self._owner = os.getpid()
        self._fd = self._attach_or_create(initialize) if shares_memory() else self._take(initialize)

    def _take(self, initialize: Callable[[Path], None]) -> int:
        """Attach to a folder that is private to this process, creating it if needed; returns a dummy descriptor."""
        with _users_lock:
            if not self.path.exists():
                try:
                    self.path.mkdir(mode=0o700)
                    initialize(self.path)
                except BaseException:
                    shutil.rmtree(self.path, ignore_errors=True)
                    raise
                self.created = True
            _users[self.path] += 1
        return 0

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
                raise lock_held(
                    f"another process has locked {self.path} for more than {ATTACH_SECONDS:.0f} s: end it, or give "
                    "another name"
                )
            time.sleep(0.001)

    def _attach(self) -> int | None:
        file = self.path / _ATTACHED
        try:
            fd = os.open(file, os.O_RDWR | OPEN)
        except OSError:
            return None
        if _lock(fd, fcntl.LOCK_SH) and _same_file(fd, file):
            return fd
        os.close(fd)
        return None

    def _is_free(self) -> bool:
        """Return whether `path` is missing or an empty folder. Raises `StorageError` if anything else is there."""
        moved = False
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                found = os.listdir(fd)
                moved = not _same_file(fd, self.path)  # renamed, and being removed
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
            fd = os.open(making / _ATTACHED, os.O_RDWR | os.O_CREAT | OPEN, 0o600)
            _lock(fd, fcntl.LOCK_SH)
            if self.persist:
                _keep(making)
            initialize(making)
            if _renamed(making, self.path):
                return fd
        except BaseException as error:
            _discard(fd, making)
            if not isinstance(error, OSError) or isinstance(error, StallfreeError):
                raise
            raise StorageError(f"the folder {self.path} cannot be made: {error}. Give another folder") from error
        _discard(fd, making)
        return None

    def fileno(self) -> int:
        """Return the descriptor that holds this process's attachment; -1 after `close`."""
        return self._fd

    def close(self) -> None:
        """Leave the folder; the last process removes it unless it persists. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if not shares_memory():
            with _users_lock:
                _users[self.path] -= 1
                remove_unused(self.path)
            return
        try:
            if os.getpid() == self._owner and _lock(fd, fcntl.LOCK_EX) and not is_persistent(self.path):
                _remove(self.path, fd)
        finally:
            os.close(fd)


def attach(path: Path) -> SharedFolder:
    """Attach to the folder `path`. Raises `StorageError` if it no longer exists."""
    return SharedFolder(path.name, root=path.parent, initialize=_must_exist)


def _must_exist(path: Path) -> None:
    raise folder_gone(f"the folder {path} is gone: the process that made it has ended. Make a new loader")


def _keep(path: Path) -> None:
    with contextlib.suppress(OSError):
        (path / _PERSIST).touch(mode=0o600)


def _renamed(making: Path, path: Path) -> bool:
    """Rename the new folder to its final name; returns False if another process created it first."""
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
    """Remove unattached, non-persistent folders below `root`; returns their names."""
    removed: list[str] = []
    if not shares_memory() or not is_root(root):
        return removed
    with contextlib.suppress(OSError):
        for entry in list(root.iterdir()):
            if entry.is_symlink() or not entry.is_dir():
                continue
            if entry.name.startswith(_REMOVING):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(_MAKING):
                # The process that creates it may not have locked it yet, so its PID is checked too.
                if not _pid_alive(entry.name) and not in_use(entry):
                    shutil.rmtree(entry, ignore_errors=True)
            elif not is_persistent(entry) and remove_unused(entry):
                removed.append(entry.name)
    return removed


def is_persistent(path: Path) -> bool:
    """Return whether the folder `path` is kept when no process is attached to it."""
    return (path / _PERSIST).exists()


def in_use(path: Path) -> bool:
    """Return whether any process is attached to the folder `path`."""
    if not shares_memory():
        return _users[path] > 0
    try:
        fd = os.open(path / _ATTACHED, os.O_RDWR | OPEN)
    except OSError:
        return False
    try:
        return not _lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


@contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Yield a short path of `folder`: a socket address has room for 107 bytes."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def remove_unused(path: Path) -> bool:
    """Remove the folder `path` if no process is attached to it; returns whether it was removed."""
    if not shares_memory():
        with _users_lock:
            if not _users[path]:
                del _users[path]
                shutil.rmtree(path, ignore_errors=True)
            return path not in _users
    try:
        fd = os.open(path / _ATTACHED, os.O_RDWR | OPEN)
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
