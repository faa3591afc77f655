"""A loader in a forked child: parent and child both have every sample, with pools of their own."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import pytest
import torch

import stallfree as sf
from cases import half

COUNT = 120


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> int:
        return id


def whole(loader: Any) -> bool:
    return sorted(id for batch in loader for id in batch.tolist()) == list(range(COUNT))


def forked(loader: Any) -> int:
    """Fork a child that iterates twice; returns its process id. It exits with 0 if both epochs were whole."""
    child = os.fork()
    if child == 0:
        try:
            found = whole(loader) and whole(loader)
            loader.close()
            os._exit(0 if found else 3)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        os._exit(4)
    return child


@pytest.mark.parametrize(
    ("moment", "workers", "cached"), half(["in mid-epoch", "between epochs"], [0, 1, 2], [False, True])
)
def test_parent_and_child_have_every_sample(moment: str, workers: int, cached: bool) -> None:
    dataset: Any = sf.CachedDataset(Numbers(), capacity="4MiB") if cached else Numbers()
    loader = sf.DataLoader(
        dataset, batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0, timeout=60
    )
    seen = []
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if number == 5 and moment == "in mid-epoch":
            child = forked(loader)
    assert sorted(seen) == list(range(COUNT))
    if moment == "between epochs":
        child = forked(loader)
    assert whole(loader)
    assert os.waitpid(child, 0)[1] == 0
    assert whole(loader)
    loader.close()
    if cached:
        dataset.close()
