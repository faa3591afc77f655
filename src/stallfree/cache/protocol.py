"""The `Cache` protocol: what loaders require of a cache. Optional capabilities are small protocols of their own.

`stallfree.testing.CacheContract` tests a class against this page. `BaseCache` has the methods that most caches do not
need to write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy.typing as npt

if TYPE_CHECKING:
    from stallfree.cache.memory.records import Aim, Borrowed
    from stallfree.cache.policies import Policy
    from stallfree.pipeline.structure import Structure
    from stallfree.stats import CacheStats

Array = npt.NDArray[Any]
Pool = Callable[[], Executor]
"""Returns the executor of the caller, whose threads may wait for storage."""
Fetch = Callable[[list[int]], object]
"""Starts fetching these ids from the source, and returns at once."""


class Reading(Protocol):
    """A batch that is being read; see `Cache.begin_read`."""

    def result(self) -> list[Any]:
        """Returns the samples in the order of the ids, `MISS` for those that no tier holds.

        Waits for the reads that are under way. Each id that has no value has been passed to `fetch`; one that was
        passed to `fetch` may have a value all the same, if another process stored it meanwhile. May be called again:
        it then returns what the cache holds at that moment.
        """

    def cancel(self) -> None:
        """Stops: no further `fetch` is called, and `result` is not called any more. May be called at any time."""


class Cache(Protocol):
    """The samples of one data set, by id.

    Ids are integers from 0 to `num_ids` - 1. Where a method takes `ids`, it takes a sequence or an array of them, and
    equal ids may occur. Ids that are no integers or are out of range raise `InputError`, which is an `IndexError` as
    well in the latter case. After `close`, reading and storing raise `InputError`.

    Methods may be called from several threads at once. A forked child uses the object of its parent. A cache that
    processes started by "spawn" or "forkserver" are to use can be pickled, and attaches to the same samples there.

    Attributes:
        num_ids: number of samples of the data set.
        name: of the cache, for messages and for the processes that share it.
        path: folder of this cache, which the processes of this host share.
        fingerprint: identifies the data and their preparation.
        allow_pickle: whether samples that the codec does not know are pickled.
        policy: which sample makes room when the cache is full. Nothing is lost while `policy.evicts` is False.
        capacity: bytes of this host's memory that the cache may take; of its disk, for a cache on a disk alone.
        structure: the structure of the samples that `gather` can copy; None if it copies none.
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
        """How many steps of the pipeline the stored samples are made without, counted from the last cached one.

        0 at first. More after a step turned out to be random; see `uncache_steps`.
        """

    def resident(self, ids: Any) -> Array:
        """Returns which of `ids` this host can read without a request to a lower tier: an array of bool."""

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, ids: Any) -> list[Any]:
        """Returns the samples of `ids`, `MISS` for those that are not there.

        The values belong to the caller: changing them changes neither the cache nor what another call returned, and
        equal ids get a value each. Values of one call may share one piece of memory.
        """

    def begin_read(self, ids: Array, pool: Pool, fetch: Fetch) -> Reading:
        """Starts to read `ids`, an array of int64. Returns at once; `Reading.result` returns the samples.

        Args:
            ids: of a batch that is needed soon.
            pool: called at most once, in this thread, and only if threads are needed. The executor may be shut down at
                any time; `result` then reads what is left.
            fetch: called for ids that are known to be in no tier, as soon as that is known, so that the caller starts
                to fetch them from the source. It is called in this thread, in threads of the executor and in
                `result`; each time with other ids, and with none twice. It is not called for samples that are on their
                way into this cache from a process of this host. What it raises, this method or `result` raises.
        """

    def aim(self, outs: Sequence[Array]) -> Aim:
        """Prepares `outs` for many calls of `gather`; see there."""

    def gather(self, ids: Any, into: Aim | Sequence[Array]) -> Array:
        """Copies the samples of `ids` leaf by leaf. Returns which of them were copied, as an array of bool.

        Only samples of the `structure` that are resident are copied; without a `structure`, none. Rows of the others
        hold anything afterwards.

        Args:
            ids: of the samples.
            into: an array per leaf of `structure`: (number of ids, bytes of the leaf) of uint8, contiguous. Or what
                `aim` made of them.
        """

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any], *, uncached: int = 0) -> Array:
        """Stores `values` as the samples of `ids`. Returns which of them are stored now, as an array of bool.

        What is stored already stays as it is; of equal ids, the first counts. Values are copied. A cache that writes
        in the background returns True for what it is about to write; `flush` waits for that. A sample for which there
        is no room, or that a lower tier does not take, is not stored and counts as rejected.

        Args:
            ids: of the samples.
            values: a sample for each id.
            uncached: the `uncached_steps` with which the values were made. Nothing is stored if it is another number
                now.

        Raises `CodecError` for a value that needs pickle where `allow_pickle` is False; then nothing is stored.
        """

    def flush(self) -> None:
        """Waits until all that this process has put is stored or rejected."""

    def set_scores(self, ids: Any, scores: Any) -> None:
        """Sets how much each sample is worth, resident or not, for a policy whose scores are `given`.

        Raises `InputError` for scores that are not as many numbers, or are NaN.
        """

    def drop(self, ids: Any) -> None:
        """Removes the samples of `ids`. They do not count as evicted."""

    def clear(self) -> None:
        """Removes all samples."""

    def uncache_steps(self, count: int) -> bool:
        """Removes all samples, for all processes, since one of the last `count` cached steps turned out to be random.

        `uncached_steps` is `count` or more then; a cache that several hosts use is not used any more. Returns False,
        and removes nothing, if that was so before.
        """

    # -- life ---------------------------------------------------------------------------------------------------------

    def count_fetch(self, reads: int, size: int) -> None:
        """Counts `reads` fetches from the source that brought `size` bytes."""

    def stats(self) -> CacheStats:
        """Returns the counts over all processes of this host; after `close`, those of that moment.

        Each id that was requested counts once, as a hit or as a miss.
        """

    def populate(self) -> None:
        """Maps what is in memory in the background, so that the first reads are fast. May do nothing."""

    def close(self) -> None:
        """Writes what was put, and leaves the cache. May be called twice."""


@runtime_checkable
class Lends(Protocol):
    """A cache whose samples can be read in place, without a copy."""

    def borrow(self, ids: Any) -> Borrowed | None:
        """Returns the samples of `ids` as `get_many` has them, but not copied: read them at once, and do not write.

        None if this cache lends nothing, such as one on a disk. Another process may overwrite a sample at any moment:
        ask `Borrowed.unchanged` after the use.
        """

    def count_changed(self, samples: int) -> None:
        """Counts as misses `samples` that were borrowed and turned out to be changed."""
