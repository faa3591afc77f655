"""A call in a forked process that ends afterwards, with all that the call opened, started or changed."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from stallfree.errors import WorkerError
from stallfree.ipc.remote import pack_error, unpack_error
from stallfree.platform import begin_child, how_it_ended, interrupts_later, shares_memory

T = TypeVar("T")

_LENGTH = struct.Struct("<?Q")  # whether the call returned, and the length of its pickled result or error
_PDEATHSIG = 1
_NO_CUDA = "Cannot re-initialize CUDA in forked subprocess"
_CHECK_MILLISECONDS, _PAUSE_SECONDS = 500, 0.005

log = logging.getLogger("stallfree")


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
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    try:
        with interrupts_later("fork"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 and later, about threads
            pid = os.fork()
            if pid == 0:
                _child(call, writing)
    finally:
        os.close(writing)
    try:
        received = _receive(reading, pid, what, time.monotonic() + seconds)
    finally:
        os.close(reading)
        with contextlib.suppress(OSError):  # it has ended, or is not needed any more
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if received is None:
        log.warning("%s had no result in a forked process for %.0f s: it runs in this process now", what, seconds)
        return call()
    returned, data = received
    if returned:
        return pickle.loads(data)  # type: ignore[no-any-return]
    error = unpack_error(data)
    if _NO_CUDA in "".join(traceback.format_exception(error)):
        return call()
    raise error


def _child(call: Callable[[], Any], writing: int) -> None:
    """Make the call, send its result, and end."""
    returned, data = False, b""
    try:
        _end_with_parent()
        begin_child()
        torch.set_num_threads(1)  # those of OpenMP do not survive a fork
        try:
            data, returned = pickle.dumps(call(), pickle.HIGHEST_PROTOCOL), True
        except BaseException as error:
            data = pack_error(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        _write(writing, _LENGTH.pack(returned, len(data)))
        _write(writing, data)
    finally:
        os._exit(0)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _receive(reading: int, pid: int, what: str, deadline: float) -> tuple[bool, bytearray] | None:
    """Return whether the call returned, and what the child sent; None if the deadline was reached."""
    data, size, returned = bytearray(), _LENGTH.size, None
    ended, chunk = False, b""
    poller = select.poll()
    poller.register(reading, select.POLLIN)
    while len(data) < size or returned is None:
        if time.monotonic() > deadline:
            return None
        if poller.poll(0 if ended else _CHECK_MILLISECONDS):
            chunk = os.read(reading, 1 << 20)
            ended = not chunk
        elif not ended:
            ended = _exit_code(pid) is not None  # another process may have inherited the pipe
            continue
        if ended:
            while (code := _exit_code(pid)) is None and time.monotonic() < deadline:
                time.sleep(_PAUSE_SECONDS)
            raise WorkerError(f"{what} was not finished: {how_it_ended(code)}")
        data += chunk
        if returned is None and len(data) >= _LENGTH.size:
            returned, length = _LENGTH.unpack_from(data)
            del data[: _LENGTH.size]
            size = length
    return returned, data


def _exit_code(pid: int) -> int | None:
    """Return the exit code of the child, which stays a zombie; None if it is running, or is not known."""
    with contextlib.suppress(ChildProcessError):
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if end is not None:
            return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    return None
