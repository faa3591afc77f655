"""A data set that opens its file at the first sample: no process reads through what another one opened."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stallfree as sf
from cases import half
from lazy_rows import PLACES, BehindFlag, InGlobal, InReader, OverSocket, Rows, lazy_rows

SOME = (InReader, OverSocket)


WAYS = ("cached", "under torch", "auto", "smart", "cut", "cut, no cache")


@contextlib.contextmanager
def loading(way: str, rows: Rows, workers: int, method: str | None) -> Iterator[Any]:
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers}
    options["multiprocessing_context"] = method if workers else None
    data: Any = sf.cut(rows, "transform") if "cut" in way else rows
    with contextlib.ExitStack() as stack:
        if way == "auto":
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            options |= {"cache": "auto", "capacity": "4MiB"}
        elif way == "smart":
            data = stack.enter_context(sf.SmartCacheDataset(rows, cache_num=len(rows) // 2, replace_rate=0.25, seed=1))
        elif way != "cut, no cache":
            data = stack.enter_context(sf.CachedDataset(data, capacity="4MiB"))
        if way == "under torch":
            yield torch.utils.data.DataLoader(data, 4, **options)
        else:
            yield stack.enter_context(sf.DataLoader(data, 4, seed=1, **options))


def check(place: type[Rows], folder: Path, way: str, workers: int, method: str | None = None, count: int = 96) -> None:
    """Three epochs have no wrong sample, and this process has not run the data set if there are workers."""
    with lazy_rows(place, folder, count) as rows:
        with loading(way, rows, workers, method) as loader:
            epochs = [[(ids, records) for ids, records in loader] for _ in range(3)]
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


@pytest.mark.parametrize(("place", "way"), half(SOME, [way for way in WAYS if way != "cached"]))
def test_each_way(place: type[Rows], way: str, tmp_path: Path) -> None:
    check(place, tmp_path, way, 2)


@pytest.mark.parametrize("way", ["cached", "auto", "smart", "cut"])
def test_without_workers(way: str, tmp_path: Path) -> None:
    check(BehindFlag, tmp_path, way, 0)


@pytest.mark.parametrize("way", ["cached", "auto"])
def test_processes_of_a_fork_server(way: str, tmp_path: Path) -> None:
    """A data set that the training process has read could not be sent: what is open cannot be pickled."""
    check(InReader, tmp_path, way, 1, method="forkserver")


@pytest.mark.slow
@pytest.mark.parametrize("workers", range(4))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_all(place: type[Rows], way: str, workers: int, tmp_path: Path) -> None:
    """300 cases of 384 samples in each of three epochs."""
    check(place, tmp_path, way, workers, count=384)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [InGlobal, InReader, OverSocket, BehindFlag])
def test_all_in_new_processes(place: type[Rows], way: str, method: str, tmp_path: Path) -> None:
    check(place, tmp_path, way, 2, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cached", "auto"])
def test_many_samples(way: str, tmp_path: Path) -> None:
    check(InReader, tmp_path, way, 3, count=100_000)
