"""A data set whose attributes change between epochs: followed without a cache, noticed with one."""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

import stallfree as sf
from cached_data import Numbers
from loader_data import Made
from stallfree.errors import StallfreeWarning

COUNT = 12


def once(value: int) -> int:
    return value


def twice(value: int) -> int:
    return 2 * value


class Step:
    def __init__(self) -> None:
        self.add = 0

    def __call__(self, value: Any) -> Any:
        return value + self.add


class Settings(Dataset[int]):
    """Sample `id` depends on attributes of many types."""

    shift = 0

    def __init__(self) -> None:
        self.number, self.real, self.on, self.text, self.nothing = 1, 1.0, False, "a", None
        self.path, self.pair = Path("a"), (0, 1)
        self.values, self.table = list(range(COUNT)), {"a": 1}
        self.array, self.tensor = np.arange(COUNT), torch.arange(COUNT)
        self.function, self.inner, self.step = once, SimpleNamespace(deep=SimpleNamespace(scale=1)), Step()
        self.reads = 0
        self.note = "not read"

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> int:
        self.reads += 1
        value = self.values[id] * self.number * self.table[self.text] + int(self.real) + self.on + self.shift
        value += len(self.path.parts) + sum(self.pair) + (0 if self.nothing is None else self.nothing)
        value += self.inner.deep.scale + int(self.array[id]) + int(self.tensor[id])
        return int(self.step(self.function(value)))


def change(name: str, value: Any) -> Callable[[Any], None]:
    return lambda data: setattr(data, name, value)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "int": change("number", 3),
    "float": change("real", 2.5),
    "bool": change("on", True),
    "str": lambda data: (data.table.update(b=5), change("text", "b")(data)),
    "None": change("nothing", 4),
    "path": change("path", Path("a/b")),
    "tuple": change("pair", (1, 1)),
    "another list": change("values", [9] * COUNT),
    "an item of a list": lambda data: data.values.__setitem__(3, 30),
    "another dict": change("table", {"a": 7}),
    "an item of a dict": lambda data: data.table.update(a=8),
    "another array": change("array", np.full(COUNT, 5)),
    "an element of an array": lambda data: data.array.__setitem__(2, 50),
    "another tensor": change("tensor", torch.full((COUNT,), 5)),
    "an element of a tensor": lambda data: data.tensor.__setitem__(2, 50),
    "a function": change("function", twice),
    "an object within": lambda data: setattr(data.inner.deep, "scale", 9),
    "a step": lambda data: setattr(data.step, "add", 100),
    "the class": lambda data: setattr(type(data), "shift", 1000),
}


def values(loader: Any) -> list[int]:
    return [int(value) for batch in loader for value in batch]


@pytest.fixture
def data() -> Any:
    yield Settings()
    Settings.shift = 0


@pytest.mark.parametrize("kind", CHANGES)
def test_a_cache_notices(kind: str, data: Any) -> None:
    with sf.CachedDataset(data, capacity="1MiB") as cached, sf.DataLoader(cached, 2) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error", StallfreeWarning)
            first = values(loader)
            data.note = "not read, so that it may change"
            assert values(loader) == first
        CHANGES[kind](data)
        with pytest.warns(StallfreeWarning, match="when samples were cached") as caught:
            values(loader)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():  # said once
            warnings.simplefilter("error", StallfreeWarning)
            values(loader)


@pytest.mark.parametrize(("kind", "auto"), [*((kind, False) for kind in CHANGES), ("a step", True)])
def test_without_a_cache_it_is_followed(auto: bool, kind: str, data: Any) -> None:
    options = {"cache": "auto", "capacity": "1KiB"} if auto else {}
    with sf.DataLoader(data, 2, num_workers=0, **options) as loader:
        assert values(loader) == [data[id] for id in range(COUNT)]
        assert loader.cached is None
        CHANGES[kind](data)
        assert values(loader) == [data[id] for id in range(COUNT)]


# -- parts of a source ------------------------------------------------------------------------------------------------


def first_values(loader: Any) -> list[int]:
    return [int(id) for _, ids in loader for id in ids]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("indices", [[8, 9, 10, 11], [7, 6], np.arange(5), list(range(12))], ids=str)
def test_other_indices_of_a_subset(indices: Any, workers: int) -> None:
    subset = Subset(Numbers(12), [0, 1, 2, 3])  # type: ignore[arg-type, var-annotated]
    with sf.DataLoader(subset, 2, num_workers=workers) as loader:
        assert first_values(loader) == [0, 1, 2, 3]
        subset.indices = indices
        assert (len(loader), first_values(loader)) == (-(-len(indices) // 2), [*indices])
        subset.indices = [1, 2, 3]
        subset.indices[1] = 5  # type: ignore[index]
        assert first_values(loader) == [1, 5, 3]
        subset.dataset = Subset(Numbers(12), [3, 2, 1, 0, 4, 5])  # type: ignore[arg-type, var-annotated]
        assert first_values(loader) == [2, 5, 0]


class Named(Settings):
    """States its identity, as a user of `key=` may."""

    def fingerprint(self) -> str:
        return "v1"


def test_a_cache_notices_the_attributes_of_a_data_set_with_a_fingerprint() -> None:
    data = Named()
    with sf.CachedDataset(data, capacity="1MiB") as cached, sf.DataLoader(cached, 2) as loader:
        values(loader)
        data.number = 3
        with pytest.warns(StallfreeWarning, match="'number' of Named"):
            values(loader)


def test_another_pipeline_of_a_source() -> None:
    source = Numbers(4, [lambda record: record[1]])
    with sf.DataLoader(source, 2) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        source.pipeline = sf.Compose([lambda record: 10 * record[1]])
        assert [batch.tolist() for batch in loader] == [[0, 10], [20, 30]]


class Slow(Made):
    """Samples that a cache would give much sooner."""

    def __init__(self, count: int) -> None:
        super().__init__(count, lambda id: (time.sleep(0.003), np.full(400, id))[1])


@pytest.mark.parametrize("capacity", ["1KiB", "4MiB"], ids=["no cache", "cache"])
def test_the_length_under_auto(capacity: str) -> None:
    """The loader follows the data set; a cache is not used any more, which a warning says."""
    data = Slow(4)
    with sf.DataLoader(data, 2, cache="auto", capacity=capacity, num_workers=0) as loader:
        assert sum(map(len, loader)) == 4
        data.count = 5
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = loader.cached
            assert sum(map(len, loader)) == 5
        assert loader.cached is None
        assert (before is None) == (capacity == "1KiB") == (not caught)
