"""The `Cache` protocol that loaders require. Optional capabilities are separate small protocols.

`stallfree.testing.CacheContract` tests a class against this module. `BaseCache` has default methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy.typing as npt

if TYPE_CHECKING:
    from stallfree.cache.policies import Policy
    from stallfree.cache.records import Aim, Borrowed
    from stallfree.pipeline.structure import Structure
    from stallfree.stats import CacheStats

Array = npt.NDArray[Any]
Pool = Callable[[], Executor]
"""Returns the executor of the caller, whose threads may block on storage."""
Fetch = Callable[[list[int]], object]
"""Starts fetching these ids from the source, and returns immediately."""


class Reading(Protocol):
    """A batch read in progress; see `Cache.begin_read`.

    Example:
        ```python
        with ThreadPoolExecutor() as pool, sf.CachedDataset(dataset, capacity="8MiB") as cached:
            missing = []
            reading = cached.cache.begin_read(np.array([0, 5]), lambda: pool, missing.extend)
            samples = reading.result()
            assert samples[1] is sf.cache.MISS and missing == [5]
        ```
    """

    def result(self) -> list[Any]:
        """Returns the samples in the order of the ids.

        `MISS` stands for samples in no tier.

        Waits for the reads in flight. Each id without a value has been passed to `fetch`. An id passed to `fetch` may
        still have a value, if another process has stored it since. A second call returns the content of the cache at
        that time.
        """

    def cancel(self) -> None:
        """Stops calling `fetch`. May be called at any time.

        `result` must not be called afterwards.
        """


class Cache(Protocol):
    """The samples of one data set, by id.

    Ids are integers from 0 to `num_ids` - 1. Methods take `ids` as a sequence or an array, which may contain equal
    ids. Ids that are not integers or are out of range raise `InputError`, which in the latter case is also an
    `IndexError`. After `close`, reading and storing raise `InputError`.

    Methods are thread-safe. A forked child uses the object of its parent. A cache for processes started by "spawn" or
    "forkserver" can be pickled, and attaches to the same samples there.

    Attributes:
        num_ids: number of samples of the data set.
        name: of the cache, for messages and for the processes that share it.
        path: folder of this cache, which the processes of this host share.
        fingerprint: identifies the data and their preparation.
        allow_pickle: whether samples that the codec does not support are pickled.
        policy: eviction policy. Nothing is evicted while `policy.evicts` is False.
        capacity: maximum bytes of this host's memory; of its disk, for a cache on a disk only.
        structure: the structure of the samples that `gather` can copy; None if it copies none.

    Example:
        ```python
        with sf.CachedDataset(dataset, capacity="8MiB") as cached:
            cache = cached.cache
            cache.put_many([5], [(image, 7)])
            [(same, label)] = cache.get_many([5])
            assert label == 7 and cache.resident([5, 6]).tolist() == [True, False]
        ```
    """

    num_ids: int
    name: str
    path: Path
    fingerprint: str
    allow_pickle: bool
    policy: Policy
    capacity: int
    structure: Structure | None

    @property
    def complete(self) -> bool:
        """Whether all samples are resident."""

    @property
    def uncached_steps(self) -> int:
        """The number of last pipeline steps that the stored samples do not include.

        0 initially; increases after a step proved random; see `uncache_steps`.
        """

    def resident(self, ids: Any) -> Array:
        """Returns which of `ids` this host can read, as an array of bool.

        Samples that need a request to a lower tier are False.
        """

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, ids: Any) -> list[Any]:
        """Returns the samples of `ids`, `MISS` for absent ones.

        The caller owns the values: changing them affects neither the cache nor the values of other calls, and equal
        ids have separate values. Values of one call may share one memory block.
        """

    def begin_read(self, ids: Array, pool: Pool, fetch: Fetch) -> Reading:
        """Starts reading `ids`, an array of int64. Returns immediately; `Reading.result` returns the samples.

        Args:
            ids: of a batch that is needed soon.
            pool: called at most once, in this thread, and only if threads are needed. The executor may be shut down at
                any time; `result` then reads the rest.
            fetch: called for ids as soon as they are known to be in no tier, so that the caller starts fetching them
                from the source. Called at most once per id, in this thread, in threads of the executor and in
                `result`. Not called for samples that a process of this host is writing to this cache. This method or
                `result` raises its exceptions.
        """

    def aim(self, outs: Sequence[Array]) -> Aim:
        """Prepares `outs` for many calls of `gather`; see there."""

    def gather(self, ids: Any, into: Aim | Sequence[Array]) -> Array:
        """Copies the samples of `ids`, leaf by leaf.

        Returns which of them were copied, as an array of bool.

        Only resident samples of the `structure` are copied; without a `structure`, none. The rows of other samples are
        undefined afterwards.

        Args:
            ids: of the samples.
            into: an array per leaf of `structure`: (number of ids, bytes of the leaf) of uint8, contiguous; or the
                result of `aim` for them.
        """

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any], *, uncached: int = 0) -> Array:
        """Stores `values` as the samples of `ids`.

        Returns which of them are stored, as an array of bool.

        Samples that are already stored are unchanged; of equal ids, the first counts. Values are copied. A cache that
        writes in the background returns True for queued samples; `flush` waits for them. A sample that does not fit,
        or that a lower tier rejects, is not stored and counts as rejected.

        Args:
            ids: of the samples.
            values: a sample for each id.
            uncached: the `uncached_steps` with which the values were prepared. Nothing is stored if it has changed.

        Raises `CodecError` for a value that needs pickle if `allow_pickle` is False; then nothing is stored.
        """

    def flush(self) -> None:
        """Waits until all samples that this process has put are stored or rejected."""

    def set_scores(self, ids: Any, scores: Any) -> None:
        """Sets the scores of samples, resident or not.

        For a policy whose scores are `given`.

        Raises `InputError` unless there is one number per id, and none is NaN.
        """

    def drop(self, ids: Any) -> None:
        """Removes the samples of `ids`. They do not count as evicted."""

    def clear(self) -> None:
        """Removes all samples."""

    def uncache_steps(self, count: int) -> bool:
        """Removes all samples, for all processes.

        Called when one of the last `count` cached steps proved random.

        Afterwards `uncached_steps` is at least `count`; a cache shared by several hosts is disabled. If that was
        already the case, removes nothing and returns False.
        """

    # -- life ---------------------------------------------------------------------------------------------------------

    def count_fetch(self, reads: int, size: int) -> None:
        """Counts `reads` fetches of `size` bytes from the source."""

    def stats(self) -> CacheStats:
        """Returns the counts over all processes of this host.

        After `close`, these are the counts at that time.

        Each requested id counts once, as a hit or as a miss.
        """

    def populate(self) -> None:
        """Maps the memory in the background.

        The first reads are then fast. May do nothing.
        """

    def close(self) -> None:
        """Flushes writes and detaches from the cache. Idempotent."""


@runtime_checkable
class Lends(Protocol):
    """A cache whose samples can be read in place, without a copy.

    Example:
        ```python
        with sf.CachedDataset(dataset, capacity="8MiB") as cached:
            if isinstance(cached.cache, sf.cache.Lends):
                borrowed = cached.cache.borrow([0, 1])
        ```
    """

    def borrow(self, ids: Any) -> Borrowed | None:
        """Returns the samples of `ids`, as `get_many` does, without copying; do not modify them.

        Returns None if this cache cannot lend samples, for example a cache on a disk. Another process may overwrite a
        sample at any time: check `Borrowed.unchanged` after use.
        """

    def count_changed(self, samples: int) -> None:
        """Counts `samples` borrowed samples that have changed as misses."""
