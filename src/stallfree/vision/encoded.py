"""Pictures that the device decodes and crops: a batch of them crosses the bus encoded.

    record ─▶ DecodeRandomResizedCrop(on_device=True) ─▶ EncodedPicture ─▶ collate ─▶ EncodedPictures ─▶ .to(device)

The step draws the crop where the CPU step draws it, in the worker, and the parameters travel with the record. So no
random number is drawn on the device, or in a thread of the training process.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from stallfree.errors import InputError, MissingExtraError, image_unreadable
from stallfree.sources.files import DecodeImage

_BYTES_AT_ONCE = 256 << 20
"""Memory on the device for the crops that are resized together, before they are resized."""

TAIL = 1024  # bytes at the end of a file that must contain a JPEG's end marker: truncated files are not decoded in part
_SUBSAMPLINGS = {b"\x11", b"\x21", b"\x22", b"\x12", b"\x41"}  # of the luminance, if the chrominance has 0x11


class Task(NamedTuple):
    """What to do with one picture. All values are integers; `height` is 0 if its bytes are the finished pixels."""

    top: int
    left: int
    height: int
    width: int
    mirror: int
    rows: int
    columns: int
    channels_first: int


class EncodedPicture(NamedTuple):
    """A sample: a JPEG, or finished pixels (3, rows, columns) with an empty crop, and the values of its `Task`."""

    data: bytes
    task: np.ndarray[Any, np.dtype[np.int32]]

    def to(self, device: torch.device | str | int, *_: Any, **__: Any) -> torch.Tensor:
        """Return the finished pixels on `device`, without a dimension for the batch."""
        return collate_encoded([self]).to(device)[0]

    def record_stream(self, stream: object) -> None:
        """See `EncodedPictures`."""


class EncodedPictures(NamedTuple):
    """A batch of encoded pictures in host memory; `to(device)` decodes, crops, resizes and mirrors them there.

    torch's `default_collate` makes it of `EncodedPicture`. Prefetchers, Lightning and Accelerate call `to` themselves.

    Attributes:
        data: the bytes of all pictures, one after the other.
        offsets: where each picture begins in `data`, and where the last one ends.
        tasks: the values of one `Task` per picture.
    """

    data: torch.Tensor
    offsets: torch.Tensor
    tasks: torch.Tensor

    def to(self, device: torch.device | str | int, *_: Any, **__: Any) -> torch.Tensor:
        """Return the finished pixels on `device`, uint8 (N, rows, columns, 3) or (N, 3, rows, columns).

        On a GPU, the decoder is nvJPEG (`torchvision.io.decode_jpeg`). A picture that it rejects is decoded on the CPU.
        The call returns when the pictures are decoded; the current stream is ordered after that.
        """
        device = torch.device(device)
        tasks = [Task(*row) for row in self.tasks.tolist()]
        if len({task[5:] for task in tasks}) > 1:
            raise InputError("the pictures of a batch have several sizes or layouts: give all steps of it the same")
        parts = self.data.split(self.offsets.diff().tolist())
        shape = 1, 3, tasks[0].rows, tasks[0].columns
        encoded = [at for at, task in enumerate(tasks) if task.height]
        finished = [at for at, task in enumerate(tasks) if not task.height]
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            decoded = _decoded([parts[at] for at in encoded], device)
            made = list(_cropped(decoded, [tasks[at] for at in encoded]))
            pixels = torch.cat([*made, *(parts[at].view(shape).to(device) for at in finished)])
            if finished:
                pixels = pixels[torch.tensor(encoded + finished).argsort().to(device)]
            return pixels if tasks[0].channels_first else pixels.permute(0, 2, 3, 1).contiguous()

    def record_stream(self, stream: object) -> None:
        """Do nothing: the memory is the host's. Prefetchers send what has this method in their copy stream."""


def collate_encoded(pictures: Sequence[EncodedPicture], *, collate_fn_map: Any = None) -> EncodedPictures:
    """Return the batch of `pictures`; called by `default_collate`."""
    data = [np.frombuffer(picture.data, np.uint8) for picture in pictures]
    offsets = np.cumsum([0, *(each.size for each in data)])
    tasks = np.stack([np.asarray(picture.task) for picture in pictures])
    return EncodedPictures(*map(torch.from_numpy, (np.concatenate(data), offsets, tasks)))


default_collate_fn_map[EncodedPicture] = collate_encoded


def baseline_size(data: bytes) -> tuple[int, int] | None:
    """Return height and width of a JPEG that hardware decodes as libjpeg does; None for all other bytes.

    It is a complete baseline JPEG with 8 bits per value, grey or YCbCr.
    """
    if data[:2] != b"\xff\xd8" or data.find(b"\xff\xd9", max(0, len(data) - TAIL)) < 0:
        return None
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:  # up to the picture itself
        kind, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if kind == 0xEE and data[at + 4 : at + 9] == b"Adobe" and data[at + 15 : at + 16] == b"\0":
            return None  # the three components are red, green and blue
        if kind == 0xC0:
            return _frame_size(data[at + 4 : at + 2 + length])
        at += 2 + length
    return None


def _frame_size(body: bytes) -> tuple[int, int] | None:
    """Return height and width of a baseline frame. `body`: precision, height, width, and 3 bytes per component."""
    components = [body[at : at + 3] for at in range(6, len(body), 3)]
    grey = len(components) == 1
    colour = [each[:1] for each in components] in ([b"\1", b"\2", b"\3"], [b"\0", b"\1", b"\2"])
    if body[:1] != b"\x08" or not (grey or colour):
        return None
    if colour and (components[0][1:2] not in _SUBSAMPLINGS or any(each[1] != 0x11 for each in components[1:])):
        return None
    height, width = int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big")
    return (height, width) if height and width else None


# -- on the device ----------------------------------------------------------------------------------------------------


def _decoded(pictures: list[torch.Tensor], device: torch.device, first: int = 0) -> list[torch.Tensor]:
    """Return the pictures on `device`, uint8 (3, height, width). `first` is the number of the first one."""
    if device.type == "cuda" and pictures:
        try:
            from torchvision.io import ImageReadMode, decode_jpeg
        except ModuleNotFoundError as error:
            raise MissingExtraError("decoding on a GPU needs torchvision: pip install torchvision") from error

        # torchvision decodes in its own stream, into memory that the current stream may still read from the last batch.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        try:
            return decode_jpeg(pictures, ImageReadMode.RGB, device=device)  # type: ignore[no-any-return]
        except RuntimeError:  # it names no picture
            if len(pictures) > 1:
                return [_decoded([picture], device, at)[0] for at, picture in enumerate(pictures)]
    decoded = []
    for at, picture in enumerate(pictures, first):
        try:
            pixels: Any = DecodeImage()(picture.numpy().tobytes())
        except InputError as error:
            raise image_unreadable(f"picture {at} of the batch cannot be decoded: {error}") from error
        decoded.append(torch.from_numpy(pixels).to(device).permute(2, 0, 1))
    return decoded


def _cropped(pictures: list[torch.Tensor], tasks: list[Task]) -> Iterator[torch.Tensor]:
    """Yield the results of successive pictures, uint8 (n, 3, rows, columns): as many as fit `_BYTES_AT_ONCE`."""
    start = high = wide = 0
    for end, task in enumerate(tasks):
        high, wide = max(high, task.height), max(wide, task.width)
        if end > start and 6 * high * wide * (end + 1 - start) > _BYTES_AT_ONCE:
            yield _resized(pictures[start:end], tasks[start:end])
            start, high, wide = end, task.height, task.width
    if tasks:
        yield _resized(pictures[start:], tasks[start:])


def _resized(pictures: list[torch.Tensor], tasks: list[Task]) -> torch.Tensor:
    """Crop, resize and mirror, bilinear with antialiasing: two matrix products per picture, over its padded crop."""
    device = pictures[0].device
    exact = torch.float16 if device.type == "cuda" else torch.float32  # both hold 0 to 255
    _, _, heights, widths, mirrors, *_ = torch.tensor(tasks, device=device).unbind(1)
    high, wide = max(task.height for task in tasks), max(task.width for task in tasks)
    padded = torch.zeros((len(tasks), 3, high, wide), dtype=exact, device=device)
    strides, size = (high * wide, wide, 1), 3 * high * wide
    targets, crops = [], []
    for at, (picture, (top, left, height, width, *_)) in enumerate(zip(pictures, tasks, strict=True)):
        shape, (plane, row, column) = (3, height, width), picture.stride()
        start = picture.storage_offset() + top * row + left * column
        targets.append(padded.as_strided(shape, strides, at * size))  # one call each, in place of several for slices
        crops.append(picture.as_strided(shape, (plane, row, column), start))
    torch._foreach_copy_(targets, crops)
    down = _weights(heights, torch.zeros_like(mirrors), tasks[0].rows, high).to(exact)
    across = _weights(widths, mirrors, tasks[0].columns, wide).to(exact)
    narrow = torch.einsum("nchw,njw->nchj", padded, across)
    return torch.einsum("nih,nchj->ncij", down, narrow).add_(0.5).clamp_(0, 255).to(torch.uint8)


def _weights(sizes: torch.Tensor, mirrors: torch.Tensor, count: int, padded: int) -> torch.Tensor:
    """Return the share of each of `padded` positions in each of `count` resized ones, (n, count, padded)."""
    sizes, mirrors = sizes.view(-1, 1, 1), mirrors.view(-1, 1, 1)
    resized = torch.arange(count, device=sizes.device).view(1, -1, 1)
    resized = torch.where(mirrors > 0, count - 1 - resized, resized)
    scale = sizes / count
    positions = torch.arange(padded, device=sizes.device)
    distances = (positions + 0.5 - (resized + 0.5) * scale).abs_()
    shares = (1 - distances / scale.clamp(min=1)).clamp_(min=0).mul_(positions < sizes)
    return shares / shares.sum(2, keepdim=True)
