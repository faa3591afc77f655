"""Crops of images, resized: random ones and the central one, from encoded and from decoded images.

Random numbers come from Python's generator, which stallfree seeds for each sample. In a batch that is composed in
place, results are written to its rows (`out`).
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from stallfree.errors import InputError, transform_input
from stallfree.pipeline.compose import Out, in_place, mark_deterministic, mark_random
from stallfree.sources.decode import DecodeImage
from stallfree.vision import native
from stallfree.vision.encoded import EncodedPicture, baseline_size, encoded_picture
from stallfree.vision.native import Crop, Layout, Pixels

_TRIES = 10


class _Crop:
    """Base of all crops: a part of an image, mirrored or not, resized to `size`."""

    def __init__(self, size: int | Sequence[int], layout: Layout) -> None:
        self.size = _sides(size, "size")
        self.layout = check_layout(layout)

    def draw(self, height: int, width: int) -> tuple[Crop, bool]:
        """Return the crop for an image of that size, and whether to mirror it."""
        raise NotImplementedError

    def _of_pixels(self, image: Any, out: Out | None, drawn: tuple[Crop, bool] | None = None) -> Pixels:
        """Return the crop of a decoded image."""
        array = None if isinstance(image, (bytes, bytearray, memoryview, str)) else np.asarray(image)
        if array is None or array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
            got = type(image).__name__ + ("" if array is None else f" ({array.dtype}, shape {array.shape})")
            raise transform_input(
                f"{self!r} got a {got}: it needs an image as uint8 of shape (height, width, 3), as DecodeImage() "
                "returns it. Put steps that return floats or channels first after it"
            )
        (top, left, height, width), mirror = drawn or self.draw(*array.shape[:2])
        return native.resized(array[top : top + height, left : left + width], self.size, self.layout, mirror, out)

    def _of_encoded(self, data: Any, out: Out | None) -> Pixels:
        """Return the crop of an encoded image. Of a JPEG, only the necessary rows and columns are decoded."""
        encoded = self._bytes(data)
        size = native.jpeg_size(encoded)
        if size is None:
            return self._of_pixels(DecodeImage()(encoded), out)
        crop, mirror = self.draw(*size)
        part = native.decode_crop(encoded, crop, self.size, self.layout, mirror, out)
        return self._of_pixels(DecodeImage()(encoded), out, (crop, mirror)) if part is None else part

    def _bytes(self, data: Any) -> bytes:
        if isinstance(data, (bytes, bytearray, memoryview)):
            return bytes(data)
        raise transform_input(
            f"{self!r} got a {type(data).__name__}: it needs the bytes of an encoded image. Leave out the decoding "
            "before it, or use RandomResizedCrop, which takes decoded images"
        )


class _RandomCrop(_Crop):
    """Base of the random crops: their arguments and random draws."""

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        *,
        flip: float = 0.0,
        layout: Layout = "HWC",
    ) -> None:
        super().__init__(size, layout)
        self.scale, self.ratio = _range(scale, "scale"), _range(ratio, "ratio")
        if not isinstance(flip, (int, float)) or isinstance(flip, bool) or not 0 <= flip <= 1:
            raise InputError(f"flip={flip!r}: give a probability, 0 to 1")
        self.flip = float(flip)

    def draw(self, height: int, width: int) -> tuple[Crop, bool]:
        """Draw a crop for an image of that size, and whether to mirror it, from Python's generator."""
        crop = self._draw_crop(height, width)
        return crop, self.flip > 0 and random.random() < self.flip

    def _draw_crop(self, height: int, width: int) -> Crop:
        low, high = self.ratio
        for _ in range(_TRIES):
            area = height * width * random.uniform(*self.scale)
            ratio = math.exp(random.uniform(math.log(low), math.log(high)))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                top, left = random.randint(0, height - down), random.randint(0, width - across)
                return Crop(top, left, down, across)
        down, across = height, width  # the largest central crop within the ratios
        if width < low * height:
            down = round(width / low)
        elif width > high * height:
            across = round(height * high)
        return Crop((height - down) // 2, (width - across) // 2, down, across)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.size}, scale={self.scale}, ratio={self.ratio}, flip={self.flip}, "
            f"layout={self.layout!r})"
        )


@in_place
@mark_random
class RandomResizedCrop(_RandomCrop):
    """A random crop of an image, resized to `size`: torchvision's `RandomResizedCrop` on bytes.

    The crop's share of the area is uniform over `scale`, and its position is uniform. The logarithm of its aspect ratio
    is uniform over that of `ratio`. After 10 crops that do not fit, the largest central crop within `ratio` is used.
    Resizing is bilinear with antialiasing, and within 1 of torch's result.

    Takes a uint8 array of shape (H, W, 3) or an object that NumPy can convert to one, such as a `PIL.Image`; returns a
    new array.

    Args:
        size: (height, width) of the result, or one number for both.
        scale: least and largest share of the area.
        ratio: least and largest width / height.
        flip: probability of mirroring the result left to right, 0 to 1.
        layout: layout of the result: "HWC" (height, width, 3), or "CHW" (3, height, width).

    Raises `InputError` for invalid arguments, and when called with anything but an image.

    Example:
        ```python
        crop = sf.vision.RandomResizedCrop(16, scale=(0.25, 1), flip=0.5)
        assert crop(image).shape == (16, 16, 3)
        ```
    """

    def __call__(self, image: Any, out: Out | None = None) -> Pixels:
        return self._of_pixels(image, out)


@in_place
@mark_random
class DecodeRandomResizedCrop(_RandomCrop):
    """Decodes a random crop from encoded bytes: `DecodeImage` and `RandomResizedCrop` in one, and faster.

    The crop is drawn first. Of a JPEG, only the rows and columns of the crop are decoded, and resized at the same time.
    They are decoded at 1/2, 1/4 or 1/8 of the resolution if that is at least twice the `size`. Damage below the crop is
    not detected. This requires the compiled part of stallfree, which is built at installation if a C compiler and the
    headers of libjpeg-turbo are installed. Without it, and for other formats, the whole image is decoded.

    `ImageFolder(root, DecodeRandomResizedCrop(224))` omits its own decoding. A cache of fetched samples
    (`form="fetched"`) holds encoded images. A cache of prepared samples holds decoded images, as defined by `halves`.
    The random draws are the same.

    With `on_device`, the sample stays encoded and carries its crop, drawn as without. `.to(device)` of the batch
    decodes, crops, resizes and mirrors on the device: on a GPU by nvJPEG, which needs torchvision. Shape and layout of
    the result are the same. `DataLoader(device=)` and `DevicePrefetcher` do this in their copy stream. What nvJPEG does
    not support (progressive JPEGs, CMYK, other formats) is decoded here.

    Args:
        size, scale, ratio, flip, layout: see `RandomResizedCrop`.
        on_device: whether the device decodes. Use it if CPU cores limit the speed and the GPU is not always busy.

    Raises `InputError` for invalid arguments, and when called with bytes that are not a complete image.

    Example:
        ```python
        data = sf.ImageFolder("pictures", sf.DecodeRandomResizedCrop(16, flip=0.5))
        image, label = data[0]
        assert image.shape == (16, 16, 3)
        ```
    """

    takes_encoded: ClassVar[bool] = True
    """Read by `ImageFolder`: this step takes the bytes of the file."""

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        *,
        flip: float = 0.0,
        layout: Layout = "HWC",
        on_device: bool = False,
    ) -> None:
        super().__init__(size, scale, ratio, flip=flip, layout=layout)
        self.on_device = on_device

    def __call__(self, data: bytes, out: Out | None = None) -> Any:
        return self._stay_encoded(self._bytes(data)) if self.on_device else self._of_encoded(data, out)

    def _stay_encoded(self, data: bytes) -> EncodedPicture:
        size, first = baseline_size(data), self.layout == "CHW"
        if size is not None:
            return encoded_picture(data, *self.draw(*size), self.size, first)
        pixels: Any = DecodeImage()(data)
        (top, left, height, width), mirror = self.draw(*pixels.shape[:2])
        part = native.resized(pixels[top : top + height, left : left + width], self.size, "CHW", mirror)
        return encoded_picture(part, Crop(0, 0, 0, 0), False, self.size, first)

    def halves(self) -> tuple[DecodeImage, RandomResizedCrop] | None:
        """Return decoding and the random crop as two steps; None with `on_device`.

        Together they equal this step.
        """
        if self.on_device:
            return None
        return DecodeImage(), RandomResizedCrop(self.size, self.scale, self.ratio, flip=self.flip, layout=self.layout)

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + (", on_device=True)" if self.on_device else ")")


@in_place
@mark_deterministic
class DecodeResizeCenterCrop(_Crop):
    """Decodes the central crop from encoded bytes, for validation.

    It does what `Resize` and `CenterCrop` of torchvision do: the result is the central `size` of the image after its
    shorter side was resized to `resize`. Of a JPEG, only that part is decoded. The crop has whole pixels of the
    image, so it is up to half a pixel of it off torchvision's.

    Args:
        size: (height, width) of the result, or one number for both.
        resize: length of the shorter side; by default 256 / 224 of the longer side of `size`.
        layout: layout of the result: "HWC" (height, width, 3), or "CHW" (3, height, width).

    Raises `InputError` for invalid arguments, and when called with bytes that are not a complete image.

    Example:
        ```python
        data = sf.ImageFolder("pictures", sf.vision.DecodeResizeCenterCrop(16))
        image, label = data[0]
        assert image.shape == (16, 16, 3)
        ```
    """

    takes_encoded: ClassVar[bool] = True

    def __init__(self, size: int | Sequence[int], resize: int | None = None, *, layout: Layout = "HWC") -> None:
        super().__init__(size, layout)
        self.resize = round(max(self.size) * 256 / 224) if resize is None else _sides(resize, "resize")[0]
        if self.resize < max(self.size):
            raise InputError(f"resize={resize!r}, size={size!r}: give at least the longer side of size as resize")

    def __call__(self, data: bytes, out: Out | None = None) -> Pixels:
        return self._of_encoded(data, out)

    def draw(self, height: int, width: int) -> tuple[Crop, bool]:
        """Return the central crop; it is not mirrored."""
        down, across = (max(1, round(side * min(height, width) / self.resize)) for side in self.size)
        return Crop((height - down) // 2, (width - across) // 2, down, across), False

    def fingerprint(self) -> str:
        """Return the arguments and the decoders, which determine the last bit of some pixels."""
        return f"{self!r} {native.version()} {DecodeImage().fingerprint()}"

    def __repr__(self) -> str:
        return f"DecodeResizeCenterCrop({self.size}, {self.resize}, layout={self.layout!r})"


def check_layout(layout: Layout) -> Layout:
    """Return `layout`. Raises `InputError` if it is unknown."""
    if layout not in ("HWC", "CHW"):
        raise InputError(f"layout={layout!r}: give 'HWC' (height, width, channels) or 'CHW' (channels first)")
    return layout


def _sides(size: int | Sequence[int], name: str) -> tuple[int, int]:
    """Return (height, width) from two numbers, or one for both. Raises `InputError`."""
    try:
        if isinstance(size, bool):
            raise TypeError
        sides = [operator.index(side) for side in size] if isinstance(size, Sequence) else [operator.index(size)] * 2
    except TypeError:
        sides = []
    if len(sides) != 2 or not all(0 < side <= 65500 for side in sides):
        raise InputError(f"{name}={size!r}: give (height, width) in pixels, or one number for both")
    return sides[0], sides[1]


def _range(bounds: Sequence[float], name: str) -> tuple[float, float]:
    try:
        low, high = (float(value) for value in bounds)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 < low <= high < math.inf:
        raise InputError(f"{name}={bounds!r}: give two numbers above 0, the smaller one first")
    return low, high
