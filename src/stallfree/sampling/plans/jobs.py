"""Several jobs on one cache: how much each sample matters to all of them together.

A loss of one model says nothing beside a loss of another, so each job gives the relative importance of a sample, its
place among the losses of that job (RIV), and what the cache gains it, its benefit. What the samples are worth in all
(AIV) is the sum of benefit times RIV over the jobs that gain enough (Chen et al., "iCACHE", HPCA 2023, section IV-E).

There is no server. A job is a claim on a byte of a lock file, which the kernel takes from a dead process, and a file of
that number, which is written under another name and renamed. Whoever looks removes the files of those that are gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
import warnings
import weakref
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.errors import InputError
from stallfree.ipc.locks import FileLock
from stallfree.platform import OPEN

Array = npt.NDArray[Any]

THRESHOLD = 1.5
"""Least benefit with which a job's importance counts, if there is one that has it."""

LOCK_SECONDS = 2.0
"""A job that does not get the lock for so long uses its own importance alone for now."""

_HEADER = struct.Struct("<8sqd")  # magic, number of ids, benefit
_MAGIC = b"sfjobs1\n"
_FILE = re.compile(r"(job|new)-([0-9]{1,3})")


class Jobs:
    """The jobs that use one cache, and this process as one of them from its first `publish` on.

    A job is gone when it has called `close`, was freed or has ended, however it ended: at the next `combined`, by
    anyone, it is not in the sum, and its file is removed. A forked child is not the job: it joins as one of its own if
    it publishes. Several jobs may be in one process.

    Memory: a file of 4 bytes per id for each job, in the folder of the cache (shared memory, unless the cache is on a
    disk) and beyond its capacity; twice that while it is written anew. In the process 4 bytes per id, and for each job
    while they are added up. When the file system is full, or all 255 places are taken, there is one warning, and the
    job uses its own importance alone until it can publish again.

    Args:
        folder: of the cache (`SampleCache.path`). The files lie in `importance` below it, and go with it.
        num_ids: number of samples of the data set.

    Raises `InputError` after `close`, and for values that cannot be used.
    """

    def __init__(self, folder: str | Path, num_ids: int) -> None:
        self.num_ids = num_ids
        self._place = _Place(Path(folder) / "importance")
        self._own: tuple[Array, float] | None = None
        self._apart = False  # the last `publish` failed
        self._warned = False
        self._leave = weakref.finalize(self, self._place.leave)

    def publish(self, importance: Any, benefit: float) -> None:
        """Publish how much each sample matters to this job, in place of what it published before.

        Args:
            importance: a number from 0 to 1 for each id: the place of its loss among all.
            benefit: time of an epoch without the cache over that with it; see `loader.benefit`.
        """
        self._check_open()
        values = self._checked(importance)
        if not isinstance(benefit, Real) or isinstance(benefit, bool) or not 0 <= benefit < math.inf:
            raise InputError(f"benefit={benefit!r}: give a number, 0 or more: how many times faster with the cache")
        self._own = values, float(benefit)
        try:
            self._place.write([_HEADER.pack(_MAGIC, self.num_ids, benefit), values.data])
            self._apart = False
        except OSError as error:  # a `WaitError` too
            self._apart = True
            self._warn(error)

    def combined(self) -> tuple[Array, int]:
        """What each sample is worth to the jobs that have published and live, and how many these are.

        The sum of benefit times importance, float64 per id, over those with a benefit of at least 1.5; over all, if
        there is none. Zeros if nobody has published.
        """
        self._check_open()
        found = None
        if not self._apart:
            try:
                found = [job for data in self._place.read_living() if (job := self._parsed(data)) is not None]
            except OSError as error:
                self._warn(error)
        if found is None:
            found = [] if self._own is None else [self._own]
        enough = any(benefit >= THRESHOLD for _, benefit in found)
        total = np.zeros(self.num_ids)
        for values, benefit in found:
            if benefit >= THRESHOLD or not enough:
                total += np.multiply(values, benefit, dtype=np.float64)
        return total, len(found)

    def _parsed(self, data: bytes) -> tuple[Array, float] | None:
        """What a job has published, and its benefit; None if that is not whole."""
        if len(data) != _HEADER.size + 4 * self.num_ids:
            return None
        magic, num_ids, benefit = _HEADER.unpack_from(data)
        if magic != _MAGIC or num_ids != self.num_ids or not 0 <= benefit < math.inf:
            return None
        return np.frombuffer(data, "<f4", offset=_HEADER.size), benefit

    def _checked(self, importance: Any) -> Array:
        try:
            values = np.array(importance, "<f4")
        except (TypeError, ValueError):
            values = np.empty((0, 0), "<f4")
        if values.shape != (self.num_ids,) or not (values.min() >= 0 and values.max() <= 1):
            raise InputError(
                f"importance={importance!r:.80}: give a number from 0 to 1 for each of {self.num_ids} ids, the place "
                "of its loss among all"
            )
        return values

    def _check_open(self) -> None:
        if not self._leave.alive:
            raise InputError("this job has left: make a new Jobs")

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the jobs of this cache cannot exchange how important samples are ({error}): this one goes by "
                "its own losses alone for now. A larger /dev/shm helps if it is full",
                RuntimeWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Leave: this job counts no more. May be called twice. Happens by itself when this object is freed."""
        self._leave()


class _Place:
    """The number of one process among the jobs in `folder`, and its file. Nothing is made before it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: FileLock | None = None
        self._number = 0
        self._pid = -1  # whose number it is

    def write(self, parts: list[Any]) -> None:
        """Let this job's file be these parts. Raises `OSError`; then there is none."""
        try:
            with self._held():
                number = self._join()
            new = self._folder / f"new-{number}"
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | OPEN, 0o600), "wb") as file:
                for part in parts:
                    file.write(part)
            os.replace(new, self._folder / f"job-{number}")
        except OSError:
            self._remove_own()
            raise

    def read_living(self) -> list[bytes]:
        """The files of the jobs that live. Those of the others are removed."""
        found: list[bytes] = []
        with self._held() as lock:
            for name in sorted(os.listdir(self._folder)):
                match = _FILE.fullmatch(name)
                if match is None:
                    continue
                number = int(match[2])
                if lock.claim(number):  # nobody has it
                    _remove(self._folder, number)
                    lock.release(number)
                elif match[1] == "job":
                    with contextlib.suppress(FileNotFoundError):  # it is just leaving
                        found.append((self._folder / name).read_bytes())
        return found

    @contextlib.contextmanager
    def _held(self) -> Iterator[FileLock]:
        """Hold the lock under which places are taken and looked at. Raises `WaitError`."""
        if self._lock is None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = FileLock(self._folder / "lock")
        with self._lock.hold(LOCK_SECONDS, "the jobs of a cache"):
            yield self._lock

    def _join(self) -> int:
        """The number of this job; taken, if it has none in this process."""
        assert self._lock is not None
        if self._pid != os.getpid():
            self._number = self._lock.claim_any()
            self._pid = os.getpid()
            _remove(self._folder, self._number)  # what a dead one left
        return self._number

    def _remove_own(self) -> None:
        if self._pid == os.getpid():
            _remove(self._folder, self._number)

    def leave(self) -> None:
        """Give up the place. In a forked child, which has none, the parent's stays."""
        self._remove_own()
        if self._lock is not None:
            self._lock.close()


def _remove(folder: Path, number: int) -> None:
    for kind in ("job", "new"):
        with contextlib.suppress(OSError):
            (folder / f"{kind}-{number}").unlink()
