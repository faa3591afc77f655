"""A folder of JPEG photographs of one size to measure with: crops of real ones, or made-up pictures."""

from __future__ import annotations

import io
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

import stallfree as sf
from benchmarks.made_pictures import make_pictures

COUNT = 2000
SIDE = 224
QUALITY = 90
SEED = 7
CLASSES = 10

Pixels = npt.NDArray[np.uint8]


@sf.mark_random
class CropAndFlip:
    """A random square of 224 pixels, mirrored half the time, as a contiguous tensor (channels, height, width)."""

    def __call__(self, pixels: Pixels) -> torch.Tensor:
        top = random.randint(0, pixels.shape[0] - SIDE)
        left = random.randint(0, pixels.shape[1] - SIDE)
        square = pixels[top : top + SIDE, left : left + SIDE]
        if random.random() < 0.5:
            square = square[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1)))


def jpeg_files(folder: Path) -> list[Path]:
    """The JPEG files below `folder`, whichever way their suffix is written."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg") and path.is_file())


def make_photos(folder: Path, data: Path | None, count: int = COUNT) -> str:
    """Write `count` JPEG files to `folder`/CLASS/NNNN.jpg. What they are, in words.

    With `data`: random crops of the photographs below it, 0.8 to 1 of each side, at quality 90, with a fixed seed.
    """
    if data is None:
        size = make_pictures(folder, count)
        return f"{count:,} made-up JPEG pictures of {size / count / 1000:.0f} KB on average"
    found = sorted(path for path in jpeg_files(data) if min(Image.open(path).size) >= SIDE)
    if not found:
        raise FileNotFoundError(f"no JPEG file of {SIDE} pixels or more on each side lies below {data}")
    jobs = [(folder, found[number % len(found)], number) for number in range(count)]
    for number in range(CLASSES):
        (folder / f"class-{number}").mkdir(parents=True)
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        size = sum(pool.map(_crop, jobs, chunksize=64))
    return (
        f"{count:,} JPEG files of {size / count / 1000:.0f} KB on average, random crops of {len(found)} photographs "
        f"at quality {QUALITY}"
    )


def _crop(job: tuple[Path, Path, int]) -> int:
    folder, path, number = job
    rng = np.random.default_rng([SEED, number])
    with Image.open(path) as image:
        picture = image.convert("RGB")
    width, height = (max(SIDE, int(side * rng.uniform(0.8, 1))) for side in picture.size)
    left, top = (int(rng.integers(0, a - b + 1)) for a, b in zip(picture.size, (width, height), strict=True))
    encoded = io.BytesIO()
    picture.crop((left, top, left + width, top + height)).save(encoded, "JPEG", quality=QUALITY)
    return (folder / f"class-{number % CLASSES}" / f"{number:05d}.jpg").write_bytes(encoded.getbuffer())
