"""The data set that torch's loader and stallfree's are given: pairs of a picture and a label, in shared memory."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from benchmarks.contender import Task, load_samples


class Pairs(Dataset[tuple[torch.Tensor, int]]):
    """(picture, label) by index, out of one tensor in shared memory."""

    def __init__(self, task: Task) -> None:
        images, _ = load_samples(task)
        self.images = torch.empty(images.shape, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self.images.numpy()[:] = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index


class BatchedPairs(Pairs):
    """The same, a whole batch at a time: one gather in place of one tensor per sample."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(indices)
        return self.images[chosen], chosen
