"""Decoding of pictures."""

from __future__ import annotations

import io
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stallfree.errors import InputError, image_unreadable
from stallfree.pipeline.compose import Out, in_place, mark_deterministic

if TYPE_CHECKING:
    from PIL import Image

_JPEG = b"\xff\xd8\xff"
_TURBO_COLORSPACE = {"RGB": "RGB", "L": "GRAY"}


@cache
def _simplejpeg() -> ModuleType | None:
    """The binding of libjpeg-turbo that the extra `turbo` brings, or None where it is not installed."""
    try:
        return import_module("simplejpeg")
    except ImportError:
        return None


@in_place
@mark_deterministic
class DecodeImage:
    """Decodes an image from its encoded bytes.

    Reads JPEG, PNG, WebP and all else that Pillow reads. The same bytes give the same image.

    JPEG is decoded by `simplejpeg` where that is installed (`pip install 'stallfree[turbo]'`) and an array is asked
    for, everything else by Pillow. The two may differ by a few units in some pixels, so their `fingerprint` differs.
    Alpha is dropped, palettes, CMYK and greyscale are converted, and the orientation noted in EXIF is not applied.

    Args:
        output: `"numpy"` for a writable uint8 array of shape (H, W, 3), or (H, W) in mode `"L"`; `"pil"` for a
            `PIL.Image.Image`, which the transforms of torchvision v1 work on.
        mode: `"RGB"` or `"L"` (greyscale).

    Raises:
        InputError: for another `output` or `mode`, and when called with bytes that are no whole picture.

    Example:
        ```python
        decode = sf.DecodeImage()
        image = decode(Path("pictures/a/0.jpg").read_bytes())
        assert image.shape == (24, 24, 3)
        ```
    """

    def __init__(self, output: Literal["numpy", "pil"] = "numpy", mode: Literal["RGB", "L"] = "RGB") -> None:
        if output not in ("numpy", "pil"):
            raise InputError(f"output={output!r} is unknown: give 'numpy' or 'pil'")
        if not isinstance(mode, str) or mode not in _TURBO_COLORSPACE:
            raise InputError(f"mode={mode!r} is unknown: give 'RGB' or 'L'")
        self.output = output
        self.mode = mode

    def __call__(self, data: bytes, out: Out | None = None) -> np.ndarray[Any, Any] | Image.Image:
        if self.output == "pil":
            return self._pillow(data)
        turbo = _simplejpeg()
        if turbo is not None and data[:3] == _JPEG:
            try:
                array: np.ndarray[Any, Any] = turbo.decode_jpeg(data, colorspace=_TURBO_COLORSPACE[self.mode])
            except ValueError:
                pass  # of a kind that it does not know, or damaged: Pillow reads it, or says what is wrong
            else:
                return array[:, :, 0] if self.mode == "L" else array
        return np.array(self._pillow(data))

    def _pillow(self, data: bytes) -> Image.Image:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as image:
                converted: Image.Image = image.convert(self.mode)
                return converted
        except Exception as error:
            raise image_unreadable(f"no whole picture in these {len(data)} bytes: {error}") from error

    def fingerprint(self) -> str:
        """The output, the mode and the decoders with their versions.

        They decide the pixels.
        """
        import PIL

        turbo = _simplejpeg() if self.output == "numpy" else None
        decoders = f"pillow {PIL.__version__}" + (f", simplejpeg {turbo.__version__}" if turbo else "")
        return f"DecodeImage(output={self.output}, mode={self.mode}; {decoders})"

    def __repr__(self) -> str:
        return f"DecodeImage(output={self.output!r}, mode={self.mode!r})"
