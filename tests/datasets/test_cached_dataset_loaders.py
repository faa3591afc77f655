"""`CachedDataset` under torch's loader and under ours, with worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import stallfree as sf
from cached_data import Numbers, Plain, doubled, jittered, with_draws
from stallfree.testing import ThrottledSource
from unseen import unseen_ids

FEW = 160_000  # bytes: some of the samples of 4 KiB fit, and some do not


def torch_loader(data: Any, workers: int, context: str | None = None, persistent: bool = False, **options: Any) -> Any:
    options = {"batch_size": 4, "shuffle": True} | options
    return DataLoader(
        data, num_workers=workers, multiprocessing_context=context, persistent_workers=persistent, **options
    )


def own_loader(data: Any, workers: int, context: str | None = None, persistent: bool = False, **options: Any) -> Any:
    options = {"batch_size": 4, "shuffle": True} | options
    return sf.DataLoader(
        data, num_workers=workers, multiprocessing_context=context, persistent_workers=persistent, **options
    )


def end(loader: Any) -> None:
    """End the workers of a loader."""
    if isinstance(loader, sf.DataLoader):
        loader.close()
    elif loader._iterator is not None:
        loader._iterator._shutdown_workers()


@pytest.fixture
def source() -> Iterator[ThrottledSource]:
    throttled = ThrottledSource(Numbers(26, [doubled, with_draws]))
    yield throttled
    throttled.close()


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
    (torch_loader, 0, None, False),
    (torch_loader, 2, "fork", False),
    (torch_loader, 2, "forkserver", True),
    (own_loader, 2, "fork", True),
]


@pytest.mark.parametrize("ways", [WAYS, pytest.param([(torch_loader, 2, "spawn", True)], marks=pytest.mark.slow)])
def test_each_sample_once_with_the_same_augmentation_and_fetched_once(source: ThrottledSource, ways: list[Any]) -> None:
    seen = []
    for make, workers, context, persistent in ways:
        source.reset()
        with sf.CachedDataset(source, capacity="1MiB", seed=7) as data:
            loader = make(data, workers, context, persistent)
            epochs = [epoch_of(loader) for _ in range(2)]
            end(loader)
            stats = data.stats()
        assert [sorted(epoch) for epoch in epochs] == [list(range(26))] * 2
        draws = [drawn for epoch in epochs for drawn in epoch.values()]
        assert len(set(draws)) == len(draws)
        assert stats.storage_reads == source.requests == 26
        assert stats.storage_bytes == source.bytes == 26 * 128
        assert stats.misses == len(unseen_ids(26))  # the others were stored when the data set was made
        seen.append(epochs)
    assert all(epochs == seen[0] for epochs in seen)


def test_a_set_epoch_reaches_persistent_workers(source: ThrottledSource) -> None:
    with sf.CachedDataset(source, capacity="1MiB") as data:
        loader = torch_loader(data, 2, "fork", persistent=True)
        seen = {}
        for epoch in (5, 0, 5, 1):
            data.set_epoch(epoch)
            now = epoch_of(loader)
            assert seen.setdefault(epoch, now) == now
        end(loader)
        assert seen[5] != seen[0] != seen[1]


class Watched(sf.CachedDataset):
    """Notes how it is asked."""

    def __getitems__(self, ids: Any) -> Any:
        self.asked.append(list(ids))
        return super().__getitems__(ids)


def test_torchs_loader_asks_for_whole_batches(source: ThrottledSource) -> None:
    with Watched(source, capacity="1MiB") as data:
        data.asked = []
        for _ in torch_loader(data, 0, shuffle=False, batch_size=10):
            pass
        assert data.asked == [list(range(10)), list(range(10, 20)), list(range(20, 26))]


@pytest.mark.parametrize(("make", "workers", "spread"), [(torch_loader, 2, 1), (own_loader, 0, 1), (own_loader, 2, 5)])
def test_storage_gives_what_is_not_resident_and_nothing_more(
    make: Callable[..., Any], workers: int, spread: int
) -> None:
    inner = Numbers(64, [with_draws], size=512, spread=spread)
    source = ThrottledSource(inner)
    total = sum(record.nbytes for record in inner.records)
    with sf.CachedDataset(source, capacity=FEW) as data:
        loader = make(data, workers, collate_fn=labels_of)
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
        end(loader)
        stats = data.stats()
        assert (stats.storage_reads, stats.storage_bytes) == (source.requests, source.bytes)
        assert stats.evictions == 0
    source.close()


def labels_of(samples: list[Any]) -> list[int]:
    """The labels of a batch."""
    for array, label, *_ in samples:
        assert (array == label).all()
    return [label for _, label, *_ in samples]


class Given(Sampler[int]):
    """The ids as they are given."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


@pytest.mark.parametrize("make", [torch_loader, own_loader])
def test_ids_that_come_twice(make: Callable[..., Any], source: ThrottledSource) -> None:
    ids = [3, 3, 4, 3, 9, 9, 9, 4]
    with sf.CachedDataset(source, capacity="1MiB") as data:
        for _ in range(2):
            labels = [
                label for batch in make(data, 0, shuffle=False, sampler=Given(ids)) for label in batch[1].tolist()
            ]
            assert labels == ids
    assert data.stats().storage_reads == source.requests
    read = {*range(26)} - {*unseen_ids(26)} | {*ids}
    assert source.requests == len(read) or make is own_loader  # whose batches under way know nothing of one another


def test_it_travels_to_a_worker_with_its_epochs() -> None:
    with sf.CachedDataset(Numbers(8, [with_draws]), capacity="1MiB", seed=3) as data:
        data.set_epoch(4)
        there = pickle.loads(pickle.dumps(data))
        assert [sample[2:] for sample in there] == [sample[2:] for sample in data]
        assert there.stats() == data.stats()
        there.close()
        assert data[1][1] == 1


@pytest.mark.parametrize(("make", "workers"), [(torch_loader, 0), (own_loader, 2)])
def test_a_loader_over_a_data_set_that_was_closed(
    make: Callable[..., Any], workers: int, source: ThrottledSource
) -> None:
    data = sf.CachedDataset(source, capacity="1MiB")
    loader = make(data, workers, "fork" if workers else None)
    data.close()
    with pytest.raises(sf.InputError, match="is closed"):
        list(loader)


class Shape(Dataset[Any]):
    """A plain data set that augments its samples itself, by a library with generators of its own."""

    def __init__(self) -> None:
        albumentations = pytest.importorskip("albumentations")
        self.transform = albumentations.Compose(
            [albumentations.RandomBrightnessContrast(p=0.5), albumentations.RandomCrop(6, 6)], seed=1
        )

    def __len__(self) -> int:
        return 16

    def __getitem__(self, id: int) -> Any:
        picture = np.random.RandomState(id).randint(0, 256, (10, 10, 3), np.uint8)
        return torch.from_numpy(self.transform(image=picture)["image"].copy()), id


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Shape, marks=pytest.mark.libraries),
        lambda: ThrottledSource(Plain(16, jittered)),
    ],
)
def test_augmentation_within_a_plain_data_set_is_a_function_of_the_epoch(make: Callable[[], Any]) -> None:
    plain = make()
    seen = []
    for workers, batch_size, shuffle in ((1, 4, False), (2, 3, True)):
        with sf.DataLoader(plain, batch_size, shuffle, num_workers=workers, seed=2) as loader:
            epochs = []
            for _ in range(2):
                epoch = {
                    id: value.tolist() for values, ids in loader for value, id in zip(values, ids.tolist(), strict=True)
                }
                assert sorted(epoch) == list(range(16))
                epochs.append(epoch)
            seen.append(epochs)
    assert all(epochs == seen[0] for epochs in seen)
    assert seen[0][0] != seen[0][1]
    if isinstance(plain, ThrottledSource):
        plain.close()


class Archive(Dataset[Any]):
    """Opens its file for the first sample, and keeps it. `meet` lets two workers come between a seek and its read."""

    file: Any = None

    def __init__(self, path: Path, meet: Any = None) -> None:
        self.path, self.meet = str(path), meet

    def __len__(self) -> int:
        return 8

    def __getitem__(self, id: int) -> Any:
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        self.file.seek(1000 * id)
        if torch.utils.data.get_worker_info() is not None and self.meet is not None:
            with contextlib.suppress(threading.BrokenBarrierError):  # the other worker may have no sample left
                self.meet.wait(0.5)
        return torch.frombuffer(bytearray(self.file.read(1000)), dtype=torch.uint8), id


@pytest.mark.filterwarnings("ignore:meet of type")
@pytest.mark.parametrize("form", ["fetched", "auto", "files", None])
def test_workers_open_the_files_that_a_data_set_keeps_open(tmp_path: Path, form: str | None) -> None:
    path = tmp_path / "archive"
    path.write_bytes(b"".join(bytes([id]) * 1000 for id in range(8)))
    archive = Archive(path, multiprocessing.get_context("fork").Barrier(2))
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2}
    if form is None:
        data, options = None, options | {"cache": "auto", "capacity": "1MiB"}
    else:
        data = sf.CachedDataset(archive, capacity="1MiB", form=form)
    with data or contextlib.nullcontext(), sf.DataLoader(data or archive, **options) as loader:
        batches = list(loader)
    assert [(values.unique().tolist(), ids.tolist()) for values, ids in batches] == [
        ([id, id + 1], [id, id + 1]) for id in range(0, 8, 2)
    ]


def test_a_window_leaves_no_open_file_in_the_data_set(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_bytes(bytes(8000))
    archive = Archive(path)
    with sf.SmartCacheDataset(archive, sf.Compose([]), cache_num=4, replace_rate=0.25):
        assert archive.file is None


class Augmented(Dataset[Any]):
    """Reads from a data set that keeps its file open, and augments."""

    def __init__(self, archive: Archive) -> None:
        self.archive, self.transform = archive, noisy

    def __len__(self) -> int:
        return len(self.archive)

    def __getitem__(self, id: int) -> Any:
        return self.transform(self.archive[id][0])


def noisy(values: torch.Tensor) -> torch.Tensor:
    return values + torch.rand(())


def test_a_cut_leaves_no_open_file_in_a_data_set_within(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_bytes(bytes(8000))
    data = Augmented(Archive(path))
    sf.cut(data, "transform")
    assert data.archive.file is None
