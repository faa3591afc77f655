"""A data set that holds an object without a fingerprint is cached all the same: for this job, or under a name."""

import multiprocessing
import threading
import warnings
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

import stallfree as sf
from unseen import unseen_ids


class Holder:
    """Samples that are their ids, beside a thing."""

    def __init__(self, thing: Any, count: int = 8) -> None:
        self.client = {"connection": thing}
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> torch.Tensor:
        return torch.tensor(id)


class Raises:
    __reduce__ = None


def private(thing: Any, **options: Any) -> sf.CachedDataset:
    with pytest.warns(sf.StallfreeWarning, match="no fingerprint, so this cache is private.*name=") as caught:
        cached = sf.CachedDataset(Holder(thing), capacity="1MiB", **options)
    assert [warning.filename for warning in caught if warning.category is sf.StallfreeWarning] == [__file__]
    return cached


@pytest.mark.parametrize("make", [threading.Lock, Raises, lambda: reduce(lambda inner, _: [inner], range(5000), [])])
def test_a_private_cache(make: Any, store_root: Path) -> None:
    with private(make()) as first, private(make()) as second:
        assert first.cache.name != second.cache.name
        assert [sample.item() for sample in first] == list(range(8))
        assert first.stats().resident_items == 8
        assert second.stats().resident_items == 8 - len(unseen_ids(8))  # which it has read itself
        path = first.cache.path
        assert path.exists()
    assert not path.exists()


def test_all_workers_use_it() -> None:
    with private(multiprocessing.get_context("forkserver").Lock()) as data:
        with warnings.catch_warnings(action="error", category=sf.StallfreeWarning):  # none of a worker's own
            loader = sf.DataLoader(data, num_workers=1, multiprocessing_context="forkserver")
            assert sorted(batch.item() for batch in loader) == list(range(8))
        assert data.stats().resident_items == data.stats().storage_reads == 8


def test_with_a_name_it_is_shared() -> None:
    options: Any = {"capacity": "1MiB", "name": "mine"}
    with warnings.catch_warnings(action="error"), sf.CachedDataset(Holder(threading.Lock()), **options) as first:
        list(first)
        with sf.CachedDataset(Holder(threading.Lock()), **options) as second:
            assert second.stats().resident_items == 8
        with pytest.raises(sf.FingerprintError, match=r"differs from yours.*Give another"):  # the rest is compared
            sf.CachedDataset(Holder(threading.Lock(), 7), **options)


def test_a_transform() -> None:
    class Doubled:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, value: torch.Tensor) -> torch.Tensor:
            with self.lock:
                return value * 2

    with pytest.warns(sf.StallfreeWarning, match="lock has no fingerprint"):
        data = sf.CachedDataset(Holder(1), capacity="1MiB", transform=Doubled(), form="prepared")
    with data:
        assert [sample.item() for sample in data] == list(range(0, 16, 2))


def test_what_no_later_job_would_find(tmp_path: Path) -> None:
    data = Holder(threading.Lock())
    tier = sf.DiskTier(tmp_path, capacity="1MiB", persist=True)
    for options in ({"persist": True}, {"persist": True, "store": tmp_path}, {"store": tier}):
        with pytest.raises(sf.InputError, match=r"no other job or node would find these samples.*name="):
            sf.CachedDataset(data, capacity="1MiB", **options)


def test_a_disk(tmp_path: Path) -> None:
    with private(threading.Lock(), store=sf.DiskTier(tmp_path, capacity="1MiB")) as data:
        assert [sample.item() for sample in data] == list(range(8))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Holder(threading.Lock())
    with sf.SmartCacheDataset(data, cache_num=4, replace_rate=0) as window:
        assert len(list(window)) == 4
    for variable, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(variable, value)
    with pytest.raises(sf.InputError, match=r"the ranks of this job share one window.*lock.*name="):
        sf.SmartCacheDataset(data, cache_num=4, replace_rate=0)
    with sf.SmartCacheDataset(data, cache_num=4, replace_rate=0, name="window") as window:
        assert len(list(window)) == 4
