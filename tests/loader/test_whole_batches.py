"""Data sets with `__getitems__`: a batch is one call, as under torch's loader, unless it draws random numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import stallfree as sf


class Batched(torch.utils.data.Dataset[Any]):
    """`__getitems__` gives other values than `__getitem__`."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, id: int) -> Any:
        return id

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [10 * id + min(ids) for id in ids]


class OnlyBatches(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [torch.full((3,), id) for id in ids]


class OnlyBatchesOfAnyClass:
    __len__ = OnlyBatches.__len__
    __getitems__ = OnlyBatches.__getitems__


class OnlyBatchesDrawn(OnlyBatches):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [id + random.random() for id in ids]


class Drawing(Batched):
    def __getitem__(self, id: int) -> float:
        return id + random.random()

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [id + random.random() for id in ids]


class Failing(Batched):
    def __getitems__(self, ids: list[int]) -> list[int]:
        if 7 in ids:
            raise FileNotFoundError("the file of the batch")
        return ids


class FailingAtOne(Failing):
    def __getitem__(self, id: int) -> int:
        if id == 7:
            raise FileNotFoundError("the file of 7")
        return id


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("data", [Batched(), OnlyBatches(), OnlyBatchesOfAnyClass()], ids=type)
def test_the_batches_are_those_of_torchs_loader(data: Any, workers: int) -> None:
    torchs = torch.utils.data.DataLoader(data, batch_size=4)
    with sf.DataLoader(data, batch_size=4, num_workers=workers) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in torchs]


@pytest.mark.parametrize("data", [OnlyBatches(), OnlyBatchesOfAnyClass()], ids=type)
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_a_data_set_with_batches_only_are_cached(data: Any, workers: int) -> None:
    torchs = torch.utils.data.DataLoader(data, batch_size=4)
    cached = sf.CachedDataset(data, capacity="1MiB")
    with cached, sf.DataLoader(cached, batch_size=4, num_workers=workers) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in torchs]
            assert cached.stats().storage_reads == 20
        assert cached.stats().hits >= 20


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("data", [Drawing(), OnlyBatchesDrawn()], ids=type)
def test_random_numbers_are_a_function_of_each_id(data: Any, workers: int) -> None:
    with sf.DataLoader(data, batch_size=4, seed=5, num_workers=workers) as loader:
        first = [value for batch in loader for value in batch.tolist()]
    with sf.DataLoader(data, batch_size=10, seed=5) as loader:
        assert first == [value for batch in loader for value in batch.tolist()]
    assert len({value - int(value) for value in first}) == 20


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("data", "text"), [(Failing(), "of the batch"), (FailingAtOne(), "sample 7.*file of 7")])
def test_an_error_of_a_batch_is_raised(data: Any, text: str, workers: int) -> None:
    with sf.DataLoader(data, batch_size=4, num_workers=workers) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        with pytest.raises(FileNotFoundError, match=text) as caught:
            next(batches)
        assert isinstance(caught.value, sf.SampleError)
        assert [batch.tolist() for batch in batches] == [list(range(at, at + 4)) for at in (8, 12, 16)]


def test_a_sample_that_contains_itself() -> None:
    sample: list[Any] = []
    sample.append(sample)
    with sf.DataLoader([sample, sample], batch_size=2, collate_fn=len) as loader:
        assert list(loader) == [2]
