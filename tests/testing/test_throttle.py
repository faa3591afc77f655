"""Slow storage: exact arithmetic by a clock of our own, exact counts by real processes."""

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stallfree as sf
from cached_data import Given
from children import Child
from loader_data import Made
from stallfree.testing import ThrottledSource, throttle


class StoppedClock:
    """Notes the waits and does not move: all requests come at once."""

    def __init__(self) -> None:
        self.time = 100.0
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


RECORDS = [b"x" * 100, (b"y" * 300, 7), b""]


def test_all_limits_together() -> None:
    clock = StoppedClock()
    source = ThrottledSource(RECORDS, bandwidth=100, latency=0.5, iops=0.5, clock=clock)
    for id in (1, 0, 0):
        source.fetch(id)
    # starts at 0, 2, 4; the line is free at 3, 4, 5; half a second later each arrives
    assert clock.waits == [3.5, 4.5, 5.5]
    clock.waits = []
    few = ThrottledSource(RECORDS, iops=0.5, clock=clock)
    assert [few.fetch(id) for id in (2, 1, 0)] == RECORDS[::-1]
    assert clock.waits == [2.0, 4.0]


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 500)), min_size=1, max_size=30))
def test_in_any_window_at_most_the_bandwidth_and_one_record(requests: list[tuple[float, int]]) -> None:
    clock = StoppedClock()
    source = ThrottledSource([bytes(size) for _, size in requests], bandwidth=100, clock=clock)
    arrivals = []
    for id, (pause, size) in enumerate(requests):
        clock.time += pause
        clock.waits = [0.0]
        source.fetch(id)
        arrivals.append((clock.time + clock.waits[-1], size))
    source.close()
    for first in range(len(arrivals)):
        for last in range(first, len(arrivals)):
            window = arrivals[last][0] - arrivals[first][0]
            total = sum(size for _, size in arrivals[first : last + 1])
            assert total <= 100 * window + arrivals[first][1] + 1e-6


def test_the_data_are_the_same_and_what_fails_is_not_counted() -> None:
    inner: Any = Given([b"xyz", OSError("unreadable")], [len])
    inner.classes, inner.class_to_idx = ["cat"], {"cat": 0}
    source = ThrottledSource(inner)
    for name in ("pipeline", "classes", "class_to_idx"):
        assert getattr(source, name) == getattr(inner, name)
    assert (source.fingerprint(), source.where(-1), len(source)) == (inner.fingerprint(), inner.where(-1), 2)
    assert source[0] == 3
    for id, error in ((1, OSError), (2, IndexError)):
        with pytest.raises(error):
            source.fetch(id)
    assert (source.requests, source.bytes) == (1, 3)


def test_threads_take_turns_in_a_data_set_but_wait_together() -> None:
    inside = []

    def fetch(id: int) -> bytes:
        inside.append(id)
        time.sleep(0.001)
        assert inside == [id], "two threads at once"
        inside.pop()
        return b"x"

    class Meeting:
        """A clock whose sleepers wait for each other: with a lock around the wait, they would never meet."""

        barrier = threading.Barrier(4, timeout=30)

        def monotonic(self) -> float:
            return 0.0

        def sleep(self, seconds: float) -> None:
            self.barrier.wait()

    source = ThrottledSource(Made(100, fetch), latency=1, clock=Meeting())
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(source.fetch, range(20))) == [b"x"] * 20
    assert source.requests == 20


def test_state_goes_with_the_last_object(store_root: Path) -> None:
    source = ThrottledSource(RECORDS)
    copy = pickle.loads(pickle.dumps(source))
    copy.fetch(0)
    source.fetch(0)
    assert copy.requests == source.requests == 2
    assert len(list(store_root.glob("throttle-*"))) == 1
    del source
    gc.collect()
    copy.fetch(0)
    assert copy.bytes == 300
    copy.close()
    copy.close()
    assert not list(store_root.glob("throttle-*"))
    with pytest.raises(sf.InputError, match="closed"):
        _ = copy.requests
    with pytest.raises(sf.InputError, match="closed"):
        copy.fetch(0)


def fetch_many(source: ThrottledSource, times: int, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(source.fetch, [0] * times))


def die_inside(source: ThrottledSource) -> None:
    """Fetch, and be killed after the state was read and before it is written, with the lock held."""
    throttle._State.store = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    source.fetch(0)


@pytest.mark.parametrize(
    ("method", "processes", "times"), [("fork", 4, 50), pytest.param("spawn", 2, 100, marks=pytest.mark.slow)]
)
def test_limits_and_counts_hold_across_processes(method: str, processes: int, times: int) -> None:
    size, bandwidth, iops = 10_000, 20e6, 5_000
    source = ThrottledSource([bytes(size)], bandwidth=bandwidth, iops=iops, latency=0.001)
    context: Any = multiprocessing.get_context(method)
    children = [context.Process(target=fetch_many, args=(source, times, 3)) for _ in range(processes)]
    start = time.monotonic()
    for child in children:
        child.start()
    fetch_many(source, times, 2)
    for child in children:
        child.join(120)
    elapsed = time.monotonic() - start
    assert [child.exitcode for child in children] == [0] * processes
    total = times * (processes + 1)
    assert (source.requests, source.bytes) == (total, total * size)
    assert elapsed >= total * size / bandwidth
    assert elapsed >= (total - 1) / iops


def test_a_process_killed_with_the_lock_stops_nobody() -> None:
    source = ThrottledSource(RECORDS, bandwidth="1GB/s")
    for _ in range(2):
        child = Child(die_inside, source)
        source.fetch(0)
        assert child.wait() == -signal.SIGKILL
    source.fetch(1)
    assert (source.requests, source.bytes) == (3, 500)


def test_a_fork_in_the_midst_of_a_fetch() -> None:
    entered, leave = threading.Event(), threading.Event()

    def fetch(id: int) -> bytes:
        entered.set()
        return b"x" if id == 0 or leave.wait(30) else b""

    source = ThrottledSource(Made(2, fetch))
    thread = threading.Thread(target=source.fetch, args=(1,))
    thread.start()
    entered.wait(30)
    assert Child(source.fetch, 0).wait() == 0
    leave.set()
    thread.join()
    assert source.requests == 2
