"""Folders that several processes share; the last process removes them.

A cache, a staging ring and a group each have a folder below a root that belongs to one user (mode 0700). Every attached
process holds a shared `flock` on the file `attached`, which the kernel releases when the process dies. A process that
gets the lock exclusively is therefore the only one attached. The last process to leave removes the folder; `sweep`
removes the folders of killed processes.

Records of a cache may contain pickles, so no other user may replace the root or anything in it. Each folder above
belongs to this user or to root, and either no other user may write to it or it is sticky. `prepare_root` checks them
from the file system's root down on open descriptors, so that none can be swapped after its check; paths below the root
stay valid. A folder is created under a temporary name and renamed when complete, so no process sees a partial one.
Folders without the file `attached` do not belong to stallfree and are never touched.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from stallfree.errors import InputError, StorageError, folder_gone, folder_owner, lock_held, name_invalid
from stallfree.platform import OPEN, fcntl, need_linux, shares_memory, user_id

ATTACH_SECONDS = 10.0
"""Longest wait for a folder that another process is creating or removing, in seconds."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,119}")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/|[\w.-]+:[0-9]+$")
"""Matches redis://localhost:6379 and localhost:6379, also after `Path` has merged the slashes."""

_ATTACHED, _PERSIST = "attached", "persist"
_MAKING, _REMOVING = ".new-", ".del-"
_OVERFLOW_ID, _EVERY_ID, _ID_MAP = 65534, str((1 << 32) - 1), Path("/proc/self/uid_map")
"""The owner of the files of the host's root in a container with users of its own; others map every id."""

_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | OPEN

# -- the root ---------------------------------------------------------------------------------------------------------


def default_root() -> Path:
    """Return the folder of this user's shared memory: `stallfree-UID` in `$STALLFREE_ROOT` or `/dev/shm`.

    If neither is there, it is in a temporary folder, with a warning.
    """
    base = os.environ.get("STALLFREE_ROOT", "/dev/shm")
    if base == "/dev/shm" and not os.access(base, os.W_OK):
        base = os.environ.get("TMPDIR", "/tmp")
        if shares_memory():
            warnings.warn(
                f"/dev/shm cannot be written to, so shared data is in {base}, which may be on a disk and slower. Make "
                "/dev/shm writable, or set STALLFREE_ROOT to a folder in memory",
                RuntimeWarning,
                stacklevel=1,  # of one place, which Python shows once
            )
    return Path(os.path.realpath(base)) / f"stallfree-{user_id()}"


def is_path(value: object) -> bool:
    """Return whether `value` can be a file path: text or path-like, not empty, and without a null byte."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return isinstance(text, str) and text != "" and "\0" not in text


def is_address(value: object) -> bool:
    """Return whether `value` looks like a server address rather than a path."""
    return _ADDRESS.match(str(value)) is not None


def user_root(store: str | Path) -> Path:
    """Return the folder of this user's caches below the folder `store` on a disk.

    Raises `InputError` if `store` is not a path.
    """
    if is_address(store) or not is_path(store):
        raise InputError(f"store={store!r:.80}: give 'memory', the path of a folder, a DiskTier or a RedisStore")
    return Path(os.path.realpath(Path(store).expanduser())) / f"stallfree-{user_id()}"


def prepare_root(root: Path) -> Path:
    """Create `root` with mode 0700 if it is missing; returns its path without links.

    Raises `FingerprintError` if other users may write to it or could replace it, `PlatformError` on systems other than
    Linux.
    """
    try:
        return _checked(root)
    except OSError as error:
        raise StorageError(f"{root} cannot be made: {error}. Give another folder, or set STALLFREE_ROOT") from error


def is_root(root: Path) -> bool:
    """Return whether the folder `root` exists. Raises like `prepare_root` if other users may write to it."""
    with contextlib.suppress(StorageError):
        return os.path.isdir(root) and bool(prepare_root(root))
    return False


def _checked(root: Path) -> Path:
    """Return the path of `root` without links, after creating it and checking it and the folders above it."""
    need_linux("memory that processes share", "leave the cache out")
    root = Path(os.path.realpath(root.parent)) / root.name
    fd, above = os.open("/", os.O_PATH | _FOLDER), Path("/")
    try:
        for part in root.parts[1:]:
            _check(fd, above, root)
            try:
                below = os.open(part, os.O_PATH | _FOLDER, dir_fd=fd)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
                below = os.open(part, os.O_PATH | _FOLDER, dir_fd=fd)
            os.close(fd)
            fd, above = below, above / part
        _check(fd, above, root)
    finally:
        os.close(fd)
    return root


def _check(fd: int, folder: Path, root: Path) -> None:
    found, mine = os.fstat(fd), user_id()
    owner, mode, within = found.st_uid, stat.S_IMODE(found.st_mode), "" if folder == root else f" above {root}"
    of_system = owner == 0 or (owner == _OVERFLOW_ID and _EVERY_ID not in _ID_MAP.read_text())
    owned = owner == mine or (within and of_system)
    closed = not mode & 0o022 or (within and mode & stat.S_ISVTX)  # an ACL shows in the mode of the group
    if not (owned and closed):
        raise folder_owner(
            f"the folder {folder}{within} belongs to user {owner} and has the mode {mode:o} (you are user {mine}): "
            "other users could replace a cache in it with a forged one. Give a folder of your own, in folders of your "
            f"own or of root, or `chmod go-w {folder}`"
        )


# -- the folders in it ------------------------------------------------------------------------------------------------


def check_name(name: str, argument: str = "name") -> str:
    """Return `name`, the value of an argument, if it is a valid folder name. Raises `InputError` otherwise."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise name_invalid(
            f"{argument}={name!r} cannot name a cache or a group: use 1 to 120 of the letters a-z and A-Z, digits, "
            "'.', '_' and '-', not starting with '.' or '-'"
        )
    return name


@contextlib.contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """Yield a short path of `folder`, for sockets in it: their address has space for 107 bytes."""
    fd = os.open(folder, os.O_PATH | _FOLDER)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


class SharedFolder:
    """An attachment to the folder `name` below `root`, which is created if it does not exist.

    Args:
        name: letters, digits, `.`, `_` and `-`.
        root: the parent folder; `default_root()` if None.
        initialize: called with the path of a new, still private folder to create its files. Not called if the folder
            exists. None: the folder must exist.
        persist: keep the folder when the last process leaves. Once set by any process, it holds for all.

    Attributes:
        path: the folder.
        created: whether this call created it.

    A forked child shares its parent's attachment: `close` in the child drops only the child's part. Raises `WaitError`
    if another process has been removing the folder for 10 s, or the name is taken by something else, and
    `StorageError` if the folder cannot be created.
    """

    def __init__(
        self, name: str, *, root: Path | None = None, initialize: Callable[[Path], object] | None, persist: bool = False
    ) -> None:
        check_name(name)
        self.root = prepare_root(default_root() if root is None else root)
        self.path, self.created, self._owner = self.root / name, False, os.getpid()
        deadline = time.monotonic() + ATTACH_SECONDS
        while True:
            fd = _locked(self.path, fcntl.LOCK_SH)
            if fd is None and not os.path.lexists(self.path):
                if initialize is None:
                    raise folder_gone(f"{self.path} is gone, with the process that made it. Make a new loader")
                fd = self._create(initialize)
            if fd is not None:
                break
            if time.monotonic() > deadline:
                raise lock_held(f"{self.path} is locked by a process, or no stallfree folder: give another name")
            time.sleep(0.001)
        self._fd = fd
        if persist:
            with contextlib.suppress(OSError):
                (self.path / _PERSIST).touch(mode=0o600)

    def _create(self, initialize: Callable[[Path], object]) -> int | None:
        """Create the folder; returns None if another process created it first."""
        making = self.root / f"{_MAKING}{os.getpid()}-{secrets.token_hex(6)}"
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, making, ignore_errors=True)
            try:
                making.mkdir(mode=0o700)
                fd = os.open(making / _ATTACHED, os.O_RDWR | os.O_CREAT | OPEN, 0o600)
                undo.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_SH)
                initialize(making)
                os.rename(making, self.path)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    return None
                if isinstance(error, StorageError):
                    raise
                raise StorageError(f"the folder {self.path} cannot be made: {error}. Give another folder") from error
            undo.pop_all()
            self.created = True
            return fd

    def close(self) -> None:
        """Leave the folder; the last process removes it unless it persists. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(BlockingIOError):
                if os.getpid() == self._owner:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if not is_persistent(self.path):
                        _remove(self.path, fd)
            os.close(fd)


def sweep(root: Path) -> list[str]:
    """Remove unattached, non-persistent folders below `root`; returns their names."""
    removed: list[str] = []
    with contextlib.suppress(OSError):
        for entry in list(root.iterdir()) if is_root(root) else ():
            if entry.name.startswith(_REMOVING):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(_MAKING):
                maker = entry.name.removeprefix(_MAKING).partition("-")[0]  # it may not have locked it yet
                if not os.path.exists(f"/proc/{maker}") and not in_use(entry):
                    shutil.rmtree(entry, ignore_errors=True)
            elif not is_persistent(entry) and remove_unused(entry):
                removed.append(entry.name)
    return removed


def is_persistent(path: Path) -> bool:
    """Return whether the folder `path` is kept when no process is attached to it."""
    return (path / _PERSIST).exists()


def in_use(path: Path) -> bool:
    """Return whether any process is attached to the folder `path`."""
    fd = _locked(path, fcntl.LOCK_EX)
    if fd is not None:
        os.close(fd)
    return fd is None and (path / _ATTACHED).exists()


def remove_unused(path: Path) -> bool:
    """Remove the folder `path` if no process is attached to it; returns whether it was removed."""
    fd = _locked(path, fcntl.LOCK_EX)
    removed = fd is not None and _remove(path, fd)
    if fd is not None:
        os.close(fd)
    return removed


def _remove(path: Path, fd: int) -> bool:
    away = path.parent / f"{_REMOVING}{os.getpid()}-{secrets.token_hex(6)}"
    with contextlib.suppress(OSError):
        if _is_at(fd, path / _ATTACHED):
            os.rename(path, away)
            shutil.rmtree(away, ignore_errors=True)
            return True
    return False


def _locked(path: Path, kind: int) -> int | None:
    """Return a descriptor of the file `attached` in `path` that holds this lock; None if it cannot be had now."""
    fd = -1
    with contextlib.suppress(OSError):
        fd = os.open(path / _ATTACHED, os.O_RDWR | OPEN)
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        if _is_at(fd, path / _ATTACHED):
            return fd
    if fd >= 0:
        os.close(fd)
    return None


def _is_at(fd: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False
