"""The functions that open files, replaced in the thread that makes a sample and in no other.

| call, in the thread that runs `dataset[id]` | gets |
| --- | --- |
| `open`, `io.open`, so `pathlib`, `gzip`, `zipfile`, `numpy.load`, `torch.load`, PIL, ... | a `ServedFile` |
| `open` of an `fsspec` file system on another host | a `ServedFile` |
| `cv2.imread`, `torchvision.io.read_file` | the same library's function for bytes in memory |

Everything else goes to storage: ranges of large files, mappings, libraries that open files natively, other threads.

While samples are made, the attributes of the modules hold a `Replacement`, which calls the replaced function in every
other thread; before and after, they hold that function itself.
"""

import contextlib
import copy
import functools
import hashlib
import io
import os
import stat
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NoReturn

import numpy as np

from stallfree.platform import at_fork

MOST_BYTES = 64 << 20
"""Larger files are read from storage."""

SMALL = 1 << 20
"""Local files up to this size are read whole; larger ones if the samples read most of their bytes."""

_SECOND, TICK = 10**9, 2 * 10**7
"""Nanoseconds within which two changes of a file may have the same time, if the file system counts seconds or less."""

_TEXT = ("encoding", "errors", "newline")
_FSSPEC_OPTIONS = {"block_size", "cache_options", "compression"}
_PYTHON = (os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib"))
_NOT_DATA = tuple(os.fsencode(folder) for folder in ("/proc/", "/sys/", "/dev/", *_PYTHON))
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "ETag", "etag", "created")


# --- the files of one sample ----------------------------------------------------------------------------------------


class ServedFile(io.BytesIO):
    """A whole file in memory, open for reading.

    Attributes:
        name, mode: as of the file object of `open`.
    """

    def __init__(self, data: bytes, name: Any) -> None:
        super().__init__(data)
        self.name, self.mode = name, "rb"  # type: ignore[misc]
        self._native: io.FileIO | None = None

    def fileno(self) -> int:
        """The number of a descriptor of an anonymous file with this content, at this position."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if self._native is None:
            self._native = io.FileIO(os.memfd_create("stallfree-file"), "r+")
            weakref.finalize(self, self._native.close)
            with self.getbuffer() as data, os.fdopen(self._native.fileno(), "wb", closefd=False) as file:
                file.write(data)
            self._native.seek(self.tell())
        return self._native.fileno()

    def close(self) -> None:
        """Close the file and its descriptor."""
        if self._native is not None:
            self._native.close()
        super().close()

    def peek(self, size: int = 0, /) -> bytes:
        """Return the next bytes without a change of the position."""
        with self.getbuffer() as data:
            return bytes(data[self.tell() : self.tell() + max(size, io.DEFAULT_BUFFER_SIZE)])

    def writable(self) -> bool:
        """False."""
        return False

    def write(self, *_: Any) -> NoReturn:
        """Raise `io.UnsupportedOperation`."""
        raise io.UnsupportedOperation("File not open for writing")

    writelines = truncate = write


class Files:
    """Opens the files of one sample.

    Args:
        table: contents of files by key. `get(key, stamp)` returns one, or None if it is not there or has changed, where
            `stamp()` returns size and time in storage; `put(key, stamp, data)` stores one; `drop(key)` drops it.
        most: bytes of the largest local file that is served. Larger ones are read from storage.

    Attributes:
        served: bytes of the files that were served.
        larger: bytes of the files that were opened, and have more than `most` bytes.
    """

    def __init__(self, table: Any, most: int) -> None:
        self.table, self.most, self.served, self.larger = table, most, 0, 0
        self._began = time.time_ns()

    def open(self, path: Any) -> Any:
        """Return a file open for reading bytes; None if it is not for this class, or cannot be read."""
        data = self.content(path)
        return None if data is None else ServedFile(data, path)

    def content(self, path: Any, most: int = 0) -> bytes | None:
        """Return the content of a local file of at most `most` bytes; for 0, of those that are served."""
        key = _key(path)
        if key is None:
            return None
        data: bytes | None = self.table.get(key, lambda: _stamp_of(os.stat(key)))
        if data is None:
            data = self._read(key, most or self.most)
        self.served += len(data or b"")
        return data

    def _read(self, key: bytes, most: int) -> bytes | None:
        """Read a whole local file of up to `most` bytes from storage, and store it."""
        try:
            status = os.stat(key)
            is_regular = stat.S_ISREG(status.st_mode)
            if not is_regular or status.st_size > most:
                self.larger += status.st_size if is_regular else 0
                return None
            with io.FileIO(key) as file:
                status = os.fstat(file.fileno())
                data = file.read(status.st_size + 1)
                if _stamp_of(os.fstat(file.fileno())) != _stamp_of(status):
                    return None
        except OSError:
            return None
        if len(data) != status.st_size:
            return None
        changed = status.st_mtime_ns
        if changed + (TICK if changed % _SECOND else 2 * _SECOND) < self._began:  # otherwise it may change unnoticed
            self.table.put(key, _stamp_of(status), data)
        return data

    def open_remote(self, reopen: Callable[[], Any], fs: Any, path: str) -> Any:
        """Return a file of an fsspec file system, open for reading bytes; None if it cannot be cached."""
        options = hashlib.sha256(repr(sorted(fs.storage_options.items(), key=str)).encode()).hexdigest()[:16]
        key = f"{fs.unstrip_protocol(path)}#{type(fs).__name__} {options}".encode("utf-8", "surrogateescape")

        def stamp() -> str:
            info = fs.info(path)
            return f"{info['size']} {[str(info[name]) for name in _TIMES if name in info]}"

        data = self.table.get(key, stamp)
        if data is None:
            before = stamp()
            size = before.partition(" ")[0]
            if not size.isdigit() or int(size) > MOST_BYTES:
                return None
            with reopen() as file:
                data = bytes(file.read())
            if len(data) != int(size):
                return None
            self.table.put(key, before, data)
        self.served += len(data)
        served: Any = ServedFile(data, path)
        served.fs, served.path, served.size = fs, path, len(data)
        return served

    def written(self, path: Any) -> None:
        """Drop the record of a file that the data set writes."""
        if (key := _key(path)) is not None:
            self.table.drop(key)


def _key(path: Any) -> bytes | None:
    """Return the absolute path of a local file; None for what no path is, and for files of the kernel and of Python."""
    try:
        key = os.fsencode(path)
    except (TypeError, ValueError):
        return None
    key = key if key.startswith(b"/") else os.path.join(os.getcwdb(), key)
    special = key.startswith(_NOT_DATA) and not key.startswith(b"/dev/shm/")
    return None if special or b"\0" in key else key


def _stamp_of(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


# --- the functions that open files ----------------------------------------------------------------------------------


def _open(files: Files, real: Any, file: Any, mode: Any = "r", buffering: int = -1, *text: Any, **named: Any) -> Any:
    """Call `open(file, mode, buffering, encoding, errors, newline)`."""
    is_text, options = mode in ("r", "rt", "tr"), dict(zip(_TEXT, text, strict=False)) | named
    is_known = len(text) <= len(_TEXT) and options.keys() <= set(_TEXT)
    if not is_text and mode not in ("rb", "br"):
        files.written(file)
    elif is_known and (buffering if is_text else not any(options.values())):
        served = files.open(file)
        if served is not None and is_text:
            served = io.TextIOWrapper(served, **options, line_buffering=buffering == 1)
            served.mode = mode  # type: ignore[misc]
        if served is not None:
            return served
    return real(file, mode, buffering, *text, **named)


def _open_remote(files: Files, real: Any, fs: Any, path: Any, mode: str = "rb", *more: Any, **options: Any) -> Any:
    """Call `AbstractFileSystem.open`."""
    plain = mode == "rb" and not more and options.keys() <= _FSSPEC_OPTIONS and options.get("compression") is None
    if plain and type(path) is str and not getattr(fs, "local_file", False):
        with serving(None), contextlib.suppress(Exception):  # the call below has the same error
            served = files.open_remote(lambda: real(fs, path, mode, **options), fs, fs._strip_protocol(path))
            if served is not None:
                return served
    return real(fs, path, mode, *more, **options)


def _imread(files: Files, real: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
    plain = len(args) + len(kwargs) <= 1 and kwargs.keys() <= {"flags"}
    data = files.content(filename, MOST_BYTES) if plain else None
    flags = args or (kwargs.get("flags", 1),)
    image = sys.modules["cv2"].imdecode(np.frombuffer(data, np.uint8), *flags) if data else None
    return real(filename, *args, **kwargs) if image is None else image


def _read_file(files: Files, real: Any, path: Any) -> Any:
    data, torch = files.content(path, MOST_BYTES), sys.modules["torch"]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else real(path)


_FUNCTIONS: dict[tuple[str, ...], Callable[..., Any]] = {
    ("builtins", "open"): _open,
    ("io", "open"): _open,
    ("bz2", "_builtin_open"): _open,
    ("fsspec.spec", "AbstractFileSystem", "open"): _open_remote,
    ("cv2", "imread"): _imread,
    ("torchvision.io", "read_file"): _read_file,
    ("torchvision.io.image", "read_file"): _read_file,
}
"""What stands for a function, by its module and name."""


class Replacement:
    """Stands for a function of a library in the threads that make samples; in all others it calls that function.

    It may be kept and pickled: then it is the function itself.
    """

    def __init__(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        self.owner, self.name, self.instead, self.real = owner, name, instead, vars(owner)[name]

    def put(self, *, installed: bool) -> None:
        """Replace the function, or put it back, unless something else has replaced it meanwhile."""
        current = vars(self.owner).get(self.name)
        if installed and current is not self:
            self.real = current
            setattr(self.owner, self.name, self)
        elif not installed and current is self:
            setattr(self.owner, self.name, self.real)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        files = getattr(_thread, "files", None)
        return self.real(*args, **kwargs) if files is None else self.instead(files, self.real, *args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:  # a routine for `inspect`; bound only where it is one
        return MethodType(self, instance) if instance is not None and isinstance(self.owner, type) else self

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["real"], name)

    def __reduce__(self) -> Any:
        return copy.copy, (self.real,)


_thread = threading.local()
_lock = threading.Lock()
_threads = 0
"""Threads that make a sample."""
_modules = 0
"""How many modules were imported when the replacements were made."""
_replacements: dict[tuple[str, str], Replacement] = {}


@contextlib.contextmanager
def serving(files: Files | None) -> Iterator[None]:
    """Context in which this thread opens its files by `files`; by the functions themselves if None."""
    before = getattr(_thread, "files", None)
    _count_threads(1)
    _thread.files = files
    try:
        yield
    finally:
        _thread.files = before
        _count_threads(-1)


def _count_threads(change: int) -> None:
    """Install the replacements of the modules that are imported while threads make samples."""
    global _modules, _threads
    with _lock:
        _threads += change
        if len(sys.modules) != _modules:
            _modules = len(sys.modules)
            for (module, *path, name), instead in _FUNCTIONS.items():
                if module in sys.modules and (module, name) not in _replacements:
                    with contextlib.suppress(AttributeError, KeyError):  # while another thread imports it
                        owner = functools.reduce(getattr, path, sys.modules[module])
                        _replacements[module, name] = Replacement(owner, name, instead)
        for replacement in _replacements.values():
            replacement.put(installed=_threads > 0)


def _forget_threads() -> None:
    """Remove the replacements in a forked process, where the threads that made samples do not exist."""
    global _lock, _threads
    _lock, _threads, _thread.files = threading.Lock(), 0, None
    _count_threads(0)


at_fork(after_in_child=_forget_threads)
