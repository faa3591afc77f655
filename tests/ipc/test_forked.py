"""Forks: what a child leaves to its parent, and calls in a forked process that ends with what they opened."""

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from children import Child
from stallfree.ipc.forked import Owner, call_in_child, prepare_for_forks


def test_the_result_and_what_the_call_changed(capfd: pytest.CaptureFixture[str]) -> None:
    changed: list[int] = []

    def call() -> Any:
        changed.append(1)
        print("inside", end=" ")
        return os.getpid(), np.arange(3_000_000), torch.arange(5)

    print("before", end=" ")
    pid, array, tensor = call_in_child(call, "the call")
    print("after")
    assert pid != os.getpid()
    assert (array[-1], tensor.tolist(), changed) == (2_999_999, [0, 1, 2, 3, 4], [])
    assert capfd.readouterr().out == "before inside after\n"


@pytest.mark.parametrize("error", [ValueError("no", 3), KeyError("a"), KeyboardInterrupt(), SystemExit(3)])
def test_errors_are_raised_as_they_are(error: BaseException) -> None:
    def call() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        call_in_child(call, "the call")
    assert caught.value.args == error.args
    assert "in call" in caught.value.__notes__[0]


def test_a_result_that_cannot_be_pickled() -> None:
    with pytest.raises(Exception, match="pickle"):
        call_in_child(lambda: threading.Lock(), "the call")


@pytest.mark.parametrize("ignored", [False, True])
def test_a_process_that_ends(ignored: bool) -> None:
    """Also in a program that ignores how its children end."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert call_in_child(lambda: 5, "the call") == 5
        for end, how in (
            (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by SIGKILL"),
            (lambda: os._exit(3), "exited with code 3"),
        ):
            how = "how it ended is not known" if ignored else how
            with pytest.raises(sf.WorkerError, match=f"the call was not finished: .*{how}"):
                call_in_child(end, "the call")
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_lock_that_was_copied_while_it_was_held() -> None:
    """The forked process waits for ever; the call is made in this process then."""
    lock, held, done = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    here = os.getpid()

    def call() -> int:
        if os.getpid() == here:
            done.set()
        with lock:
            return os.getpid()

    assert call_in_child(call, "the call", seconds=0.5) == here
    thread.join()


def test_with_many_open_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    files = [(tmp_path / "file").open() for _ in range(1100)]  # beyond what `select` can watch
    try:
        assert call_in_child(lambda: 5, "the call") == 5
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_a_child_leaves_to_its_parent() -> None:
    class Lender:
        forks = 0

        def before_fork(self) -> None:
            self.forks += 1

    owner, lender, freed = Owner(), Lender(), Lender()
    prepare_for_forks(lender)
    prepare_for_forks(freed)
    del freed

    def child() -> None:
        assert (owner.is_here, lender.forks) == (False, 1)

    assert Child(child).wait() == 0
    assert (owner.is_here, owner.pid, lender.forks) == (True, os.getpid(), 1)
