"""What looks like reading communicates with no other rank, so one rank alone may do it: `if rank == 0: print(...)`."""

import json
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import stallfree as sf
from children import Child

COUNT = 61
SAMPLES = list(range(COUNT))


@pytest.fixture
def two(tmp_path: Path) -> Callable[[Callable[[int], Any]], list[Any]]:
    """Runs a function in two processes of one gloo group; returns what it gives in each rank, fit for JSON."""

    def run(function: Callable[[int], Any]) -> list[Any]:
        def child(rank: int) -> None:
            torch.set_num_threads(1)
            where = f"file://{tmp_path / 'store'}"
            distributed.init_process_group(
                "gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=10)
            )
            (tmp_path / f"{rank}.json").write_text(json.dumps(function(rank)))
            distributed.barrier()

        children = [Child(child, rank) for rank in range(2)]
        assert [one.wait() for one in children] == [0, 0]
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    return run


def importance(**arguments: Any) -> sf.DataLoader:
    return sf.DataLoader(SAMPLES, 4, sampler=sf.ImportanceSampler(COUNT, plan="icache", beta=2, **arguments))


def importance_cached() -> sf.DataLoader:
    data = sf.CachedDataset(SAMPLES, capacity="1MiB", policy="importance", name="reading")
    return sf.DataLoader(data, 4, sampler=sf.ImportanceSampler(COUNT, cache=data.cache))


def window() -> sf.DataLoader:
    data = sf.SmartCacheDataset(SAMPLES, cache_num=20, replace_rate=0.5, name="reading-window", seed=1)
    return sf.DataLoader(data, 4, sampler=data.rank_sampler())


LOADERS: dict[str, Callable[[], sf.DataLoader]] = {
    "order": lambda: sf.DataLoader(SAMPLES, 4, shuffle=True, ranks="auto"),
    "window": window,
    "importance": importance,
    "importance with a cache": importance_cached,
}


def read(loader: sf.DataLoader) -> int:
    """Reads what a loader and its sampler show; returns the length."""
    for shown in (loader, loader.sampler, loader.dataset):
        repr(shown)
    loader.state_dict(), loader.stats(), loader.seed, loader.decision, loader.cached, loader.batch_sampler
    sampler: Any = loader.sampler
    assert len(sampler) <= COUNT
    if isinstance(sampler, sf.ImportanceSampler):
        sampler.next_epoch, sampler.state_dict(), sampler.expected_samples(5), loader.importance_stats()
    return len(loader)


@pytest.mark.parametrize("kind", LOADERS)
def test_one_rank_alone_may_read_between_collective_operations(kind: str, two: Any) -> None:
    def train(rank: int) -> list[Any]:
        def sum_of_ranks() -> float:
            total = torch.ones(1)
            distributed.all_reduce(total)
            return total.item()

        found = []
        with closing(LOADERS[kind]()) as loader:
            for _ in range(3):
                before = read(loader) if rank == 0 else 0
                assert sum_of_ranks() == 2
                iterator = iter(loader)
                during = read(loader) if rank == 1 else len(loader)
                assert sum_of_ranks() == 2
                ids = []
                for batch in iterator:
                    served = getattr(batch, "ids", batch)
                    ids.append(served.tolist())
                    if isinstance(batch, sf.Batch):
                        loader.update(served, served.float() + rank)
                    if rank == 0:
                        assert read(loader) == during
                    assert sum_of_ranks() == 2
                assert len(ids) == during
                found.append((before, during, ids))
            close = getattr(loader.dataset, "close", None)
        if close is not None:
            close()
        return found

    one, two_ = two(train)
    lengths = [during for _, during, _ in one]
    assert [during for _, during, _ in two_] == lengths
    assert one[0][0] == lengths[0]
    if kind == "importance":  # shorter epochs: the length of the last one counts until the next one begins
        assert [before for before, _, _ in one] == [lengths[0], lengths[0], lengths[1]]
        assert lengths[2] < lengths[0]
