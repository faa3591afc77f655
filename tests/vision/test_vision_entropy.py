"""Entropy decoding of our own gives what libjpeg's gives, bit for bit."""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision_data import encode, photograph

from stallfree.vision import native

KINDS: list[dict[str, Any]] = [
    {"quality": quality, "subsampling": subsampling, "optimize": optimize, "mode": mode}
    for quality, subsampling, optimize, mode in itertools.product((3, 75, 100), (0, 1, 2), (False, True), ("RGB", "L"))
]
OTHERS: list[dict[str, Any]] = [{"progressive": True}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 3}]
SIZES = [(1, 1), (8, 8), (16, 17), (120, 170), (203, 64)]


@pytest.fixture(scope="module")
def libjpegs(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The compiled part, with all of the entropy left to libjpeg."""
    compiler = shutil.which("cc")
    if compiler is None or native.library() is None:
        pytest.skip("there is no compiler, or the compiled part is not there")
    library = tmp_path_factory.mktemp("entropy") / "libjpegs.so"
    source = Path(native.__file__).with_name("_native.c")
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-DENTROPY_OF_LIBJPEG", "-Wno-unused-function"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-ljpeg", "-lm", "-ldl"], check=True)
    found = ctypes.CDLL(str(library))
    found.stallfree_decode.argtypes = [ctypes.c_char_p, ctypes.c_size_t, *[ctypes.c_int] * 8, ctypes.c_void_p]
    return found


@pytest.mark.parametrize("kind", KINDS + OTHERS, ids=str)
def test_parts_of_pictures_are_the_same_bit_for_bit(kind: dict[str, Any], libjpegs: ctypes.CDLL) -> None:
    draw = random.Random(str(kind))
    ours = native.library()
    assert ours is not None
    for (height, width), noise in itertools.product(SIZES, (False, True)):
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
        data = encode(pixels if noise else photograph(height, width), **kind)
        for number in range(8):
            tall, wide = (height, width) if number == 0 else (draw.randint(1, height), draw.randint(1, width))
            part = (draw.randint(0, height - tall), draw.randint(0, width - wide), tall, wide)
            # at full resolution, at half of it, at an eighth of it
            divisor = (1, 5, 40)[number % 3]
            size = (-(-tall // divisor), -(-wide // divisor))
            outs = [np.zeros((*size, 3), np.uint8) for _ in range(2)]
            for library, out in zip((ours, libjpegs), outs, strict=True):
                assert library.stallfree_decode(data, len(data), *part, *size, 0, 0, out.ctypes.data) == 0
            assert (outs[0] == outs[1]).all(), (height, width, part, size)


def test_data_that_end_too_soon_or_are_no_code(libjpegs: ctypes.CDLL) -> None:
    ours = native.library()
    assert ours is not None
    data = encode(photograph(), quality=90)
    out = np.zeros((120, 170, 3), np.uint8)
    start = data.index(b"\xff\xda")
    for cut in range(start + 20, len(data) - 2, len(data) // 40):
        damaged = data[:cut] + b"\xff\xd9"
        assert ours.stallfree_decode(damaged, len(damaged), 0, 0, 120, 170, 120, 170, 0, 0, out.ctypes.data) == 1
    ones = data[: start + 14] + b"\xff\x00" * 300 + b"\xff\xd9"  # a code of ones alone is never given
    assert ours.stallfree_decode(ones, len(ones), 0, 0, 120, 170, 120, 170, 0, 0, out.ctypes.data) == 1
