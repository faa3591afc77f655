"""Data sets that read files in `__getitem__`, and functions that are run with plain, recorded and served files."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stallfree.pipeline.codec import encode, read_record, record_size, write_record
from stallfree.sources.reads.open_calls import Tracker
from stallfree.sources.reads.recorded import Block, Record


def outcome(read: Callable[[], Any]) -> Any:
    """What `read` returns, or the type, number and text of what it raises."""
    try:
        return "value", read()
    except Exception as error:
        return type(error), getattr(error, "errno", None), str(error)


def recorded(read: Callable[[], Any], tracker: Tracker | None = None, id: int = 0) -> tuple[Any, Record]:
    """The outcome of `read` while it is recorded, and the record, after a way through the codec without pickle."""
    tracker, block = tracker or Tracker(), Block()
    result = tracker.run(block, outcome, read)
    assert not block.stale
    return result, through_codec(block.record(id, tracker.shared))


def contents(record: Record) -> dict[str, tuple[list[int], bytes]]:
    """The ranges of each file in a record, and their bytes; by the names of the files."""
    files = Block(record).files
    return {Path(path).name: (file.ranges, bytes(file.data)) for path, file in files.items()}


def served(read: Callable[[], Any], record: Record, tracker: Tracker | None = None) -> tuple[Any, Block]:
    """The outcome of `read` while `record` is served, and the block."""
    block = Block(record)
    return (tracker or Tracker()).run(block, outcome, read), block


def through_codec(record: Record) -> Record:
    """What a cache gives for `record`."""
    structure, arrays = encode(record)
    out = np.empty(record_size(structure, arrays), np.uint8)
    write_record(structure, arrays, out)
    found: Record = read_record(out, copy=True)
    assert np.array_equal(found, record)
    return found


@contextmanager
def gone(folder: Path) -> Iterator[None]:
    """Within it, the folder is not where it was."""
    away = folder.with_name(folder.name + "-away")
    folder.rename(away)
    try:
        yield
    finally:
        away.rename(folder)


_opened: list[str] | None = None


def _note(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(args[0], str):
        _opened.append(args[0])


@contextmanager
def opens_below(folder: Path) -> Iterator[list[str]]:
    """Gives the list of the paths below `folder` that are really opened within it, in this process; full at the end."""
    global _opened
    if not getattr(sys, "_reads_hook", False):
        sys.addaudithook(_note)
        sys._reads_hook = True  # type: ignore[attr-defined]
    found: list[str] = []
    _opened = []
    try:
        yield found
    finally:
        found += [path for path in _opened if path.startswith(str(folder))]
        _opened = None


class Crops:
    """Reads an array from a file, crops it at random and adds noise of each global generator, all in `__getitem__`.

    Args:
        folder: of the files.
        kind: "npy", "raw" or "text": how they are read.
    """

    def __init__(self, folder: Path, kind: str = "raw", side: int = 12) -> None:
        self.folder, self.kind, self.side = str(folder), kind, side
        self.count = len(list(folder.glob("*.raw")))

    def __len__(self) -> int:
        return self.count

    def _read(self, id: int) -> Any:
        if self.kind == "npy":
            return np.load(f"{self.folder}/{id}.npy")
        if self.kind == "text":
            with open(f"{self.folder}/{id}.txt") as file:
                return np.array([[int(word) for word in line.split()] for line in file], np.uint8)
        with open(f"{self.folder}/{id}.raw", "rb") as file:
            return np.frombuffer(file.read(), np.uint8).reshape(self.side, self.side)

    def __getitem__(self, id: int) -> Any:
        array = self._read(id)
        top, left = random.randrange(4), int(np.random.randint(4))
        crop = torch.from_numpy(array[top : top + 8, left : left + 8].copy()).float()
        return crop + torch.rand(()), id


class OwnGenerator(Crops):
    """As `Crops`, with a generator of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rng = np.random.default_rng(3)

    def __getitem__(self, id: int) -> Any:
        return torch.from_numpy(self._read(id) + self.rng.random()), id


class KeepsArchive:
    """Opens one file when the first sample is asked for, and keeps it open."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size, self.count = path, size, path.stat().st_size // size
        self._file: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> Any:
        if self._file is None:
            self._file = open(self.path, "rb")  # noqa: SIM115
        self._file.seek(id * self.size)
        return torch.frombuffer(bytearray(self._file.read(self.size)), dtype=torch.uint8) + random.randrange(3)


def write_arrays(folder: Path, count: int = 12, side: int = 12) -> Path:
    """Files 0.raw, 0.npy and 0.txt with the same random array, and so on. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for id in range(count):
        array = np.random.default_rng(id).integers(0, 256, (side, side), np.uint8)
        (folder / f"{id}.raw").write_bytes(array.tobytes())
        np.save(folder / f"{id}.npy", array)
        (folder / f"{id}.txt").write_text("\n".join(" ".join(map(str, row)) for row in array.tolist()))
    return folder
