"""Child processes that end with their parent, and the messages between the two.

    child = Child(main, setup, context=context, name="stallfree-worker")

starts a process that calls `main(parent, setup)`. `Child` is the parent's view of it: it never blocks, except in
`wait_until_reported`, `join` and `end`. `Parent` is the child's view of its parent, and may block.

Messages are bytes. A process that was forked while another thread held a lock may hang at its start. Each process
therefore reports in, and its parent replaces one that is `overdue`.

A process that is not forked imports the main script first. If the script starts processes while it is imported, for
lack of a main guard, such a process ends at once and without a word (`start_method`), and its parent raises the error.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import current_process, get_all_start_methods, get_context, get_start_method, reduction
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, BinaryIO

from stallfree.errors import InputError, main_guard, not_picklable, text_of
from stallfree.ipc.channel import Channel, receive_message, send_message
from stallfree.ipc.fork_guard import Owner, keep_from_children
from stallfree.ipc.generator_lock import check_generator
from stallfree.platform import at_fork, begin_child, interrupts_later

REPORT_SECONDS = 2.0
"""Seconds for the first fork to report in; doubled after each one that did not, since the machine may be busy."""

_CHECK_MILLISECONDS = 1000  # interval of checks for the death of a parent without a pidfd
_END_CHECK_MILLISECONDS = 100
_LEADER_SECONDS = 10.0
_START_SECONDS = 60.0
_LARGE = 64 << 20
"""Bytes of arguments that one process at a time receives, since they are in memory until then."""

_SERVER_GONE = 255
"""The exit code that `multiprocessing` gives to the processes of a fork server that has ended."""

_DEEPEST = 8
"""Maximum depth of the attribute that a message names."""

_NAME = "stallfree-"

_leaders: weakref.WeakSet[Child] = weakref.WeakSet()


def context_of(given: Any, *, requested: bool = True) -> BaseContext:
    """Return the context for `multiprocessing_context`; for None, the start method that was set, or Python's default.

    Workers that the user did not request are forked if no start method was set. Python's default from 3.14 on,
    "forkserver", would need a script that can be imported and a data set that can be pickled.
    """
    if isinstance(given, BaseContext):
        return given
    if given is not None and not isinstance(given, str):
        raise InputError(f"multiprocessing_context={given!r}: give 'fork', 'forkserver', 'spawn' or a context of these")
    if given is None:
        default = "fork" if not requested and sys.platform == "linux" else get_all_start_methods()[0]
        return get_context(get_start_method(allow_none=True) or default)  # which sets no start method
    try:
        return get_context(given)
    except ValueError as error:
        raise InputError(f"multiprocessing_context={given!r}: {error}; use 'fork', 'forkserver' or 'spawn'") from error


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


class Child:
    """A process started by this one.

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
        keep_from_children(ours)
        self._owner, self._leads = Owner(), leads
        call = _Call(main, arguments)
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_run,
            args=(theirs, os.getpid(), method != "forkserver", leads, call),
            name=name,
            daemon=not leads,
        )
        self._due = time.monotonic() + (REPORT_SECONDS * 2**attempt if method == "fork" else float("inf"))
        try:
            with interrupts_later(method):
                self._process.start()
        except Exception as error:
            ours.close()
            if method == "forkserver" and isinstance(error, EOFError | ConnectionError):
                raise main_guard(f"the fork server ended. It may import {_guard_advice()}") from None
            raise (None if method == "fork" else _unsendable(parts, method)) or error from error
        finally:
            theirs.close()
            size = call.close()
        self.pid: int = self._process.pid
        self.reported = self._heard = False
        self.exit_code: int | None = None
        self._ended = False
        self._channel = Channel(ours)
        if size > _LARGE:
            self._wait(1000 * _START_SECONDS)
        if leads:
            if not _leaders:  # otherwise `multiprocessing` would wait at exit for non-daemon processes
                Finalize(None, end_all, (_leaders, _LEADER_SECONDS), exitpriority=100)
            _leaders.add(self)

    # -- messages -----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the descriptor, readable when there is a message or the process has ended."""
        return self._channel.fileno()

    @property
    def events(self) -> int:
        """The `poll` events to wait for at the descriptor."""
        return select.POLLIN | (select.POLLOUT if self._channel.writing else 0)

    @property
    def writing(self) -> bool:
        """Whether data is still to be sent: call `flush` when the descriptor is writable."""
        return self._channel.writing

    def send(self, *messages: bytes) -> None:
        """Send messages as far as possible without blocking. They are lost if the process has ended."""
        self._channel.send(*messages)

    def flush(self) -> None:
        """Send pending data as far as possible."""
        self._channel.flush()

    def receive(self) -> bytearray | None:
        """Return the next message, or None if there is none yet.

        Raises `EOFError` if the process has ended, `WorkerError` if another one would end at its start as well.
        """
        try:
            while (message := self._channel.receive()) is not None:
                self._heard = True
                if message:
                    return message
                self.reported = True
        except EOFError:
            if not self._heard and not self._ended and self._method != "fork":
                self._check_start()
            raise
        return None

    def _check_start(self) -> None:
        """Raise `WorkerError` if the process, which has sent nothing, ended by itself."""
        code = self.join(_START_SECONDS)
        if code is not None and 0 <= code < _SERVER_GONE:
            raise main_guard(
                f"a process started by {self._method!r} ended with exit code {code} at its start. It imports "
                f"{_guard_advice()}. If its output shows another error, correct that"
            ) from None

    # -- life ---------------------------------------------------------------------------------------------------------

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
        while not self.reported:
            if (message := self.receive()) is not None:
                return message
            left = min(self._due, deadline) - time.monotonic()
            if left <= 0 and not self.reported:
                raise EOFError if self.overdue else TimeoutError
            if not self.reported:
                self._wait(min(1000 * left, _CHECK_MILLISECONDS))
        return None

    def join(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the process to end by itself; returns its exit code, or None if it is running."""
        if self._ended or not self._owner.is_here:
            return None
        self._process.join(seconds)
        return self._process.exitcode  # type: ignore[no-any-return]

    def ask_to_end(self) -> None:
        """Send nothing more: the process ends after handling the messages sent before."""
        self._channel.finish()

    def end(self, deadline: float) -> None:
        """Request the process to end and wait; kill it at `deadline` (`time.monotonic`), or if it is overdue.

        Its remaining messages are read and discarded, so that it does not block on sending. Idempotent.
        """
        if self._ended or not self._owner.is_here:
            return
        self._ended = True
        self.ask_to_end()
        while True:
            try:
                while self.fileno() >= 0 and self.receive() is not None:
                    pass
                self._channel.flush()
            except EOFError:
                self._channel.close()
            if not self._process.is_alive() or time.monotonic() > deadline or self.overdue:
                break
            self._wait(_END_CHECK_MILLISECONDS)
        if self._process.is_alive():
            self._kill()
        self._process.join()
        self.exit_code = self._process.exitcode
        self._channel.close()
        self._process.close()

    def _kill(self) -> None:
        if self._leads:
            with contextlib.suppress(OSError):  # it may not have its own session yet
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()

    def _wait(self, milliseconds: float) -> None:
        """Wait for a message or the end of the process."""
        poller = select.poll()
        poller.register(self._process.sentinel, select.POLLIN)
        if self.fileno() >= 0:
            poller.register(self.fileno(), self.events)
        poller.poll(milliseconds)


def end_all(children: Iterable[Child], seconds: float) -> None:
    """Request processes to end, wait for them together, and kill those that are running after `seconds`."""
    children, deadline = list(children), time.monotonic() + seconds
    for child in children:
        child.ask_to_end()
    for child in children:
        child.end(deadline)


at_fork(after_in_child=_leaders.clear)


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

    def close(self) -> int:
        """Close the file, and return its size in bytes. The child has a descriptor of its own."""
        if self._file is None:
            return 0
        with self._file as file:
            return file.tell()


def _receive_call(descriptor: Any) -> _Call:
    with os.fdopen(descriptor.detach(), "rb") as file:
        file.seek(0)
        return _Call(*pickle.load(file))


def _unsendable(parts: Sequence[tuple[str, object]], method: str) -> InputError | None:
    """Return the error that names the part that cannot be pickled, or None."""
    for what, part in parts:
        if problem := describe_unpicklable(part, ForkingPickler.dumps):
            return not_picklable(
                f"{what} cannot be sent to a process started by {method!r}: {problem}. Define it at the top "
                "level of a module (no lambda, no function within a function), or use multiprocessing_context='fork'"
            )
    return None


def describe_unpicklable(value: object, dumps: Callable[[Any], object]) -> str:
    """Return why `dumps` cannot pickle `value`, with the attribute that is the cause; "" if it can."""
    path, problem = "", ""
    while reason := _problem_of(value, dumps):
        problem = reason
        attributes = getattr(value, "__dict__", {})
        own = attributes.items() if isinstance(attributes, dict) and not isinstance(value, type) else ()
        cause = next((name for name, part in own if _problem_of(part, dumps)), None)
        if cause is None or path.count(".") > _DEEPEST:
            break
        path, value = f"{path}.{cause}", attributes[cause]
    return f"its attribute {path[1:]!r} is a {type(value).__name__}: {problem}" if path else problem


def _problem_of(value: object, dumps: Callable[[Any], object]) -> str:
    try:
        dumps(value)
    except Exception as error:
        return text_of(error) or type(error).__name__
    return ""


# -- in the child process ---------------------------------------------------------------------------------------------


def _run(
    connection: socket.socket,
    pid: int,
    direct: bool,
    leads: bool,
    call: _Call,
) -> None:
    begin_child()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # reset a handler inherited from the parent
    if leads:
        with contextlib.suppress(OSError):
            os.setsid()  # signals of the parent's terminal do not reach this process
    check_generator()
    call.main(Parent(connection, pid, direct), *call.arguments)


class Parent:
    """The process that started this one.

    Args:
        connection: connection to the parent.
        pid: PID of the parent.
        direct: whether this process is the parent's direct child, not the child of a fork server.
    """

    def __init__(self, connection: socket.socket, pid: int, direct: bool) -> None:
        keep_from_children(connection)
        self._connection, self._pid, self._direct = connection, pid, direct
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)
        self._process = -1
        with contextlib.suppress(OSError, AttributeError):  # missing in some kernels and sandboxes
            self._process = os.pidfd_open(pid)
            self._poller.register(self._process, select.POLLIN)

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that are readable when the parent has sent a message, requests the end, or has ended."""
        return [fd for fd in (self._connection.fileno(), self._process) if fd >= 0]

    def report(self) -> None:
        """Report in: the start of this process has succeeded."""
        self.send()

    def send(self, *pieces: bytes | memoryview) -> None:
        """Send a message made of `pieces`. Raises `OSError` if the parent has ended."""
        send_message(self._connection.fileno(), pieces)

    def wait(self, seconds: float) -> bool:
        """Wait until the parent has sent a message, requests the end, or has ended; returns False after `seconds`."""
        return bool(self._poller.poll(1000 * seconds)) or self.ended

    @property
    def ended(self) -> bool:
        """Whether the parent has ended."""
        if self._direct:
            return os.getppid() != self._pid
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def receive(self) -> bytearray | None:
        """Wait for the next message; returns None if this process must end. Raises `EOFError` if the parent is gone."""
        while True:
            ready = [fd for fd, _ in self._poller.poll(_CHECK_MILLISECONDS)]
            if self._process in ready or self.ended:
                raise EOFError
            if ready:
                try:
                    return receive_message(self._connection.fileno())
                except (EOFError, OSError):
                    return None

    def listen(self, take: Callable[[bytearray | None], object]) -> None:
        """Start a thread that calls `take` with each result of `receive`, and ends this process with its parent."""
        threading.Thread(target=self._listen, args=(take,), name="stallfree-inbox", daemon=True).start()

    def _listen(self, take: Callable[[bytearray | None], object]) -> None:
        try:
            message: bytearray | None = bytearray()
            while message is not None:
                message = self.receive()
                take(message)
            self._poller.unregister(self._connection)
            while not self.wait(_CHECK_MILLISECONDS / 1000):
                pass
        finally:
            os._exit(1)
