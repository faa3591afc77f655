"""If any process of a `ProcessPrefetcher` dies, the others are notified and nothing is left."""

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
from process_tools import PATIENCE, Script, consume, entries, gone, read_stamp, started, wait_for

import stallfree as sf
from children import Child
from stallfree.device import process
from stallfree.device.process import ProcessPrefetcher
from stallfree.ipc.folders import default_root, sweep


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts processes like "spawn", with the imports already done."""
    monkeypatch.setattr(process, "_START_METHOD", "forkserver")


def folders() -> list[Path]:
    """Return the existing folders of prefetchers."""
    return list(default_root().glob("prefetch-*"))


def swept() -> bool:
    """Return whether nothing is left after the next sweep."""
    sweep(default_root())
    return folders() == []


def hold(script: Script, book: Path, batches: int) -> None:
    """Make a prefetcher, take some batches, report the process, and wait to be killed. For a forked process."""
    process._START_METHOD = "spawn"  # the server is not its child
    prefetcher = ProcessPrefetcher(script.make(), "cpu", timeout=PATIENCE)
    iteration = iter(prefetcher)
    taken = [read_stamp(next(iteration))[1] for _ in range(batches)]
    book.with_suffix(".new").write_text(f"{prefetcher._child.pid} {len(taken)}")
    book.with_suffix(".new").rename(book)
    threading.Event().wait()


def test_the_process_is_killed(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.write(batches=50)
    with ProcessPrefetcher(script.make(), "cpu", timeout=PATIENCE) as prefetcher:
        iteration = iter(prefetcher)
        batch = next(iteration)
        os.kill(prefetcher._child.pid, signal.SIGKILL)
        wait_for(lambda: gone(prefetcher._child.pid), "the process to die")
        assert read_stamp(batch) == (0, 0)  # what was given is whole until the next is asked for
        rest = map(read_stamp, iteration)  # what was ready when it died may still be given
        with pytest.raises(sf.ProducerError, match="has ended by signal 9"):
            deque(rest, 0)
        assert set(batch["pixels"].unique().tolist()) == {-1}
        assert set(batch["where"].tolist()) == {-1}
        with pytest.raises(sf.ProducerError):
            next(iteration)
        with pytest.raises(sf.ProducerError):
            next(iter(prefetcher))
    assert folders() == []


def test_a_loader_that_ends_its_process(tmp_path: Path) -> None:
    with ProcessPrefetcher(ending, "cpu", timeout=PATIENCE) as prefetcher:
        iteration = iter(prefetcher)
        assert next(iteration).tolist() == [0]
        with pytest.raises(sf.ProducerError, match="with exit code 7"):
            deque(iteration, 0)


def ending() -> Any:
    """A loader."""
    yield torch.zeros(1)
    os._exit(7)


@pytest.mark.slow
def test_who_made_it_is_killed_and_a_consumer_goes_on(tmp_path: Path) -> None:
    """The consumer gets an error when the process has ended; nothing is left when the consumer ends, too."""
    script, book = Script(tmp_path), tmp_path / "book"
    script.write(batches=100_000)
    ours, theirs = os.pipe()

    def make() -> None:
        process._START_METHOD = "spawn"
        prefetcher = ProcessPrefetcher(script.make(), "cpu", consumers=1, timeout=PATIENCE)
        child = Child(report, prefetcher.consumer(0))
        os.write(theirs, f"{prefetcher._child.pid} {child.pid}".encode())
        threading.Event().wait()

    def report(consumer: Any) -> None:
        with pytest.raises(sf.ProducerError, match=r"the loading process \(process \d+\) has ended, or was closed"):
            consume(consumer, book, 1)
        os.write(theirs, b" heard")
        os._exit(0)

    maker = Child(make)
    os.close(theirs)
    producer, _ = map(int, os.read(ours, 100).split())
    wait_for(lambda: book.exists() and len(entries(book)) > 10, "some batches")
    maker.kill()
    assert os.read(ours, 100) == b" heard"
    os.close(ours)
    wait_for(lambda: gone(producer), "the process to end")
    wait_for(lambda: folders() == [], "its folder to go")
    got = entries(book)
    assert got == [(0, number) for number in range(len(got))]


@pytest.mark.slow
def test_a_loader_that_hangs_is_ended_by_the_kernel(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.write(hang=2)
    prefetcher = ProcessPrefetcher(script.make(), "cpu", timeout=PATIENCE)
    iteration = iter(prefetcher)
    assert [read_stamp(next(iteration))[1] for _ in range(2)] == [0, 1]
    prefetcher.close()
    assert folders() == []
    book = tmp_path / "book"
    maker = Child(hold, script, book, 2)
    wait_for(book.exists, "the first batches")
    maker.kill()
    wait_for(lambda: gone(int(book.read_text().split()[0])), "the process to end")
    wait_for(swept, "its folder to go")  # the last one out was killed


@pytest.mark.slow
def test_workers_of_the_loader_do_not_keep_it_alive(tmp_path: Path) -> None:
    """Forked workers inherit their parent's memory, but not its connections."""
    before = started()
    with ProcessPrefetcher(with_workers, "cpu", timeout=PATIENCE) as prefetcher:
        iteration = iter(prefetcher)
        assert next(iteration).tolist() == [0, 1]
        os.kill(prefetcher._child.pid, signal.SIGKILL)
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
def test_consumers_die_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Four of five consumers are killed; this one gets all batches."""
    chance = random.Random(seed)
    script = Script(tmp_path)
    script.write(batches=40)
    with ProcessPrefetcher(script.make(), "cpu", chance.choice([1, 2, 5]), consumers=5, timeout=PATIENCE) as prefetcher:
        books = [tmp_path / f"book-{number}" for number in range(5)]
        others = [Child(consume, prefetcher.consumer(number), books[number], 100) for number in range(1, 5)]
        one = prefetcher.consumer(0)
        killer = threading.Thread(target=kill_all, args=(others, chance))
        got = []
        for _ in range(3):
            for batch in one:
                if len(got) == 5:  # all are there
                    killer.start()
                got.append(read_stamp(batch))
        killer.join()
        assert got == [(epoch, number) for epoch in range(3) for number in range(40)]
        for book in books[1:]:
            there = entries(book)
            assert there == [(number // 40, number % 40) for number in range(len(there))]
        one.close()


def kill_all(others: list[Child], chance: random.Random) -> None:
    """One process after the other is killed, at some moment."""
    for other in others:
        time.sleep(chance.random() * 0.03)
        other.kill()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_process_dies_at_random_moments(tmp_path: Path, seed: int) -> None:
    """The batches are complete and in order, and all three consumers are notified of the end."""
    chance = random.Random(seed)
    script = Script(tmp_path)
    script.write(batches=1000)
    with ProcessPrefetcher(script.make(), "cpu", chance.choice([1, 2, 5]), consumers=3, timeout=PATIENCE) as prefetcher:
        books = [tmp_path / f"book-{number}" for number in range(3)]

        def run(number: int) -> None:
            with pytest.raises(sf.ProducerError):
                consume(prefetcher.consumer(number), books[number], 100)

        others = [Child(run, number) for number in range(3)]
        if chance.random() < 0.8:
            wait_for(lambda: books[0].exists() and len(entries(books[0])) > 3, "the first batches")
        time.sleep(chance.random() * 0.1)
        os.kill(prefetcher._child.pid, signal.SIGKILL)
        assert [other.wait() for other in others] == [0, 0, 0]
        for book in books:
            there = entries(book) if book.exists() else []
            assert there == [(number // 1000, number % 1000) for number in range(len(there))]
    assert folders() == []


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
    wait_for(swept, "its folder to go")
