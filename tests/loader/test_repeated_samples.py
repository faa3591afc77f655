"""A sample that comes again in the epoch of a sampler is augmented anew, as in an endless epoch each one is."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

import stallfree as sf
from loader_data import Made

COUNT, SIZE = 6, 4


def noisy(id: int) -> tuple[int, float]:
    return id, torch.rand(()).item()


class Endless:
    """Permutations without an end, or batches of them."""

    def __init__(self, size: int = 0) -> None:
        self.size = size

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        while True:
            ids = torch.randperm(COUNT, generator=generator).tolist()
            yield from ([ids[at : at + self.size] for at in range(0, COUNT, self.size)] if self.size else ids)


def with_replacement() -> RandomSampler:
    generator = torch.Generator().manual_seed(2)
    return RandomSampler(range(COUNT), replacement=True, num_samples=60, generator=generator)


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "endless": lambda: {"batch_size": SIZE, "sampler": Endless()},
    "endless batches": lambda: {"batch_sampler": Endless(3)},
    "with replacement": lambda: {"batch_size": SIZE, "sampler": with_replacement()},
    "a batch sampler": lambda: {"batch_sampler": BatchSampler(with_replacement(), SIZE, False)},
    "single": lambda: {"batch_size": None, "sampler": Endless()},
    "a list": lambda: {"batch_size": 2, "sampler": [0, 1, 2] * 5},
}


def pairs(batches: Any) -> list[Any]:
    """(id, number drawn for it) of each sample; those of a batch that come twice in it once."""
    found = []
    for ids, numbers in batches:
        made = zip(ids.tolist(), numbers.tolist(), strict=True) if torch.is_tensor(ids) else [(ids, numbers)]
        found += sorted(set(made))
    return found


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("workers", "cached"), [(1, False), (0, True)])
def test_a_sample_that_comes_again_is_another_one(workers: int, cached: bool, name: str) -> None:
    base: Any = Made(COUNT, int)
    data: Any = sf.CachedDataset(base, capacity="1MiB", transform=noisy) if cached else Made(COUNT, noisy)

    def loader() -> sf.DataLoader:
        return sf.DataLoader(data, num_workers=workers, seed=3, **ORDERS[name]())

    first = loader()
    batches = iter(first)
    seen = pairs(islice(batches, 3))
    state = json.loads(json.dumps(first.state_dict()))
    rest = pairs(islice(batches, 12))
    drawn = [number for _, number in seen + rest]
    assert len({id for id, _ in seen + rest}) < len(drawn) == len(set(drawn))
    resumed = loader()
    resumed.load_state_dict(state)
    assert pairs(islice(iter(resumed), 12)) == rest
    again = loader()  # nothing but the seed decides
    assert pairs(islice(iter(again), 15)) == seen + rest
    if name in ("with replacement", "a list"):
        another = pairs(again)  # the next epoch, of the same generator or not
        assert not {number for _, number in another} & set(drawn)
    for made in (first, resumed, again):
        made.close()
    if cached:
        data.close()
