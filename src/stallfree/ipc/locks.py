"""A lock between processes that is released when its holder dies.

POSIX record locks belong to a process: the kernel releases them at its death, and a forked child does not inherit them.
A process loses *all* its locks on a file when it closes *any* descriptor of that file. All `FileLock` objects of a file
in a process therefore share one descriptor, and one thread lock.
"""

import contextlib
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from stallfree.errors import lock_held
from stallfree.platform import OPEN, at_fork, fcntl

CLAIMS = 255
"""Number of bytes that `claim_any` can return."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class _File:
    """An open file, and the locks that this process has on it."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | OPEN)
        self.users = 0
        self.thread_lock = threading.Lock()
        self.claims: dict[int, int] = {}  # byte, and the id of its `FileLock`

    def lock(self, byte: int) -> bool:
        """Lock a byte; returns False if another process has locked it."""
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            return True
        return False

    def unlock(self, byte: int) -> None:
        """Unlock a byte."""
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, byte)


_files: dict[tuple[int, int], _File] = {}
_registry_lock = threading.RLock()


def _after_fork() -> None:
    # A thread of the parent may have held these locks; it does not exist in the child, and neither do the record locks.
    global _registry_lock
    _registry_lock = threading.RLock()
    for file in _files.values():
        file.thread_lock = threading.Lock()
        file.claims.clear()


at_fork(after_in_child=_after_fork)


class FileLock:
    """The lock on byte 0 of the file at `path` (created if missing), and claims on its other bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _registry_lock:
            if not path.exists():
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | OPEN, 0o600))
            found = os.stat(path)  # a second descriptor could not be closed without losing the locks
            self._key = found.st_dev, found.st_ino
            while True:
                file = _files.get(self._key)
                if file is None:
                    file = _files[self._key] = _File(path)
                file.users += 1
                if _files.get(self._key) is file:  # else a finalizer has closed it in this thread
                    break
            self._file: _File | None = file

    @contextlib.contextmanager
    def hold(self, seconds: float, what: str) -> Iterator[None]:
        """Hold the lock. Raises `WaitError`, naming `what`, if it is not free within `seconds`."""
        file, deadline, pause = self._file, time.monotonic() + seconds, 0.0
        assert file is not None, f"the lock {self.path} is closed"
        if not file.thread_lock.acquire(timeout=seconds):
            raise lock_held(f"{what}: another thread of this process held {self.path} for {seconds:g} s: let it end")
        try:
            while not file.lock(0):
                if time.monotonic() > deadline:
                    raise lock_held(
                        f"{what}: another process (stopped?) held {self.path} for {seconds:g} s: end it, or resume it"
                    )
                time.sleep(pause)
                pause = min(pause + 0.00005, 0.002)
            try:
                yield
            finally:
                file.unlock(0)
        finally:
            file.thread_lock.release()

    def claim(self, byte: int) -> bool:
        """Claim `byte` (1 or more) until this process dies, releases or closes it; returns False if it is taken."""
        with _registry_lock:
            if (file := self._file) is None or byte in file.claims or not file.lock(byte):
                return False
            file.claims[byte] = id(self)
            return True

    def release(self, byte: int) -> None:
        """Release this object's claim on `byte`."""
        with _registry_lock:  # prevents another thread from claiming it in between and losing it
            if self._file is not None and self._file.claims.get(byte) == id(self):
                del self._file.claims[byte]
                self._file.unlock(byte)

    def claim_any(self) -> int:
        """Claim the lowest free byte and return its number. Raises `WaitError` if all are claimed."""
        if byte := next(filter(self.claim, range(1, CLAIMS + 1)), 0):
            return byte
        raise lock_held(f"all {CLAIMS} places in {self.path} are taken by running processes: use fewer")

    def claimed_elsewhere(self) -> bool:
        """Return whether another process has claimed any byte."""
        if self._file is None:
            return False
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 1, 0, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(self._file.fd, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Release this object's claims; the last object of this process for the file closes it. Idempotent."""
        with _registry_lock:
            if (file := self._file) is None:
                return
            for byte in list(file.claims):
                self.release(byte)
            self._file = None
            file.users -= 1
            if file.users == 0:
                del _files[self._key]
                file.thread_lock.acquire(timeout=2.0)  # a thread may be writing, and later ones find it taken
                os.close(file.fd)
