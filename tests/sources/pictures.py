"""Small pictures for the tests of sources."""

import io
from typing import Any

import numpy as np
from PIL import Image


def encode(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """`image` as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def picture(seed: int = 0, height: int = 24, width: int = 32) -> Image.Image:
    """A smooth picture that no other small seed gives."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 6, y * 8, x + y + 3 * seed], axis=-1).astype(np.uint8))
