"""A data set that opens its file at the first sample: no process reads through what another one opened."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stallfree as sf
from lazy_rows import PLACES, BehindFlag, InDict, InGlobal, InReader, OverSocket, Rows, lazy_rows

CAPACITY = "4MiB"
EPOCHS = 3
SOME = (InReader, OverSocket)


def sf_loader(dataset: Any, workers: int, method: str | None, **options: Any) -> Any:
    context = method if workers else None
    return sf.DataLoader(
        dataset, 4, shuffle=True, num_workers=workers, multiprocessing_context=context, seed=1, **options
    )


Way = Callable[[Rows, int, "str | None"], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def cached(rows: Rows, workers: int, method: str | None) -> Iterator[Any]:
    with sf.CachedDataset(rows, capacity=CAPACITY) as data, sf_loader(data, workers, method) as loader:
        yield loader


@contextlib.contextmanager
def under_torch(rows: Rows, workers: int, method: str | None) -> Iterator[Any]:
    with sf.CachedDataset(rows, capacity=CAPACITY) as data:
        context = method if workers else None
        yield torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=workers, multiprocessing_context=context)


@contextlib.contextmanager
def auto(rows: Rows, workers: int, method: str | None) -> Iterator[Any]:
    with (
        contextlib.redirect_stderr(io.StringIO()),
        sf_loader(rows, workers, method, cache="auto", capacity=CAPACITY) as loader,
    ):
        yield loader


@contextlib.contextmanager
def smart(rows: Rows, workers: int, method: str | None) -> Iterator[Any]:
    window = len(rows) // 2
    with (
        contextlib.closing(sf.SmartCacheDataset(rows, cache_num=window, replace_rate=0.25, seed=1)) as data,
        sf_loader(data, workers, method) as loader,
    ):
        yield loader


@contextlib.contextmanager
def cut(rows: Rows, workers: int, method: str | None) -> Iterator[Any]:
    with (
        sf.CachedDataset(sf.cut(rows, "transform"), capacity=CAPACITY) as data,
        sf_loader(data, workers, method) as loader,
    ):
        yield loader


@contextlib.contextmanager
def cut_without_a_cache(rows: Rows, workers: int, method: str | None) -> Iterator[Any]:
    with sf_loader(sf.cut(rows, "transform"), workers, method) as loader:
        yield loader


WAYS: dict[str, Way] = {
    "cached": cached,
    "under torch": under_torch,
    "auto": auto,
    "smart": smart,
    "cut": cut,
    "cut, no cache": cut_without_a_cache,
}


def check(
    place: type[Rows], folder: Path, way: str, workers: int, *, method: str | None = None, count: int = 96
) -> None:
    """Three epochs have no wrong sample, and this process has not run the data set if there are workers."""
    with lazy_rows(place, folder, count) as rows:
        with WAYS[way](rows, workers, method) as loader:
            epochs = [[(ids, records) for ids, records in loader] for _ in range(EPOCHS)]
            here = rows.calls.by_process()[os.getpid()]
        for epoch in epochs:
            ids = torch.cat([ids for ids, _ in epoch])
            records = torch.cat([records for _, records in epoch])
            wrong = (records != ids[:, None]).any(dim=1)
            assert int(wrong.sum()) == 0, f"{int(wrong.sum())} of {count} samples are wrong"
            assert len(set(ids.tolist())) == len(ids) == (count // 2 if way == "smart" else count)
    assert not (here and workers), f"the training process has read {here} samples"


@pytest.mark.parametrize("place", PLACES)
def test_each_place(place: type[Rows], tmp_path: Path) -> None:
    check(place, tmp_path, "cached", 2)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "cached"])
@pytest.mark.parametrize("place", SOME)
def test_each_way(place: type[Rows], way: str, tmp_path: Path) -> None:
    check(place, tmp_path, way, 2)


@pytest.mark.parametrize("way", ["cached", "auto", "smart", "cut"])
def test_without_workers(way: str, tmp_path: Path) -> None:
    check(BehindFlag, tmp_path, way, 0)


@pytest.mark.parametrize("way", ["cached", "auto"])
def test_processes_of_a_fork_server(way: str, tmp_path: Path) -> None:
    """A data set that the training process has read could not be sent: what is open cannot be pickled."""
    check(InReader, tmp_path, way, 1, method="forkserver")


@pytest.mark.parametrize("form", ["fetched", "prepared", "files"])
def test_each_form(form: str, tmp_path: Path) -> None:
    with (
        lazy_rows(InReader, tmp_path, 48) as rows,
        sf.CachedDataset(rows, capacity=CAPACITY, form=form) as data,
        sf_loader(data, 2, None) as loader,
    ):
        for _ in range(EPOCHS):
            assert all((records == ids[:, None]).all() for ids, records in loader)
        assert os.getpid() not in rows.calls.by_process()


def test_a_second_cache_on_the_same_data(tmp_path: Path) -> None:
    """It finds what the first one stored."""
    with (
        lazy_rows(InDict, tmp_path, 96) as rows,
        sf.CachedDataset(rows, capacity=CAPACITY) as first,
        sf.CachedDataset(rows, capacity=CAPACITY) as second,
    ):
        for data in (first, second):
            with sf_loader(data, 2, None) as loader:
                assert all((records == ids[:, None]).all() for ids, records in loader)


@pytest.mark.slow
@pytest.mark.parametrize("workers", range(4))
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("place", PLACES)
def test_all(place: type[Rows], way: str, workers: int, tmp_path: Path) -> None:
    """300 cases of 384 samples in each of three epochs."""
    check(place, tmp_path, way, workers, count=384)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("place", [InGlobal, InReader, OverSocket, BehindFlag])
def test_all_in_new_processes(place: type[Rows], way: str, method: str, tmp_path: Path) -> None:
    check(place, tmp_path, way, 2, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cached", "auto"])
def test_many_samples(way: str, tmp_path: Path) -> None:
    check(InReader, tmp_path, way, 3, count=100_000)
