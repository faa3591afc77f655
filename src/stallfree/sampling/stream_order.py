"""The order of an iterable data set: a batch of each stream in turn, as under torch's loader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from stallfree.batches.stream import stream_ids
from stallfree.frames import users_level
from stallfree.pipeline.classify.determinism import StallfreeWarning
from stallfree.sampling.epoch_source import EpochPlan, EpochSource, Ids, Position, SourceSetup
from stallfree.sampling.order import Order


class _Shuffled(Order):
    """All samples of streams that a cache holds, in an order that depends on (seed, epoch)."""

    def __init__(self, setup: SourceSetup, table: Ids) -> None:
        super().__init__(replace(setup, samples=len(table), shuffle=True, reader=None))
        self._table = table

    def ids(self, epoch: int, start: int = 0) -> Ids:
        found: Ids = self._table[super().ids(epoch, start)]
        return found


class StreamOrder(EpochSource):
    """Batches of streams in rounds: one of each stream that has not ended. The data decide which samples there are."""

    planned: bool = True  # a state has no ids

    def __init__(self, setup: SourceSetup) -> None:
        self._setup = setup
        self._reader = setup.reader
        self._dataset, self._streams = setup.reader.source.dataset, setup.reader.streams
        self._shuffled: _Shuffled | None = None
        self._next = 0
        self._length: int | None = None  # of the data set, if the user has asked for it: else no warning

    @property
    def knows_ranks(self) -> bool:
        """False: Accelerate would deal out the batches of torch's loader."""
        return False

    @property
    def next_epoch(self) -> int:
        return self._next

    def num_batches(self, epoch: int) -> int:
        if self._reader.table is not None:
            return self._setup.num_batches(len(self._reader.table))
        self._length = len(self._dataset)
        return self._setup.num_batches(self._length)

    def describe(self) -> dict[str, Any]:
        return {"batch_size": self._setup.size, "streams": self._streams}

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["batches"]:
            warnings.warn(
                f"the state was taken after {state['batches']} batches of epoch {state['epoch']}, and a stream can "
                "only be read from its start: the next iteration begins that epoch again, as under torch's loader",
                StallfreeWarning,
                stacklevel=users_level(),
            )

    def begin(self, epoch: int, resume: Position | None) -> EpochPlan:
        self._next = epoch + 1
        if self._reader.table is not None:
            self._shuffled = _Shuffled(self._setup, self._reader.table)
            return self._shuffled.begin(epoch, resume)
        ended: set[int] = set()
        return EpochPlan(
            self._batches(ended),
            count=None if self._length is None else partial(self._count, [self._length]),
            end_stream=lambda ids: ended.add(int(ids[0]) % self._streams),
        )

    def set_seed(self, seed: int) -> None:
        if self._shuffled is not None:
            self._shuffled.set_seed(seed)

    def _batches(self, ended: set[int]) -> Iterator[Ids]:
        for first in count(0, self._setup.size):
            for number in range(self._streams):
                if number not in ended:
                    yield stream_ids(number, self._streams, first, self._setup.size)
            if len(ended) == self._streams:
                return

    def _count(self, left: list[int], ids: Ids) -> None:
        """Warn once, as torch's loader does, if there are more samples than the data set has said."""
        before, left[0] = left[0], left[0] - len(ids)
        if before >= 0 > left[0]:
            warnings.warn(
                f"the length of {type(self._dataset).__name__} is {self._length}, and more samples have come: "
                "len(loader) is too small. Each worker iterates over its own copy of the data set: let its __iter__ "
                "yield the part of torch.utils.data.get_worker_info()",
                StallfreeWarning,
                stacklevel=users_level(),
            )
