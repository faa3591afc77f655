"""Forks that copy a lock in use hang, and are replaced."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stallfree as sf
from stallfree import platform
from stallfree.ipc import process
from stallfree.loader import executors as worker_processes

COUNT = 12


class Numbers:
    """Samples that are their ids."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> torch.Tensor:
        return torch.tensor(id)


class Hangs:
    """Called in forked processes, of which it lets hang those that `chosen` names."""

    def __init__(self, folder: Path, chosen: Callable[[int], bool]) -> None:
        self._folder, self._chosen, self._number = folder, chosen, 0

    def __call__(self) -> None:
        with open(self._folder / "calls", "a") as file:
            file.write(f"{os.getpid()} {os.getppid()}\n")
        if self._chosen(len(self.calls) - 1):
            signal.pause()
        platform.begin_child()

    @property
    def calls(self) -> list[list[int]]:
        """Process and parent of each call."""
        return [list(map(int, line.split())) for line in (self._folder / "calls").read_text().splitlines()]


def served(loader: sf.DataLoader | sf.SharedLoader) -> list[int]:
    return sorted(id for batch in loader for id in (batch if torch.is_tensor(batch) else batch.data).tolist())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "REPORT_SECONDS", 0.2)


def test_a_worker_that_does_not_report_in_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than a batch may kill workers, for it is not the batch's fault."""
    hangs = Hangs(tmp_path, lambda call: call < worker_processes.LIVES)
    monkeypatch.setattr(process, "begin_child", hangs)
    with sf.DataLoader(Numbers(), batch_size=3, num_workers=1, multiprocessing_context="fork") as loader:
        assert served(loader) == list(range(COUNT))
        assert loader.stats().workers_replaced == worker_processes.LIVES == len(hangs.calls) - 1


def test_a_loader_that_is_closed_does_not_wait_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "begin_child", Hangs(tmp_path, lambda call: True))
    monkeypatch.setattr(worker_processes, "_STOP_SECONDS", 1e9)
    with sf.DataLoader(Numbers(), batch_size=3, num_workers=2, multiprocessing_context="fork") as loader:
        iter(loader)


def test_a_coordinator_that_does_not_report_in_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = Hangs(tmp_path, lambda call: call < 2)
    monkeypatch.setattr(process, "begin_child", hangs)
    options = {"batch_size": 3, "num_workers": 1, "multiprocessing_context": "fork"}
    with sf.SharedLoader(Numbers(), group="hangs", **options) as loader:
        assert served(loader) == list(range(COUNT))
    assert len(hangs.calls) == 4  # the last two: a coordinator and its worker


def test_a_coordinator_whose_workers_hang_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = Hangs(tmp_path, lambda call: hangs.calls[call][1] == hangs.calls[0][0])  # the workers of the first
    monkeypatch.setattr(process, "begin_child", hangs)
    options = {"batch_size": 3, "num_workers": 1, "multiprocessing_context": "fork"}
    with sf.SharedLoader(Numbers(), group="hangs", **options) as loader:
        assert served(loader) == list(range(COUNT))
        assert loader.stats().takeovers == 1
