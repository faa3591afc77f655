"""The Smart Cache when files are bad, replacements late, processes killed, ranks many."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from multiprocessing import active_children, current_process
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DistributedSampler

import stallfree as sf
from children import Child
from smart_data import Rows, ids_of, is_started, until
from stallfree.sampling.window_source import WindowState
from unseen import unseen_ids

LOADERS = {"stallfree": sf.DataLoader, "torch": torch.utils.data.DataLoader}


def coming(data: sf.SmartCacheDataset, epoch: int) -> list[int]:
    """The ids that join after `epoch`, when nothing was late."""
    start = epoch * data.replace_num + data.cache_num
    return data.window.plan.sequence(start, start + data.replace_num).tolist()


def prepared(data: sf.SmartCacheDataset, epoch: int) -> bool:
    return bool(data.cache.resident(coming(data, epoch)).all())


# -- files that cannot be read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "workers", "on_late"), [("torch", 0, "partial"), ("stallfree", 2, "wait")])
def test_a_bad_file_stops_training_with_its_path(kind: str, workers: int, on_late: str) -> None:
    with sf.SmartCacheDataset(Rows(10, bad=[7]), cache_num=5, replace_rate=0.2, shuffle=False, on_late=on_late) as data:
        loader = LOADERS[kind](data, batch_size=5, num_workers=workers)
        ids_of(loader)
        until(lambda: prepared(data, 0))
        ids_of(loader)
        until(lambda: prepared(data, 1))
        ids_of(loader)  # 2 to 6
        until(lambda: data.window.state.unkept[7])
        with pytest.raises(Exception, match=r"/data/row-7.bin") as caught:
            ids_of(loader)
        assert "the file is cut short" in str(caught.value)
        if kind == "stallfree":
            assert type(caught.value) is OSError
            assert "sample 7 " in caught.value.__notes__[0]
        del loader, caught


@pytest.mark.parametrize("kind", LOADERS)
def test_bad_files_are_skipped_and_counted(kind: str) -> None:
    with sf.SmartCacheDataset(
        Rows(12, bad=[0, 1, 7]), cache_num=6, replace_rate=0.5, shuffle=False, on_late="wait", on_error="skip"
    ) as data:
        more = {"on_error": "skip"} if kind == "stallfree" else {}
        loader = LOADERS[kind](data, batch_size=3, num_workers=2, persistent_workers=True, **more)
        seen = [sorted(ids_of(loader)) for _ in range(4)]
        assert seen == [[2, 3, 4, 5], [3, 4, 5, 6, 8], [6, 8, 9, 10, 11], [2, 9, 10, 11]]
        skips = loader.stats().skips if kind == "stallfree" else data.stats().skips
        assert skips == 2 + 1 + 1 + 2
        del loader


def test_nothing_but_bad_files_in_a_batch() -> None:
    data = sf.SmartCacheDataset(Rows(6, bad=[1, 2]), cache_num=6, shuffle=False, on_error="skip")
    with data, pytest.raises(OSError, match="row-1"):
        data.__getitems__([1, 2])


# -- late replacements -------------------------------------------------------------------------------------------------


def test_late_replacements_follow_later(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    rows = Rows(20, gate=gate)
    with sf.SmartCacheDataset(rows, cache_num=10, replace_rate=0.2, shuffle=False) as data:
        until(data.window.state.filled_by_others)
        loader = torch.utils.data.DataLoader(data, batch_size=5)
        assert data.stats().advice == ""
        for epoch in range(3):  # nothing comes: the window stays, and nobody waits
            assert sorted(ids_of(loader)) == list(range(10))
            stats = data.stats()
            assert (stats.epoch, stats.window_start, stats.lag, stats.late_epochs) == (epoch, 0, 2 * epoch, epoch)
        assert "Lower replace_rate, or raise num_fill_workers" in stats.advice
        assert "2 of 2 epochs: 4 samples behind" in stats.advice
        gate.touch()
        until(lambda: data.cache.resident([10, 11, 12, 13, 14, 15]).all())
        assert sorted(ids_of(loader)) == list(range(6, 16))  # all that was due at once
        assert data.stats().lag == 0
        del loader


def test_waiting_for_late_replacements(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with sf.SmartCacheDataset(
        Rows(20, gate=gate), cache_num=10, replace_rate=0.2, shuffle=False, on_late="wait"
    ) as data:
        loader = torch.utils.data.DataLoader(data, batch_size=5)
        ids_of(loader)
        until(data.window.state.filled_by_others)
        opening = threading.Timer(0.05, gate.touch)
        opening.start()
        assert sorted(ids_of(loader)) == list(range(2, 12))
        opening.join()
        stats = data.stats()
        assert (stats.lag, stats.late_epochs) == (0, 1)
        assert stats.wait_seconds > 0
        assert "1 of 1 epochs" in stats.advice
        del loader


def test_however_late_no_sample_is_passed_over(tmp_path: Path) -> None:
    """The window goes on by no more than its own size."""
    gate = tmp_path / "gate"
    with sf.SmartCacheDataset(Rows(60, gate=gate), cache_num=10, replace_rate=0.5, shuffle=False) as data:
        until(data.window.state.filled_by_others)
        loader = torch.utils.data.DataLoader(data, batch_size=5)
        for _ in range(8):
            assert sorted(ids_of(loader)) == list(range(10))
        assert data.stats().lag == 35
        gate.touch()
        until(lambda: data.window.ready(0, 10) == 10)
        assert sorted(ids_of(loader)) == list(range(10, 20))
        del loader


def in_place(sample: Any) -> Any:
    sample[0][:] += 1
    return sample


class Kept(Rows):
    """Gives the records that it keeps."""

    def _record(self, id: int) -> Any:
        kept = self.__dict__.setdefault("kept", {})
        return kept.setdefault(id, super()._record(id))


def test_steps_that_change_their_input_run_once() -> None:
    step = sf.mark_deterministic(in_place)
    with sf.SmartCacheDataset(Kept(12), step, cache_num=6, replace_rate=0.5, on_late="wait") as data:
        for _ in range(4):
            for numbers, id in data.__getitems__(range(6)):
                assert (numbers == id + 1).all()


# -- killed processes --------------------------------------------------------------------------------------------------


def fillers() -> list[Any]:
    return [process for process in active_children() if process.name == "stallfree-fill"]


def kill_fillers() -> None:
    for filler in fillers():
        filler.kill()
        filler.join()


def test_a_dead_fill_process_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with sf.SmartCacheDataset(
        Rows(40), cache_num=10, replace_rate=0.2, num_fill_workers=2, shuffle=False, on_late="wait"
    ) as data:
        loader = sf.DataLoader(data, batch_size=5)
        for epoch in range(12):
            assert sorted(ids_of(loader)) == [id % 40 for id in range(2 * epoch, 2 * epoch + 10)]
            if epoch % 2:
                kill_fillers()
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


def in_a_daemon(on_late: str) -> None:
    """A daemon may have no processes of its own, and so no fill process."""
    current_process()._config["daemon"] = True
    with sf.SmartCacheDataset(Rows(20), cache_num=8, replace_rate=0.5, shuffle=False, on_late=on_late) as data:
        assert epochs(data, "stallfree") == DUE


DUE = [sorted(id % 20 for id in range(4 * epoch, 4 * epoch + 8)) for epoch in range(9)]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("on_late", ["partial", "wait"])
def test_without_fill_processes_the_window_moves_as_planned(on_late: str, kind: str) -> None:
    """However they ended: the samples are prepared as they are asked for."""
    with sf.SmartCacheDataset(Killed(20), cache_num=8, replace_rate=0.5, shuffle=False, on_late=on_late) as data:
        data.begin_epoch(0)
        for _ in range(3):
            until(lambda: not data.is_started())
            len(data)  # as loaders do for each epoch
        assert epochs(data, kind) == DUE
        assert data.stats().resident_items <= data.cache_num + data.replace_num
    with sf.SmartCacheDataset(Rows(20), cache_num=8, replace_rate=0.5, shuffle=False, on_late=on_late) as data:
        data.shutdown()
        assert epochs(data, kind) == DUE
    if kind == "stallfree":
        assert Child(in_a_daemon, on_late).wait() == 0


def test_one_fill_process_does_the_work_of_two() -> None:
    with sf.SmartCacheDataset(Rows(20), cache_num=10, replace_rate=0.4, shuffle=False, num_fill_workers=2) as data:
        loader = torch.utils.data.DataLoader(data, batch_size=5)
        until(lambda: data.window.state.filled_by_others())
        one, _ = fillers()
        one.kill()
        one.join()
        ids_of(loader)
        until(lambda: data.cache.resident(range(10, 14)).all())
        del loader


def test_a_cache_that_is_too_small_for_the_window(caplog: pytest.LogCaptureFixture) -> None:
    """Samples are larger than those of the first look: they are read each time, and it is said."""
    with sf.SmartCacheDataset(Growing(), cache_num=20, replace_rate=0.2, shuffle=False, on_late="wait") as data:
        loader = torch.utils.data.DataLoader(data, batch_size=5, collate_fn=lambda batch: [len(x) for x in batch])
        for epoch in range(8):
            sizes = sorted(size for batch in loader for size in batch)
            assert sizes == sorted(len(Growing()[id % 60]) for id in range(4 * epoch, 4 * epoch + 20))
        assert data.stats().rejected > 0
        del loader


class Growing:
    def __len__(self) -> int:
        return 60

    def __getitem__(self, id: int) -> bytes:
        return bytes(1000 + (100_000 if id in LARGE else 0) + id)


LARGE = [id for id in unseen_ids(60) if id > 20]


def hold(report: int, method: str) -> None:
    data = sf.SmartCacheDataset(Rows(20), cache_num=10, multiprocessing_context=method)
    until(data.window.state.filled_by_others)
    os.write(report, b" ".join(str(p.pid).encode() for p in fillers()))
    signal.pause()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_fill_processes_die_with_their_parent(method: str) -> None:
    read, write = os.pipe()
    try:
        child = Child(hold, write, method)
        pids = list(map(int, os.read(read, 1000).split()))
        child.kill()
        assert len(pids) == 1
        until(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids))
    finally:
        os.close(read)
        os.close(write)
    sf.SmartCacheDataset(Rows(20), cache_num=10).close()  # sweeps up what the killed one left


# -- ranks -------------------------------------------------------------------------------------------------------------

RANKS = 3


class Together:
    """Lets forked ranks go on when all have come so far."""

    def __init__(self, ranks: int) -> None:
        self.steps = np.frombuffer(mmap.mmap(-1, 8 * ranks), np.int64)

    def wait(self, rank: int) -> None:
        self.steps[rank] += 1
        until(lambda: (self.steps >= self.steps[rank]).all())


def rank_main(rank: int, report: int, together: Together, kind: str, workers: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="4711", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    with sf.SmartCacheDataset(Rows(24), cache_num=12, replace_rate=0.25, on_late="wait") as data:
        sampler = data.rank_sampler()
        assert isinstance(sampler, DistributedSampler)
        loader = LOADERS[kind](data, batch_size=2, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for batch in loader:
                os.write(report, b"".join(b"%d %d\n" % (epoch, id) for id in ids_of([batch])))
                together.wait(rank)  # as the exchange of gradients does
            del batch


@pytest.mark.parametrize(("kind", "workers"), [("torch", 0), ("stallfree", 1)])
def test_the_ranks_of_a_host_split_one_window(kind: str, workers: int) -> None:
    read, write = os.pipe()
    try:
        together = Together(RANKS)
        children = [Child(rank_main, rank, write, together, kind, workers) for rank in range(RANKS)]
        assert [child.wait() for child in children] == [0] * RANKS
        os.close(write)
        write = -1
        lines = [tuple(map(int, line.split())) for line in os.read(read, 1 << 16).splitlines()]
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
    with sf.SmartCacheDataset(Rows(24), cache_num=12, replace_rate=0.25) as data:
        windows = [sorted(data.window.plan.window(3 * epoch).tolist()) for epoch in range(4)]
    assert [sorted(id for epoch, id in lines if epoch == number) for number in range(4)] == windows


def test_ranks_share_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4712")
    with sf.SmartCacheDataset(Rows(24), cache_num=12) as one, sf.SmartCacheDataset(Rows(24), cache_num=12) as two:
        assert one.cache.path == two.cache.path
        with sf.DataLoader(one, batch_size=4) as loader:
            ids_of(loader)
        assert two.stats().epoch == 0
        assert two.stats().resident_items >= 12
        two.close()
        assert one.cache.path.exists()
        monkeypatch.setenv("MASTER_PORT", "4713")
        with sf.SmartCacheDataset(Rows(24), cache_num=12) as other_job:
            assert other_job.cache.path != one.cache.path


def test_a_rank_that_is_behind_stays_in_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a loader that says no epochs: one rank begins the next one before another has ended the last."""
    monkeypatch.setenv("MASTER_PORT", "4714")

    def make() -> sf.SmartCacheDataset:
        return sf.SmartCacheDataset(Rows(20), cache_num=10, replace_rate=0.4, shuffle=False, on_late="wait")

    def ids(data: sf.SmartCacheDataset, positions: range) -> list[int]:
        return [label for _, label in data.__getitems__(positions)]

    before: list[int] = []
    with make() as fast, make() as slow:
        for epoch in range(5):
            window = fast.window.plan.window(4 * epoch).tolist()
            assert ids(fast, range(4)) == window[:4]
            if epoch:  # of the epoch before
                assert ids(slow, range(7, 10)) == before[7:]
            assert ids(fast, range(4, 7)) == window[4:7]
            before = window


class Overtaken(WindowState):
    """While this process looks at the epoch for the first time, another one requests positions of the next."""

    others: ClassVar[list[tuple[sf.SmartCacheDataset, range]]] = []

    @property
    def epoch(self) -> int:
        epoch = super().epoch
        if self.others:
            data, positions = self.others.pop()
            data.__getitems__(positions)
        return epoch


def test_a_process_that_is_overtaken_is_not_an_epoch_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers begin an epoch at once: one has asked for most of it before the other compares what was asked."""
    monkeypatch.setenv("MASTER_PORT", "4715")
    with (
        sf.SmartCacheDataset(Rows(20), cache_num=10, replace_rate=0.4, shuffle=False, on_late="wait") as quick,
        sf.SmartCacheDataset(Rows(20), cache_num=10, replace_rate=0.4, shuffle=False, on_late="wait") as slow,
    ):
        slow.window.state.__class__ = Overtaken
        for epoch in range(5):
            window = quick.window.plan.window(4 * epoch).tolist()
            Overtaken.others[:] = [(quick, range(8))]
            assert [label for _, label in slow.__getitems__(range(8, 10))] == window[8:]
            assert not Overtaken.others
