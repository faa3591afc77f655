"""Random configurations of a loader, each a function of its seed, for comparisons with torch's loader."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from torch.utils.data import (  # isort: skip
    BatchSampler, ConcatDataset, DistributedSampler, RandomSampler, SequentialSampler, Subset, SubsetRandomSampler,
    TensorDataset, WeightedRandomSampler,
)  # fmt: skip

from loader_data import KINDS, floats


class Odd(Exception):
    """An error that its arguments do not make again."""

    def __init__(self, id: int, reason: str) -> None:
        super().__init__(f"{reason}: {id}")


ERRORS: tuple[type[Exception], ...] = (ValueError, KeyError, FileNotFoundError, IndexError, ZeroDivisionError, Odd)


@dataclass(eq=False)  # compared by its attributes
class Item:
    image: torch.Tensor
    name: str


OTHERS: dict[str, Callable[[int], Any]] = {
    "ragged": lambda id: torch.arange(id + 1), "with_none": lambda id: (floats(id), None),
    "item": lambda id: Item(floats(id), f"n{id}"),
    "mixed": lambda id: torch.tensor(id) if id % 3 else torch.tensor(float(id)), "nothing": lambda id: None,
}  # fmt: skip
"""Samples for which torch's default `collate_fn` raises an error, or may."""


class Data(torch.utils.data.Dataset[Any]):
    """Samples of one kind; those of `bad` raise an error, and with `draws` each draws from the three generators."""

    def __init__(self, count: int, kind: str, bad: tuple[int, ...], error: type[Exception], draws: bool) -> None:
        self.count, self.kind, self.bad, self.error, self.draws = count, kind, bad, error, draws

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> Any:
        if id in self.bad:
            raise Odd(id, "bad") if self.error is Odd else self.error(f"bad: {id}")
        value = (KINDS | OTHERS)[self.kind](id)
        return [value, random.random(), np.random.rand(), torch.rand(2)] if self.draws else value


class Batched(Data):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [self[id] for id in reversed(ids)]


class Collate:
    """Makes a list of the samples, or a padded batch; fails at a sample, or draws a number."""

    def __init__(self, name: str, every: int = 0, draws: bool = False) -> None:
        self.name, self.every, self.draws, self.calls = name, every, draws, 0

    def __call__(self, samples: Any) -> Any:
        self.calls += 1
        if self.every and len(samples) % self.every == 0:
            raise ZeroDivisionError(f"{len(samples)} samples")
        batch = samples
        if self.name == "padded":
            batch = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), [len(sample) for sample in samples]
        return (batch, torch.rand(()), random.random()) if self.draws else batch


class Ids:
    """A sampler, or a batch sampler with `size`, that draws its order at the start or one id at a time."""

    def __init__(self, count: int, way: str, size: int = 0, ends: int | None = None) -> None:
        self.count, self.way, self.size, self.ends = count, way, size, ends

    def __iter__(self) -> Iterator[Any]:
        if self.way == "at once":
            ids = torch.randperm(self.count).tolist()
            return iter([ids[at : at + self.size] for at in range(0, self.count, self.size)] if self.size else ids)
        return self._one_by_one()

    def _one_by_one(self) -> Iterator[Any]:
        for number in range(self.count):
            if number == self.ends:
                raise ZeroDivisionError("in the sampler")
            yield [self._id() for _ in range(self.size)] if self.size else self._id()

    def _id(self) -> int:
        return random.randrange(self.count) if random.random() < 0.5 else int(torch.randint(self.count, ()))


class Case(NamedTuple):
    seed: int  # of the generators before the loader is made
    make: Callable[[], dict[str, Any]]  # new arguments of a loader
    workers: int
    shuffled: bool  # the order is the loader's own, so only the samples of an epoch can be compared
    epochs: list[tuple[int | None, bool]]  # batches taken (None: all); whether two iterators take turns
    text: str


def case_of(seed: int) -> Case:
    draw = random.Random(seed)
    workers = draw.choice([0, 0, 0, 1, 2, 3])
    count = draw.randint(1, 24)
    order = draw.choice(["none", "shuffle", "sampler", "sampler", "batches"])
    shuffled = order == "shuffle"
    one_shot = False
    data, collate, what = _data(draw, count, workers, shuffled)
    arguments: dict[str, Any] = {}
    if order == "batches":
        sampler, what_order = _batch_sampler(draw, count, workers)
        arguments["batch_sampler"] = sampler
    else:
        arguments["batch_size"] = size = draw.choice([None, 1, 2, 3, 5, 30])
        if size is not None and not shuffled and draw.random() < 0.3:
            arguments["drop_last"] = True
        what_order = order
        if shuffled:
            arguments["shuffle"] = True
        elif order == "sampler":
            arguments["sampler"], what_order = _sampler(draw, count, workers)
            one_shot = what_order == "iterator"
    if draw.random() < 0.3:
        arguments["generator"] = lambda: torch.Generator().manual_seed(seed)
    if collate is not None:
        arguments["collate_fn"] = lambda: collate
    persistent = workers > 0 and draw.random() < 0.4
    if workers:
        arguments |= {"num_workers": workers, "prefetch_factor": draw.randint(1, 3), "persistent_workers": persistent}
        arguments["multiprocessing_context"] = {250: "forkserver", 0: "spawn"}.get(seed % 500, "fork")
    epochs = [_epoch(draw, persistent, shuffled) for _ in range(1 if one_shot else draw.randint(1, 3))]
    shown = {name: value for name, value in arguments.items() if not callable(value)}

    def make() -> dict[str, Any]:
        return {"dataset": data(), **{key: value() if callable(value) else value for key, value in arguments.items()}}

    return Case(seed, make, workers, shuffled, epochs, f"{what}, {what_order}, {shown}, epochs {epochs}")


def _epoch(draw: random.Random, persistent: bool, shuffled: bool) -> tuple[int | None, bool]:
    taken = draw.randint(int(shuffled), 4) if draw.random() < 0.3 else None
    return taken, not persistent and draw.random() < 0.2


def _data(draw: random.Random, count: int, workers: int, shuffled: bool) -> tuple[Callable[[], Any], Any, str]:
    """Makes the data set; the `collate_fn`, or None; and a description."""
    shape = draw.choice(["own", "own", "own", "batched", "subset", "concat", "tensors", "list", "tensor", "array"])
    draws = workers == 0 and not shuffled and draw.random() < 0.5
    collate: Any = None
    if shape in ("tensors", "list", "tensor", "array"):
        values = torch.arange(3 * count).reshape(count, 3)
        data = {
            "tensors": lambda: TensorDataset(values.clone(), values.float()),
            "list": lambda: [KINDS["nested"](id) for id in range(count)], "tensor": values.clone,
            "array": lambda: values.numpy().copy(),
        }[shape]  # fmt: skip
        return data, Collate("list", draws=draws) if shuffled or draw.random() < 0.3 else None, shape
    kind = draw.choice([*KINDS] if draw.random() < 0.75 else [*OTHERS])
    kind = "ragged" if kind == "mixed" and workers else kind  # torch's workers do not collate several dtypes
    bad: tuple[int, ...] = ()
    if not shuffled and draw.random() < 0.25:
        bad = tuple(draw.sample(range(count), min(count, 2)))
    error = draw.choice(ERRORS)
    if shuffled or draw.random() < (0.3 if kind in KINDS else 0.8):
        name = "padded" if kind == "ragged" and not (draws or shuffled) and draw.random() < 0.7 else "list"
        every = draw.choice([0, 0, 0, 2]) if not shuffled and kind not in ("mixed", "nothing", "zero_dim") else 0
        collate = Collate(name, every, draws)
    cls = Batched if shape == "batched" else Data

    def data() -> Any:
        whole: Any = cls(count, kind, bad, error, draws)
        if shape == "subset":
            return Subset(whole, [*range(count)][::-1])
        return ConcatDataset([whole, cls(1, kind, (), error, draws)]) if shape == "concat" else whole

    return data, collate, f"{shape} of {count} {kind}, bad {bad}, draws {draws}, collate {collate and vars(collate)}"


def _sampler(draw: random.Random, count: int, workers: int) -> tuple[Any, str]:
    seed, few = draw.randint(0, 9), draw.randint(1, 30)
    ids = [draw.randrange(count) for _ in range(few)]
    ways: dict[str, Callable[[], Any]] = {
        "list": lambda: ids, "sequential": lambda: SequentialSampler(range(count)),
        "random": lambda: RandomSampler(range(count)),
        "random, own generator": lambda: RandomSampler(range(count), generator=torch.Generator().manual_seed(seed)),
        "with replacement": lambda: RandomSampler(range(count), replacement=True, num_samples=few),
        "subset": lambda: SubsetRandomSampler(sorted(set(ids))),
        "weighted": lambda: WeightedRandomSampler([1.0 + id for id in range(count)], few),
        "distributed": lambda: DistributedSampler(range(count), num_replicas=2, rank=seed % 2, seed=seed),
        "iterator": lambda: iter(ids),
    }  # fmt: skip
    if not workers:  # with workers, ids are drawn ahead, and torch's loader begins each order twice
        ways["at once"] = lambda: Ids(count, "at once")
        ways["one by one"] = lambda: Ids(count, "one by one")
        ways["failing"] = lambda: Ids(count, "one by one", ends=count // 2)
    way = draw.choice(list(ways))
    return ways[way], way


def _batch_sampler(draw: random.Random, count: int, workers: int) -> tuple[Any, str]:
    size, last = draw.randint(1, 5), draw.random() < 0.3
    lists = [[draw.randrange(count) for _ in range(draw.randint(0 if draw.random() < 0.1 else 1, 4))] for _ in range(6)]
    ways: dict[str, Callable[[], Any]] = {
        "lists": lambda: lists, "in order": lambda: BatchSampler(SequentialSampler(range(count)), size, last),
        "random": lambda: BatchSampler(RandomSampler(range(count)), size, last),
    }  # fmt: skip
    if not workers:
        ways["at once"] = lambda: Ids(count, "at once", size)
        ways["one by one"] = lambda: Ids(count, "one by one", size)
    way = draw.choice(list(ways))
    return ways[way], way
