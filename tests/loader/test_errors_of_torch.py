"""Errors are of the types that torch's loader raises in the same place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data as tud

import stallfree as sf

NUMBERS = list(range(8))


class Data:
    """A data set whose sample 5 is made by `make`."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, id: int) -> Any:
        return self.make(id) if id == 5 else id


class Stream(tud.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(NUMBERS)


class Own(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


def faulty_sampler() -> Iterator[int]:
    yield 0
    raise KeyError("of the sampler")


def sleeps(_: int) -> None:
    time.sleep(2)


ERRORS = [ValueError("x"), KeyError("x"), FileNotFoundError(2, "x", "file"), Own(1, 2), MemoryError(), IndexError("x")]

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "batch_size": (NUMBERS, {"batch_size": 0}),
    "num_workers": (NUMBERS, {"num_workers": -1}),
    "timeout": (NUMBERS, {"timeout": -1}),
    "prefetch_factor": (NUMBERS, {"num_workers": 1, "prefetch_factor": -1}),
    "persistent_workers": (NUMBERS, {"persistent_workers": True}),
    "sampler and shuffle": (NUMBERS, {"shuffle": True, "sampler": NUMBERS}),
    "batch_sampler and batch_size": (NUMBERS, {"batch_size": 2, "batch_sampler": [[0]]}),
    "drop_last of single samples": (NUMBERS, {"batch_size": None, "drop_last": True}),
    "a shuffled stream": (Stream(), {"shuffle": True}),
    "a stream with a sampler": (Stream(), {"sampler": NUMBERS}),
    "context": (NUMBERS, {"num_workers": 1, "multiprocessing_context": "thread"}),
    "no samples to shuffle": ([], {"shuffle": True}),
    "an id out of range": (NUMBERS, {"sampler": [99]}),
    "a sampler that raises": (NUMBERS, {"sampler": faulty_sampler()}),
    "samples of different shapes": ([torch.zeros(2), torch.zeros(3)], {"batch_size": 2}),
    "a sample that is None": (Data(raising(TypeError("x"))), {}),
    **{f"sample: {error!r}": (Data(raising(error)), {"batch_size": 2}) for error in ERRORS},
    **{f"collate_fn: {error!r}": (NUMBERS, {"collate_fn": raising(error)}) for error in ERRORS},
    "a wait": (Data(sleeps), {"batch_size": 2, "num_workers": 1, "timeout": 0.2}),
}


def raised(kind: Any, dataset: Any, options: dict[str, Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        list(kind(dataset, **options))
    return caught.value


@pytest.mark.parametrize("case", CASES)
def test_the_type_is_that_of_torchs_loader(case: str) -> None:
    dataset, options = CASES[case]
    theirs = raised(tud.DataLoader, dataset, options)
    if case == "a sampler that raises":
        options = {"sampler": faulty_sampler()}
    assert isinstance(raised(sf.DataLoader, dataset, options), type(theirs))
