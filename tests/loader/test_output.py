"""Batches as NumPy arrays: the same values, the same memory, the same leases."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import stallfree as sf
from stallfree.errors import InputError
from stallfree.loader.output import as_arrays, check_output


class Pair(NamedTuple):
    left: Any
    right: Any


class Samples:
    """Sample `id` in `form`."""

    def __init__(self, form: str, count: int = 20) -> None:
        self.form, self.count = form, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> Any:
        row = torch.full((3, 4), id, dtype=torch.int16)
        return {
            "tensor": row,
            "array": row.numpy(),
            "pair": (row, id),
            "named": Pair(row, float(id)),
            "dict": {"x": row, "deep": [{"y": np.float32(id)}, f"text {id}"]},
            "bfloat": row.to(torch.bfloat16),
        }[self.form]


NumpyLoader = partial(sf.DataLoader, output="numpy")


def assert_alike(array: Any, tensor: Any) -> None:
    """`array` is `tensor` with arrays in the place of tensors."""
    if isinstance(tensor, torch.Tensor):
        assert type(array) is np.ndarray
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())
    else:
        assert type(array) is type(tensor)
        if isinstance(tensor, dict):
            assert array.keys() == tensor.keys()
            for key in tensor:
                assert_alike(array[key], tensor[key])
        elif isinstance(tensor, (list, tuple)):
            assert len(array) == len(tensor)
            for part, other in zip(array, tensor, strict=True):
                assert_alike(part, other)
        else:
            assert array == tensor


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        *((form, {"batch_size": 6}) for form in ("tensor", "array", "pair", "named", "dict")),
        ("dict", {"batch_size": None}),
        ("pair", {"batch_size": 6, "with_ids": True}),
    ],
)
def test_the_same_as_tensors(form: str, settings: dict[str, Any]) -> None:
    with sf.DataLoader(Samples(form), **settings) as tensors, NumpyLoader(Samples(form), **settings) as arrays:
        assert len(tensors) == len(arrays)
        for array, tensor in zip(arrays, tensors, strict=True):
            assert_alike(array, tensor)


def test_memory_is_shared() -> None:
    batch = {"x": torch.arange(6.0).reshape(2, 3).t(), "ids": [torch.arange(3)]}
    arrays = as_arrays(batch)
    assert np.shares_memory(arrays["x"], batch["x"].numpy())
    arrays["x"][2, 1] = -1
    assert batch["x"][2, 1] == -1


def test_other_values_stay() -> None:
    thing = object()
    batch = OrderedDict(a=thing, b="text", c=None, d=np.arange(2), e=torch.zeros(2, requires_grad=True))
    arrays = as_arrays(batch)
    assert type(arrays) is OrderedDict
    assert arrays["a"] is thing
    assert arrays["d"] is batch["d"]
    assert arrays["e"].tolist() == [0, 0]
    assert isinstance(batch["e"], torch.Tensor)


def test_kept_arrays_are_never_overwritten() -> None:
    """Arrays, and views on arrays, hold the slot of their batch. As with tensors, three batches are held so."""
    counts = []
    for kind in (sf.DataLoader, NumpyLoader):
        kept = []
        with kind(Samples("tensor", 96), batch_size=4, num_workers=2) as loader:
            for batch in loader:
                number = int(batch[0, 0, 0]) // 4
                if number % 2:
                    kept.append((number, batch[1:, 0]))  # a view keeps it
                del batch
            for number, view in kept:
                assert view[:, 0].tolist() == [4 * number + 1, 4 * number + 2, 4 * number + 3]
            counts.append(loader.stats().private_copies)
    # Batches 1, 3 and 5 hold their slots, so those from number 6 on are copies.
    assert counts == [18, 18]
    assert len(kept) == 12


def test_what_numpy_has_no_form_for() -> None:
    message = r"no form for a tensor of torch\.bfloat16 .*Convert it in the data set"
    with NumpyLoader(Samples("bfloat"), batch_size=4) as loader, pytest.raises(InputError, match=message):
        next(iter(loader))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("jax", False, None), "output='jax': use 'torch' or 'numpy'"),
        (("numpy", True, None), "leave out device and pin_memory"),
        (("numpy", False, "cpu"), "leave out device and pin_memory"),
    ],
)
def test_arguments_that_contradict(settings: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_output(*settings)
