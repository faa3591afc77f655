"""An unreferenced loader leaves its group at once, without waiting for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import TensorDataset

import stallfree as sf


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Objects are freed by reference counting only."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("batches", [0, 4], ids=["before", "after"])
@pytest.mark.usefixtures("no_collector")
def test_a_loader_that_is_dropped_leaves_its_group(batches: int, store_root: object) -> None:
    data = TensorDataset(torch.arange(16))
    other = sf.SharedLoader(data, group="dropped", batch_size=4)
    loader = sf.SharedLoader(data, group="dropped", batch_size=4)
    with other:
        assert next(iter(other))[0].tolist() == [0, 1, 2, 3]
        iteration = iter(loader)
        for _ in range(batches):
            next(iteration)
        gone = weakref.ref(loader)
        del loader, iteration
        assert gone() is None
        assert sum(len(batch[0]) for batch in other) == 16
