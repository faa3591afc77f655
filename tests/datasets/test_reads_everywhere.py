"""`form="reads"` with policies, groups, importance, resuming, start methods and other libraries."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf
from loader_data import same
from reads_data import Crops, gone, opens_below, write_arrays

COUNT, SIDE = 40, 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_arrays(tmp_path / "data", COUNT, SIDE)


@pytest.fixture
def plain(folder: Path) -> list[list[Any]]:
    """Three epochs without a cache."""
    with sf.DataLoader(data(folder), num_workers=1, **OPTIONS) as loader:
        return copy.deepcopy(epochs(loader))  # in memory of its own: slots are looked for after each test


OPTIONS: dict[str, Any] = {"batch_size": 5, "shuffle": True, "seed": 1}


def data(folder: Path) -> Crops:
    return Crops(folder, side=SIDE)


def cached(folder: Path, **options: Any) -> sf.CachedDataset:
    return sf.CachedDataset(data(folder), **{"capacity": "4MiB", "form": "reads", **options})


def epochs(loader: Any, count: int = 3) -> list[list[Any]]:
    with loader:
        return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("policy", ["minio", "fifo", "lru", "lfu", "random", "importance", "oracle"])
def test_each_policy_with_half_of_the_room(folder: Path, plain: Any, policy: str) -> None:
    with cached(folder, policy=policy, capacity="80KiB") as some:
        if some.cache.policy.given:
            some.cache.set_scores(np.arange(COUNT), np.random.default_rng(0).random(COUNT))
        assert same(epochs(sf.DataLoader(some, **OPTIONS)), plain)
        stats = some.stats()
        assert 4 < stats.resident_items < COUNT
        assert stats.hits + stats.misses == 3 * COUNT
        assert stats.storage_reads == stats.misses + 1
        if policy == "minio":
            assert stats.hits >= 2 * stats.resident_items


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods(folder: Path, plain: Any, method: str) -> None:
    with cached(folder) as some:
        assert same(epochs(sf.DataLoader(some, num_workers=1, multiprocessing_context=method, **OPTIONS)), plain)
        assert some.stats().storage_reads == COUNT


def test_a_group(folder: Path, plain: Any) -> None:
    group = f"reads-{os.getpid()}"
    with cached(folder) as some, sf.SharedLoader(some, group=group, num_workers=1, **OPTIONS) as loader:
        found = [list(loader)]
        with gone(folder):
            found += [list(loader), list(loader)]
        assert same(found, plain)


@pytest.mark.parametrize("workers", [0, 1])
def test_resuming_in_an_epoch(folder: Path, plain: Any, workers: int) -> None:
    with cached(folder) as some:
        with sf.DataLoader(some, num_workers=workers, **OPTIONS) as loader:
            running = iter(loader)
            found = [next(running) for _ in range(3)]
            state = loader.state_dict()
            del running
        with sf.DataLoader(some, num_workers=workers, **OPTIONS) as loader:
            loader.load_state_dict(state)
            assert same([*found, *loader], plain[0])
            assert same(list(loader), plain[1])


def test_an_importance_plan_prefers_residents(folder: Path) -> None:
    with cached(folder, capacity="80KiB", policy="importance") as some:
        sampler = sf.ImportanceSampler(COUNT, cache=some.cache, seed=1, target_io=0.4)
        with sf.DataLoader(some, 5, sampler=sampler) as loader, opens_below(folder) as opened:
            for _ in range(4):
                for batch in loader:
                    assert batch.data[1].tolist() == batch.ids.tolist()
                    loader.update(batch.ids, torch.rand(len(batch.ids)))
        stats = some.stats()
    assert len(opened) == stats.misses
    assert stats.misses < 3 * COUNT < stats.misses + stats.hits


@pytest.mark.slow
@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_other_libraries(folder: Path, library: str) -> None:
    """They get the loader that they would get for any other data set."""
    run: Callable[[Any], list[Any]] = {"accelerate": _accelerate, "lightning": _lightning}[library]
    pytest.importorskip(library)
    plain = run(sf.DataLoader(data(folder), num_workers=1, **OPTIONS))
    with cached(folder) as some:
        assert same(run(sf.DataLoader(some, **OPTIONS)), plain)
        assert some.stats().hits == COUNT + 1
    assert len(plain) == 16


def _accelerate(loader: Any) -> list[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    try:
        with loader:
            prepared = Accelerator(cpu=True).prepare(loader)
            return [batch for _ in range(2) for batch in prepared]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # of this process, and of those forked from it


def _lightning(loader: Any) -> list[Any]:
    import lightning

    seen: list[Any] = []

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, index: int) -> Any:
            seen.append([part.clone() for part in batch])
            return self.weight * batch[0].mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with loader:
        lightning.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet).fit(Model(), loader)
    return seen


class _Fsspec(Crops):
    def __getitem__(self, id: int) -> Any:
        import fsspec

        with fsspec.open(f"{self.protocol}{self.folder}/{id}.raw") as file:
            return np.frombuffer(file.read(), np.uint8) + np.uint8(random.randrange(9)), id

    protocol = "file://"


class _Remote(_Fsspec):
    protocol = "memory://"


@pytest.mark.parametrize("workers", [0, 1])
def test_files_of_fsspec_elsewhere(folder: Path, workers: int) -> None:
    fs = pytest.importorskip("fsspec").filesystem("memory")
    fs.pipe({f"{folder}/{id}.raw": (folder / f"{id}.raw").read_bytes() for id in range(COUNT)})
    try:
        plain = epochs(sf.DataLoader(_Remote(folder), num_workers=1, **OPTIONS))
        with (
            sf.CachedDataset(_Remote(folder), capacity="4MiB", form="reads") as some,
            sf.DataLoader(some, num_workers=workers, persistent_workers=False, **OPTIONS) as loader,
        ):
            found = [list(loader)]
            if workers == 0:
                fs.rm(str(folder), recursive=True)
            found += [list(loader), list(loader)]
            assert some.stats().storage_reads == COUNT
            assert some.stats().hits == 2 * COUNT + 1
        assert same(found, plain)
    finally:
        fs.store.clear()


def test_files_of_fsspec_on_this_host(folder: Path) -> None:
    plain = epochs(sf.DataLoader(_Fsspec(folder), num_workers=1, **OPTIONS))
    with (
        sf.CachedDataset(_Fsspec(folder), capacity="4MiB", form="reads") as some,
        sf.DataLoader(some, num_workers=1, **OPTIONS) as loader,
    ):
        found = [list(loader)]
        with gone(folder):
            found += [list(loader), list(loader)]
    assert same(found, plain)
