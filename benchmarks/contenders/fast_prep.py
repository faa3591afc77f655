"""A random part of JPEG files, resized to 224 and mirrored half the time: by torch's loader or by stallfree's.

`who` is "torch" (files in the page cache, decoded whole, resized by torch), "fetched" or "prepared" (stallfree with
encoded or with decoded pictures in its cache).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.prep_steps import SIDE, PrepTask, find_photos, measure, read_task
from stallfree.vision import native


class Files(Dataset[tuple[torch.Tensor, int]]):
    """(picture, label) by index: read, decode whole, cut, resize, mirror. The decoder is that of stallfree."""

    def __init__(self, task: PrepTask) -> None:
        self.paths = find_photos(task)
        self.decode, self.random = sf.DecodeImage(), sf.vision.RandomResizedCrop(SIDE, flip=0.5)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = np.asarray(self.decode(self.paths[index].read_bytes()))
        (top, left, height, width), mirror = self.random.draw(*pixels.shape[:2])
        part = torch.from_numpy(pixels[top : top + height, left : left + width]).permute(2, 0, 1)[None]
        out = interpolate(part, (SIDE, SIDE), mode="bilinear", antialias=True)[0]
        return (out.flip(2) if mirror else out).permute(1, 2, 0).contiguous(), index


def main() -> None:
    task, who = read_task(), json.loads(sys.argv[1])["who"]
    options: dict[str, Any] = {
        "batch_size": task.batch,
        "shuffle": True,
        "num_workers": task.workers,
        "persistent_workers": True,
        "drop_last": True,
    }
    if who == "torch":
        result = measure_loader(torch.utils.data.DataLoader(Files(task), **options), task)
    else:
        paths = find_photos(task)
        data = sf.FileDataset(paths, list(range(len(paths))), sf.DecodeRandomResizedCrop(SIDE, flip=0.5))
        with sf.CachedDataset(data, capacity="3GiB", form=who) as cached, sf.DataLoader(cached, **options) as loader:
            result = measure_loader(loader, task)
            stats = cached.stats()
        if stats.resident_items < len(paths) - task.batch:
            raise AssertionError(f"not all samples stayed in the cache: {stats}")
    try:
        decoder = {"simplejpeg": version("simplejpeg")}
    except PackageNotFoundError:
        decoder = {"pillow": version("pillow")}
    versions = {"stallfree": version("stallfree"), "torch": torch.__version__, "numpy": np.__version__, **decoder}
    emit(result | {"native": native.library() is not None}, **versions)


def measure_loader(loader: Iterable[Any], task: PrepTask) -> dict[str, Any]:
    """Samples/s of each epoch but the first."""

    def epoch() -> Iterable[Any]:
        return loader

    return measure(epoch, task)


if __name__ == "__main__":
    main()
