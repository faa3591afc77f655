"""Crops of images, random ones and the central one, from encoded and from decoded images; normalisation of batches.

Random numbers come from Python's generator, which stallfree seeds for each sample. In a batch that is composed in
place, results are written to its rows (`out`).

The last section calls the compiled part in C: partial JPEG decoding and resizing, with slower fallbacks in Python. It
is compiled when the package is installed or built, if a C compiler and the headers of libjpeg-turbo are installed (see
`hatch_build.py`). It does not use the Python API, and runs without the GIL.
"""

import ctypes
import functools
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from stallfree.cache.arena import one_thread
from stallfree.errors import InputError, transform_input
from stallfree.pipeline.compose import Out, empty, in_place, mark_deterministic, mark_random
from stallfree.pytree import take_apart
from stallfree.sources.files import DecodeImage
from stallfree.units import parse_whole
from stallfree.vision.encoded import TAIL, EncodedPicture, baseline_size

Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Layout: TypeAlias = Literal["HWC", "CHW"]

LIBRARY = Path(__file__).with_name("_native.so")
ABI = 4

_TRIES = 10

log = logging.getLogger("stallfree")


class Crop(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class _Crop:
    """Base of all crops: a part of an image, mirrored or not, resized to `size`."""

    size: Any
    layout: Layout

    def __post_init__(self) -> None:
        self.size, self.layout = _sides(self.size, "size"), _checked(self.layout)

    def draw(self, height: int, width: int) -> tuple[Crop, bool]:
        """Return the crop for an image of that size, and whether to mirror it."""
        raise NotImplementedError

    def _of_pixels(self, image: Any, out: Out | None, drawn: tuple[Crop, bool] | None = None) -> Pixels:
        """Return the crop of a decoded image."""
        array = np.asarray(image)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
            got = f"{type(image).__name__} ({array.dtype}, shape {array.shape})"
            raise transform_input(
                f"{self!r} got a {got}: it needs an image as uint8 of shape (height, width, 3), as DecodeImage() "
                "returns it. Put steps that return floats or channels first after it"
            )
        (top, left, height, width), mirror = drawn or self.draw(*array.shape[:2])
        return resized(array[top : top + height, left : left + width], self.size, self.layout, mirror, out)

    def _of_encoded(self, data: Any, out: Out | None) -> Pixels:
        """Return the crop of an encoded image. Of a JPEG, only the necessary rows and columns are decoded."""
        encoded = self._bytes(data)
        size = jpeg_size(encoded)
        if size is None:
            return self._of_pixels(DecodeImage()(encoded), out)
        crop, mirror = self.draw(*size)
        part = decode_crop(encoded, crop, self.size, self.layout, mirror, out)
        return self._of_pixels(DecodeImage()(encoded), out, (crop, mirror)) if part is None else part

    def _bytes(self, data: Any) -> bytes:
        if isinstance(data, (bytes, bytearray, memoryview)):
            return bytes(data)
        raise transform_input(
            f"{self!r} got a {type(data).__name__}: it needs the bytes of an encoded image. Leave out the decoding "
            "before it, or use RandomResizedCrop, which takes decoded images"
        )


@in_place
@mark_random
@dataclass(eq=False)
class RandomResizedCrop(_Crop):
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

    size: Any
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    _: KW_ONLY
    flip: float = 0.0
    layout: Layout = "HWC"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scale, self.ratio = _range(self.scale, "scale"), _range(self.ratio, "ratio")
        if not isinstance(self.flip, (int, float)) or isinstance(self.flip, bool) or not 0 <= self.flip <= 1:
            raise InputError(f"flip={self.flip!r}: give a probability, 0 to 1")

    def __call__(self, image: Any, out: Out | None = None) -> Pixels:
        return self._of_pixels(image, out)

    def draw(self, height: int, width: int) -> tuple[Crop, bool]:
        """Draw a crop for an image of that size, and whether to mirror it, from Python's generator."""
        return self._draw_crop(height, width), self.flip > 0 and random.random() < self.flip

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


@in_place
@mark_random
@dataclass(eq=False)
class DecodeRandomResizedCrop(RandomResizedCrop):
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

    on_device: bool = False

    def __call__(self, data: bytes, out: Out | None = None) -> Any:
        return self._stay_encoded(self._bytes(data)) if self.on_device else self._of_encoded(data, out)

    def _stay_encoded(self, data: bytes) -> EncodedPicture:
        if (size := baseline_size(data)) is not None:
            crop, mirror = self.draw(*size)
        else:
            data = replace(self, layout="CHW")._of_pixels(DecodeImage()(data), None).tobytes()
            crop, mirror = Crop(0, 0, 0, 0), False
        return EncodedPicture(data, np.array([*crop, mirror, *self.size, self.layout == "CHW"], np.int32))

    def halves(self) -> tuple[DecodeImage, RandomResizedCrop] | None:
        """Return decoding and the random crop as two steps; None with `on_device`.

        Together they equal this step.
        """
        if self.on_device:
            return None
        return DecodeImage(), RandomResizedCrop(self.size, self.scale, self.ratio, flip=self.flip, layout=self.layout)


@in_place
@mark_deterministic
@dataclass(eq=False)
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

    size: Any
    resize: int | None = None
    _: KW_ONLY
    layout: Layout = "HWC"

    def __post_init__(self) -> None:
        super().__post_init__()
        longer = max(self.size)
        self._shorter = round(longer * 256 / 224) if self.resize is None else _sides(self.resize, "resize")[0]
        if self._shorter < longer:
            raise InputError(
                f"resize={self.resize!r}, size={self.size!r}: give at least the longer side of size as resize"
            )

    def __call__(self, data: bytes, out: Out | None = None) -> Pixels:
        return self._of_encoded(data, out)

    def draw(self, height: int, width: int) -> tuple[Crop, bool]:
        """Return the central crop; it is not mirrored."""
        down, across = (max(1, round(side * min(height, width) / self._shorter)) for side in self.size)
        return Crop((height - down) // 2, (width - across) // 2, down, across), False

    def fingerprint(self) -> str:
        """Return the arguments and the decoders, which determine the last bit of some pixels."""
        return f"{self!r} {version()} {DecodeImage().fingerprint()}"


@dataclass(eq=False)
class Normalize:
    """Computes `(pixels / 255 - mean) / std` of batches of bytes.

    Made for `transform_on_device` of `DevicePrefetcher`.

    All uint8 tensors of 4 dimensions in a batch, also in nested containers, become floats of shape
    (N, 3, H, W). Everything else is unchanged. With "HWC" the result has torch's memory format `channels_last`,
    without a copy.

    Args:
        mean, std: mean and standard deviation of red, green and blue, on a scale of 0 to 1; ImageNet's by default.
        layout: layout of the bytes: "HWC", (N, H, W, 3), or "CHW", (N, 3, H, W).
        dtype: dtype of the floats.

    Raises `InputError` for invalid arguments, and for a batch without such a tensor.

    Example:
        ```python
        normalize = sf.vision.Normalize()  # as `transform_on_device` of a `DevicePrefetcher`
        pixels = normalize(torch.zeros(4, 16, 16, 3, dtype=torch.uint8))
        assert pixels.shape == (4, 3, 16, 16)
        ```
    """

    mean: Sequence[float] = (0.485, 0.456, 0.406)
    std: Sequence[float] = (0.229, 0.224, 0.225)
    _: KW_ONLY
    layout: Layout = "HWC"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        mean, std = _floats(self.mean), _floats(self.std)
        if len(mean) != 3 or len(std) != 3 or not all(value > 0 for value in std):
            raise InputError(
                f"mean={self.mean!r:.80}, std={self.std!r:.80}: give three numbers each, those of std above 0"
            )
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise InputError(f"dtype={self.dtype!r:.80}: give a type of floats, such as torch.float32")
        self.mean, self.std, self.layout = mean, std, _checked(self.layout)
        self._constants: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Any) -> Any:
        leaves, rebuild = take_apart(batch)
        images = [isinstance(leaf, torch.Tensor) and leaf.dtype == torch.uint8 and leaf.ndim == 4 for leaf in leaves]
        if not any(images):
            raise transform_input(
                f"{self!r} got a {type(batch).__name__} without a uint8 tensor of 4 dimensions: apply it to batches of "
                "the loader, and let the steps before it return bytes"
            )
        return rebuild([self._normalised(leaf) if image else leaf for leaf, image in zip(leaves, images, strict=True)])

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        first = pixels.permute(0, 3, 1, 2) if self.layout == "HWC" else pixels
        if first.shape[1] != 3:
            raise transform_input(
                f"{self!r} got images of shape {tuple(pixels.shape)}, which are not 3 channels in this layout: give "
                "their layout"
            )
        if pixels.device not in self._constants:
            mean, std = (torch.tensor(value, device=pixels.device).view(3, 1, 1) for value in (self.mean, self.std))
            self._constants[pixels.device] = 1 / (255 * std), -mean / std
        scale, shift = self._constants[pixels.device]
        return first.to(torch.float32).mul_(scale).add_(shift).to(self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_constants": {}}


def _checked(layout: Layout) -> Layout:
    """Return `layout`. Raises `InputError` if it is unknown."""
    if layout not in ("HWC", "CHW"):
        raise InputError(f"layout={layout!r}: give 'HWC' (height, width, channels) or 'CHW' (channels first)")
    return layout


def _sides(size: int | Sequence[int], name: str) -> tuple[int, int]:
    """Return (height, width) from two numbers, or one for both. Raises `InputError`."""
    sides = [parse_whole(side, name, 1) for side in (size if isinstance(size, (list, tuple)) else (size, size))]
    if len(sides) != 2 or max(sides) > 65500:
        raise InputError(f"{name}={size!r}: give (height, width) in pixels, or one number for both")
    return sides[0], sides[1]


def _range(bounds: Sequence[float], name: str) -> tuple[float, ...]:
    numbers = _floats(bounds)
    if len(numbers) != 2 or not 0 < numbers[0] <= numbers[1] < math.inf:
        raise InputError(f"{name}={bounds!r}: give two numbers above 0, the smaller one first")
    return numbers


def _floats(values: Any) -> tuple[float, ...]:
    """Return `values` as floats; none if they are not numbers."""
    try:
        return tuple(map(float, values))
    except (TypeError, ValueError):
        return ()


# -- the compiled part ------------------------------------------------------------------------------------------------


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, or None if they are missing; logs the reason to `stallfree`."""
    try:
        compiled = ctypes.CDLL(str(LIBRARY))
        problem = "" if compiled.stallfree_abi() == ABI else f"{LIBRARY} has another version; install stallfree again"
    except OSError as error:
        problem = str(error)
    if problem:
        level = logging.WARNING if LIBRARY.exists() else logging.INFO  # it is there, but a library that it needs is not
        log.log(level, "images are decoded completely and resized by torch, which takes longer: %s", problem)
        return None
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    compiled.stallfree_jpeg_size.argtypes = [ctypes.c_char_p, size, pointer]
    compiled.stallfree_decode.argtypes = [ctypes.c_char_p, size, *[number] * 8, pointer]
    compiled.stallfree_resize.argtypes = [pointer, ctypes.c_int64, *[number] * 6, pointer]
    return compiled


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return height and width if `data` is a complete JPEG that supports partial decoding, else None."""
    compiled = library()
    if compiled is None or data[:3] != b"\xff\xd8\xff" or data.find(b"\xff\xd9", len(data) - TAIL) < 0:
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
        image = torch.nn.functional.interpolate(view, size, mode="bilinear", antialias=True)[0]
        image = image.flip(2) if mirror else image
        part[...] = (image if layout == "CHW" else image.permute(1, 2, 0)).numpy()
    return part


def version() -> str:
    """Return the name and version of the resizer, which determines the last bit of some pixels."""
    return f"stallfree {ABI}" if library() is not None else f"torch {torch.__version__}"


def _empty(out: Out | None, size: tuple[int, int], layout: Layout) -> Pixels:
    return empty(out, (3, *size) if layout == "CHW" else (*size, 3))
