"""A loader of stamped batches for the tests of `ProcessPrefetcher`."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

PATIENCE = 60.0  # seconds until what does not happen is taken for hung


@dataclass
class Stamped:
    """A loader whose iterators continue after an error.

    Attributes:
        batches: their number in an epoch.
        errors: numbers in whose place an error is; with `ends`, the first one ends the epoch.
        gate: before batch 2 it waits until this file exists.
        log: a file with one byte for each batch that was asked for.
    """

    batches: int = 5
    errors: tuple[int, ...] = ()
    ends: bool = False
    gate: Path | None = None
    log: Path | None = None
    epoch: int = -1
    number: int = -1

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        self.epoch, self.number = self.epoch + 1, -1
        return self

    def __next__(self) -> Any:
        self.number += 1
        number = self.number
        if number >= self.batches:
            raise StopIteration
        if self.log is not None:
            with self.log.open("ab") as file:
                file.write(b"x")
        while number == 2 and self.gate is not None and not self.gate.exists():
            time.sleep(0.001)
        if number in self.errors:
            self.number = self.batches if self.ends else number
            raise FileNotFoundError(2, f"no picture for batch {number}")
        pixels = torch.full((4, 20_000), self.epoch * 1000 + number, dtype=torch.int32)
        return {"where": torch.tensor([self.epoch, number]), "pixels": pixels}


def read_stamp(batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return (epoch, number) of a batch, which must be complete."""
    epoch, number = batch["where"].tolist()
    assert batch["pixels"].shape == (4, 20_000)
    complete = (batch["pixels"].numpy() == epoch * 1000 + number).all()  # a forked process has no threads of torch
    assert complete, f"batch {number} of epoch {epoch}"
    return epoch, number


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
