"""Random numbers that others draw, clocks and process ids do not make a deterministic data set random."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import stallfree as sf
from cases import half
from lazy_rows import Calls

COUNT = 64
log = logging.getLogger(__name__)


class Rows(Dataset[Any]):
    """Deterministic: sample `id` is 16 times `id`, after some time of storage. Beside, it acts."""

    pid, spent, last = 0, 0.0, -1

    def __init__(self, calls: Calls, act: Callable[[Any, int], object] | None = None) -> None:
        self.calls, self.act, self.seconds = calls, act, 0.0003

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        self.calls.add()
        time.sleep(self.seconds)
        if self.act is not None:
            self.act(self, id)
        return np.full(16, id, np.float32)


def check(rows: Rows, way: str) -> None:
    """All samples are right, the second epoch reads none, and nothing is said."""
    options: dict[str, Any] = {"batch_size": 8, "num_workers": int("worker" in way)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        caught = stack.enter_context(warnings.catch_warnings(record=True, action="always"))
        cached: Any = None
        if "auto" in way:
            rows.seconds = 0.002
            loader: Any = sf.DataLoader(rows, cache="auto", capacity="4MiB", **options)
        else:
            step = {"transform": Step(rows), "form": "prepared"} if "step" in way else {}
            cached = stack.enter_context(sf.CachedDataset(rows, capacity="4MiB", **step))
            loader = (torch.utils.data.DataLoader if "torch" in way else sf.DataLoader)(cached, **options)
        reads = []
        for _ in range(2):
            before = rows.calls.by_process().total()
            assert sorted(float(row[0]) for batch in loader for row in batch) == list(range(COUNT))
            reads.append(rows.calls.by_process().total() - before)
        assert reads[1] == 0
        assert cached is None or cached.stats().resident_items == COUNT
        if "torch" not in way:
            loader.close()
    assert [str(warning.message) for warning in caught if "Stallfree" in warning.category.__name__] == []


class Step:
    def __init__(self, rows: Rows) -> None:
        self.rows, rows.act = Rows(rows.calls, rows.act), None

    def __call__(self, x: Any) -> Any:
        if self.rows.act is not None:
            self.rows.act(self.rows, int(x[0]))
        return x * 2 / 2


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path / "calls")


DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random, "numpy": np.random.random, "torch": lambda: float(torch.rand((), dtype=torch.float64)),
    "urandom": lambda: os.urandom(8),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "way"), [
    ("python", "data set"), ("torch", "auto"), ("numpy", "step"), ("numpy", "torch"), ("numpy", "auto, worker"),
])  # fmt: skip
def test_a_thread_that_draws_now_and_then(kind: str, way: str, calls: Calls) -> None:
    """Nor does any number come twice: the states of the generators are not set back under the thread."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(lambda: [DRAWS[kind]() for _ in iter(lambda: stop.wait(0.001), True)])
        with contextlib.ExitStack() as ends:
            ends.callback(stop.set)
            check(Rows(calls), way)
        numbers = drawn.result()
    assert len(set(numbers)) == len(numbers) > 0


@pytest.fixture
def garbage(kind: str) -> Iterator[None]:
    """What an earlier cell of a notebook left: it draws when it is freed."""

    class Loader:
        def __del__(self) -> None:
            DRAWS[kind]()

    gc.disable()
    for _ in range(3):
        loader: Any = Loader()
        loader.itself = loader
    del loader
    yield
    gc.enable()


@pytest.mark.usefixtures("garbage")
@pytest.mark.parametrize(("kind", "way"), [("urandom", "data set"), ("numpy", "worker"), ("torch", "auto")])
def test_finalizers_that_run_while_a_sample_is_made(kind: str, way: str, calls: Calls) -> None:
    check(Rows(calls, lambda rows, id: gc.collect() if id % 32 == 5 else 0), way)


HARMLESS: dict[str, Callable[[Rows, int], object]] = {
    "guards its process": lambda rows, id: rows.pid == os.getpid() or setattr(rows, "pid", os.getpid()),
    "logs the time": lambda rows, id: log.debug("sample %d at %f", id, time.time()),
    "measures itself": lambda rows, id: setattr(rows, "spent", rows.spent + time.perf_counter()),
    "logs its address": lambda rows, id: log.debug("%d of %x in %d", id, hash(rows), threading.get_ident()),
    "keeps what it read last": lambda rows, id: setattr(rows, "last", id),
}


@pytest.mark.parametrize(("kind", "way"), half(HARMLESS, ["data set", "worker", "step", "auto"]))
def test_what_the_code_would_call_random(kind: str, way: str, calls: Calls) -> None:
    check(Rows(calls, HARMLESS[kind]), way)
