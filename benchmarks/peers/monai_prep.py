"""MONAI's CacheDataset over decoded pictures, a random part of them resized and mirrored by its transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import monai
import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, ThreadDataLoader
from monai.transforms import Compose, RandFlip, Randomizable, Resize, SpatialCrop, Transform
from PIL import Image

from benchmarks.contender import Epoch, emit
from benchmarks.prep_steps import RATIO, SCALE, SIDE, PrepTask, find_photos, measure_settings, read_task


class Decode(Transform):
    """A path to a picture as a tensor of bytes, channels first."""

    def __call__(self, data: Path) -> torch.Tensor:
        with Image.open(data) as image:
            return torch.from_numpy(np.asarray(image.convert("RGB")).transpose(2, 0, 1).copy())


class RandomPart(Randomizable, Transform):
    """A random part, drawn as everyone draws it, cut out and resized by MONAI's own transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.resize = Resize((SIDE, SIDE), mode="bilinear", dtype=torch.float32)

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        height, width = data.shape[1:]
        slices = [slice(0, height), slice(0, width)]
        for _ in range(10):
            area = height * width * self.R.uniform(*SCALE)
            ratio = math.exp(self.R.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                top, left = self.R.randint(0, height - down + 1), self.R.randint(0, width - across + 1)
                slices = [slice(top, top + down), slice(left, left + across)]
                break
        part: torch.Tensor = self.resize(SpatialCrop(roi_slices=slices)(data))
        return part


class ToBytes(Transform):
    """Floats to bytes."""

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        return data.round_().to(torch.uint8)


class Labelled(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The samples of a data set, each with its position as the label."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.data[index], index


def settings(task: PrepTask, data: Any) -> dict[str, Callable[[], Epoch]]:
    """The settings worth trying, by name."""
    common: dict[str, Any] = {"batch_size": task.batch, "shuffle": True, "drop_last": True}
    two = task.workers

    def loader(kind: Any, workers: int, **more: Any) -> Epoch:
        made = kind(Labelled(data), num_workers=workers, **common, **more)

        def epoch() -> Iterable[Any]:
            return made

        return epoch

    return {
        f"DataLoader, {two} persistent workers": lambda: loader(DataLoader, two, persistent_workers=True),
        "ThreadDataLoader, num_workers=0": lambda: loader(ThreadDataLoader, 0),
        f"ThreadDataLoader, {two} workers that are threads": lambda: loader(
            ThreadDataLoader, two, use_thread_workers=True
        ),
    }


def main() -> None:
    task = read_task()
    steps = Compose([Decode(), RandomPart(), RandFlip(prob=0.5, spatial_axis=1), ToBytes()])
    data = CacheDataset(find_photos(task), steps, cache_rate=1.0, num_workers=2, copy_cache=False, progress=False)
    result = measure_settings(settings(task, data), task)
    emit(result, monai=version("monai"), torch=torch.__version__)


if __name__ == "__main__":
    monai.data.set_track_meta(False)
    main()
