"""Ranks that their process group knows, as `torch.multiprocessing.spawn` starts them, or that variables tell."""

import os
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import stallfree as sf
from process_ranks import in_ranks, join
from smart_data import Rows, ids_of
from stallfree.datasets import ranks as module

RANKS = 3
LOADERS = {"stallfree": sf.DataLoader, "torch": torch.utils.data.DataLoader}


def train(kind: str, together: Callable[[], object], workers: int) -> list[list[int]]:
    epochs: list[list[int]] = []
    with sf.SmartCacheDataset(Rows(24), cache_num=12, replace_rate=0.25, on_late="wait") as data:
        sampler = data.rank_sampler()
        loader = LOADERS[kind](data, 2, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            epochs.append([])
            for batch in loader:
                epochs[-1] += ids_of([batch])
                together()  # as the exchange of gradients is
        del loader
    return epochs


@pytest.mark.parametrize(("kind", "known", "workers"), [
    ("stallfree", "group", 0), ("torch", "group", 0), ("stallfree", "variables", 1), ("torch", "variables", 0),
])  # fmt: skip
def test_the_ranks_of_a_host_split_one_window(kind: str, known: str, workers: int, tmp_path: Path) -> None:
    """They know each other by their process group, or by the variables of a launcher."""
    barrier = get_context("fork").Barrier(RANKS)

    def run(rank: int) -> Any:
        if known == "group":
            join(rank, RANKS, tmp_path)
        else:
            os.environ |= {"MASTER_PORT": "4711", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
        return train(kind, lambda: barrier.wait(60), workers)

    seen: set[int] = set()
    for parts in zip(*in_ranks(RANKS, tmp_path, run), strict=True):
        assert [len(part) for part in parts] == [4] * RANKS
        window = {id for part in parts for id in part}
        assert len(window) == 12
        seen |= window
    assert len(seen) == 12 + 3 * 3


def test_a_window_or_sampler_from_before_the_group_is_refused(tmp_path: Path) -> None:
    """Such a window is one for each rank, and such a sampler gives each rank all samples."""

    def run(rank: int) -> None:
        with (
            sf.SmartCacheDataset(Rows(24), cache_num=12) as own,
            sf.SmartCacheDataset(Rows(24), cache_num=12, name="given", seed=1) as named,
        ):
            early = named.rank_sampler()
            assert len(early) == 12
            join(rank, 2, tmp_path)
            with pytest.raises(sf.InputError, match="no job was known when the data set was made: make it after"):
                own.rank_sampler()
            with pytest.raises(sf.InputError, match="sampler was made before the process group, and gives each rank"):
                list(sf.DataLoader(named, batch_size=4, sampler=early))
            assert len(named.rank_sampler()) == 6
            distributed.barrier()

    in_ranks(2, tmp_path, run)


def test_each_host_has_its_own_ranks(tmp_path: Path) -> None:
    """Two of three ranks are on one host, as far as they can see. Each host has its part of the data."""

    def run(rank: int) -> Any:
        module._this_host = lambda: f"host {rank // 2}"
        join(rank, RANKS, tmp_path)
        with (
            sf.SmartCacheDataset(Rows(24), cache_num=12) as data,
            pytest.raises(sf.InputError, match=r"run on 2 hosts.*give hosts=\(number of this host, 2\)"),
        ):
            data.rank_sampler()
        with sf.SmartCacheDataset(Rows(24), cache_num=12, hosts=(rank // 2, 2), seed=1) as data:
            sampler = data.rank_sampler()
            distributed.barrier()
            return sampler.num_replicas, sampler.rank

    assert in_ranks(RANKS, tmp_path, run) == [[2, 0], [2, 1], [1, 0]]
