"""Packages of L-samples, and the process that packs them and reads them into the cache.

A package is a contiguous part of a file: the records of many samples as `pipeline.codec` writes them, each from a
multiple of 64 bytes. One sequential read brings all of them. The file belongs to one process and has no name, so the
kernel frees its space when that process ends. The index is in the memory of the process, with a checksum per package: a
damaged package is forgotten and counted, and is never an error.
"""

import enum
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from stallfree.cache.capacity import free_space
from stallfree.datasets.reader import IO_THREADS, Reader
from stallfree.datasets.samples import Pending
from stallfree.errors import StallfreeError
from stallfree.importance.epoch import FRESH
from stallfree.ipc.process import Parent
from stallfree.ipc.shared_array import SharedCounts
from stallfree.pipeline.codec import Structure, encode, read_record, record_size, write_record
from stallfree.raising import log
from stallfree.units import format_size

Array = np.ndarray[Any, np.dtype[Any]]
Record = tuple[Structure, list[Array]]

LOW, PENDING, MISSED = 1, 2, 4
"""Flags of a sample: an L-sample; in this epoch's plan, and not served yet; requested, not resident, and deferred."""

_WANTED = LOW | PENDING

_ALIGN = 64

_WORTH = 4
"""A package is read if at least one in this many of its samples is useful."""

_CHUNK = 64
"""Maximum number of samples per fetch."""

_SHARE = 10
"""Searching for work may take one in this many seconds."""

_LOOK_SECONDS = 0.01


class Field(enum.IntEnum):
    """Indices into `SharedFlags.fields`."""

    EPOCH = 0  # of the flags, -1 before the first
    REGION = 1  # maximum of pending L-samples that packages may make resident
    STEP = 2  # changes when the flags have changed
    # Counts, named as in `ImportanceStats`.
    PACKAGES_WRITTEN = 3
    PACKAGE_BYTES_WRITTEN = 4
    PACKAGES_READ = 5
    PACKAGE_BYTES_READ = 6
    PACKAGES_DROPPED = 7
    SAMPLES_PACKED = 8


class SharedFlags:
    """Arrays in shared memory. A process that receives this object at its start shares them.

    There are no locks: every entry has one writer, and is written atomically. The training process writes the flags and
    the first three fields, the packaging process the counts. After serving a sample the training process first clears
    `PENDING` and then lowers the sample's score in the cache, so that the other process can detect that it was late.

    Args:
        num_ids: number of samples.

    Attributes:
        flags: uint8 per id, sums of `LOW`, `PENDING` and `MISSED`.
        fields: int64 per `Field`.

    Raises `StorageError` if there is no shared memory left.
    """

    flags: Array
    fields: Array

    def __init__(self, num_ids: int) -> None:
        self.__setstate__((num_ids, SharedCounts(2 * len(Field) + -(-num_ids // 4))))
        self.fields[Field.EPOCH] = -1

    def stats(self) -> dict[str, int]:
        """The counts, by the names of `ImportanceStats`."""
        return {field.name.lower(): int(self.fields[field]) for field in list(Field)[Field.PACKAGES_WRITTEN :]}

    def close(self) -> None:
        """Release the memory; the fields keep their values. Idempotent."""
        self.fields, self.flags = self.fields.copy(), self.flags[:0].copy()
        self._state[1].close()

    def __getstate__(self) -> tuple[int, SharedCounts]:
        return self._state

    def __setstate__(self, state: tuple[int, SharedCounts]) -> None:
        self._state = num_ids, memory = state
        self.fields = memory.array[: 2 * len(Field)].view(np.int64)
        self.flags = memory.array[2 * len(Field) :].view(np.uint8)[:num_ids]


@dataclass(frozen=True)
class _Package:
    """The ids of a package; the start and length of each record; its place, size and checksum."""

    ids: Array
    starts: Array
    lengths: Array
    offset: int
    size: int
    check: int


class Packages:
    """The packages of one process, numbered in the order of writing. Not thread-safe.

    Args:
        folder: where the unnamed file is created.
        shared: its counts are incremented by all operations, and track the spent budget.
        allow_pickle: whether samples that the codec does not support may be pickled and unpickled.
        write_budget: maximum bytes to write, over all processes that had `shared` one after the other.

    Raises `OSError` if the file cannot be created.
    """

    def __init__(self, folder: Path, shared: SharedFlags, *, allow_pickle: bool, write_budget: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._folder, self._fields = folder, shared.fields
        self._allow_pickle, self._budget = allow_pickle, write_budget
        self._packages: list[_Package] = []
        self._end = 0  # of the last package in the file
        self._newest = np.full(len(shared.flags), -1, np.int32)
        self._memory = np.empty(0, np.uint8)
        self._warned = False

    @property
    def sizes(self) -> Array:
        """The number of samples of each package."""
        return np.array([len(package.ids) for package in self._packages], np.int64)

    def holding(self, ids: Any) -> Array:
        """The number of the newest package that holds each of `ids`; -1 if there is none, or it was damaged."""
        return self._newest[ids]  # type: ignore[no-any-return]

    def has_room(self, size: int) -> bool:
        """Whether budget and file system have space for `size` bytes. The first failure is logged."""
        if size > self._budget - int(self._fields[Field.PACKAGE_BYTES_WRITTEN]):
            return self._refuse(f"the write budget of {format_size(self._budget)} is spent")
        try:
            free = free_space(self._folder)
        except OSError as error:
            return self._refuse(str(error))
        return size <= free or self._refuse(f"its file system has only {format_size(free)} free")

    def add(self, ids: Sequence[int], records: Sequence[Record]) -> bool:
        """Write `records`, made by `pipeline.codec.encode`, as the samples of `ids` into one package.

        Returns False, with one logged warning, if the write budget or the disk is exhausted.
        """
        lengths = np.array([record_size(*record) for record in records], np.int64)
        starts, size = _layout(lengths)
        if not self.has_room(size):
            return False
        memory = self._scratch(size)
        memory[:] = 0
        for start, length, record in zip(starts.tolist(), lengths.tolist(), records, strict=True):
            write_record(*record, memory[start : start + length])
        offset = self._end
        self._fields[Field.PACKAGE_BYTES_WRITTEN] += size  # before the write: a killed process has not written more
        try:
            _move(os.pwritev, self._file.fileno(), memory, offset)
        except OSError as error:
            self._fields[Field.PACKAGE_BYTES_WRITTEN] -= size
            return self._refuse(f"it cannot be written: {error}")
        self._end += size
        self._fields[Field.PACKAGES_WRITTEN] += 1
        self._fields[Field.SAMPLES_PACKED] += len(ids)
        self._newest[ids] = len(self._packages)
        check = xxhash.xxh3_64_intdigest(memory.data)
        self._packages.append(_Package(np.array(ids, np.int64), starts, lengths, offset, size, check))
        return True

    def read(self, number: int, wanted: Callable[[Array], Array]) -> tuple[Array, list[Any]]:
        """The ids and the samples of package `number` that are `wanted`, in newly allocated memory.

        Empty if the package is damaged. `wanted` maps ids to an array of bool.
        """
        package = self._packages[number]
        memory = self._scratch(package.size)
        with suppress(Exception):  # a bad sector, or a pickle that cannot be loaded
            whole = _move(os.preadv, self._file.fileno(), memory, package.offset)
            if whole and xxhash.xxh3_64_intdigest(memory.data) == package.check:
                chosen = np.flatnonzero(wanted(package.ids))
                spans = zip(package.starts[chosen].tolist(), package.lengths[chosen].tolist(), strict=True)
                records = [memory[start : start + length] for start, length in spans]
                values = [read_record(record, copy=True, allow_pickle=self._allow_pickle) for record in records]
                self._fields[Field.PACKAGES_READ] += 1
                self._fields[Field.PACKAGE_BYTES_READ] += package.size
                return package.ids[chosen], values
        self._newest[self._newest == number] = -1
        self._fields[Field.PACKAGES_DROPPED] += 1
        return package.ids[:0], []

    def _refuse(self, why: str) -> bool:
        if not self._warned:
            self._warned = True
            log.warning("no package is added in %s: %s. Other samples are read one by one", self._folder, why)
        return False

    def _scratch(self, size: int) -> Array:
        """`size` bytes of reusable memory."""
        if len(self._memory) < size:
            self._memory = np.empty(size + size // 4, np.uint8)
        return self._memory[:size]

    def close(self) -> None:
        """Close the file, which frees its space."""
        self._file.close()


def _layout(lengths: Array) -> tuple[Array, int]:
    """The start of each record in a package, and the size of the package."""
    ends = np.cumsum(-(-lengths // _ALIGN) * _ALIGN)
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    return starts, int(starts[-1] + lengths[-1])


def _move(call: Callable[..., int], fd: int, memory: Array, offset: int) -> bool:
    """Repeat `os.preadv` or `os.pwritev`, which move 2 GiB at most; return whether all of `memory` was moved."""
    done = 0
    while done < len(memory) and (more := call(fd, [memory[done:].data], offset + done)):
        done += more
    return done == len(memory)


class PackageWork:
    """Packs L-samples that are neither resident nor in a package, and reads packages into the cache.

    Missed samples are packed first, then other pending ones, in random order, because the samples of a package are
    served together and data sets are often sorted by class. Packages are read while fewer pending L-samples are
    resident than the L-region holds.

    Args:
        reader: reads samples, and has the cache.
        shared: flags of the requested samples, and counts.
        folder: of the packages.
        write_budget: maximum bytes to write.
        package_bytes: minimum bytes of records in a package.
    """

    def __init__(
        self, reader: Reader, shared: SharedFlags, folder: Path, write_budget: int, package_bytes: int
    ) -> None:
        assert reader.cache is not None
        self._reader, self._cache = reader, reader.cache
        self._fields, self._flags = shared.fields, shared.flags
        self._package_bytes = package_bytes
        self.packages = Packages(folder, shared, allow_pickle=reader.cache.allow_pickle, write_budget=write_budget)
        self._random = np.random.default_rng()
        self._taken = np.zeros(len(self._flags), np.bool_)  # for the next package, or unreadable
        self._ids: list[int] = []
        self._records: list[Record] = []
        self._bytes = 0
        self._seen = (0, 0)  # records and their bytes
        self._full = False  # whether a package could not be written
        self._refused: tuple[int, int] | None = None  # the epoch, and the maximum pending samples for another attempt

    def work(self, stop: threading.Event) -> float:
        """Read and write packages until there is nothing to do, or the flags have changed.

        Returns the seconds to sleep, so that searching for work takes at most its share of the time.
        """
        step, began = self._fields[Field.STEP], time.perf_counter()
        order, queue = self._to_read(), self._to_pack()
        now = time.perf_counter()
        end = now + (_SHARE - 1) * (now - began)

        def goes_on() -> bool:
            return not stop.is_set() and (self._fields[Field.STEP] == step or time.perf_counter() < end)

        while order and goes_on() and self._read(order.pop(0)):
            pass
        while goes_on() and (found := self._next(queue)) is not None:
            ids, queue = found
            self._pack(ids)
        return max(0.0, end - time.perf_counter())

    def _wanted(self, ids: Any = slice(None)) -> Array:
        """Which of `ids` are pending L-samples; of all samples by default."""
        wanted: Array = (self._flags[ids] & _WANTED) == _WANTED
        return wanted

    # -- packing ------------------------------------------------------------------------------------------------------

    def _lacking(self, ids: Array) -> Any:
        """Which of `ids` are wanted, and neither resident, nor in a package, nor about to be written to one."""
        free = ~self._taken[ids] & (self.packages.holding(ids) < 0)
        return free & self._wanted(ids) & ~self._cache.known(ids)

    def _to_pack(self) -> Array:
        """The samples to pack, in order."""
        ids = np.flatnonzero(self._wanted())
        ids = self._random.permutation(ids[self._lacking(ids)])
        return ids[np.argsort((self._flags[ids] & MISSED) == 0, kind="stable")]

    def _next(self, queue: Array) -> tuple[Array, Array] | None:
        """The next samples to pack, and the rest of the queue. None if it does not fill a package, or nothing fits."""
        expected = self._expected()
        need = math.ceil((self._package_bytes - self._bytes) / expected) if expected else IO_THREADS
        if self._full or len(queue) < need:
            return None
        size = expected or self._package_bytes
        lengths = np.full(math.ceil(self._package_bytes / size), math.ceil(size))
        if not self._ids and not self.packages.has_room(_layout(lengths)[1]):
            return None
        some, queue = np.split(queue, [min(need, _CHUNK)])
        return some[self._lacking(some)], queue

    def _expected(self) -> float:
        """Expected bytes of a record; 0 if unknown."""
        records, size = self._seen
        if records:
            return max(1.0, size / records)
        structure = self._cache.structure
        return float(structure.head.size + structure.size) if structure is not None and structure.fixed else 0.0

    def _pack(self, ids: Array) -> None:
        """Fetch and prepare `ids`; write a package when it is full. Skip samples that fail; the loader handles them."""
        self._taken[ids] = True
        reader, pending = self._reader, Pending(ids)
        reader.fetch(ids.tolist(), pending)
        states = reader.split.watch()
        for id in ids.tolist():
            try:
                value = reader.cached_form(reader.fetched(id, pending), id)
                if (states is not None and states.moved()) or self._cache.uncached_steps:
                    continue  # the loader detects an undeclared random step when it requests the sample
                record = encode(value, allow_pickle=self._cache.allow_pickle)
            except Exception:
                continue
            self._ids.append(id)
            self._records.append(record)
            length = record_size(*record)
            self._bytes += length
            self._seen = (self._seen[0] + 1, self._seen[1] + length)
        if self._bytes >= self._package_bytes:
            self._full = not self.packages.add(self._ids, self._records)
            self._taken[self._ids] = False
            self._ids, self._records, self._bytes = [], [], 0

    # -- reading ------------------------------------------------------------------------------------------------------

    def _to_read(self) -> list[int]:
        """The packages that hold enough absent samples, best first; a missed sample counts twice."""
        low = np.flatnonzero(self._wanted())
        there = self._cache.known(low)
        self._left = int(self._fields[Field.REGION]) - int(np.count_nonzero(there))
        pending = int(np.count_nonzero(self._flags & PENDING))
        if self._refused is not None and self._refused[0] == self._fields[Field.EPOCH] and pending > self._refused[1]:
            return []  # the cache was full at the last attempt, and too few samples have been served since
        absent, numbers = low[~there], self.packages.holding(low[~there])
        absent, numbers = absent[numbers >= 0], numbers[numbers >= 0]
        sizes = self.packages.sizes
        use = np.bincount(numbers, minlength=len(sizes))
        missed = np.bincount(numbers[self._flags[absent] & MISSED != 0], minlength=len(sizes))
        worth = np.flatnonzero((missed > 0) | ((use > 0) & (_WORTH * use >= sizes)))
        return worth[np.argsort(-(use + missed)[worth], kind="stable")].tolist()  # type: ignore[no-any-return]

    def _read(self, number: int) -> bool:
        """Put the requested samples of a package into the cache; return whether it may take more."""
        cache = self._cache
        if self._left < 1 or cache.uncached_steps:  # packages hold the output of a step that proved random
            return False
        epoch, pending = int(self._fields[Field.EPOCH]), int(np.count_nonzero(self._flags & PENDING))
        ids, values = self.packages.read(number, lambda ids: self._wanted(ids) & ~cache.known(ids))
        if len(ids):
            cache.set_scores(ids, np.full(len(ids), FRESH))
            there = cache.put_many(ids, values)
            late = ids[~(there & self._wanted(ids))]  # not stored, or served and its score lowered in the meantime
            if len(late):
                cache.set_scores(late, np.zeros(len(late)))
            brought = int(np.count_nonzero(there))
            self._left -= brought
            self._refused = (epoch, pending - len(ids)) if brought < len(ids) else None
        return self._refused is None

    def close(self) -> None:
        """Stop the fetch threads, and free the packages."""
        self._reader.close()
        self.packages.close()


def package_main(parent: Parent, *arguments: Any) -> None:
    """Work on packages until this process is to stop. `arguments` as of `PackageWork`."""
    stop = threading.Event()
    parent.listen(lambda message: stop.set() if message is None else None)
    parent.report()
    torch.set_num_threads(1)
    work, seen, pause = PackageWork(*arguments), -1, 0.0
    fields = arguments[1].fields
    while not stop.wait(pause):
        pause = _LOOK_SECONDS
        if fields[Field.STEP] != seen:
            seen = int(fields[Field.STEP])
            with suppress(StallfreeError):  # the writer lock timed out
                pause = work.work(stop)
    work.close()
