"""Processes that end with their parent, and process its messages until then."""

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

import psutil
import pytest

import stallfree as sf
from children import Child as Forked
from children import until
from stallfree.ipc import process
from stallfree.ipc.process import Child, Parent

PATIENCE = 60.0
slow = pytest.mark.slow


# -- what runs in the processes ---------------------------------------------------------------------------------------


def echo(parent: Parent, count: int) -> None:
    """Report in, and return the given number of messages; with a negative number, all until the end."""
    left, ended = [count], threading.Event()

    def take(message: bytearray | None) -> None:
        if message is not None and left[0]:
            left[0] -= 1
            parent.send(b"<", message, memoryview(b">"))
        if message is None or not left[0]:
            ended.set()

    parent.listen(take)
    parent.report()
    if count:
        ended.wait()


def identify(parent: Parent) -> None:
    """Send properties of this process."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    parent.send(repr((os.getpid(), os.getsid(0), handlers == [signal.SIG_IGN, signal.SIG_DFL])).encode())


def flood(parent: Parent, size: int) -> None:
    """Send messages forever that the parent does not read."""
    parent.report()
    while True:
        parent.send(bytes(size))


def hang(parent: Parent, file: Path | None = None) -> None:
    """Do not report in, and ignore all messages."""
    if file is not None:
        file.write_text(str(os.getpid()))
    while True:
        signal.pause()


def lead(parent: Parent, file: Path) -> None:
    """Start a process that does not end by itself, and ignore all messages."""
    if os.fork():
        parent.report()
        hang(parent)
    hang(parent, file)


def fail(parent: Parent, code: int = 0) -> None:
    """Send a message instead of a report; or end with an exit code."""
    if code:
        os._exit(code)
    parent.send(b"cannot begin")


def listen(parent: Parent, out: Path) -> None:
    """Write the received messages to a file, and end only on request."""
    ended = threading.Event()

    def take(message: bytearray | None) -> None:
        with out.open("a") as file:
            print(None if message is None else bytes(message).decode(), file=file, flush=True)
        if message is None:
            ended.set()

    parent.listen(take)
    parent.report()
    ended.wait()
    with out.open("a") as file:
        print("ended", file=file)


def busy(parent: Parent, file: Path) -> None:
    """Listen, and compute forever."""
    parent.listen(lambda _: None)
    file.write_text(str(os.getpid()))
    while True:
        time.sleep(0.001)


def step(parent: Parent, file: Path) -> None:
    """Work in small steps until the parent sends a message or ends."""
    file.write_text(str(os.getpid()))
    while not parent.wait(0.0):
        time.sleep(0.001)
    file.with_suffix(".end").touch()


def start_and_wait(context: Any, *mains: Any) -> None:
    """Start processes, each given by its function and a file, and wait to be killed."""
    children = [Child(main, file, context=context, name="test") for main, file in mains]
    threading.Event().wait()
    assert children


# -- starting and ending ----------------------------------------------------------------------------------------------


def start(main: Callable[..., None], *arguments: Any, method: str = "fork", **options: Any) -> Child:
    return Child(main, *arguments, context=multiprocessing.get_context(method), name="test", **options)


def soon() -> float:
    return time.monotonic() + PATIENCE


def received(child: Child) -> bytes:
    """Return the next message."""
    message = child.receive_by(soon())
    assert message is not None
    return bytes(message)


def pid_in(file: Path) -> int:
    until(lambda: file.exists() and file.read_text() != "")
    return int(file.read_text())


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


@pytest.mark.parametrize(
    ("method", "leads"), [("fork", True), ("forkserver", False), pytest.param("spawn", True, marks=slow)]
)
def test_messages_both_ways(method: str, leads: bool) -> None:
    child = start(echo, 5, method=method)
    assert child.wait_until_reported(PATIENCE) is None
    assert (child.reported, child.alive) == (True, True)
    child.send(b"a", b"b" * 100_000)
    child.send(b"c")
    assert [len(received(child)) for _ in range(3)] == [3, 100_002, 3]
    child.end(soon())
    assert (child.alive, child.exit_code) == (False, 0)
    child.end(soon())
    child.send(b"lost")
    child = start(identify, method=method, leads=leads)
    pid, session, handlers_are_reset = ast.literal_eval(received(child).decode())
    assert (pid, session == pid, handlers_are_reset) == (child.pid, leads, True)
    child.end(soon())


def test_an_end_that_was_asked_for_comes_after_the_messages(tmp_path: Path) -> None:
    book = tmp_path / "book"
    child = start(listen, book)
    child.wait_until_reported(PATIENCE)
    child.send(b"x", b"y" * 1_000_000)
    child.finish()
    child.end(soon())
    assert child.exit_code == 0
    assert book.read_text().split() == ["x", "y" * 1_000_000, "None", "ended"]


def test_one_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    child = start(lead, file := tmp_path / "pid", leads=True)
    child.wait_until_reported(PATIENCE)
    pid = pid_in(file)
    child.end(time.monotonic() + 0.01)
    assert child.exit_code == -signal.SIGKILL
    until(lambda: gone(pid))
    child = start(flood, 1_000_000)  # it may send while it shall end
    child.wait_until_reported(PATIENCE)
    child.end(time.monotonic() + 0.2)
    assert child.exit_code in (-signal.SIGKILL, 1)  # killed, or its last message was not received


# -- reporting in -----------------------------------------------------------------------------------------------------


def test_one_that_does_not_report_in_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    child = start(hang)
    with pytest.raises(TimeoutError):
        child.wait_until_reported(0.0)
    child.end(0.0)
    monkeypatch.setattr(process, "REPORT_SECONDS", 0.01)
    child = start(hang, attempt=1)
    with pytest.raises(EOFError):
        child.wait_until_reported(PATIENCE)
    assert child.overdue
    child.end(1e9)  # it is not waited for
    assert child.exit_code == -signal.SIGKILL
    child = start(echo, 0, method="forkserver")
    assert child.wait_until_reported(PATIENCE) is None, "one that is not forked has time"
    child.end(soon())


def test_a_start_that_fails() -> None:
    child = start(fail)
    assert child.wait_until_reported(PATIENCE) == b"cannot begin"
    child.end(soon())
    child = start(fail, 3)
    with pytest.raises(EOFError):
        child.wait_until_reported(PATIENCE)
    assert child.join(PATIENCE) == 3
    child.end(soon())
    assert child.exit_code == 3
    lock = threading.Lock()
    message = r"^the data set cannot be sent to a process started by 'forkserver': .*lock"
    with pytest.raises(sf.InputError, match=message):
        start(echo, lock, method="forkserver", parts=[("collate_fn", int), ("the data set", lock)])
    with pytest.raises(TypeError, match="lock"):
        start(echo, lock, method="forkserver")


def test_a_script_without_a_main_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by a process that ends at its start, and by those that such a script would start while it is imported."""
    guard = r"again: put what is to run once under `if __name__ == '__main__':`"
    child = start(fail, 1, method="forkserver")
    with pytest.raises(sf.WorkerError, match=f"started by 'forkserver' ended with exit code 1 at its start.*{guard}"):
        child.wait_until_reported(PATIENCE)
    child.end(soon())

    def fork_server_ends(self: Any) -> None:
        raise EOFError

    monkeypatch.setattr(multiprocessing.get_context("forkserver").Process, "start", fork_server_ends)
    with pytest.raises(sf.WorkerError, match=f"the fork server ended.*{guard}"):
        start(hang, method="forkserver")
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(sf.WorkerError, match=f"started by 'spawn', starts another one while it imports.*{guard}"):
        start(hang, method="spawn")
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {})
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "stallfree-worker")
    assert Forked(start, hang, method="spawn").wait() == 1, "a child of stallfree's ends without a word"


# -- the end of the parent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=slow)])
@pytest.mark.parametrize("main", [busy, step])
def test_it_ends_with_its_parent(main: Callable[..., None], method: str, tmp_path: Path) -> None:
    """A process that was forked later holds no copy of the descriptors that show the parent's end."""
    file, sibling = tmp_path / "pid", tmp_path / "sibling"
    context = multiprocessing.get_context(method)
    parent = Forked(start_and_wait, context, (main, file), (hang, sibling))
    pid, other = pid_in(file), pid_in(sibling)
    parent.kill()
    until(lambda: gone(pid))
    assert main is busy or file.with_suffix(".end").exists()
    os.kill(other, signal.SIGKILL)  # it does not look
    until(lambda: gone(other))


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


def test_processes_that_lead_others_end_when_the_program_does(tmp_path: Path) -> None:
    """`multiprocessing` would wait for these processes at exit."""
    file = tmp_path / "pid"

    def run() -> None:
        child = start(echo, -1, leads=True)
        child.wait_until_reported(PATIENCE)
        file.write_text(str(child.pid))

    program = multiprocessing.get_context("fork").Process(target=run)
    program.start()
    program.join(PATIENCE)
    assert program.exitcode == 0
    program.close()
    assert gone(int(file.read_text()))


def test_a_forked_child_leaves_it_alone() -> None:
    child = start(echo, 1)
    child.wait_until_reported(PATIENCE)

    def use() -> None:
        assert child.join(PATIENCE) is None
        child.end(0.0)

    assert Forked(use).wait() == 0
    child.send(b"x")
    assert received(child) == b"<x>"
    child.end(soon())
