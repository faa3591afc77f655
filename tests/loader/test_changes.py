"""What changes after a loader was made: the length of the data set, and attributes of the loader."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import SequentialSampler

import stallfree as sf
from cases import half
from stallfree import StallfreeWarning
from stallfree.errors import InputError


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("by_sampler", [False, True], ids=["plain", "sampler"])
def test_a_data_set_that_grows_or_shrinks_is_served_as_torch_serves_it(by_sampler: bool, workers: int) -> None:
    found = []
    for kind in (torch.utils.data.DataLoader, sf.DataLoader):
        data = [1, 2, 3]
        sampler = SequentialSampler(data) if by_sampler else None
        loader = kind(data, batch_size=2, sampler=sampler, num_workers=workers)
        seen: list[Any] = [batches(loader)]
        for change in (lambda data: data.extend([4, 5]), lambda data: data.pop(), lambda data: data.clear()):
            change(data)
            seen += [len(loader), batches(loader)] if data else []
        found.append(seen)
    assert found[0] == found[1]


def test_a_cache_keeps_the_length_that_it_has_and_says_so() -> None:
    data = [np.array(id) for id in range(3)]
    with sf.CachedDataset(data, capacity="1MiB") as cached, sf.DataLoader(cached, 2) as loader:
        assert sum(map(len, loader)) == 3
        data.append(np.array(9))
        with pytest.warns(StallfreeWarning) as caught:
            assert sum(map(len, loader)) == 3
        assert "has 4 samples now and had 3; the loader keeps to those" in str(caught[0].message)
        assert "the dataset of type list is not what it was when samples were cached" in str(caught[1].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error", StallfreeWarning)
            assert sum(map(len, loader)) == 3
        data.pop()
        with pytest.warns(StallfreeWarning, match="has 3 samples now and had 4"):
            assert sum(map(len, loader)) == 3


# -- attributes that torch's loader allows to be set -------------------------------------------------------------------


class Told(torch.utils.data.Dataset[tuple[int, int]]):
    """Samples say what the worker process knows."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, id: int) -> tuple[int, int]:
        info = torch.utils.data.get_worker_info()
        return id, -1 if info is None else info.num_workers + 10 * getattr(info.dataset, "told", 0)


def tell(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.told = 7  # type: ignore[union-attr]


SET: dict[str, Any] = {  # every second one needs workers
    "pin_memory": True,
    "num_workers": 0,
    "pin_memory_device": "",
    "worker_init_fn": tell,
    "in_order": True,
    "timeout": 9,
    "generator": torch.Generator(),
    "prefetch_factor": 3,
    "collate_fn": lambda samples: len(samples),
    "multiprocessing_context": "forkserver",
}


@pytest.mark.parametrize(("name", "workers"), half(SET, [0, 1]))
def test_what_torch_lets_others_set(name: str, workers: int) -> None:
    """It applies from the next iteration on, before the first one or between two."""
    if name in ("multiprocessing_context", "timeout") and not workers:
        pytest.skip("torch's loader needs workers for it")
    found, before = [], workers > 0
    for kind in (torch.utils.data.DataLoader, sf.DataLoader):
        loader = kind(Told(), 2, num_workers=workers)
        seen = [] if before else [repr(list(loader))]
        setattr(loader, name, SET[name])
        value = getattr(loader, name)
        shown = type(value) if name == "multiprocessing_context" else value
        found.append([*seen, repr(list(loader)), shown])
    assert found[0] == found[1]


def test_a_wrong_value_is_named_at_the_next_iteration() -> None:
    loader = sf.DataLoader(list(range(4)), 2)
    loader.num_workers = -1
    with pytest.raises(InputError, match="num_workers=-1"):
        list(loader)
    loader.num_workers, loader.worker_init_fn = 0, 3  # type: ignore[assignment]
    with pytest.raises(InputError, match="worker_init_fn=3 cannot be called"):
        list(loader)
    loader.worker_init_fn = None
    assert batches(loader) == [[0, 1], [2, 3]]


def test_a_setting_moves_no_epoch() -> None:
    def orders(change: Any) -> list[Any]:
        loader = sf.DataLoader(list(range(20)), 20, shuffle=True, seed=2)
        found = []
        for _ in range(3):
            found += batches(loader)
            change(loader)
        return found

    assert orders(lambda loader: setattr(loader, "timeout", loader.timeout + 1)) == orders(lambda loader: None)


class Repeating:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

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
    found = []
    for kind in (torch.utils.data.DataLoader, sf.DataLoader):
        loader = endless(kind, way=way)(list(range(10)), size, num_workers=workers)
        found.append([repr(list(loader)) for _ in range(3)])
        loader.iterator = None
    assert found[0] == found[1]
    shuffled = endless(sf.DataLoader, way=way)(list(range(10)), size, shuffle=True, seed=4, num_workers=workers)
    epochs = [repr(list(shuffled)) for _ in range(3)]
    shuffled.iterator = None
    plain = sf.DataLoader(list(range(10)), size, shuffle=True, seed=4)
    assert epochs == [repr(list(plain)) for _ in range(3)]
    assert len(set(epochs)) == 3
    shuffled.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 2),
        ("drop_last", True),
        ("dataset", [1]),
        ("sampler", [0]),
        ("persistent_workers", True),
        ("seed", 3),
    ],
)
def test_no_other_argument_may_be_set(name: str, value: Any) -> None:
    loader = sf.DataLoader(list(range(4)), 2)
    with pytest.raises(InputError, match=f"{name} of a loader that exists cannot be set"):
        setattr(loader, name, value)
    loader.note_of_the_user = 1
    assert batches(loader) == [[0, 1], [2, 3]]


# -- code that reaches through wrappers -------------------------------------------------------------------------------


class Opened(torch.utils.data.Dataset[int]):
    """Its samples say which worker has opened it."""

    opened = -1

    def __len__(self) -> int:
        return 12

    def __getitem__(self, id: int) -> int:
        return self.opened


def open_inner(worker: int) -> None:
    dataset: Any = torch.utils.data.get_worker_info().dataset  # type: ignore[union-attr]
    while hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    dataset.opened = worker


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("subset", [False, True])
def test_worker_init_fn_reaches_the_data_set_within_a_cache(subset: bool, method: str) -> None:
    data: Any = Opened()
    given = torch.utils.data.Subset(data, range(12)) if subset else data
    with sf.CachedDataset(given, capacity="1MiB") as cached:
        assert cached.dataset is given
        loader = sf.DataLoader(
            cached, 2, num_workers=2, worker_init_fn=open_inner, multiprocessing_context=method, persistent_workers=True
        )
        with loader, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = [value for batch in batches(loader) for value in batch]
    assert set(seen) == {-1, 0, 1}  # the first look has made some of them, before there were workers


# -- copies: the same arguments, and iterations of their own -----------------------------------------------------------

DATA = list(range(20))

MAKE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.utils.data.DataLoader(DATA, 4, num_workers=1),  # type: ignore[arg-type]
    "plain": lambda: sf.DataLoader(DATA, 4, shuffle=True),
    "workers": lambda: sf.DataLoader(DATA, 4, num_workers=1),
    "persistent workers": lambda: sf.DataLoader(DATA, 4, num_workers=1, persistent_workers=True),
    "sampler": lambda: sf.DataLoader(DATA, 4, sampler=torch.utils.data.RandomSampler(DATA)),  # type: ignore[arg-type]
    "cached": lambda: sf.DataLoader(sf.CachedDataset(DATA, capacity="1MiB"), 4),
    "window": lambda: sf.DataLoader(sf.SmartCacheDataset(DATA, cache_num=20), 4),
}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda loader: pickle.loads(pickle.dumps(loader))}


def ids_of(batches: Any) -> list[int]:
    return [id for batch in batches for id in batch.tolist()]


def close(loader: Any) -> None:
    for opened in (loader, loader.dataset):
        if hasattr(opened, "close"):
            opened.close()


@pytest.mark.parametrize(("kind", "copied", "taken"), half(MAKE, COPIES, [1, 5]))
def test_a_copy_goes_on_by_itself(kind: str, copied: str, taken: int) -> None:
    loader = MAKE[kind]()
    iterator = iter(loader)
    before = ids_of(next(iterator) for _ in range(taken))
    if taken == 5:
        assert next(iterator, None) is None
    other = COPIES[copied](loader)
    assert (len(other), other.batch_size, other.num_workers) == (len(loader), 4, loader.num_workers)
    for _ in range(2):
        assert sorted(ids_of(other)) == DATA
    assert sorted(before + ids_of(iterator)) == DATA
    assert sorted(ids_of(loader)) == DATA
    close(loader)
    close(other)
