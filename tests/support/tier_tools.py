"""What the tests of tiers share: samples that say whose they are, and tiers of a known size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from cache_tools import problems
from stallfree.cache import MISS, SampleCache
from stallfree.stores import DiskTier, TieredCache
from stallfree.stores.disk_tier import DiskCache

COUNT = 96
SIZE = 4000


def sample(id: int) -> tuple[np.ndarray, int]:
    """A sample that says whose it is."""
    return np.random.default_rng(id).integers(0, 256, SIZE, np.uint8), id


def is_right(id: int, value: Any) -> bool:
    return value is not MISS and value[1] == id and np.array_equal(value[0], sample(id)[0])


@sf.mark_deterministic
class Samples(torch.utils.data.Dataset):
    """The samples, with as many bytes as their id says where `varied`."""

    def __init__(self, count: int = COUNT, *, varied: bool = False) -> None:
        self.count, self.varied = count, varied

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> tuple[np.ndarray, int]:
        body, _ = sample(id)
        return (body[: SIZE - 37 * id] if self.varied else body), id


def room(samples: int) -> int:
    """A capacity for so many samples, or one or two more."""
    return 52_000 + samples * 4200


def open_tiers(folder: Path, memory: int, disk: int, *, policy: str = "minio", **given: Any) -> TieredCache:
    """Tiers with room for about so many samples each."""
    arguments = {"fingerprint": "data", "name": "tiers", "example": sample(0), **given}
    tier = DiskTier(folder, capacity=room(disk), persist=arguments.pop("keep", False))
    return tier.attach(COUNT, capacity=room(memory), policy=policy, **arguments)


def put(cache: TieredCache, ids: Sequence[int]) -> np.ndarray:
    """Store samples, the disk's too."""
    taken = cache.put_many(ids, [sample(id) for id in ids])
    cache.flush()
    return taken


def disk_of(cache: Any) -> SampleCache:
    """The records on the disk."""
    disk = cache.lower[0]
    assert isinstance(disk, DiskCache)
    return disk.records


def held(cache: SampleCache) -> set[int]:
    return set(np.flatnonzero(cache.resident(np.arange(COUNT))).tolist())


def sound(cache: TieredCache) -> None:
    """The bookkeeping of both tiers is right, and each sample that is there is the right one."""
    assert problems(cache.upper) == []
    assert problems(disk_of(cache), killed=True) == []
    for tier in (cache.upper, disk_of(cache)):
        there = sorted(held(tier))
        for id, value in zip(there, tier.get_many(there), strict=True):
            assert is_right(id, value)


def room_of(tier: SampleCache) -> int:
    """Samples that a tier holds."""
    room = int(tier.put_many(range(COUNT), [sample(id) for id in range(COUNT)]).sum())
    tier.clear()
    return min(room, int(tier.stats().resident_items) or room)


def ids_of(batches: Any) -> list[int]:
    """The ids of an epoch, each checked."""
    found = []
    for bodies, ids in batches:
        for body, id in zip(bodies, ids.tolist(), strict=True):
            assert is_right(id, (np.asarray(body), id))
            found.append(id)
    return sorted(found)


def all_of(batches: Any) -> None:
    """An epoch in which every sample comes once. What this process stores of it has been stored."""
    assert ids_of(batches) == list(range(COUNT))
    batches.dataset.cache.flush()


def dataset_of(source: Any, folder: Path, memory: int, disk: int, **given: Any) -> sf.CachedDataset:
    tier = DiskTier(folder, capacity=room(disk), persist=given.pop("keep", False))
    return sf.CachedDataset(source, capacity=room(memory), store=tier, **given)
