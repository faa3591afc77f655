"""Several consumers of one `ProcessPrefetcher`: each gets every batch of every epoch once, in order."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from process_tools import ASKED, BACK, PATIENCE, Script, consume, die, entries, gone, read_stamp, wait_for

import stallfree as sf
from children import Child
from stallfree.device import process
from stallfree.device.consumer import Consumer
from stallfree.device.process import ProcessPrefetcher


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts processes like "spawn", with the imports already done."""
    monkeypatch.setattr(process, "_START_METHOD", "forkserver")


@contextmanager
def shared(script: Script, consumers: int, timeout: float = PATIENCE) -> Iterator[ProcessPrefetcher]:
    """Return a prefetcher for several consumers."""
    with ProcessPrefetcher(script.make(), "cpu", consumers=consumers, timeout=timeout) as prefetcher:
        yield prefetcher


def whole(epochs: range, batches: int) -> list[tuple[int, int]]:
    """Return all batches of some epochs."""
    return [(epoch, number) for epoch in epochs for number in range(batches)]


def take(iteration: Iterator[dict], count: int) -> list[int]:  # type: ignore[type-arg]
    """Return the numbers of the next batches."""
    return [read_stamp(next(iteration))[1] for _ in range(count)]


def test_each_gets_all(tmp_path: Path) -> None:
    """One consumer in this process, one in a forked one, one in a process that received it by pickle."""
    script = Script(tmp_path)
    script.write(batches=25, depth=2, consumers=3)
    with shared(script, 3) as prefetcher:
        books = [tmp_path / f"book-{number}" for number in range(3)]
        counts = script.map()
        forked = Child(consume, prefetcher.consumer(1), books[1], 1, script)
        given = multiprocessing.get_context("forkserver").Process(
            target=consume, args=(prefetcher.consumer(2), books[2], 1, script)
        )
        given.start()
        consume(prefetcher.consumer(0), books[0], 1, script)
        assert forked.wait() == 0
        given.join()
        given.close()
        assert [entries(book) for book in books] == [whole(range(1), 25)] * 3
        assert counts[ASKED] == 25
        assert counts[BACK : BACK + 3].tolist() == [25] * 3


def test_the_slowest_sets_the_pace_by_the_ring(tmp_path: Path) -> None:
    """A consumer that holds a batch stops the others after `depth` more and is named; one that breaks stops none."""
    script = Script(tmp_path)
    script.write(batches=8)
    with shared(script, 2) as prefetcher:
        fast, slow = prefetcher.consumer(0), prefetcher.consumer(1)
        going = iter(fast)
        fast.timeout = 0.1
        with pytest.raises(sf.WaitError, match=r"and consumer 1 \(not connected\) did not"):
            next(going)
        fast.timeout = PATIENCE
        going, held = iter(fast), iter(slow)
        assert take(held, 1) == [0]
        assert take(going, 3) == [0, 1, 2]
        fast.timeout = 0.1
        with pytest.raises(sf.WaitError, match=rf"consumer 1 \(process {os.getpid()}\) did not return batch 0"):
            next(going)
        fast.timeout = PATIENCE
        assert take(held, 1) == [1]
        assert take(going, 1) == [3]
        del held
        assert take(going, 4) == [4, 5, 6, 7]
        assert list(going) == []
        fast.timeout = 0.1
        going = iter(fast)
        with pytest.raises(sf.WaitError, match="an epoch starts when all consumers have requested it, and consumer 1"):
            next(going)
        fast.timeout = PATIENCE
        slow.close()  # now there is nobody to wait for
        assert take(going, 8) == list(range(8))
        with pytest.raises(sf.InputError, match="consumer 1 has left, and cannot connect again"):
            iter(slow)
        with pytest.raises(sf.InputError, match=f"consumer 0 belongs to process {os.getpid()} already"):
            iter(prefetcher)
        fast.close()


def test_who_breaks_off_takes_part_in_the_next(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.write(batches=10)
    with shared(script, 2) as prefetcher:
        book = tmp_path / "book"
        other = Child(consume, prefetcher.consumer(1), book, 3)
        one = prefetcher.consumer(0)
        for epoch, count in enumerate((4, 0, 10)):
            iteration = iter(one)
            assert take(iteration, count) == list(range(count))
            if count < 10:
                wait_for(lambda: book.exists() and (epoch, 0) in entries(book), "the epoch to begin")  # noqa: B023
        assert list(iteration) == []
        assert other.wait() == 0
        assert entries(book) == whole(range(3), 10)
        one.close()


def test_who_dies_holds_nobody_up(tmp_path: Path) -> None:
    """Killed with a batch in use, before the first batch, and before its first epoch."""
    script = Script(tmp_path)
    script.write(batches=30)
    with shared(script, 4) as prefetcher:
        book = tmp_path / "book"
        well = Child(consume, prefetcher.consumer(1), book, 2)
        for number, batches in ((2, 5), (3, 0)):
            Child(die, prefetcher.consumer(number), batches)
        one = prefetcher.consumer(0)
        assert [read_stamp(batch) for _ in range(2) for batch in one] == whole(range(2), 30)
        assert well.wait() == 0
        assert entries(book) == whole(range(2), 30)
        one.close()
        for _ in range(2):
            os.wait()


def test_the_process_ends_when_all_consumers_have_gone(tmp_path: Path) -> None:
    script = Script(tmp_path)
    with shared(script, 2) as prefetcher:
        books = [tmp_path / "0", tmp_path / "1"]
        consumers = [Child(consume, prefetcher.consumer(number), books[number], 1) for number in range(2)]
        assert [consumer.wait() for consumer in consumers] == [0, 0]
        wait_for(lambda: gone(prefetcher._child.pid), "the process to end")
        with pytest.raises(sf.ProducerError, match="has ended with exit code 0, or was closed"):
            iter(prefetcher)


def test_a_consumer_that_is_pickled_is_not_connected(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.write(batches=3)
    with shared(script, 2) as prefetcher:
        one = prefetcher.consumer(0)
        first = iter(one)
        copied: Consumer = pickle.loads(pickle.dumps(one))
        assert (copied.number, copied.consumers, copied.timeout) == (0, 2, PATIENCE)
        with pytest.raises(sf.InputError, match=f"consumer 0 belongs to process {os.getpid()} already"):
            iter(copied)
        other: Consumer = pickle.loads(pickle.dumps(prefetcher.consumer(1)))
        second = iter(other)
        assert take(first, 3) == take(second, 3) == [0, 1, 2]
        one.close()
        other.close()


def test_a_process_that_is_stopped_is_waited_for_no_longer_than_it_may(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.write(batches=200)
    with shared(script, 1, timeout=0.1) as prefetcher:
        prefetcher._own.timeout = PATIENCE
        iteration = iter(prefetcher)
        take(iteration, 1)
        prefetcher._own.timeout = 0.1
        os.kill(prefetcher._child.pid, signal.SIGSTOP)
        with pytest.raises(sf.WaitError, match=rf"the loading process {prefetcher._child.pid} does not answer"):
            deque(iteration, 0)
        os.kill(prefetcher._child.pid, signal.SIGCONT)
        prefetcher._own.timeout = PATIENCE
        assert read_stamp(list(iteration)[-1])[1] == 199
