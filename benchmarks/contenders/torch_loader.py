"""torch's DataLoader over prepared pictures in shared memory, with persistent workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.contender import emit, load_samples, measure, read_task
from benchmarks.contenders.pairs import BatchedPairs, Pairs


def _as_it_is(batch: Any) -> Any:
    return batch


def main() -> None:
    task = read_task()
    batched = task.setting == "batched"
    loader: DataLoader[Any] = DataLoader(
        BatchedPairs(task) if batched else Pairs(task),
        batch_size=task.batch,
        shuffle=True,
        num_workers=task.workers,
        persistent_workers=True,
        drop_last=True,
        collate_fn=_as_it_is if batched else None,
    )

    def epoch() -> Iterable[Any]:
        return loader

    result = measure(epoch, task, load_samples(task)[0])
    emit(result, torch=torch.__version__, numpy=np.__version__)


if __name__ == "__main__":
    main()
