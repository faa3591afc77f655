"""Loaders with stamped batches for the tests of `ProcessPrefetcher`.

The behaviour of a loader in its next epoch is written to a file, the `Script`, so that one process serves many tests.
The file also counts the batches that were requested and returned.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

PATIENCE = 60.0  # seconds until what does not happen is taken for hung
_COUNTS = struct.Struct("<8q")
ASKED, EPOCHS = 0, 1
"""Numbers in the file of counts: batches that the loader was asked for, and epochs that it began."""


def stamp(epoch: int, number: int) -> int:
    """Return the value of all elements of a batch."""
    return epoch * 1000 + number + 1


def stamped(epoch: int, number: int, rows: int = 4) -> dict[str, torch.Tensor]:
    """Return a batch with a small tensor and one that is copied separately."""
    value = stamp(epoch, number)
    return {"where": torch.tensor([epoch, number]), "pixels": torch.full((rows, 20_000), value, dtype=torch.int32)}


def read_stamp(batch: dict[str, torch.Tensor], rows: int = 4) -> tuple[int, int]:
    """Return (epoch, number) of a batch, which must be complete."""
    epoch, number = batch["where"].tolist()
    assert batch["pixels"].shape == (rows, 20_000)
    pixels = batch["pixels"].numpy()  # threads of torch would not be there in a forked process
    whole = (pixels == stamp(epoch, number)).all()
    assert whole, f"batch {number} of epoch {epoch} has {np.unique(pixels).tolist()}"
    return epoch, number


class Script:
    """Controls the loader from its next epoch on, and holds the counts. Picklable."""

    def __init__(self, folder: Path) -> None:
        self.file, self.counts = folder / "script", folder / "counts"
        self.counts.write_bytes(bytes(_COUNTS.size))
        self.write()

    def write(self, **values: Any) -> None:
        """`batches`, `rows` (of the last batch too, if `last` does not say else), `errors` (numbers in whose place an
        error is), `ends` (whether such an error ends the epoch), `hang` (the number before which it waits until
        `release`)."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(values))
        new.replace(self.file)

    def read(self) -> dict[str, Any]:
        """Return the script that was written."""
        values: dict[str, Any] = json.loads(self.file.read_text())
        return values

    def release(self) -> None:
        """Let the loader continue."""
        self.file.with_suffix(".go").touch()

    def map(self) -> memoryview:
        """Return the counts."""
        with self.counts.open("r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def make(self) -> Callable[[], Scripted]:
        """Return the `make_loader` of a `ProcessPrefetcher`."""
        return partial(Scripted, self)


class Scripted:
    """A loader that follows its script."""

    def __init__(self, script: Script) -> None:
        self.script, self.epoch, self.counts = script, -1, script.map()

    def __len__(self) -> int:
        return int(self.script.read().get("batches", 5))

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.counts[EPOCHS] += 1
        return Epoch(self.script, self.epoch, self.counts)


class Epoch:
    """An iterator that may continue after an error."""

    def __init__(self, script: Script, epoch: int, counts: memoryview) -> None:
        self.script, self.epoch, self.counts, self.number = script, epoch, counts, -1
        self.told = script.read()

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        self.number += 1
        told, number = self.told, self.number
        if number >= told.get("batches", 5):
            raise StopIteration
        self.counts[ASKED] += 1
        if number == told.get("hang", -1):
            while not self.script.file.with_suffix(".go").exists():
                time.sleep(0.001)
        if number in told.get("errors", ()):
            if told.get("ends"):
                self.number = 10**9
            raise FileNotFoundError(2, f"no picture for batch {number}")
        last = number == told.get("batches", 5) - 1
        return stamped(self.epoch, number, told["last"] if last and "last" in told else told.get("rows", 4))


def wait_for(what: Callable[[], bool], name: str) -> None:
    """Wait until a condition is true; fails the test after a limit."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > deadline:
            pytest.fail(f"{name}: not after {PATIENCE:.0f} s")
        time.sleep(0.001)


def gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def started() -> set[int]:
    """Return the processes started as separate programs, and their forks, including orphans."""
    mark = f"STALLFREE_ROOT={os.environ['STALLFREE_ROOT']}".encode()
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.add(int(process.name))
    return found
