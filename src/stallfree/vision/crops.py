"""Random resized crops, from encoded and from decoded images."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, ClassVar

from stallfree.errors import InputError, transform_input
from stallfree.pipeline.compose import Out, in_place, mark_random
from stallfree.sources.decode import DecodeImage
from stallfree.vision import native
from stallfree.vision.arguments import check_layout, checked_size, pixels_of, probability
from stallfree.vision.encoded import EncodedPicture, baseline_size, encoded_picture
from stallfree.vision.native import Crop, Layout, Pixels

_TRIES = 10


class _RandomCrop:
    """Base of both crops: their arguments and random draws."""

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        *,
        flip: float = 0.0,
        layout: Layout = "HWC",
    ) -> None:
        self.size = checked_size(size)
        self.scale = _range(scale, "scale")
        self.ratio = _range(ratio, "ratio")
        self.flip = probability(flip, "flip")
        self.layout = check_layout(layout)

    def draw(self, height: int, width: int) -> tuple[Crop, bool]:
        """Draw a crop for an image of that size, and whether to mirror it, from Python's generator."""
        crop = self._draw_crop(height, width)
        return crop, self.flip > 0 and random.random() < self.flip

    def _draw_crop(self, height: int, width: int) -> Crop:
        low, high = map(math.log, self.ratio)
        for _ in range(_TRIES):
            area = height * width * random.uniform(*self.scale)
            ratio = math.exp(random.uniform(low, high))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                top, left = random.randint(0, height - down), random.randint(0, width - across)
                return Crop(top, left, down, across)
        return _central(height, width, *self.ratio)

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
        pixels = pixels_of(image, self)
        crop, mirror = self.draw(*pixels.shape[:2])
        return cut(pixels, crop, self, mirror, out)


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
        encoded = _encoded(data, self)
        return self._stay_encoded(encoded) if self.on_device else self._decode(encoded, out)

    def _stay_encoded(self, data: bytes) -> EncodedPicture:
        size, first = baseline_size(data), self.layout == "CHW"
        if size is not None:
            return encoded_picture(data, *self.draw(*size), self.size, first)
        pixels = _decoded(data)
        (top, left, height, width), mirror = self.draw(*pixels.shape[:2])
        part = native.resized(pixels[top : top + height, left : left + width], self.size, "CHW", mirror)
        return encoded_picture(part, Crop(0, 0, 0, 0), False, self.size, first)

    def _decode(self, encoded: bytes, out: Out | None) -> Pixels:
        size = native.jpeg_size(encoded)
        if size is not None:
            crop, mirror = self.draw(*size)
            part = native.decode_crop(encoded, crop, self.size, self.layout, mirror, out)
            return cut(_decoded(encoded), crop, self, mirror, out) if part is None else part
        pixels = _decoded(encoded)
        crop, mirror = self.draw(*pixels.shape[:2])
        return cut(pixels, crop, self, mirror, out)

    def __repr__(self) -> str:
        return super().__repr__()[:-1] + (", on_device=True)" if self.on_device else ")")

    def halves(self) -> tuple[DecodeImage, RandomResizedCrop] | None:
        """Return decoding and the random crop as two steps; None with `on_device`.

        Together they equal this step.
        """
        if self.on_device:
            return None
        rest = RandomResizedCrop(self.size, self.scale, self.ratio, flip=self.flip, layout=self.layout)
        return DecodeImage(), rest


def cut(pixels: Pixels, crop: Crop, step: _RandomCrop, mirror: bool, out: Out | None) -> Pixels:
    """Return the part `crop` of `pixels`, in the size and layout of `step`."""
    top, left, height, width = crop
    return native.resized(pixels[top : top + height, left : left + width], step.size, step.layout, mirror, out)


def _decoded(data: bytes) -> Pixels:
    pixels: Any = DecodeImage()(data)
    return pixels  # type: ignore[no-any-return]


def _encoded(data: Any, step: object) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    raise transform_input(
        f"{step!r} got a {type(data).__name__}: it needs the bytes of an encoded image. Leave out the decoding before "
        "it, or use RandomResizedCrop, which takes decoded images"
    )


def _central(height: int, width: int, low: float, high: float) -> Crop:
    """Return the largest central crop whose aspect ratio, width / height, is within `low` to `high`."""
    down, across = height, width
    if width < low * height:
        down = round(width / low)
    elif width > high * height:
        across = round(height * high)
    return Crop((height - down) // 2, (width - across) // 2, down, across)


def _range(given: Sequence[float], name: str) -> tuple[float, float]:
    try:
        low, high = (float(value) for value in given)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 < low <= high < math.inf:
        raise InputError(f"{name}={given!r}: give two numbers above 0, the smaller one first")
    return low, high
