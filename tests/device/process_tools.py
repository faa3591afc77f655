"""A loader of stamped batches for the tests of `ProcessPrefetcher`, which follows a script in a file.

So one process serves many tests. The file of counts says which batches were asked for.
"""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

PATIENCE = 60.0  # seconds until what does not happen is taken for hung


def read_stamp(batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return (epoch, number) of a batch, which must be complete."""
    epoch, number = batch["where"].tolist()
    assert batch["pixels"].shape == (4, 20_000)
    complete = (batch["pixels"].numpy() == epoch * 1000 + number).all()  # a forked process has no threads of torch
    assert complete, f"batch {number} of epoch {epoch}"
    return epoch, number


class Script:
    """Controls the loader from its next epoch on. Called by a `ProcessPrefetcher`, it returns the loader."""

    def __init__(self, folder: Path) -> None:
        self.file, self.counts = folder / "script", folder / "counts"
        self.counts.write_bytes(bytes(8))
        self.write()

    def write(self, **values: Any) -> None:
        """`batches`, `errors` (numbers in whose place an error is), `ends` (whether such an error ends the epoch),
        `hang` (the number before which it waits until `release`)."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"batches": 5, "errors": [], "ends": False, "hang": -1} | values))
        new.replace(self.file)

    def read(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.file.read_text())
        return values

    def release(self) -> None:
        """Let the loader continue."""
        self.file.with_suffix(".go").touch()

    def map(self) -> memoryview:
        """Return the number of batches that the loader was asked for, as a list of one."""
        with self.counts.open("r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def __call__(self) -> Scripted:
        return Scripted(self)


class Scripted:
    """A loader that follows its script. Its iterators continue after an error."""

    def __init__(self, script: Script) -> None:
        self.script, self.epoch, self.counts = script, -1, script.map()

    def __len__(self) -> int:
        return int(self.script.read()["batches"])

    def __iter__(self) -> Iterator[Any]:
        self.epoch, self.number, self.told = self.epoch + 1, -1, self.script.read()
        return self

    def __next__(self) -> Any:
        self.number += 1
        told, number = self.told, self.number
        if number >= told["batches"]:
            raise StopIteration
        self.counts[0] += 1
        while number == told["hang"] and not self.script.file.with_suffix(".go").exists():
            time.sleep(0.001)
        if number in told["errors"]:
            self.number = 10**9 if told["ends"] else number
            raise FileNotFoundError(2, f"no picture for batch {number}")
        pixels = torch.full((4, 20_000), self.epoch * 1000 + number, dtype=torch.int32)
        return {"where": torch.tensor([self.epoch, number]), "pixels": pixels}


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
