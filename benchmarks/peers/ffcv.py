"""FFCV over prepared pictures: a .beton file in memory, random order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, NDArrayField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.ndarray import NDArrayDecoder
from ffcv.fields.rgb_image import SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import ToTensor
from ffcv.writer import DatasetWriter

from benchmarks.timing import Bytes, Epoch, best_of, load_noise_pictures, prepared_rates


class Pairs:
    """(picture, label) by index, for FFCV's writer."""

    def __init__(self, pictures: Bytes) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Bytes, int]:
        return self.pictures[index], index


def write_file(folder: str, pictures: Bytes, field: str, workers: int) -> Path:
    """Write the pictures once as an FFCV file, with `field` "rgb" (raw) or "array", and return its path."""
    path = Path(folder) / f"{field}-{pictures.shape[1]}.beton"
    if not path.exists():
        column = RGBImageField(write_mode="raw") if field == "rgb" else NDArrayField(np.dtype("u1"), pictures.shape[1:])
        draft = path.with_suffix(".draft")
        writer = DatasetWriter(str(draft), {"image": column, "label": IntField()}, num_workers=workers)
        writer.from_indexed_dataset(Pairs(pictures))
        draft.rename(path)
    return path


def prepared(folder: str, side: int, batch: int, workers: int, seconds: float, setting: str = "") -> dict[str, Any]:
    pictures = load_noise_pictures(folder, side)

    def make(field: str, threads: int, ahead: int, os_cache: bool) -> Callable[[], Epoch]:
        def start() -> Epoch:
            decoder = SimpleRGBImageDecoder if field == "rgb" else NDArrayDecoder
            loader = Loader(
                str(write_file(folder, pictures, field, workers)),
                batch_size=batch,
                num_workers=threads,
                os_cache=os_cache,
                order=OrderOption.RANDOM,
                seed=1,
                drop_last=True,
                batches_ahead=ahead,
                pipelines={"image": [decoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]},
            )
            return lambda: loader

        return start

    grid = [("rgb", workers, ahead, True) for ahead in (1, 2, 3)]
    grid += [("rgb", 1, 1, True), ("array", workers, 1, True), ("array", 1, 1, True), ("rgb", workers, 3, False)]
    settings = {
        f"{field}, num_workers={threads}, batches_ahead={ahead}, os_cache={os_cache}": make(
            field, threads, ahead, os_cache
        )
        for field, threads, ahead, os_cache in grid
    }
    return best_of(settings, setting, lambda epoch: prepared_rates(epoch, pictures, batch, seconds))
