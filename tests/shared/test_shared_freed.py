"""An unreferenced loader leaves its group at once, without waiting for the garbage collector."""

from __future__ import annotations

import gc
import sys
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


def test_no_python_code_runs_where_a_batch_is_freed(store_root: object) -> None:
    """An interrupt during it would be lost."""
    with sf.SharedLoader(TensorDataset(torch.arange(64)), group="quiet", batch_size=4) as loader:
        seen = []
        for batch in loader:
            calls: list[str] = []
            seen += batch[0].tolist()
            sys.setprofile(lambda frame, event, _, calls=calls: calls.append(frame.f_code.co_name))
            try:
                del batch
            finally:
                sys.setprofile(None)
            assert "_end_leases" not in calls
            assert not [
                name for name in calls if name not in ("<lambda>", "test_no_python_code_runs_where_a_batch_is_freed")
            ]
        assert sorted(seen) == list(range(64))
