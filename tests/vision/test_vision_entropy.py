"""Entropy decoding of our own gives what libjpeg's gives, bit for bit."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vision_data import Pixels, compiler, encode, photograph

from stallfree.vision import native
from stallfree.vision.entropy import OF_LIBJPEG, OWN, OWN_ALONE, problem_of
from stallfree.vision.native import Crop

KINDS: list[dict[str, Any]] = [
    {"quality": quality, "subsampling": subsampling, "optimize": quality == 75, "mode": "RGB"}
    for quality, subsampling in itertools.product((3, 75, 100), (0, 1, 2))
]
KINDS.append({"quality": 90, "mode": "L"})
OTHERS: list[dict[str, Any]] = [{"progressive": True}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 3}]
SIZES = [(1, 1), (8, 8), (16, 17), (120, 170), (203, 64)]


@pytest.fixture
def compiled() -> ctypes.CDLL:
    """The compiled part."""
    found = native.library()
    if found is None:
        pytest.skip("the compiled part is not there: python hatch_build.py makes it")
    return found


def decoded_whole(library: ctypes.CDLL, data: bytes, by: int) -> tuple[int, Pixels]:
    """The problem and the pixels of a picture of 120 x 170."""
    out = np.zeros((120, 170, 3), np.uint8)
    return library.stallfree_decode(
        data, len(data), 0, 0, *out.shape[:2], *out.shape[:2], 0, 0, by, out.ctypes.data
    ), out


def compile_changed(folder: Path, old: str, new: str) -> ctypes.CDLL:
    """The compiled part with `new` in the place of `old` in what decodes the entropy."""
    source = Path(native.__file__).parent
    text = (source / "_entropy.h").read_text()
    assert text.count(old) == 1
    (folder / "_entropy.h").write_text(text.replace(old, new))
    shutil.copy(source / "_native.c", folder)
    command = [compiler(), "-std=gnu11", "-O0", "-DNO_CLONES", "-fPIC", "-shared", str(folder / "_native.c")]
    subprocess.run([*command, "-o", str(folder / "changed.so"), "-ljpeg", "-lm", "-ldl"], check=True)
    return native.declared(ctypes.CDLL(str(folder / "changed.so")))


@pytest.mark.parametrize("kind", KINDS + OTHERS, ids=str)
def test_parts_of_pictures_are_the_same_bit_for_bit(kind: dict[str, Any], compiled: ctypes.CDLL) -> None:
    draw = random.Random(str(kind))
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
            for by, out in zip((OF_LIBJPEG, OWN if kind in OTHERS else OWN_ALONE), outs, strict=True):
                assert compiled.stallfree_decode(data, len(data), *part, *size, 0, 0, by, out.ctypes.data) == 0
            assert (outs[0] == outs[1]).all(), (height, width, part, size)


def test_data_that_end_too_soon_or_are_no_code(compiled: ctypes.CDLL) -> None:
    data = encode(photograph(), quality=90)
    start = data.index(b"\xff\xda")
    for cut in range(start + 20, len(data) - 2, len(data) // 40):
        damaged = data[:cut] + b"\xff\xd9"
        assert decoded_whole(compiled, damaged, OWN_ALONE)[0] == 1
    ones = data[: start + 14] + b"\xff\x00" * 300 + b"\xff\xd9"  # a code of ones alone is never given
    assert decoded_whole(compiled, ones, OWN_ALONE)[0] == 1


def test_it_is_in_use_after_a_test_when_the_library_is_first_used(
    compiled: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    assert problem_of(compiled) == ""
    assert native.entropy_decoding.__wrapped__() == OWN
    assert not caplog.records


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("(negative & (1 - (1 << size)))", "(negative & (1 - (1 << size))) + (size == 4)", "other pixels"),
        ("return k >= OUT", "return 0", "damage in an intact image"),  # it says that the data are damaged
        (
            "return function && ",
            "return 0 && function && ",
            "decoder of this libjpeg cannot be replaced",
        ),  # a libjpeg of another kind
    ],
    ids=["value", "damaged", "refused"],
)
def test_libjpeg_decodes_where_it_gives_another_result(
    old: str,
    new: str,
    problem: str,
    compiled: ctypes.CDLL,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faulty = compile_changed(tmp_path, old, new)
    pixels = photograph()
    data = encode(pixels, quality=90)
    right = decoded_whole(compiled, data, OF_LIBJPEG)[1]
    fine, found = decoded_whole(faulty, data, OWN_ALONE)
    assert fine != 0 or (found != right).any()  # the fault is one

    monkeypatch.setattr(native, "library", lambda: faulty)
    monkeypatch.setattr(native, "entropy_decoding", functools.cache(native.entropy_decoding.__wrapped__))
    for _ in range(2):
        out = native.decode_crop(data, Crop(0, 0, 120, 170), (120, 170), "HWC", False)
        assert out is not None
        assert (out == right).all()
    (said,) = caplog.records
    assert problem in said.getMessage()
    assert said.name == "stallfree"
