"""The two processes of a packager: one packs L-samples, the other reads packages into the cache.

Both receive the sample flags from the training process through `SharedFlags`, and wake-ups through a pipe.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stallfree.batches.reader import IO_THREADS, Reader
from stallfree.batches.recorded_reads import record_sample
from stallfree.cache import Cache, Packages
from stallfree.cache.packages import Record
from stallfree.errors import StallfreeError
from stallfree.ipc.process import Parent
from stallfree.pipeline.codec import encode, record_size
from stallfree.pipeline.values import private
from stallfree.sampling.plans.retention import FRESH
from stallfree.sampling.shared_flags import LOW, MISSED, PACK, PENDING, READ, Field, SharedFlags
from stallfree.sources.mapped import MapSource
from stallfree.sources.throttle import payload_bytes
from stallfree.stores import held

Ids = npt.NDArray[np.int64]

WAKE, LAST = b"w", b"l"
"""Messages to a process: check for work; the same at the end of an epoch."""

_WORTH = 4
"""A package is read if at least one in this many of its samples is useful."""

_CHUNK = 64
"""Maximum number of samples per fetch."""

_FEW = 4096
"""Number of ids that each step checks again."""

_SHARE = 10
"""Searching for work may take one in this many seconds."""

_WANTED = LOW | PENDING


@dataclass
class WorkSetup:
    """The arguments of a packaging process.

    Attributes:
        reader: reads samples, and has the cache.
        shared: flags of the requested samples, and counts.
        folder: of the packages.
        write_budget: maximum bytes to write.
        package_bytes: minimum bytes of records in a package.
    """

    reader: Reader
    shared: SharedFlags
    folder: Path
    write_budget: int
    package_bytes: int

    @property
    def cache(self) -> Cache:
        """The cache of the reader."""
        assert self.reader.cache is not None
        return self.reader.cache

    def packages(self, row: int) -> Packages:
        """The packages; their operations are counted in this row of the shared counts."""
        cache = self.cache
        return Packages(
            self.folder,
            cache.fingerprint,
            cache.num_ids,
            allow_pickle=cache.allow_pickle,
            write_budget=self.write_budget,
            counts=self.shared.counts[row],
        )


class Inbox:
    """Messages from the training process.

    The first call of `wait` returns immediately, because a process is started when there is work.

    Attributes:
        last: whether the end of an epoch was announced before `wait` returned.
    """

    def __init__(self) -> None:
        self._something = threading.Event()
        self._something.set()
        self._stop = threading.Event()
        self._last_received = self.last = False

    def take(self, message: bytearray | None) -> None:
        """Receive a message, or None to stop. Called in another thread."""
        if message is None:
            self._stop.set()
        elif bytes(message) == LAST:
            self._last_received = True
        self._something.set()

    @property
    def stopped(self) -> bool:
        """Whether to stop."""
        return self._stop.is_set()

    @property
    def woken(self) -> bool:
        """Whether a message has arrived since `wait` returned."""
        return self._something.is_set()

    def wait(self) -> bool:
        """Wait for a message; return whether to continue."""
        self._something.wait()
        self._something.clear()
        self.last, self._last_received = self._last_received, False
        return not self.stopped

    def rest(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the process is to stop."""
        self._stop.wait(seconds)


class PackWork:
    """Packs samples that are neither resident nor in a package: missed ones first, then other pending ones.

    The order is random, because the samples of a package are served together and data sets are often sorted by class.
    """

    def __init__(self, setup: WorkSetup) -> None:
        self._setup, self._reader, self._cache = setup, setup.reader, setup.cache
        self._flags = setup.shared.flags
        self._packages = setup.packages(PACK)
        self._random = np.random.default_rng()
        self._pool: ThreadPoolExecutor | None = None
        if self._reader.tracker is None and getattr(self._reader.source, "threads", True):
            self._pool = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="stallfree-fetch")
        self._taken = np.zeros(len(self._flags), np.bool_)  # for the next package, or unreadable
        self._queue = np.empty(0, np.int64)
        self._looked = False
        self._ids: list[int] = []
        self._records: list[Record] = []
        self._bytes = 0
        self._seen = (0, 0)  # records and their bytes
        self._refused = False

    def work(self, inbox: Inbox) -> float:
        """Write packages while there are enough samples and space. At the end of an epoch, discard the rest.

        Returns the seconds spent searching for work.
        """
        self._looked, self._seconds = False, 0.0
        with self._looking():
            self._packages.refresh()
        while not (self._refused or inbox.stopped) and self._has_room():
            with self._looking():
                ids = self._next()
            if len(ids) == 0:
                break
            self._gather(ids)
            if self._bytes >= self._setup.package_bytes:
                self._refused = not self._packages.add_records(self._ids, self._records)
                self._let_go()
        if inbox.last:
            self._let_go()
        return self._seconds

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    def _has_room(self) -> bool:
        """Whether a package is in progress, or there is space for a new one."""
        expected = self._expected() or self._setup.package_bytes
        lengths = np.full(math.ceil(self._setup.package_bytes / expected), math.ceil(expected))
        return bool(self._ids) or self._packages.has_room(self._packages.size(lengths))

    def _expected(self) -> float | None:
        """Expected bytes of a record; None if unknown."""
        records, size = self._seen
        if records:
            return max(1.0, size / records)
        structure = self._cache.structure
        if structure is not None and structure.fixed:
            return float(structure.head.size + structure.size)
        stats = self._cache.stats()
        return max(1.0, stats.resident_bytes / stats.resident_items) if stats.resident_items else None

    def _next(self) -> Ids:
        """The next samples to pack; none if all of them would not fill the package."""
        missed = np.flatnonzero(self._flags & MISSED)
        ids = self._random.permutation(missed[self._lacking(missed)])
        expected = self._expected()
        need = IO_THREADS
        if expected is not None:
            need = math.ceil((self._setup.package_bytes - self._bytes) / expected)
        if len(self._queue) <= _FEW:
            self._queue = self._queue[self._still_wanted(self._queue)]
        if len(ids) + len(self._queue) < need and not self._looked:
            self._looked = True
            others = np.flatnonzero((self._flags & (_WANTED | MISSED)) == _WANTED)
            self._queue = self._random.permutation(others[self._lacking(others)])
        if len(ids) + len(self._queue) < need and expected is not None:
            return ids[:0]
        need = min(need, _CHUNK)
        while len(ids) < need and len(self._queue):
            some, self._queue = np.split(self._queue, [need - len(ids)])
            ids = np.concatenate((ids, some[self._still_wanted(some)]))
        return ids[:need]

    def _still_wanted(self, ids: Ids) -> Any:
        return ((self._flags[ids] & (_WANTED | MISSED)) == _WANTED) & self._lacking(ids)

    def _lacking(self, ids: Ids) -> Any:
        """Which of `ids` are neither resident, nor in a package, nor about to be written to one."""
        return ~self._taken[ids] & (self._packages.holding(ids) < 0) & ~held(self._cache, ids)

    def _gather(self, ids: Ids) -> None:
        """Fetch and prepare `ids` for the package. Skip samples that fail; the loader handles them."""
        self._taken[ids] = True
        fetches: Iterable[Any] = map(self._fetch, ids.tolist())
        if self._pool is not None:
            fetches = self._pool.map(self._fetch, ids.tolist())
        reads = size = 0
        for id, record in zip(ids.tolist(), fetches, strict=True):
            if record is None:
                continue
            reads, size = reads + 1, size + payload_bytes(record[0])
            try:
                with self._reader.split.watch() as watch:
                    value = self._reader.deterministic(private(record[0]))  # the source may keep a reference
                    if watch.moved() or not self._reader.current:
                        continue  # the loader detects an undeclared random step when it requests the sample
                encoded = encode(value, allow_pickle=self._cache.allow_pickle)
            except Exception:
                continue
            self._ids.append(id)
            self._records.append(encoded)
            length = record_size(*encoded)
            self._bytes += length
            self._seen = (self._seen[0] + 1, self._seen[1] + length)
        if reads:
            self._cache.count_fetch(reads, size)

    def _fetch(self, id: int) -> tuple[Any] | None:
        source = self._reader.source
        try:
            if self._reader.tracker is not None and isinstance(source, MapSource):
                return (record_sample(source.dataset, id)[0],)
            return (source.fetch(id),)
        except Exception:
            return None

    def _let_go(self) -> None:
        """Begin a new package. Samples that were not written may be packed later."""
        self._taken[self._ids] = False
        self._ids, self._records, self._bytes = [], [], 0

    def close(self) -> None:
        """Stop the fetch threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class ReadWork:
    """Reads packages into the cache while fewer samples are resident than the L-region holds."""

    def __init__(self, setup: WorkSetup) -> None:
        self._cache = setup.cache
        self._fields, self._flags = setup.shared.fields, setup.shared.flags
        self._packages = setup.packages(READ)
        self._refused: tuple[int, int] | None = None  # the epoch, and the maximum pending samples for another attempt

    def work(self, inbox: Inbox) -> float:
        """Read the packages with the most absent samples, until the region is full or a message arrives.

        Returns the seconds spent searching for work.
        """
        epoch, region = (int(self._fields[field]) for field in (Field.EPOCH, Field.REGION))
        if region < 1:
            return 0.0
        started = time.perf_counter()
        self._packages.refresh()
        low = np.flatnonzero((self._flags & _WANTED) == _WANTED)
        there = held(self._cache, low)
        resident = int(np.count_nonzero(there))
        pending = int(np.count_nonzero(self._flags & PENDING))
        if self._refused is not None and self._refused[0] == epoch and pending > self._refused[1]:
            region = 0  # the cache was full at the last attempt, and too few samples have been served since
        order = self._best(low[~there]) if resident < region else []
        looked = time.perf_counter() - started
        for number in order:
            if resident >= region or inbox.stopped:
                break
            wanted, brought = self._bring(number)
            resident += brought
            self._refused = (epoch, pending - wanted) if brought < wanted else None
            if self._refused is not None or inbox.woken:
                break
        return looked

    def _best(self, absent: Ids) -> list[int]:
        """The packages that hold enough of `absent`, best first; a missed sample counts twice."""
        numbers = self._packages.holding(absent)
        absent, numbers = absent[numbers >= 0], numbers[numbers >= 0]
        sizes = self._packages.sizes
        use = np.bincount(numbers, minlength=len(sizes))
        missed = np.bincount(numbers[self._flags[absent] & MISSED != 0], minlength=len(sizes))
        worth = np.flatnonzero((missed > 0) | ((use > 0) & (_WORTH * use >= sizes)))
        order: list[int] = worth[np.argsort(-(use + missed)[worth], kind="stable")].tolist()
        return order

    def _bring(self, number: int) -> tuple[int, int]:
        """Put the requested samples of a package into the cache; return the numbers of requested and stored samples."""
        cache = self._cache
        if cache.uncached_steps:  # packages hold the output of a step that proved random
            return 0, 0
        found = self._packages.read(number, lambda ids: self._pending(ids) & ~held(cache, ids))
        if found is None or len(found[0]) == 0:
            return 0, 0
        ids, values = found
        cache.set_scores(ids, np.full(len(ids), FRESH))
        there = cache.put_many(ids, values)
        late = ids[~(there & self._pending(ids))]  # not stored, or served and its score lowered in the meantime
        if len(late):
            cache.set_scores(late, np.zeros(len(late)))
        return len(ids), int(np.count_nonzero(there))

    def _pending(self, ids: Ids) -> Any:
        return (self._flags[ids] & _WANTED) == _WANTED

    def close(self) -> None:
        """Do nothing: there are no resources to close."""


def work_main(parent: Parent, row: int, setup: WorkSetup) -> None:
    """Run the work loop until this process is to stop."""
    inbox = Inbox()
    parent.listen(inbox.take)
    parent.report()
    torch.set_num_threads(1)
    work = PackWork(setup) if row == PACK else ReadWork(setup)
    while inbox.wait():
        looked = 0.0
        with contextlib.suppress(StallfreeError):  # the writer lock timed out
            looked = work.work(inbox)
        inbox.rest(looked * (_SHARE - 1))
    work.close()
