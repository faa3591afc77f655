"""Pictures for the tests of vision."""

import io
import random
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from stallfree.vision import crops

Pixels = npt.NDArray[np.uint8]
needs_library = pytest.mark.skipif(crops.library() is None, reason="no compiled part: python hatch_build.py makes it")


def photograph(height: int = 120, width: int = 170, seed: int = 0) -> Pixels:
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(x / 9.0 + seed), np.cos(y / 7.0), np.sin((x + y) / 13.0)], -1) * 70 + 120
    waves[(x // 23 + y // 17) % 2 == 0] *= 0.7
    return (waves + np.random.default_rng(seed).normal(0, 6, waves.shape)).clip(0, 255).astype(np.uint8)


def encode(pixels: Pixels, format: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format, **options)
    return file.getvalue()


def kinds(pixels: Pixels, large: Pixels) -> dict[str, bytes]:
    return {
        "4:2:0": encode(pixels, quality=92), "4:4:4": encode(pixels, quality=92, subsampling=0),
        "4:2:2": encode(pixels, quality=92, subsampling=1), "grey": encode(pixels, mode="L"),
        "odd": encode(pixels[:71, :33], quality=92), "with EXIF": encode(pixels, exif=b"Exif\0\0" + bytes(3000)),
        "restarts": encode(pixels, restart_marker_blocks=3), "progressive": encode(pixels, progressive=True),
        "CMYK": encode(pixels, mode="CMYK"), "RGB in a JPEG": encode(pixels, keep_rgb=True, subsampling=0),
        "PNG": encode(pixels, "PNG"), "one pixel": encode(pixels[:1, :1]), "a line": encode(pixels[:1]),
        "large": encode(large, quality=92),
    }  # fmt: skip


def distance(a: Any, b: Any) -> Pixels:
    assert a.shape == b.shape
    return np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).astype(np.uint8)


def seeded(seed: int, call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns whose draws depend on `seed`."""
    random.seed(seed)
    return call(*arguments)


def compiler(name: str = "cc") -> str:
    """The path of a compiler that finds the headers of libjpeg; without one, the test is skipped."""
    path = shutil.which(name)
    program = "#include <stdio.h>\n#include <jpeglib.h>\n"
    if path is None or subprocess.run([path, "-E", "-"], input=program, text=True, capture_output=True).returncode:
        pytest.skip(f"{name} or jpeglib.h is not there")
    return path
