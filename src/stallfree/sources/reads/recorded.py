"""What a sample reads from files: its record, and the block in which its reads are recorded or served.

The record of a sample is one array of bytes, so that a cache can lend it without a copy:

    u64 length of the head, little-endian
    the head, for each file: i64 size, i64 time of modification in ns, u32 number of places, u32 length of the path,
    u32 length of the status, the places as i64 (start, stop, start, stop, ...), the path as the file system has it, the
    status as JSON
    from the next multiple of 64, the bytes of these ranges, one file after the other
    zeros

The ranges of a file ascend and do not touch. Its status has the further fields of `os.stat_result`. The zeros are there
so that records have few different lengths.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import time
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

MOST_BYTES = 64 << 20
"""Bytes of one record. Files that do not fit are left out of it, and are read from storage each time."""

MOST_RANGES = 4096
"""Ranges of one file in a record. A file with more is left out."""

SMALL = 64 << 10
"""Ranges of up to as many bytes are recorded for all samples that read them."""

LEFT_OPEN = 4 << 20
"""A file of up to as many bytes that is still open after the sample was made is recorded as a whole."""

MOST_OF = 0.75
"""Share of such a file that has to be read for the rest to be recorded as well: some formats have gaps."""

MANY = 8
"""A larger range that more samples than this have read, such as an index, is left out of the records of others."""

TICK = 10_000_000
"""Longest time in ns between two ticks of the clock by which files are dated."""

_HEAD = struct.Struct("<qqIII")
_TWO = struct.Struct("<2q")

_REMEMBERED = 4096
"""Ranges for which the ids that read them are remembered."""

Identity = tuple[int, int]
"""Size of a file, and its time of modification in ns. A file with another identity has another content."""

Record = npt.NDArray[np.uint8]


class FileChanged(OSError):
    """A file is not what it was when a part of it was recorded. The sample has to be made again without its record."""


class FileRecord:
    """What was read of one file.

    Attributes:
        path: absolute, not normalized.
        identity: of the file when it was read.
        ranges: flat list of the starts and stops of the parts that were read.
        data: these parts, one after the other.
        status: what `fstat` gave when it was opened, as JSON of `status_fields`; empty if that is not known.
        whole: whether that is all of the file.
    """

    __slots__ = ("_offsets", "data", "identity", "path", "ranges", "status", "whole")

    def __init__(
        self, path: str, identity: Identity, ranges: list[int], data: bytes | memoryview, status: bytes = b""
    ) -> None:
        self.path, self.identity, self.ranges, self.data, self.status = path, identity, ranges, data, status
        self.whole = ranges == [0, identity[0]] or identity[0] == 0
        self._offsets = [0]
        for at in range(0, len(ranges), 2):
            self._offsets.append(self._offsets[-1] + ranges[at + 1] - ranges[at])
        if len(ranges) % 2 or self._offsets[-1] != len(data):
            raise ValueError(f"malformed record of the file {path}")

    def find(self, at: int) -> tuple[int, int]:
        """Where position `at` of the file lies in `data`, and how many bytes are there from it on; (0, 0) if none."""
        place = bisect_right(self.ranges, at)
        if place % 2 == 0:
            return 0, 0
        return self._offsets[place // 2] + at - self.ranges[place - 1], self.ranges[place] - at


class _Reads:
    """What has been read of one file so far. `chunks` is None if the file is left out."""

    __slots__ = ("chunks", "identity", "size", "status")

    def __init__(self, identity: Identity, status: Sequence[int] = ()) -> None:
        self.identity, self.status = identity, status
        self.chunks: list[tuple[int, bytes]] | None = []
        self.size = 0


class OpenFile(Protocol):
    """A file that was opened in a block: see `TrackedFile`."""

    @property
    def closed(self) -> bool:
        """Whether it is closed."""

    def keep(self) -> None:
        """Take a copy of what is served, whose memory may change from now on."""

    def record_rest(self, block: Block) -> None:
        """Record all of a small file: it may be read when `block`, which ends now, is over."""

    def close(self) -> None:
        """Close what is open."""


class Block:
    """One run of `dataset[id]`, in which reads of files are recorded, or served from a record.

    Args:
        record: what is served; None to record.
        lent: whether its memory may change after this block.

    Raises `ValueError` or `TypeError` for a malformed record.

    Attributes:
        files: what is served, by path.
        recording: whether reads are recorded.
        stale: whether a file has changed since it was recorded: the outcome of this run does not count.
        storage_bytes: bytes that were read from storage.
        began: when it began, in ns since 1970.
        doubtful: whether a file may have been written in this block: it is left out, and recorded in another run.
        handed_bytes: bytes of files whose descriptors were given out, which may be read once more.
        seconds: spent on reading these.
    """

    def __init__(self, record: Record | None = None, *, lent: bool = False) -> None:
        self.recording = record is None
        self.files: dict[str, FileRecord] = {} if record is None else _unpack(record)
        self.stale = self.doubtful = False
        self.began = time.time_ns()
        self.storage_bytes, self.seconds = 0, 0.0
        self.handed_bytes = 0
        self._reads: dict[str, _Reads] = {}
        self._size = 0
        self._lent = lent
        self._opened: list[weakref.ref[OpenFile]] = []

    def opened(self, file: OpenFile) -> None:
        """A file is recorded or served."""
        self._opened.append(weakref.ref(file))

    def end(self) -> None:
        """The run is over. Files that are still open go on with a copy of what is served, or are recorded as a whole.

        A sample may hold such a file, as a picture does that is not decoded yet.
        """
        for file in self.open_files():
            if self.recording:
                file.record_rest(self)
            else:
                file.keep()
        if self._lent:
            self.files = {}

    def open_files(self) -> list[OpenFile]:
        """The files of this block that are open."""
        files = [ref() for ref in self._opened]
        return [file for file in files if file is not None and not file.closed]

    def close_files(self) -> None:
        """Close what is still open: what was lent has changed meanwhile."""
        for file in self.open_files():
            file.close()

    def begin(self, path: str, identity: Identity, status: Sequence[int] = ()) -> None:
        """A file was opened."""
        reads = self._reads.setdefault(path, _Reads(identity, status))
        if reads.identity != identity:
            self.leave_out(path)

    def wrote(self, path: str, changed: int) -> bool:
        """Whether a file that was last `changed` (ns) may have been written in this block. It is left out then.

        Not all that writes is seen: a library may, or another process. The clock of file systems has ticks.
        """
        if changed < self.began - TICK:
            return False
        self.doubtful |= changed <= self.began
        self.leave_out(path)
        return True

    def wait(self) -> None:
        """If a file was written just before this block, or in it: wait until the next one can tell these apart."""
        if self.doubtful:
            time.sleep(2e-9 * TICK)

    def note(self, path: str, identity: Identity, at: int, data: bytes) -> None:
        """`data` was read at position `at` of a file."""
        reads = self._reads.get(path)
        if reads is None:
            reads = self._reads.setdefault(path, _Reads(identity))
        chunks, stop = reads.chunks, at + len(data)
        if chunks is None or not data:
            return
        if reads.identity != identity or stop > identity[0] or self._size + len(data) > MOST_BYTES:
            self.leave_out(path)
        elif not _covers(chunks, at, stop):
            chunks.append((at, data))
            reads.size += len(data)
            self._size += len(data)

    def has_read(self, path: str, identity: Identity) -> bool:
        """Whether all of a file is recorded."""
        reads = self._reads.get(path)
        return reads is not None and reads.identity == identity and _covers(reads.chunks or [], 0, identity[0])

    def gaps(self, path: str, identity: Identity) -> list[tuple[int, int]]:
        """The ranges that were not read of a small file, if most of it was: as a whole it is served faster."""
        reads, size = self._reads.get(path), identity[0]
        if reads is None or not reads.chunks or reads.identity != identity or size > LEFT_OPEN:
            return []
        if reads.size < MOST_OF * size or _covers(reads.chunks, 0, size):
            return []
        stops = [0]
        for piece in _merged(reads.chunks):
            stops += [piece.start, piece.stop]
        stops.append(size)
        return [(start, stop) for start, stop in zip(stops[::2], stops[1::2], strict=True) if start < stop]

    def leave_out(self, path: str) -> None:
        """Do not record a file."""
        reads = self._reads.setdefault(path, _Reads((0, 0)))
        self._size -= reads.size
        reads.chunks, reads.size = None, 0

    def record(self, id: int, shared: SharedRanges) -> Record:
        """The record of sample `id`; `shared` says what is left out of it."""
        heads: list[bytes] = []
        parts: list[bytes] = []
        for path, reads in list(self._reads.items()):
            if reads.chunks is None:
                continue
            pieces = _merged(reads.chunks)
            kept = [piece for piece in pieces if not shared.leaves_out(path, piece.start, piece.stop, id)]
            if len(kept) <= MOST_RANGES and (kept or not pieces):
                ranges = [place for piece in kept for place in (piece.start, piece.stop)]
                heads.append(_packed_head(path, reads, ranges))
                parts += [part for piece in kept for part in piece.parts]
        return _pack(heads, parts)


def _covers(chunks: Sequence[tuple[int, bytes]], start: int, stop: int) -> bool:
    """Whether the first of `chunks` contains the range: most files are read at once, and some once more."""
    return len(chunks) > 0 and chunks[0][0] <= start and stop <= chunks[0][0] + len(chunks[0][1])


@dataclass
class _Piece:
    """A range that was read, in parts."""

    start: int
    stop: int
    parts: list[bytes]


def _merged(chunks: Sequence[tuple[int, bytes]]) -> list[_Piece]:
    """What `chunks` cover, in ranges that ascend and do not touch."""
    pieces: list[_Piece] = []
    for start, data in sorted(chunks, key=lambda chunk: chunk[0]):
        stop = start + len(data)
        if not pieces or start > pieces[-1].stop:
            pieces.append(_Piece(start, stop, [data]))
        elif stop > pieces[-1].stop:
            pieces[-1].parts.append(data[pieces[-1].stop - start :])
            pieces[-1].stop = stop
    return pieces


def _pack(heads: list[bytes], parts: list[bytes]) -> Record:
    head = b"".join(heads)
    start = _first(len(head))
    size = start + sum(map(len, parts))
    step = max(64, 1 << size.bit_length() - 6)  # 32 lengths for each doubling
    out = np.zeros(-(-size // step) * step, np.uint8)
    view = out.data
    view[:8] = len(head).to_bytes(8, "little")
    view[8 : 8 + len(head)] = head
    for part in parts:
        view[start : start + len(part)] = part
        start += len(part)
    return out


def _packed_head(path: str, reads: _Reads, ranges: list[int]) -> bytes:
    name, status = os.fsencode(path), json.dumps(reads.status).encode() if reads.status else b""
    head = _HEAD.pack(*reads.identity, len(ranges), len(name), len(status))
    return b"".join([head, struct.pack(f"<{len(ranges)}q", *ranges), name, status])


def _first(head: int) -> int:
    """Where the data begin after a head of this length."""
    return 8 + head + 63 & ~63


def _unpack(record: Record) -> dict[str, FileRecord]:
    """The files of a record, by path. Raises `ValueError` or `TypeError` for a malformed one."""
    given: Any = record
    view = memoryview(given)
    if view.format != "B" or view.ndim != 1:
        raise TypeError("malformed record")
    length = int.from_bytes(view[:8], "little")
    at, end, start = 8, 8 + length, _first(length)
    if end > len(view):
        raise ValueError("malformed record")
    found = {}
    while at < end:
        size, mtime, count, name, further = _unpacked(_HEAD, view, at, end)
        at += _HEAD.size
        ranges = list(_unpacked(_TWO if count == 2 else struct.Struct(f"<{count}q"), view, at, end))
        at += 8 * count
        path = os.fsdecode(bytes(view[at : at + name]))
        at += name
        status = bytes(view[at : at + further])
        at += further
        stop = start + sum(ranges[1::2]) - sum(ranges[::2])
        found[path] = FileRecord(path, (size, mtime), ranges, view[start:stop], status)
        start = stop
    return found


def _unpacked(form: struct.Struct, view: memoryview, at: int, end: int) -> tuple[int, ...]:
    if at + form.size > end:
        raise ValueError("malformed record")
    return form.unpack_from(view, at)


def files_of(record: Record) -> list[str]:
    """The paths of the files in a record."""
    return list(_unpack(record))


def parts_of(record: Record) -> list[tuple[str, int, int]]:
    """The ranges in a record: path, start and stop."""
    return [
        (file.path, *file.ranges[at : at + 2])  # type: ignore[misc]
        for file in _unpack(record).values()
        for at in range(0, len(file.ranges), 2)
    ]


class SharedRanges:
    """Which ranges of files so many samples have read that they are not stored again with each of them."""

    def __init__(self) -> None:
        self._ids: OrderedDict[tuple[str, int, int], set[int]] = OrderedDict()

    def leaves_out(self, path: str, start: int, stop: int, id: int) -> bool:
        """Whether to leave a range out of the record of sample `id`, which has read it."""
        if stop - start <= SMALL:
            return False
        key = path, start, stop
        ids = self._ids.pop(key, None) or set()
        if len(ids) <= MANY:
            ids.add(id)
        self._ids[key] = ids
        if len(self._ids) > _REMEMBERED:
            self._ids.popitem(last=False)
        return len(ids) > MANY


class Scope:
    """What is recorded and served at the moment. See `Tracker`.

    Attributes:
        block: the block of now, or None.
        shared: what is left out of records.
        written: paths that were opened for writing in a block: they are neither recorded nor served.
    """

    def __init__(self) -> None:
        self.block: Block | None = None
        self.shared = SharedRanges()
        self.written: set[str] = set()

    def note_written(self, block: Block, path: str) -> None:
        """A file is opened for writing."""
        self.written.add(path)
        if block.recording:
            block.leave_out(path)


class _Thread(threading.local):
    """The scope that a thread runs in, if any."""

    tracker: Scope | None = None


THREAD = _Thread()


def current_block() -> Block | None:
    """The block that this thread runs in, or that has started it."""
    tracker = THREAD.tracker
    return None if tracker is None else tracker.block


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Files that this thread opens are neither recorded nor served."""
    tracker, THREAD.tracker = THREAD.tracker, None
    try:
        yield
    finally:
        THREAD.tracker = tracker
