"""The Smart Cache when files are bad, replacements late, processes killed, ranks many."""

import os
import signal
import time
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import stallfree as sf
from children import Child
from smart_data import Rows, ids_of, is_started, until
from stallfree.datasets import window

LOADERS: dict[str, Any] = {"stallfree": sf.DataLoader, "torch": torch.utils.data.DataLoader}


def smart(data: Any, size: int = 10, rate: float = 0.2, **more: Any) -> sf.SmartCacheDataset:
    """A window over the samples in their order."""
    return sf.SmartCacheDataset(data, cache_num=size, replace_rate=rate, shuffle=False, **more)


def due(total: int, size: int, replace: int, *epochs: int) -> list[list[int]]:
    return [sorted(id % total for id in range(replace * epoch, replace * epoch + size)) for epoch in epochs]


@pytest.mark.parametrize(("kind", "workers", "on_late"), [("torch", 0, "partial"), ("stallfree", 2, "wait")])
def test_a_bad_file_stops_training_with_its_path(kind: str, workers: int, on_late: str) -> None:
    with smart(Rows(10, bad=[7]), 5, on_late=on_late) as data:
        loader = LOADERS[kind](data, batch_size=5, num_workers=workers)
        for joins in (5, 6, 7):
            ids_of(loader)
            until(lambda joins=joins: data.cache.resident([joins])[0] or data.window.failed[joins])
        with pytest.raises(Exception, match=r"/data/row-7.bin") as caught:
            ids_of(loader)
        assert "the file is cut short" in str(caught.value)
        if kind == "stallfree":
            assert type(caught.value) is OSError
            assert "sample 7 " in caught.value.__notes__[0]
        del loader, caught


@pytest.mark.parametrize("kind", LOADERS)
def test_bad_files_are_skipped_and_counted(kind: str) -> None:
    with smart(Rows(12, bad=[0, 1, 7]), 6, 0.5, on_late="wait", on_error="skip") as data:
        more = {"on_error": "skip"} if kind == "stallfree" else {}
        loader = LOADERS[kind](data, batch_size=3, num_workers=2, persistent_workers=True, **more)
        seen = [sorted(ids_of(loader)) for _ in range(4)]
        assert seen == [[2, 3, 4, 5], [3, 4, 5, 6, 8], [6, 8, 9, 10, 11], [2, 9, 10, 11]]
        assert (loader if kind == "stallfree" else data).stats().skips == 2 + 1 + 1 + 2
        del loader
        data.set_epoch(0)
        with pytest.raises(OSError, match="row-0"):
            data.__getitems__([0, 1])  # nothing else in the batch


def test_late_replacements_join_later_and_none_is_left_out(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with smart(Rows(60, gate=gate)) as data:
        until(data.window.is_filled)
        loader = torch.utils.data.DataLoader(data, batch_size=5)
        assert data.stats().advice == ""
        for epoch in range(8):  # nothing comes: the window stays, and nobody waits
            assert sorted(ids_of(loader)) == list(range(10))
            stats = data.stats()
            assert (stats.epoch, stats.window_start, stats.lag, stats.late_epochs) == (epoch, 0, 2 * epoch, epoch)
        assert "7 of 7 epochs: 14 samples behind" in stats.advice
        assert "Lower replace_rate, or raise num_fill_workers" in stats.advice
        gate.touch()
        for expected in due(60, 10, 2, 1, 2, 3):
            until(lambda joins=expected[-2:]: data.cache.resident(joins).all())
            assert data.stats().resident_items <= 12
            assert sorted(ids_of(loader)) == expected
        assert data.stats().lag == 14
        del loader


def test_waiting_for_late_replacements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come once the wait for them has begun."""
    gate = tmp_path / "gate"
    clock = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: (gate.touch(), time.sleep(seconds))})
    with smart(Rows(20, gate=gate), on_late="wait") as data:
        loader = torch.utils.data.DataLoader(data, batch_size=5)
        ids_of(loader)
        until(data.window.is_filled)
        monkeypatch.setattr(window, "time", clock)
        assert sorted(ids_of(loader)) == list(range(2, 12))
        stats = data.stats()
        assert (stats.lag, stats.late_epochs, stats.wait_seconds > 0) == (0, 1, True)
        del loader


def fillers() -> list[Any]:
    return [process for process in active_children() if process.name == "stallfree-fill"]


def test_a_dead_fill_process_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with smart(Rows(40), num_fill_workers=2, on_late="wait") as data:
        loader = sf.DataLoader(data, batch_size=5)
        for epoch, expected in enumerate(due(40, 10, 2, *range(12))):
            assert sorted(ids_of(loader)) == expected
            if epoch % 2:
                for process in fillers():
                    process.kill(), process.join()
        assert caplog.text.count("memory is short; it is replaced") == 2
        assert caplog.text.count("it is not replaced any more: samples are prepared as they are asked for") == 1
        assert not data.is_started()
        data.start()  # by hand
        assert data.is_started()
        del loader


class Killed(Rows):
    """A fill process dies in `fetch`, as one that takes too much memory does."""

    def _record(self, id: int) -> Any:
        if is_started():
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._record(id)


def epochs(data: sf.SmartCacheDataset, kind: str) -> list[list[int]]:
    loader = LOADERS[kind](data, batch_size=4)
    data.set_epoch(0)
    return [sorted(ids_of(loader)) for _ in range(9)]


@pytest.mark.parametrize(("kind", "on_late"), [("stallfree", "wait"), ("torch", "partial")])
def test_without_fill_processes_the_window_moves_as_planned(on_late: str, kind: str) -> None:
    """However they ended: the samples are prepared as they are asked for."""
    with smart(Killed(20), 8, 0.5, on_late=on_late) as data:
        data.begin_epoch(0)
        for _ in range(3):
            until(lambda: not data.is_started())
            len(data)  # as loaders do for each epoch
        assert epochs(data, kind) == due(20, 8, 4, *range(9))
        assert data.stats().resident_items <= data.cache_num + data.replace_num
    with smart(Rows(20), 8, 0.5, on_late=on_late) as data:
        data.shutdown()
        assert epochs(data, kind) == due(20, 8, 4, *range(9))


def hold(report: int, method: str) -> None:
    data = smart(Rows(20), multiprocessing_context=method)
    until(data.window.is_filled)
    os.write(report, b" ".join(str(p.pid).encode() for p in fillers()))
    signal.pause()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_fill_processes_die_with_their_parent(method: str) -> None:
    read, write = os.pipe()
    child = Child(hold, write, method)
    (pid,) = map(int, os.read(read, 1000).split())
    os.close(read), os.close(write)
    child.kill()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
    smart(Rows(20)).close()  # removes what the killed one left


def test_a_rank_that_is_behind_stays_in_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a loader that says no epochs: one rank begins the next one before another has ended the last."""

    def ids(data: sf.SmartCacheDataset, positions: range) -> list[int]:
        return [label for _, label in data.__getitems__(positions)]

    monkeypatch.setenv("MASTER_PORT", "4714")
    with smart(Rows(20), rate=0.4, on_late="wait") as fast, smart(Rows(20), rate=0.4, on_late="wait") as slow:
        before: list[int] = []
        for epoch in range(5):
            window = fast.window.plan.window(4 * epoch).tolist()
            assert ids(fast, range(4)) == window[:4]
            if epoch:  # of the epoch before
                assert ids(slow, range(7, 10)) == before[7:]
            assert ids(fast, range(4, 7)) == window[4:7]
            before = window
