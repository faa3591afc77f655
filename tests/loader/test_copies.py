"""A loader can be copied at any time: the copy has the same arguments, and iterations of its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stallfree as sf
from cases import half

DATA = list(range(20))

MAKE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.utils.data.DataLoader(DATA, 4, num_workers=1),  # type: ignore[arg-type]
    "plain": lambda: sf.DataLoader(DATA, 4, shuffle=True),
    "workers": lambda: sf.DataLoader(DATA, 4, num_workers=1),
    "persistent workers": lambda: sf.DataLoader(DATA, 4, num_workers=1, persistent_workers=True),
    "sampler": lambda: sf.DataLoader(DATA, 4, sampler=torch.utils.data.RandomSampler(DATA)),  # type: ignore[arg-type]
    "cached": lambda: sf.DataLoader(sf.CachedDataset(DATA, capacity="1MiB"), 4),
    "window": lambda: sf.DataLoader(sf.SmartCacheDataset(DATA, cache_num=20), 4),
}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda loader: pickle.loads(pickle.dumps(loader))}


def ids_of(batches: Any) -> list[int]:
    return [id for batch in batches for id in batch.tolist()]


def close(loader: Any) -> None:
    for opened in (loader, loader.dataset):
        if hasattr(opened, "close"):
            opened.close()


@pytest.mark.parametrize(("kind", "copied", "taken"), half(MAKE, COPIES, [1, 5]))
def test_a_copy_goes_on_by_itself(kind: str, copied: str, taken: int) -> None:
    loader = MAKE[kind]()
    iterator = iter(loader)
    before = ids_of(next(iterator) for _ in range(taken))
    if taken == 5:
        assert next(iterator, None) is None
    other = COPIES[copied](loader)
    assert (len(other), other.batch_size, other.num_workers) == (len(loader), 4, loader.num_workers)
    for _ in range(2):
        assert sorted(ids_of(other)) == DATA
    assert sorted(before + ids_of(iterator)) == DATA
    assert sorted(ids_of(loader)) == DATA
    close(loader)
    close(other)
