"""Data sets that open their file at the first sample, and keep it in various places.

They can be sent to other processes as long as nothing is open. A file that is open when processes are forked has one
position for all of them: the records that they read are then those of other samples.
"""

import contextlib
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

WORDS = 32
SIZE = 8 * WORDS


def write_rows(path: Path, count: int) -> Path:
    """A file of records of one size: record `id` is the number `id`, 32 times."""
    path.write_bytes(np.repeat(np.arange(count), WORDS).tobytes())
    return path


class Calls:
    """Which processes read how many samples. The counts are in a file, one process id after the other."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def add(self) -> None:
        file = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        os.write(file, struct.pack("q", int(os.readlink("/proc/self"))))  # what uses `os.getpid` may count as random
        os.close(file)

    def by_process(self) -> Counter[int]:
        data = Path(self.path).read_bytes() if Path(self.path).exists() else b""
        return Counter(number for (number,) in struct.iter_unpack("q", data))


class Handle:
    """An open file of records. Other processes get to run between the seek and the reads."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115

    def read(self, id: int) -> bytes:
        self.file.seek(id * SIZE)
        parts = []
        for _ in range(4):
            os.sched_yield()
            parts.append(self.file.read(SIZE // 4))
        return b"".join(parts)

    def close(self) -> None:
        self.file.close()


# -- data sets --------------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """Sample `id` is `(id, its record)`."""

    def __init__(self, path: Path, count: int, calls: Calls, transform: Callable[[Any], Any] = np.copy) -> None:
        self.path, self.count, self.calls, self.transform = str(path), count, calls, transform
        self.file: Any = None
        self.ready = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> Any:
        self.calls.add()
        return id, self.transform(np.frombuffer(self.handle().read(id), np.int64))

    def handle(self) -> Any:
        """What is open, opened at the first call."""
        raise NotImplementedError


class BehindFlag(Rows):
    """That the file is open is remembered apart from it."""

    def handle(self) -> Any:
        if not self.ready:
            self.file = Handle(self.path)
            self.ready = True
        return self.file


class InReader(Rows):
    def __init__(self, path: Path, count: int, calls: Calls) -> None:
        super().__init__(path, count, calls)
        self.reader = BehindFlag(path, count, calls)

    def handle(self) -> Any:
        return self.reader.handle()


class InGlobal(Rows):
    """The file is open as long as the module."""

    kept: Any = None

    def handle(self) -> Any:
        if InGlobal.kept is None:
            InGlobal.kept = Handle(self.path)
        return InGlobal.kept

    @staticmethod
    def close() -> None:
        if InGlobal.kept is not None:
            InGlobal.kept.close()
        InGlobal.kept = None


PLACES: tuple[type[Rows], ...] = (BehindFlag, InReader, InGlobal)


@contextlib.contextmanager
def lazy_rows(place: type[Rows], folder: Path, count: int) -> Iterator[Rows]:
    """A data set with nothing open, and its file. What this process opened meanwhile is closed after it."""
    try:
        yield place(write_rows(folder / "rows", count), count, Calls(folder / "calls"))
    finally:
        InGlobal.close()
