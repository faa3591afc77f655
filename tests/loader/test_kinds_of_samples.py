"""Samples of every kind come from workers and caches as they were made, single or in batches of `__getitems__`."""

import dataclasses
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from cases import half
from loader_data import Made

COUNT = 2
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}") for text in ("ComplexHalf", "The PyTorch API of nested", "Sparse")
]

DTYPES = [torch.uint16, torch.float8_e4m3fn, torch.complex32, torch.bfloat16]


@dataclasses.dataclass
class Pair:
    image: Any
    label: int


class Thing:
    def __init__(self, image: Any) -> None:
        self.image = image


def strided(id: int) -> torch.Tensor:
    return torch.arange(24.0).reshape(2, 3, 4).add(id)


KINDS: dict[str, Callable[[int], Any]] = {
    "dataclass": lambda id: Pair(strided(id), id), "deque": lambda id: deque([strided(id), id]),
    "OrderedDict": lambda id: OrderedDict(image=strided(id), label=id), "set": lambda id: {id, "a"},
    "view of much memory": lambda id: Thing(torch.zeros(100_000)[id : id + 2]),
    "leaf with a gradient": lambda id: torch.full((3,), float(id), requires_grad=True),
    "object with such a leaf": lambda id: Thing(torch.full((3,), float(id), requires_grad=True)),
    "conjugate": lambda id: Thing(torch.tensor([1 + 2j * id]).conj()),
    "jagged": lambda id: torch.nested.nested_tensor([torch.ones(id % 3 + 1), torch.ones(2)], layout=torch.jagged),
    "sparse": lambda id: torch.sparse_coo_tensor([[0, 1]], [float(id), 2.0], (3,), check_invariants=True),
    "compressed sparse": lambda id: torch.eye(3).mul(id + 1).to_sparse_csr(),
    **{f"object of {dtype}": lambda id, dtype=dtype: Thing(torch.tensor([id, 1.0, 0]).to(dtype)) for dtype in DTYPES},  # type: ignore[misc]
}  # fmt: skip

STRIDED: dict[str, Callable[[int], Any]] = {
    "channels_last": lambda id: strided(id)[None].contiguous(memory_format=torch.channels_last),
    "permuted bfloat16": lambda id: strided(id).bfloat16().permute(1, 2, 0),
    "permuted array": lambda id: strided(id).numpy().transpose(1, 2, 0),
    "permuted, in an object": lambda id: Thing(strided(id).permute(2, 0, 1)),
    "in a dict": lambda id: {"image": strided(id).permute(2, 0, 1), "label": id},
}


def equal(one: Any, other: Any) -> bool:
    """Whether both are of the same type, with the same values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        kinds = [(each.dtype, each.layout, each.is_nested, each.requires_grad) for each in (one, other)]
        if one.is_nested:
            one, other = list(one.unbind()), list(other.unbind())
        elif one.layout is torch.strided:
            one, other = [one.stride(), one.tolist()], [other.stride(), other.tolist()]
        else:
            one, other = one.to_dense(), other.to_dense()
        return kinds[0] == kinds[1] and equal(one, other)
    if isinstance(one, np.ndarray):
        return one.strides == other.strides and bool((one == other).all())
    if isinstance(one, (Pair, Thing)):
        one, other = vars(one), vars(other)
    if isinstance(one, dict):
        one, other = [list(one), *one.values()], [list(other), *other.values()]
    if isinstance(one, (list, deque)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def only(samples: list[Any]) -> Any:
    return samples[0]


def unchanged(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("size", [1, None])
def test_with_workers(size: int | None) -> None:
    kinds = {**KINDS, **STRIDED}
    data = Made(COUNT * len(kinds), lambda id: [*kinds.values()][id // COUNT](id % COUNT))
    with sf.DataLoader(data, size, collate_fn=only if size else unchanged, num_workers=1) as loader:
        for number, sample in enumerate(loader):
            name = [*kinds][number // COUNT]
            assert equal(sample, kinds[name](number % COUNT)), name


@pytest.mark.parametrize("name", KINDS)
def test_from_a_cache(name: str) -> None:
    """Prepared by a step. A cache stores plain strides."""
    with sf.CachedDataset(list(range(COUNT)), capacity="4MiB", transform=KINDS[name]) as cached:
        for epoch in range(2):
            for id in range(COUNT):
                assert equal(cached[id], KINDS[name](id)), epoch
        assert cached.stats().hits >= COUNT


def test_a_view_takes_only_its_own_bytes() -> None:
    with sf.CachedDataset(list(range(COUNT)), capacity="4MiB", transform=KINDS["view of much memory"]) as cached:
        assert len(list(cached)) == COUNT
        assert cached.stats().resident_bytes < 20_000


WITH_HISTORY: dict[str, Callable[[int], Any]] = {
    "tensor": lambda id: torch.ones(3, requires_grad=True) * id,
    "in a dict": lambda id: {"image": torch.ones(3, requires_grad=True) * id},
    "in an object": lambda id: Thing(torch.ones(3, requires_grad=True) * id),
}


def grad_fn(sample: Any) -> Any:
    inner = sample["image"] if isinstance(sample, dict) else getattr(sample, "image", sample)
    return inner.grad_fn


@pytest.mark.parametrize("name", WITH_HISTORY)
def test_a_gradient_is_not_cut(name: str) -> None:
    """Torch's worker refuses to send such a tensor too; without workers it comes as it is."""
    data: Any = Made(COUNT, WITH_HISTORY[name])
    assert grad_fn(next(iter(sf.DataLoader(data, collate_fn=only)))) is not None
    assert grad_fn(next(iter(sf.DataLoader(data, None, collate_fn=unchanged)))) is not None
    leaves = Made(COUNT, KINDS["leaf with a gradient"])  # collated, they have a history
    for given, collate in ((data, only), (leaves, None)):
        loader = sf.DataLoader(given, 2, num_workers=1, collate_fn=collate)
        with pytest.raises(sf.CodecError, match=r"gradient.*detach\(\)"), loader:
            list(loader)
    with sf.CachedDataset(list(range(COUNT)), capacity="4MiB", transform=WITH_HISTORY[name]) as cached:
        assert all(grad_fn(cached[id]) is not None for _ in range(2) for id in range(COUNT))  # made anew each time
        assert cached.form == "fetched"


WORKERS = pytest.mark.parametrize("workers", [0, 1])


@dataclasses.dataclass(eq=False)
class Batches(torch.utils.data.Dataset[Any]):
    """Gives whole batches only."""

    several: Callable[[list[int]], Any]

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


@dataclasses.dataclass
class Table:
    ids: list[int]

    def __len__(self) -> int:
        return 0


TABLE = torch.arange(40.0).reshape(20, 2)


def columns(ids: list[int]) -> Any:
    return {"x": torch.tensor(ids), "y": [str(id) for id in ids]}


WHOLE: dict[str, Batches] = {
    "columns": Batches(columns), "columns, and rows": Both(columns),
    "a tensor": Batches(lambda ids: torch.tensor(ids)[:, None] * torch.ones(3)),
    "as many columns as samples": Batches(lambda ids: (torch.tensor(ids), torch.tensor(ids) * 10)),
    "two views of each sample": Both(lambda ids: [id + view / 10 for id in ids for view in range(2)]),
    "an object": Batches(Table), "None": Batches(lambda ids: None),
}  # fmt: skip
SEQUENCES: dict[str, Batches] = {
    "a tuple of samples": Batches(lambda ids: tuple(TABLE[ids])),
    "an array of samples": Batches(lambda ids: TABLE.numpy()[ids]),
}
"""Collated by torch's default."""


@pytest.mark.parametrize(
    ("kind", "workers"), [*half(WHOLE, [0, 1]), *((kind, n) for kind in SEQUENCES for n in (0, 1))]
)
def test_a_batch_that_is_no_list_of_samples(kind: str, workers: int) -> None:
    data, collate = (WHOLE[kind], unchanged) if kind in WHOLE else (SEQUENCES[kind], None)
    for given in (data, torch.utils.data.Subset(data, [5, 4, 3, 2, 1, 0])):
        found = []
        for loader in (torch.utils.data.DataLoader, sf.DataLoader):
            found.append([repr(list(loader(given, 4, collate_fn=collate, num_workers=workers))) for _ in range(2)])
        assert found[0] == found[1]


@WORKERS
def test_single_samples_are_not_asked_for_as_batches(workers: int) -> None:
    loader = sf.DataLoader(Both(columns), batch_size=None, num_workers=workers)
    assert list(loader) == [{"x": id, "y": str(id)} for id in range(20)]


def test_the_draws_of_such_batches_depend_on_the_seed() -> None:
    data = Batches(lambda ids: {"x": torch.tensor(ids), "noise": torch.rand(len(ids))})

    def epochs(seed: int, workers: int = 1) -> list[Any]:
        with sf.DataLoader(data, 4, seed=seed, collate_fn=unchanged, num_workers=workers) as loader:
            return [[batch["noise"].tolist() for batch in loader] for _ in range(2)]

    first = epochs(1)
    assert first == epochs(1, 2)
    noises = [noise for epoch in [*first, *epochs(2)] for batch in epoch for noise in batch]
    assert len(set(noises)) == len(noises)
