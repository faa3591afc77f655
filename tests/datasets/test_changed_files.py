"""Files that change between two jobs or two loaders: where files are cached, the next one reads them anew."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stallfree as sf
from children import Child

COUNT = 12


class Noisy:
    """Reads a file for each sample, and adds noise."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        with open(f"{self.folder}/{id}", "rb") as file:
            data = file.read()
        return np.frombuffer(data, np.uint8).astype(np.float64) + random.random() / 2


def write(folder: Path, id: int, number: int, size: int, *, replaced: bool = False) -> None:
    path = folder / f"{id}.new" if replaced else folder / str(id)
    path.write_bytes(bytes([number]) * size)
    if replaced:
        os.replace(path, folder / str(id))


CHANGES: dict[str, Callable[[Path], None]] = {
    "other bytes": lambda folder: write(folder, 3, 99, 500),
    "larger": lambda folder: write(folder, 3, 99, 900),
    "smaller": lambda folder: write(folder, 3, 99, 100),
    "replaced": lambda folder: write(folder, 3, 99, 500, replaced=True),
}


@pytest.mark.parametrize(("kept", "workers"), [("memory", 1), ("disk", 0)])
@pytest.mark.parametrize("change", ["other bytes", "replaced"])
def test_the_next_job_reads_a_file_that_has_changed(change: str, kept: str, workers: int, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for id in range(COUNT):
        write(folder, id, id, 500)
        os.utime(folder / str(id), (1e9, 1e9))
    options: dict[str, Any] = {"capacity": "1MiB", "form": "files", "name": "changed"}
    if kept == "disk":
        options |= {"store": tmp_path / "store", "persist": True}

    def job(report: str) -> None:
        with sf.CachedDataset(Noisy(folder), **options) as cached:
            loader = sf.DataLoader(cached, batch_size=1, num_workers=workers)
            epochs = [[[int(batch[0][0]), len(batch[0])] for batch in loader] for _ in range(2)]
            (tmp_path / report).write_text(json.dumps([epochs, cached.stats().hits]))

    def run(report: str) -> Any:
        assert Child(job, report).wait() == 0
        return json.loads((tmp_path / report).read_text())

    with sf.CachedDataset(Noisy(folder), **options):  # keeps the cache in memory between the jobs
        before = [[id, 500] for id in range(COUNT)]
        epochs, hits = run("first")
        assert epochs == [before, before]
        assert hits >= COUNT, "the second epoch comes from the cache"
        CHANGES[change](folder)
        after = [*before[:3], [99, (folder / "3").stat().st_size], *before[4:]]
        epochs, _ = run("second")
        assert epochs == [after, after]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_new_loader_reads_what_has_changed(change: str, workers: int, tmp_path: Path) -> None:
    for id in range(COUNT):
        write(tmp_path, id, id, 500)
        os.utime(tmp_path / str(id), (1e9, 1e9))
    with sf.CachedDataset(Noisy(tmp_path), capacity="1MiB", form="files") as cached:
        for expected in (3, 99):
            loader = sf.DataLoader(cached, batch_size=None, num_workers=workers)
            for values in [list(loader) for _ in range(2)]:
                assert [int(sample[0]) for sample in values] == [0, 1, 2, expected, *range(4, COUNT)]
                assert len(values[3]) == (tmp_path / "3").stat().st_size
            CHANGES[change](tmp_path)
