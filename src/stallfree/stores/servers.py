"""The sample cache of a data set in servers that run already, by plain keys.

A sample lies under `stallfree:KEY:ID`, with KEY 32 hexadecimal digits made of the data set's name and fingerprint; its
server follows from the id and the addresses (spread.py). What a data set has stored on a server is counted there by
whoever stores, in the hash `stallfree-held:KEY`. So all processes that use the same servers, on any host, keep to the
capacity without a word to each other. A process that is killed while it stores may leave up to 8 MiB counted that are
not there; `clear` puts that right.

In a Redis Cluster the keys are `stallfree:KEY:{TAG}:ID` and `stallfree-held:KEY:{TAG}`, with a tag per master
(cluster.py), which stands for the server in all else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.checks import EVERY_STEP, MISS, checked_ids
from stallfree.cache.counters import Count
from stallfree.cache.policies import make_policy
from stallfree.errors import CapacityError, CodecError, InputError
from stallfree.pipeline.codec import encode, read_record
from stallfree.platform import at_fork
from stallfree.stats import CacheStats
from stallfree.stores.buffers import Buffers
from stallfree.stores.cluster import Spot, find_spots, forget_tags
from stallfree.stores.endpoint import Address
from stallfree.stores.host import SharedOnHost
from stallfree.stores.shelf import Shelf
from stallfree.stores.values import data_key
from stallfree.units import format_size, parse_size

Array = npt.NDArray[Any]

MINIO = make_policy("minio")


class ServerCache:
    """Attach to the samples of a data set in running servers.

    Nothing is ever evicted by stallfree: when the capacity is used up, nothing more is stored. A server that is lost,
    slow or full costs hits and never an error.

    Args:
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        addresses: of the servers, in any order; everybody has to give the same ones. Or of one or more nodes of a Redis
            Cluster, all masters of which are used then.
        capacity: bytes that the values of this data set may take on all servers together, each of which takes the same
            share, as an int or such as "64GiB".
        per_server: bytes that they may take on each server at most; None for any number.
        name: of the data set.
        fingerprint: says which samples these are. Others of the same name are not read.
        allow_pickle: whether samples that the codec does not know are pickled and loaded. Whoever can write to a server
            could then run code here.
        timeout: seconds that a server may be silent before it counts as lost, for a while.

    Raises `InputError` for arguments that cannot be used and for a server that does not let us in, `CapacityError` for
    a capacity that is more than the servers may hold, `StorageError` when a server does not answer within 5 s.
    """

    def __init__(
        self,
        num_ids: int,
        *,
        addresses: Sequence[Address],
        capacity: int | str,
        name: str,
        fingerprint: str,
        per_server: int | None = None,
        allow_pickle: bool = False,
        timeout: float = 0.25,
    ) -> None:
        if num_ids < 1:
            raise InputError(f"num_ids={num_ids}: a cache needs a data set of at least one sample")
        if not addresses or len({Spot(address).name for address in addresses}) < len(addresses):
            given = ", ".join(map(str, addresses)) or "none"
            raise InputError(f"the servers {given} were given: give one or more, each of them once")
        if timeout <= 0:
            raise InputError(f"timeout={timeout!r}: give seconds above 0")
        size = parse_size(capacity, "capacity")
        spots = find_spots(addresses, data_key(name, fingerprint).hex())
        if per_server is not None and size > per_server * len(spots):
            raise CapacityError(
                f"capacity={format_size(size)} for {name!r} is more than {len(spots)} servers times "
                f"capacity_per_node={format_size(per_server)}: give less, or more servers"
            )
        self._attach(num_ids, spots, size, name, fingerprint, allow_pickle, timeout)

    def _attach(
        self,
        num_ids: int,
        spots: list[Spot],
        capacity: int,
        name: str,
        fingerprint: str,
        allow_pickle: bool,
        timeout: float,
    ) -> None:
        self.num_ids, self.name, self.fingerprint, self.allow_pickle = num_ids, name, fingerprint, allow_pickle
        self._given = (num_ids, spots, capacity, name, fingerprint, allow_pickle, timeout)
        self._capacity = capacity
        key = data_key(name, fingerprint)
        self._here = SharedOnHost(key, num_ids, [spot.name for spot in spots])
        buffers = Buffers()
        self._shelves = [Shelf(spot, key, capacity // len(spots), timeout, buffers, name) for spot in spots]
        self._threads: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._last: CacheStats | None = None
        self._leave = weakref.finalize(self, _leave, self._shelves, self._here)

    # -- what is there ------------------------------------------------------------------------------------------------

    def resident(self, ids: Any) -> Array:
        """False for all of `ids`, as an array: what is on the servers is not known without asking them."""
        return np.zeros(len(checked_ids(ids, self.num_ids)), bool)

    def num_keys(self) -> int:
        """Samples of this data set on all servers that can be reached. Looks through all keys of these servers."""
        return sum(shelf.num_keys() for shelf in self._shelves)

    def stats(self) -> CacheStats:
        """The counts over the processes of this host, and what is held on all servers that can be reached.

        After `close`, those of that moment.
        """
        if self._last is not None:
            return self._last
        sums = self._here.counters.totals()
        held = [shelf.held() for shelf in self._shelves]
        return CacheStats(
            hits=sums[Count.HITS],
            misses=sums[Count.MISSES],
            evictions=0,
            rejected=sums[Count.REJECTED],
            damaged=sums[Count.DAMAGED],
            storage_reads=sums[Count.READS],
            storage_bytes=sums[Count.BYTES],
            resident_items=sum(items for items, _ in held),
            resident_bytes=sum(size for _, size in held),
            capacity_bytes=self._capacity,
            used_bytes=sum(size for _, size in held),
        )

    def count_fetch(self, reads: int, size: int) -> None:
        """Count `reads` fetches from the source that brought `size` bytes."""
        self._check_process()
        self._here.counters.add((Count.READS, reads), (Count.BYTES, size))

    # -- what loaders want to know of a cache -------------------------------------------------------------------------

    complete = False
    structure = None
    policy = MINIO

    @property
    def capacity(self) -> int:
        """Bytes that the values of this data set may take on all servers together."""
        return self._capacity

    def populate(self) -> None:
        """Nothing: no memory of this host is used."""

    def owns(self, id: int) -> bool:
        """Whether this node stores sample `id`: every one does."""
        return True

    def here(self, ids: Array) -> Array:
        """Which of `ids` are read without a server: none, as an array of bool."""
        return np.zeros(len(ids), bool)

    def away(self, ids: Array) -> list[Array]:
        """`ids`, as an array for each server that owns some of them."""
        owner = self._here.owner[ids]
        return [ids[owner == place] for place in np.unique(owner).tolist()]

    def ask(self, ids: Array) -> list[Any]:
        """The samples of `ids`, which one server owns; `MISS` for those that it has not, or when it is lost."""
        self._check_process()
        if not len(ids):
            return []
        values = self._ask(int(self._here.owner[ids[0]]), ids.tolist())
        hits = sum(value is not MISS for value in values)
        self._here.counters.add((Count.HITS, hits), (Count.MISSES, len(values) - hits))
        return values

    parts, read = away, ask

    def settle(self, ids: Array) -> Array:
        """Which of `ids`, that this node owns, it does not hold: it owns none."""
        return np.ones(len(ids), bool)

    def get_here(self, ids: Array) -> list[Any]:
        """`MISS` for all of `ids`."""
        return [MISS] * len(ids)

    @property
    def uncached_steps(self) -> int:
        """See `SampleCache.uncached_steps`. 0, or `EVERY_STEP`: this kind of cache is then not used any more."""
        return int(self._here.uncached[0])

    def uncache_steps(self, count: int) -> bool:
        """Do not use this cache any more, on this host; whether it was used until now. See `SampleCache`."""
        return self._here.uncache(EVERY_STEP)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(self, ids: Any) -> list[Any]:
        """The samples of `ids`, `MISS` for those that are not there. The servers are asked at the same time.

        Each call gives values of its own; those of one call may share memory, which lives as long as any of them.
        Raises `InputError` for ids outside of the data set.
        """
        self._check_process()
        wanted = checked_ids(ids, self.num_ids)
        values: list[Any] = [MISS] * len(wanted)

        def ask(place: int, at: Array) -> None:
            for position, value in zip(at.tolist(), self._ask(place, wanted[at].tolist()), strict=True):
                values[position] = value

        self._at_once(ask, wanted)
        hits = sum(value is not MISS for value in values)
        self._here.counters.add((Count.HITS, hits), (Count.MISSES, len(values) - hits))
        return values

    def get(self, id: int) -> Any:
        """One sample, or `MISS`."""
        return self.get_many([id])[0]

    def _ask(self, place: int, ids: list[int]) -> list[Any]:
        records, damaged = self._shelves[place].read(ids)
        if damaged:
            self._here.counters.add((Count.DAMAGED, damaged))
        return [MISS if record is None else self._value(record) for record in records]

    def _value(self, record: Array) -> Any:
        with contextlib.suppress(CodecError):  # of another version, or a pickle: it is fetched
            return read_record(record, copy=False, allow_pickle=self.allow_pickle)
        return MISS

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any]) -> Array:
        """Store `values` as the samples of `ids`; which of them are there now, as an array of bool.

        What is there already stays as it is; where nothing can be stored, nobody asks what is there. Raises
        `CodecError` for a value that would need pickle where it is not allowed, and `InputError` for ids outside of the
        data set; then nothing is stored. Whatever else is in the way (no room, a server that is lost or refuses) is
        counted as rejected.
        """
        self._check_process()
        wanted = checked_ids(ids, self.num_ids)
        if len(wanted) != len(values):
            raise InputError(f"put_many was given {len(wanted)} ids and {len(values)} values: give one for each")
        unique, first, back = np.unique(wanted, return_index=True, return_inverse=True)
        pauses = [shelf.pause > 0 for shelf in self._shelves]
        owner = self._here.owner[unique].tolist()
        records = [
            None if pauses[place] else encode(values[position], allow_pickle=self.allow_pickle)
            for place, position in zip(owner, first.tolist(), strict=True)
        ]
        there = np.zeros(len(unique), bool)

        def store(place: int, at: Array) -> None:
            shelf = self._shelves[place]
            if pauses[place]:
                shelf.pause = max(0, shelf.pause - 1)
            else:
                there[at] = shelf.store(unique[at].tolist(), [records[position] for position in at.tolist()])

        self._at_once(store, unique)
        self._here.counters.add((Count.REJECTED, int((~there).sum())))
        return there[back]

    def put(self, id: int, value: Any) -> bool:
        """Store one sample; whether it is there now."""
        return bool(self.put_many([id], [value])[0])

    def clear(self) -> None:
        """Drop all samples of this data set on all servers that can be reached, and of no other data set."""
        self._check_process()
        for shelf in self._shelves:
            shelf.clear()
        _, spots, _, name, fingerprint, _, timeout = self._given
        forget_tags(spots[0], data_key(name, fingerprint).hex(), timeout)

    def _at_once(self, job: Callable[[int, Array], None], ids: Array) -> None:
        """`job(place, positions)` for each server that owns some of `ids`, all at the same time."""
        owner = self._here.owner[ids]
        jobs = [(place, np.flatnonzero(owner == place)) for place in np.unique(owner).tolist()]
        others = []
        if len(jobs) > 1:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(len(self._shelves) - 1, thread_name_prefix="stallfree-servers")
            others = [self._threads.submit(job, place, at) for place, at in jobs[1:]]
        try:
            for place, at in jobs[:1]:
                job(place, at)
        finally:
            for other in others:
                other.result()

    # -- the life of it -----------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if self._last is not None:
            raise InputError(f"the cache {self.name!r} is closed: make a new one")
        if self._pid != os.getpid():
            with _after_fork:
                if self._pid != os.getpid():
                    self._here.claim()
                    self._threads = None
                    for shelf in self._shelves:
                        shelf.after_fork()
                    self._pid = os.getpid()

    def close(self) -> None:
        """Leave the cache; the samples stay on the servers. May be called twice."""
        if self._last is None:
            self._last = self.stats()
            if self._threads is not None and self._pid == os.getpid():
                self._threads.shutdown()
            self._threads = None
            self._leave()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, self._given

    def __enter__(self) -> ServerCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_after_fork = threading.RLock()
at_fork(before=_after_fork.acquire, after_in_parent=_after_fork.release, after_in_child=_after_fork.release)


def _leave(shelves: list[Shelf], here: SharedOnHost) -> None:
    for shelf in shelves:
        shelf.endpoint.close()
    here.close()


def _attach(*given: Any) -> ServerCache:
    """How a cache travels to a worker."""
    cache = ServerCache.__new__(ServerCache)
    cache._attach(*given)
    return cache
