"""Folders of JPEG photographs to measure with: those that are given, crops of them, or made-up pictures."""

from __future__ import annotations

import io
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness import Options
from benchmarks.timing import make_noise_pictures

SIDE, QUALITY, SEED, CLASSES = 224, 90, 7, 10
MADE_SIZE = (375, 500)
_FIELD = 1024


def photos(count: int, *, repeat: bool = False, pictures: tuple[int, int] | None = None) -> Any:
    """Return the `prepare` of a case that makes photographs.

    Args:
        count: of the photographs.
        repeat: take the photographs of `--data` as they are, again and again, instead of crops of them.
        pictures: side and number of noise pictures that are made, too.
    """

    def prepare(scratch: Path, options: Options) -> dict[str, Any]:
        make = repeat_photos if repeat else make_photos
        about = make(scratch / "photos", options.data, min(count, 320) if options.quick else count)
        if pictures is not None:
            about += " " + make_noise_pictures(scratch, pictures[0], pictures[1] // (8 if options.quick else 1))
        return {"photos": str(scratch / "photos"), "about": about}

    return prepare


def jpeg_files(folder: Path) -> list[Path]:
    """Return the JPEG files below `folder`, whichever way their suffix is written."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg") and path.is_file())


def make_photos(folder: Path, data: Path | None, count: int, side: int = 0, quality: int = QUALITY) -> str:
    """Write `count` JPEG files to `folder`/CLASS/NNNNN.jpg and return what they are.

    With `data`: random crops of the photographs below it, of `side` pixels or of 0.8 to 1 of each side.
    """
    if data is None:
        size = make_pictures(folder, count, (side, side) if side else MADE_SIZE, quality)
        return f"{count:,} made-up JPEG pictures of {size / count / 1000:.0f} KB on average (1/f noise)."
    files = sorted(path for path in jpeg_files(data) if min(Image.open(path).size) >= SIDE)
    if not files:
        raise FileNotFoundError(f"no JPEG file of {SIDE} pixels or more on each side is below {data}")
    _make_classes(folder)
    jobs = [(folder, files[number % len(files)], number, side, quality) for number in range(count)]
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        size = sum(pool.map(_crop, jobs, chunksize=64))
    return (
        f"{count:,} JPEG files of {size / count / 1000:.0f} KB on average: random crops of {len(files)} photographs "
        f"at quality {quality}."
    )


def repeat_photos(folder: Path, data: Path | None, count: int) -> str:
    """Write `count` JPEG files to `folder`/CLASS/NNNNN.jpg: the photographs below `data`, repeated, or made-up ones."""
    if data is None:
        return make_photos(folder, None, count)
    files = sorted(path for path in jpeg_files(data) if path.stat().st_size > 20_000)
    if not files:
        raise FileNotFoundError(f"no JPEG file of 20 KB or more is below {data}")
    _make_classes(folder)
    size = 0
    for number in range(count):
        source = files[number % len(files)]
        shutil.copyfile(source, folder / f"class-{number % CLASSES}" / f"{number:05d}.jpg")
        size += source.stat().st_size
    return f"{count:,} JPEG files of {size / count / 1000:.0f} KB on average: {len(files)} photographs, repeated."


def make_pictures(folder: Path, count: int, size: tuple[int, int], quality: int) -> int:
    """Write `count` made-up JPEG files to `folder`/CLASS/NNNNN.jpg and return their bytes.

    The spectrum of a photograph falls as 1/f. So does that of this noise: its JPEG is of a photograph's size and takes
    as long to decode.
    """
    generator = np.random.default_rng(SEED)
    frequency = np.hypot(np.fft.fftfreq(_FIELD)[:, None], np.fft.rfftfreq(_FIELD)[None, :])
    frequency[0, 0] = np.inf  # no constant part
    fields = [np.fft.irfft2(np.fft.rfft2(generator.standard_normal((_FIELD, _FIELD))) / frequency) for _ in range(3)]
    noise = np.stack([field / field.std() for field in fields], axis=2)
    _make_classes(folder)
    written = 0
    for number in range(count):
        top, left = generator.integers(0, [_FIELD - size[0], _FIELD - size[1]])
        piece = noise[top : top + size[0], left : left + size[1]]
        tints = np.array([[1, 0.3, -0.2], [1, -0.1, 0.3], [1, 0.2, 0.1]])
        encoded = io.BytesIO()
        pixels = np.clip(128 + 42 * piece @ tints.T, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(encoded, "JPEG", quality=quality)
        written += (folder / f"class-{number % CLASSES}" / f"{number:05d}.jpg").write_bytes(encoded.getbuffer())
    return written


def _make_classes(folder: Path) -> None:
    for number in range(CLASSES):
        (folder / f"class-{number}").mkdir(parents=True, exist_ok=True)


def _crop(job: tuple[Path, Path, int, int, int]) -> int:
    folder, path, number, side, quality = job
    generator = np.random.default_rng([SEED, number])
    with Image.open(path) as image:
        picture = image.convert("RGB")
    width, height = (side or max(SIDE, int(length * generator.uniform(0.8, 1))) for length in picture.size)
    left, top = (int(generator.integers(0, a - b + 1)) for a, b in zip(picture.size, (width, height), strict=True))
    encoded = io.BytesIO()
    picture.crop((left, top, left + width, top + height)).save(encoded, "JPEG", quality=quality)
    return (folder / f"class-{number % CLASSES}" / f"{number:05d}.jpg").write_bytes(encoded.getbuffer())
