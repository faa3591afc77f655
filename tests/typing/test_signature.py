"""The signatures for type checkers have the arguments of the constructors."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import stallfree as sf
from stallfree.loader.signature import LoaderArguments, SharedArguments

LOADER = {"dataset", "batch_size", "shuffle", "sampler", "with_ids", "output"}
SHARED = {"dataset", "group", "with_ids", "collate_fn", "job_transform"}
"""Arguments that the overloads have themselves."""


@pytest.mark.parametrize(
    ("loader", "others", "own"), [(sf.DataLoader, LoaderArguments, LOADER), (sf.SharedLoader, SharedArguments, SHARED)]
)
def test_overloads_have_all_arguments(loader: Any, others: type, own: set[str]) -> None:
    parameters = set(inspect.signature(loader.__init__).parameters) - {"self"}
    assert own | set(inspect.get_annotations(others)) == parameters  # which has those of its bases


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
