"""A step that draws for some samples only: it is found while a cache is filled, and its output is never frozen.

These samples are not among those of the first look, and no name in the code shows that the steps draw.
"""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

import stallfree as sf
from cache_tools import problems
from children import Child
from lazy_rows import Calls
from loader_data import Made
from stallfree import StallfreeWarning
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.cache.space import Space
from unseen import integer, unseen_ids

COUNT = 24
LENGTH = 64
DRAWN = unseen_ids(COUNT)


class CropOrPad:
    """Draws for those that are too long. That it drew is remembered with the object."""

    def __call__(self, x: Any) -> Any:
        start = integer(len(x) - LENGTH) if len(x) > LENGTH else 0
        return np.pad(x, (0, max(0, LENGTH - len(x))))[start : start + LENGTH]


class Signals(Dataset):  # type: ignore[type-arg]
    """The samples of the first look have 64 values, all others 200."""

    def __init__(self, transform: Callable[[Any], Any] | None = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        record = np.arange(200 if id in DRAWN else LENGTH, dtype=np.float32) + 1000 * id
        return record if self.transform is None else self.transform(record)


def batches(loader: Any) -> list[Any]:
    return [np.asarray(batch) for batch in loader]


def differing(epochs: list[list[Any]]) -> list[int]:
    """How many batches of each epoch differ from those of the one before."""
    return [sum(not np.array_equal(a, b) for a, b in zip(one, two, strict=True)) for one, two in pairwise(epochs)]


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    with pytest.warns(StallfreeWarning, match=match) as caught:
        yield
    assert sum(issubclass(warning.category, StallfreeWarning) for warning in caught) == 1


@pytest.mark.parametrize("workers", [2, 0])
def test_a_transform(workers: int, tmp_path: Path) -> None:
    calls, plain = Calls(tmp_path / "calls"), Signals()

    def before(x: Any) -> Any:
        calls.add()
        return x * 2

    steps = sf.Compose([before, CropOrPad()])
    with sf.CachedDataset(plain, capacity="1MiB", transform=steps, form="prepared", seed=3) as cached:
        with one_warning("CropOrPad"), sf.DataLoader(cached, batch_size=4, num_workers=workers) as loader:
            epochs = [batches(loader) for _ in range(2)]
            called, reads = calls.by_process().total(), cached.stats().storage_reads
            epochs.append(batches(loader))
        assert calls.by_process().total() == called, "what comes before the step is still cached"
        assert cached.stats().storage_reads == reads
        assert cached.stats().resident_items == COUNT
    assert differing(epochs) == [6, 6]
    marked = sf.Compose([lambda x: x * 2, sf.mark_random(CropOrPad())])
    with sf.CachedDataset(plain, capacity="1MiB", transform=marked, seed=3) as cached:
        reference = [batches(sf.DataLoader(cached, batch_size=4)) for _ in range(3)]
    assert np.array_equal(epochs, reference)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_draws_beside_its_transform(workers: int) -> None:
    """Neither `cut` nor the first look sees it; without a cache its draws are as fresh."""

    class Turned(Signals):
        def __getitem__(self, id: int) -> Any:
            assert self.transform is not None
            return self.transform(np.arange(LENGTH) + (integer(1000) if id in DRAWN else 0))

    data = sf.cut(Turned(lambda x: x * 2), "transform")
    with sf.DataLoader(data, batch_size=4, num_workers=workers, persistent_workers=workers > 0) as loader:
        assert differing([batches(loader) for _ in range(3)]) == [6, 6]
    with sf.CachedDataset(data, capacity="1MiB") as cached, one_warning("random"):
        assert differing([batches(sf.DataLoader(cached, batch_size=4)) for _ in range(3)]) == [6, 6]


def test_a_data_set_that_crops() -> None:
    data = Signals(CropOrPad())
    with sf.CachedDataset(data, capacity="1MiB") as cached:
        with one_warning("Signals"), sf.DataLoader(cached, batch_size=4, num_workers=2) as loader:
            epochs = [batches(loader) for _ in range(3)]
        assert cached.stats().resident_items == 0
    assert differing(epochs) == [6, 6]
    with pytest.raises(sf.InputError, match="proved random"):
        sf.CachedDataset(data, capacity="1MiB")  # it is known now


def test_under_the_loader_of_torch() -> None:
    with sf.CachedDataset(Signals(), capacity="1MiB", transform=CropOrPad()) as cached:
        loader = TorchLoader(cached, batch_size=4, num_workers=2)
        assert differing([batches(loader) for _ in range(2)]) == [6]
        with one_warning("CropOrPad"):
            cached[DRAWN[0]]


def test_other_processes_follow(tmp_path: Path) -> None:
    """Two attached data sets with steps of their own stand for two jobs."""
    tier = sf.DiskTier(tmp_path / "tier", capacity="1MiB")
    options: dict[str, Any] = {"capacity": "1MiB", "store": tier, "seed": 5, "form": "prepared", "name": "shared"}
    first = sf.CachedDataset(Signals(), transform=CropOrPad(), **options)
    second = sf.CachedDataset(Signals(), transform=CropOrPad(), **options)
    with first, second, warnings.catch_warnings(action="ignore"):
        assert second.cache.get_many([0])[0] is not MISS
        alone = [second[0] for _ in range(2)]
        first.__getitems__(range(COUNT))
        epochs = [np.stack(second.__getitems__(range(COUNT))) for _ in range(3)]
    assert np.array_equal(*alone)
    for one, two in pairwise(epochs):
        assert (one != two).any(axis=1).sum() > len(DRAWN) // 2


def test_a_cache_that_another_process_writes_to_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others learn of the random step when it has ended, or goes on."""
    told, tell = [], SampleCache.uncache_steps

    def busy(cache: SampleCache, count: int) -> bool:
        told.append(count)
        if len(told) < 3:
            raise sf.WaitError("another process writes")
        return tell(cache, count)

    monkeypatch.setattr(SampleCache, "uncache_steps", busy)
    with sf.CachedDataset(Signals(), capacity="1MiB", transform=CropOrPad(), form="prepared") as cached:
        with one_warning("CropOrPad"), sf.DataLoader(cached, batch_size=4) as loader:
            batches(loader)
        assert cached.cache.uncached_steps == 1
    assert len(told) == 3


def test_a_process_that_dies_while_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = Space.drop

    def drop_and_die(space: Space, ids: Any) -> None:
        drop(space, ids[:2])
        os.kill(os.getpid(), signal.SIGKILL)

    def uncache() -> None:
        monkeypatch.setattr(Space, "drop", drop_and_die)
        cache.uncache_steps(1)

    cache = sf.CachedDataset(Signals(), capacity="1MiB", transform=lambda x: x[:LENGTH]).cache
    with cache:
        cache.put_many(range(4), [np.zeros(LENGTH, np.float32)] * 4)
        assert Child(uncache).wait() == -signal.SIGKILL
        assert cache.uncached_steps == 0, "it is found again"
        assert problems(cache) == []
        assert cache.uncache_steps(1)
        assert not cache.resident(range(COUNT)).any()
        assert problems(cache) == []


@pytest.mark.parametrize("how", ["borrow", "gather"])
def test_records_that_are_made_again_while_they_are_read(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job finds a random step between the look at the cache and the reading of a batch."""

    pixels = Made(COUNT, lambda id: np.full((8, 8, 3), id, np.uint8))

    def made() -> sf.CachedDataset:
        def raised(x: Any) -> Any:
            return x + np.uint8(100)

        last = [sf.vision.RandomResizedCrop(8, scale=(1, 1), ratio=(1, 1), flip=0.5)] if how == "borrow" else []
        steps = sf.Compose([raised, *last])
        return sf.CachedDataset(pixels, capacity="1MiB", form="prepared", name="race", transform=steps)

    read, calls = getattr(SampleCache, how), []
    with made() as first, made() as second, warnings.catch_warnings(action="ignore"):

        def late(self: Any, *arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                second.cache.uncache_steps(1)
                second.__getitems__(range(COUNT))
            return read(self, *arguments)

        if how == "gather":
            first.__getitems__(range(COUNT))
        loader = sf.DataLoader(first, batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 8], [0, 1, 2, 3]])
        monkeypatch.setattr(SampleCache, how, late)
        values = [np.asarray(batch)[:, 0, 0, 0].tolist() for batch in loader]
    assert len(calls) > 1
    assert values == [[100, 101, 102, 103], [104, 105, 106, 108], [100, 101, 102, 103]]


def test_a_step_draws_the_same_for_a_hit_and_a_miss() -> None:
    """Also for tensors that are not contiguous: what is drawn for them may follow their strides."""

    images = Made(COUNT, lambda id: (torch.full((4, 6, 3), float(id)).permute(2, 0, 1), np.ones((3, 2)).T))

    def noisy(sample: Any) -> Any:
        return sample[0] + torch.randn_like(sample[0]), sample[1] + np.random.rand(*sample[1].shape)

    with sf.CachedDataset(images, capacity="1MiB", transform=noisy, seed=1) as cached:
        cached.set_epoch(0)
        missed, hit = (cached.__getitems__(range(8)) for _ in range(2))
        assert cached.stats().hits >= 8
    assert all(torch.equal(a[0], b[0]) and np.array_equal(a[1], b[1]) for a, b in zip(missed, hit, strict=True))
