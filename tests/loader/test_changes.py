"""What changes after a loader was made: the length and attributes of the data set, and attributes of the loader."""

import contextlib
import copy
import multiprocessing
import pickle
import threading
import time
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from multiprocessing.sharedctypes import RawArray
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, SequentialSampler, Subset

import stallfree as sf
from cached_data import Given
from cases import half
from loader_data import Made, lists_of, values_of
from stallfree.errors import InputError, StallfreeWarning
from stream_data import Sized


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("by_sampler", [False, True], ids=["plain", "sampler"])
def test_a_data_set_that_grows_or_shrinks_is_served_as_torch_serves_it(by_sampler: bool, workers: int) -> None:
    found = []
    for kind in (torch.utils.data.DataLoader, sf.DataLoader):
        data = [1, 2, 3]
        sampler = SequentialSampler(data) if by_sampler else None
        loader = kind(data, batch_size=2, sampler=sampler, num_workers=workers)
        seen: list[Any] = [lists_of(loader)]
        for change in (lambda data: data.extend([4, 5]), lambda data: data.pop(), lambda data: data.clear()):
            change(data)
            seen += [len(loader), lists_of(loader)]
        empty = kind([], batch_size=2, num_workers=workers)
        found.append([*seen, len(empty), lists_of(empty), lists_of(empty)])
    assert found[0] == found[1]


class Listed(torch.utils.data.Dataset[Any]):
    """Its length is found out anew each time, as by listing a folder."""

    def __init__(self, items: list[Any]) -> None:
        self.find = lambda: items

    def __len__(self) -> int:
        return len(self.find())

    def __getitem__(self, id: int) -> Any:
        return self.find()[id]


@pytest.mark.parametrize("kind", [list, Listed])
def test_a_cache_keeps_the_length_that_it_has_and_says_so(kind: Any) -> None:
    items = [np.array(id) for id in range(3)]
    data = items if kind is list else Listed(items)
    with sf.CachedDataset(data, capacity="1MiB") as cached, sf.DataLoader(cached, 2) as loader:
        assert sum(map(len, loader)) == 3
        items.append(np.array(9))
        with pytest.warns(StallfreeWarning, match="has 4 samples now and had 3"):
            assert [len(loader), sum(map(len, loader))] == [2, 3]
        assert sum(map(len, loader)) == 3


def told(id: int) -> tuple[int, int]:
    """What the worker process knows."""
    info = torch.utils.data.get_worker_info()
    return id, -1 if info is None else info.num_workers + 10 * getattr(info.dataset, "told", 0)


def tell(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.told = 7  # type: ignore[union-attr]


SET: dict[str, Any] = {  # every second one needs workers
    "pin_memory": True, "num_workers": 0, "pin_memory_device": "", "worker_init_fn": tell, "in_order": True,
    "timeout": 9, "generator": torch.Generator(), "prefetch_factor": 3, "collate_fn": lambda samples: len(samples),
    "multiprocessing_context": "forkserver",
}  # fmt: skip


@pytest.mark.parametrize(("name", "workers"), half(SET, [0, 1]))
def test_what_torch_lets_others_set(name: str, workers: int) -> None:
    """It applies from the next iteration on, before the first one or between two."""
    if name in ("multiprocessing_context", "timeout") and not workers:
        pytest.skip("torch's loader needs workers for it")
    found = []
    for kind in (torch.utils.data.DataLoader, sf.DataLoader):
        loader = kind(Made(4, told), 2, num_workers=workers)
        seen = [] if workers else [repr(list(loader))]
        setattr(loader, name, SET[name])
        value = getattr(loader, name)
        found.append([*seen, repr(list(loader)), type(value) if name == "multiprocessing_context" else value])
    assert found[0] == found[1]


def test_a_wrong_value_is_named_at_the_next_iteration() -> None:
    loader = sf.DataLoader(list(range(4)), 2)
    loader.num_workers = -1
    with pytest.raises(InputError, match="num_workers=-1"):
        list(loader)
    loader.num_workers = 0
    assert lists_of(loader) == [[0, 1], [2, 3]]


@dataclass
class Repeating:
    sampler: Any

    def __iter__(self) -> Any:
        while True:
            yield from iter(self.sampler)


def endless(kind: Any, *, way: str) -> Any:
    """The subclasses with one endless iterator that several training repositories have."""

    class Endless(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if way == "object.__setattr__":
                object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
            else:
                self._DataLoader__initialized = False
                name = "sampler" if self.batch_sampler is None else "batch_sampler"
                setattr(self, name, Repeating(getattr(self, name)))
                self._DataLoader__initialized = True
            self.iterator = super()._get_iterator() if way == "_get_iterator" else super().__iter__()

        def __len__(self) -> int:
            return len((self.sampler if self.batch_sampler is None else self.batch_sampler).sampler)

        def __iter__(self) -> Any:
            for _ in range(len(self)):
                yield next(self.iterator)

    return Endless


@pytest.mark.parametrize(
    ("way", "size", "workers"), half(["object.__setattr__", "__initialized", "_get_iterator"], [4, None], [0, 1])
)
def test_a_subclass_that_repeats_its_sampler(way: str, size: int | None, workers: int) -> None:
    if way == "object.__setattr__" and size is None:
        pytest.skip("it replaces the batch sampler, which there is none of")
    data = list(range(10))
    for options in ({}, {"shuffle": True, "seed": 4}):
        plain: Any = sf.DataLoader(data, size, **options)
        loader = endless(sf.DataLoader, way=way)(data, size, num_workers=workers, **options)
        epochs = [repr(list(loader)) for _ in range(3)]
        assert epochs == [repr(list(plain)) for _ in range(3)]
        assert len(set(epochs)) == (3 if options else 1)
        loader.iterator = None
        loader.close()


@pytest.mark.parametrize("name", ["batch_size", "drop_last", "dataset", "sampler", "persistent_workers", "seed"])
def test_no_other_argument_may_be_set(name: str) -> None:
    loader = sf.DataLoader(list(range(4)), 2)
    with pytest.raises(InputError, match=f"{name} of a loader that exists cannot be set"):
        setattr(loader, name, getattr(loader, name))
    loader.note_of_the_user = 1
    assert lists_of(loader) == [[0, 1], [2, 3]]


def open_inner(worker: int) -> None:
    dataset: Any = torch.utils.data.get_worker_info().dataset  # type: ignore[union-attr]
    while hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    dataset.append(worker)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_worker_init_fn_reaches_the_data_set_within_a_cache(method: str) -> None:
    data: Any = [0, 1]
    subset: Any = torch.utils.data.Subset(data, [0, 1, -1])
    given: dict[str, Any] = {"worker_init_fn": open_inner, "multiprocessing_context": method}
    with sf.CachedDataset(subset, capacity="1MiB") as cached:
        assert cached.dataset is subset
        cached.cache.clear()
        with sf.DataLoader(cached, num_workers=1, **given) as loader:
            assert lists_of(loader) == [[0], [1], [0]]  # the last one is the number of the worker


DATA = list(range(20))

MAKE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.utils.data.DataLoader(DATA, 4, num_workers=1),  # type: ignore[arg-type]
    "plain": lambda: sf.DataLoader(DATA, 4, shuffle=True),
    "workers": lambda: sf.DataLoader(DATA, 4, num_workers=1),
    "persistent workers": lambda: sf.DataLoader(DATA, 4, num_workers=1, persistent_workers=True),
    "sampler": lambda: sf.DataLoader(DATA, 4, sampler=torch.utils.data.RandomSampler(DATA)),  # type: ignore[arg-type]
    "cached": lambda: sf.DataLoader(sf.CachedDataset(DATA, capacity="1MiB"), 4),
    "window": lambda: sf.DataLoader(sf.SmartCacheDataset(DATA, cache_num=20), 4),
    "stream": lambda: sf.DataLoader(Sized(20), 4, num_workers=1, persistent_workers=True),
}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda loader: pickle.loads(pickle.dumps(loader))}


@pytest.mark.parametrize(("kind", "copied", "taken"), half(MAKE, COPIES, [1, 5]))
def test_a_copy_goes_on_by_itself(kind: str, copied: str, taken: int) -> None:
    loader = MAKE[kind]()
    iterator = iter(loader)
    before = values_of(next(iterator) for _ in range(taken))
    if taken == 5:
        assert next(iterator, None) is None
    other = COPIES[copied](loader)
    assert (len(other), other.batch_size, other.num_workers) == (len(loader), 4, loader.num_workers)
    for _ in range(2):
        assert sorted(values_of(other)) == DATA
    assert sorted(before + values_of(iterator)) == DATA
    assert sorted(values_of(loader)) == DATA
    for opened in (loader, loader.dataset, other, other.dataset):
        if hasattr(opened, "close"):
            opened.close()


COUNT = 12


def twice(value: int) -> int:
    return 2 * value


class Step:
    add = 0

    def __call__(self, value: Any) -> Any:
        return value + self.add


class Settings(Dataset[int]):
    """Sample `id` depends on attributes of many types. It states its identity, as a user of `key=` may."""

    shift = 0

    def __init__(self) -> None:
        self.number, self.on, self.text, self.nothing = 1, False, "a", None
        self.path, self.pair = Path("a"), (0, 1)
        self.values, self.table = list(range(COUNT)), {"a": 1, "b": 5}
        self.array, self.tensor = np.arange(COUNT), torch.arange(COUNT)
        self.function, self.inner, self.step = abs, SimpleNamespace(deep=SimpleNamespace(scale=1)), Step()
        self.deep, self.event, self.user = {"a": {"b": 1}}, threading.Event(), UserDict(a=0)
        self.shared, self.shared_array = multiprocessing.Value("d", 0), multiprocessing.Array("i", 3)
        self.reads = 0
        self.note = "not read"

    def __len__(self) -> int:
        return COUNT

    def fingerprint(self) -> str:
        return "v1"

    def __getitem__(self, id: int) -> int:
        self.reads += 1
        value = self.values[id] * self.number * self.table[self.text] + self.on + self.shift
        value += len(self.path.parts) + sum(self.pair) + (0 if self.nothing is None else self.nothing)
        value += self.deep["a"]["b"] + self.event.is_set() + self.user["a"]
        value += self.shared.value + self.shared_array[1]
        value += self.inner.deep.scale + int(self.array[id]) + int(self.tensor[id])
        return int(self.step(self.function(value)))


def change(name: str, value: Any) -> Callable[[Any], None]:
    *owner, last = name.split(".")
    return lambda data: setattr(attrgetter(*owner)(data) if owner else data, last, value)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "int": change("number", 3), "bool": change("on", True), "str": change("text", "b"), "None": change("nothing", 4),
    "path": change("path", Path("a/b")), "tuple": change("pair", (1, 1)),
    "an item of a list": lambda data: data.values.__setitem__(3, 30), "another dict": change("table", {"a": 7}),
    "an item of a dict": lambda data: data.table.update(a=8), "another array": change("array", np.full(COUNT, 5)),
    "an element of an array": lambda data: data.array.__setitem__(2, 50),
    "an element of a tensor": lambda data: data.tensor.__setitem__(2, 50), "a function": change("function", twice),
    "an object within": lambda data: setattr(data.inner.deep, "scale", 9),
    "a step": lambda data: setattr(data.step, "add", 100),
    "an item of an inner dict": lambda data: data.deep["a"].update(b=7), "an event": lambda data: data.event.set(),
    "an item of a dict of collections": lambda data: data.user.update(a=9),
    "a shared value": change("shared.value", 11), "a shared array": lambda data: data.shared_array.__setitem__(1, 70),
    "the class": lambda data: setattr(type(data), "shift", 1000),
}  # fmt: skip


def test_a_cache_notices_each_change_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Settings()
    monkeypatch.setattr(Settings, "shift", 0)  # restored after the test
    with sf.CachedDataset(data, capacity="1MiB") as cached, sf.DataLoader(cached, 2) as loader:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", StallfreeWarning)
            first = values_of(loader)
            data.note = "not read, so that it may change"
            assert values_of(loader) == first
            for number, make in enumerate(CHANGES.values()):
                assert len(caught) == number
                make(data)
                assert values_of([*loader]) == values_of([*loader]) == first
        for kind, warning in zip(CHANGES, caught, strict=True):
            assert "when samples were cached" in str(warning.message), kind
            assert warning.filename == __file__


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_that_was_cut_off_and_is_replaced(workers: int) -> None:
    """It is an error also when all samples are in memory."""
    data = Scaled()
    with (
        sf.CachedDataset(sf.cut(data, "transform"), capacity="1MiB") as cached,
        sf.DataLoader(cached, 4, num_workers=workers) as loader,
    ):
        assert lists_of(loader) == [[0, -1, -2, -3]]
        data.transform = np.abs
        with pytest.raises(InputError, match="the transform of Scaled was changed after"):
            list(loader)


class Course(Made):
    """Samples that take a millisecond, and depend on what the loop sets."""

    def __init__(self) -> None:
        super().__init__(20, lambda id: (time.sleep(0.001), id + 100 * (self.level + self.more["level"]))[1])
        self.level, self.more = 0, {"level": 0}


@pytest.mark.parametrize("at", [[0], [2], [4], [*range(9)]], ids=str)
@pytest.mark.parametrize(
    "level", [change("level", 1), lambda data: data.more.update(level=data.more["level"] + 1)], ids=[*"ab"]
)
def test_what_the_loop_changes_holds_from_the_next_batch_on(at: list[int], level: Callable[[Any], Any]) -> None:
    """With 0 workers; batches 0 to 4 are the first epoch."""
    found = []
    for kind, options in ((torch.utils.data.DataLoader, {}), (sf.DataLoader, {"cache": "auto"})):
        loader, seen = kind(data := Course(), 4, **options), []
        with warnings.catch_warnings(action="ignore"):
            for batch in chain.from_iterable(loader for _ in range(3)):
                seen.append(batch.tolist())
                if len(seen) - 1 in at:
                    level(data)
        found.append(seen)
    assert found[0] == found[1]


def test_a_cache_notices_what_the_loop_changes() -> None:
    with sf.CachedDataset(data := Course(), capacity="1MiB") as cached, sf.DataLoader(cached, 4) as loader:
        first = values_of(loader)
        batches = iter(loader)
        data.level = len(next(batches))
        with pytest.warns(StallfreeWarning, match="the attribute 'level' of Course"):
            next(batches)
        assert values_of(loader) == first


class Scaled:
    def __init__(self) -> None:
        self.transform, self.scale = np.negative, 1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, id: int) -> Any:
        return self.transform(id * self.scale)


class Counting(Made):
    """Counts its samples, and fails for one the first time."""

    def __init__(self, fails: int = -1) -> None:
        super().__init__(200, lambda id: self.read(id))
        self.calls, self.fails = 0, fails

    def read(self, id: int) -> int:
        self.calls += 1
        time.sleep(0.001)
        if id == self.fails:
            self.fails = -1
            raise OSError("for once")
        return id


class CountingSource(Given):
    """Fetches in threads, also while the loop runs."""

    calls = 0

    def fetch(self, id: int) -> Any:
        self.calls += 1
        time.sleep(0.001)
        return super().fetch(id)


SELVES: dict[str, Callable[[], list[Any]]] = {
    "alone": lambda: [Counting()], "an error": lambda: [Counting(100)],
    "two loaders": lambda: [Subset(both := Counting(), range(100)), Subset(both, range(100, 200))],
    "threads": lambda: [Subset(CountingSource(range(200)), range(200))],
}  # fmt: skip


@pytest.mark.parametrize("how", SELVES)
def test_a_data_set_that_changes_itself_is_kept(how: str) -> None:
    loaders = [sf.DataLoader(part, 10, cache="auto", num_workers=0) for part in SELVES[how]()]
    with warnings.catch_warnings(action="error", category=StallfreeWarning):
        for _ in range(3):
            iterators = [iter(loader) for loader in loaders]
            for _ in range(22):
                for iterator in iterators:
                    with contextlib.suppress(OSError):
                        next(iterator, None)
    assert all(loader.cached is not None for loader in loaders)


class Event:
    """Has the name of another class, and none of its methods."""


@pytest.mark.parametrize(
    "held", [Event(), multiprocessing.Array("i", 3, lock=False), RawArray("f", 1 << 20)], ids=[*"abc"]
)
def test_attributes_that_look_like_those_of_a_library(held: Any) -> None:
    data = Made(8, lambda id: (data.held, id)[1])
    data.held = held
    with warnings.catch_warnings(action="ignore"), sf.CachedDataset(data, capacity="1MiB") as cached:
        assert [values_of(sf.DataLoader(cached, 4)) for _ in range(2)] == [[*range(8)]] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_attributes_of_a_data_set_that_is_cut(workers: int) -> None:
    data = Scaled()
    with sf.DataLoader(sf.cut(data, "transform"), 4, num_workers=workers) as loader:
        for data.scale in (2, 5):
            assert lists_of(loader) == [[0, -data.scale, -2 * data.scale, -3 * data.scale]]


@pytest.mark.parametrize("options", [{}, {"cache": "auto", "capacity": "1KiB"}], ids=["plain", "auto"])
def test_without_a_cache_it_is_followed(options: dict[str, Any]) -> None:
    data = Settings()
    with sf.DataLoader(data, 2, num_workers=0, **options) as loader:
        for data.step.add in (0, 100):
            assert values_of(loader) == [data[id] for id in range(COUNT)]
            assert loader.cached is None


@pytest.mark.parametrize(("indices", "workers"), [([8, 9, 10, 11], 0), (np.arange(5), 1)], ids=str)
def test_other_indices_of_a_subset(indices: Any, workers: int) -> None:
    source: Any = Given(range(12))
    subset: Any = Subset(source, [0, 1, 2, 3])
    with sf.DataLoader(subset, 2, num_workers=workers) as loader:
        assert values_of(loader) == [0, 1, 2, 3]
        subset.indices = indices
        assert (len(loader), values_of(loader)) == (-(-len(indices) // 2), [*indices])
        subset.indices = [1, 2, 3]
        subset.indices[1] = 5
        assert values_of(loader) == [1, 5, 3]
        subset.dataset = Subset(source, [3, 2, 1, 0, 4, 5])
        assert values_of(loader) == [2, 5, 0]


def test_another_pipeline_of_a_source() -> None:
    source = Given(range(4))
    with sf.DataLoader(source, 2) as loader:
        assert values_of(loader) == [0, 1, 2, 3]
        source.pipeline = sf.Compose([lambda record: 10 * record])
        assert values_of(loader) == [0, 10, 20, 30]


@pytest.mark.parametrize("capacity", ["1KiB", "4MiB"], ids=["no cache", "cache"])
def test_the_length_under_auto(capacity: str) -> None:
    """The loader follows the data set; a cache is not used any more, which a warning says."""
    data = Made(4, lambda id: (time.sleep(0.003), np.full(400, id))[1])  # a cache would give them much sooner
    with sf.DataLoader(data, 2, cache="auto", capacity=capacity, num_workers=0) as loader:
        assert sum(map(len, loader)) == 4
        data.count = 5
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = loader.cached
            assert (len(loader), sum(map(len, loader))) == (3, 5)
        assert loader.cached is None
        assert (before is None) == (capacity == "1KiB") == (not caught)
