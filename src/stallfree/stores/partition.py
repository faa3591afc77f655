"""The sample cache of a data set that is spread over the nodes of a job.

Each node keeps the samples that it owns in an arena of its own, a `SampleCache`, from which its processes read without
a word to anybody. Samples of other nodes are asked for through their post offices (post.py). Who owns what follows from
the names of the nodes (spread.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from stallfree.cache import MISS, Aim, Policy, SampleCache
from stallfree.cache.checks import EVERY_STEP, checked_scores
from stallfree.errors import CodecError, InputError
from stallfree.pipeline.codec import encode, read_record
from stallfree.pipeline.structure import Structure
from stallfree.stats import StoreStats
from stallfree.stores.breaker import AT_ONCE, shared_cells
from stallfree.stores.post import BUSY, PostOffice
from stallfree.stores.spread import owners
from stallfree.stores.values import DataKey

Array = npt.NDArray[Any]
T = TypeVar("T")

_PATIENCE = 0.25
"""Seconds that one batch waits for clerks that are behind, at most."""

_BACK_OFF = 0.2
"""Seconds for which nothing is handed to a node whose server has no room."""


class PartitionedCache:
    """What the job holds of a data set, as one process sees it. Has the methods of `SampleCache` that loaders use.

    `resident`, `structure`, `aim` and `gather` tell of this node's own part only. Samples of others are asked for with
    `ask`, node by node, so that the nodes can be asked at the same time.

    Args:
        local: the part of this node.
        names: of all nodes, in the same order everywhere.
        me: the place of this node among them.
        offices: the post office of each node, this one's too; none for a single node.
        key: of the data set.
    """

    def __init__(
        self, local: SampleCache, names: Sequence[str], me: int, offices: Sequence[PostOffice], key: DataKey
    ) -> None:
        self.local, self.me, self.key = local, me, key
        self._names, self._offices = list(names), list(offices)
        self._owners: Array | None = _shared_owners(local.path, local.num_ids, self._names)
        if self._offices:
            cells = shared_cells(local.path / f"lost-{_digest(self._names)}", 2 * len(self._offices))
            for place, office in enumerate(self._offices):
                office.share(*cells[2 * place : 2 * place + 2])
        self._pauses = [0.0] * len(self._names)  # until when nothing is handed in
        self._warned = False
        self._last: StoreStats | None = None

    @property
    def _owner(self) -> Array:
        if self._owners is None:
            raise InputError(f"the cache {self.name!r} is closed: make a new one")
        return self._owners

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def num_ids(self) -> int:
        """Number of samples of the data set."""
        return self.local.num_ids

    @property
    def name(self) -> str:
        """Of the data set in the store."""
        return self.local.name

    @property
    def num_nodes(self) -> int:
        """Nodes over which the data set is spread."""
        return len(self._names)

    @property
    def policy(self) -> Policy:
        """Of this node's part."""
        return self.local.policy

    @property
    def fingerprint(self) -> str:
        """Says which samples these are."""
        return self.local.fingerprint

    @property
    def path(self) -> Path:
        """The folder of this node's part."""
        return self.local.path

    @property
    def structure(self) -> Structure | None:
        """The structure that all samples share, or None if there is none."""
        return self.local.structure

    @property
    def capacity(self) -> int:
        """Bytes that this node's part may take."""
        return self.local.capacity

    @property
    def complete(self) -> bool:
        """Whether this node has all samples."""
        return self.local.complete

    @property
    def allow_pickle(self) -> bool:
        """Whether samples that the codec does not know are pickled, and travel so."""
        return self.local.allow_pickle

    def resident(self, ids: Any) -> Array:
        """Which of `ids` (integers) are in this node's memory: an array of bool."""
        return self.local.resident(ids)

    def owner(self, ids: Any) -> Array:
        """The place of the node that owns each of `ids` (integers) among the nodes of the job: int16."""
        return self._owner[self.local.checked(ids)]

    def populate(self) -> None:
        """As `SampleCache.populate`."""
        self.local.populate()

    def stats(self) -> StoreStats:
        """The counts over all processes of this node; after `close`, those of that moment."""
        if self._last is not None:
            return self._last
        local = self.local.stats()
        return StoreStats(**local.__dict__, other_hits=self.local.other_hits)

    def set_scores(self, ids: Any, scores: Any) -> None:
        """As `SampleCache.set_scores`, for those of `ids` that this node owns."""
        wanted = self.local.checked(ids)
        mine = self.here(wanted)
        self.local.set_scores(wanted[mine], checked_scores(scores, len(wanted))[mine])

    def drop(self, ids: Any) -> None:
        """As `SampleCache.drop`, for those of `ids` that this node owns."""
        wanted = self.local.checked(ids)
        self.local.drop(wanted[self.here(wanted)])

    def count_fetch(self, reads: int, size: int) -> None:
        """Count `reads` fetches from the source that brought `size` bytes."""
        self.local.count_fetch(reads, size)

    @property
    def uncached_steps(self) -> int:
        """See `SampleCache.uncached_steps`. 0, or `EVERY_STEP`: this kind of cache is then not used any more."""
        return self.local.uncached_steps

    def uncache_steps(self, count: int) -> bool:
        """Do not use this cache any more, on this host; whether it was used until now. See `SampleCache`."""
        return self.local.uncache_steps(EVERY_STEP)

    # -- reading ------------------------------------------------------------------------------------------------------

    def here(self, ids: Array) -> Array:
        """Which of `ids` this node owns: an array of bool."""
        return self._owner[ids] == self.me  # type: ignore[no-any-return]

    def lost(self, ids: Array) -> Array:
        """Which of `ids` belong to another node that does not answer at present: an array of bool. Asks nobody."""
        lost = [place != self.me and office.lost for place, office in enumerate(self._offices)]
        return np.array(lost or [False])[self._owner[ids]]

    def owns(self, id: int) -> bool:
        """Whether this node owns sample `id`."""
        return bool(self._owner[id] == self.me)

    def away(self, ids: Array) -> list[Array]:
        """Those of `ids` that other nodes own: an array for each of these nodes."""
        owner = self._owner[ids]
        return [ids[owner == place] for place in np.unique(owner).tolist() if place != self.me]

    def ask(self, ids: Array) -> list[Any]:
        """The samples of `ids`, which one other node owns; `MISS` for those that it has not, or when it is lost.

        They may share memory, which lives as long as any of them.
        """
        if not len(ids):
            return []
        office = self._offices[int(self._owner[ids[0]])]
        values: list[Any] = []
        for record in office.ask(self.key, ids, self._typical()):
            value = MISS
            if record is not None:
                with contextlib.suppress(CodecError):  # of another version, or a pickle: it is fetched
                    value = read_record(record, copy=False, allow_pickle=self.allow_pickle)
            values.append(value)
        hits = sum(value is not MISS for value in values)
        self.local.count_others(hits, len(values) - hits)
        return values

    parts, read = away, ask

    def settle(self, ids: Array) -> Array:
        """Which of `ids`, that this node owns and did not hold, it still does not hold: an array of bool.

        What other nodes have handed in before is put away first. Nothing is waited for when the node is full.
        """
        if self._offices and not self.local.full:
            self._offices[self.me].settle()
        return ~self.local.resident(ids)

    def get_here(self, ids: Array) -> list[Any]:
        """The samples of `ids`, `MISS` for those that this node does not own or does not hold."""
        mine = self._owner[ids] == self.me
        if mine.all():
            return self.local.get_many(ids)
        values: list[Any] = [MISS] * len(ids)
        at = np.flatnonzero(mine)
        for position, value in zip(at.tolist(), self.local.get_many(ids[at]), strict=True):
            values[position] = value
        return values

    def get_many(self, ids: Any) -> list[Any]:
        """The samples of `ids`, `MISS` for those that no node holds. Other nodes are asked one after the other."""
        wanted = self.local.checked(ids)
        values = self.get_here(wanted)
        owner = self._owner[wanted]
        for place in np.unique(owner).tolist():
            if place != self.me:
                at = np.flatnonzero(owner == place)
                for position, value in zip(at.tolist(), self.ask(wanted[at]), strict=True):
                    values[position] = value
        return values

    def get(self, id: int) -> Any:
        """One sample, or `MISS`."""
        return self.get_many([id])[0]

    def aim(self, outs: Sequence[Array]) -> Aim:
        """As `SampleCache.aim`."""
        return self.local.aim(outs)

    def gather(self, ids: Any, into: Aim | Sequence[Array]) -> Array:
        """As `SampleCache.gather`: out of this node's part."""
        return self.local.gather(ids, into)

    def _typical(self) -> int:
        """Bytes of a usual record, as far as this node knows."""
        stats = self.local.stats()
        return stats.resident_bytes // stats.resident_items if stats.resident_items else 1 << 20

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(self, ids: Any, values: Sequence[Any]) -> Array:
        """Store `values` as the samples of `ids` at their owners; which of them were taken, as an array of bool.

        Those of other nodes are handed in at their post offices, which put them away in order, before they answer
        what is asked later. Raises like `SampleCache.put_many`.
        """
        wanted = self.local.checked(ids)
        if len(wanted) != len(values):
            raise InputError(f"put_many was given {len(wanted)} ids and {len(values)} values: give one for each")
        owner = self._owner[wanted]
        taken = np.zeros(len(wanted), bool)
        until = time.monotonic() + _PATIENCE
        for place in np.unique(owner).tolist():
            at = np.flatnonzero(owner == place)
            some = [values[position] for position in at.tolist()]
            if place == self.me:
                taken[at] = self.local.put_many(wanted[at], some)
            else:
                taken[at] = self._hand_in(place, wanted[at], some, until)
        return taken

    def put(self, id: int, value: Any) -> bool:
        """Store one sample; whether it was taken."""
        return bool(self.put_many([id], [value])[0])

    def _hand_in(self, place: int, ids: Array, values: Sequence[Any], until: float) -> bool:
        office = self._offices[place]
        if office.lost or time.monotonic() < self._pauses[place]:
            return False
        records = [encode(value, allow_pickle=self.allow_pickle) for value in values]
        answer = office.hand_in(self.key, ids.tolist(), records, until)
        if answer is BUSY:
            self._pauses[place] = time.monotonic() + _BACK_OFF
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the server of {self._names[place]} has no room for more samples on their way to it: some are "
                    "not stored for a while",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return answer is True

    def clear(self) -> None:
        """Drop all records of this data set on all nodes that can be reached."""
        self.local.clear()
        self._ask_others(lambda office: office.clear(self.key))

    def num_keys(self) -> int:
        """Samples of this data set that are held, on all nodes that can be reached."""
        return self.local.stats().resident_items + sum(self._ask_others(lambda office: office.num_keys(self.key)))

    def _ask_others(self, call: Callable[[PostOffice], T]) -> list[T]:
        """What `call` gives for each of the other nodes: at the same time, as some of them may be lost."""
        others = [office for place, office in enumerate(self._offices) if place != self.me]
        if len(others) < 2:
            return [call(office) for office in others]
        with ThreadPoolExecutor(min(len(others), AT_ONCE)) as pool:
            return list(pool.map(call, others))

    def close(self) -> None:
        """Leave the cache. May be called twice."""
        if self._last is None:
            self._last = self.stats()
            self._owners = None
        for office in self._offices:
            office.close()
        self.local.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return PartitionedCache, (self.local, self._names, self.me, self._offices, self.key)

    def __enter__(self) -> PartitionedCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _digest(names: Sequence[str]) -> str:
    return str(xxhash.xxh3_128_hexdigest("\0".join(names).encode()))


def _shared_owners(folder: Path, num_ids: int, names: Sequence[str]) -> Array:
    """The owner of each id, computed by the first process of this node and mapped by the others."""
    file = folder / f"owners-{_digest(names)}.npy"
    try:
        found = np.load(file, mmap_mode="r")
    except (OSError, ValueError):
        making = folder / f"making-{os.getpid()}-{secrets.token_hex(4)}.npy"
        np.save(making, owners(num_ids, names))
        os.replace(making, file)
        found = np.load(file, mmap_mode="r")
    return found  # type: ignore[no-any-return]
