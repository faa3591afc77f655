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

SIDE, QUALITY, SEED, CLASSES = 224, 90, 7, 10
MADE_SIZE = (375, 500, 3)
_FIELD = 1024


def photos(count: int) -> Any:
    """Return the `prepare` of a case: `count` crops of the photographs of `--data`, or made-up pictures."""

    def prepare(scratch: Path, options: Options) -> dict[str, Any]:
        number = min(count, 320) if options.quick else count
        return {"photos": str(scratch / "photos"), "about": make_photos(scratch / "photos", options.data, number)}

    return prepare


def large_photos(count: int) -> Any:
    """Return the `prepare` of a case: the photographs of `--data` as they are, repeated, or made-up pictures."""

    def prepare(scratch: Path, options: Options) -> dict[str, Any]:
        number = min(count, 320) if options.quick else count
        return {"photos": str(scratch / "photos"), "about": repeat_photos(scratch / "photos", options.data, number)}

    return prepare


def jpeg_files(folder: Path) -> list[Path]:
    """Return the JPEG files below `folder`, whichever way their suffix is written."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg") and path.is_file())


def make_photos(folder: Path, data: Path | None, count: int) -> str:
    """Write `count` JPEG files to `folder`/CLASS/NNNNN.jpg and return what they are.

    With `data`: random crops of the photographs below it, 0.8 to 1 of each side, at quality 90, with a fixed seed.
    """
    if data is None:
        size = make_pictures(folder, count)
        return f"{count:,} made-up JPEG pictures of {size / count / 1000:.0f} KB on average (1/f noise)."
    files = sorted(path for path in jpeg_files(data) if min(Image.open(path).size) >= SIDE)
    if not files:
        raise FileNotFoundError(f"no JPEG file of {SIDE} pixels or more on each side is below {data}")
    _make_classes(folder)
    jobs = [(folder, files[number % len(files)], number) for number in range(count)]
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        size = sum(pool.map(_crop, jobs, chunksize=64))
    return (
        f"{count:,} JPEG files of {size / count / 1000:.0f} KB on average: random crops of {len(files)} photographs "
        f"at quality {QUALITY}."
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


def make_thumbs(folder: Path, data: Path | None, count: int, side: int, quality: int) -> str:
    """Write `count` JPEG files of `side` pixels: pieces of photographs."""
    if data is None:
        make_pictures(folder / "large", 64)
    files = jpeg_files(data or folder / "large")
    _make_classes(folder / "thumbs")
    size = 0
    for number in range(count):
        generator = np.random.default_rng([SEED, number])
        with Image.open(files[number % len(files)]) as image:
            picture = image.convert("RGB")
        left, top = (int(generator.integers(0, max(1, length - side))) for length in picture.size)
        encoded = io.BytesIO()
        picture.crop((left, top, left + side, top + side)).save(encoded, "JPEG", quality=quality)
        path = folder / "thumbs" / f"class-{number % CLASSES}" / f"{number:05d}.jpg"
        size += path.write_bytes(encoded.getbuffer())
    return f"{count:,} JPEG files of {side}x{side} pixels, {size / count / 1000:.0f} KB on average."


def make_pictures(folder: Path, count: int) -> int:
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
    size = 0
    for number in range(count):
        top, left = generator.integers(0, [_FIELD - MADE_SIZE[0], _FIELD - MADE_SIZE[1]])
        piece = noise[top : top + MADE_SIZE[0], left : left + MADE_SIZE[1]]
        tints = np.array([[1, 0.3, -0.2], [1, -0.1, 0.3], [1, 0.2, 0.1]])
        encoded = io.BytesIO()
        pixels = np.clip(128 + 42 * piece @ tints.T, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(encoded, "JPEG", quality=QUALITY)
        size += (folder / f"class-{number % CLASSES}" / f"{number:05d}.jpg").write_bytes(encoded.getbuffer())
    return size


def _make_classes(folder: Path) -> None:
    for number in range(CLASSES):
        (folder / f"class-{number}").mkdir(parents=True, exist_ok=True)


def _crop(job: tuple[Path, Path, int]) -> int:
    folder, path, number = job
    generator = np.random.default_rng([SEED, number])
    with Image.open(path) as image:
        picture = image.convert("RGB")
    width, height = (max(SIDE, int(side * generator.uniform(0.8, 1))) for side in picture.size)
    left, top = (int(generator.integers(0, a - b + 1)) for a, b in zip(picture.size, (width, height), strict=True))
    encoded = io.BytesIO()
    picture.crop((left, top, left + width, top + height)).save(encoded, "JPEG", quality=QUALITY)
    return (folder / f"class-{number % CLASSES}" / f"{number:05d}.jpg").write_bytes(encoded.getbuffer())
