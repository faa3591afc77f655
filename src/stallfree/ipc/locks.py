"""A lock between processes that is released when its holder dies.

POSIX record locks belong to a process: the kernel releases them at its death, and a forked child does not inherit them.
A process loses *all* its locks on a file when it closes *any* descriptor of that file. All `FileLock` objects of a file
in a process therefore share one descriptor, and one thread lock.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stallfree.errors import lock_held
from stallfree.platform import OPEN, at_fork, fcntl, shares_memory

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


CLAIMS = 255
"""Number of bytes that `claim_any` can return."""


class _Open:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self.thread_lock = threading.Lock()
        self.claims: set[int] = set()


_open_files: dict[tuple[int, int], _Open] = {}
_registry_lock = threading.RLock()


def _after_fork() -> None:
    # A thread of the parent may have held these locks; it does not exist in the child, and neither do the record locks.
    global _registry_lock
    _registry_lock = threading.RLock()
    for entry in _open_files.values():
        entry.thread_lock = threading.Lock()
        entry.claims.clear()


at_fork(after_in_child=_after_fork)


class FileLock:
    """The lock on byte 0 of the file at `path` (created if missing), and claims on its other bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._claims: set[int] = set()
        self._pid = os.getpid()
        with _registry_lock:
            self._entry: _Open | None = self._open()

    def _open(self) -> _Open:
        # Looked up before opening: a second descriptor could not be closed without losing the locks.
        found: os.stat_result | None = None
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self.path)
        if found is None:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | OPEN, 0o600))
            found = os.stat(self.path)
        self._key = (found.st_dev, found.st_ino)
        while True:
            entry = _open_files.get(self._key)
            if entry is None:
                entry = _open_files[self._key] = _Open(os.open(self.path, os.O_RDWR | OPEN))
            entry.users += 1
            if _open_files.get(self._key) is entry:  # else a finalizer has closed it in this thread
                return entry

    @contextmanager
    def hold(self, seconds: float, what: str) -> Iterator[None]:
        """Hold the lock. Raises `WaitError`, naming `what`, if it is not free within `seconds`."""
        entry = self._entry
        if entry is None:
            raise ValueError(f"the lock {self.path} is closed")
        deadline = time.monotonic() + seconds
        if not entry.thread_lock.acquire(timeout=seconds):
            raise lock_held(f"{what}: another thread of this process held {self.path} for {seconds:g} s: let it end")
        try:
            pause = 0.0
            while not _try(entry.fd, 0):
                if time.monotonic() > deadline:
                    raise lock_held(
                        f"{what}: another process (stopped?) held {self.path} for {seconds:g} s: end it, or resume it"
                    )
                time.sleep(pause)
                pause = min(pause + 0.00005, 0.002)
            try:
                yield
            finally:
                _free(entry.fd, 0)
        finally:
            entry.thread_lock.release()

    def claim(self, byte: int) -> bool:
        """Claim `byte` (1 or more) until this process dies, releases or closes it; returns False if it is taken."""
        entry = self._entry
        if entry is None:
            return False
        with _registry_lock:
            if byte in entry.claims or not _try(entry.fd, byte):
                return False
            entry.claims.add(byte)
        if self._pid != os.getpid():  # the parent's claims are not this process's
            self._claims, self._pid = set(), os.getpid()
        self._claims.add(byte)
        return True

    def release(self, byte: int) -> None:
        """Release the claim on `byte`."""
        if self._entry is not None and self._pid == os.getpid() and byte in self._claims:
            with _registry_lock:  # prevents another thread from claiming it in between and losing it
                self._claims.discard(byte)
                self._entry.claims.discard(byte)
                _free(self._entry.fd, byte)

    def claim_any(self) -> int:
        """Claim the lowest free byte and return its number. Raises `WaitError` if all are claimed."""
        for byte in range(1, CLAIMS + 1):
            if self.claim(byte):
                return byte
        raise lock_held(
            f"all {CLAIMS} places in {self.path} are taken by running processes: use fewer, or another name"
        )

    def claimed_elsewhere(self) -> bool:
        """Return whether another process has claimed any byte."""
        return self._is_claimed(1, 0)

    def count_claims(self) -> int:
        """Return how many of the bytes 1 to `CLAIMS` other processes have claimed."""
        return sum(self._is_claimed(byte, 1) for byte in range(1, CLAIMS + 1))

    def _is_claimed(self, start: int, length: int) -> bool:
        if self._entry is None or not shares_memory():
            return False
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(self._entry.fd, fcntl.F_GETLK, asked))
        return bool(kind != fcntl.F_UNLCK)

    def close(self) -> None:
        """Release this object's claims; the last object of this process for the file closes it."""
        entry = self._entry
        if entry is None:
            return
        for byte in list(self._claims):
            self.release(byte)
        self._entry = None
        with _registry_lock:
            entry.users -= 1
            if entry.users == 0:
                del _open_files[self._key]
                os.close(entry.fd)


def _try(fd: int, byte: int) -> bool:
    if not shares_memory():
        return True  # only threads of this process compete
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _free(fd: int, byte: int) -> None:
    if shares_memory():
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, byte)
