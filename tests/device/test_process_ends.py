"""If one of the two processes of a `ProcessPrefetcher` dies, the other is notified and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from process_tools import PATIENCE, Script, gone, read_stamp, started, wait_for

import stallfree as sf
from children import Child
from stallfree import ProcessPrefetcher
from stallfree.device import process


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts processes like "spawn", with the imports already done."""
    monkeypatch.setattr(process, "_START_METHOD", "forkserver")


def hold(script: Script, book: Path, batches: int) -> None:
    """Make a prefetcher, take some batches, report the process, and wait to be killed. For a forked process."""
    process._START_METHOD = "spawn"  # the server is not its child
    prefetcher = ProcessPrefetcher(script.make(), "cpu", timeout=PATIENCE)
    iteration = iter(prefetcher)
    taken = [read_stamp(next(iteration))[1] for _ in range(batches)]
    book.with_suffix(".new").write_text(f"{prefetcher.pid} {len(taken)}")
    book.with_suffix(".new").rename(book)
    threading.Event().wait()


def test_the_process_is_killed(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.write(batches=50)
    with ProcessPrefetcher(script.make(), "cpu", timeout=PATIENCE) as prefetcher:
        iteration = iter(prefetcher)
        batch = next(iteration)
        os.kill(prefetcher.pid, signal.SIGKILL)
        wait_for(lambda: gone(prefetcher.pid), "the process to die")
        rest = map(read_stamp, iteration)  # what was ready when it died may still be given
        with pytest.raises(sf.ProducerError, match="has ended by signal 9"):
            deque(rest, 0)
        assert read_stamp(batch) == (0, 0)
        with pytest.raises(sf.ProducerError):
            next(iteration)
        with pytest.raises(sf.ProducerError):
            next(iter(prefetcher))


def test_a_loader_that_ends_its_process(tmp_path: Path) -> None:
    with (
        ProcessPrefetcher(ending, "cpu", timeout=PATIENCE) as prefetcher,
        pytest.raises(sf.ProducerError, match="with exit code 7"),
    ):
        deque(prefetcher, 0)


def ending() -> Any:
    """A loader."""
    yield torch.zeros(1)
    os._exit(7)


@pytest.mark.slow
def test_a_loader_that_hangs_is_ended(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.write(hang=2)
    prefetcher = ProcessPrefetcher(script.make(), "cpu", timeout=PATIENCE)
    iteration = iter(prefetcher)
    assert [read_stamp(next(iteration))[1] for _ in range(2)] == [0, 1]
    prefetcher.close()
    book = tmp_path / "book"
    maker = Child(hold, script, book, 2)
    wait_for(book.exists, "the first batches")
    maker.kill()
    wait_for(lambda: gone(int(book.read_text().split()[0])), "the process to end")


@pytest.mark.slow
def test_workers_of_the_loader_do_not_keep_it_alive(tmp_path: Path) -> None:
    """Forked workers inherit their parent's memory, but not its connections."""
    before = started()
    with ProcessPrefetcher(with_workers, "cpu", timeout=PATIENCE) as prefetcher:
        iteration = iter(prefetcher)
        assert next(iteration).tolist() == [0, 1]
        os.kill(prefetcher.pid, signal.SIGKILL)
        with pytest.raises(sf.ProducerError, match="by signal 9"):
            list(iteration)
    wait_for(lambda: started() <= before, "the workers to end")


def with_workers() -> Any:
    """A torch loader with forked workers."""
    return torch.utils.data.DataLoader(
        range(10_000),  # type: ignore[arg-type]
        batch_size=2,
        num_workers=2,
        multiprocessing_context="fork",
    )


# -- at random moments ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_process_dies_at_random_moments(tmp_path: Path, seed: int) -> None:
    """The batches are complete and in order, and an error follows."""
    chance = random.Random(seed)
    script = Script(tmp_path)
    script.write(batches=100_000)
    with ProcessPrefetcher(script.make(), "cpu", chance.choice([1, 2, 5]), timeout=PATIENCE) as prefetcher:
        killer = threading.Timer(chance.random(), os.kill, (prefetcher.pid, signal.SIGKILL))
        killer.start()
        stamps = map(read_stamp, prefetcher)
        taken: list[tuple[int, int]] = []
        with pytest.raises(sf.ProducerError):
            taken.extend(stamps)
        killer.join()
        assert taken == [(0, number) for number in range(len(taken))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_who_made_it_dies_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Killed before, during and after the start of the process: it ends, and leaves only what `sweep` removes."""
    chance = random.Random(seed)
    script, before = Script(tmp_path), started()
    script.write(batches=100_000)

    def make() -> None:
        process._START_METHOD = "spawn"
        for batch in ProcessPrefetcher(script.make(), "cpu", timeout=PATIENCE):
            read_stamp(batch)

    maker = Child(make)
    time.sleep(chance.random() * 4)
    maker.kill()
    wait_for(lambda: started() <= before, "the process to end")
