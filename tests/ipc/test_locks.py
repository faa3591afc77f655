"""The lock between processes: exclusive, released by death, and kept when another object is closed."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from children import Child, Holder
from stallfree.errors import WaitError
from stallfree.ipc.locks import CLAIMS, FileLock


def holder(path: Path) -> Holder:
    """Another process that holds the lock and has claimed byte 7."""

    def begin() -> Callable[[], None]:
        lock = FileLock(path)
        held = lock.hold(30, "holding")
        held.__enter__()
        assert lock.claim(7)
        return lambda: held.__exit__(None, None, None)

    return Holder(begin)


def claimer(path: Path, count: int) -> Holder:
    """Another process that has claimed the given number of bytes."""

    def begin() -> Callable[[], None]:
        lock = FileLock(path)
        for _ in range(count):
            lock.claim_any()
        return lock.close

    return Holder(begin)


def counted_elsewhere(path: Path) -> int:
    """Return the claims that a forked child sees, which include those of this process."""

    def count() -> None:
        lock = FileLock(path)
        os._exit(sum(not lock.claim(byte) for byte in range(1, CLAIMS + 1)))

    return Child(count).wait()


def is_free_elsewhere(path: Path, byte: int) -> bool:
    """Return whether a forked child, which inherits no lock, can claim `byte`."""

    def claim() -> None:
        os._exit(0 if FileLock(path).claim(byte) else 3)

    return Child(claim).wait() == 0


def test_one_at_a_time_over_processes_and_threads(tmp_path: Path) -> None:
    lock_file, file = tmp_path / "lock", tmp_path / "count"
    file.write_text("0")

    def count() -> None:
        lock = FileLock(lock_file)
        for _ in range(75):
            with lock.hold(30, "counting"):
                file.write_text(str(int(file.read_text()) + 1))
        lock.close()

    children = [Child(count) for _ in range(2)]
    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait() for child in children] == [0, 0]
    assert file.read_text() == "300"


def test_a_wait_has_a_limit_and_says_for_what(tmp_path: Path) -> None:
    process = holder(tmp_path / "lock")
    lock = FileLock(tmp_path / "lock")
    with (
        pytest.raises(WaitError, match=r"storing: another process \(stopped\?\) held .*lock for 0.02 s"),
        lock.hold(0.02, "storing"),
    ):
        pass
    process.end()
    with lock.hold(30, "storing"):
        pass
    lock.close()


def test_death_frees_the_lock_and_the_claims(tmp_path: Path) -> None:
    process = holder(tmp_path / "lock")
    lock = FileLock(tmp_path / "lock")
    assert not lock.claim(7)
    assert lock.claimed_elsewhere()
    process.kill()
    assert not lock.claimed_elsewhere()
    assert lock.claim(7)
    with lock.hold(0, "storing"):
        pass
    lock.close()


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    with first.hold(1, "one"), pytest.raises(WaitError, match="two: another thread"), second.hold(0.02, "two"):
        pass
    first.close()
    second.close()


def test_closing_one_object_keeps_the_locks_of_another(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    assert first.claim(3)
    assert not second.claim(3)
    assert second.claim(4)
    second.close()
    second.close()
    assert not is_free_elsewhere(path, 3)
    assert is_free_elsewhere(path, 4)  # what the closed object had claimed
    first.release(3)
    assert is_free_elsewhere(path, 3)
    first.close()
    assert not first.claim(3)


def test_only_the_claimer_releases(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    assert first.claim(3)
    second.release(3)
    assert not is_free_elsewhere(path, 3)
    first.close()
    second.close()


def test_a_forked_child_has_no_claims_and_takes_none_away(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.claim(3)

    def child() -> None:
        assert not lock.claim(3)
        assert lock.claim(4)
        assert lock.claimed_elsewhere()
        lock.release(3)
        lock.close()

    assert Child(child).wait() == 0
    assert not is_free_elsewhere(tmp_path / "lock", 3)
    lock.close()


def test_a_fork_while_a_thread_holds_the_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock.hold(30, "holding"):
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def child() -> None:
        with lock.hold(30, "in the child"):  # waits for the parent's thread, not for its copy of it
            pass

    waiting = Child(child)
    done.set()
    thread.join()
    assert waiting.wait() == 0
    lock.close()


def test_the_lowest_free_byte_is_claimed(tmp_path: Path) -> None:
    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    process = claimer(tmp_path / "lock", 2)
    assert [lock.claim_any(), other.claim_any(), lock.claim_any()] == [3, 4, 5]
    other.release(4)
    assert lock.claim_any() == 4
    process.kill()
    assert [lock.claim_any(), other.claim_any(), lock.claim_any()] == [1, 2, 6]
    lock.close()
    assert other.claim_any() == 1
    other.close()


def test_claims_of_others_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FileLock(path)
    assert lock.claim_any() == 1
    assert not lock.claimed_elsewhere()  # its own do not count
    process = claimer(path, 3)
    assert lock.claimed_elsewhere()
    process.kill()
    with lock.hold(1, "looking"):  # which is not a claim
        assert not lock.claimed_elsewhere()
    lock.close()
    assert not lock.claimed_elsewhere()


def test_there_are_so_many_claims(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock, other = FileLock(path), FileLock(path)
    assert [lock.claim_any() for _ in range(CLAIMS)] == list(range(1, CLAIMS + 1))
    with pytest.raises(WaitError, match=rf"^all {CLAIMS} places in .*lock are taken by running processes: use fewer"):
        other.claim_any()
    assert counted_elsewhere(path) == CLAIMS
    lock.release(CLAIMS)
    assert other.claim_any() == CLAIMS
    lock.close()
    other.close()


def test_threads_get_claims_of_their_own(tmp_path: Path) -> None:
    """No claim is lost when another byte is released at the same time."""
    path = tmp_path / "lock"
    locks = [FileLock(path) for _ in range(4)]
    kept: list[int] = []

    def claim(lock: FileLock) -> None:
        for _ in range(50):
            lock.release(lock.claim_any())
        kept.append(lock.claim_any())

    threads = [threading.Thread(target=claim, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(kept)) == 4
    assert counted_elsewhere(path) == 4
    for lock in locks:
        lock.close()


def test_a_claim_while_another_thread_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim waits until the byte is unlocked: unlocking it later would lose the claim."""
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    assert first.claim_any() == 1
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(second.claim_any()))
    plain = fcntl.lockf

    def unlock(fd: int, how: int, *rest: int) -> None:
        if how == fcntl.LOCK_UN:
            thread.start()
            thread.join(0.1)  # long enough to come to its claim, if nothing keeps it back
        plain(fd, how, *rest)

    monkeypatch.setattr(fcntl, "lockf", unlock)
    first.release(1)
    monkeypatch.undo()
    thread.join()
    assert got == [1]
    assert counted_elsewhere(path) == 1
    first.close()
    second.close()


def test_an_exception_frees_the_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    with pytest.raises(KeyError), lock.hold(1, "one"):
        raise KeyError
    with lock.hold(0, "two"):
        pass
    lock.close()
    with pytest.raises(ValueError, match="is closed"), lock.hold(0, "three"):
        pass


def test_a_finalizer_may_close_one_while_another_is_opened(tmp_path: Path) -> None:
    """Garbage collection may run at any allocation, also while a lock of the same file is opened."""

    class Owner:
        def __init__(self) -> None:
            self.lock = FileLock(tmp_path / "lock")
            self.myself = self  # only the collector frees it

        def __del__(self) -> None:
            self.lock.close()

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            Owner()
            lock = FileLock(tmp_path / "lock")
            with lock.hold(1, "one"):
                pass
            lock.close()
    finally:
        gc.set_threshold(*before)
    gc.collect()
