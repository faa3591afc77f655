"""Batches composed in place equal those of torch's `default_collate`."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

from loader_data import Point, same
from stallfree.loader.collate import Bytes, batch_structure, collate_default, stack
from stallfree.pipeline.codec import encode, read_record

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "bool"]

scalars = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(max_size=3),
    st.binary(max_size=3),
)


@st.composite
def array(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    values = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)
    return torch.from_numpy(values) if draw(st.booleans()) else values


values = st.recursive(
    st.one_of(scalars, array()),
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.tuples(children, children),
        st.builds(Point, children, children),
        st.dictionaries(st.text(max_size=2), children, min_size=1, max_size=3),
    ),
    max_leaves=5,
)


class Memory:
    """Memory for one batch."""

    def __init__(self) -> None:
        self.bytes: Bytes = np.empty(0, np.uint8)

    def reserve(self, size: int) -> Bytes:
        self.bytes = np.full(size + 13, 0xAB, np.uint8)
        return self.bytes


def outcome(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error)


@settings(max_examples=25)
@given(
    st.one_of(
        st.lists(values, min_size=1, max_size=4), st.integers(1, 4).flatmap(lambda n: values.map(lambda v: [v] * n))
    )
)
def test_stacking_gives_what_torch_gives(samples: list[Any]) -> None:
    memory = Memory()
    used, _ = stack(samples, memory.reserve)
    expected = outcome(lambda: default_collate(samples))
    if used:
        assert same(read_record(memory.bytes, copy=True), expected)
    else:
        assert same(outcome(lambda: collate_default(samples)), expected)


def test_a_collation_that_does_not_stack_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        torch.utils.data._utils.collate.default_collate_fn_map,
        torch.Tensor,
        lambda batch, **_: torch.stack(list(reversed(batch))),
    )
    sample, _ = encode(torch.zeros(4, 1, 5))
    assert batch_structure(sample, 3) is None


def test_torch_takes_no_shared_memory_of_its_own_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch_worker, "_worker_info", info)
    assert not collate_default([torch.zeros(3)]).is_shared()
    assert torch.utils.data.get_worker_info() is info
