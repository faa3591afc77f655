"""Rebatching: splits and joins a group's batches (*chunks*) into the batches of one job, partitioned by rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stallfree.datasets.ranks import Ranks
from stallfree.errors import collate_output
from stallfree.loader.messages import Ids
from stallfree.loader.order import Order


@dataclass(frozen=True)
class ChunkRows:
    """Contiguous rows of a chunk, with their ids."""

    data: Any
    ids: Ids


class Rebatching:
    """Makes the batches of one rank in one epoch.

    A *unit* is what all ranks of the job consume in one step: `batch_size` samples each. The last unit may be smaller;
    its samples are split evenly. If it has fewer samples than ranks, samples are repeated, as in torch's
    `DistributedSampler`, so that all ranks have the same number of batches.

    Args:
        samples: number of samples of the data set.
        chunk: samples per chunk.
        batch_size: samples per batch of one rank.
        rank: rank of this process.
        ranks: number of ranks.
        drop_last: drop an incomplete last unit.
        planned: returns the planned ids of chunk n. Called only for chunks with missing samples.
    """

    def __init__(
        self,
        samples: int,
        chunk: int,
        batch_size: int,
        rank: int,
        ranks: int,
        drop_last: bool,
        planned: Callable[[int], Ids],
    ) -> None:
        self._samples, self._chunk, self._size = samples, chunk, batch_size
        self._rank, self._ranks = rank, ranks
        self._unit = batch_size * ranks
        self._units = samples // self._unit if drop_last else -(-samples // self._unit)
        self._planned = planned
        self._whole = self._unit == chunk and ranks == 1
        self._waiting: dict[int, dict[int, ChunkRows]] = {}  # unit -> chunk -> its part

    def __len__(self) -> int:
        return self._units

    @property
    def chunks(self) -> int:
        """Number of chunks needed, counted from the first."""
        return -(-min(self._units * self._unit, self._samples) // self._chunk)

    def first_chunk(self, done: Collection[int]) -> int:
        """Return the first chunk that is needed if the batches `done` are not."""
        missing = next((unit for unit in range(self._units) if unit not in done), None)
        return self.chunks if missing is None else missing * self._unit // self._chunk

    def feed(self, number: int, data: Any, ids: Ids) -> Iterator[tuple[int, Any, Ids]]:
        """Add chunk `number`, in any order, with the samples `ids` (empty if the chunk failed).

        Yields (number, data, ids) of the batches that it completes.
        """
        if self._whole:
            if len(ids) and number < self._units:
                yield number, data, ids
            return
        first = number * self._chunk
        end = min(first + self._chunk, self._samples)
        rows = self._rows(number, ids, end - first)
        for unit in range(first // self._unit, min(-(-end // self._unit), self._units)):
            start, stop = self._rank_range(unit)
            parts = self._waiting.setdefault(unit, {})
            low, high = (int(rows[min(max(at, first), end) - first]) for at in (start, stop))
            parts[number] = ChunkRows(cut(data, low, high, len(ids)) if low < high else None, ids[low:high])
            if len(parts) == self._chunks_of(unit):
                del self._waiting[unit]
                there = [parts[at] for at in sorted(parts) if len(parts[at].ids)]
                if there:
                    joined = there[0].ids if len(there) == 1 else np.concatenate([part.ids for part in there])
                    yield unit, join([part.data for part in there]), joined

    def _chunks_of(self, unit: int) -> int:
        first = unit * self._unit
        end = min(first + self._unit, self._samples)
        return -(-end // self._chunk) - first // self._chunk

    def _rank_range(self, unit: int) -> tuple[int, int]:
        """Return this rank's range of positions in a unit, counted from the start of the epoch."""
        first = unit * self._unit
        count = min(self._unit, self._samples - first)
        if count < self._ranks:
            at = first + self._rank % count
            return at, at + 1
        return first + self._rank * count // self._ranks, first + (self._rank + 1) * count // self._ranks

    def _rows(self, number: int, ids: Ids, count: int) -> Ids:
        """Map each position of a chunk, and its end, to a row of the data; skipped samples have no row."""
        if len(ids) == count:
            return np.arange(count + 1)
        there = np.isin(self._planned(number), ids) if len(ids) else np.zeros(count, bool)
        return np.concatenate([[0], np.cumsum(there)])


def rebatching_of(
    order: Order, samples: int, chunk: int, batch_size: int, ranks: Ranks, drop_last: bool, epoch: int
) -> Rebatching:
    """Return the rebatching of an epoch whose chunks come in `order`."""

    def planned(number: int) -> Ids:
        return next(iter(order.batches(epoch, number)))

    return Rebatching(samples, chunk, batch_size, ranks.rank, ranks.count, drop_last, planned)


def cut(data: Any, start: int, stop: int, rows: int) -> Any:
    """Slice rows `start` to `stop` - 1 of a batch that `default_collate` made of `rows` samples, without a copy."""
    if start == 0 and stop == rows:
        return data
    if isinstance(data, torch.Tensor):
        return data[start:stop]
    if isinstance(data, Mapping):
        return _like(data, {key: cut(value, start, stop, rows) for key, value in data.items()})
    if isinstance(data, (tuple, list)):
        if _is_column(data):
            return data[start:stop]
        return _sequence(data, [cut(value, start, stop, rows) for value in data])
    raise collate_output(f"a batch with a {type(data).__name__} cannot be split: {_SAME}")


def join(batches: list[Any]) -> Any:
    """Concatenate batches that `default_collate` made."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(batches)
    if isinstance(first, Mapping):
        return _like(first, {key: join([batch[key] for batch in batches]) for key in first})
    if isinstance(first, (tuple, list)):
        if _is_column(first):
            return type(first)(item for batch in batches for item in batch)
        return _sequence(first, [join(list(column)) for column in zip(*batches, strict=True)])
    raise collate_output(f"batches with a {type(first).__name__} cannot be joined: {_SAME}")


_SAME = "give the group's chunk size as batch_size"


def _is_column(data: Any) -> bool:
    """Return whether a list holds one item per sample: strings and bytes are not stacked."""
    return len(data) > 0 and all(isinstance(item, (str, bytes)) for item in data)


def _like(data: Any, items: dict[Any, Any]) -> Any:
    try:
        return type(data)(items)
    except TypeError:
        return items


def _sequence(data: Any, items: list[Any]) -> Any:
    if hasattr(data, "_fields"):
        return type(data)(*items)
    return tuple(items) if isinstance(data, tuple) else items
