"""The raw file beneath what `open` returns in a block: it records what is read, or serves it from a record."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

from stallfree.sources.reads.recorded import (
    LEFT_OPEN,
    MOST_BYTES,
    Block,
    FileChanged,
    FileRecord,
    Identity,
    current_block,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CHUNK = 1 << 16
_END = 1 << 63
"""Positions are below this."""


class TrackedFile(io.RawIOBase):
    """A regular file that is open for reading. Takes the place of `io.FileIO`.

    In a block that records, what is read is noted there; in one that serves, it comes from the record. What no record
    has is read from the file, which is opened when it is needed. It may be used after its block, and in later ones.

    All bytes are of one version of the file. Where that is not so, `FileChanged` is raised, the block is marked as
    stale, and from then on the new version is read.

    Args:
        name: of the file, as it was given.
        path: absolute.
        identity: of the file.
        entry: what is served; None if nothing is.
        file: the file itself, if it is open already.
    """

    mode = "rb"
    closefd = True

    def __init__(
        self,
        name: str | bytes,
        path: str,
        identity: Identity,
        *,
        entry: FileRecord | None = None,
        file: io.FileIO | None = None,
    ) -> None:
        self.name = name
        self._path, self._identity, self._entry, self._file = path, identity, entry, file
        self._served = False  # whether bytes of a record were given
        self._at = 0
        self._by_number: io.FileIO | None = None  # set when the number of the descriptor was asked for

    # -- reading ------------------------------------------------------------------------------------------------------

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """As `io.FileIO.readinto`."""
        self._check()
        if self._by_number is not None:
            return self._by_number.readinto(buffer)
        view = memoryview(buffer).cast("B")
        block, done, size = current_block(), 0, len(view)
        while done < size:
            part = self._next(block, size - done)
            count = len(part)
            if not count:
                break
            view[done : done + count] = part
            done += count
            self._at += count
        return done

    def readall(self) -> bytes:
        """As `io.FileIO.readall`."""
        self._check()
        if self._by_number is not None:
            return self._by_number.readall()
        block, parts = current_block(), []
        while len(part := self._next(block, max(_CHUNK, self._identity[0] - self._at))):
            parts.append(part)
            self._at += len(part)
        if len(parts) == 1 and type(parts[0]) is bytes:
            return parts[0]
        return b"".join(parts)

    def _next(self, block: Block | None, most: int) -> bytes | memoryview:
        """Up to `most` bytes from the position on; none at the end of the file."""
        entry = self._recorded(block)
        if entry is not None:
            offset, there = entry.find(self._at)
            if there or self._at >= self._identity[0]:
                self._served = True
                there = min(there, most)
                part = entry.data
                if there != len(part):
                    part = memoryview(part)[offset : offset + there]
                if block is not None and block.recording:  # the file was opened in an earlier block
                    block.note(self._path, self._identity, self._at, bytes(part))
                return part
        return self._from_storage(block, most, self._at)

    def _recorded(self, block: Block | None) -> FileRecord | None:
        """What is recorded of this file: by the block, else by that in which it was opened."""
        entry = None if block is None else block.files.get(self._path)
        if block is None or entry is None or entry.identity != self._identity:
            return self._entry
        if entry is not self._entry:
            block.opened(self)
        return entry

    def _from_storage(self, block: Block | None, most: int, at: int) -> bytes:
        started = time.perf_counter()
        file = self._opened(block)
        data = _read_at(file, most, at)
        if block is None and not self._served:
            return data
        self._compare(block, file)
        if block is not None:
            block.storage_bytes += len(data)
            block.seconds += time.perf_counter() - started
            if block.recording:
                block.note(self._path, self._identity, at, data)
        return data

    def _opened(self, block: Block | None) -> io.FileIO:
        if self._file is None:
            self._file = io.FileIO(self._path, "r")
            self._compare(block, self._file)
        return self._file

    def _compare(self, block: Block | None, file: io.FileIO) -> None:
        """Raise `FileChanged` if the file is another one than that of which recorded bytes were given."""
        now = identity_of(os.fstat(file.fileno()))
        if now == self._identity:
            return
        served = self._served or (block is not None and self._path in block.files)
        self._identity, self._entry, self._served = now, None, False
        if block is not None and block.recording:
            block.leave_out(self._path)
        if served:
            if block is not None:
                block.stale = True
            raise FileChanged(errno.ESTALE, "The file has changed since a part of it was read", self._path)

    # -- position -----------------------------------------------------------------------------------------------------

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """As `io.FileIO.seek`."""
        self._check()
        if not -_END <= offset < _END:
            raise OverflowError("Python int too large to convert to C long")
        if whence not in (0, 1, 2):  # SEEK_DATA, SEEK_HOLE
            self.fileno()
        if self._by_number is not None:
            return self._by_number.seek(offset, whence)
        at = offset + (0, self._at, self._identity[0])[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def tell(self) -> int:
        """As `io.FileIO.tell`."""
        self._check()
        return self._at if self._by_number is None else self._by_number.tell()

    # -- the descriptor -----------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """The number of a descriptor with this content and position, for readers that Python does not see.

        The file counts as read as a whole. If all of it is recorded, the descriptor is of an anonymous file in memory.
        """
        self._check()
        if self._by_number is None:
            file = self._in_memory() or self._whole()
            file.seek(self._at)
            self._by_number = file
        return self._by_number.fileno()

    def _in_memory(self) -> io.FileIO | None:
        entry = self._recorded(current_block())
        if entry is None or not entry.whole or not hasattr(os, "memfd_create"):
            return None
        file = io.FileIO(os.memfd_create("stallfree-file"), "r")
        os.write(file.fileno(), entry.data)
        os.utime(file.fileno(), ns=(entry.identity[1], entry.identity[1]))
        return file

    def record_rest(self, block: Block) -> None:
        """Record all of a small file: it may be read when `block`, which ends now, is over."""
        size = self._identity[0]
        if self._by_number is None and size <= LEFT_OPEN and not block.has_read(self._path, self._identity):
            with contextlib.suppress(OSError):
                self._from_storage(block, size, 0)

    def _record_gaps(self) -> None:
        """Record all of a small file of which most was read."""
        block = current_block()
        if block is not None and block.recording and self._by_number is None:
            with contextlib.suppress(OSError):
                for start, stop in block.gaps(self._path, self._identity):
                    self._from_storage(block, stop - start, start)

    def _whole(self) -> io.FileIO:
        block = current_block()
        file = self._opened(block)
        if block is not None and block.recording:
            block.handed_bytes += self._identity[0]
            if self._identity[0] > MOST_BYTES:
                block.leave_out(self._path)
            elif not block.has_read(self._path, self._identity):
                self._from_storage(block, self._identity[0], 0)
        return file

    # -- the rest -----------------------------------------------------------------------------------------------------

    def readable(self) -> bool:
        """True."""
        self._check()
        return True

    def seekable(self) -> bool:
        """True."""
        self._check()
        return True

    def isatty(self) -> bool:
        """False."""
        self._check()
        return False

    def write(self, data: Any, /) -> NoReturn:
        """Raises `io.UnsupportedOperation`, as `io.FileIO` does that is open for reading."""
        self._check()
        raise io.UnsupportedOperation("File not open for writing")

    def truncate(self, size: int | None = None, /) -> NoReturn:
        """Raises `io.UnsupportedOperation`."""
        self.write(size)

    def keep(self) -> None:
        """Take a copy of what is served, whose memory may change from now on."""
        if self._entry is not None:
            entry = self._entry
            self._entry = FileRecord(entry.path, entry.identity, entry.ranges, bytes(entry.data), entry.status)

    def close(self) -> None:
        """Close what is open."""
        if not self.closed:
            self._record_gaps()
            self._entry = None
            for file in (self._file, self._by_number):
                if file is not None:
                    file.close()
        super().close()

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def __repr__(self) -> str:
        state = "[closed]" if self.closed else f"name={self.name!r} mode='rb' closefd=True"
        return f"<_io.FileIO {state}>"


class WholeFile(TrackedFile):
    """A small file that is served as a whole, from a copy. `io.BytesIO` does its reads and seeks, which costs less.

    It goes on as a `TrackedFile` when its block ends, or when the number of a descriptor is asked for.

    Args:
        name: of the file, as it was given.
        entry: what is served: all of the file.
    """

    def __init__(self, name: str | bytes, entry: FileRecord) -> None:
        super().__init__(name, entry.path, entry.identity, entry=entry)
        self._memory: io.BytesIO | None = io.BytesIO(bytes(entry.data))

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """As `io.FileIO.readinto`."""
        return super().readinto(buffer) if self._memory is None else self._memory.readinto(buffer)

    def readall(self) -> bytes:
        """As `io.FileIO.readall`."""
        return super().readall() if self._memory is None else self._memory.read()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """As `io.FileIO.seek`."""
        memory = self._memory
        if memory is not None and whence in (0, 1, 2):
            at = offset + (memory.tell() if whence == 1 else self._identity[0] if whence == 2 else 0)
            if 0 <= at < _END:
                return memory.seek(at)
        self._leave_memory()
        return super().seek(offset, whence)

    def tell(self) -> int:
        """As `io.FileIO.tell`."""
        return super().tell() if self._memory is None else self._memory.tell()

    def fileno(self) -> int:
        """As `TrackedFile.fileno`."""
        self._leave_memory()
        return super().fileno()

    def keep(self) -> None:
        """Go on as a `TrackedFile`: reads in later blocks are recorded."""
        self._leave_memory()
        super().keep()

    def close(self) -> None:
        """Close what is open."""
        self._memory = None
        super().close()

    def _leave_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._at = memory.tell()


def identity_of(status: os.stat_result) -> Identity:
    """The identity of the file with this `status`."""
    return status.st_size, status.st_mtime_ns


_STATUS = (
    "st_mode",
    "st_ino",
    "st_dev",
    "st_nlink",
    "st_uid",
    "st_gid",
    "st_atime_ns",
    "st_ctime_ns",
    "st_blksize",
    "st_blocks",
    "st_rdev",
)


def status_fields(status: os.stat_result) -> list[int]:
    """What `status` says beyond the identity of a file."""
    return [getattr(status, name, 0) for name in _STATUS]


def status_of(entry: FileRecord) -> os.stat_result:
    """The status of a file when it was opened."""
    *first, atime, ctime, blksize, blocks, rdev = json.loads(entry.status)
    size, mtime = entry.identity
    times = {"atime": atime, "mtime": mtime, "ctime": ctime}
    further: dict[str, Any] = {"st_blksize": blksize, "st_blocks": blocks, "st_rdev": rdev}
    for name, ns in times.items():
        further |= {f"st_{name}_ns": ns, f"st_{name}": ns // 10**9 + 1e-9 * (ns % 10**9)}
    return os.stat_result((*first, size, *(ns // 10**9 for ns in times.values())), further)


def _read_at(file: Any, most: int, at: int) -> bytes:
    """Up to `most` bytes at position `at`. Where that can be, processes that share the descriptor do not interfere."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), most, at)
    file.seek(at)
    data: bytes = file.read(most)
    return data
