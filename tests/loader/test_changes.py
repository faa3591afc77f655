"""What changes after a loader was made: the length of the data set, and attributes of the loader."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from torch.utils.data import SequentialSampler

import stallfree as sf
from stallfree.errors import InputError, WorkerError
from stallfree.pipeline.classify.determinism import StallfreeWarning


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


@pytest.mark.parametrize("workers", [0, 1])
def test_another_collate_fn_may_be_set(workers: int) -> None:
    with sf.DataLoader(list(range(4)), 2, num_workers=workers, persistent_workers=workers > 0) as loader:
        assert batches(loader) == [[0, 1], [2, 3]]
        loader.collate_fn = lambda samples: [10 * id for id in samples]
        assert list(loader) == [[0, 10], [20, 30]]


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 2), ("drop_last", True), ("dataset", [1]), ("sampler", [0]), ("num_workers", 2), ("timeout", 3)],
)
def test_no_other_argument_may_be_set(name: str, value: Any) -> None:
    loader = sf.DataLoader(list(range(4)), 2)
    with pytest.raises(InputError, match=f"{name} of a loader that exists cannot be set"):
        setattr(loader, name, value)
    loader.note_of_the_user = 1
    assert batches(loader) == [[0, 1], [2, 3]]


def test_whole_numbers_of_numpy_are_taken() -> None:
    loader = sf.DataLoader(list(range(4)), np.int32(2), num_workers=np.int64(1), prefetch_factor=np.int8(2))
    assert batches(loader) == [[0, 1], [2, 3]]
    assert (type(loader.batch_size), type(loader.num_workers), loader.prefetch_factor) == (int, int, 2)


def test_a_worker_error_is_caught_as_that_of_torch() -> None:
    assert issubclass(WorkerError, RuntimeError)
