"""Packages: files of many samples each, which are read with one sequential read.

One file is one package, in the byte order of the host (another byte order fails at the magic number):

    u64 magic, u64 checksum (xxh3-64 of all that follows)
    u32 version, u32 length of the fingerprint, u64 number of records, u64 bytes of the file
    the fingerprint of the data
    from the next multiple of 8: i64 id of each record, i64 length of each record
    from the next multiple of 64: the records as `pipeline.codec` writes them, each from a multiple of 64

A package is written under another name, and renamed when it is complete. It is never changed, only deleted; no name is
used twice. So processes and jobs share a folder without messages. Reads verify the checksum: a damaged package is
deleted and counted, and is never an error. Files with other names, of other users or of other data are ignored.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import re
import secrets
import stat
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stallfree.cache.memory.limits import free_space
from stallfree.errors import StorageError, cache_ids
from stallfree.pipeline.codec import encode, read_record, record_size, write_record
from stallfree.pipeline.structure import Structure
from stallfree.units import format_size

log = logging.getLogger("stallfree")

Array = npt.NDArray[Any]
Record = tuple[Structure, list[Array]]

MAGIC = 0x0A45_4741_4B43_4150
VERSION = 1

_HEAD = struct.Struct("=QQIIQQ")
_CHECKED = 16
"""The checksum covers all bytes from here on, after the magic number and the checksum."""

_ALIGN = 64
_DRAFT = re.compile(r"\.stallfree-[0-9a-f]{16}-[0-9a-f]{16}-[0-9a-f]{8}\.package\.new")
_DRAFT_SECONDS = 3600.0
"""Seconds after its last write when a draft counts as left by a killed writer."""

_UNCHANGED = 2_000_000_000
"""Age in nanoseconds from which an unchanged folder time is reliable: some file systems count in seconds."""


class Count(enum.IntEnum):
    """Indices into the counts of packages; the order of `PackageStats`."""

    WRITTEN = 0
    BYTES_WRITTEN = 1
    READ = 2
    BYTES_READ = 3
    DROPPED = 4
    PACKED = 5


@dataclass(frozen=True)
class PackageStats:
    """Statistics of package operations.

    Attributes:
        packages_written: files written.
        package_bytes_written: their bytes. A killed writer may have written less.
        packages_read: files read, each with one sequential read.
        package_bytes_read: their bytes.
        packages_dropped: damaged files that were deleted.
        samples_packed: samples in the written files.
    """

    packages_written: int
    package_bytes_written: int
    packages_read: int
    package_bytes_read: int
    packages_dropped: int
    samples_packed: int


class Packages:
    """One process's view of the packages in a folder. Not thread-safe.

    Packages are numbered per process, in the order of discovery.

    Args:
        folder: created if missing. Existing packages of the same data are used.
        fingerprint: of the data.
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        allow_pickle: whether samples that the codec does not support may be pickled and unpickled. Only packages
            private to this user (mode 0600, no link) are read.
        write_budget: maximum bytes to write.
        counts: int64 per `Count`, incremented by all operations, which also track the spent budget; new ones if None.

    Raises `StorageError` if the folder cannot be created or listed.
    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: str,
        num_ids: int,
        *,
        allow_pickle: bool,
        write_budget: int,
        counts: Array | None = None,
    ) -> None:
        self._folder = prepare_folder(folder)
        self._fingerprint = fingerprint.encode()
        self._allow_pickle, self._budget = allow_pickle, write_budget
        self.counts = np.zeros(len(Count), np.int64) if counts is None else counts
        digest = xxhash.xxh3_64_hexdigest(self._fingerprint, VERSION)
        self._stem = f"stallfree-{digest}-"
        self._name = re.compile(rf"{self._stem}[0-9a-f]{{16}}-[0-9a-f]{{8}}\.package")
        self._names: list[str | None] = []  # by number; None once deleted
        self._sizes, self._bytes = array("q"), array("q")
        self._numbers: dict[str, int] = {}
        self._strange: set[str] = set()  # files with package names that are not ours
        self._newest = np.full(num_ids, -1, np.int32)
        self._memory = np.empty(0, np.uint8)
        self._warned = False
        self._stamp = -1
        _sweep(self._folder)
        self.refresh()

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> Array:
        """The number of samples of each package, 0 for a deleted one."""
        return np.array(self._sizes, np.int64)

    def holding(self, ids: Any) -> Array:
        """The number of the newest package that holds each of `ids` (integers), -1 if there is none.

        It is also -1 if that package was deleted, even if an older one holds the sample.
        """
        return self._newest[ids]  # type: ignore[no-any-return]

    def stats(self) -> PackageStats:
        """The counts."""
        return package_stats(self.counts)

    def refresh(self) -> None:
        """Update the view with packages that other processes have written or deleted."""
        try:
            stamp = os.stat(self._folder).st_mtime_ns
            if stamp == self._stamp:
                return
            now = time.time_ns()
            names = {name for name in os.listdir(self._folder) if self._name.fullmatch(name)}
        except OSError:  # another process has removed it
            names, now, stamp = set(), 0, 0
        for name in self._numbers.keys() - names:
            self._forget(name)
        self._strange &= names
        for name in sorted(names - self._numbers.keys() - self._strange):  # in the order of writing
            self._look(name)
        self._stamp = stamp if now - stamp > _UNCHANGED else -1

    def _look(self, name: str) -> None:
        """Register the package `name`, if it is one."""
        with _opened(self._folder / name) as opened:
            if opened is None:
                self._strange.add(name)
                return
            try:
                ids, intact = self._ids_in(*opened)
            except OSError:
                ids, intact = None, False
        if ids is not None:
            self._enter(name, ids, opened[1])
        elif intact:  # of other data, under one of our names
            self._strange.add(name)
        else:
            self._delete(name)

    def _enter(self, name: str, ids: Array, size: int) -> None:
        self._newest[ids] = self._numbers[name] = len(self._names)
        self._names.append(name)
        self._sizes.append(len(ids))
        self._bytes.append(size)

    def _forget(self, name: str) -> None:
        number = self._numbers.pop(name, -1)
        if number >= 0:
            self._newest[self._newest == number] = -1
            self._names[number] = None
            self._sizes[number] = 0

    def _delete(self, name: str) -> None:
        """Delete a damaged package; the process that deletes it counts it."""
        with contextlib.suppress(OSError):
            os.unlink(self._folder / name)
            self.counts[Count.DROPPED] += 1
        self._forget(name)

    # -- writing ------------------------------------------------------------------------------------------------------

    @property
    def left(self) -> int:
        """The remaining write budget in bytes."""
        return self._budget - int(self.counts[Count.BYTES_WRITTEN])

    def has_room(self, size: int) -> bool:
        """Whether budget and file system have space for `size` bytes. The first failure is logged."""
        if size > self.left:
            return self._refuse(f"the write budget of {format_size(self._budget)} is spent")
        try:
            free = free_space(self._folder)
        except OSError as error:
            return self._refuse(str(error))
        return size <= free or self._refuse(f"its file system has only {format_size(free)} free")

    def size(self, lengths: Array) -> int:
        """Bytes of a package of records of these `lengths` in bytes."""
        return _layout(len(self._fingerprint), lengths)[2]

    def add(self, ids: Any, values: Sequence[Any]) -> bool:
        """Write `values` as the samples of `ids` into one package.

        Returns False, with one logged warning, if the write budget or the disk is exhausted. Raises `CodecError` for a
        value that needs pickle where it is not allowed, and `InputError` for ids outside the data set.
        """
        return self.add_records(ids, [encode(value, allow_pickle=self._allow_pickle) for value in values])

    def add_records(self, ids: Any, records: Sequence[Record]) -> bool:
        """As `add`, for values encoded by `pipeline.codec.encode`."""
        wanted = np.asarray(ids, np.int64)
        if wanted.shape != (len(records),) or len(records) == 0:
            raise cache_ids(f"a package was given {wanted.size} ids and {len(records)} values: give one for each")
        if wanted.min() < 0 or wanted.max() >= len(self._newest):
            raise cache_ids(f"ids of a package are 0 to {len(self._newest) - 1}, not {wanted.min()} to {wanted.max()}")
        lengths = np.array([record_size(structure, arrays) for structure, arrays in records], np.int64)
        at, starts, size = _layout(len(self._fingerprint), lengths)
        if not self.has_room(size):
            return False
        memory = self._scratch(size)
        memory[:] = 0
        memory[at : at + 16 * len(wanted)] = np.concatenate((wanted, lengths)).view(np.uint8)
        for start, length, (structure, arrays) in zip(starts.tolist(), lengths.tolist(), records, strict=True):
            write_record(structure, arrays, memory[start : start + length])
        _finish_head(memory, self._fingerprint, len(wanted))
        self.counts[Count.BYTES_WRITTEN] += size  # before the file: a killed writer has not written more
        try:
            name = self._write(memory)
        except OSError as error:
            self.counts[Count.BYTES_WRITTEN] -= size
            return self._refuse(f"it cannot be written: {error}")
        self.counts[Count.WRITTEN] += 1
        self.counts[Count.PACKED] += len(wanted)
        self._enter(name, wanted, size)
        return True

    def _refuse(self, why: str) -> bool:
        if not self._warned:
            self._warned = True
            log.warning("no package is added to %s: %s. Other samples are read one by one", self._folder, why)
        return False

    def _write(self, data: Array) -> str:
        """Write a file, rename it when it is complete, and return its name."""
        name = f"{self._stem}{time.time_ns():016x}-{secrets.token_hex(4)}.package"
        draft = self._folder / f".{name}.new"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb", buffering=0) as file:
                rest = memoryview(data)  # type: ignore[arg-type]
                while len(rest):
                    rest = rest[file.write(rest) :]
            os.rename(draft, self._folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        return name

    def _scratch(self, size: int) -> Array:
        """`size` bytes of reusable memory."""
        if len(self._memory) < size:
            self._memory = np.empty(size + size // 4, np.uint8)
        return self._memory[:size]

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, number: int, wanted: Callable[[Array], Array] | None = None) -> tuple[Array, list[Any]] | None:
        """The ids and the samples of package `number`, in newly allocated memory.

        None if it was deleted, or is damaged: it is then deleted. Samples that cannot be loaded here are left out.

        Args:
            number: as returned by `holding`.
            wanted: maps the ids to an array of bool, which selects the samples to decode; all if None.
        """
        name = self._names[number]
        if name is None:
            return None
        with _opened(self._folder / name) as opened:
            if opened is None:
                self._forget(name)
                return None
            fd, size = opened
            try:
                whole = size == self._bytes[number] and self._load(fd, size)
            except OSError:
                whole = False
        if not whole:
            self._delete(name)
            return None
        found = self._content(size)
        if found is None:  # it now holds other data
            self._forget(name)
            return None
        self.counts[Count.READ] += 1
        self.counts[Count.BYTES_READ] += size
        ids, starts, lengths = found
        chosen = np.arange(len(ids)) if wanted is None else np.flatnonzero(wanted(ids))
        return self._make(number, ids[chosen], starts[chosen], lengths[chosen])

    def _make(self, number: int, ids: Array, starts: Array, lengths: Array) -> tuple[Array, list[Any]]:
        """Decode the records in the scratch memory."""
        made, values = [], []
        for id, start, length in zip(ids.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            try:
                record = self._memory[start : start + length]
                values.append(read_record(record, copy=True, allow_pickle=self._allow_pickle))
                made.append(id)
            except Exception:  # an intact record: a pickle that is not allowed, or of a missing class
                if self._newest[id] == number:
                    self._newest[id] = -1
        return np.array(made, np.int64), values

    def _ids_in(self, fd: int, size: int) -> tuple[Array | None, bool]:
        """The unverified ids in a package header, or None; and whether it may be a complete package."""
        head = os.pread(fd, _HEAD.size + len(self._fingerprint), 0)
        if len(head) < _HEAD.size or _HEAD.unpack_from(head)[5] != size:
            return None, False
        records = self._records_in(head, size)
        if records:
            data = os.pread(fd, 8 * records, _round(len(head), 8))
            ids = np.frombuffer(data, np.int64, len(data) // 8)
            if len(ids) == records and self._known(ids):
                return ids, True
        return None, self._load(fd, size)

    def _records_in(self, head: bytes, size: int) -> int:
        """The number of records of a file of `size` bytes with this header; 0 if it is not a package of this data."""
        if len(head) < _HEAD.size:
            return 0
        magic, _, version, named, records, total = _HEAD.unpack_from(head)
        good = (magic, version, total, head[_HEAD.size :]) == (MAGIC, VERSION, size, self._fingerprint)
        return records if good and named == len(self._fingerprint) and 16 * records <= size - len(head) else 0

    def _known(self, ids: Array) -> bool:
        return bool(ids.min() >= 0 and ids.max() < len(self._newest))

    def _load(self, fd: int, size: int) -> bool:
        """Read a package into the scratch memory; return whether it is complete."""
        memory = self._scratch(size)
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, size, os.POSIX_FADV_SEQUENTIAL)
        got = 0
        while got < size and (more := os.readv(fd, [memory[got:].data])):
            got += more
        if got < size or size < _HEAD.size:
            return False
        magic, check, _, _, _, total = _HEAD.unpack_from(memory.data)
        return (magic, total, check) == (MAGIC, size, xxhash.xxh3_64_intdigest(memory[_CHECKED:].data))

    def _content(self, size: int) -> tuple[Array, Array, Array] | None:
        """Ids, starts and lengths of the package in the scratch memory; None if it is of other data."""
        named = len(self._fingerprint)
        records = self._records_in(self._memory[: _HEAD.size + named].tobytes(), size)
        at = _round(_HEAD.size + named, 8)
        if not records:
            return None
        ids, lengths = self._memory[at : at + 16 * records].view(np.int64).reshape(2, records).copy()
        return (ids, _layout(named, lengths)[1], lengths) if self._known(ids) else None


def package_stats(counts: Array) -> PackageStats:
    """The statistics of `counts`, one number per `Count`, or of the sum of several rows."""
    return PackageStats(*counts.reshape(-1, len(Count)).sum(0).tolist())


def prepare_folder(folder: str | Path) -> Path:
    """Create the folder for packages with mode 0700 if missing. Raises `StorageError` if it is not usable."""
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.listdir(path)
    except OSError as error:
        raise StorageError(f"the folder {path} for packages cannot be used: {error}. Give another folder") from error
    return path


def _finish_head(memory: Array, fingerprint: bytes, records: int) -> None:
    """Write the header of a package after its other bytes."""
    named = len(fingerprint)
    memory[_HEAD.size : _HEAD.size + named] = np.frombuffer(fingerprint, np.uint8)
    check = 0
    for _ in range(2):  # the second time with the checksum of the first header
        _HEAD.pack_into(memory.data, 0, MAGIC, check, VERSION, named, records, len(memory))
        check = xxhash.xxh3_64_intdigest(memory[_CHECKED:].data)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[int, int] | None]:
    """Descriptor and size of a package; None if it was deleted or is not private to this user."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        found = os.fstat(fd)
        private = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        yield (fd, found.st_size) if private else None
    finally:
        os.close(fd)


def _round(size: int, align: int) -> int:
    return -(-size // align) * align


def _layout(named: int, lengths: Array) -> tuple[int, Array, int]:
    """The offsets of the ids and of each record, and the file size, for a fingerprint of `named` bytes."""
    at = _round(_HEAD.size + named, 8)
    ends = np.cumsum(-(-lengths // _ALIGN) * _ALIGN)
    starts = _round(at + 16 * len(lengths), _ALIGN) + np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    return at, starts, int(starts[-1] + lengths[-1])


def _sweep(folder: Path) -> None:
    """Delete this user's old drafts of killed writers."""
    with contextlib.suppress(OSError):
        for name in filter(_DRAFT.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):
                found = os.lstat(folder / name)
                old = time.time() - found.st_mtime > _DRAFT_SECONDS
                if old and stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
                    os.unlink(folder / name)
