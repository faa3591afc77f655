"""`CachedDataset` under torch's loader and under ours, with worker processes."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import stallfree as sf
from cached_data import Numbers, doubled, tripled, with_draws
from children import Holder
from stallfree.testing import ThrottledSource
from unseen import unseen_ids

FEW = 160_000  # bytes: some of the samples of 4 KiB fit, and some do not


def loading(kind: Any, data: Any, workers: int, context: Any = None, persistent: bool = False, **more: Any) -> Any:
    more |= {"num_workers": workers, "multiprocessing_context": context, "persistent_workers": persistent}
    return kind(data, 4, shuffle=True, **more)


@pytest.fixture
def source() -> Iterator[ThrottledSource]:
    with closing(ThrottledSource(Numbers(26, [doubled, with_draws]))) as throttled:
        yield throttled


def epoch_of(loader: Any) -> dict[int, tuple[Any, ...]]:
    """The draws of each sample, after a look at whether it is the right one."""
    seen: dict[int, tuple[Any, ...]] = {}
    for arrays, labels, *draws in loader:
        for array, label, *drawn in zip(arrays.tolist(), labels.tolist(), *(d.tolist() for d in draws), strict=True):
            assert array == [2 * label] * 16
            assert label not in seen
            seen[label] = tuple(drawn)
    return seen


WAYS: list[Any] = [
    (DataLoader, 0, None, False), (DataLoader, 2, "fork", False), (DataLoader, 2, "forkserver", True),
    (sf.DataLoader, 2, "fork", True),
]  # fmt: skip


@pytest.mark.parametrize("ways", [WAYS, pytest.param([(DataLoader, 2, "spawn", True)], marks=pytest.mark.slow)])
def test_each_sample_once_with_the_same_augmentation_and_fetched_once(source: ThrottledSource, ways: list[Any]) -> None:
    seen = []
    for way in ways:
        source.reset()
        with sf.CachedDataset(source, capacity="1MiB", seed=7) as data:
            loader = loading(way[0], data, *way[1:])
            epochs = [epoch_of(loader) for _ in range(2)]
            del loader
            stats = data.stats()
        assert [sorted(epoch) for epoch in epochs] == [list(range(26))] * 2
        draws = [drawn for epoch in epochs for drawn in epoch.values()]
        assert len(set(draws)) == len(draws)
        assert (stats.storage_reads, stats.storage_bytes) == (source.requests, source.bytes) == (26, 26 * 128)
        assert stats.misses == len(unseen_ids(26))  # the others were stored when the data set was made
        seen.append(epochs)
    assert all(epochs == seen[0] for epochs in seen)


@pytest.mark.parametrize(("kind", "workers", "spread"), [(DataLoader, 2, 1), (sf.DataLoader, 2, 5)])
def test_storage_gives_what_is_not_resident_and_nothing_more(kind: Any, workers: int, spread: int) -> None:
    inner = Numbers(64, [with_draws], size=512, spread=spread)
    total = sum(record.nbytes for record in inner.records)
    with closing(ThrottledSource(inner)) as source, sf.CachedDataset(source, capacity=FEW) as data:
        loader = loading(kind, data, workers, collate_fn=labels_of)
        for epoch in range(3):
            before = data.stats(), source.bytes, source.requests
            assert sorted(label for labels in loader for label in labels) == list(range(64))
            if epoch == 0:
                continue
            after = data.stats()
            resident = data.cache.resident(range(64))
            share = sum(record.nbytes for record, there in zip(inner.records, resident, strict=True) if there) / total
            assert 0.2 < share < 0.8
            read = after.storage_bytes - before[0].storage_bytes
            assert read == source.bytes - before[1] == round((1 - share) * total)
            assert after.storage_reads - before[0].storage_reads == source.requests - before[2] == 64 - resident.sum()
            assert after.hits - before[0].hits == resident.sum()
        del loader
        stats = data.stats()
        assert (stats.storage_reads, stats.storage_bytes, stats.evictions) == (source.requests, source.bytes, 0)


def labels_of(samples: list[Any]) -> list[int]:
    assert all((array == label).all() for array, label, *_ in samples)
    return [label for _, label, *_ in samples]


def test_a_set_epoch_reaches_persistent_workers(source: ThrottledSource) -> None:
    with sf.CachedDataset(source, capacity="1MiB") as data:
        loader = loading(DataLoader, data, 2, "fork", persistent=True)
        seen = {}
        for epoch in (5, 0, 5, 1):
            data.set_epoch(epoch)
            now = epoch_of(loader)
            assert seen.setdefault(epoch, now) == now
        del loader
        assert seen[5] != seen[0] != seen[1]


UNSEEN = len(unseen_ids(40))


def test_jobs_with_the_same_data_share_one_cache(store_root: Path) -> None:
    source = ThrottledSource(Numbers(40, [doubled, with_draws]))

    def begin() -> Callable[[], None]:
        data = sf.CachedDataset(source, capacity="1MiB")
        list(data)
        return data.close

    holder = Holder(begin)
    assert source.requests == 40
    with sf.CachedDataset(source, capacity="1MiB") as data:
        assert data.stats().misses == UNSEEN
        list(data)
        assert source.requests == data.stats().storage_reads == 80 - UNSEEN  # the first look of this job
        assert data.stats().misses == UNSEEN
    with sf.CachedDataset(ThrottledSource(Numbers(40, [tripled])), capacity="1MiB") as other:
        assert other.stats().hits == other.stats().misses == 0
    holder.end()
    source.close()
    del other
    assert not list(store_root.iterdir())
