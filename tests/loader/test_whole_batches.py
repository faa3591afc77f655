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


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_a_data_set_with_batches_only_are_cached(workers: int) -> None:
    data: Any = OnlyBatches()
    torchs = torch.utils.data.DataLoader(data, batch_size=4)
    cached = sf.CachedDataset(data, capacity="1MiB")
    with cached, sf.DataLoader(cached, batch_size=4, num_workers=workers) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in torchs]
            assert cached.stats().storage_reads == 20
        assert cached.stats().hits >= 20


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("data", [Drawing(), OnlyBatchesDrawn()], ids=type)
def test_random_numbers_are_a_function_of_each_id(data: Any, workers: int) -> None:
    with sf.DataLoader(data, batch_size=4, seed=5, num_workers=workers) as loader:
        first = [value for batch in loader for value in batch.tolist()]
    with sf.DataLoader(data, batch_size=10, seed=5, num_workers=1) as loader:
        assert first == [value for batch in loader for value in batch.tolist()]
    assert len({value - int(value) for value in first}) == 20


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_batch_is_raised(workers: int) -> None:
    with sf.DataLoader(Failing(), batch_size=4, num_workers=workers) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        with pytest.raises(FileNotFoundError, match=r"fetching the samples \[4, 5, 6, 7\]"):
            next(batches)
        assert [batch.tolist() for batch in batches] == [list(range(at, at + 4)) for at in (8, 12, 16)]


def test_a_sample_that_contains_itself() -> None:
    sample: list[Any] = []
    sample.append(sample)
    with sf.DataLoader([sample, sample], batch_size=2, collate_fn=len) as loader:
        assert list(loader) == [2]


# -- `__getitems__` that returns a batch, which torch's loader gives to `collate_fn` as it is -------------------------


class Columns(torch.utils.data.Dataset[Any]):
    """Tables, from which it is quickest to take all columns of a batch at once."""

    def __len__(self) -> int:
        return 10

    def __getitems__(self, ids: list[int]) -> Any:
        return {"x": torch.tensor(ids), "y": [str(id) for id in ids]}


class Rows(Columns):
    def __getitem__(self, id: int) -> Any:
        return {"x": id, "y": str(id)}


class Tensors(Columns):
    def __getitems__(self, ids: list[int]) -> Any:
        return torch.tensor(ids)[:, None] * torch.ones(3)


class Pairs(Columns):
    """As many columns as samples in some batches."""

    def __getitems__(self, ids: list[int]) -> Any:
        return torch.tensor(ids), torch.tensor(ids) * 10


class Views(Rows):
    """Two views of each sample."""

    def __getitems__(self, ids: list[int]) -> Any:
        return [id + view / 10 for id in ids for view in range(2)]


class Table:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and other.ids == self.ids

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"Table({self.ids})"


class Tables(Columns):
    def __getitems__(self, ids: list[int]) -> Any:
        return Table(ids)


class Nothing(Columns):
    def __getitems__(self, ids: list[int]) -> Any:
        return None


def unchanged(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Columns, Rows, Tensors, Pairs, Views, Tables, Nothing])
def test_a_batch_that_is_no_list_of_samples(kind: Any, workers: int) -> None:
    for data in (kind(), torch.utils.data.Subset(kind(), [5, 4, 3, 2, 1, 0])):
        found = []
        for loader in (torch.utils.data.DataLoader, sf.DataLoader):
            made = loader(data, 4, collate_fn=unchanged, num_workers=workers)
            found.append([repr(list(made)) for _ in range(2)])
        assert found[0] == found[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_single_samples_are_not_asked_for_as_batches(workers: int) -> None:
    found = []
    for loader in (torch.utils.data.DataLoader, sf.DataLoader):
        found.append(repr(list(loader(Rows(), batch_size=None, num_workers=workers))))
    assert found[0] == found[1]


class Noisy(Columns):
    def __getitems__(self, ids: list[int]) -> Any:
        return {"x": torch.tensor(ids), "noise": torch.rand(len(ids))}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_draws_of_such_batches_depend_on_the_seed(workers: int) -> None:
    def epochs(seed: int) -> list[Any]:
        with sf.DataLoader(Noisy(), 4, seed=seed, collate_fn=unchanged, num_workers=workers) as loader:
            return [[batch["noise"].tolist() for batch in loader] for _ in range(3)]

    first = epochs(1)
    assert first == epochs(1)
    noises = [noise for epoch in [*first, *epochs(2)] for batch in epoch for noise in batch]
    assert len(set(noises)) == len(noises)
