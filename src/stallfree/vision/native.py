"""The compiled part in C: partial JPEG decoding and resizing, with slower fallbacks in Python.

It is compiled when the package is installed or built, if a C compiler and the headers of libjpeg-turbo are
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

from stallfree.cache.arena import one_thread
from stallfree.pipeline.compose import Out, empty

Pixels: TypeAlias = npt.NDArray[np.uint8]
Layout: TypeAlias = Literal["HWC", "CHW"]

LIBRARY = Path(__file__).with_name("_native.so")
ABI = 4

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
        compiled = ctypes.CDLL(str(LIBRARY))
        problem = "" if compiled.stallfree_abi() == ABI else f"{LIBRARY} has another version; install stallfree again"
    except OSError as error:
        problem = str(error)
    if problem:
        log.info("images are decoded completely and resized by torch, which takes longer: %s", problem)
        return None
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    compiled.stallfree_jpeg_size.argtypes = [ctypes.c_char_p, size, pointer]
    compiled.stallfree_decode.argtypes = [ctypes.c_char_p, size, *[number] * 8, pointer]
    compiled.stallfree_resize.argtypes = [pointer, ctypes.c_int64, *[number] * 6, pointer]
    return compiled


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return height and width if `data` is a complete JPEG that supports partial decoding, else None."""
    compiled = library()
    if compiled is None or data[:3] != b"\xff\xd8\xff" or data.find(b"\xff\xd9", len(data) - _TAIL) < 0:
        return None
    size = (ctypes.c_int * 2)()
    return None if compiled.stallfree_jpeg_size(data, len(data), size) else (size[0], size[1])


def decode_crop(
    data: bytes, crop: Crop, size: tuple[int, int], layout: Layout, mirror: bool, out: Out | None = None
) -> Pixels | None:
    """Decode a part of a JPEG, resized to `size`; returns None if that part is damaged or unsupported (CMYK).

    Only the rows down to the end of `crop` are read. If half, a quarter or an eighth of the resolution is at least
    twice the `size`, only that resolution is decoded. The values of photographs then differ by less than 0.5 on
    average.
    """
    compiled = library()
    assert compiled is not None
    part = _empty(out, size, layout)
    problem = compiled.stallfree_decode(data, len(data), *crop, *size, layout == "CHW", mirror, part.ctypes.data)
    return None if problem else part


def resized(
    pixels: Pixels, size: tuple[int, int], layout: Layout = "HWC", mirror: bool = False, out: Out | None = None
) -> Pixels:
    """Resize `pixels` of shape (H, W, 3), bilinear with antialiasing. `mirror` flips the result left to right."""
    part, compiled = _empty(out, size, layout), library()
    if compiled is not None:
        rows = pixels if pixels.strides[1:] == (3, 1) else np.ascontiguousarray(pixels)
        problem = compiled.stallfree_resize(
            rows.ctypes.data, rows.strides[0], *rows.shape[:2], *size, layout == "CHW", mirror, part.ctypes.data
        )
        if not problem:
            return part
    view = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)[None]
    with one_thread():
        image = interpolate(view, size, mode="bilinear", antialias=True)[0]
        image = image.flip(2) if mirror else image
        part[...] = (image if layout == "CHW" else image.permute(1, 2, 0)).numpy()
    return part


def version() -> str:
    """Return the name and version of the resizer, which determines the last bit of some pixels."""
    return f"stallfree {ABI}" if library() is not None else f"torch {torch.__version__}"


def _empty(out: Out | None, size: tuple[int, int], layout: Layout) -> Pixels:
    return empty(out, (3, *size) if layout == "CHW" else (*size, 3))
