"""Child processes that end with their parent, the messages between the two, and forks.

    child = Child(main, setup, context=context, name="stallfree-worker")

starts a process that calls `main(parent, setup)`. `Child` is the parent's view of it: it never blocks, except in
`wait_until_reported`, `join` and `end`. `Parent` is the child's view of its parent, and may block.

Messages are bytes. A process that was forked while another thread held a lock may hang at its start. Each process
therefore reports in, and its parent replaces one that is `overdue`.

A process that is not forked imports the main script first. If the script starts processes while it is imported, for
lack of a main guard, such a process ends at once and without a word (`start_method`), and its parent raises the error.

A call in a forked process (`call_in_child`) leaves nothing behind in this one: what it opened, started or changed ends
with the process.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import current_process, get_all_start_methods, get_context, get_start_method, reduction, util
from multiprocessing.context import BaseContext
from typing import Any, BinaryIO, NoReturn

import torch

from stallfree.errors import InputError, WorkerError, main_guard, not_picklable, text_of
from stallfree.ipc.channel import Channel, pack_error, unpack_error
from stallfree.platform import at_fork, begin_child, how_it_ended, interrupts_later, shares_memory
from stallfree.raising import log
from stallfree.typevars import T

REPORT_SECONDS = 2.0
"""Seconds for the first fork to report in; doubled after each one that did not, since the machine may be busy."""

_CHECK_SECONDS, _LEADER_SECONDS, _START_SECONDS, _KILL_SECONDS = 0.1, 10.0, 60.0, 10.0
_SERVER_GONE = 255
"""The exit code that `multiprocessing` gives to the processes of a fork server that has ended."""

_NAME = "stallfree-"
_PDEATHSIG = 1
_NO_CUDA = b"Cannot re-initialize CUDA in forked subprocess"

# -- forks ------------------------------------------------------------------------------------------------------------

_leaders: weakref.WeakSet["Child"] = weakref.WeakSet()
_lenders: weakref.WeakSet[Any] = weakref.WeakSet()
at_fork(before=lambda: [lender.before_fork() for lender in list(_lenders)], after_in_child=_leaders.clear)


class Owner:
    """The process that created an object."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process; False in a forked child."""
        return self.pid == os.getpid()


def finalize_here(referent: object, call: Callable[..., object], *arguments: Any) -> "weakref.finalize[Any, Any]":
    """Return a `weakref.finalize` that does nothing in a forked child: what it closes belongs to this process."""

    def end(pid: int) -> None:
        if pid == os.getpid():
            call(*arguments)

    return weakref.finalize(referent, end, os.getpid())


def prepare_for_forks(lender: Any) -> None:
    """Call `lender.before_fork()` in the thread that forks, before each fork, as long as the lender is alive.

    A lender has lent memory which it fills again later, such as a ring of slots: a child keeps reading it.
    """
    _lenders.add(lender)


def call_in_child(call: Callable[[], T], what: str, *, seconds: float = 60.0) -> T:
    """Return the result of `call`, made in a forked process of one thread.

    The result is pickled. Standard output is that of this process. `call` is made here where there is no fork, if it
    uses CUDA, which a forked process cannot, and if the process has no result in time: it may wait for a lock or a
    thread that was not copied.

    Args:
        call: the function.
        what: what it does, for messages, such as "the first look at the data set".
        seconds: limit of the wait for the process.

    Raises:
        WorkerError: the process ended before it had a result.
        BaseException: what `call` raised.
    """
    if not shares_memory():
        return call()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, interrupts_later("fork"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and later, about threads
            pid = os.fork()
            if pid == 0:
                _answer(call, theirs)
        try:
            answer = Channel(ours).receive_by(time.monotonic() + seconds)
        except EOFError:
            raise WorkerError(f"{what} was not finished: {how_it_ended(_end(pid))}") from None
        finally:
            _end(pid)
    if answer is None:
        log.warning("%s had no result in a forked process for %.0f s: it runs in this process now", what, seconds)
        return call()
    if answer[0]:
        return pickle.loads(memoryview(answer)[1:])  # type: ignore[no-any-return]
    if _NO_CUDA in answer:  # in the text of the error, or of its cause
        return call()
    raise unpack_error(memoryview(answer)[1:])


def _end(pid: int) -> int | None:
    """Kill a child that is not ending yet, and return its exit code; None if it is not known."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None


def _answer(call: Callable[[], Any], connection: socket.socket) -> NoReturn:
    """Make the call, send its result or error, and end this process."""
    try:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        begin_child()
        torch.set_num_threads(1)  # those of OpenMP do not survive a fork
        try:
            answer = b"\1", pickle.dumps(call(), pickle.HIGHEST_PROTOCOL)
        except BaseException as error:
            answer = b"\0", pack_error(error)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        Channel(connection).send_all(*answer)
    finally:
        os._exit(0)


# -- the start of processes -------------------------------------------------------------------------------------------


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
                util.Finalize(None, end_all, (_leaders, _LEADER_SECONDS), exitpriority=100)
            _leaders.add(self)

    def receive(self, *, wait: bool = False) -> bytearray | None:
        """Return the next message, or None if there is none yet.

        Raises `EOFError` if the process has ended, `WorkerError` if another one would end at its start as well.
        """
        try:
            while (message := super().receive(wait=wait)) is not None:
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

        Raises `EOFError` if it has ended or is overdue, and after `seconds`.
        """
        deadline = min(self._due, time.monotonic() + seconds)
        while (message := self.receive()) is None and not self.reported:
            if (left := deadline - time.monotonic()) <= 0:
                raise EOFError
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
        self._process.join(_KILL_SECONDS)
        self.exit_code = self._process.exitcode
        self.close()
        with contextlib.suppress(ValueError):  # its storage does not answer, or the program has waited for it
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


class Parent(Channel):
    """The process that started this one, and the channel to it.

    Args:
        connection: connection to the parent.
        pid: PID of the parent.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        super().__init__(connection)
        self._pid = pid
        self._direct = os.getppid() == pid  # not the child of a fork server
        second = (1).to_bytes(8, sys.byteorder) + bytes(8)  # and no microseconds
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, second)  # of `receive(wait=True)`

    send = report = Channel.send_all
    """Send a message, blocking; or, without one, the report that this process has started."""

    def wait(self, seconds: float) -> bool:
        """Wait until the parent has sent a message, requests the end, or has ended; returns False after `seconds`."""
        return super().wait(seconds) or self.ended

    @property
    def ended(self) -> bool:
        """Whether the parent has ended, even if another process has a copy of its end of the connection."""
        return os.getppid() != self._pid if self._direct else not os.path.exists(f"/proc/{self._pid}")

    def listen(self, take: Callable[[bytearray | None], object] | None) -> None:
        """Start a thread that calls `take`, if given, with each message, then with None if this process must end.

        The thread ends this process with its parent.
        """

        def run() -> None:
            try:
                if take is not None:
                    with contextlib.suppress(EOFError):
                        while not self.ended:
                            if (message := self.receive(wait=True)) is not None:
                                take(message)
                    take(None)
                while not self.ended:
                    time.sleep(_CHECK_SECONDS)
            finally:
                os._exit(1)

        threading.Thread(target=run, name="stallfree-inbox", daemon=True).start()
