"""The sample cache of a data set in servers that run already, by plain keys.

A sample lies under `stallfree:KEY:ID`, with KEY 32 hexadecimal digits made of the data set's name and fingerprint; its
server follows from the id and the addresses (spread.py). What a data set has stored on a server is counted there by
whoever stores, in the hash `stallfree-held:KEY`. So all processes that use the same servers, on any host, keep to the
capacity without a word to each other. A process that is killed while it stores may leave up to 8 MiB counted that are
not there; `clear` puts that right.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from stallfree.cache.checks import MISS, checked_ids
from stallfree.cache.counters import Count
from stallfree.cache.policies import make_policy
from stallfree.errors import CodecError, InputError
from stallfree.pipeline.codec import encode, read_record, record_size, write_record
from stallfree.pipeline.structure import Structure
from stallfree.stats import CacheStats
from stallfree.stores.buffers import Buffers
from stallfree.stores.endpoint import Address, Endpoint, check_server
from stallfree.stores.host import SharedOnHost
from stallfree.stores.values import HEAD_SIZE, Expected, data_key, pack_head
from stallfree.stores.wire import Refused, Wire, command
from stallfree.units import parse_size

Array = npt.NDArray[Any]
Encoded = tuple[Structure, list[Array]]

_MOST = 8 << 20
"""Bytes that are sent at once."""

_TYPICAL = 128 << 10
"""Bytes of a value while none has been seen."""

_BACK_OFF = 50
"""Batches that are not stored on a server that is full or has refused one."""

_SCAN = 1000
"""Keys that are looked at, and dropped, at a time."""

MINIO = make_policy("minio")


class ServerCache:
    """Attach to the samples of a data set in running servers.

    Nothing is ever evicted by stallfree: when the capacity is used up, nothing more is stored. A server that is lost,
    slow or full costs hits and never an error.

    Args:
        num_ids: number of samples of the data set; ids are 0 to `num_ids` - 1.
        addresses: of the servers, in any order; everybody has to give the same ones.
        capacity: bytes that the values of this data set may take on all servers together, each of which takes the same
            share, as an int or such as "64GiB".
        name: of the data set.
        fingerprint: says which samples these are. Others of the same name are not read.
        allow_pickle: whether samples that the codec does not know are pickled and loaded. Whoever can write to a server
            could then run code here.
        timeout: seconds that a server may be silent before it counts as lost, for a while.

    Raises `InputError` for arguments that cannot be used and for a server that does not let us in, `StorageError` when
    one does not answer within 5 s.
    """

    def __init__(
        self,
        num_ids: int,
        *,
        addresses: Sequence[Address],
        capacity: int | str,
        name: str,
        fingerprint: str,
        allow_pickle: bool = False,
        timeout: float = 0.25,
    ) -> None:
        if num_ids < 1:
            raise InputError(f"num_ids={num_ids}: a cache needs a data set of at least one sample")
        if not addresses or len(set(map(_place, addresses))) < len(addresses):
            given = ", ".join(map(str, addresses)) or "none"
            raise InputError(f"the servers {given} were given: give one or more, each of them once")
        if timeout <= 0:
            raise InputError(f"timeout={timeout}: give seconds above 0")
        size = parse_size(capacity, "capacity")
        for address in addresses:
            check_server(address)
        self._attach(num_ids, sorted(addresses, key=_place), size, name, fingerprint, allow_pickle, timeout)

    def _attach(
        self,
        num_ids: int,
        addresses: list[Address],
        capacity: int,
        name: str,
        fingerprint: str,
        allow_pickle: bool,
        timeout: float,
    ) -> None:
        self.num_ids, self.name, self.fingerprint, self.allow_pickle = num_ids, name, fingerprint, allow_pickle
        self._given = (num_ids, addresses, capacity, name, fingerprint, allow_pickle, timeout)
        self._capacity, self._share = capacity, capacity // len(addresses)
        self._key = data_key(name, fingerprint)
        self._prefix = b"stallfree:%b:" % self._key.hex().encode()
        self._held = b"stallfree-held:%b" % self._key.hex().encode()
        self._endpoints = [Endpoint(address, timeout) for address in addresses]
        self._here = SharedOnHost(self._key, num_ids, [_place(address) for address in addresses])
        self._buffers = Buffers()
        self._typical = _TYPICAL
        self._pauses = [0] * len(addresses)
        self._owed = [(0, 0)] * len(addresses)  # bytes and items to be added to what a server counts
        self._lock = threading.Lock()
        self._warned: set[int] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._last: CacheStats | None = None
        self._leave = weakref.finalize(self, _leave, self._endpoints, self._here)

    # -- what is there ------------------------------------------------------------------------------------------------

    def resident(self, ids: Any) -> Array:
        """False for all of `ids`, as an array: what is on the servers is not known without asking them."""
        return np.zeros(len(checked_ids(ids, self.num_ids)), bool)

    def num_keys(self) -> int:
        """Samples of this data set on all servers that can be reached. Looks through all keys of these servers."""
        return sum(self._rest(place, lambda place: sum(map(len, self._scan(place, once=True)))) for place in self._all)

    def stats(self) -> CacheStats:
        """The counts over the processes of this host, and what is held on all servers that can be reached.

        After `close`, those of that moment.
        """
        if self._last is not None:
            return self._last
        sums = self._here.counters.totals()
        held = [
            [int(number or 0) for number in self._call(place, "HMGET", self._held, "items", "bytes") or (0, 0)]
            for place in self._all
        ]
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

    def settle(self, ids: Array) -> Array:
        """Which of `ids`, that this node owns, it does not hold: it owns none."""
        return np.ones(len(ids), bool)

    def get_here(self, ids: Array) -> list[Any]:
        """`MISS` for all of `ids`."""
        return [MISS] * len(ids)

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
        keys = [b"%b%d" % (self._prefix, id) for id in ids]
        expected = Expected(self._key, ids)
        records = self._run(place, lambda wire: wire.mget(keys, self._typical, self._buffers, expected))
        if records is None:
            return [MISS] * len(ids)
        if expected.damaged:
            self._drop(place, [keys[position] for position in expected.damaged])
        sizes = [record.size for record in records if record is not None]
        if sizes:
            self._typical = sum(sizes) // len(sizes) + HEAD_SIZE
        return [MISS if record is None else self._value(record) for record in records]

    def _value(self, record: Array) -> Any:
        with contextlib.suppress(CodecError):  # of another version, or a pickle: it is fetched
            return read_record(record, copy=False, allow_pickle=self.allow_pickle)
        return MISS

    def _drop(self, place: int, keys: Iterable[bytes]) -> None:
        """Drop damaged values, or nothing would ever be stored in their place."""
        for key in set(keys):
            size = self._call(place, "STRLEN", key)
            if size and self._call(place, "UNLINK", key):
                self._here.counters.add((Count.DAMAGED, 1))
                self._run(place, partial(self._count, place, -size, -1))

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
            raise InputError(f"put_many was given {len(wanted)} ids and {len(values)} values")
        unique, first, back = np.unique(wanted, return_index=True, return_inverse=True)
        pauses = [pause > 0 for pause in self._pauses]
        owner = self._here.owner[unique].tolist()
        records = [
            None if pauses[place] else encode(values[position], allow_pickle=self.allow_pickle)
            for place, position in zip(owner, first.tolist(), strict=True)
        ]
        there = np.zeros(len(unique), bool)

        def store(place: int, at: Array) -> None:
            if pauses[place]:
                self._pauses[place] = max(0, self._pauses[place] - 1)
            else:
                there[at] = self._store(place, unique[at].tolist(), [records[position] for position in at.tolist()])

        self._at_once(store, unique)
        self._here.counters.add((Count.REJECTED, int((~there).sum())))
        return there[back]

    def put(self, id: int, value: Any) -> bool:
        """Store one sample; whether it is there now."""
        return bool(self.put_many([id], [value])[0])

    def _store(self, place: int, ids: list[int], records: list[Any]) -> list[bool]:
        there: list[bool] = []
        sizes = [HEAD_SIZE + record_size(*record) for record in records]
        while len(there) < len(ids) and not self._pauses[place]:
            start = end = len(there)
            while end == start or (end < len(ids) and sum(sizes[start : end + 1]) <= _MOST):
                end += 1
            lot = slice(start, end)
            done = self._run(place, partial(self._write, place, ids[lot], records[lot], sizes[lot]))
            if done is None:
                break
            there += done
        return there + [False] * (len(ids) - len(there))

    def _write(self, place: int, ids: list[int], records: list[Encoded], sizes: list[int], wire: Wire) -> list[bool]:
        """Store what there is room for, in one request: which of them are there now."""
        total = sum(sizes)
        held = self._count(place, total, len(ids), wire)
        fitting = int(np.searchsorted(np.cumsum(sizes), self._share - (held - total), side="right"))
        there, refused = [False] * len(ids), None
        excess, items = total, len(ids)  # what is counted and not stored
        if fitting:
            wire.send(self._commands(ids[:fitting], records[:fitting], sizes[:fitting]), replies=fitting)
        for position in range(fitting):
            try:
                new = wire.reply() is not None  # nil: it was there
            except Refused as error:
                refused = error
                continue
            there[position] = True
            if new:
                excess -= sizes[position]
                items -= 1
        if fitting < len(ids):
            self._pauses[place] = _BACK_OFF
        if refused is not None:
            self._refuse(place, refused)
        if items:
            with contextlib.suppress(Refused):
                self._count(place, -excess, -items, wire)
        return there

    def _commands(self, ids: list[int], records: list[Encoded], sizes: list[int]) -> list[Any]:
        memory = self._buffers.take(sum(size + 63 & ~63 for size in sizes))
        pieces: list[Any] = []
        at = 0
        for id, record, size in zip(ids, records, sizes, strict=True):
            data = memory[at : at + size - HEAD_SIZE]
            write_record(*record, data)
            pieces += command("SET", b"%b%d" % (self._prefix, id), [pack_head(self._key, id, [data]), data], "NX")
            at += size + 63 & ~63
        return pieces

    def _count(self, place: int, size: int, items: int, wire: Wire) -> int:
        """Add to what is held on a server: the bytes that are held now. What it refuses is added the next time."""
        with self._lock:
            (more, others), self._owed[place] = self._owed[place], (0, 0)
            size, items = size + more, items + others
        counts = [*command("HINCRBY", self._held, "bytes", size), *command("HINCRBY", self._held, "items", items)]
        wire.send(counts, replies=2)
        try:
            held = wire.integer()
            wire.integer()
        except Refused:
            wire.close()
            if size < 0:
                with self._lock:
                    self._owed[place] = (self._owed[place][0] + size, self._owed[place][1] + items)
            raise
        return held

    def clear(self) -> None:
        """Drop all samples of this data set on all servers that can be reached, and of no other data set."""
        self._check_process()

        def drop(place: int) -> int:
            for keys in self._scan(place):
                self._endpoints[place].client().unlink(*keys)
            self._endpoints[place].client().delete(self._held)
            self._owed[place], self._pauses[place] = (0, 0), 0
            return 0

        for place in self._all:
            self._rest(place, drop)

    # -- servers ------------------------------------------------------------------------------------------------------

    @property
    def _all(self) -> range:
        return range(len(self._endpoints))

    def _run(self, place: int, call: Callable[[Wire], Any]) -> Any:
        """What `call` gives; None if the server is lost or refuses, which is warned of once."""
        try:
            return self._endpoints[place].run(call)
        except Refused as error:
            self._refuse(place, error)
            return None

    def _refuse(self, place: int, error: Refused) -> None:
        self._pauses[place] = _BACK_OFF
        if place not in self._warned:
            self._warned.add(place)
            warnings.warn(
                f"the server {self._endpoints[place].address} refuses samples of {self.name!r}: {error.text}. Nothing "
                "is stored there for a while",
                RuntimeWarning,
                stacklevel=2,
            )

    def _call(self, place: int, *arguments: Any) -> Any:
        return self._run(place, lambda wire: wire.call(*arguments))

    def _rest(self, place: int, call: Callable[[int], int]) -> int:
        """What `call`, which uses the client library, gives for a server; 0 if that is lost."""
        from redis.exceptions import RedisError

        endpoint = self._endpoints[place]
        try:
            return call(place) if endpoint.breaker.closed else 0
        except RedisError:
            endpoint.breaker.trip()
            return 0

    def _scan(self, place: int, once: bool = False) -> Iterable[list[bytes]]:
        """The keys of this data set on a server, in pieces. A server may name one more than once, unless `once`."""
        client, cursor, seen = self._endpoints[place].client(), -1, set[bytes]()
        while cursor:
            found: Any
            cursor, found = client.scan(max(cursor, 0), match=self._prefix + b"*", count=_SCAN)
            if once:
                found = [key for key in set(found) if key not in seen]
                seen.update(found)
            if found:
                yield found

    def _at_once(self, job: Callable[[int, Array], None], ids: Array) -> None:
        """`job(place, positions)` for each server that owns some of `ids`, all at the same time."""
        owner = self._here.owner[ids]
        jobs = [(place, np.flatnonzero(owner == place)) for place in np.unique(owner).tolist()]
        others = []
        if len(jobs) > 1:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(len(self._endpoints) - 1, thread_name_prefix="stallfree-servers")
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
            raise InputError(f"the cache {self.name!r} is closed")
        if self._pid != os.getpid():
            with _after_fork:
                if self._pid != os.getpid():
                    self._here.claim()
                    self._threads, self._lock = None, threading.Lock()
                    self._owed = [(0, 0)] * len(self._owed)
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
os.register_at_fork(before=_after_fork.acquire, after_in_parent=_after_fork.release, after_in_child=_after_fork.release)


def _leave(endpoints: list[Endpoint], here: SharedOnHost) -> None:
    for endpoint in endpoints:
        endpoint.close()
    here.close()


def _attach(*given: Any) -> ServerCache:
    """How a cache travels to a worker."""
    cache = ServerCache.__new__(ServerCache)
    cache._attach(*given)
    return cache


def _place(address: Address) -> str:
    return f"{address}/{address.db}"
