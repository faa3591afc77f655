"""The lock between processes: exclusive, released by death, and kept when another object is closed."""

import fcntl
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from children import Child, Holder, run_threads
from stallfree.errors import WaitError
from stallfree.ipc.locks import CLAIMS, FileLock

Locks = tuple[FileLock, FileLock]


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[Locks]:
    made = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    yield made
    for lock in made * 2:
        lock.close()


def taken_elsewhere(lock: FileLock, *numbers: int) -> int:
    """How many of some bytes a forked child, which inherits no claim, finds claimed."""
    return Child(lambda: os._exit(sum(not FileLock(lock.path).claim(number) for number in numbers))).wait()


def test_one_at_a_time_over_processes_and_threads(tmp_path: Path) -> None:
    file = tmp_path / "count"
    file.write_text("0")

    def count() -> None:
        with closing(FileLock(tmp_path / "lock")) as lock:
            for _ in range(75):
                with lock.hold(30, "counting"):
                    file.write_text(str(int(file.read_text()) + 1))

    children = [Child(count) for _ in range(2)]
    run_threads(count, count)
    assert [child.wait() for child in children] == [0, 0]
    assert file.read_text() == "300"


def test_a_wait_has_a_limit_and_death_frees_the_lock_and_the_claims(locks: Locks) -> None:
    lock, other = locks

    def begin() -> Callable[[], None]:
        theirs = FileLock(lock.path)
        (held := theirs.hold(30, "holding")).__enter__()
        assert [theirs.claim(7), theirs.claim_any(), theirs.claim_any()] == [True, 1, 2]
        return lambda: held.__exit__(None, None, None)

    process = Holder(begin)
    with (
        pytest.raises(WaitError, match=r"storing: another process \(stopped\?\) held .*lock for 0.02 s"),
        lock.hold(0.02, "storing"),
    ):
        pass
    assert not lock.claim(7)
    assert lock.claimed_elsewhere()
    assert [lock.claim_any(), other.claim_any(), lock.claim_any()] == [3, 4, 5]
    other.release(4)
    assert lock.claim_any() == 4
    process.kill()
    with lock.hold(0, "storing"):
        assert not lock.claimed_elsewhere(), "its own claims and holding do not count"
    assert [lock.claim(7), lock.claim_any(), other.claim_any(), lock.claim_any()] == [True, 1, 2, 6]


def test_threads_exclude_each_other_and_an_exception_frees_the_lock(locks: Locks) -> None:
    lock, other = locks
    with lock.hold(1, "one"), pytest.raises(WaitError, match="two: another thread"), other.hold(0.02, "two"):
        pass
    with pytest.raises(KeyError), lock.hold(1, "one"):
        raise KeyError
    with other.hold(0, "two"):
        pass


def test_only_the_claimer_releases_and_closing_keeps_the_claims_of_others(locks: Locks) -> None:
    lock, other = locks
    assert [lock.claim(3), other.claim(3), other.claim(4)] == [True, False, True]
    other.release(3)
    assert taken_elsewhere(lock, 3, 4) == 2
    other.close()
    assert (taken_elsewhere(lock, 3), taken_elsewhere(lock, 4)) == (1, 0)
    lock.release(3)
    assert taken_elsewhere(lock, 3) == 0
    lock.close()
    assert not lock.claim(3)
    assert not lock.claimed_elsewhere()


def test_a_forked_child_has_no_claims_and_takes_none_away(locks: Locks) -> None:
    lock, other = locks
    assert [lock.claim(3), lock.claim(5)] == [True, True]

    def begin() -> Callable[[], None]:
        assert [lock.claim(3), lock.claim(4), lock.claimed_elsewhere()] == [False, True, True]
        lock.release(3)
        other.close()
        return end

    def end() -> None:
        assert lock.claim(5), "it is free now"

    child = Holder(begin)
    assert taken_elsewhere(lock, 3, 4, 5) == 3
    lock.release(5)
    child.end()


def test_a_fork_while_a_thread_holds_the_lock(locks: Locks) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with locks[0].hold(30, "holding"):
            held.set()
            done.wait()

    def fork() -> None:
        held.wait()
        child = Child(lambda: locks[0].hold(30, "in the child").__enter__())  # waits for the thread, not for a copy
        done.set()
        assert child.wait() == 0

    run_threads(hold, fork)


def test_there_are_so_many_claims(locks: Locks) -> None:
    lock, other = locks
    assert [lock.claim_any() for _ in range(CLAIMS)] == list(range(1, CLAIMS + 1))
    with pytest.raises(WaitError, match=rf"^all {CLAIMS} places in .*lock are taken by running processes: use fewer"):
        other.claim_any()
    lock.release(CLAIMS)
    assert other.claim_any() == CLAIMS


def test_a_claim_while_another_thread_gives_it_back(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim waits until the byte is unlocked: unlocking it later would lose the claim."""
    lock, other = locks
    assert lock.claim_any() == 1
    thread, unpatched = threading.Thread(target=other.claim_any), fcntl.lockf

    def unlock(fd: int, how: int, *rest: int) -> None:
        if how == fcntl.LOCK_UN:
            thread.start()
            thread.join(0.1)  # long enough to come to its claim, if nothing keeps it back
        unpatched(fd, how, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", unlock)
        lock.release(1)
    thread.join()
    assert (other.claim(1), taken_elsewhere(lock, 1, 2)) == (False, 1)


def test_closing_waits_for_a_thread_that_writes(tmp_path: Path) -> None:
    lock, holding, go, free = FileLock(tmp_path / "lock"), threading.Event(), threading.Event(), list[bool]()

    def write() -> None:
        with lock.hold(1, "writing"):
            holding.set()
            while not go.wait(0.01) and threading.main_thread().is_alive():
                free.append(Child(lambda: os._exit(FileLock(lock.path)._file.lock(0))).wait() == 1)  # type: ignore

    def close() -> None:
        holding.wait()
        threading.Timer(0.1, go.set).start()
        lock.close()

    run_threads(write, close)
    assert free
    assert not any(free)


def test_a_finalizer_may_close_one_while_another_is_opened(tmp_path: Path) -> None:
    """Garbage collection may run at any allocation, also while a lock of the same file is opened."""

    class Cyclic:
        def __init__(self) -> None:
            self.lock, self.myself = FileLock(tmp_path / "lock"), self  # only the collector frees it

        def __del__(self) -> None:
            self.lock.close()

    before = gc.get_threshold()
    gc.set_threshold(1)
    for _ in range(50):
        Cyclic()
        with closing(FileLock(tmp_path / "lock")) as lock, lock.hold(1, "one"):
            pass
    gc.set_threshold(*before)
    gc.collect()
