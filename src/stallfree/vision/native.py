"""The compiled part in C: partial JPEG decoding, resizing and pixel operations, with slower fallbacks in Python.

`_native.so` is compiled when the package is installed or built, if a C compiler and the headers of libjpeg-turbo are
installed (see `hatch_build.py`). It does not use the Python API, and runs without the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

from stallfree.cache.serial import one_thread
from stallfree.pipeline.compose import Out, empty
from stallfree.vision import entropy

Pixels: TypeAlias = npt.NDArray[np.uint8]
Layout: TypeAlias = Literal["HWC", "CHW"]

LIBRARY = Path(__file__).with_name("_native.so")
ABI = 3
GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in ITU-R BT.601, as in Pillow and torchvision."""

_TAIL = 1024
"""Bytes at the end of a file that must contain a JPEG's end marker: truncated files are not decoded in part."""

log = logging.getLogger("stallfree")


class Crop(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, or None if they are missing; logs the reason to `stallfree` at level INFO."""
    try:
        found = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        log.info("images are decoded completely and resized by torch, which takes longer: %s", error)
        return None
    if found.stallfree_abi() != ABI:
        log.info(
            "images are decoded completely and resized by torch: %s has another version; install stallfree again",
            LIBRARY,
        )
        return None
    return declared(found)


def declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of the functions of `found`; returns `found`."""
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    found.stallfree_jpeg_size.argtypes = [ctypes.c_char_p, size, pointer]
    found.stallfree_decode.argtypes = [ctypes.c_char_p, size, *[number] * 9, pointer]
    found.stallfree_resize.argtypes = [pointer, ctypes.c_int64, *[number] * 6, pointer]
    found.stallfree_blend.argtypes = [pointer, ctypes.c_int64, ctypes.c_float, ctypes.c_float, pointer]
    found.stallfree_blend.restype = None
    found.stallfree_mirror.argtypes = [pointer, number, number, pointer]
    found.stallfree_mirror.restype = None
    found.stallfree_sums.argtypes = [pointer, ctypes.c_int64, pointer]
    found.stallfree_sums.restype = None
    return found


@functools.cache
def entropy_decoding() -> int:
    """Return the mode of `stallfree_decode`; logs a warning if stallfree's decoding differs from libjpeg's."""
    found = library()
    assert found is not None
    problem = entropy.problem_of(found)
    if problem:
        log.warning("libjpeg decodes the entropy of JPEGs, so a crop takes about a fifth longer: %s", problem)
    return entropy.OF_LIBJPEG if problem else entropy.OWN


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return height and width if `data` is a complete JPEG that supports partial decoding, else None."""
    found = library()
    if found is None or data[:3] != b"\xff\xd8\xff" or data.find(b"\xff\xd9", len(data) - _TAIL) < 0:
        return None
    size = (ctypes.c_int * 2)()
    return None if found.stallfree_jpeg_size(data, len(data), size) else (size[0], size[1])


def decode_crop(
    data: bytes, crop: Crop, size: tuple[int, int], layout: Layout, mirror: bool, out: Out | None = None
) -> Pixels | None:
    """Decode a part of a JPEG, resized to `size`; returns None if that part is damaged or unsupported (CMYK).

    Only the rows down to the end of `crop` are read. If half, a quarter or an eighth of the resolution is at least
    twice the `size`, only that resolution is decoded. The values of photographs then differ by less than 0.5 on
    average.
    """
    found = library()
    assert found is not None
    part = _empty(out, size, layout)
    problem = found.stallfree_decode(
        data, len(data), *crop, *size, layout == "CHW", mirror, entropy_decoding(), part.ctypes.data
    )
    return None if problem else part


def resized(
    pixels: Pixels, size: tuple[int, int], layout: Layout = "HWC", mirror: bool = False, out: Out | None = None
) -> Pixels:
    """Resize `pixels` of shape (H, W, 3), bilinear with antialiasing. `mirror` flips the result left to right."""
    found = library()
    if found is None:
        return _resized_by_torch(pixels, size, layout, mirror, out)
    plain = pixels if pixels.strides[1:] == (3, 1) else np.ascontiguousarray(pixels)
    part, sides = _empty(out, size, layout), plain.shape[:2]
    problem = found.stallfree_resize(
        plain.ctypes.data, plain.strides[0], *sides, *size, layout == "CHW", mirror, part.ctypes.data
    )
    return _resized_by_torch(pixels, size, layout, mirror, out) if problem else part


def blend(pixels: Pixels, factor: float, grey: float | None, out: Pixels) -> None:
    """Write `pixels * factor + grey * (1 - factor)` to `out`, rounded and clipped to 0 to 255.

    If `grey` is None, it is that of each pixel. Both arrays are contiguous; `out` may be `pixels`.
    """
    found = library()
    if found is not None:
        count = pixels.size // 3
        found.stallfree_blend(pixels.ctypes.data, count, factor, -1 if grey is None else grey, out.ctypes.data)
        return
    values = pixels.astype(np.float32)
    base = values @ np.array(GREY, np.float32)[:, None] if grey is None else np.float32(grey)
    mixed = values * np.float32(factor) + base * np.float32(1 - factor) + np.float32(0.5)
    out[...] = mixed.clip(0, 255).astype(np.uint8)


def mirror(pixels: Pixels, out: Pixels) -> None:
    """Flip `pixels` left to right; both arrays are contiguous, and `out` may be `pixels`."""
    found = library()
    if found is None:
        out[...] = pixels[:, ::-1].copy()
    else:
        found.stallfree_mirror(pixels.ctypes.data, *pixels.shape[:2], out.ctypes.data)


def mean_grey(pixels: Pixels) -> float:
    """Return the mean grey value of all pixels, 0 to 255."""
    found = library()
    pixels = np.ascontiguousarray(pixels)
    count = pixels.size // 3
    if found is None:
        sums = np.ones(count, np.float64) @ pixels.reshape(-1, 3)
    else:
        sums = np.empty(3, np.int64)
        found.stallfree_sums(pixels.ctypes.data, count, sums.ctypes.data)
    return float(sums @ np.array(GREY)) / count


def version() -> str:
    """Return the name and version of the resizer, which determines the last bit of some pixels."""
    return f"stallfree {ABI}" if library() is not None else f"torch {torch.__version__}"


def _empty(out: Out | None, size: tuple[int, int], layout: Layout) -> Pixels:
    return empty(out, (3, *size) if layout == "CHW" else (*size, 3))


def _resized_by_torch(pixels: Pixels, size: tuple[int, int], layout: Layout, mirror: bool, out: Out | None) -> Pixels:
    plain = np.require(pixels, requirements=["C", "W"])  # torch accepts it without a warning
    view = torch.from_numpy(plain).permute(2, 0, 1)[None]
    with one_thread():
        made = interpolate(view, size, mode="bilinear", antialias=True)[0]
        made = made.flip(2) if mirror else made
        array = _empty(out, size, layout)
        array[...] = (made if layout == "CHW" else made.permute(1, 2, 0)).numpy()
    return array
