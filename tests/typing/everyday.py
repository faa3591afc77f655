"""What type checkers infer in everyday use. Checked by mypy and pyright, not run."""

from __future__ import annotations

from typing import Any, assert_type

import torch
import torch.utils.data
from torch import Tensor

import stallfree as sf

Sample = tuple[Tensor, int]
Pair = tuple[Tensor, Tensor]


class Pictures(torch.utils.data.Dataset[Sample]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Sample:
        return torch.zeros(3), index


def collate(samples: list[Sample]) -> Pair:
    return torch.stack([picture for picture, _ in samples]), torch.tensor([label for _, label in samples])


def to_pair(sample: Any) -> Pair:
    return sample[0], torch.tensor(sample[1])


def total(batch: Pair) -> Tensor:
    return batch[0].sum()


def make_loader() -> sf.DataLoader[Pair]:
    return sf.DataLoader(Pictures(), batch_size=4, collate_fn=collate)


def loaders() -> None:
    loader: sf.DataLoader[Pair] = sf.DataLoader(Pictures(), batch_size=4, shuffle=True, cache="auto", device="cuda")
    for images, labels in loader:
        assert_type(images, Tensor)
        assert_type(labels, Tensor)
    with make_loader() as same:
        assert_type(same, sf.DataLoader[Pair])
    with_ids: sf.DataLoader[sf.Batch[Pair]] = sf.DataLoader(Pictures(), with_ids=True)
    for batch in with_ids:
        assert_type(batch.data, Pair)
        with_ids.update(batch.ids, total(batch.data) * batch.weights)
    of_torch: torch.utils.data.DataLoader[Any] = loader
    assert_type(len(of_torch), int)
    shared: sf.SharedLoader[Pair] = sf.SharedLoader(Pictures(), group="g", batch_size=4)
    assert_type(next(iter(shared)), Pair)


def data_sets() -> None:
    pictures: sf.CachedDataset[Sample] = sf.CachedDataset(Pictures(), capacity="1MiB")
    assert_type(pictures[0], Sample)
    assert_type(pictures.__getitems__([0, 1]), list[Sample])
    assert_type(sf.CachedDataset(["a", "b"], capacity=1024, transform=len), sf.CachedDataset[int])
    assert_type(sf.SmartCacheDataset(Pictures(), to_pair, cache_num=4)[0], Pair)
    torch.utils.data.DataLoader(pictures, sampler=torch.utils.data.DistributedSampler(pictures))


def prefetchers() -> None:
    for images, _ in sf.DevicePrefetcher(make_loader(), "cuda"):
        assert_type(images, Tensor)
    assert_type(sf.DevicePrefetcher(make_loader(), "cuda", transform_on_device=total), sf.DevicePrefetcher[Tensor])
    with sf.ProcessPrefetcher(make_loader, "cuda") as batches:
        assert_type(next(iter(batches)), Pair)
    with sf.CacheLoader(capacity="1MiB", name="lengths") as cache:
        assert_type(cache.get("key", len), int)
