"""What all processes of a host share about a Smart Cache's window: where it is, and which positions were asked for.

One file beside the cache, mapped by everyone. It changes under the lock of its lock file, but for the positions asked
for, which are single stores.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from stallfree.errors import FingerprintError
from stallfree.locks import FileLock

FILLERS = 64
"""Fill processes of one cache, at most."""

_LOCK_SECONDS = 10.0
_HEADER = 64
_KEPT = 8
_NEVER = -1
_MASK = 2**64 - 1


class Field(enum.IntEnum):
    """What stands where in the header, as int64."""

    SIZE = 0
    REPLACE = 1
    TOTAL = 2
    POSITIONS = 3
    EPOCH = 4  # of the newest window, -1 before the first
    LATE = 5  # epochs that began with fewer new samples than they should have
    WAITED = 6  # nanoseconds that an epoch's beginning waited for new samples
    SKIPPED = 7  # samples left out because of an error
    SEED = 8  # of the order, modulo 2**64
    STARTS = 16  # (epoch, start) of the newest windows


class WindowState:
    """Attach to the state in `folder`, making it if it is not there.

    Args:
        folder: of the cache.
        size: of the window.
        replace: samples replaced per epoch.
        total: samples of the data set.
        positions: that may be asked for.
        seed: of the order, for a state that is made here.

    Raises `FingerprintError` if the state there is of another window.
    """

    def __init__(self, folder: Path, size: int, replace: int, total: int, positions: int, seed: int) -> None:
        self._arguments = (folder, size, replace, total, positions, seed)
        file = folder / "window"
        length = 8 * _HEADER + 8 * total + 4 * positions
        if not file.exists():
            _make(file, length, [size, replace, total, positions], seed)
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, found)
        finally:
            os.close(fd)
        self.header = np.frombuffer(self._map, np.int64, _HEADER)
        there = self.header[:4].tolist()
        if there != [size, replace, total, positions] or found != length:
            raise FingerprintError(
                f"the Smart Cache in {folder} has a window of {there[0]} of {there[2]} samples, {there[1]} replaced "
                f"per epoch; yours is {size} of {total}, {replace} replaced: give the same arguments, or another name"
            )
        self.unkept = np.frombuffer(self._map, np.int64, total, 8 * _HEADER)
        """Per id, 1 + the place at which it could not be had or stored; so nobody waits for it."""
        self.asked = np.frombuffer(self._map, np.int32, positions, 8 * _HEADER + 8 * total)
        """Per position, the last epoch in which it was asked for."""
        self._starts = self.header[Field.STARTS : Field.STARTS + 2 * _KEPT].reshape(_KEPT, 2)
        self._lock = FileLock(folder / "window-lock")

    @property
    def epoch(self) -> int:
        """Of the newest window; -1 before the first."""
        return int(self.header[Field.EPOCH])

    def start(self, epoch: int) -> int | None:
        """Where the window of `epoch` begins; None if that is not one of the newest."""
        row = self._starts[epoch % _KEPT]
        known, start = row.tolist()
        return start if known == epoch and row[0] == epoch else None

    def starts(self) -> list[tuple[int, int]]:
        """(epoch, start) of the newest windows, oldest first."""
        return sorted((epoch, start) for epoch, start in self._starts.tolist() if epoch >= 0)

    def put(self, epoch: int, start: int) -> None:
        """`epoch` is the newest, and its window begins at `start`. Windows of later epochs are forgotten."""
        self._starts[self._starts[:, 0] > epoch] = -1
        row = self._starts[epoch % _KEPT]
        row[0] = -1
        row[1] = start
        row[0] = epoch
        self.header[Field.EPOCH] = epoch

    @property
    def seed(self) -> int:
        """Of the order: that of the first process that came."""
        return int(self.header[Field.SEED])

    def reorder(self, seed: int) -> None:
        """The order has another seed, and no window has begun. Under the lock."""
        self.header[Field.SEED] = np.uint64(seed & _MASK).astype(np.int64)
        self.unkept[:] = 0
        self.put(-1, 0)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock. Raises `WaitError` when it is not free within 10 s."""
        with self._lock.hold(_LOCK_SECONDS, "moving the window of a Smart Cache"):
            yield

    def count(self, field: Field, number: int) -> None:
        """Add to a count."""
        with self.hold():
            self.header[field] += number

    def claim(self, filler: int) -> bool:
        """Become fill process `filler`, until this process ends; False if another is."""
        return self._lock.claim(1 + filler)

    def release(self, filler: int) -> None:
        """Be fill process `filler` no longer."""
        self._lock.release(1 + filler)

    def filled_by_others(self) -> bool:
        """Whether another process is a fill process."""
        return self._lock.claimed_elsewhere()

    def close(self) -> None:
        """Let go of file and lock."""
        self._lock.close()

    def __reduce__(self) -> tuple[object, ...]:
        return WindowState, self._arguments


def _make(file: Path, length: int, numbers: list[int], seed: int) -> None:
    """Make the file whole under another name and link it; whoever comes second takes the first one's."""
    draft = file.with_name(f"window-{os.getpid()}-{secrets.token_hex(4)}")
    header = np.zeros(_HEADER, np.int64)
    header[: len(numbers)] = numbers
    header[Field.EPOCH] = -1
    header[Field.SEED] = np.uint64(seed & _MASK).astype(np.int64)
    header[Field.STARTS : Field.STARTS + 2 * _KEPT] = -1
    total, positions = numbers[2], numbers[3]
    try:
        with open(draft, "xb") as out:
            out.write(header.tobytes())
            out.write(bytes(8 * total))
            out.write(np.full(positions, _NEVER, np.int32).tobytes())
        assert draft.stat().st_size == length
        with contextlib.suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)
