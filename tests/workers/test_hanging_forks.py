"""Forks that copy a lock in use hang; they are avoided where the lock is torch's, and replaced in any case."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stallfree as sf
from children import Child
from stallfree.ipc import generator_lock, process
from stallfree.workers import worker_processes

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
    monkeypatch.setattr(process, "check_generator", hangs)
    with sf.DataLoader(Numbers(), batch_size=3, num_workers=1, multiprocessing_context="fork") as loader:
        assert served(loader) == list(range(COUNT))
        assert loader.stats().workers_replaced == worker_processes.LIVES == len(hangs.calls) - 1


def test_a_loader_that_is_closed_does_not_wait_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "check_generator", Hangs(tmp_path, lambda call: True))
    monkeypatch.setattr(worker_processes, "_STOP_SECONDS", 1e9)
    with sf.DataLoader(Numbers(), batch_size=3, num_workers=2, multiprocessing_context="fork") as loader:
        iter(loader)


def test_a_coordinator_that_does_not_report_in_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = Hangs(tmp_path, lambda call: call < 2)
    monkeypatch.setattr(process, "check_generator", hangs)
    options = {"batch_size": 3, "num_workers": 1, "multiprocessing_context": "fork"}
    with sf.SharedLoader(Numbers(), group="hangs", **options) as loader:
        assert served(loader) == list(range(COUNT))
    assert len(hangs.calls) == 4  # the last two: a coordinator and its worker


def test_a_coordinator_whose_workers_hang_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = Hangs(tmp_path, lambda call: hangs.calls[call][1] == hangs.calls[0][0])  # the workers of the first
    monkeypatch.setattr(process, "check_generator", hangs)
    options = {"batch_size": 3, "num_workers": 1, "multiprocessing_context": "fork"}
    with sf.SharedLoader(Numbers(), group="hangs", **options) as loader:
        assert served(loader) == list(range(COUNT))
        assert loader.stats().takeovers == 1


def test_a_fork_waits_for_torchs_generator() -> None:
    """A thread draws many numbers at once meanwhile; the child could never draw any."""
    assert generator_lock._usable
    for _ in range(3):
        values = torch.zeros(10_000_000)
        first = values.numpy()[:1]
        thread = threading.Thread(target=values.normal_)
        thread.start()
        while not first[0]:  # from now on the lock is held, for about 0.1 s
            time.sleep(0)
        assert Child(torch.manual_seed, 1).wait() == 0
        thread.join()


def test_a_fork_of_a_process_whose_lock_is_not_known_to_be_usable_does_not_wait() -> None:
    def fork() -> None:
        assert not generator_lock._usable
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        generator_lock.torch = None  # type: ignore[attr-defined]
        assert Child(int).wait() == 0

    assert Child(fork).wait() == 0
