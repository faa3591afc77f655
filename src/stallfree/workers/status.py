"""The status of a loader, in a small file that other processes of the same user can read at any time.

The file is in the folder of the loader's staging ring and is removed with it: the lock on that folder shows whether the
loader is alive, and files of killed processes are garbage-collected. A write takes about a microsecond and no lock. A
reader compares a sequence number before and after, which is odd during a write.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from stallfree.errors import StorageError
from stallfree.ipc.folders import in_use, is_root
from stallfree.platform import OPEN, allocate, at_fork, shares_memory
from stallfree.sources.cut_source import CutSource
from stallfree.sources.mapped import MapSource
from stallfree.stats import LoaderStats

FILE = "status"
INTERVAL = 0.25
"""Seconds between two updates."""

_MAGIC = 0x5741_4C4C_5354_0001
_SIZE = mmap.PAGESIZE
_NUMBER = struct.Struct("<Q")
_AT_NUMBER = _NUMBER.size
_AT_TEXT = 1024
_TEXT = struct.Struct("<256s256s")
_COUNTS = "".join("d" if field.type in ("float", float) else "q" for field in fields(LoaderStats))
_BODY = struct.Struct(f"<qddq{_COUNTS}")
"""Process, creation time of the loader, time of the update, epoch; then the counts."""
_AT_BODY = 2 * _NUMBER.size
_ATTEMPTS = 1000

_written: weakref.WeakSet[Status] = weakref.WeakSet()


class Status:
    """The writer: a file in the folder of the ring. Does nothing if the file cannot be created.

    Args:
        folder: returns the folder. Called at the first update, which creates the file.
        dataset: of the loader.
        begun: creation time of the loader, in seconds of `time.monotonic`.
        at_once: whether the first update is due immediately; else after `INTERVAL`, so that a short epoch creates no
            file.

    Attributes:
        due: time of the next update, in seconds of `time.monotonic`; infinite if the file cannot be created.
        made: whether the file exists.
    """

    def __init__(self, folder: Callable[[], Path], dataset: Any, begun: float, *, at_once: bool) -> None:
        self._folder, self._dataset, self._begun = folder, dataset, begun
        self._number = 0
        self._map: mmap.mmap | None = None
        self.made = False
        self.due = 0.0
        if not at_once or not shares_memory():
            self.postpone()

    def postpone(self) -> None:
        """Postpone the next update by `INTERVAL`: a shorter epoch creates no file."""
        self.due = time.monotonic() + INTERVAL if shares_memory() else float("inf")

    def publish(self, now: float, epoch: int, counts: Mapping[str, Any], waiting: float = 0.0) -> None:
        """Write the counts, in the order of `LoaderStats`, including `waiting` seconds of an ongoing wait."""
        there = self._map if self.made else self._make()
        if there is None:
            return
        self.due = now + INTERVAL
        self._number += 2
        if waiting:
            counts = {**counts, "wait_seconds": counts["wait_seconds"] + waiting}
        _NUMBER.pack_into(there, _AT_NUMBER, self._number - 1)
        _BODY.pack_into(there, _AT_BODY, os.getpid(), self._begun, now, epoch, *counts.values())
        _NUMBER.pack_into(there, _AT_NUMBER, self._number)

    def _make(self) -> mmap.mmap | None:
        if self.due == float("inf"):
            return None
        self.made, self.due = True, float("inf")
        with contextlib.suppress(OSError, ValueError, StorageError):
            self._map = _make(self._folder() / FILE)
            script = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
            _TEXT.pack_into(self._map, _AT_TEXT, _text(script or "python"), _text(name_of(self._dataset)))
            _NUMBER.pack_into(self._map, 0, _MAGIC)
            _written.add(self)
        return self._map

    def close(self) -> None:
        """Stop writing. The file is removed with its folder."""
        self.due, self._map = float("inf"), None


def _make(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | OPEN, 0o600)
    try:
        allocate(fd, 0, _SIZE)  # so that a full file system is an error here, not a signal later
        return mmap.mmap(fd, _SIZE)
    finally:
        os.close(fd)


def _text(text: str) -> bytes:
    return text.encode(errors="replace")[:255]


def name_of(dataset: Any) -> str:
    """Class name of a data set, and of the data set that it wraps."""
    inner = getattr(dataset, "source", None)
    inner = inner.dataset if isinstance(inner, (MapSource, CutSource)) else inner
    return type(dataset).__name__ + ("" if inner is None else f"({type(inner).__name__})")


def _forget() -> None:
    for status in list(_written):
        status.close()


at_fork(after_in_child=_forget)  # the loaders belong to the parent


@dataclass(frozen=True)
class LoaderStatus:
    """The last published status of a loader, less than a second old unless the training loop was busy.

    Attributes:
        key: identifies the loader on this host.
        pid: the iterating process.
        script: name of its script.
        dataset: class of the data set, and of the one that it wraps.
        epoch: the current epoch.
        begun: creation time of the loader, in seconds of `time.monotonic`.
        at: time of this update, on the same clock.
        stats: its counts, including an ongoing wait.
    """

    key: str
    pid: int
    script: str
    dataset: str
    epoch: int
    begun: float
    at: float
    stats: LoaderStats


def running_loaders(root: Path) -> list[LoaderStatus]:
    """This user's loaders below `root` whose process is alive, in the order of their creation."""
    found: list[LoaderStatus] = []
    if not is_root(root):
        return found
    with contextlib.suppress(OSError):
        for path in list(root.iterdir()):
            if path.name[0] != "." and (path / FILE).is_file() and in_use(path):
                status = _read(path)
                if status is not None and _alive(status.pid):
                    found.append(status)
    return sorted(found, key=lambda status: status.begun)


def _read(folder: Path) -> LoaderStatus | None:
    try:
        fd = os.open(folder / FILE, os.O_RDONLY | OPEN)
    except OSError:
        return None
    try:
        for _ in range(_ATTEMPTS):
            before = os.pread(fd, _NUMBER.size, _AT_NUMBER)
            data = os.pread(fd, _SIZE, 0)
            after = os.pread(fd, _NUMBER.size, _AT_NUMBER)
            if len(data) == _SIZE and before == after and _NUMBER.unpack(before)[0] % 2 == 0:
                return _unpack(folder, data)
            time.sleep(0)
    finally:
        os.close(fd)
    return None


def _unpack(folder: Path, data: bytes) -> LoaderStatus | None:
    if _NUMBER.unpack_from(data)[0] != _MAGIC or _NUMBER.unpack_from(data, _AT_NUMBER)[0] == 0:
        return None  # another version, or not written yet
    pid, begun, at, epoch, *values = _BODY.unpack_from(data, _AT_BODY)
    script, dataset = (text.rstrip(b"\0").decode(errors="replace") for text in _TEXT.unpack_from(data, _AT_TEXT))
    stats = replace(LoaderStats(*values), staging_bytes=_slots_bytes(folder))
    return LoaderStatus(f"{pid}-{begun}", pid, script, dataset, epoch, begun, at, stats)


def _slots_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.startswith("slot-"))
    return 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
