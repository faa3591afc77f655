"""Tiers: slower stores of samples between the memory cache and the source.

A tier is not a cache: threads that fetch ask it first and the source for the rest. What it returns is stored in memory,
if admitted there. New samples are written to it in the background.
"""

import contextlib
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, wait
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any, Protocol

import numpy as np

from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.errors import CodecError, StallfreeError
from stallfree.ipc.fetch_threads import FetchThreads
from stallfree.ipc.process import finalize_here
from stallfree.ipc.shared_array import shared_array
from stallfree.pipeline.codec import encode, read_record, record_of, record_size, write_record
from stallfree.platform import at_fork
from stallfree.raising import log

Array = np.ndarray[Any, np.dtype[Any]]
Record = np.ndarray[Any, np.dtype[np.uint8]]
"""An encoded sample (`stallfree.pipeline.codec`): contiguous bytes, valid only during the call that passes them."""


def decode(record: Any) -> Any:
    """Return the sample of a record.

    Args:
        record: a `Record` or its bytes. Anything else raises `CodecError`.

    Example:
        ```python
        # needs a tier
        def get_many(self, ids):
            return [decode(self.records[id]) for id in ids.tolist()]
        ```
    """
    return read_record(np.frombuffer(record, np.uint8), copy=True, allow_pickle=True)


class Tier(Protocol):
    """The samples of one data set in a slower store.

    `stallfree.testing.TierContract` tests a class against this. Ids are arrays of distinct int64 within the data
    set. Methods may be called from several threads, and in forked children. Any exception only costs hits: after
    three in a row, the tier is not used for ten seconds. A tier can be pickled if the data set is used in processes
    that are started by "spawn" or "forkserver".

    Example:
        ```python
        cached = sf.CachedDataset(dataset, capacity="1MiB", store=sf.DiskTier("ssd", capacity="8MiB"))
        assert len(cached.tier.get_many(np.arange(2))) == 2
        ```
    """

    def get_many(self, ids: Array) -> list[Any]:
        """Return the values of `ids`, `MISS` for absent ones.

        The caller owns them; they may share memory.
        """

    def put_many(self, ids: Array, records: Sequence[Record]) -> Array:
        """Store `records`. Return which of `ids` are stored now, as an array of bool."""

    def drop(self, ids: Array) -> None:
        """Remove `ids`."""

    def close(self) -> None:
        """Detach from the store. Idempotent."""


class TierStore(Protocol):
    """A place for the tiers of data sets: an argument `store=` of `CachedDataset`.

    Example:
        ```python
        store = sf.DiskTier("ssd", capacity="8MiB")  # or a RedisStore
        cached = sf.CachedDataset(dataset, capacity="1MiB", store=store)
        ```
    """

    def attach(self, num_ids: int, *, fingerprint: str, name: str, example: Any) -> Tier:
        """Return the tier of one data set.

        Args:
            num_ids: number of its ids; they are 0 to `num_ids` - 1.
            fingerprint: identifies its samples. Samples with another fingerprint must not be returned.
            name: of the data set, for people: part of file names or keys. Data sets of equal names may have different
                fingerprints.
            example: one value, for the layout.
        """


_QUEUE_BYTES = 32 << 20
"""Largest size of the write queue of one process, unless one batch is larger."""

_DRAIN_SECONDS, _POLL_SECONDS = 0.25, 0.001
"""Longest wait for a sample in the write queue of a process, which may have been killed."""

CLOSE_SECONDS = 10.0
"""Longest wait for the write queue when a tier is closed."""

_FAILURES, _PAUSE_SECONDS = 3, 10.0
_FOLLOW_SECONDS = 1.0
"""Interval at which a process looks whether another host found a random step."""

_MOST_STEPS = 1 << 20
"""More steps than any pipeline has."""

_ALIGN = 64
_STORED, _MOVING = 1, 2


class TierClient:
    """Reads samples from a tier, and writes new samples to it in a thread. Thread-safe and fork-safe.

    The value of an id in the tier is the number of uncached steps with which the sample was prepared, the id, and the
    sample. Samples of another number are misses. The id after the last one holds the largest number that is known, so
    that other hosts and later jobs learn that a step proved random.

    Failures are logged, and cost hits only. The interpreter joins the thread at exit, so a worker that exits loses
    nothing; the samples in the queue of a killed process are lost.

    Args:
        tier: with one id more than `cache`.
        cache: in memory, in front of the tier. Its folder holds the shared state.
    """

    def __init__(self, tier: Tier, cache: SampleCache) -> None:
        self.tier, self._cache = tier, cache
        self._state = shared_array(cache.path / "tier", np.uint8, cache.num_ids)
        self._allow_pickle = bool(getattr(tier, "allow_pickle", True))
        self._reading, self._writing = _Health(), _Health()
        self._followed, self._marked = -_FOLLOW_SECONDS, 0
        self._said: set[str] = set()
        self._reset()
        _all.add(self)
        self._follow()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._end: weakref.finalize[Any, Any] | None = None
        self._pool: FetchThreads | None = None
        self._queued = 0  # bytes, including those being written
        self._last: deque[Future[None]] = deque(maxlen=1)

    def known(self, ids: Array) -> Array:
        """Return which of `ids` this host assumes to be in the tier, without asking it: an array of bool."""
        return (self._state[ids] & _STORED) != 0  # type: ignore[no-any-return]

    def parts(self, ids: Array) -> list[Array]:
        """Return `ids` in parts that threads read concurrently."""
        return getattr(self.tier, "parts", lambda ids: [ids])(ids)

    def begin_epoch(self) -> None:
        """Let the tier replace what it has lost."""
        getattr(self.tier, "begin_epoch", lambda: None)()

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, ids: Array, uncached: int) -> list[Any]:
        """Return the samples of the distinct `ids`, `MISS` for those that the tier does not hold.

        Args:
            ids: distinct.
            uncached: the number of uncached steps with which they must have been prepared.
        """
        self.drain(ids)
        if time.monotonic() - self._followed > _FOLLOW_SECONDS:
            self._follow()
        values = self._ask(ids)
        numbers = self._compare(ids, values)
        samples = [value[2] if number == uncached else MISS for value, number in zip(values, numbers, strict=True)]
        self._state[ids] = [0 if sample is MISS else _STORED for sample in samples]
        return samples

    def _ask(self, ids: Array) -> list[Any]:
        if self._reading.good:
            try:
                values = list(self.tier.get_many(ids))
                if len(values) != len(ids):
                    raise ValueError(f"get_many returned {len(values)} values for {len(ids)} ids")
                self._reading.failures = 0
                return values
            except Exception:
                self._reading.failed("read from", self.tier)
        return [MISS] * len(ids)

    def _compare(self, ids: Array, values: list[Any]) -> list[int]:
        """Return the number of uncached steps of each value; adopt a higher number, and drop values of a lower one."""
        numbers = [_number(value, id) for value, id in zip(values, ids.tolist(), strict=True)]
        if max(numbers, default=0) > self._cache.uncached_steps:
            with contextlib.suppress(StallfreeError):  # another process writes to the cache: the next batch tries again
                self._cache.uncache_steps(max(numbers))
        known = self._cache.uncached_steps
        old = [at for at, number in enumerate(numbers) if values[at] is not MISS and number < known]
        if old:
            self._drop(ids[old])
        return numbers

    def _follow(self) -> None:
        """Adopt the number of uncached steps that another host or an earlier job has stored."""
        self._followed = time.monotonic()
        marker = np.array([self._cache.num_ids])
        highest = _number(self._ask(marker)[0], self._cache.num_ids)
        if highest > self._cache.uncached_steps:
            with contextlib.suppress(StallfreeError):
                self._cache.uncache_steps(highest)

    def drain(self, ids: Array) -> None:
        """Wait until no process of this host has `ids` in its queue; after 250 ms they count as lost."""
        until = time.monotonic() + _DRAIN_SECONDS
        while (self._state[ids] & _MOVING).any() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Array, values: Sequence[Any], uncached: int) -> None:
        """Queue new samples; those that the queue has no room for are rejected. The bytes are copied.

        Args:
            ids: distinct.
            values: a sample for each of them.
            uncached: the number of uncached steps with which they were prepared.
        """
        records, keep = [], []
        for at, value in enumerate(values):
            try:
                records.append(encode((uncached, int(ids[at]), value), allow_pickle=self._allow_pickle))
                keep.append(at)
            except CodecError as error:
                self._say("codec", f"some samples are not written to {self.tier!r}: {error}")
        sizes = np.array([-(-record_size(*record) // _ALIGN) * _ALIGN for record in records], np.int64)
        with self._lock:
            fit = len(sizes)
            if self._queued:
                fit = int(np.searchsorted(np.cumsum(sizes), _QUEUE_BYTES - self._queued, "right"))
            if not self._writing.good:
                fit = 0
            size = int(sizes[:fit].sum())
            self._queued += size
        if fit < len(sizes) and self._writing.good:
            self._say("full", f"samples arrive faster than {self.tier!r} can store them: some are not stored")
        queued = ids[keep[:fit]]
        self._cache.count_tier(0, len(values) - fit)
        if not fit:
            return
        self._state[queued] |= _MOVING
        try:
            memory, at, copies = np.empty(size, np.uint8), 0, []
            for record, nbytes in zip(records[:fit], sizes.tolist(), strict=False):
                used = write_record(*record, memory[at : at + nbytes])
                copies.append(memory[at : at + used])
                at += nbytes
            with self._lock:
                if self._pool is None:
                    self._pool = FetchThreads(1)
                    self._end = finalize_here(self, _finish_writes, self._pool, self._last)
                    if parent_process() is not None:  # a worker that was forked calls no other ones when it ends
                        Finalize(self, self._end, exitpriority=100)
                self._last.append(self._pool.submit(self._write, queued, copies, size, uncached))
        except (MemoryError, RuntimeError):  # no memory for the copies, or the interpreter is exiting
            self._written(queued, np.zeros(fit, bool), size)

    def _write(self, ids: Array, records: list[Record], size: int, uncached: int) -> None:
        stored = np.zeros(len(ids), bool)
        try:
            if not self._writing.good:  # since they were queued
                return
            if uncached > self._marked:
                self._mark(uncached)
            stored = np.asarray(self.tier.put_many(ids, records), bool).reshape(len(ids))
            self._writing.failures = 0
        except Exception:
            self._writing.failed("write to", self.tier)
        finally:
            self._written(ids, stored, size)

    def _written(self, ids: Array, stored: Array, size: int) -> None:
        with self._lock:
            self._queued -= size
        self._state[ids] = np.where(stored, _STORED, 0)
        self._cache.count_tier(0, int((~stored).sum()))

    def _mark(self, uncached: int) -> None:
        """Store the number of uncached steps for other hosts and later jobs."""
        at, record = np.array([self._cache.num_ids]), record_of(*encode((uncached, self._cache.num_ids, None)))
        self.tier.drop(at)
        self.tier.put_many(at, [record])
        self._marked = uncached

    def drop(self, ids: Array) -> None:
        """Remove the samples of `ids`, and those of this process in the queue."""
        self.flush()
        self._drop(ids)

    def _drop(self, ids: Array) -> None:
        self._state[ids] = 0
        try:
            self.tier.drop(ids)
        except Exception:
            self._writing.failed("drop samples of", self.tier)

    def flush(self) -> None:
        """Wait until all samples that this process has put are stored or rejected, for `CLOSE_SECONDS` at most."""
        with self._lock:
            last = [*self._last]
        wait(last, CLOSE_SECONDS)

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("%s", message)

    def close(self) -> None:
        """Write the queue, for `CLOSE_SECONDS` at most, and detach from the tier. Idempotent."""
        if self._end is not None:
            self._end()
        try:
            self.tier.close()
        except Exception:
            self._writing.failed("close", self.tier)

    def __reduce__(self) -> tuple[Any, ...]:
        return TierClient, (self.tier, self._cache)


def _finish_writes(pool: FetchThreads, last: deque[Future[None]]) -> None:
    """Wait for the queued writes, and stop their thread; also when the process ends."""
    for write in [*last]:
        with contextlib.suppress(CancelledError):
            try:
                write.result(CLOSE_SECONDS)
            except TimeoutError:
                log.warning("samples are not written to a tier that does not answer within %g s", CLOSE_SECONDS)
    pool.shutdown()


class _Health:
    """Pauses reading or writing after three failures in a row."""

    def __init__(self) -> None:
        self.failures, self._until = 0, 0.0

    @property
    def good(self) -> bool:
        return time.monotonic() >= self._until

    def failed(self, doing: str, tier: Tier) -> None:
        """Log the current exception."""
        self.failures += 1
        log.warning("stallfree could not %s %r, which only costs hits:\n%s", doing, tier, traceback.format_exc())
        if self.failures >= _FAILURES:
            self.failures, self._until = 0, time.monotonic() + _PAUSE_SECONDS
            log.warning("%r failed %d times in a row: it is not used for %g s", tier, _FAILURES, _PAUSE_SECONDS)


def _number(value: Any, id: int) -> int:
    """Return the number of uncached steps of a value from a tier; -1 if it is not a value of `id`."""
    valid = type(value) is tuple and len(value) == 3 and type(value[0]) is type(value[1]) is int
    return value[0] if valid and value[1] == id and value[0] < _MOST_STEPS else -1


_all: weakref.WeakSet[TierClient] = weakref.WeakSet()


def _reset_in_child() -> None:
    for client in list(_all):
        client._reset()


at_fork(after_in_child=_reset_in_child)
