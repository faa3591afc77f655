"""Common image transforms on bytes: they take uint8 arrays of shape (H, W, 3) and return new ones.

In a batch that is composed in place, the results are rows of the batch, and later steps modify these rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from stallfree.errors import InputError
from stallfree.pipeline.compose import Out, empty, given, in_place, mark_deterministic, mark_random
from stallfree.vision import native
from stallfree.vision.arguments import checked_size, pixels_of, probability
from stallfree.vision.native import Pixels


@in_place
@mark_random
class RandomHorizontalFlip:
    """Mirrors images left to right with probability `p`; the others are returned unchanged.

    Example:
        ```python
        flip = sf.vision.RandomHorizontalFlip(p=0.5)
        assert flip(image).shape == image.shape
        ```
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = probability(p, "p")

    def __call__(self, image: Any, out: Out | None = None) -> Pixels:
        pixels = np.ascontiguousarray(pixels_of(image, self))
        if random.random() >= self.p:
            return pixels
        mirrored = _target(pixels, out)
        native.mirror(pixels, mirrored)
        return mirrored

    def __repr__(self) -> str:
        return f"RandomHorizontalFlip({self.p})"


@in_place
@mark_deterministic
class Resize:
    """Resizes images, bilinear with antialiasing, within 1 of torch's result.

    Args:
        size: (height, width) of the result; or one number for the shorter side, which keeps the aspect ratio.

    Example:
        ```python
        resize = sf.vision.Resize((16, 20))
        assert resize(image).shape == (16, 20, 3)
        ```
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        sides = checked_size(size)
        self.size: int | tuple[int, int] = sides if isinstance(size, Sequence) else sides[0]

    def __call__(self, image: Any, out: Out | None = None) -> Pixels:
        pixels = pixels_of(image, self)
        return native.resized(pixels, self._wanted(*pixels.shape[:2]), out=out)

    def _wanted(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.size, tuple):
            return self.size
        longer = int(self.size * max(height, width) / min(height, width))
        return (self.size, longer) if height <= width else (longer, self.size)

    def fingerprint(self) -> str:
        """Return the size and the resizer, which determines the last bit of some pixels."""
        return f"Resize({self.size}; {native.version()})"

    def __repr__(self) -> str:
        return f"Resize({self.size})"


@in_place
@mark_deterministic
class CenterCrop:
    """Crops the central `size` pixels; smaller images are padded with black, as in torchvision.

    Args:
        size: (height, width), or one number for both.

    Example:
        ```python
        crop = sf.vision.CenterCrop(16)
        assert crop(image).shape == (16, 16, 3)
        ```
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = checked_size(size)

    def __call__(self, image: Any, out: Out | None = None) -> Pixels:
        pixels = pixels_of(image, self)
        for axis, wanted in enumerate(self.size):
            missing = wanted - pixels.shape[axis]
            if missing > 0:
                around = [(0, 0)] * 3
                around[axis] = (missing // 2, (missing + 1) // 2)
                pixels = np.pad(pixels, around)
        height, width = self.size
        top, left = (round((have - want) / 2) for have, want in zip(pixels.shape, self.size, strict=False))
        part = empty(out, (height, width, 3))
        part[...] = pixels[top : top + height, left : left + width]
        return part

    def __repr__(self) -> str:
        return f"CenterCrop({self.size})"


@in_place
@mark_random
class ColorJitter:
    """Changes brightness, contrast and saturation by random factors, in random order.

    Each argument is a number x, for a factor from max(0, 1 - x) to 1 + x, or the least and the largest factor. A factor
    of 1 changes nothing.

    Args:
        brightness: mixes the image with black.
        contrast: mixes it with its mean grey.
        saturation: mixes it with the grey of each pixel.

    Example:
        ```python
        jitter = sf.vision.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2)
        assert jitter(image).shape == image.shape
        ```
    """

    def __init__(
        self,
        brightness: float | Sequence[float] = 0,
        contrast: float | Sequence[float] = 0,
        saturation: float | Sequence[float] = 0,
    ) -> None:
        self.brightness = _factors(brightness, "brightness")
        self.contrast = _factors(contrast, "contrast")
        self.saturation = _factors(saturation, "saturation")

    def __call__(self, image: Any, out: Out | None = None) -> Pixels:
        pixels = np.ascontiguousarray(pixels_of(image, self))
        kinds = ["brightness", "contrast", "saturation"]
        random.shuffle(kinds)
        changed = False
        for kind in kinds:
            low, high = getattr(self, kind)
            factor = random.uniform(low, high)
            if factor == 1:
                continue
            grey = None if kind == "saturation" else 0.0 if kind == "brightness" else native.mean_grey(pixels)
            target = pixels if changed else _target(pixels, out)
            native.blend(pixels, factor, grey, target)
            pixels, changed = target, True
        return pixels

    def __repr__(self) -> str:
        return f"ColorJitter({self.brightness}, {self.contrast}, {self.saturation})"


@in_place
@mark_deterministic
class ChannelsFirst:
    """Converts (H, W, 3) to (3, H, W), the layout of torch's convolutions.

    The values remain bytes.

    Example:
        ```python
        steps = sf.Compose([sf.vision.Resize(16), sf.vision.ChannelsFirst()])
        assert steps(image).shape == (3, 16, 16)
        ```
    """

    def __call__(self, image: Any, out: Out | None = None) -> Pixels:
        pixels = pixels_of(image, self).transpose(2, 0, 1)
        moved = empty(out, pixels.shape)
        moved[...] = pixels
        return moved

    def __repr__(self) -> str:
        return "ChannelsFirst()"


def _target(pixels: Pixels, out: Out | None) -> Pixels:
    """Return the output array for changed `pixels`: `pixels` itself if that array is a row of the batch."""
    return pixels if given(out, pixels) else empty(out, pixels.shape)


def _factors(wanted: float | Sequence[float], name: str) -> tuple[float, float]:
    try:
        low, high = wanted if isinstance(wanted, Sequence) else (max(0.0, 1 - wanted), 1 + wanted)
        fine = 0 <= low <= high < math.inf
    except (TypeError, ValueError, RuntimeError):  # raised by a tensor
        fine = False
    if not fine or (not isinstance(wanted, Sequence) and wanted < 0):
        raise InputError(f"{name}={wanted!r}: give 0 or more, or (least, largest factor)")
    return float(low), float(high)
