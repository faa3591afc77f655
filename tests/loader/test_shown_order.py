"""The samplers that a loader shows yield its own order: other libraries iterate over them to skip batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

import stallfree as sf
from cached_data import Numbers

COUNT, SIZE = 22, 4


class Skip(BatchSampler):
    """The batches of `batches` without the first ones, as Accelerate's `skip_first_batches` has them."""

    def __init__(self, batches: Any, first: int) -> None:
        self.batches, self.first = batches, first

    def __iter__(self) -> Iterator[list[int]]:
        return (batch for number, batch in enumerate(self.batches) if number >= self.first)

    def __len__(self) -> int:
        return len(self.batches) - self.first


def skipping(loader: Any, first: int) -> Any:
    """A loader of torch's with the rest of an epoch."""
    return torch.utils.data.DataLoader(
        loader.dataset, batch_sampler=Skip(loader.batch_sampler, first), generator=loader.generator
    )


def ids(batches: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


def seeded_by_torch() -> sf.DataLoader:
    torch.manual_seed(3)
    return sf.DataLoader(Numbers(COUNT), SIZE, shuffle=True)


def of_a_generator() -> sf.DataLoader:
    return sf.DataLoader(Numbers(COUNT), SIZE, shuffle=True, generator=torch.Generator().manual_seed(4))


MAKE: dict[str, Callable[[], sf.DataLoader]] = {
    "in order": lambda: sf.DataLoader(Numbers(COUNT), SIZE),
    "seed": lambda: sf.DataLoader(Numbers(COUNT), SIZE, shuffle=True, seed=1),
    "torch's seed": seeded_by_torch,
    "generator": of_a_generator,
    "drop_last": lambda: sf.DataLoader(Numbers(COUNT), SIZE, shuffle=True, seed=1, drop_last=True),
    "ranks": lambda: sf.DataLoader(Numbers(COUNT), SIZE, shuffle=True, seed=1, ranks=(1, 2)),
    "ranks in order": lambda: sf.DataLoader(Numbers(COUNT), SIZE, seed=1, ranks=(1, 2)),
}


@pytest.mark.parametrize("kind", MAKE)
def test_the_rest_of_an_epoch(kind: str) -> None:
    """Two batches of one loader, and the others by the batch sampler of another, equal one."""
    whole = ids(MAKE[kind]())
    batches = iter(MAKE[kind]())
    first = ids([next(batches), next(batches)])
    assert first + ids(skipping(MAKE[kind](), 2)) == whole


@pytest.mark.parametrize("kind", MAKE)
def test_epochs_go_on(kind: str) -> None:
    """An epoch by the sampler counts: epochs before and after it have their own orders."""
    loader = MAKE[kind]()
    expected = [ids(loader) for _ in range(4)]
    loader = MAKE[kind]()
    assert [ids(loader), ids(skipping(loader, 0)), ids(loader), ids(skipping(loader, 0))] == expected
    loader.set_epoch(1)
    assert ids(skipping(loader, 1)) == expected[1][1:]
    loader.set_epoch(2)
    assert ids(loader) == expected[2]


def test_a_data_set_that_counts_epochs() -> None:
    with sf.CachedDataset(Numbers(COUNT), capacity="1MiB", seed=1) as data:
        loader = sf.DataLoader(data, SIZE, shuffle=True)
        expected = [ids(loader) for _ in range(3)]
    with sf.CachedDataset(Numbers(COUNT), capacity="1MiB", seed=1) as data:
        seen = [ids(sf.DataLoader(data, SIZE, shuffle=True))]
        seen.append(ids(skipping(sf.DataLoader(data, SIZE, shuffle=True), 0)))
        assert [*seen, ids(sf.DataLoader(data, SIZE, shuffle=True))] == expected


def test_the_types_that_libraries_look_for() -> None:
    def sampler(**options: Any) -> Any:
        return sf.DataLoader(Numbers(COUNT), SIZE, **options).sampler

    assert isinstance(sampler(shuffle=True), RandomSampler)
    assert isinstance(sampler(), SequentialSampler)
    assert isinstance(sampler(ranks=(1, 2)), DistributedSampler)
    assert len(sampler(shuffle=True)) == COUNT
    assert len(sampler(ranks=(1, 2))) == COUNT // 2
