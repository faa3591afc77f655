"""FFCV over prepared pictures: a .beton file in memory, random order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from ffcv.fields import IntField, NDArrayField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.ndarray import NDArrayDecoder
from ffcv.fields.rgb_image import SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import ToTensor
from ffcv.writer import DatasetWriter

from benchmarks.contender import Epoch, Images, Task, emit, load_samples, measure_settings, read_task


class _Pairs:
    """What FFCV's writer reads: (picture, label) by index."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Images, int]:
        return self.images[index], index


def beton(task: Task, images: Images, field: str) -> Path:
    """The pictures as an FFCV file whose picture field is "rgb" (raw) or "array"; written once."""
    path = Path(task.folder) / f"{field}-{task.side}.beton"
    if not path.exists():
        picture = RGBImageField(write_mode="raw") if field == "rgb" else NDArrayField(np.dtype("u1"), images.shape[1:])
        draft = path.with_suffix(".draft")
        writer = DatasetWriter(str(draft), {"image": picture, "label": IntField()}, num_workers=task.workers)
        writer.from_indexed_dataset(_Pairs(images))
        draft.rename(path)
    return path


def loader(task: Task, images: Images, field: str, threads: int, ahead: int, os_cache: bool) -> Epoch:
    decoder = SimpleRGBImageDecoder if field == "rgb" else NDArrayDecoder
    made = Loader(
        str(beton(task, images, field)),
        batch_size=task.batch,
        num_workers=threads,
        os_cache=os_cache,
        order=OrderOption.RANDOM,
        seed=1,
        drop_last=True,
        batches_ahead=ahead,
        pipelines={"image": [decoder(), ToTensor()], "label": [IntDecoder(), ToTensor()]},
    )

    def epoch() -> Iterable[Any]:
        return made

    return epoch


def settings(task: Task, images: Images) -> dict[str, Callable[[], Epoch]]:
    """The settings worth trying, by name. The operating system's cache is the page cache or, here, memory itself."""
    grid = [
        ("rgb", task.workers, 1, True),
        ("rgb", task.workers, 2, True),
        ("rgb", task.workers, 3, True),
        ("rgb", 1, 1, True),
        ("array", task.workers, 1, True),
        ("array", 1, 1, True),
        ("rgb", task.workers, 3, False),
    ]
    return {
        f"{'raw RGBImageField' if field == 'rgb' else 'NDArrayField'}, num_workers={threads}, batches_ahead={ahead}, "
        f"os_cache={os_cache}": lambda f=field, t=threads, a=ahead, o=os_cache: loader(task, images, f, t, a, o)
        for field, threads, ahead, os_cache in grid
    }


def main() -> None:
    task = read_task()
    images, _ = load_samples(task)
    result = measure_settings(settings(task, images), task, images)
    emit(result, ffcv=version("ffcv"), torch=torch.__version__, numba=numba.__version__, numpy=np.__version__)


if __name__ == "__main__":
    main()
