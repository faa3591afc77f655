"""Made-up pictures: JPEG files that cost what photographs cost, in classes that a small network can learn.

A photograph has about equal energy in every octave of size (its spectrum falls as 1/f). So does a field of 1/f noise,
and its JPEG is of a photograph's size and takes as long to decode. On such a field lie a few flat shapes; their kind is
the class.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

CLASSES = ("discs", "rings", "stripes", "squares")
WIDTH, HEIGHT = 500, 375
QUALITY = 90
SEED = 20

_FIELD = 1024  # pixels per side of a noise field; pictures are cut out of it
_CHUNK = 50  # pictures that a process makes before it reports

Pixels = npt.NDArray[np.uint8]
Plane = npt.NDArray[np.float32]


def make_pictures(
    folder: Path, count: int, *, processes: int = 2, seed: int = SEED, progress: Callable[[int], None] | None = None
) -> int:
    """Write `count` JPEG files to `folder`/CLASS/NNNNN.jpg and return their bytes.

    File n depends on (seed, n) alone, whatever the number of processes.

    Args:
        folder: made if it is missing.
        count: how many; classes take turns.
        processes: how many processes share the work.
        seed: another seed gives other pictures.
        progress: called with the number of files that were just made.
    """
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    chunks = [range(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
    size = 0
    _noise_fields(seed)  # made once, here; forked processes share them
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        jobs: dict[Future[int], range] = {pool.submit(_write, folder, chunk, seed): chunk for chunk in chunks}
        for job in as_completed(jobs):
            size += job.result()
            if progress is not None:
                progress(len(jobs[job]))
    return size


def picture(index: int, seed: int = SEED) -> Pixels:
    """Picture `index` as an array of shape (HEIGHT, WIDTH, 3); its class is `CLASSES[index % len(CLASSES)]`."""
    rng = np.random.default_rng([seed, index])
    fields = _noise_fields(seed)
    light, *tints = (_cut(fields[int(rng.integers(len(fields)))], rng) for _ in range(3))
    canvas = np.empty((HEIGHT, WIDTH, 3), np.float32)
    for channel, tint in enumerate(rng.uniform(-0.4, 0.4, (3, 2)).astype(np.float32)):
        canvas[..., channel] = 128 + rng.uniform(-25, 25) + 42 * (light + tint[0] * tints[0] + tint[1] * tints[1])
    for _ in range(int(rng.integers(3, 7))):
        _draw(canvas, CLASSES[index % len(CLASSES)], rng)
    return np.clip(canvas, 0, 255).astype(np.uint8)


def _write(folder: Path, chunk: range, seed: int) -> int:
    size = 0
    for index in chunk:
        encoded = io.BytesIO()
        Image.fromarray(picture(index, seed)).save(encoded, "JPEG", quality=QUALITY)
        path = folder / CLASSES[index % len(CLASSES)] / f"{index:05d}.jpg"
        size += path.write_bytes(encoded.getbuffer())
    return size


@lru_cache(maxsize=1)
def _noise_fields(seed: int) -> tuple[Plane, ...]:
    """Fields of 1/f noise with mean 0 and standard deviation 1."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(_FIELD)[:, None], np.fft.rfftfreq(_FIELD)[None, :])
    frequency[0, 0] = np.inf  # no constant part
    fields = []
    for _ in range(4):
        spectrum = np.fft.rfft2(rng.standard_normal((_FIELD, _FIELD))) / frequency
        field = np.fft.irfft2(spectrum, (_FIELD, _FIELD))
        fields.append((field / field.std()).astype(np.float32))
    return tuple(fields)


def _cut(field: Plane, rng: np.random.Generator) -> Plane:
    """A piece of `field` from anywhere, mirrored or not."""
    top, left = rng.integers(0, [_FIELD - HEIGHT, _FIELD - WIDTH])
    piece = field[top : top + HEIGHT, left : left + WIDTH]
    return piece[:: int(rng.choice((-1, 1))), :: int(rng.choice((-1, 1)))]


def _draw(canvas: Plane, kind: str, rng: np.random.Generator) -> None:
    """One shape of the class `kind` somewhere on `canvas`, which is changed."""
    radius = int(rng.integers(36, 80))
    top = int(rng.integers(0, HEIGHT - 2 * radius))
    left = int(rng.integers(0, WIDTH - 2 * radius))
    inside = _shape(kind, radius)
    window = canvas[top : top + 2 * radius, left : left + 2 * radius]
    color = rng.uniform(30, 225, 3).astype(np.float32)
    window[inside] = 0.25 * window[inside] + 0.75 * color


def _shape(kind: str, radius: int) -> npt.NDArray[np.bool_]:
    """Which pixels of a square of twice `radius` belong to the shape."""
    y, x = np.mgrid[-1 : 1 : 2j * radius, -1 : 1 : 2j * radius]
    distance = np.hypot(x, y)
    inside: npt.NDArray[np.bool_]
    if kind == "discs":
        inside = distance < 1
    elif kind == "rings":
        inside = (distance < 1) & (distance > 0.63)
    elif kind == "stripes":
        inside = np.floor((y + 1) * radius / 12) % 2 == 0
    else:
        inside = np.full(distance.shape, True)
    return inside
