"""Calls in a forked process that ends with what they opened."""

from __future__ import annotations

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
from stallfree.ipc.forked import call_in_child


def test_the_result_and_what_the_call_changed() -> None:
    changed: list[int] = []

    def call() -> Any:
        changed.append(1)
        return os.getpid(), np.arange(3_000_000), torch.arange(5)

    pid, array, tensor = call_in_child(call, "the call")
    assert pid != os.getpid()
    assert array[-1] == 2_999_999
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    assert changed == []


class Own(Exception):
    pass


@pytest.mark.parametrize("error", [ValueError("no", 3), KeyError("a"), Own("x"), KeyboardInterrupt(), SystemExit(3)])
def test_errors_keep_their_type(error: BaseException) -> None:
    def call() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        call_in_child(call, "the call")
    assert caught.value.args == error.args


def test_a_result_that_cannot_be_pickled() -> None:
    with pytest.raises(Exception, match="pickle"):
        call_in_child(lambda: threading.Lock(), "the call")


def test_a_process_that_is_killed() -> None:
    with pytest.raises(sf.WorkerError, match="the call was not finished: it was ended by SIGKILL"):
        call_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), "the call")


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


def test_what_was_printed_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    print("before", end=" ")
    call_in_child(lambda: print("inside", end=" "), "the call")
    print("after")
    assert capfd.readouterr().out == "before inside after\n"
