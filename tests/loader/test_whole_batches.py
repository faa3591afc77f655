"""Data sets with `__getitems__`: a batch is one call, as under torch's loader, unless it draws random numbers."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stallfree as sf
from cases import half

WORKERS = pytest.mark.parametrize("workers", [0, 1])


class Batches(torch.utils.data.Dataset[Any]):
    """Gives whole batches only."""

    def __init__(self, several: Callable[[list[int]], Any]) -> None:
        self.several = several

    def __len__(self) -> int:
        return 20

    def __getitems__(self, ids: list[int]) -> Any:
        return self.several(ids)


class Both(Batches):
    """Gives single samples too, which are other ones."""

    def __getitem__(self, id: int) -> Any:
        return {"x": id, "y": str(id)}


def noisy(ids: list[int]) -> list[float]:
    return [id + random.random() for id in ids]


class Noisy(Batches):
    def __getitem__(self, id: int) -> float:
        return noisy([id])[0]


@WORKERS
def test_samples_of_a_data_set_with_batches_only_are_cached(workers: int) -> None:
    data: Any = Batches(lambda ids: [torch.full((3,), id) for id in ids])
    torchs = [batch.tolist() for batch in torch.utils.data.DataLoader(data, batch_size=4)]
    cached = sf.CachedDataset(data, capacity="1MiB")
    with cached, sf.DataLoader(cached, batch_size=4, num_workers=workers) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == torchs
            assert cached.stats().storage_reads == 20
        assert cached.stats().hits >= 20


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [Noisy, Batches])
def test_random_numbers_are_a_function_of_each_id(kind: Any, workers: int) -> None:
    def values(size: int, workers: int) -> list[float]:
        with sf.DataLoader(kind(noisy), batch_size=size, seed=5, num_workers=workers) as loader:
            return [value for batch in loader for value in batch.tolist()]

    first = values(4, workers)
    assert first == values(10, 1)
    assert len({value - int(value) for value in first}) == 20


@WORKERS
def test_an_error_of_a_batch_is_raised(workers: int) -> None:
    def failing(ids: list[int]) -> list[int]:
        if 7 in ids:
            raise FileNotFoundError("the file of the batch")
        return ids

    with sf.DataLoader(Both(failing), batch_size=4, num_workers=workers) as loader:
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


class Table:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and other.ids == self.ids

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"Table({self.ids})"


def columns(ids: list[int]) -> Any:
    return {"x": torch.tensor(ids), "y": [str(id) for id in ids]}


WHOLE: dict[str, Batches] = {
    "columns": Batches(columns),
    "columns, and rows": Both(columns),
    "a tensor": Batches(lambda ids: torch.tensor(ids)[:, None] * torch.ones(3)),
    "as many columns as samples": Batches(lambda ids: (torch.tensor(ids), torch.tensor(ids) * 10)),
    "two views of each sample": Both(lambda ids: [id + view / 10 for id in ids for view in range(2)]),
    "an object": Batches(Table),
    "None": Batches(lambda ids: None),
}


def unchanged(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize(("kind", "workers"), half(WHOLE, [0, 1]))
def test_a_batch_that_is_no_list_of_samples(kind: str, workers: int) -> None:
    for data in (WHOLE[kind], torch.utils.data.Subset(WHOLE[kind], [5, 4, 3, 2, 1, 0])):
        found = []
        for loader in (torch.utils.data.DataLoader, sf.DataLoader):
            made = loader(data, 4, collate_fn=unchanged, num_workers=workers)
            found.append([repr(list(made)) for _ in range(2)])
        assert found[0] == found[1]


@WORKERS
def test_single_samples_are_not_asked_for_as_batches(workers: int) -> None:
    found = []
    for loader in (torch.utils.data.DataLoader, sf.DataLoader):
        found.append(repr(list(loader(Both(columns), batch_size=None, num_workers=workers))))
    assert found[0] == found[1]


def test_the_draws_of_such_batches_depend_on_the_seed() -> None:
    data = Batches(lambda ids: {"x": torch.tensor(ids), "noise": torch.rand(len(ids))})

    def epochs(seed: int, workers: int = 1) -> list[Any]:
        with sf.DataLoader(data, 4, seed=seed, collate_fn=unchanged, num_workers=workers) as loader:
            return [[batch["noise"].tolist() for batch in loader] for _ in range(2)]

    first = epochs(1)
    assert first == epochs(1, 2)
    noises = [noise for epoch in [*first, *epochs(2)] for batch in epoch for noise in batch]
    assert len(set(noises)) == len(noises)


@WORKERS
@pytest.mark.parametrize("kind", ["array", "tensor", "tuple"])
def test_any_sequence_of_samples_is_collated_as_under_torch(kind: str, workers: int) -> None:
    table = torch.arange(40.0).reshape(20, 2)
    kinds: dict[str, Any] = {"array": table.numpy(), "tensor": table}
    data: Any = Batches(lambda ids: tuple(table[ids]) if kind == "tuple" else kinds[kind][ids])

    def batches(loader: Any) -> Any:
        try:
            return [batch.tolist() for batch in loader]
        except TypeError:  # torch's `stack` takes no tensor
            return TypeError

    expected = batches(torch.utils.data.DataLoader(data, batch_size=8))
    with sf.DataLoader(data, batch_size=8, num_workers=workers) as loader:
        assert batches(loader) == expected
