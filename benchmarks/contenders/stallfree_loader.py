"""stallfree's DataLoader over prepared pictures that are all in its cache."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.contender import emit, load_samples, measure, read_task
from benchmarks.contenders.pairs import Pairs


def main() -> None:
    task = read_task()
    room = 2 * task.samples * (task.side * task.side * 3 + 1024)
    with sf.CachedDataset(Pairs(task), capacity=room) as data:
        loader = sf.DataLoader(
            data,
            batch_size=task.batch,
            shuffle=True,
            num_workers=task.workers,
            persistent_workers=True,
            drop_last=True,
        )
        for _batch in loader:  # fills the cache
            pass
        if (there := data.stats().resident_items) != task.samples:
            raise AssertionError(f"{there} of {task.samples} samples are in the cache after the first epoch")

        def epoch() -> Iterable[Any]:
            return loader

        result = measure(epoch, task, load_samples(task)[0])
    emit(result, stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__)


if __name__ == "__main__":
    main()
