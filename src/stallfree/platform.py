"""Where operating systems differ.

On Linux the processes of a host share memory, and everything works. Elsewhere (macOS, Windows) there is a portable
fallback within one process and without a cache: `DataLoader` prepares in the training process.
What cannot be had there raises `PlatformError`, which names what to use in its place.
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker

from stallfree.errors import PlatformError

try:
    import fcntl as fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

OPEN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags for every `os.open`: bytes as they are, and not for processes started later."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def shares_memory() -> bool:
    """Whether processes of this host can share caches and batches, which takes Linux."""
    return sys.platform.startswith("linux")


def need_linux(what: str, instead: str) -> None:
    """Raise `PlatformError` where processes share no memory: `what` needs it, `instead` says what to do."""
    if not shares_memory():
        raise PlatformError(f"{what} needs Linux, and this is {sys.platform}: {instead}")


def at_fork(**hooks: Callable[[], object]) -> None:
    """`os.register_at_fork`; nothing where there is no fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)


def cpu_count() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def user_id() -> int:
    """Number of this user; 0 where users have none."""
    return os.getuid() if hasattr(os, "getuid") else 0


def allocate(fd: int, start: int, size: int) -> None:
    """Get space for `size` bytes from `start` on in the file `fd`, so that touching them mapped cannot fail.

    Raises `OSError` when there is no room. For what processes share, and so on Linux only.
    """
    os.posix_fallocate(fd, start, size)


@contextmanager
def interrupts_later(method: str) -> Iterator[None]:
    """Within it, Ctrl-C waits, also in a process that is started: it prints no traceback before it ignores that.

    Not with "forkserver" as the start method, whose server would hand this on to all processes of the user's.
    """
    if method == "forkserver":
        yield
        return
    if method == "spawn":
        resource_tracker.ensure_running()  # when it starts, SIGINT is unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_child() -> None:
    """The first call in a process that this package starts: its parent decides when it ends.

    What a fork brought along is never collected there: an unused loader of torch would wait 5 s for each worker.
    """
    gc.freeze()
    _reuse_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _reuse_freed_memory() -> None:
    """Let malloc reuse blocks of up to 32 MiB, as large images and arrays are, and keep up to 128 MiB for that.

    By default, the GNU C library returns them to the system, and touching fresh pages costs more than filling them.
    """
    with suppress(OSError, AttributeError, TypeError):  # another library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)


def how_it_ended(exit_code: int | None) -> str:
    """What the exit code of a child process says, in words such as "it was ended by SIGKILL"."""
    if exit_code is None:
        return "how it ended is not known"
    if exit_code >= 0:
        return f"it exited with code {exit_code}"
    name = {number.value: number.name for number in signal.Signals}.get(-exit_code, f"signal {-exit_code}")
    memory = ", as the system does when memory is short" if name == "SIGKILL" else ""
    return f"it was ended by {name}{memory}"
