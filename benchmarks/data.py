"""Data sets that several questions use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import stallfree as sf
from benchmarks.timing import load_noise_pictures, make_noise, make_record


class FromFunction(torch.utils.data.Dataset[Any]):
    """`count` samples, made by `make(id)` when they are asked for."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> Any:
        return self.make(int(id))


class Pairs(torch.utils.data.Dataset[Any]):
    """(picture, label) by index, out of one tensor in shared memory.

    Args:
        folder: of the noise pictures.
        side: of a picture.
        planes: whether a picture is (3, side, side).
    """

    def __init__(self, folder: str, side: int, planes: bool = False) -> None:
        pictures = load_noise_pictures(folder, side)
        shape = (len(pictures), 3, side, side) if planes else pictures.shape
        self.pictures = torch.empty(shape, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self.pictures.numpy()[:] = pictures.reshape(shape)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index], index

    @property
    def capacity(self) -> int:
        """Bytes that are enough for a cache of all."""
        return 2 * len(self) * (self.pictures[0].nbytes + 1024)


@sf.mark_deterministic
def to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def make_records(folder: str, count: int, size: int) -> sf.FileDataset:
    """Return `(tensor of bytes, id)` by id, from files of `size` bytes, which are written to `folder`."""
    noise, paths = make_noise(size), [Path(folder) / f"records-{size}" / f"{id:05d}" for id in range(count)]
    paths[0].parent.mkdir(exist_ok=True)
    for id, path in enumerate(paths):
        if not path.exists():
            path.write_bytes(make_record(noise, id).tobytes())
    return sf.FileDataset(paths, list(range(count)), to_tensor)


def capacity_for(count: int, size: int) -> int:
    """Return a capacity of a cache for `count` records of `size` bytes, index included."""
    return count * (size + size // 40 + 2048) + (256 << 10)
