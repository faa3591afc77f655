"""A disk that is slow to write to costs hits: other processes neither wait for it nor give up on it."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stallfree.cache.memory import writer

import stallfree as sf
from children import Child
from smart_data import until
from stallfree.cache.arena import DiskArena
from stallfree.ipc.locks import FileLock

COUNT, SIZE = 300, 64 << 10


class Blocks:
    """A data set of samples of 64 KiB."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        return np.full(SIZE, id % 251, np.uint8)


@pytest.fixture
def cached(tmp_path: Path) -> Any:
    with sf.CachedDataset(Blocks(), capacity="64MiB", store=tmp_path / "disk", name="slow") as data:
        yield data


def test_other_processes_change_the_cache_while_a_batch_is_written(
    cached: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that has found a step to be random, and drops what it made."""
    begun, done = tmp_path / "begun", tmp_path / "done"
    write = DiskArena.write

    def slowly(self: DiskArena, *arguments: Any) -> None:
        begun.touch()
        if not done.exists():
            time.sleep(0.025)
        write(self, *arguments)

    monkeypatch.setattr(writer, "_PIECE", 2 * SIZE, raising=False)

    def store() -> None:
        monkeypatch.setattr(DiskArena, "write", slowly)
        assert cached.cache.put_many(range(COUNT), [cached[0]] * COUNT).all()

    child = Child(store)
    until(begun.exists)
    cached.cache.drop([0])
    cached.cache.uncache_steps(1)
    done.touch()
    assert child.wait() in (0, 1)  # what was written after the steps were uncached was not stored


def hold(folder: Path) -> None:
    with FileLock(folder / "lock").hold(10, "the test"):
        os.kill(os.getpid(), signal.SIGSTOP)


def test_samples_are_stored_again_as_soon_as_the_other_writer_is_done(
    cached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of the many batches that come meanwhile, one waits for it."""
    monkeypatch.setattr(writer, "LOCK_SECONDS", 0.05)
    waits: list[float] = []
    wait = FileLock.hold
    monkeypatch.setattr(
        FileLock, "hold", lambda self, seconds, what: (waits.append(seconds), wait(self, seconds, what))[1]
    )
    other = Child(hold, cached.cache.path)
    other.wait_until_stopped()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = sf.DataLoader(cached, batch_size=1)
        batches = iter(loader)
        for _ in range(70):
            next(batches)
        assert [seconds for seconds in waits if seconds] == [0.05]
        other.signal(signal.SIGCONT)
        assert other.wait() == 0
        assert len(list(batches)) == COUNT - 70
    assert cached.stats().resident_items >= COUNT - 70 - 10  # some were prepared before they were asked for
    [warning] = caught
    assert "samples are not stored until" in str(warning.message)
