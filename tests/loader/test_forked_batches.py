"""A process that is forked while a batch is held, such as an asynchronous saver, keeps reading that batch."""

import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import stallfree as sf
from cases import half
from loader_data import Made

COUNT, SIZE = 48, 5000


def row(id: int) -> Any:
    return np.full(SIZE, id, np.float32)


class Saver:
    """A forked process that reads a batch only when it is told to."""

    def __init__(self, batch: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._go, go = context.Pipe()
        self._process = context.Process(target=self._save, args=(go, batch))
        self._process.start()
        go.close()

    def _save(self, go: Any, batch: Any) -> None:
        go.recv()
        go.send(sorted(set(np.asarray(batch).ravel().tolist())))

    def values(self) -> list[float]:
        self._go.send("go")
        found = self._go.recv()
        self._process.join()
        self._process.close()
        self._go.close()
        return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(("workers", "cached"), [(0, False), (2, False), (0, True), (2, True)])
def test_a_forked_process_keeps_its_batch(workers: int, cached: bool) -> None:
    base = Made(COUNT, row)
    dataset: Any = sf.CachedDataset(base, capacity="8MiB") if cached else base
    with sf.DataLoader(dataset, 4, num_workers=workers, persistent_workers=workers > 0) as loader:
        if cached:
            list(loader)  # later epochs are gathered from the cache
        savers = []
        for _ in range(2):
            for number, batch in enumerate(loader):
                if number in (2, 5):
                    savers.append((Saver(batch), sorted(set(np.asarray(batch).ravel().tolist()))))
                del batch
        assert len(savers) == 4
        assert [saver.values() for saver, _ in savers] == [expected for _, expected in savers]
    if cached:
        dataset.close()


def _maps(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/slot-" in line]


@pytest.mark.parametrize("cached", [False, True])
def test_the_memory_of_forked_batches_is_given_back(cached: bool) -> None:
    """A process forked for each batch: neither files nor mappings of the ring grow, here and in the workers."""
    base = Made(COUNT, row)
    dataset: Any = sf.CachedDataset(base, capacity="8MiB") if cached else base
    with sf.DataLoader(dataset, 4, num_workers=2, persistent_workers=True) as loader:
        list(loader)
        most = 2 * 2 + 3  # two batches in flight per worker, and three that may be kept
        size = loader.stats().staging_bytes
        for _ in range(2):
            for batch in loader:
                assert len(Saver(batch).values()) == 4
                del batch
                assert loader.stats().staging_bytes <= max(size, most * (4 * SIZE * 4 * 9 // 8 + 2 * 4096))
            for process in [psutil.Process(), *psutil.Process().children()]:
                assert len(_maps(process.pid)) <= 2 * most
    if cached:
        dataset.close()


def test_a_fork_costs_no_slot_of_a_batch_that_is_not_held() -> None:
    with sf.DataLoader(Made(COUNT, row), 4, num_workers=1, persistent_workers=True) as loader:
        list(loader)
        before = {line.split()[-1] for line in _maps(os.getpid())}
        for batch in loader:
            del batch
            assert Saver(np.zeros(1)).values() == [0]
        assert {line.split()[-1] for line in _maps(os.getpid())} == before


# -- a loader in a forked child: parent and child both have every sample -----------------------------------------------

EACH = 120


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return EACH

    def __getitem__(self, id: int) -> int:
        return id


def whole(loader: Any) -> bool:
    return sorted(id for batch in loader for id in batch.tolist()) == list(range(EACH))


def forked(loader: Any) -> int:
    """Fork a child that iterates twice; returns its process id. It exits with 0 if both epochs were whole."""
    child = os.fork()
    if child == 0:
        try:
            found = whole(loader) and whole(loader)
            loader.close()
            os._exit(0 if found else 3)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        os._exit(4)
    return child


@pytest.mark.parametrize(
    ("moment", "workers", "cached"), half(["in mid-epoch", "between epochs"], [0, 1, 2], [False, True])
)
def test_parent_and_child_have_every_sample(moment: str, workers: int, cached: bool) -> None:
    dataset: Any = sf.CachedDataset(Numbers(), capacity="4MiB") if cached else Numbers()
    loader = sf.DataLoader(
        dataset, batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0, timeout=60
    )
    seen = []
    for number, batch in enumerate(loader):
        seen += batch.tolist()
        if number == 5 and moment == "in mid-epoch":
            child = forked(loader)
    assert sorted(seen) == list(range(EACH))
    if moment == "between epochs":
        child = forked(loader)
    assert whole(loader)
    assert os.waitpid(child, 0)[1] == 0
    assert whole(loader)
    loader.close()
    if cached:
        dataset.close()
