"""Samples of every kind come from workers and caches as they were made."""

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from loader_data import Made

COUNT = 4
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}") for text in ("ComplexHalf", "The PyTorch API of nested", "Sparse")
]

DTYPES = [
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.complex32,
    torch.bfloat16,
    torch.complex128,
]


@dataclasses.dataclass
class Pair:
    image: Any
    label: int


class Thing:
    def __init__(self, image: Any) -> None:
        self.image = image

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and equal(self.image, other.image)


def tensor(id: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([id, 1, 0], dtype=torch.float32).to(dtype)


def strided(id: int) -> torch.Tensor:
    return torch.arange(24.0).reshape(2, 3, 4).add(id)


KINDS: dict[str, Callable[[int], Any]] = {
    "dataclass": lambda id: Pair(strided(id), id),
    "deque": lambda id: deque([strided(id), id]),
    "OrderedDict": lambda id: OrderedDict(image=strided(id), label=id),
    "set": lambda id: {id, "a"},
    "view of much memory": lambda id: Thing(torch.zeros(100_000)[id : id + 2]),
    "leaf with a gradient": lambda id: torch.full((3,), float(id), requires_grad=True),
    "object with such a leaf": lambda id: Thing(torch.full((3,), float(id), requires_grad=True)),
    "conjugate": lambda id: Thing(torch.tensor([1 + 2j * id]).conj()),
    "strided nested": lambda id: torch.nested.nested_tensor([torch.full((id % 3 + 1,), 1.0), torch.ones(2)]),
    "jagged": lambda id: torch.nested.nested_tensor([torch.ones(id % 3 + 1), torch.ones(2)], layout=torch.jagged),
    "sparse": lambda id: torch.sparse_coo_tensor([[0, 1]], [float(id), 2.0], (3,), check_invariants=True),
    "compressed sparse": lambda id: torch.eye(3).mul(id + 1).to_sparse_csr(),
    **{
        f"{name} of {dtype}": (lambda id, make=make, dtype=dtype: make(tensor(id, dtype)))
        for dtype in DTYPES
        for name, make in {
            "dataclass": lambda value: Pair(value, 1),
            "OrderedDict": lambda value: OrderedDict(image=value),
            "object": Thing,
        }.items()
    },
}

STRIDED: dict[str, Callable[[int], Any]] = {
    "channels_last": lambda id: strided(id)[None].contiguous(memory_format=torch.channels_last),
    "permuted": lambda id: strided(id).permute(2, 0, 1),
    "permuted bfloat16": lambda id: strided(id).bfloat16().permute(1, 2, 0),
    "Fortran's order": lambda id: np.asfortranarray(strided(id).numpy()),
    "permuted array": lambda id: strided(id).numpy().transpose(1, 2, 0),
    "permuted, in an object": lambda id: Thing(strided(id).permute(2, 0, 1)),
    "in a dict": lambda id: {"image": strided(id).permute(2, 0, 1), "label": id},
}


def equal(one: Any, other: Any) -> bool:
    """Whether both are of the same type, with the same values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.layout, one.is_nested, one.requires_grad) != (
            other.dtype, other.layout, other.is_nested, other.requires_grad,
        ):  # fmt: skip
            return False
        if one.is_nested:
            return all(torch.equal(a, b) for a, b in zip(one.unbind(), other.unbind(), strict=True))
        if one.layout is not torch.strided:
            return torch.equal(one.to_dense(), other.to_dense())
        return one.stride() == other.stride() and one.tolist() == other.tolist()
    if isinstance(one, np.ndarray):
        return one.strides == other.strides and bool((one == other).all())
    if isinstance(one, Pair):
        return equal(one.image, other.image) and one.label == other.label
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, deque)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def only(samples: list[Any]) -> Any:
    return samples[0]


@pytest.mark.parametrize("whole", [False, True], ids=["collated", "single"])
def test_with_workers(whole: bool) -> None:
    kinds = {**KINDS, **STRIDED}
    options: dict[str, Any] = (
        {"batch_size": None, "collate_fn": lambda sample: sample} if whole else {"collate_fn": only}
    )
    data = Made(COUNT * len(kinds), lambda id: [*kinds.values()][id // COUNT](id % COUNT))
    with sf.DataLoader(data, num_workers=1, **options) as loader:
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


# -- gradients --------------------------------------------------------------------------------------------------------

WITH_HISTORY: dict[str, Callable[[int], Any]] = {
    "tensor": lambda id: torch.ones(3, requires_grad=True) * id,
    "in a dict": lambda id: {"image": torch.ones(3, requires_grad=True) * id},
    "in an object": lambda id: Thing(torch.ones(3, requires_grad=True) * id),
    "bfloat16": lambda id: torch.ones(3, dtype=torch.bfloat16, requires_grad=True) * id,
}


def grad_fn(sample: Any) -> Any:
    found = (
        sample if isinstance(sample, torch.Tensor) else sample["image"] if isinstance(sample, dict) else sample.image
    )
    return found.grad_fn


@pytest.mark.parametrize("name", WITH_HISTORY)
def test_a_gradient_is_not_cut(name: str) -> None:
    """Torch's worker refuses to send such a tensor too; without workers it comes as it is."""
    make = WITH_HISTORY[name]
    for options in ({"collate_fn": only}, {"batch_size": None, "collate_fn": lambda sample: sample}):
        assert grad_fn(next(iter(sf.DataLoader(Made(COUNT, make), **options)))) is not None  # type: ignore[arg-type]
    loader = sf.DataLoader(Made(COUNT, make), num_workers=1, collate_fn=only)
    with loader, pytest.raises(sf.CodecError, match=r"gradient.*detach\(\)"):
        list(loader)
    with sf.CachedDataset(list(range(COUNT)), capacity="4MiB", transform=make) as cached:
        assert all(grad_fn(cached[id]) is not None for _ in range(2) for id in range(COUNT))  # made anew each time
        assert cached.form == "fetched"


def test_a_batch_of_leaves_with_gradients() -> None:
    """Collated, they have a history."""
    loader = sf.DataLoader(Made(COUNT, KINDS["leaf with a gradient"]), 2, num_workers=1)
    with loader, pytest.raises(sf.CodecError, match=r"gradient.*detach\(\)"):
        list(loader)
