"""The functions that open files, replaced in the thread that makes a sample and in no other.

| call, in the thread that runs `dataset[id]` | gets |
| --- | --- |
| `open`, `io.open`, so `pathlib`, `gzip`, `zipfile`, `numpy.load`, `torch.load`, PIL, ... | a `ServedFile` |
| `open` of an `fsspec` file system on another host | a `ServedFile` |
| `cv2.imread`, `torchvision.io.read_file` | the same library's function for bytes in memory |

Everything else goes to storage: ranges of large files, mappings, libraries that open files natively, other threads.

While samples are made, the attributes of the modules hold a replacement, which calls the replaced function in every
other thread; before and after, they hold that function itself.
"""

import contextlib
import copy
import functools
import io
import os
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import xxhash

from stallfree.platform import at_fork
from stallfree.sources.paths import stamp_of

MOST_BYTES = 64 << 20
"""Larger files are read from storage."""

SMALL = 1 << 20
"""Local files up to this size are read whole; larger ones if the samples read most of their bytes."""

_SECOND, TICK = 10**9, 2 * 10**7
"""Nanoseconds within which two changes of a file may have the same time, if the file system counts seconds or less."""

_TEXT = ("encoding", "errors", "newline")
_FSSPEC_OPTIONS = {"block_size", "cache_options", "compression"}
_PYTHON = tuple(os.fsencode(f"{sysconfig.get_path(name)}/") for name in ("stdlib", "purelib", "platlib"))
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "ETag", "etag", "created")


# --- the files of one sample ----------------------------------------------------------------------------------------


class ServedFile(io.BytesIO):
    """A whole file in memory, open for reading.

    Attributes:
        name, mode: as of the file object of `open`.
    """

    _native: io.FileIO | None = None

    def __init__(self, data: bytes, name: Any) -> None:
        super().__init__(data)
        self.name, self.mode = os.fspath(name), "rb"  # type: ignore[misc]

    def fileno(self) -> int:
        """The number of a descriptor of an anonymous file with this content, at this position."""
        position = self.tell()
        if self._native is None:
            self._native = io.FileIO(os.memfd_create("stallfree-file"), "r+")
            self._native.write(self.getvalue())
            self._native.seek(position)
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

    writelines, truncate, readall = write, write, io.BytesIO.read


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

    def content(self, path: Any, most: int = 0) -> bytes | None:
        """Return the content of a local file of up to `most` bytes, by default `self.most`.

        Returns None for a larger one, for what no path is, and for a file that cannot be read.
        """
        key = _key(path)
        if key is None:
            return None
        data: bytes | None = self.table.get(key, lambda: stamp_of(os.stat(key)))
        if data is None:
            data = self._read(key, most or self.most)
        self.served += len(data or b"")
        return data

    def _read(self, key: bytes, most: int) -> bytes | None:
        """Read a whole local file of up to `most` bytes from storage, and store it."""
        with contextlib.suppress(OSError):
            status = os.stat(key)
            if not stat.S_ISREG(status.st_mode):
                return None
            if status.st_size > most:
                self.larger += status.st_size
                return None
            with io.FileIO(key) as file:
                data = file.read(status.st_size + 1)
                if len(data) != status.st_size or stamp_of(os.fstat(file.fileno())) != stamp_of(status):
                    return None
            changed = status.st_mtime_ns
            if changed + (TICK if changed % _SECOND else 2 * _SECOND) < self._began:  # else it may change unnoticed
                self.table.put(key, stamp_of(status), data)
            return data
        return None

    def open_remote(self, reopen: Callable[[], Any], fs: Any, path: str) -> Any:
        """Return a file of an fsspec file system, open for reading bytes; None if it cannot be cached."""
        system = xxhash.xxh3_128_hexdigest(fs.to_json().encode())
        key = f"{fs.unstrip_protocol(path)}#{system}".encode("utf-8", "surrogateescape")

        def stamp() -> str:
            info = fs.info(path)
            return f"{info['size']} {[str(info[name]) for name in _TIMES if name in info]}"

        data = self.table.get(key, stamp)
        if data is None:
            before = stamp()
            size = int(before.partition(" ")[0])  # an error if it is not known
            if size > MOST_BYTES:
                return None
            with reopen() as file:
                data = bytes(file.read())
            if len(data) != size:
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
    """Return the absolute path of a local file; None for what no path is, and for files of Python and its packages."""
    try:
        key = os.fsencode(path)
    except (TypeError, ValueError):
        return None
    key = key if key.startswith(b"/") else os.path.join(os.getcwdb(), key)
    return None if key.startswith(_PYTHON) or b"\0" in key else key


# --- the functions that open files ----------------------------------------------------------------------------------


def _open(files: Files, real: Any, file: Any, mode: Any = "r", buffering: int = -1, *text: Any, **named: Any) -> Any:
    """Call `open(file, mode, buffering, encoding, errors, newline)`."""
    is_text, options = mode in ("r", "rt", "tr"), dict(zip(_TEXT, text, strict=False)) | named
    is_known = len(text) <= len(_TEXT) and options.keys() <= set(_TEXT)
    data = None
    if not is_text and mode not in ("rb", "br"):
        files.written(file)
    elif is_known and (buffering if is_text else not any(options.values())):
        data = files.content(file)
    if data is None:
        return real(file, mode, buffering, *text, **named)
    if not is_text:
        return ServedFile(data, file)
    served = io.TextIOWrapper(ServedFile(data, file), **options, line_buffering=buffering == 1)
    served.mode = mode  # type: ignore[misc]
    return served


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
    plain = len(args) + len(kwargs) <= 1 and kwargs.keys() <= {"flags"} and not isinstance((*args, 0)[0], np.ndarray)
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


class Unbound(staticmethod):  # type: ignore[type-arg]
    """What stands for a function of a module: a class that keeps it does not bind it, and a pickle has the function."""

    def __reduce__(self) -> Any:
        replacement: Any = self.__wrapped__
        return copy.copy, (replacement.__wrapped__,)


def _replacement(real: Any, instead: Callable[..., Any], owner: Any) -> Any:
    """Return what stands for a function in the threads that make samples; in all others it calls that function."""

    @functools.wraps(real)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        files = getattr(_thread, "files", None)
        return real(*args, **kwargs) if files is None else instead(files, real, *args, **kwargs)

    return replacement if isinstance(owner, type) else Unbound(replacement)


_thread = threading.local()
_lock = threading.Lock()
_threads = 0
"""Threads that make a sample."""
_replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}
"""What stands for a function, and the function itself, by the module or class and the name."""


@functools.lru_cache(1)
def _owners(modules: int) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the modules and classes whose functions are replaced, as long as that many modules are imported."""
    owners = []
    for (module, *path, name), instead in _FUNCTIONS.items():
        owner = functools.reduce(lambda holder, inner: getattr(holder, inner, None), path, sys.modules.get(module))
        owners += [(owner, name, instead)] if owner is not None else []
    return owners


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
    """Replace the functions of the modules that are imported while threads make samples; else put them back."""
    global _threads
    with _lock:
        _threads += change
        for owner, name, instead in _owners(len(sys.modules)):
            current = vars(owner).get(name)  # None while another thread imports it
            replacement, real = _replaced.get((owner, name), (None, None))
            if _threads and current not in (None, replacement):
                if current is not real:
                    replacement = _replacement(current, instead, owner)
                    _replaced[owner, name] = replacement, current
                setattr(owner, name, replacement)
            elif not _threads and current is replacement and real is not None:
                setattr(owner, name, real)


def _forget_threads() -> None:
    """Remove the replacements in a forked process, where the threads that made samples do not exist."""
    global _lock, _threads
    _lock, _threads, _thread.files = threading.Lock(), 0, None
    _count_threads(0)


at_fork(after_in_child=_forget_threads)
