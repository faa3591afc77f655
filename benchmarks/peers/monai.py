"""MONAI: `CacheDataset` over decoded pictures with its own transforms, and `SmartCacheDataset` over volumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import monai.data
import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, SmartCacheDataset, ThreadDataLoader
from monai.transforms import Compose, RandFlip, Randomizable, RandomizableTransform, Resize, SpatialCrop, Transform
from PIL import Image

from benchmarks.timing import CROP_AREA, CROP_RATIO, CROP_SIDE, Epoch, best_of, crop_rates, find_photos
from benchmarks.volumes import Step, augment, find_pairs, prepare, time_windows

monai.data.set_track_meta(False)


class Decode(Transform):
    """A path to a picture as a tensor of bytes, channels first."""

    def __call__(self, data: Path) -> torch.Tensor:
        with Image.open(data) as image:
            return torch.from_numpy(np.asarray(image.convert("RGB")).transpose(2, 0, 1).copy())


class RandomPart(Randomizable, Transform):
    """A random part, cut out and resized by MONAI's own transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.resize = Resize((CROP_SIDE, CROP_SIDE), mode="bilinear", dtype=torch.float32)

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        height, width = data.shape[1:]
        slices = [slice(0, height), slice(0, width)]
        for _ in range(10):
            area = height * width * self.R.uniform(*CROP_AREA)
            ratio = math.exp(self.R.uniform(*map(math.log, CROP_RATIO)))
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


class Labelled(torch.utils.data.Dataset[Any]):
    """The samples of a data set, each with its position as the label."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index], index


def crops(photos: str, batch: int, workers: int, seconds: float, setting: str = "") -> dict[str, Any]:
    steps = Compose([Decode(), RandomPart(), RandFlip(prob=0.5, spatial_axis=1), ToBytes()])
    paths = find_photos(photos)
    data = Labelled(CacheDataset(paths, steps, cache_rate=1.0, num_workers=2, copy_cache=False, progress=False))

    def make(kind: Any, count: int, **more: Any) -> Callable[[], Epoch]:
        def start() -> Epoch:
            loader = kind(data, num_workers=count, batch_size=batch, shuffle=True, drop_last=True, **more)
            return lambda: loader

        return start

    settings = {
        f"DataLoader, {workers} persistent workers": make(DataLoader, workers, persistent_workers=True),
        "ThreadDataLoader, num_workers=0": make(ThreadDataLoader, 0),
        f"ThreadDataLoader, {workers} workers that are threads": make(
            ThreadDataLoader, workers, use_thread_workers=True
        ),
    }
    return best_of(settings, setting, lambda epoch: crop_rates(epoch, len(paths), batch, seconds))


# -- Smart Cache ------------------------------------------------------------------------------------------------------


class Fixed(Transform):
    """A step that MONAI may cache."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def __call__(self, data: Any) -> Any:
        return self.step(data)


class Random(RandomizableTransform):
    """A step that MONAI must not cache. It draws from torch's generator, as with the other contenders."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def __call__(self, data: Any) -> Any:
        return self.step(data)


_BUFFER = {"workers": 0, "threads": "buffer", "ahead": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "DataLoader, num_workers=0": {},
    "DataLoader, num_workers=0, copy_cache=True": {"copy": True},
    "DataLoader, num_workers=1": {"workers": 1},
    "DataLoader, num_workers=2": {"workers": 2},
    "ThreadDataLoader, num_workers=0, buffer_size=1": {"threads": "buffer", "ahead": 1},
    "ThreadDataLoader, num_workers=0, buffer_size=4": _BUFFER,
    "ThreadDataLoader, num_workers=0, buffer_size=4, as_contiguous=False": _BUFFER | {"contiguous": False},
    "ThreadDataLoader, num_workers=0, buffer_size=4, num_replace_workers=2": _BUFFER | {"fillers": 2},
    "ThreadDataLoader, num_workers=0, buffer_size=4, torch.set_num_threads(1)": _BUFFER | {"torch_threads": 1},
    "ThreadDataLoader, num_workers=1, use_thread_workers=True": {"workers": 1, "threads": "workers"},
    "ThreadDataLoader, num_workers=2, use_thread_workers=True": {"workers": 2, "threads": "workers"},
}
"""With persistent workers MONAI's window does not move, so they are not tried."""


def smart_cache(
    volumes: str, batch: int, size: int, rate: float, step: float, seconds: float, setting: str = ""
) -> dict[str, Any]:
    torch_threads = torch.get_num_threads()

    def run(
        workers: int = 0,
        threads: str = "",
        fillers: int = 1,
        copy: bool = False,
        contiguous: bool = True,
        ahead: int = 2,
        torch_threads: int = torch_threads,
    ) -> dict[str, Any]:
        torch.set_num_threads(torch_threads)
        pairs = find_pairs(volumes)
        data = SmartCacheDataset(
            pairs,
            Compose([Fixed(step) for step in prepare()] + [Random(step) for step in augment()]),
            replace_rate=rate,
            cache_num=size,
            num_init_workers=2,
            num_replace_workers=fillers,
            progress=False,
            shuffle=False,
            copy_cache=copy,
            as_contiguous=contiguous,
        )
        options: dict[str, Any] = {"batch_size": batch, "shuffle": True, "num_workers": workers}
        options |= {"prefetch_factor": ahead} if workers else {}
        if threads:
            loader: Any = ThreadDataLoader(data, buffer_size=ahead, use_thread_workers=threads == "workers", **options)
        else:
            loader = DataLoader(data, **options)

        def epoch(number: int) -> Iterable[Any]:
            if number:
                data.update_cache()
            return loader

        data.start()
        try:
            return time_windows(epoch, len(pairs), seconds, step, size, rate)
        finally:
            data.shutdown()

    if setting:
        return run(**SETTINGS[setting])
    tried = {}
    for name, options in SETTINGS.items():
        try:
            tried[name] = float(np.median(run(**options)["rate"]))
        except Exception as error:
            print(f"setting {name}: {error!r}")
            tried[name] = 0.0
    return {"setting": max(tried, key=lambda name: tried[name]), "tried": len(tried)}
