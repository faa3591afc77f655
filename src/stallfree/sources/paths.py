"""Many paths or labels in few objects, and the reading of one file.

A forked worker that touches a Python object writes to its reference count and so copies the page it lies on. Millions
of strings would end up copied into every worker; one buffer and one array of offsets are shared for good.
"""

import io
import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import xxhash

from stallfree.errors import InputError
from stallfree.pipeline.values import private

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_LOCAL_URL = re.compile(r"(file|local)://")
_URL_PATH = re.compile(r"(://.*?)/?(::|$)")
_STATTED = 256
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for its writer


def is_url(path: str) -> bool:
    """Whether `path` is an fsspec URL (`https://...`, `memory://...`, `simplecache::s3://...`) and no local path."""
    return _URL.match(path) is not None and _LOCAL_URL.match(path) is None


def canonical(path: str | os.PathLike[str]) -> str:
    """`path` as it is kept: URLs as they are, local paths absolute."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise InputError(f"path {path!r} is of type {type(path).__name__}: give a str or a pathlib.Path")
    if not text or "\0" in text:
        raise InputError(f"path {path!r} names no file: give one that is not empty and has no null byte")
    if is_url(text):
        return text
    text = _LOCAL_URL.sub("", text)
    return text if text.startswith("/") else os.path.abspath(text)


def joined(root: str, inner: str) -> str:
    """`root/inner`; in a chained URL (`zip://train::s3://bucket/a.zip`), within the first part that has a path."""
    if not is_url(root):
        return os.path.join(root, inner)
    return _URL_PATH.sub(lambda path: f"{path[1]}/{inner}{path[2]}", root, count=1)


class PathList(Sequence[str]):
    """Paths, kept as one buffer without their common beginning, and 8 bytes per path for where each begins."""

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._prefix = os.path.commonprefix(encoded) or b""  # noqa: RUF071
        cut = len(self._prefix)
        self._offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(np.fromiter((len(path) - cut for path in encoded), np.int64, len(encoded)), out=self._offsets[1:])
        self._buffer = b"".join([path[cut:] for path in encoded])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        position = range(len(self))[index]
        return os.fsdecode(self._prefix + self._buffer[self._offsets[position] : self._offsets[position + 1]])

    def fingerprint(self) -> str:
        """Changes with every change of a path, and with the size of any of 256 local files, evenly spread.

        Sizes are looked at because a data set that is rewritten keeps its names; all of them would take minutes on
        millions of files, and times of modification would differ between hosts that hold the same files.
        """
        state = xxhash.xxh3_128(self._prefix)
        state.update(self._offsets.tobytes())
        state.update(self._buffer)
        for index in np.unique(np.linspace(0, len(self) - 1, min(len(self), _STATTED), dtype=np.int64)):
            path, size = self[index], b"no file"
            with suppress(OSError):
                size = b"" if is_url(path) else b"%d " % os.stat(path).st_size
            state.update(size)
        return state.hexdigest()


class LabelList:
    """One label per sample. Python's ints and floats are kept in an array, everything else as it was given.

    Labels are returned as they were given, as copies, so that a change affects no other sample.
    """

    def __init__(self, labels: Sequence[Any]) -> None:
        kinds = {type(label) for label in labels} if isinstance(labels, (list, tuple)) else set()
        values = np.array(labels) if kinds in ({int}, {float}) else None
        self._plain = values is not None and values.dtype == (np.int64 if int in kinds else np.float64)
        self.values: Any = values if self._plain else labels
        if values is not None:
            values.flags.writeable = False

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, id: int) -> Any:
        return self.values[id].item() if self._plain else private(self.values[id])


def open_url(url: str) -> tuple[Any, str]:
    """The fsspec file system of `url`, and the path in it. fsspec keeps one per process, a forked one too.

    Raises `ImportError`, which names the packages that are missing, and whatever fsspec raises for an unknown one.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    return url_to_fs(url)  # type: ignore[no-any-return]


def stamp_of(status: os.stat_result) -> str:
    """Return size and time of modification of a file as a text."""
    return f"{status.st_size} {status.st_mtime_ns}"


def read_file(path: str) -> bytes:
    """The whole of the file at a local path or fsspec URL.

    Works in any thread and in any process, forked ones too.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is no regular file, it shrank while it was read, or reading failed.
        Exception: whatever else the file system of a URL raises.
    """
    if is_url(path):
        filesystem, inner = open_url(path)
        return bytes(filesystem.cat_file(inner))
    with io.FileIO(path, opener=lambda name, flags: os.open(name, flags | _NO_WAIT)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"not a regular file: {path!r}")
        return read_exactly(file, status.st_size)


def read_exactly(file: io.FileIO, size: int, start: int = 0) -> bytes:
    """Return `size` bytes of a file, from `start`, in as many reads as the kernel makes of it."""
    file.seek(start)
    data = b""
    while len(data) < size:
        more = file.read(size - len(data))
        if not more:
            raise OSError(f"{file.name!r} ended {size - len(data)} bytes early: it was changed while it was read")
        data += more
    return data
