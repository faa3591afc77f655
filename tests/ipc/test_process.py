"""Processes that end with their parent, and process its messages until then."""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import process_mains as mains
import psutil
import pytest

import stallfree as sf
from children import Child as Forked
from stallfree.ipc import process
from stallfree.ipc.process import Child, Parent

PATIENCE = 60.0
METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]


def start(main: Callable[..., None], *arguments: Any, method: str = "fork", **options: Any) -> Child:
    return Child(main, *arguments, context=multiprocessing.get_context(method), name="test", **options)


def soon() -> float:
    return time.monotonic() + PATIENCE


def received(child: Child) -> bytes:
    """Return the next message."""
    message = child.receive_by(soon())
    assert message is not None
    return bytes(message)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = soon()
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("given", "was_set", "requested", "expected"),
    [
        (None, None, True, "forkserver"),
        (None, None, False, "fork"),
        (None, "spawn", False, "spawn"),
        ("forkserver", None, False, "forkserver"),
    ],
)
def test_how_processes_start(
    given: str | None, was_set: str | None, requested: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default of Python 3.14, and no start method set by looking at it."""
    monkeypatch.setattr(process, "get_all_start_methods", lambda: ["forkserver", "spawn", "fork"])
    monkeypatch.setattr(process, "get_start_method", lambda allow_none: was_set)
    assert process.context_of(given, requested=requested).get_start_method() == expected


@pytest.mark.parametrize("method", METHODS)
def test_messages_both_ways(method: str) -> None:
    child = start(mains.echo, 5, method=method)
    assert child.wait_until_reported(PATIENCE) is None
    assert child.reported
    assert child.alive
    child.send(b"a", b"b" * 100_000)
    child.send(b"c")
    assert [len(received(child)) for _ in range(3)] == [3, 100_002, 3]
    child.end(soon())
    assert (child.alive, child.exit_code) == (False, 0)
    child.end(soon())
    child.send(b"lost")


@pytest.mark.parametrize(
    ("method", "leads"), [("fork", True), ("forkserver", False), pytest.param("spawn", True, marks=pytest.mark.slow)]
)
def test_what_it_is(method: str, leads: bool) -> None:
    child = start(mains.identify, method=method, leads=leads)
    pid, session, interrupted, ended = ast.literal_eval(received(child).decode())
    assert (pid, interrupted, ended) == (child.pid, True, True)
    assert (session == pid) == leads
    child.end(soon())


def test_an_end_that_was_asked_for_comes_after_the_messages(tmp_path: Path) -> None:
    book = tmp_path / "book"
    child = start(mains.listen, book)
    child.wait_until_reported(PATIENCE)
    child.send(b"x", b"y" * 1_000_000)
    child.finish()
    child.end(soon())
    assert child.exit_code == 0
    assert book.read_text().split() == ["x", "y" * 1_000_000, "None", "ended"]


def test_it_may_send_while_it_shall_end() -> None:
    child = start(mains.flood, 1_000_000)
    child.wait_until_reported(PATIENCE)
    deadline = time.monotonic() + 0.2
    child.end(deadline)
    assert child.exit_code in (-signal.SIGKILL, 1)  # killed, or its last message was not received


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    child = start(mains.lead, file, leads=True)
    child.wait_until_reported(PATIENCE)
    wait_for(lambda: file.exists() and file.read_text() != "")
    child.end(time.monotonic() + 0.01)
    assert child.exit_code == -signal.SIGKILL
    wait_for(lambda: gone(int(file.read_text())))  # what it started is killed, too


# -- reporting in -----------------------------------------------------------------------------------------------------


def test_one_that_does_not_report_in_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    child = start(mains.hang)
    with pytest.raises(TimeoutError):
        child.wait_until_reported(0.0)
    child.end(0.0)
    monkeypatch.setattr(process, "REPORT_SECONDS", 0.01)
    child = start(mains.hang, attempt=1)
    with pytest.raises(EOFError):
        child.wait_until_reported(PATIENCE)
    assert child.overdue
    child.end(1e9)  # it is not waited for
    assert child.exit_code == -signal.SIGKILL


def test_one_that_is_not_forked_has_time() -> None:
    child = start(mains.echo, 0, method="forkserver")
    assert child._due == float("inf")
    child.end(soon())


def test_a_start_that_fails() -> None:
    child = start(mains.fail)
    assert child.wait_until_reported(PATIENCE) == b"cannot begin"
    child.end(soon())
    child = start(mains.die)
    with pytest.raises(EOFError):
        child.wait_until_reported(PATIENCE)
    assert child.join(PATIENCE) == 3
    child.end(soon())
    assert child.exit_code == 3


def test_parts_that_cannot_be_pickled_are_named() -> None:
    lock = threading.Lock()
    with pytest.raises(
        sf.InputError, match=r"^the data set cannot be sent to a process started by 'forkserver': .*lock"
    ):
        start(mains.echo, lock, method="forkserver", parts=[("collate_fn", int), ("the data set", lock)])
    with pytest.raises(TypeError, match="lock"):
        start(mains.echo, lock, method="forkserver")


# -- the end of the parent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("main", [mains.busy, mains.step])
def test_it_ends_with_its_parent(main: Callable[..., None], method: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    context = multiprocessing.get_context(method)
    parent = Forked(mains.start_and_wait, main, context, file)
    wait_for(lambda: file.exists() and file.read_text() != "")
    parent.kill()
    pid = int(file.read_text())
    wait_for(lambda: gone(pid))
    assert main is mains.busy or file.with_suffix(".end").exists()


def test_a_parent_that_is_not_the_direct_one() -> None:
    """The parent of a process that a fork server has started, of which another process has a copy of the connection."""
    forked = Forked(signal.pause)
    ours, theirs = socket.socketpair()  # which stays open
    parent = Parent(ours, forked.pid)
    assert not parent.ended
    assert not parent.wait(0.0)
    forked.kill()
    assert parent.ended
    assert parent.wait(0.0)
    for end in (ours, theirs):
        end.close()


def test_a_sibling_does_not_hold_it_back(tmp_path: Path) -> None:
    """A process that was forked later holds no copy of the descriptors that show the parent's end."""
    files = [tmp_path / "one", tmp_path / "two"]

    def run() -> None:
        children = [start(main, file) for main, file in zip((mains.busy, mains.ignore), files, strict=True)]
        threading.Event().wait()
        assert children

    parent = Forked(run)
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    parent.kill()
    busy, ignoring = (int(file.read_text()) for file in files)
    wait_for(lambda: gone(busy))
    os.kill(ignoring, signal.SIGKILL)  # it does not look
    wait_for(lambda: gone(ignoring))


def test_processes_that_lead_others_end_when_the_program_does(tmp_path: Path) -> None:
    """`multiprocessing` would wait for these processes at exit."""
    file = tmp_path / "pid"

    def run() -> None:
        child = start(mains.echo, -1, leads=True)
        child.wait_until_reported(PATIENCE)
        file.write_text(str(child.pid))

    program = multiprocessing.get_context("fork").Process(target=run)
    program.start()
    program.join(PATIENCE)
    assert program.exitcode == 0
    program.close()
    assert gone(int(file.read_text()))


def test_a_forked_child_leaves_it_alone() -> None:
    child = start(mains.echo, 1)
    child.wait_until_reported(PATIENCE)

    def use() -> None:
        assert child.join(PATIENCE) is None
        child.end(0.0)

    assert Forked(use).wait() == 0
    child.send(b"x")
    assert received(child) == b"<x>"
    child.end(soon())
