"""What other libraries and users see of a loader: its attributes, its `repr`, and torch's conventions for odd ids."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

import stallfree as sf
from cached_data import Numbers
from loader_data import Made, zero_dim


@pytest.mark.parametrize("size", [None, 2])
def test_a_loader_made_like_another(size: int | None) -> None:
    """As Lightning does it: with the attributes of the first one as arguments."""
    data = Made(4, zero_dim)
    first = sf.DataLoader(data, batch_size=size)
    again = sf.DataLoader(data, batch_size=first.batch_size, collate_fn=first.collate_fn)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in first]
    assert again.stats().private_copies == 0


@pytest.mark.parametrize(("kind", "workers"), [(sf.DataLoader, 1), (torch.utils.data.DataLoader, 0)])
def test_an_empty_batch_goes_to_collate_fn(kind: Any, workers: int) -> None:
    batches = [[0, 1], [], [2]]
    loader = kind(Made(4, int), batch_sampler=batches, collate_fn=list, num_workers=workers)
    assert list(loader) == batches


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_batch_out_of_a_cache(workers: int) -> None:
    with sf.CachedDataset(Made(4, zero_dim), capacity="1MiB") as data:
        loader = sf.DataLoader(data, batch_sampler=[[0, 1], [], [2, 3]], collate_fn=len, num_workers=workers)
        assert list(loader) == list(loader) == [2, 0, 2]
        with pytest.raises(sf.InputError, match="empty batch: leave it out"):
            list(sf.DataLoader(data, batch_sampler=[[]], num_workers=workers))


@pytest.mark.parametrize("id", [4, -5])
def test_an_id_out_of_range(id: int) -> None:
    with pytest.raises(IndexError, match=f"the id {id}, and the data set has the ids 0 to 3") as caught:
        list(sf.DataLoader(Made(4, zero_dim), sampler=[0, id]))
    assert isinstance(caught.value, sf.InputError)
    with sf.CachedDataset(Made(4, zero_dim), capacity="1MiB") as data:
        with pytest.raises(IndexError, match=f"id {id} is outside") as caught:
            data.cache.get_many([id])
        assert isinstance(caught.value, sf.InputError)
        with pytest.raises(IndexError):
            data[id]


def test_repr() -> None:
    data = Made(4, zero_dim)
    assert repr(sf.DataLoader(data, 2, shuffle=True)) == (
        "DataLoader(<Made of 4 samples>, batch_size=2, shuffle=True, num_workers=0)"
    )
    with sf.CachedDataset(data, capacity="1MiB", name="shown") as cached:
        loader = sf.DataLoader(cached, num_workers=2)
        assert repr(loader) == f"DataLoader({cached!r}, batch_size=1, num_workers=2)"
        assert "Made, 4 samples" in repr(loader)
        assert repr(sf.LocalSampler(cached, rank=1, num_ranks=2)) == (
            "LocalSampler(4 samples, rank=1, num_ranks=2, shuffle=True)"
        )
    with sf.SmartCacheDataset(data, cache_num=2) as window:
        assert "cache_num=2" in repr(sf.DataLoader(window))
    with sf.SharedLoader(data, group="shown", batch_size=2) as loader:
        assert repr(loader) == "SharedLoader(<Made of 4 samples>, group='shown', batch_size=2)"
    assert repr(sf.ImportanceSampler(4, plan="icache")) == "ImportanceSampler(4, plan='icache')"
    loader = sf.DataLoader(data, device="cpu")
    assert repr(loader).endswith("device=device(type='cpu'))")
    assert repr(sf.DevicePrefetcher(loader, "cpu")).startswith("DevicePrefetcher(DataLoader(")


# -- samplers that are shown yield the loader's own order: libraries iterate over them ---------------------------------

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
