"""Generic classes can be subscripted at run time."""

from __future__ import annotations

from typing import Any

import pytest

import stallfree as sf


@pytest.mark.parametrize(
    "generic", [sf.DataLoader, sf.SharedLoader, sf.CachedDataset, sf.SmartCacheDataset, sf.DevicePrefetcher, sf.Batch]
)
def test_subscripts_work_at_run_time(generic: Any) -> None:
    assert generic[int].__origin__ is generic
    assert generic[int].__args__ == (int,)


def test_a_subscript_makes_a_loader_and_a_base_class() -> None:
    class Numbers(sf.DataLoader[list[int]]):
        pass

    for kind in (Numbers, sf.DataLoader[list[int]]):
        with kind([1, 2, 3], batch_size=2, collate_fn=list) as loader:
            assert list(loader) == [[1, 2], [3]]
