"""Pictures for the tests of vision."""

import io
import shutil
import subprocess
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

Pixels = npt.NDArray[np.uint8]


def photograph(height: int = 120, width: int = 170, seed: int = 0) -> Pixels:
    """Slopes, edges and some noise, as a photograph has them."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / 9.0 + seed), np.cos(y / 7.0), np.sin((x + y) / 13.0)], -1) * 70 + 120
    waves[(x // 23 + y // 17) % 2 == 0] *= 0.7
    noise = np.random.default_rng(seed).normal(0, 6, waves.shape)
    return (waves + noise).clip(0, 255).astype(np.uint8)


def encode(pixels: Pixels, format: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """`pixels` as the bytes of a file."""
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format, **options)
    return file.getvalue()


def distance(a: Any, b: Any) -> Pixels:
    """How far apart the values of two pictures are."""
    assert a.shape == b.shape
    return np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).astype(np.uint8)


def compiler(name: str = "cc") -> str:
    """The path of a compiler that finds the headers of libjpeg; without one, the test is skipped."""
    path = shutil.which(name)
    program = "#include <stdio.h>\n#include <jpeglib.h>\n"
    if path is None or subprocess.run([path, "-E", "-"], input=program, text=True, capture_output=True).returncode:
        pytest.skip(f"{name} or jpeglib.h is not there")
    return path
