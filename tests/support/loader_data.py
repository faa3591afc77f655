"""Data sets, functions and comparisons for the tests of the loader, where every worker can import them."""

import contextlib
import os
import random
import zlib
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

import stallfree as sf


@dataclass(eq=False)
class Made:
    """A data set of `count` samples that `make(id)` gives."""

    count: int
    make: Callable[[int], Any]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> Any:
        return self.make(id)


@contextlib.contextmanager
def loading(data: Any, *arguments: Any, cached: bool = False, **options: Any) -> Iterator[sf.DataLoader]:
    """A loader of `data` or of a cache of it, with workers that persist if there are any. Both end with the block."""
    with contextlib.ExitStack() as stack:
        if cached:
            data = stack.enter_context(sf.CachedDataset(data, capacity="32MiB"))
        options = {"persistent_workers": options.get("num_workers", 0) > 0} | options
        yield stack.enter_context(sf.DataLoader(data, *arguments, **options))


@dataclass
class Failing:
    """Makes each id a tensor; raises `error(id)` for some of them."""

    error: Callable[[int], BaseException]
    ids: tuple[int, ...] = (5,)

    def __call__(self, id: int) -> torch.Tensor:
        if id in self.ids:
            raise self.error(id)
        return torch.tensor(id)


class Missing(FileNotFoundError):
    """Takes other arguments than an exception does, and holds more."""

    def __init__(self, folder: str, name: str, *, tries: int) -> None:
        super().__init__(2, "no such volume", f"{folder}/{name}")
        self.tries = tries


def local() -> Exception:
    class Hidden(LookupError):
        pass

    return Hidden("seen")


class Gate:
    """Holds up sample 5 in a forked worker until it is opened. A killed waiter leaves no trace in it."""

    def __init__(self) -> None:
        self._wait, self._open = os.pipe()

    def __call__(self, id: int) -> Any:
        if id == 5:
            os.read(self._wait, 1)
        return torch.tensor(id)

    def open(self) -> None:
        os.write(self._open, bytes(100))

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._wait)
        os.close(self._open)


class Point(NamedTuple):
    x: torch.Tensor
    y: float


Pair = namedtuple("Pair", "left right")


def picture(id: int) -> tuple[torch.Tensor, int]:
    """A picture that its id decides, and its id for a label."""
    return pixels(id), id


def pixels(id: int, side: int = 16) -> torch.Tensor:
    mixed = np.arange(1, 3 * side * side + 1).reshape(side, side, 3) * (40503 * (id + 1)) >> 6
    return torch.from_numpy(mixed.astype(np.uint8))


def checksum(image: torch.Tensor) -> int:
    return zlib.crc32(image.contiguous().numpy().tobytes())


def floats(id: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32).reshape(2, 3) + id


def zero_dim(id: int) -> torch.Tensor:
    return torch.tensor(id)


KINDS: dict[str, Callable[[int], Any]] = {
    "floats": floats, "arrays": lambda id: np.full((2, 2), id, np.int16),
    "scalars": lambda id: (np.float32(id / 2), np.int8(id), np.bool_(id % 2)),
    "numbers": lambda id: [id, id / 3, id % 2 == 0], "words": lambda id: (floats(id), "word" * id),
    "octets": lambda id: {"raw": bytes([id]) * 3, "id": id},
    "record": lambda id: {"image": floats(id), "label": id, "name": f"n{id}"},
    "nested": lambda id: {"a": [floats(id), (id, {"b": np.arange(3) * id})], "c": Point(floats(id), id / 7)},
    "pair": lambda id: Pair(Pair(id, floats(id)), np.full((2, 2), id, np.int16)),
    "halves": lambda id: (floats(id).to(torch.bfloat16), floats(id).to(torch.complex64), floats(id) > id),
    "empty": lambda id: (torch.zeros(0, 3), id), "zero_dim": zero_dim, "picture": picture,
    "text": lambda id: "word" * (id % 3),
}  # fmt: skip
"""Samples of many kinds, by id."""


def as_list(samples: list[Any]) -> list[Any]:
    return list(samples)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in type, dtype, shape and value, through all containers and objects."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if type(a).__eq__ is object.__eq__:
        return a is b or same(vars(a), vars(b))
    return bool(a == b or (a != a and b != b))


class Noisy:
    """A random step: adds noise from all three generators."""

    def __call__(self, sample: Any) -> Any:
        image, label = sample
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        return image.float() + noise, label


def jittered(id: int) -> Any:
    return Noisy()(picture(id))


def noisy_collate(samples: list[Any]) -> Any:
    return torch.stack([image for image, _ in samples]) * torch.rand(()), torch.tensor([id for _, id in samples])


def labels_of(batches: Iterable[Any]) -> list[int]:
    return [label for _, labels in batches for label in labels.tolist()]


def lists_of(batches: Iterable[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def values_of(batches: Iterable[Any]) -> list[int]:
    return [int(value) for batch in batches for value in batch]
