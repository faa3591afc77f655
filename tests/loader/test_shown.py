"""What other libraries and users see of a loader: its attributes, its `repr`, and torch's conventions for odd ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stallfree as sf
from loader_data import Made, zero_dim


def as_list(samples: list[Any]) -> list[Any]:
    return samples


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
    loader = kind(Made(4, int), batch_sampler=batches, collate_fn=as_list, num_workers=workers)
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
