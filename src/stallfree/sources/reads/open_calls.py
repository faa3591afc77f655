"""The replacement of `open`: in a block, files are opened so that their reads are recorded or served.

`builtins.open`, `io.open` and `os.stat` are replaced once per process, with the names under which modules hold them.
Outside of blocks, and for all that is no plain opening of a regular file for reading, the replacement calls the real
one. `os.stat`, on which `os.path.exists` and others build, is answered from the record for the files in it.
"""

from __future__ import annotations

import functools
import io
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from stallfree.platform import at_fork
from stallfree.sources.reads.native import replace_held, replace_imported
from stallfree.sources.reads.recorded import LEFT_OPEN, THREAD, Block, Scope
from stallfree.sources.reads.tracked_file import TrackedFile, WholeFile, identity_of, status_fields, status_of

_T = TypeVar("_T")

_BINARY = {"rb": True, "br": True, "r": False, "rt": False, "tr": False}
"""The modes that only read, and whether they are binary."""

_BUFFER, _UP_TO = 32 << 10, 256 << 10
"""Bytes of a buffer, for files of up to so many bytes. Of larger ones little more is to be read than is asked for."""

_NOT_FILES = ("/proc/", "/sys/", "/dev/")
_FILES = "/dev/shm/"


class _Call(NamedTuple):
    """The arguments of `open`."""

    file: Any
    mode: Any = "r"
    buffering: Any = -1
    encoding: Any = None
    errors: Any = None
    newline: Any = None
    closefd: Any = True
    opener: Any = None


class Tracker(Scope):
    """Runs functions in blocks. One per reader; only one thread may be in `run` at a time.

    Threads that the function starts are in its block too, and in later ones of the same tracker if they live on.
    """

    def run(self, block: Block, function: Callable[..., _T], *args: Any) -> _T:
        """`function(*args)` in `block`.

        If a library that opens files natively is imported meanwhile, the block is stale if it records; if it serves,
        the function is called once more.
        """
        install()
        before = THREAD.tracker, self.block
        THREAD.tracker, self.block = self, block
        try:
            try:
                value = function(*args)
            except Exception:
                if block.recording or not replace_imported():
                    raise
            else:
                if block.recording or not replace_imported():
                    return value
            return function(*args)
        finally:
            THREAD.tracker, self.block = before
            block.end()
            if block.recording and replace_imported():
                block.stale = True

    def __reduce__(self) -> tuple[Any, ...]:
        return Tracker, ()


class _Replacement:
    """What stands for `open` or `stat`. No function, which would become a method where it is held in a class.

    Args:
        real: what it stands for.
        module: in which it is found by its name; it is pickled so.
        tracked: gives what is returned in a block; None if the real function is to be called.
    """

    def __init__(self, real: Callable[..., Any], module: str, tracked: Callable[..., Any]) -> None:
        functools.update_wrapper(self, real)
        self.__module__ = module
        self._real, self._tracked = real, tracked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracker = THREAD.tracker
        if tracker is None or tracker.block is None:
            return self._real(*args, **kwargs)
        found = self._tracked(tracker, tracker.block, args, kwargs)
        return self._real(*args, **kwargs) if found is None else found

    def __reduce__(self) -> str:
        return self._real.__name__

    def __repr__(self) -> str:
        return repr(self._real)


def _recorded_status(tracker: Scope, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The status of a file that is served; None if the real `stat` is to be called."""
    if not block.files or len(args) != 1 or kwargs not in ({}, {"follow_symlinks": True}):
        return None
    try:
        path = _absolute(args[0])
    except (TypeError, ValueError, OSError, AttributeError):
        return None
    entry = block.files.get(path)
    return None if entry is None or not entry.status or path in tracker.written else status_of(entry)


def _absolute(file: Any) -> str:
    """The absolute path that `file` names. It is not normalized, as `..` may come after a symbolic link."""
    name = file if type(file) is str else os.fspath(file)
    path = name if type(name) is str else os.fsdecode(name)
    return path if path.startswith("/") or os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _tracked(tracker: Scope, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The open file, if it is recorded or served; None if the real `open` is to be called."""
    try:
        call = _Call(*args, **kwargs)
        path, name = _absolute(call.file), os.fspath(call.file)
    except (TypeError, ValueError, OSError, AttributeError):
        return None  # the real one raises what is to be raised
    binary = _BINARY.get(call.mode) if type(call.mode) is str else None
    if binary is None:
        if type(call.mode) is str and set(call.mode) & set("wax+"):
            tracker.note_written(block, path)
        return None
    if path in tracker.written or not _is_plain(call, binary):
        return None
    if path.startswith(_NOT_FILES) and not path.startswith(_FILES):
        return None
    entry = block.files.get(path)
    if entry is not None:
        small = entry.whole and entry.identity[0] <= LEFT_OPEN
        served = WholeFile(name, entry) if small else TrackedFile(name, path, entry.identity, entry=entry)
        block.opened(served)
        return _wrapped(served, call, binary, entry.identity[0])
    started = time.perf_counter()
    file = io.FileIO(name, "r")
    try:
        status = os.fstat(file.fileno())
    except BaseException:
        file.close()
        raise
    if not stat.S_ISREG(status.st_mode) or status.st_dev in _kernel_devices():
        return _wrapped(file, call, binary, 0)
    block.seconds += time.perf_counter() - started
    if block.recording and block.wrote(path, status.st_ctime_ns):
        return _wrapped(file, call, binary, status.st_size)
    identity = identity_of(status)
    tracked = TrackedFile(name, path, identity, file=file)
    if block.recording:
        block.begin(path, identity, status_fields(status))
        block.opened(tracked)
    return _wrapped(tracked, call, binary, identity[0])


def _is_plain(call: _Call, binary: bool) -> bool:
    """Whether nothing is asked for that only the real `open` does, such as raising an error."""
    if type(call.buffering) is not int or not call.closefd or call.opener is not None:
        return False
    if binary:
        return call.buffering >= -1 and call.buffering != 1 and call.encoding is call.errors is call.newline is None
    return call.buffering >= -1 and call.buffering != 0


def _wrapped(raw: Any, call: _Call, binary: bool, size: int) -> Any:
    """`raw`, in what `open` returns for these arguments."""
    buffering = call.buffering
    if buffering == 0:
        return raw
    try:
        line_buffering = buffering == 1 or (buffering < 0 and raw.isatty())
        if buffering < 2:
            buffering = _BUFFER if io.DEFAULT_BUFFER_SIZE < size <= _UP_TO else io.DEFAULT_BUFFER_SIZE
        buffer = io.BufferedReader(raw, buffering)
        if binary:
            return buffer
        text: Any = io.TextIOWrapper(buffer, call.encoding, call.errors, call.newline, line_buffering)
        text.mode = call.mode
        return text
    except BaseException:
        raw.close()
        raise


@functools.cache
def _kernel_devices() -> frozenset[int]:
    """The devices of file systems whose files are made by the kernel when they are read."""
    found = set()
    for folder in ("/proc", "/sys"):
        if os.path.isdir(folder):
            found.add(os.stat(folder).st_dev)
    return frozenset(found - {os.stat("/").st_dev})


# --- the replacement -------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Replace `open`, once per process, and the functions of libraries that were imported meanwhile."""
    global _installed
    replace_imported()
    if _installed:
        return
    with _lock:
        if not _installed:
            _replace_functions()
            _replace_thread_start()
            _installed = True


def _replace_functions() -> None:
    """Replace them where a module holds them, unless another library has replaced them there."""
    real, real_stat = sys.modules["_io"].open, os.stat
    ours = _Replacement(real, "io", _tracked)
    stat = _Replacement(real_stat, "os", _recorded_status)
    replace_held(real, ours, but=("_io", __name__))
    replace_held(real_stat, stat, but=("posix", "nt"))
    for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if real_stat in supporting:
            supporting.add(stat)
    openers = sys.modules.get("numpy.lib._datasource")
    kept = getattr(getattr(openers, "_file_openers", None), "_file_openers", {})
    for key, value in list(kept.items()):
        if value is real:
            kept[key] = ours


def _replace_thread_start() -> None:
    """Have threads run on behalf of the tracker that the thread runs for which starts them."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_tracked(self: threading.Thread) -> None:
        tracker = THREAD.tracker
        if tracker is not None and tracker.block is not None:
            self.run = functools.partial(_run_tracked, tracker, self.run)  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_tracked  # type: ignore[method-assign]


def _run_tracked(tracker: Scope, run: Callable[[], None]) -> None:
    THREAD.tracker = tracker
    run()


def _forget() -> None:
    THREAD.tracker = None


at_fork(after_in_child=_forget)
