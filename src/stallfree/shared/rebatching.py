"""Rebatching: splits and joins a group's batches (*chunks*) into the batches of one job, partitioned by rank."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from stallfree.datasets.ranks import Ranks
from stallfree.errors import collate_output
from stallfree.loader.messages import Ids


class Rebatching:
    """Makes the batches of one rank in one epoch.

    A *unit* is what all ranks of the job consume in one step: `batch_size` samples each. The last unit may be smaller;
    its samples are split evenly. If it has fewer samples than ranks, samples are repeated, as in torch's
    `DistributedSampler`, so that all ranks have the same number of batches.

    Args:
        samples: number of samples of the data set.
        chunk: samples per chunk, a multiple or a divisor of those of a unit.
        batch_size: samples per batch of one rank.
        ranks: rank of this process, and number of ranks.
        drop_last: drop an incomplete last unit.
        planned: returns the planned ids of chunk n. Called only for chunks with missing samples.
    """

    def __init__(
        self, samples: int, chunk: int, batch_size: int, ranks: Ranks, drop_last: bool, planned: Callable[[int], Ids]
    ) -> None:
        self._samples, self._chunk, self._ranks, self._planned = samples, chunk, ranks, planned
        self._unit = batch_size * ranks.count
        self._units = samples // self._unit if drop_last else -(-samples // self._unit)
        self._parts: list[tuple[Any, Ids]] = []  # data and ids of the unit that is not complete

    def __len__(self) -> int:
        return self._units

    @property
    def chunks(self) -> int:
        """Number of chunks needed, counted from the first."""
        return -(-min(self._units * self._unit, self._samples) // self._chunk)

    def first_chunk(self, done: int) -> int:
        """Return the first chunk that is needed if the first `done` batches are not."""
        return min(done * self._unit // self._chunk, self.chunks)

    def feed(self, number: int, data: Any, ids: Ids) -> Iterator[tuple[int, Any, Ids]]:
        """Add chunk `number`, the one after the last, with the samples `ids` (empty if the chunk failed).

        Yields (number, data, ids) of the batches that it completes.
        """
        if self._unit == self._chunk and self._ranks.count == 1:  # also batches that cannot be split
            if len(ids) and number < self._units:
                yield number, data, ids
            return
        first = number * self._chunk
        end = min(first + self._chunk, self._samples)
        rows = self._rows(number, ids, end - first)
        for unit in range(first // self._unit, min(-(-end // self._unit), self._units)):
            low, high = (int(rows[min(max(at, first), end) - first]) for at in self._rank_range(unit))
            if low < high:
                self._parts.append((cut(data, low, high, len(ids)), ids[low:high]))
            if end >= min((unit + 1) * self._unit, self._samples):
                parts, self._parts = self._parts, []
                if parts:
                    yield unit, join([data for data, _ in parts]), np.concatenate([ids for _, ids in parts])

    def _rank_range(self, unit: int) -> tuple[int, int]:
        """Return this rank's range of positions in a unit, counted from the start of the epoch."""
        rank, ranks, first = self._ranks.rank, self._ranks.count, unit * self._unit
        count = min(self._unit, self._samples - first)
        if count < ranks:
            at = first + rank % count
            return at, at + 1
        return first + rank * count // ranks, first + (rank + 1) * count // ranks

    def _rows(self, number: int, ids: Ids, count: int) -> Ids:
        """Map each position of a chunk, and its end, to a row of the data; skipped samples have no row."""
        if len(ids) == count:
            return np.arange(count + 1)
        present = np.isin(self._planned(number), ids) if len(ids) else np.zeros(count, bool)
        return np.concatenate([[0], np.cumsum(present)])


def cut(data: Any, start: int, stop: int, rows: int) -> Any:
    """Slice rows `start` to `stop` - 1 of a batch that `default_collate` made of `rows` samples, without a copy."""
    if start == 0 and stop == rows:
        return data
    return tree_map(lambda leaf: _checked(leaf, "split")[start:stop], data, is_leaf=_is_column)


def join(batches: list[Any]) -> Any:
    """Concatenate batches that `default_collate` made."""
    if len(batches) == 1:
        return batches[0]
    trees = [tree_flatten(batch, is_leaf=_is_column) for batch in batches]
    joined: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in trees), strict=True):
        kind = type(_checked(leaves[0], "joined"))
        joined.append(
            torch.cat(leaves) if issubclass(kind, torch.Tensor) else kind(item for leaf in leaves for item in leaf)
        )
    return tree_unflatten(joined, trees[0][1])


def _is_column(data: Any) -> bool:
    """Return whether a list holds one item per sample: strings and bytes are not stacked."""
    return isinstance(data, (tuple, list)) and len(data) > 0 and all(isinstance(item, (str, bytes)) for item in data)


def _checked(leaf: Any, what: str) -> Any:
    if isinstance(leaf, torch.Tensor) or _is_column(leaf):
        return leaf
    raise collate_output(
        f"a batch with a {type(leaf).__name__} cannot be {what}: give the group's chunk size as batch_size"
    )
