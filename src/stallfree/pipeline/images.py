"""Images of Pillow as pixels and what goes with them: in a record they need no pickle."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from stallfree.errors import CodecError

BANDS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "HSV": 3}
"""The modes whose pixels are bytes, and how many each pixel has."""


def is_image(value: Any) -> bool:
    """Whether `value` is an image in memory of one of these modes; one that is still to be read from a file is not."""
    kind = type(value)
    if kind.__name__ != "Image" or kind.__module__ != "PIL.Image":
        return False
    return value.mode in BANDS


def pixels_of(image: Any) -> np.ndarray[Any, Any]:
    """The pixels: uint8 of shape (height, width, bands), or (height, width) for one band."""
    return np.asarray(image)


def image_of(mode: str, pixels: Any, info: Any) -> Any:
    """The image, with memory of its own. Raises `CodecError` for what no image was made of."""
    shape = np.shape(pixels)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or not isinstance(info, dict):
        raise CodecError("a record holds an image without pixels")
    if (shape[2] if len(shape) == 3 else 1) != BANDS[mode] or len(shape) != (2 if BANDS[mode] == 1 else 3):
        raise CodecError(f"a record holds an image of mode {mode} with pixels of shape {shape}")
    image = _pillow().frombytes(mode, (shape[1], shape[0]), np.ascontiguousarray(pixels).data)
    image.info = info
    return image


def _pillow() -> Any:
    found = sys.modules.get("PIL.Image")
    if found is None:
        from PIL import Image as found
    return found
