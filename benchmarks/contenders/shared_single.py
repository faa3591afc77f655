"""One job over JPEG or prepared pictures that are all in the cache, through `DataLoader` or `SharedLoader`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.contender import Task, emit, load_samples, measure, read_task
from benchmarks.contenders.jpeg import time_loader
from benchmarks.contenders.pairs import Pairs
from benchmarks.photos import CropAndFlip


def make_loader(name: str, data: Any, task: Task) -> Any:
    """The loader called `name`."""
    options: dict[str, Any] = {
        "batch_size": task.batch,
        "shuffle": True,
        "num_workers": task.workers,
        "drop_last": True,
    }
    if name == "SharedLoader":
        return sf.SharedLoader(data, group="single", **options)
    return sf.DataLoader(data, persistent_workers=True, **options)


def decoded(name: str, task: Task, photos: str) -> dict[str, Any]:
    """JPEG, decoded by workers."""
    source = sf.ImageFolder(photos, CropAndFlip())
    size = sum(Path(path).stat().st_size for path, _ in source.samples)
    room = 2 * size + (64 << 20)
    with sf.CachedDataset(source, capacity=room, form="fetched") as cached, make_loader(name, cached, task) as loader:
        given = {"batch": task.batch, "seconds": task.seconds}
        return {"rates": time_loader(loader, len(source) // task.batch, given)}


def prepared(name: str, task: Task) -> dict[str, Any]:
    """Prepared pictures, gathered."""
    room = 2 * task.samples * (task.side * task.side * 3 + 1024)
    with sf.CachedDataset(Pairs(task), capacity=room) as cached, make_loader(name, cached, task) as loader:
        for _batch in loader:  # fills the cache
            pass

        def epoch() -> Iterable[Any]:
            return loader  # type: ignore[no-any-return]

        return measure(epoch, task, load_samples(task)[0])


def main() -> None:
    given = json.loads(sys.argv[1])
    task = read_task()
    if given["data"] == "jpeg":
        result = decoded(given["loader"], task, given["photos"])
    else:
        result = prepared(given["loader"], task)
    emit(result, stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__)


if __name__ == "__main__":
    main()
