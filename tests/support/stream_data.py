"""Iterable data sets for the tests of the loader, where every worker can import them."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


def worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


def sample(number: int, position: int) -> Any:
    """A sample that says where it is from, with a draw of each process-wide generator."""
    draws = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
    return {"at": torch.tensor([number, position]), "draws": draws, "name": f"{number}.{position}"}


class Stream(IterableDataset[Any]):
    """`lengths[w]` samples in worker `w`; its iterator raises at the positions `bad` and can go on after that."""

    def __init__(self, lengths: list[int], bad: tuple[int, ...] = ()) -> None:
        self.lengths, self.bad = lengths, bad

    def __iter__(self) -> Iterator[Any]:
        return map(self._sample, range(self.lengths[worker()]))

    def _sample(self, position: int) -> Any:
        if position in self.bad:
            raise FileNotFoundError(2, "no such shard", f"shard-{position}")
        return sample(worker(), position)


class Generated(Stream):
    """The same by a generator, which is over after an exception."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Sized(IterableDataset[torch.Tensor]):
    """Numbers, all of them in each worker; with a length."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(number + 1000 * self.epoch) for number in range(self.count)])


class Stateful(Sized):
    """The same, which resumes by its own state, that of the running iteration, and counts the samples that it makes."""

    made, position, start = 0, 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, self.start = self.start, 0
        for number in range(first, self.count):
            self.position, self.made = number + 1, self.made + 1
            yield torch.tensor(number + 1000 * self.epoch)


class Drawn(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return (torch.rand(()).item() for _ in range(9))


@dataclass(eq=False)
class Held(IterableDataset[int]):
    """Endless, and calls `end` when its iterator ends."""

    end: Callable[[], object]

    def __iter__(self) -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            self.end()
