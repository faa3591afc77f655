"""Forks: what a child leaves to its parent, and calls in a forked child that ends afterwards.

A call in a forked process leaves nothing behind in this one: what it opened, started or changed ends with the process.
"""

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from stallfree.errors import WorkerError
from stallfree.ipc.channel import Channel, pack_error, unpack_error
from stallfree.platform import at_fork, begin_child, how_it_ended, interrupts_later, shares_memory

T = TypeVar("T")

_PDEATHSIG = 1
_NO_CUDA = "Cannot re-initialize CUDA in forked subprocess"

log = logging.getLogger("stallfree")


class Owner:
    """The process that created an object."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process; False in a forked child."""
        return self.pid == os.getpid()


_lenders: weakref.WeakSet[Any] = weakref.WeakSet()


def prepare_for_forks(lender: Any) -> None:
    """Call `lender.before_fork()` in the thread that forks, before each fork, as long as the lender is alive.

    A lender has lent memory which it fills again later, such as a ring of slots: a child keeps reading it.
    """
    _lenders.add(lender)


at_fork(before=lambda: [lender.before_fork() for lender in list(_lenders)])


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
    error = unpack_error(memoryview(answer)[1:])
    if _NO_CUDA in "".join(traceback.format_exception(error)):
        return call()
    raise error


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
