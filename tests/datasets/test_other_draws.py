"""Random numbers that others draw, clocks and process ids do not make a deterministic data set random."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stallfree as sf
from lazy_rows import Calls

COUNT = 64
CAPACITY = "4MiB"
log = logging.getLogger(__name__)


class Rows(Dataset[Any]):
    """Deterministic: sample `id` is 16 times `id`, after some time of storage."""

    def __init__(self, calls: Calls, seconds: float = 0.0003) -> None:
        self.calls, self.seconds = calls, seconds

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        self.calls.add()
        time.sleep(self.seconds)
        self.act(id)
        return np.full(16, id, np.float32)

    def act(self, id: int) -> None:
        """What a subclass does beside."""


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """No warning of stallfree, and no lines on the screen."""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        yield
    assert [str(warning.message) for warning in caught if "Stallfree" in warning.category.__name__] == []


def check_two_epochs(loader: Any, calls: Calls) -> None:
    """All samples are right, and the second epoch reads none."""
    reads = []
    for _ in range(2):
        before = calls.by_process().total()
        values = sorted(float(row[0]) for batch in loader for row in batch)
        assert values == list(range(COUNT))
        reads.append(calls.by_process().total() - before)
    assert reads[1] == 0


def check_cached(rows: Rows, workers: int = 0, **options: Any) -> None:
    with (
        silence(),
        sf.CachedDataset(rows, capacity=CAPACITY, **options) as cached,
        sf.DataLoader(cached, 8, num_workers=workers) as loader,
    ):
        check_two_epochs(loader, rows.calls)
        assert cached.stats().resident_items == COUNT


def check_auto(rows: Rows, workers: int = 0) -> None:
    rows.seconds = 0.002
    with silence(), sf.DataLoader(rows, 8, num_workers=workers, cache="auto", capacity=CAPACITY) as loader:
        check_two_epochs(loader, rows.calls)


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path / "calls")


class TestThreads:
    """A thread of the program draws from a global generator now and then."""

    DRAWS: ClassVar[dict[str, Callable[[], float]]] = {
        "python": random.random,
        "numpy": np.random.random,
        "torch": lambda: float(torch.rand((), dtype=torch.float64)),
    }

    @pytest.fixture(params=list(DRAWS))
    def drawn(self, request: pytest.FixtureRequest) -> Iterator[list[float]]:
        """The numbers that the thread has drawn so far."""
        numbers: list[float] = []
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(0.001):
                numbers.append(self.DRAWS[request.param]())

        thread = threading.Thread(target=work)
        thread.start()
        yield numbers
        stop.set()
        thread.join()

    def test_a_data_set(self, drawn: list[float], calls: Calls) -> None:
        check_cached(Rows(calls))
        assert drawn

    def test_a_step(self, drawn: list[float], calls: Calls) -> None:
        def doubled(x: Any) -> Any:
            time.sleep(0.0003)
            return x * 2 / 2

        check_cached(Rows(calls), transform=doubled)
        assert drawn

    def test_under_the_loader_of_torch(self, drawn: list[float], calls: Calls) -> None:
        rows = Rows(calls)
        with silence(), sf.CachedDataset(rows, capacity=CAPACITY) as cached:
            check_two_epochs(torch.utils.data.DataLoader(cached, 8), rows.calls)
        assert drawn

    @pytest.mark.parametrize("workers", [0, 1])
    def test_auto(self, drawn: list[float], calls: Calls, workers: int) -> None:
        check_auto(Rows(calls), workers)
        assert drawn

    def test_no_number_comes_twice(self, drawn: list[float], calls: Calls) -> None:
        """The states of the generators are not set back under the thread."""
        check_cached(Rows(calls))
        assert len(set(drawn)) == len(drawn)


class TestFinalizers:
    """What an earlier cell of a notebook left is freed while a sample is made."""

    ENDS: ClassVar[dict[str, Callable[[], object]]] = {
        "urandom": lambda: os.urandom(8),
        "numpy": np.random.random,
        "torch": lambda: torch.rand(()),
    }

    class Collecting(Rows):
        """Frees what is left over, as the collector does when many objects are made."""

        def act(self, id: int) -> None:
            gc.collect()

    @pytest.fixture(params=list(ENDS))
    def garbage(self, request: pytest.FixtureRequest) -> Iterator[None]:
        ends = self.ENDS[request.param]

        class Loader:
            def __init__(self) -> None:
                self.me = self

            def __del__(self) -> None:
                ends()

        gc.disable()
        for _ in range(3):
            Loader()
        yield
        gc.enable()

    @pytest.mark.usefixtures("garbage")
    def test_a_data_set(self, calls: Calls) -> None:
        check_cached(self.Collecting(calls))

    @pytest.mark.usefixtures("garbage")
    def test_in_workers(self, calls: Calls) -> None:
        check_cached(self.Collecting(calls), workers=1)

    @pytest.mark.usefixtures("garbage")
    def test_auto(self, calls: Calls) -> None:
        check_auto(self.Collecting(calls))


class GuardsItsProcess(Rows):
    pid = 0

    def act(self, id: int) -> None:
        if self.pid != os.getpid():
            self.pid = os.getpid()


class LogsTheTime(Rows):
    def act(self, id: int) -> None:
        log.debug("sample %d at %f", id, time.time())


class MeasuresItself(Rows):
    spent = 0.0

    def act(self, id: int) -> None:
        began = time.perf_counter()
        self.spent += time.perf_counter() - began


class LogsItsAddress(Rows):
    def act(self, id: int) -> None:
        log.debug("sample %d of %x in thread %d", id, hash(self), threading.get_ident())


class LooksBusy(Rows):
    """Counts, and keeps what it read last."""

    count = 0
    last = -1

    def act(self, id: int) -> None:
        self.count += 1
        self.last = id


HARMLESS = (GuardsItsProcess, LogsTheTime, MeasuresItself, LogsItsAddress, LooksBusy)


@pytest.mark.parametrize("kind", HARMLESS)
class TestHarmless:
    """What a look at the code would call random, and the samples are the same each time."""

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_data_set(self, kind: type[Rows], calls: Calls, workers: int) -> None:
        check_cached(kind(calls), workers)

    def test_a_step(self, kind: type[Rows], calls: Calls, tmp_path: Path) -> None:
        acting = kind(Calls(tmp_path / "other"))

        def step(x: Any) -> Any:
            acting.act(int(x[0]))
            return x

        check_cached(Rows(calls), transform=step, form="prepared")

    def test_auto(self, kind: type[Rows], calls: Calls) -> None:
        check_auto(kind(calls))
