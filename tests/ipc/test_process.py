"""Processes that are started, report in, and exchange messages until they are ended."""

import ast
import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from children import PATIENCE, gone, received, until
from children import Child as Forked
from loader_data import Made
from stallfree.ipc import process
from stallfree.ipc.fetch_threads import FetchThreads
from stallfree.ipc.process import Child, Owner, Parent, call_in_child, prepare_for_forks

slow = pytest.mark.slow


def echo(parent: Parent) -> None:
    """Report in, and return all messages until the end."""
    ended = threading.Event()

    def take(message: bytearray | None) -> None:
        if message is None:
            ended.set()
        else:
            parent.send(b"<", message, memoryview(b">"))

    parent.listen(take)
    parent.report()
    ended.wait()


def identify(parent: Parent) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    parent.send(repr((os.getpid(), os.getsid(0), handlers == [signal.SIG_IGN, signal.SIG_DFL])).encode())


def hang(parent: Parent) -> None:
    """Do not report in, and ignore all messages."""
    while True:
        signal.pause()


def lead(parent: Parent, file: Path) -> None:
    """Start a process that does not end by itself, report in, and ignore all messages."""
    if (pid := os.fork()) != 0:
        file.write_text(str(pid))
        parent.report()
    hang(parent)


def fail(parent: Parent, code: int = 0) -> None:
    """Send a message instead of a report; or end with an exit code."""
    if code:
        os._exit(code)
    parent.send(b"cannot begin")


def start(main: Callable[..., None], *arguments: Any, method: str = "fork", **options: Any) -> Child:
    return Child(main, *arguments, context=multiprocessing.get_context(method), name="test", **options)


def soon() -> float:
    return time.monotonic() + PATIENCE


def test_how_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the default of Python 3.14, and no start method set by looking at it."""
    monkeypatch.setattr(process, "get_all_start_methods", lambda: ["forkserver", "spawn", "fork"])
    for argument, was_set, requested, expected in (
        (None, None, True, "forkserver"), (None, None, False, "fork"), (None, "spawn", False, "spawn"),
        ("forkserver", None, False, "forkserver"),
    ):  # fmt: skip
        monkeypatch.setattr(process, "get_start_method", lambda allow_none, method=was_set: method)
        assert process.context_of(argument, requested=requested).get_start_method() == expected


@pytest.mark.parametrize(
    ("method", "leads"), [("fork", True), ("forkserver", False), pytest.param("spawn", True, marks=slow)]
)
def test_messages_both_ways(method: str, leads: bool) -> None:
    child = start(echo, method=method)
    assert child.wait_until_reported(PATIENCE) is None
    assert (child.reported, child.alive) == (True, True)
    child.send(b"a", b"b" * 1_000_000)
    child.send(b"c")
    child.finish()  # it ends after the messages
    assert [len(received(child)) for _ in range(3)] == [3, 1_000_002, 3]
    child.end(soon())
    assert (child.alive, child.exit_code) == (False, 0)
    child.end(soon())
    child.send(b"lost")
    child = start(identify, method=method, leads=leads)
    pid, session, handlers_are_reset = ast.literal_eval(received(child).decode())
    assert (pid, session == pid, handlers_are_reset) == (child.pid, leads, True)
    child.end(soon())


def test_one_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    child = start(lead, file := tmp_path / "pid", leads=True)
    child.wait_until_reported(PATIENCE)
    child.end(time.monotonic() + 0.01)
    assert child.exit_code == -signal.SIGKILL
    until(lambda: gone(int(file.read_text())))


def test_a_program_that_waits_for_all_its_children(tmp_path: Path) -> None:
    """Nobody learns how a worker ended."""

    def sample(id: int) -> int:
        if id == 25 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return id

    def child() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with sf.DataLoader(Made(40, sample), 4, num_workers=2, timeout=30) as loader:
            assert [torch.cat([*loader]).tolist() for _ in range(3)] == [[*range(40)]] * 3

    assert Forked(child).wait() == 0


def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = FetchThreads(2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                threads.submit(int, "6")
    assert threads.submit(int, "5").result(PATIENCE) == 5
    threads.shutdown()


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
    with pytest.raises(TypeError, match="lock"):
        start(echo, threading.Lock(), method="forkserver")


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
    current = multiprocessing.current_process()
    monkeypatch.setattr(current, "_inheriting", True, raising=False)
    with pytest.raises(sf.WorkerError, match=f"started by 'spawn', starts another one while it imports.*{guard}"):
        start(hang, method="spawn")
    monkeypatch.setattr(current, "_name", "stallfree-worker")
    assert Forked(start, hang, method="spawn").wait() == 1, "a child of stallfree's ends without a word"


def test_a_parent_that_is_not_the_direct_one() -> None:
    """The parent of a process that a fork server has started, of which another process has a copy of the connection."""
    forked = Forked(signal.pause)
    ours, theirs = socket.socketpair()  # which stays open
    parent = Parent(ours, forked.pid)
    assert (parent.ended, parent.wait(0.0)) == (False, False)
    forked.kill()
    assert (parent.ended, parent.wait(0.0)) == (True, True)
    for end in (ours, theirs):
        end.close()


def test_processes_that_lead_others_end_when_the_program_does(tmp_path: Path) -> None:
    """`multiprocessing` would wait for these processes at exit."""
    file = tmp_path / "pid"

    def run() -> None:
        child = start(echo, leads=True)
        child.wait_until_reported(PATIENCE)
        file.write_text(str(child.pid))

    program = multiprocessing.get_context("fork").Process(target=run)
    program.start()
    program.join(PATIENCE)
    assert program.exitcode == 0
    program.close()
    assert gone(int(file.read_text()))


def test_a_forked_child_leaves_it_alone() -> None:
    child = start(echo)
    child.wait_until_reported(PATIENCE)

    def use() -> None:
        assert child.join(PATIENCE) is None
        child.end(0.0)

    assert Forked(use).wait() == 0
    child.send(b"x")
    assert received(child) == b"<x>"
    child.end(soon())


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


@pytest.mark.parametrize("error", [ValueError("no", 3), KeyboardInterrupt(), SystemExit(3)])
def test_errors_are_raised_as_they_are(error: BaseException) -> None:
    def call() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        call_in_child(call, "the call")
    assert caught.value.args == error.args
    assert "in call" in caught.value.__notes__[0]
    with pytest.raises(Exception, match="pickle"):
        call_in_child(threading.Lock, "the call")  # whose result has none


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
    lock, here = threading.Lock(), os.getpid()
    lock.acquire()

    def call() -> int:
        if os.getpid() == here:
            lock.release()
        with lock:
            return os.getpid()

    assert call_in_child(call, "the call", seconds=0.5) == here


def test_a_call_that_uses_cuda_is_made_in_this_process() -> None:
    here = os.getpid()

    def call() -> int:
        if os.getpid() != here:
            raise ValueError("of the data set") from RuntimeError("Cannot re-initialize CUDA in forked subprocess. ...")
        return here

    assert call_in_child(call, "the call") == here


def test_with_many_open_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    with contextlib.ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):  # beyond what `select` can watch
            files.enter_context(open(os.devnull))
        assert call_in_child(lambda: 5, "the call") == 5


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

    assert Forked(child).wait() == 0
    assert (owner.is_here, owner.pid, lender.forks) == (True, os.getpid(), 1)


both = pytest.mark.parametrize("method", [pytest.param(method, marks=slow) for method in ("forkserver", "spawn")])

LOADER = "next(iter(sf.DataLoader(list(range(%d)), batch_size=2, num_workers=%d, multiprocessing_context=method)))"
LARGE = LOADER % (300_000, 1)
IN_CHILDREN = "if __name__ != '__main__':\n    "
SCRIPTS = {
    "loader": LOADER % (6, 2),
    "large data": LARGE,
    "shared loader": "list(sf.SharedLoader([*range(6)], group='own', batch_size=2, multiprocessing_context=method))",
    "Smart Cache": "import time\n"
    "data = sf.SmartCacheDataset(list(range(40)), float, cache_num=10, multiprocessing_context=method)\n"
    "with sf.DataLoader(data, batch_size=2) as loader:\n"
    "    while True:\n"
    "        list(loader), time.sleep(0.1)",
    "process prefetcher": "def make():\n    return [1, 2, 3]\nprint(list(sf.ProcessPrefetcher(make, 'cpu')))",
    "torch's loader": f"{IN_CHILDREN}from torch.utils.data import DataLoader as L\n"
    f"    iter(L([1], num_workers=1, multiprocessing_context=method))\n{LARGE}",
    "an error": f"{IN_CHILDREN}raise RuntimeError('not here')\n{LARGE}",
}
ONCE = {  # why its processes cannot import a script; otherwise, the advice is what its output has once
    "torch's loader": "before the\n        current process has finished",
    "an error": "RuntimeError: not here",
}


def run_script(folder: Path, program: str, method: str, **environment: str) -> tuple[int, str]:
    """Return the exit code of a script, and what it printed as errors."""
    script = folder / "train.py"
    script.write_text(f"import sys\nimport stallfree as sf\nmethod = {method!r}\n{program}\n")
    options: Any = {"capture_output": True, "text": True, "timeout": 100.0, "env": os.environ | environment}
    done = subprocess.run([sys.executable, str(script)], cwd=folder, check=False, **options)
    return done.returncode, done.stderr


@both
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_a_guard_is_told_so_once(name: str, method: str, tmp_path: Path) -> None:
    """And no other process is started, which would end in the same way."""
    once = ONCE.get(name, "__main__")
    code, printed = run_script(tmp_path, SCRIPTS[name], method)
    assert (code, printed.count(once)) == (1, 1), printed
    assert "train.py again: put what is to run once under `if __name__ == '__main__'" in printed.splitlines()[-2]
    assert len(printed.splitlines()) < 50 or once != "__main__", "the frames of this package are shown"


@both
def test_a_fork_server_that_imports_the_script(method: str, tmp_path: Path) -> None:
    """As those of Python 3.14 do, before they have started any process."""
    (tmp_path / "as_in_3_14.py").write_text(
        "import os\nfrom multiprocessing import process, spawn\n"
        "process.current_process()._inheriting = True\n"
        "spawn.import_main_path(os.environ['SCRIPT'])\n"
    )
    program = "import multiprocessing\nmultiprocessing.set_forkserver_preload(['as_in_3_14'])\n" + SCRIPTS["loader"]
    places = {"SCRIPT": str(tmp_path / "train.py"), "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    code, printed = run_script(tmp_path, program, method, **places)
    assert (code, "under `if __name__ == '__main__':`" in printed.splitlines()[-2]) == (1, True), printed
