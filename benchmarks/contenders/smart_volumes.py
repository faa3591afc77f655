"""The volumes without a cache under torch's DataLoader, or in stallfree's Smart Cache under its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.smart_steps import SmartTask, measure, read_task
from benchmarks.volumes import Volumes, augment, find_pairs, prepare


def without_cache(task: SmartTask, workers: int) -> dict[str, Any]:
    """Torch's DataLoader over all volumes."""
    pairs = find_pairs(task.volumes)
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        Volumes(pairs, prepare() + augment()),
        batch_size=task.batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
    )
    return measure(lambda epoch: loader, task, len(pairs), windowed=False)


def with_window(task: SmartTask, workers: int, **more: Any) -> dict[str, Any]:
    """A window of stallfree's, in the order of the volumes. It waits for late replacements, as MONAI's does."""
    pairs = find_pairs(task.volumes)
    random = [sf.mark_random(step) for step in augment()]
    arguments = {"replace_rate": task.rate, "shuffle": False, "on_late": "wait"} | more
    with sf.SmartCacheDataset(
        pairs, sf.Compose([*prepare(), *random]), cache_num=task.size, num_fill_workers=1, **arguments
    ) as data:
        loader = sf.DataLoader(
            data, batch_size=task.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )

        def epoch(number: int) -> Iterable[Any]:
            return loader

        found = measure(epoch, task, len(pairs), windowed=True)
        stats = data.stats()
        loader.close()
    return found | {"late_epochs": stats.late_epochs, "wait_seconds": stats.wait_seconds}


def main() -> None:
    given = json.loads(sys.argv[1])
    task = read_task()
    result = (with_window if given["who"] == "stallfree" else without_cache)(task, given["workers"])
    emit(
        result,
        stallfree=version("stallfree"),
        torch=torch.__version__,
        numpy=np.__version__,
        nibabel=version("nibabel"),
    )


if __name__ == "__main__":
    main()
