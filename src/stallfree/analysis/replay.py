"""Replays a trace of ids against a policy: the live cache's decisions, without records.

The decisions equal those of the live cache by construction: the same `Space` and `Policy` operate on the same index,
and only the copying of bytes is omitted (`SimulatedCache`).
"""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from stallfree import errors
from stallfree.cache.capacity import free_memory
from stallfree.cache.layout import ALIGN, VERSION, Count, Index, Meta, plan_layout
from stallfree.cache.policies import Oracle, Policy, Victims, make_policy, next_uses
from stallfree.cache.space import Space
from stallfree.datasets.epoch_source import Plan
from stallfree.units import format_size, parse_room, parse_whole

Ids = np.ndarray[Any, np.dtype[np.int64]]
Scores = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class EpochReplay:
    """One epoch of a replay.

    Attributes:
        accesses: requested samples.
        hits: resident ones.
        misses: absent ones; each is one storage operation.
        storage_bytes: bytes of the misses; 0 without sizes.
        evictions: evicted records.
        rejected: misses that were not stored.
    """

    accesses: int
    hits: int
    misses: int
    storage_bytes: int
    evictions: int
    rejected: int

    @property
    def hit_ratio(self) -> float:
        """Hits over accesses; 0 without any."""
        return self.hits / self.accesses if self.accesses else 0.0


@dataclass(frozen=True)
class Replay:
    """The result of `replay`.

    Attributes:
        policy: its name.
        capacity_items: capacity in records of equal size; 0 with `sizes`.
        epochs: in order.
        resident: the resident ids at the end, ascending.

    Example:
        ```python
        result = sf.replay([[0, 1, 2], [2, 1, 0]], policy="minio", capacity=2)
        assert result.epochs[1].hits == 2
        assert result.total.misses == 4
        ```
    """

    policy: str
    capacity_items: int
    epochs: tuple[EpochReplay, ...]
    resident: Ids

    @property
    def total(self) -> EpochReplay:
        """The sum of all epochs."""
        names = EpochReplay.__dataclass_fields__
        return EpochReplay(**{name: sum(getattr(epoch, name) for epoch in self.epochs) for name in names})


def replay(
    trace_or_plans: Any,
    *,
    policy: str | Policy,
    capacity: int | str,
    sizes: Sequence[int] | np.ndarray[Any, np.dtype[Any]] | None = None,
    scores: Any = None,
    batch_size: int = 256,
    on_epoch: Callable[[EpochReplay], object] | None = None,
) -> Replay:
    """Run `policy` over a trace of ids, without data.

    Each batch is looked up as a whole and its misses are stored afterwards, as by a loader; so `batch_size` should be
    the loader's.

    Args:
        trace_or_plans: a sequence of ids (one epoch), or of epochs: plans, arrays or lists of ids.
        policy: "minio", "fifo", "lru", "lfu", "random", "importance" or "oracle", or a `Policy`. The oracle receives
            the next uses from the trace.
        capacity: of the cache. Without `sizes` a number of samples, with them bytes, as an int or a string like "4GiB",
            index included; or a share of all samples or bytes, such as "35%".
        sizes: bytes of each sample, by id. None: all are equal.
        scores: only for "importance": a number for each id, or a row of them for each epoch.
        batch_size: ids per batch.
        on_epoch: called with each finished epoch.

    Every decision equals that of a live cache with the same batches. Raises `InputError` for invalid arguments.

    Example:
        ```python
        epochs = [np.random.permutation(1000) for _ in range(3)]
        result = sf.replay(epochs, policy="minio", capacity="35%")
        assert result.epochs[2].hit_ratio == 0.35
        ```
    """
    epochs = _epochs(trace_or_plans)
    policy = make_policy(policy)
    batch_size = parse_whole(batch_size, "batch_size", 1)
    most = max((int(ids.max()) for ids in epochs if len(ids)), default=-1)
    bytes_of = None if sizes is None else _whole(sizes, 1, "sizes are")
    if bytes_of is not None and len(bytes_of) <= most:
        raise errors.InputError(f"sizes has {len(bytes_of)} numbers: give one for each of the ids 0 to {most}")
    num_ids = most + 1 if bytes_of is None else len(bytes_of)
    if (needed := 64 * num_ids) > (free := free_memory()):
        memory = f"{format_size(needed)} of memory, {format_size(free)} are free"
        raise errors.run_too_large(f"the id {num_ids - 1} takes {memory}: number ids from 0 on, without gaps")
    size = _limit(capacity, num_ids, bytes_of)
    importance = _importance(scores, policy, len(epochs), num_ids)
    uses = next_uses(epochs, num_ids) if isinstance(policy, Oracle) else [None] * len(epochs)
    done = []
    with tempfile.TemporaryDirectory(prefix="stallfree-replay-") as folder:
        cache = SimulatedCache(Path(folder), num_ids, policy, size, bytes_of)
        for number, ids in enumerate(epochs):
            if importance is not None:
                cache.set_scores(np.arange(num_ids), importance[number])
            done.append(cache.replay(ids, uses[number], batch_size))
            if on_epoch is not None:
                on_epoch(done[-1])
        return Replay(policy.name, size if bytes_of is None else 0, tuple(done), cache.resident())


class SimulatedCache:
    """The sample cache without records: computes the ids that would be resident.

    Args:
        folder: for the index.
        num_ids: number of samples.
        policy: eviction policy.
        capacity: records of one size; with `sizes` bytes, index included, laid out as a live cache of that capacity.
        sizes: bytes of each record, or None.

    Attributes:
        rejected: records that were not stored.

    Raises `CapacityError` for a capacity that holds no record.
    """

    def __init__(self, folder: Path, num_ids: int, policy: Policy, capacity: int, sizes: Ids | None) -> None:
        names: dict[str, Any] = {"fingerprint": "", "policy": policy.name, "scored": policy.scored, "on_disk": False}
        if sizes is None:
            one: dict[str, Any] = {"version": VERSION, "block": ALIGN, "num_blocks": capacity, "common": ""}
            meta = Meta(num_ids=num_ids, capacity=capacity, **one, **names)
        else:
            meta = plan_layout(num_ids, capacity, structure=None, typical=int(sizes.mean()), **names)
        Index.create(folder, meta)
        index = self._index = Index(folder, meta)
        victims = None
        if policy.evicts:
            # A longer queue takes more memory and less time, with the same decisions.
            queue, limit = np.zeros(max(64, num_ids // 8), np.complex128), np.zeros(1, np.complex128)
            state = SimpleNamespace(first=index.first, victims=queue, victims_limit=limit)
            victims = Victims(state, np.zeros(2, np.int64))
        self._space = Space(index, policy, lambda start, count: count, victims)
        self.rejected, self._seen = 0, np.zeros(num_ids, np.int64)
        self._sizes = np.zeros(num_ids, np.int64) if sizes is None else sizes
        self.set_scores = self._space.set_scores

    def use(self, ids: Ids) -> Ids:
        """Look `ids` up as one batch, and store the missing ones; return these, with repetitions."""
        resident = self.holds(ids)
        self._space.used(ids[resident])
        missed: Ids = ids[~resident]
        if len(missed):
            times = np.arange(len(missed))
            self._seen[missed[::-1]] = times[::-1]
            self._enter(missed[self._seen[missed] == times])  # the first of equal ids
        return missed

    def _enter(self, ids: Ids) -> None:
        lengths, left = self._sizes[ids], np.arange(len(ids))
        self.rejected += len(ids)
        while len(left) and not self._space.full:
            new, left = self._space.reserve(ids, lengths, left)
            self._space.publish(ids, lengths, new)
            self.rejected -= len(new.at)

    @property
    def evictions(self) -> int:
        """Number of evicted records."""
        return self._index.counters.totals()[Count.EVICTIONS]

    def replay(self, ids: Ids, uses: Scores | None, batch_size: int) -> EpochReplay:
        """Replay an epoch; `uses` are the next uses of its ids, for the oracle."""
        misses, size, evictions, rejected = 0, 0, self.evictions, self.rejected
        for start in range(0, len(ids), batch_size):
            batch = ids[start : start + batch_size]
            if uses is not None:
                self.set_scores(batch, -uses[start : start + batch_size])
            missed = self.use(batch)
            misses, size = misses + len(missed), size + int(self._sizes[missed].sum())
        counts = self.evictions - evictions, self.rejected - rejected
        return EpochReplay(len(ids), len(ids) - misses, misses, size, *counts)

    def holds(self, ids: Ids) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which of `ids` are resident."""
        return self._index.first[ids] != 0  # type: ignore[no-any-return]

    def resident(self) -> Ids:
        """Return the resident ids, ascending."""
        return np.flatnonzero(self._index.first)


def _epochs(trace: Any) -> list[Ids]:
    """The ids of each epoch. Raises `InputError` for what holds none."""
    if isinstance(trace, Plan) or (isinstance(trace, np.ndarray) and trace.ndim == 1):
        trace = [trace]
    if not isinstance(trace, Iterable):
        raise errors.InputError(f"trace_or_plans={trace!r:.80}: give ids, or a sequence of plans or of ids of epochs")
    items = list(trace)
    if items and all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in items):
        items = [items]
    return [item.ids if isinstance(item, Plan) else _whole(item, 0, "a trace holds") for item in items]


def _whole(values: Any, least: int, what: str) -> Ids:
    """Integers as an array. Raises `InputError` for anything else, and for less than `least`."""
    try:
        numbers = np.asarray(values)
    except ValueError:
        numbers = np.empty((0, 0))
    if numbers.ndim != 1 or (len(numbers) and (numbers.dtype.kind not in "iu" or numbers.min() < least)):
        raise errors.InputError(f"{what} {values!r:.80}: give integers of {least} or more")
    return numbers.astype(np.int64)


def _importance(values: Any, policy: Policy, epochs: int, num_ids: int) -> Scores | None:
    """One row for each epoch, or None for policies that need no scores."""
    if not policy.given or isinstance(policy, Oracle):
        if values is None:
            return None
        raise errors.argument_conflict(f"scores are for 'importance' only, not for {policy.name!r}: leave them out")
    try:
        scores = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        scores = np.empty(0)
    if scores.shape not in ((num_ids,), (epochs, num_ids)) or np.isnan(scores).any():
        expected = f"a number for each of the ids 0 to {num_ids - 1}, or a row of them for each of {epochs} epochs"
        raise errors.InputError(f"scores={values!r:.80}, policy={policy.name!r}: give {expected}, none of them NaN")
    return np.broadcast_to(scores, (epochs, num_ids))


def _limit(capacity: int | str, num_ids: int, sizes: Ids | None) -> int:
    """The capacity in samples, or in bytes if there are sizes."""
    if sizes is None and not (isinstance(capacity, str) and capacity.strip().endswith("%")):
        return min(parse_whole(capacity, "capacity", 1), num_ids)
    size, total = parse_room(capacity, "capacity"), num_ids if sizes is None else int(sizes.sum())
    if size == 0:
        raise errors.InputError(f"capacity={capacity!r}: give more than nothing")
    if isinstance(size, float):
        return max(1, int(size * total))
    return min(size, 2 * total + 512 * num_ids + (1 << 20))  # the bytes of all records and their index
