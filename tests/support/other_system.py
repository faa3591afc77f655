"""Makes an interpreter look like one on macOS or Windows, as far as Python's own modules show it.

Said is what those systems lack, not how they do what they have: paths, files that are open and cannot be deleted, and
starting processes stay those of Linux.
"""

import builtins
import contextlib
import io
import mmap
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

BEYOND_MACOS = {
    os: "posix_fallocate posix_fadvise eventfd eventfd_read eventfd_write sched_getaffinity pidfd_open pipe2 O_PATH "
        "listxattr",
    socket: "SOCK_CLOEXEC SOCK_NONBLOCK MSG_NOSIGNAL SO_PEERCRED", select: "epoll POLLRDHUP",
    signal: "sigtimedwait SIGIO", mmap: "MADV_HUGEPAGE MADV_POPULATE_READ",
}  # fmt: skip
"""What Linux has and macOS has not."""

BEYOND_WINDOWS = {
    os: "register_at_fork fork getuid geteuid getgid setsid killpg sysconf statvfs fstatvfs pread preadv pwrite "
        "pwritev set_blocking fdatasync O_CLOEXEC O_NONBLOCK O_DIRECTORY O_NOFOLLOW WNOHANG",
    socket: "AF_UNIX MSG_DONTWAIT", select: "poll POLLIN POLLOUT POLLHUP POLLERR",
    signal: "SIGKILL SIGCHLD SIGALRM SIGHUP SIGUSR1 SIGSTOP SIGCONT SIGPIPE setitimer pthread_sigmask",
    mmap: "MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS PROT_READ PROT_WRITE MADV_WILLNEED MADV_DONTNEED",
}  # fmt: skip
"""What macOS has and Windows has not."""

_MODULES_BEYOND_WINDOWS = ("fcntl", "resource", "pwd", "grp", "termios")
_FOLDERS = ("/proc", "/sys", "/dev/shm")


def pretend(system: str) -> None:
    """From now on this interpreter is one on "darwin" or "win32". What has to know better is to be imported before."""
    free = shutil.disk_usage(os.getcwd())
    shutil.disk_usage = lambda path: free  # type: ignore[assignment, misc]  # it has another one on Windows
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    if hasattr(shutil, "_rmtree_impl"):  # Python 3.14
        shutil._rmtree_impl = shutil._rmtree_unsafe  # type: ignore[attr-defined]
    for missing in [BEYOND_MACOS] if system == "darwin" else [BEYOND_MACOS, BEYOND_WINDOWS]:
        for module, names in missing.items():
            for name in names.split():
                with contextlib.suppress(AttributeError):  # of a newer Python
                    delattr(module, name)
    if system == "win32":
        sys.modules.update(dict.fromkeys(_MODULES_BEYOND_WINDOWS))  # type: ignore[arg-type]
    for module, name in ((os, "open"), (io, "open"), (builtins, "open"), (os, "access")):
        setattr(module, name, _without_folders(getattr(module, name)))
    sys.platform = system


def _without_folders(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(path, int) or not os.fspath(path).startswith(_FOLDERS):
            return function(path, *arguments, **named)
        if function.__name__ == "access":
            return False
        raise FileNotFoundError(2, "No such file or directory", path)

    return call
