"""Ranks that their process group knows, as `torch.multiprocessing.spawn` starts them, or that variables tell."""

import json
import os
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import stallfree as sf
from children import Child
from smart_data import Rows, ids_of
from stallfree.datasets import ranks as module

RANKS = 3
VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
LOADERS = {"stallfree": sf.DataLoader, "torch": torch.utils.data.DataLoader}


def join(rank: int, folder: Path, ranks: int = RANKS) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=ranks)


def in_ranks(folder: Path, run: Callable[[int], Any]) -> list[Any]:
    """What `run(rank)` gives in each rank, fit for JSON. The ranks know neither each other nor their number."""

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        for variable in VARIABLES:
            os.environ.pop(variable, None)
        (folder / f"{rank}.json").write_text(json.dumps(run(rank)))

    children = [Child(main, rank) for rank in range(RANKS)]
    assert [child.wait() for child in children] == [0] * RANKS
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def train(kind: str, together: Callable[[], object], workers: int) -> list[list[int]]:
    """The ids of this rank in four epochs."""
    epochs = []
    with sf.SmartCacheDataset(Rows(24), cache_num=12, replace_rate=0.25, on_late="wait") as data:
        sampler = data.rank_sampler()
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        loader = LOADERS[kind](data, batch_size=2, sampler=sampler, **options)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            ids = []
            for batch in loader:
                ids += ids_of([batch])
                together()  # as the exchange of gradients is
            epochs.append(ids)
        del loader
    return epochs


@pytest.mark.parametrize(
    ("kind", "known", "workers"),
    [("stallfree", "group", 0), ("torch", "group", 0), ("stallfree", "variables", 1), ("torch", "variables", 0)],
)
def test_the_ranks_of_a_host_split_one_window(kind: str, known: str, workers: int, tmp_path: Path) -> None:
    """They know each other by their process group, or by the variables of a launcher."""
    barrier = get_context("fork").Barrier(RANKS)

    def run(rank: int) -> Any:
        if known == "group":
            join(rank, tmp_path)
        else:
            os.environ |= {"MASTER_PORT": "4711", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
        return train(kind, lambda: barrier.wait(60), workers)

    seen: set[int] = set()
    for parts in zip(*in_ranks(tmp_path, run), strict=True):
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
            join(rank, tmp_path)
            with pytest.raises(
                sf.InputError, match=r"no job was known when the data set was made: make it after init_p"
            ):
                own.rank_sampler()
            with pytest.raises(sf.InputError, match=r"sampler was made before the process group, and gives each rank"):
                list(sf.DataLoader(named, batch_size=4, sampler=early))
            assert len(named.rank_sampler()) == 4
            distributed.barrier()

    in_ranks(tmp_path, run)


def test_each_host_has_its_own_ranks(tmp_path: Path) -> None:
    """Two of three ranks are on one host, as far as they can see. Each host has its part of the data."""

    def run(rank: int) -> Any:
        module._this_host = lambda: f"host {rank // 2}"
        join(rank, tmp_path)
        with (
            sf.SmartCacheDataset(Rows(24), cache_num=12) as data,
            pytest.raises(sf.InputError, match=r"run on 2 hosts.*give hosts=\(number of this host, 2\)"),
        ):
            data.rank_sampler()
        with sf.SmartCacheDataset(Rows(24), cache_num=12, hosts=(rank // 2, 2), seed=1) as data:
            sampler = data.rank_sampler()
            distributed.barrier()
            return sampler.num_replicas, sampler.rank

    assert in_ranks(tmp_path, run) == [[2, 0], [2, 1], [1, 0]]
