"""Forked processes for tests: they need not import everything anew."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

PATIENCE = 60.0  # seconds until a child that does not end is taken for hung


def until(met: Callable[[], Any], what: str = "it happens") -> Any:
    """Wait until `met` returns something true, and return that. Fails the test after 60 s."""
    deadline = time.monotonic() + PATIENCE
    while not (found := met()):
        assert time.monotonic() < deadline, f"after {PATIENCE:.0f} s still not so: {what}"
        time.sleep(0.001)
    return found


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def received(channel: Any) -> bytes:
    """Return the next message of a `Channel` or `Child` of `stallfree.ipc`."""
    message = channel.receive_by(time.monotonic() + PATIENCE)
    assert message is not None
    return bytes(message)


class Child:
    """A forked process that runs `target(*arguments)`; an exception in it makes `wait` give 1."""

    def __init__(self, target: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                target(*arguments, **options)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def wait(self) -> int:
        """Wait until it has ended: its exit code, or minus the signal that ended it. One that hangs fails the test."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        self.signal(signal.SIGABRT)  # pytest's faulthandler then writes where its threads are
        self.signal(signal.SIGCONT)
        time.sleep(1)
        self.kill()
        pytest.fail(f"a child process has not ended after {PATIENCE:.0f} s")

    def wait_until_stopped(self) -> None:
        """Wait until it has stopped itself with SIGSTOP."""
        os.waitpid(self.pid, os.WUNTRACED)


class Holder:
    """A forked process that runs `begin()`, waits until it is told to end, and runs what `begin` gave back.

    It has begun when the constructor returns.
    """

    def __init__(self, begin: Callable[[], Callable[[], Any]]) -> None:
        begun, tell_begun = os.pipe()
        told, self._tell = os.pipe()

        def run() -> None:
            os.close(self._tell)
            end = begin()
            os.write(tell_begun, b"x")
            os.read(told, 1)
            end()

        self._child = Child(run)
        os.close(tell_begun)
        os.close(told)
        assert os.read(begun, 1) == b"x"
        os.close(begun)

    @property
    def pid(self) -> int:
        return self._child.pid

    def end(self) -> None:
        os.write(self._tell, b"x")
        assert self._child.wait() == 0
        os.close(self._tell)

    def kill(self) -> None:
        self._child.kill()
        os.close(self._tell)


def run_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Return the results of calls that are made at the same time; raises the first error."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [made.result() for made in [threads.submit(call) for call in calls]]
