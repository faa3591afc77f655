"""A `SmartCacheDataset` counts its epochs, whichever loaders ask."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import stallfree as sf
from smart_data import Rows, ids_of, noisy
from stallfree.datasets.window import WindowPlan


def window(**arguments: Any) -> sf.SmartCacheDataset:
    options = {"cache_num": 6, "replace_rate": 0.5, "on_late": "wait", "seed": 1}
    return sf.SmartCacheDataset(Rows(20), noisy, **options | arguments)


def torch_loader(data: Any, **arguments: Any) -> Any:
    return DataLoader(data, 3, **{"shuffle": True, **arguments})


def own_loader(data: Any, **arguments: Any) -> Any:
    return sf.DataLoader(data, 3, **{"shuffle": True, **arguments})


def samples_of(loader: Any) -> dict[int, float]:
    """What each sample of an epoch was."""
    batches = list(loader)
    return dict(zip(ids_of(batches), [drawn for batch in batches for drawn in batch[2].tolist()], strict=True))


def windows(epochs: Iterable[int], seed: int = 1) -> list[list[int]]:
    plan = WindowPlan(20, 6, 3, seed=seed)
    return [sorted(plan.window(3 * epoch).tolist()) for epoch in epochs]


MIXED = [torch_loader, torch_loader, own_loader, own_loader, torch_loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_loader_per_epoch_goes_on(workers: int) -> None:
    with window() as data:
        epochs = [samples_of(make(data, num_workers=workers)) for make in MIXED]
    assert [sorted(epoch) for epoch in epochs] == windows(range(5))
    drawn = [value for epoch in epochs for value in epoch.values()]
    assert len(set(drawn)) == len(drawn)


def test_an_epoch_that_is_set_decides() -> None:
    with window() as data:
        list(own_loader(data))
        data.set_epoch(5)
        assert [sorted(samples_of(own_loader(data))) for _ in range(2)] == windows([5, 6])
        loader = own_loader(data)
        loader.set_epoch(2)
        assert [sorted(samples_of(loader)), sorted(samples_of(own_loader(data)))] == windows([2, 3])


@pytest.mark.parametrize("make", [own_loader, torch_loader])
def test_a_state_of_the_data_set_decides(make: Any) -> None:
    """Without a seed, which follows from another state of torch's generator in the process that goes on."""
    torch.manual_seed(1)
    with window(seed=None) as data:
        for _ in range(2):
            list(make(data))
        state = json.loads(json.dumps(data.state_dict()))
        left = [sorted(samples_of(make(data))) for _ in range(3)]
        assert left == windows([2, 3, 4], data.window.plan.seed)
    torch.manual_seed(2)
    with window(seed=None) as data:
        list(make(data))
        data.load_state_dict(state)
        assert [sorted(samples_of(make(data))) for _ in range(3)] == left


def test_two_loaders_at_the_same_time_have_epochs_of_their_own() -> None:
    with window() as data:
        found: list[list[Any]] = [[], []]
        for one, other in zip(own_loader(data), own_loader(data), strict=True):
            found[0].append(one)
            found[1].append(other)
        assert [sorted(ids_of(batches)) for batches in found] == windows([0, 1])
        assert sorted(samples_of(own_loader(data))) == windows([2])[0]


def test_torchs_generator_decides_and_is_not_moved() -> None:
    def order(seed: int) -> list[int]:
        torch.manual_seed(seed)
        with window(seed=None) as data:
            assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
            return data.window.plan.sequence(0, 20).tolist()

    orders = [order(seed) for seed in range(2)]
    assert len(set(map(tuple, orders))) == 2
    assert [order(seed) for seed in range(2)] == orders


def test_ranks_on_a_host_have_one_window_and_count_alike() -> None:
    """They come with different states of torch's generator, and each makes a new loader per epoch."""
    torch.manual_seed(1)
    with window(seed=None, name="ranks", num_fill_workers=1) as first:
        torch.manual_seed(2)
        with window(seed=None, name="ranks") as second:
            assert first.window.plan.seed == second.window.plan.seed
            for expected in windows(range(4), first.window.plan.seed):
                loaders = [
                    own_loader(data, sampler=range(rank, 6, 2), shuffle=None)
                    for rank, data in enumerate((first, second))
                ]
                assert sorted(id for loader in loaders for id in samples_of(loader)) == expected


@pytest.mark.parametrize("shuffle", [False, True])
def test_hosts_with_different_seeds_have_all_samples_once(shuffle: bool) -> None:
    parts = [WindowPlan(23, 3, 1, seed=host, shuffle=shuffle, part=(host, 4)) for host in range(4)]
    assert sorted(np.concatenate([part.sequence(0, part.total) for part in parts])) == list(range(23))
