"""Child processes that end with their parent, and the messages between the two.

    child = Child(main, setup, context=context, name="stallfree-worker")

starts a process that calls `main(parent, setup)`. `Child` is the parent's view of it: it never blocks, except in
`wait_until_reported`, `join` and `end`. `Parent` is the child's view of its parent, and may block.

Messages are bytes. A process that was forked while another thread held a lock may hang at its start. Each process
therefore reports in, and its parent replaces one that is `overdue`.

A process that is not forked imports the main script first. If the script starts processes while it is imported, for
lack of a main guard, such a process ends at once and without a word (`start_method`), and its parent raises the error.
"""

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import current_process, get_all_start_methods, get_context, get_start_method, reduction
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import Any, BinaryIO

import torch

from stallfree.errors import InputError, main_guard, not_picklable, text_of
from stallfree.ipc.channel import Channel
from stallfree.ipc.forked import Owner
from stallfree.platform import at_fork, begin_child, interrupts_later

REPORT_SECONDS = 2.0
"""Seconds for the first fork to report in; doubled after each one that did not, since the machine may be busy."""

_CHECK_SECONDS, _LEADER_SECONDS, _START_SECONDS = 0.1, 10.0, 60.0
_SERVER_GONE = 255
"""The exit code that `multiprocessing` gives to the processes of a fork server that has ended."""

_NAME = "stallfree-"

_leaders: weakref.WeakSet["Child"] = weakref.WeakSet()
at_fork(after_in_child=_leaders.clear)


def context_of(given: Any, *, requested: bool = True) -> BaseContext:
    """Return the context for `multiprocessing_context`; for None, the start method that was set, or Python's default.

    Workers that the user did not request are forked if no start method was set. Python's default from 3.14 on,
    "forkserver", would need a script that can be imported and a data set that can be pickled.
    """
    if isinstance(given, BaseContext):
        return given
    if given is None:
        default = "fork" if not requested and sys.platform == "linux" else get_all_start_methods()[0]
        return get_context(get_start_method(allow_none=True) or default)  # which sets no start method
    try:
        return get_context(str(given))
    except ValueError as error:
        raise InputError(f"multiprocessing_context={given!r}: give 'fork', 'forkserver' or 'spawn'") from error


def start_method(context: BaseContext) -> str:
    """Return the start method of `context`.

    Ends this process if it is a child of stallfree's that imports the main script, and so must not start another one.
    Raises `WorkerError` if it is another process in that state.
    """
    method, process = context.get_start_method(), current_process()
    if method != "fork" and getattr(process, "_inheriting", False):
        if process.name.startswith(_NAME):
            os._exit(1)
        raise main_guard(f"this process, started by {method!r}, starts another one while it imports {_guard_advice()}")
    return method


def _guard_advice() -> str:
    script = os.path.basename(getattr(sys.modules.get("__main__"), "__file__", None) or "") or "the main script"
    return (
        f"{script} again: put what is to run once under `if __name__ == '__main__':`, and functions and classes above "
        "it; or use multiprocessing_context='fork'"
    )


class Child(Channel):
    """A process started by this one, and the channel to it.

    Args:
        main: called there with its `Parent` and `arguments`; defined at the top level of a module.
        context: `multiprocessing` context that starts the process.
        name: name of the process; begins with "stallfree-".
        parts: descriptions and objects among `arguments` that may be impossible to pickle, for the message.
        attempt: number of earlier processes that did not report in.
        leads: whether the process may start others. It gets its own session; its processes are killed with it.

    Attributes:
        pid: PID of the process.
        reported: whether its report has been received.
        exit_code: exit code after the end; negative for a signal number.

    In a forked child of this process, which has a copy of this object, `end` does nothing. Raises `InputError` if one
    of `parts` cannot be pickled, `WorkerError` for a script without a main guard: here, or when the end is noticed.
    """

    def __init__(
        self,
        main: Callable[..., None],
        *arguments: Any,
        context: BaseContext,
        name: str,
        parts: Sequence[tuple[str, object]] = (),
        attempt: int = 0,
        leads: bool = False,
    ) -> None:
        self._method = method = start_method(context)
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self._owner, self._leads, call = Owner(), leads, _Call(main, arguments)
        self.reported = self._ended = False
        self.exit_code: int | None = None
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_run, args=(theirs, os.getpid(), leads, call), name=name, daemon=not leads
        )
        self._due = time.monotonic() + (REPORT_SECONDS * 2**attempt if method == "fork" else float("inf"))
        try:
            with interrupts_later(method):
                self._process.start()
        except Exception as error:
            self.close()
            if method == "forkserver" and isinstance(error, EOFError | ConnectionError):
                raise main_guard(f"the fork server ended. It may import {_guard_advice()}") from None
            if method == "fork" or (found := find_unpicklable(parts, reduction.ForkingPickler.dumps)) is None:
                raise
            raise not_picklable(
                f"{found[0]} cannot be sent to a process started by {method!r}: {found[1]}. Define it at the top "
                "level of a module (no lambda, no function within a function), or use multiprocessing_context='fork'"
            ) from error
        finally:
            theirs.close()
            call.close()
        self.pid: int = self._process.pid
        if leads:
            if not _leaders:  # otherwise `multiprocessing` would wait at exit for non-daemon processes
                Finalize(None, end_all, (_leaders, _LEADER_SECONDS), exitpriority=100)
            _leaders.add(self)

    def receive(self) -> bytearray | None:
        """Return the next message, or None if there is none yet.

        Raises `EOFError` if the process has ended, `WorkerError` if another one would end at its start as well.
        """
        try:
            while (message := super().receive()) is not None:
                self.reported = True
                if message:
                    return message
        except EOFError:
            if not self.reported and not self._ended and self._method != "fork":
                code = self.join(_START_SECONDS)
                if code is not None and 0 <= code < _SERVER_GONE:
                    raise main_guard(
                        f"a process started by {self._method!r} ended with exit code {code} at its start. It imports "
                        f"{_guard_advice()}. If its output shows another error, correct that"
                    ) from None
            raise
        return None

    @property
    def alive(self) -> bool:
        """Whether the process is running; always False in a forked child of this process, which cannot check."""
        return not self._ended and self._owner.is_here and self._process.is_alive()

    @property
    def overdue(self) -> bool:
        """Whether the process has missed the deadline for its report: it hangs."""
        return not self.reported and time.monotonic() > self._due

    def wait_until_reported(self, seconds: float) -> bytearray | None:
        """Wait until the process has reported in, and return None; or return the message that it sent instead.

        Raises `EOFError` if it has ended or is overdue, and `TimeoutError` after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while (message := self.receive()) is None and not self.reported:
            left = min(self._due, deadline) - time.monotonic()
            if left <= 0:
                raise EOFError if self.overdue else TimeoutError
            self.wait(left)
        return message

    def join(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the process to end by itself; returns its exit code, or None if it is running."""
        if self._ended or not self._owner.is_here:
            return None
        self._process.join(seconds)
        return self._process.exitcode  # type: ignore[no-any-return]

    def end(self, deadline: float) -> None:
        """Request the process to end and wait; kill it at `deadline` (`time.monotonic`), or if it is overdue.

        Its remaining messages are read and discarded, so that it does not block on sending. Idempotent.
        """
        if self._ended or not self._owner.is_here:
            return
        self._ended = True
        self.finish()
        with contextlib.suppress(EOFError):
            while time.monotonic() < (limit := deadline if self.reported else min(deadline, self._due)):
                self.receive_by(limit)
        self._process.join(min(_START_SECONDS, max(0.0, limit - time.monotonic())))
        if self._process.is_alive():
            if self._leads:
                with contextlib.suppress(OSError):  # it may not have its own session yet
                    os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()
        self.exit_code = self._process.exitcode
        self.close()
        self._process.close()


def end_all(children: Iterable[Child], seconds: float) -> None:
    """Request processes to end, wait for them together, and kill those that are running after `seconds`."""
    children, deadline = list(children), time.monotonic() + seconds
    for child in children:
        child.finish()
    for child in children:
        child.end(deadline)


class _Call:
    """What a child calls. It is pickled into a file in memory.

    Through a pipe, a child that ended early would make its parent wait forever for the rest to be read.
    """

    def __init__(self, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.main, self.arguments = main, arguments
        self._file: BinaryIO | None = None

    def __reduce__(self) -> Any:
        self._file = os.fdopen(os.memfd_create("stallfree-arguments"), "w+b")
        reduction.dump((self.main, self.arguments), self._file)
        self._file.flush()
        return _receive_call, (reduction.DupFd(self._file.fileno()),)

    def close(self) -> None:
        """Close the file. The child has a descriptor of its own."""
        if self._file is not None:
            self._file.close()


def _receive_call(descriptor: Any) -> _Call:
    with os.fdopen(descriptor.detach(), "rb") as file:
        file.seek(0)
        return _Call(*pickle.load(file))


def find_unpicklable(parts: Iterable[tuple[str, object]], dumps: Callable[[Any], object]) -> tuple[str, str] | None:
    """Return the description of the first of `parts` that `dumps` cannot pickle, and why; None if there is none."""
    for what, part in parts:
        try:
            dumps(part)
        except Exception as error:
            return what, text_of(error)
    return None


# -- in the child process ---------------------------------------------------------------------------------------------


def _run(connection: socket.socket, pid: int, leads: bool, call: _Call) -> None:
    begin_child()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # reset a handler inherited from the parent
    if leads:
        with contextlib.suppress(OSError):
            os.setsid()  # signals of the parent's terminal do not reach this process
    torch.default_generator.get_state()  # hangs if its lock was copied while another thread held it
    call.main(Parent(connection, pid), *call.arguments)


class Parent:
    """The process that started this one.

    Args:
        connection: connection to the parent.
        pid: PID of the parent.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._channel, self._pid = Channel(connection), pid
        self._direct = os.getppid() == pid  # not the child of a fork server

    def fileno(self) -> int:
        """Return the descriptor, readable when the parent has sent a message, requests the end, or has ended."""
        return self._channel.fileno()

    def send(self, *pieces: bytes | memoryview) -> None:
        """Send a message made of `pieces`, or the report that this process has started; `OSError` without a parent."""
        self._channel.send_all(*pieces)

    report = send

    def wait(self, seconds: float) -> bool:
        """Wait until the parent has sent a message, requests the end, or has ended; returns False after `seconds`."""
        return self._channel.wait(seconds) or self.ended

    @property
    def ended(self) -> bool:
        """Whether the parent has ended, even if another process has a copy of its end of the connection."""
        return os.getppid() != self._pid if self._direct else not os.path.exists(f"/proc/{self._pid}")

    def listen(self, take: Callable[[bytearray | None], object]) -> None:
        """Start a thread that calls `take` with each message, then with None if this process must end.

        The thread ends this process with its parent.
        """

        def run() -> None:
            try:
                with contextlib.suppress(EOFError):
                    while not self.ended:
                        while (message := self._channel.receive()) is not None:
                            take(message)
                        self._channel.wait(1.0)
                take(None)
                while not self.ended:
                    time.sleep(_CHECK_SECONDS)
            finally:
                os._exit(1)

        threading.Thread(target=run, name="stallfree-inbox", daemon=True).start()
