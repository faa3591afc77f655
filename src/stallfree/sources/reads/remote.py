"""Files that `fsspec` opens on other machines: in a block, their reads are recorded or served.

Those of a file system on this host are opened by `open`, and need nothing more.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stallfree.sources.reads.recorded import Block, FileChanged, FileRecord, current_block, outside
from stallfree.sources.reads.tracked_file import TrackedFile

_OPTIONS = {"block_size", "cache_options", "compression"}
"""Arguments of `AbstractFileSystem.open` that do not change what is read, if there is no compression."""


class RemoteFile(TrackedFile):
    """The raw file beneath what `fsspec` opens in a block.

    Args:
        key: stands for its path in records.
        size: of the file, by which alone it is seen to change.
        reopen: opens the file itself.
        entry: what is served; None if nothing is.
        file: the file itself, if it is open already.
    """

    def __init__(
        self, key: str, size: int, reopen: Callable[[], Any], *, entry: FileRecord | None = None, file: Any = None
    ) -> None:
        super().__init__(key, key, (size, 0), entry=entry)
        self._reopen, self._remote = reopen, file

    def _from_storage(self, block: Block | None, most: int, at: int) -> bytes:
        started = time.perf_counter()
        with outside():
            if self._remote is None:
                self._remote = self._reopen()
                if self._remote.size != self._identity[0]:
                    self._changed(block)
            self._remote.seek(at)
            data: bytes = self._remote.read(most)
        if block is not None:
            block.storage_bytes += len(data)
            block.seconds += time.perf_counter() - started
            if block.recording:
                block.note(self._path, self._identity, at, data)
        return data

    def _changed(self, block: Block | None) -> None:
        if block is not None:
            block.stale = True
        raise FileChanged(errno.ESTALE, "The file has changed since a part of it was read", self._path)

    def _record_gaps(self) -> None:
        """Nothing: a request costs more than gaps do."""

    def fileno(self) -> int:
        """Raises `io.UnsupportedOperation`: a remote file has no descriptor."""
        raise io.UnsupportedOperation("fileno")

    def close(self) -> None:
        """Close what is open."""
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.close()
        super().close()


class RemoteReader(io.BufferedReader):
    """What stands for the file object of `fsspec`.

    Attributes:
        fs, path, size: as there.
    """

    def __init__(self, raw: RemoteFile, fs: Any, path: str, size: int) -> None:
        super().__init__(raw)
        self.fs, self.path, self.size = fs, path, size


def _open(real: Callable[..., Any], fs: Any, path: Any, mode: str, options: dict[str, Any]) -> Any:
    """`fs.open(path, mode, **options)` in a block."""
    block = current_block()
    plain = mode == "rb" and set(options) <= _OPTIONS and options.get("compression") is None
    if block is None or not plain or getattr(fs, "local_file", False) or type(path) is not str:
        return real(fs, path, mode, **options)
    reopen = functools.partial(real, fs, path, mode, **options)
    path = fs._strip_protocol(path)
    key = f"{fs.unstrip_protocol(path)}#{_digest(fs)}"
    entry = block.files.get(key)
    if entry is not None:
        served = RemoteFile(key, entry.identity[0], reopen, entry=entry)
        block.opened(served)
        return RemoteReader(served, fs, path, entry.identity[0])
    if not block.recording:
        return reopen()
    started = time.perf_counter()
    with outside():
        file = reopen()
    block.seconds += time.perf_counter() - started
    size = getattr(file, "size", None)
    if type(size) is not int:
        return file
    block.begin(key, (size, 0))
    return RemoteReader(RemoteFile(key, size, reopen, file=file), fs, path, size)


def _digest(fs: Any) -> str:
    """Distinguishes file systems with other options, which may hold passwords."""
    return hashlib.sha256(repr(sorted(fs.storage_options.items(), key=str)).encode()).hexdigest()[:16]


def replace_remote_open(module: ModuleType) -> None:
    """Replace `open` of the file systems of `fsspec.spec`."""
    kind: Any = module.AbstractFileSystem
    real = kind.open

    @functools.wraps(real)
    def open(self: Any, path: Any, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if current_block() is None or args:
            return real(self, path, mode, *args, **kwargs)
        return _open(real, self, path, mode, kwargs)

    kind.open = open
