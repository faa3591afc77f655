"""How fast are photographs decoded and augmented?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

import stallfree as sf
from benchmarks.harness import Case, Condition, Contender, Figure
from benchmarks.photos import photos
from benchmarks.questions.prepared import loader_options
from benchmarks.timing import CROP_SIDE, crop_rates, epoch_rates, find_photos

Figures = dict[str, Any]


@sf.mark_random
class CropAndFlip:
    """A random square of 224 pixels, mirrored half the time, as a contiguous tensor (channels, height, width)."""

    def __call__(self, pixels: Any) -> torch.Tensor:
        top = random.randint(0, pixels.shape[0] - CROP_SIDE)
        left = random.randint(0, pixels.shape[1] - CROP_SIDE)
        square = pixels[top : top + CROP_SIDE, left : left + CROP_SIDE]
        if random.random() < 0.5:
            square = square[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1)))


class Files(torch.utils.data.Dataset[Any]):
    """(picture, label) by index, for torch's loader: read, decode with stallfree's decoder, augment."""

    def __init__(self, paths: list[Path], augment: Any) -> None:
        self.paths, self.decode, self.augment = paths, sf.DecodeImage(), augment

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.augment(np.asarray(self.decode(self.paths[index].read_bytes()))), index


@sf.mark_random
class ResizedCrop:
    """The crops of `DecodeRandomResizedCrop`, of decoded pictures, resized by torch."""

    def __init__(self) -> None:
        self.random = sf.vision.RandomResizedCrop(CROP_SIDE, flip=0.5)

    def __call__(self, pixels: Any) -> torch.Tensor:
        (top, left, height, width), mirror = self.random.draw(*pixels.shape[:2])
        part = torch.from_numpy(pixels[top : top + height, left : left + width]).permute(2, 0, 1)[None]
        crop = interpolate(part, (CROP_SIDE, CROP_SIDE), mode="bilinear", antialias=True)[0]
        return (crop.flip(2) if mirror else crop).permute(1, 2, 0).contiguous()


def warm_torch(photos: str, batch: int, workers: int, seconds: float) -> Figures:
    files = Files(find_photos(photos), CropAndFlip())
    loader: Any = torch.utils.data.DataLoader(files, **loader_options(batch, workers))
    return timed(loader, len(files) // batch * batch, seconds)


def warm_stallfree(photos: str, batch: int, workers: int, seconds: float) -> Figures:
    source = sf.ImageFolder(photos, CropAndFlip())
    size = sum(path.stat().st_size for path in find_photos(photos))
    with sf.CachedDataset(source, capacity=2 * size + (64 << 20), form="fetched") as cached:
        with sf.DataLoader(cached, **loader_options(batch, workers)) as loader:
            figures = timed(loader, len(source) // batch * batch, seconds)
        if cached.stats().resident_items != len(source):
            raise AssertionError(f"not all files stayed in the cache: {cached.stats()}")
    return figures


def timed(loader: Any, samples: int, seconds: float) -> Figures:
    """Samples/s after the first epoch."""
    for _batch in loader:
        pass
    return {"rate": epoch_rates(lambda: loader, samples, seconds)}


def crops_torch(photos: str, batch: int, workers: int, seconds: float) -> Figures:
    files = Files(find_photos(photos), ResizedCrop())
    loader: Any = torch.utils.data.DataLoader(files, **loader_options(batch, workers))
    return {"rate": crop_rates(lambda: loader, len(files), batch, seconds)}


def crops_stallfree(photos: str, batch: int, workers: int, seconds: float, form: str) -> Figures:
    paths = find_photos(photos)
    data = sf.FileDataset(paths, list(range(len(paths))), sf.DecodeRandomResizedCrop(CROP_SIDE, flip=0.5))
    with sf.CachedDataset(data, capacity="3GiB", form=form) as cached:
        with sf.DataLoader(cached, **loader_options(batch, workers)) as loader:
            rates = crop_rates(lambda: loader, len(paths), batch, seconds)
        if cached.stats().resident_items < len(paths) - batch:
            raise AssertionError(f"not all samples stayed in the cache: {cached.stats()}")
    return {"rate": rates}


# -- cases ------------------------------------------------------------------------------------------------------------


HERE = "benchmarks.questions.prep"
STALLFREE = "stallfree, encoded pictures in the cache"
CASES = {
    "fast_prep": Case(
        question="How fast does prep run? A random part of a picture as in RandomResizedCrop(224), mirrored half the "
        "time, bytes in batches of 64, 2 workers or threads.",
        setup="All draw crops of the same areas and ratios. The results of stallfree and torch are antialiased, "
        "those of tf.data (at its default) and MONAI are not.",
        contenders=[
            Contender("torch", "torch DataLoader, files in memory", f"{HERE}:crops_torch", only=("encoded",)),
            Contender(
                "tfdata",
                "tf.data, fused decode and crop",
                "benchmarks.peers.tfdata:crops",
                venv="tfdata",
                tunes=True,
                only=("encoded",),
            ),
            Contender("stallfree", "stallfree", f"{HERE}:crops_stallfree"),
            Contender(
                "monai",
                "MONAI CacheDataset",
                "benchmarks.peers.monai:crops",
                venv="monai",
                tunes=True,
                only=("decoded",),
            ),
        ],
        figures={"rate": Figure("samples/s")},
        conditions=[
            Condition("encoded", "encoded pictures in memory", {"form": "fetched"}),
            Condition("decoded", "decoded pictures in memory", {"form": "prepared"}),
        ],
        params={"batch": 64, "workers": 2},
        prepare=photos(2000, repeat=True),
    ),
    "jpeg_warm": Case(
        question="When files are warm and workers decode anyway, does the cache do harm? Decode, random crop of 224, "
        "random flip, batches of 64, 2 workers.",
        setup="Both use the same decoder and the same transform.",
        contenders=[
            Contender("torch", "torch DataLoader, files in the page cache", f"{HERE}:warm_torch"),
            Contender("stallfree", "stallfree DataLoader, files in the sample cache", f"{HERE}:warm_stallfree"),
        ],
        figures={"rate": Figure("samples/s")},
        params={"batch": 64, "workers": 2},
        prepare=photos(2000),
    ),
    "cores": Case(
        question="How does speed grow with workers, from 1 to the number of cores?",
        setup="Photographs: decoded, cropped at random, resized to 224 and mirrored; torch's loader reads files in "
        "memory, stallfree has them encoded in its cache. Prepared pictures are gathered by at most two threads of "
        "stallfree.",
        contenders=[
            Contender("torch", "photographs: torch", f"{HERE}:crops_torch"),
            Contender("stallfree", "photographs: stallfree", f"{HERE}:crops_stallfree", {"form": "fetched"}),
            Contender("torch_prepared", "prepared 224x224x3: torch", "benchmarks.questions.prepared:torch_loader"),
            Contender("prepared", "prepared 224x224x3: stallfree", "benchmarks.questions.prepared:stallfree_loader"),
        ],
        figures={"rate": Figure("samples/s")},
        conditions=[
            Condition(str(workers), f"{workers} worker{'s' * (workers > 1)}", {"workers": workers})
            for workers in (1, 2, 4, 8, 16)
        ],
        ours="",
        params={"batch": 64, "side": 224},
        rounds=1,
        prepare=photos(4096, repeat=True, pictures=(224, 12_800)),
    ),
}
