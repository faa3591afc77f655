"""What hangs: storage, for which `timeout` holds without workers too, and forks that copied a lock in use."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import stallfree as sf
from cached_data import Given
from loader_data import Made, lists_of, loading, values_of
from stallfree import platform
from stallfree.ipc import fetch_threads, process
from stallfree.loader import executors
from warm import Interpreter


class Hanging(Given):
    """Sample 5 is not read before `answer` is set."""

    def __init__(self) -> None:
        super().__init__(range(12))
        self.answer = threading.Event()

    def _record(self, id: int) -> Any:
        if id == 5:
            self.answer.wait()
        return id


@pytest.fixture
def source() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.answer.set()


def patient(iterator: Any) -> Iterator[Any]:
    """Goes on after a wait that was too long, as on a busy machine."""
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except sf.WaitError:
            continue


CACHED = pytest.mark.parametrize("cached", [False, True])


@CACHED
def test_the_timeout_without_workers(source: Hanging, cached: bool) -> None:
    with loading(source, 2, cached=cached, timeout=0.5) as loader:
        batches = iter(loader)
        assert lists_of(islice(patient(batches), 2)) == [[0, 1], [2, 3]]
        for _ in range(2):
            with pytest.raises(sf.WaitError, match=r"batch 2 of epoch 0 .* 0\.5 s.*its samples are \[4, 5\]"):
                next(batches)
        source.answer.set()
        assert lists_of(patient(batches)) == [[4, 5], [6, 7], [8, 9], [10, 11]]


@CACHED
def test_close_waits_no_longer_than_some_seconds(
    cached: bool, source: Hanging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetch_threads, "CLOSE_SECONDS", 0.05)
    with loading(source, 2, cached=cached, prefetch_factor=6) as loader:
        batches = iter(loader)
        next(batches)
        loader.close()
        assert re.search(r"[1-9]\d* threads left behind, still waiting for storage", caplog.text)
        with pytest.raises(sf.StallfreeError, match="this iteration is over"):
            next(batches)
        source.answer.set()
        assert [batch.tolist() for batch in loader][2] == [4, 5]


def test_a_fetch_again_after_an_eviction_has_the_limit_too(source: Hanging) -> None:
    source.answer.set()
    data = sf.CachedDataset(source, capacity="1MiB", transform=sf.mark_random(lambda id: id))
    with data, sf.DataLoader(data, 2, sampler=[4, 5], timeout=0.05) as loader:
        assert len(list(patient(iter(loader)))) == 1
        source.answer.clear()
        batches = iter(loader)  # both are resident, so that no fetch is started
        data.cache.clear()
        with pytest.raises(sf.WaitError, match=r"storage did not give the samples \[4, 5\]"):
            next(batches)
        source.answer.set()


def test_a_loader_that_ends_does_not_disturb_another_over_the_same_source(source: Hanging) -> None:
    """Both fetch ahead in threads; what is in one's queue must not be given up with the other."""
    source.answer.set()
    with sf.CachedDataset(source, capacity="1MiB") as data:
        data.cache.clear()
        source.answer.clear()
        first = iter(sf.DataLoader(data, batch_size=6))
        second = sf.DataLoader(data, sampler=[10, 11])
        iterator = iter(second)
        ending = threading.Thread(target=second.close)
        ending.start()
        ending.join(1.0)  # returns at once if the fetches of the first are none of its business
        source.answer.set()
        ending.join()
        assert [batch.tolist() for batch in first] == [list(range(6)), list(range(6, 12))]
        del iterator


PROGRAM = """
import threading, stallfree as sf
from stallfree.ipc import fetch_threads
from stallfree.sources.mapped import BaseSource
class Hanging(BaseSource):
    pipeline = sf.Compose([])
    def __len__(self): return 12
    def _record(self, id): return id if id != 5 else threading.Event().wait()
    def _where(self, id): return ""
    def fingerprint(self): return "hanging"
fetch_threads.CLOSE_SECONDS = 0.05
batches = iter(sf.DataLoader(Hanging(), 2, prefetch_factor=6))
print(next(batches).tolist())
"""


def test_a_program_ends_although_storage_hangs(interpreter: Interpreter) -> None:
    ended = interpreter.run(PROGRAM)
    assert (ended.code, ended.out) == (0, "[0, 1]\n"), ended.err
    assert "threads left behind, still waiting for storage" in ended.err


DATA = Made(12, torch.tensor)
FORKED: dict[str, Any] = {"batch_size": 3, "num_workers": 1, "multiprocessing_context": "fork"}


class Hangs:
    """Called in forked processes, of which it lets hang those that `chosen` names by the number of the call and the
    parent. As `REPORT_SECONDS`, it gives these little time to report in, and the others more than they need.
    """

    def __init__(self, file: Path, chosen: Callable[[int, int], bool]) -> None:
        self._file, self._chosen = file, chosen
        file.touch()

    def __call__(self) -> None:
        with self._file.open("a") as file:
            file.write(f"{os.getpid()} {os.getppid()}\n")
        if self._chosen(len(self.calls) - 1, os.getppid()):
            signal.pause()
        platform.begin_child()

    def __mul__(self, _: int) -> float:
        return 0.2 if self._chosen(len(self.calls), os.getpid()) else 60.0

    @property
    def calls(self) -> list[list[int]]:
        """Process and parent of each call."""
        return [list(map(int, line.split())) for line in self._file.read_text().splitlines()]


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], bool]], Hangs]:
    """Lets forked processes hang."""

    def install(chosen: Callable[[int, int], bool]) -> Hangs:
        hangs = Hangs(tmp_path / "calls", chosen)
        monkeypatch.setattr(process, "REPORT_SECONDS", hangs)
        monkeypatch.setattr(process, "begin_child", hangs)
        return hangs

    return install


def test_a_worker_that_does_not_report_in_is_replaced(hanging: Any) -> None:
    """More often than a batch may kill workers, for it is not the batch's fault."""
    hangs = hanging(lambda call, _: call < executors.LIVES)
    with sf.DataLoader(DATA, **FORKED) as loader:
        assert sorted(values_of(loader)) == list(range(12))
        assert loader.stats().workers_replaced == executors.LIVES == len(hangs.calls) - 1


def test_a_loader_that_is_closed_does_not_wait_for_one(hanging: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging(lambda *_: True)
    monkeypatch.setattr(executors, "_STOP_SECONDS", 1e9)
    with sf.DataLoader(DATA, **FORKED) as loader:
        iter(loader)


@pytest.mark.parametrize("whose", ["its start", "its workers"])
def test_a_coordinator_that_hangs_is_replaced(whose: str, hanging: Any) -> None:
    ways = {"its start": lambda call, _: call < 2, "its workers": lambda call, by: call > 0 and by == hangs.calls[0][0]}
    hangs = hanging(ways[whose])
    with sf.SharedLoader(DATA, group="hangs", **FORKED) as loader:
        assert sorted(values_of(loader)) == list(range(12))
        assert loader.stats().takeovers == 1 or whose == "its start"
    assert whose == "its workers" or len(hangs.calls) == 4  # the last two: a coordinator and its worker
