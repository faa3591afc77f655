"""Sources, data sets and transforms of known values, importable by processes that tests start."""

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from stallfree import Compose, mark_deterministic
from stallfree.sources.mapped import BaseSource
from torch_batches import digest as as_plain  # noqa: F401


class Given(BaseSource):
    """Records as they are given; an exception among them is raised."""

    def __init__(self, records: Iterable[Any], steps: Sequence[Any] = ()) -> None:
        self.records, self.pipeline = list(records), Compose(steps)
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.records)

    def _record(self, id: int) -> Any:
        self.fetched.append(id)
        if isinstance(self.records[id], Exception):
            raise self.records[id]
        return self.records[id]

    def _where(self, id: int) -> str:
        return f"given/{id}"

    def fingerprint(self) -> str:
        return f"Given {len(self)} {self.records!r}"


class Numbers(Given):
    """`samples` records `(int64 array, id)` kept in memory, so that whoever changes one in place changes it for good.

    Record `id` has `size` numbers; with `spread`, `size + id % spread`.
    """

    def __init__(self, samples: int = 12, steps: Sequence[Any] = (), *, size: int = 16, spread: int = 1) -> None:
        super().__init__([np.full(size + id % spread, id, np.int64) for id in range(samples)], steps)
        self.kind = size, spread

    def _record(self, id: int) -> Any:
        return self.records[id], id

    def fingerprint(self) -> str:
        return f"Numbers {len(self)} {self.kind}"


class Meeting(Given):
    """Fetches that wait for one another: they pass only when `parties` of them are under way at once."""

    def __init__(self, samples: int, parties: int) -> None:
        super().__init__(range(samples))
        self.barrier = threading.Barrier(parties)

    def _record(self, id: int) -> Any:
        self.barrier.wait(60)
        return id


class Plain(Dataset[Any]):
    def __init__(self, samples: int = 12, transform: Callable[[Any], Any] | None = None, *, width: int = 4) -> None:
        self.values = torch.arange(samples * width, dtype=torch.float32).reshape(samples, width)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, id: int) -> Any:
        value = self.values[id]
        return (value if self.transform is None else self.transform(value)), id


@mark_deterministic
def doubled_in_place(sample: Any) -> Any:
    """`(2 * array, label)`, in the memory of the array."""
    sample[0][...] *= 2
    return sample


def doubled(sample: Any) -> Any:
    return sample[0] * 2, sample[1]


def tripled(sample: Any) -> Any:
    return sample[0] * 3, sample[1]


def widened(sample: Any) -> Any:
    return np.repeat(sample[0], 16), sample[1]


def shifted_in_place(sample: Any) -> Any:
    """Adds a number that is drawn, in the memory of the array."""
    sample[0][...] += random.randrange(1, 1 << 40)
    return sample


def with_draws(sample: Any) -> Any:
    """`(array, label, draws)`: numbers from each of the global generators."""
    return sample[0], sample[1], random.random(), float(np.random.rand()), float(torch.rand(()))


def jittered(value: torch.Tensor) -> torch.Tensor:
    return value + torch.rand(())
