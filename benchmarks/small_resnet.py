"""A small residual network on CIFAR-10, and its training on whatever samples it is given.

The network has 78,042 weights and sees 32x32 pictures at half their resolution, so an epoch of 50,000 takes about
10 s on one core and a few on a GPU. The data set is a folder of JPEG files, `train/CLASS/*.jpg` and `test/CLASS/*.jpg`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import BenchmarkError

Array = npt.NDArray[Any]
Batch = tuple[Array, Array | None]
"""Ids, and a weight for each or None."""

MEAN, DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
PAD = 4
SIDE = 32
RISE = 0.2
"""The learning rate rises over this share of the training and falls to nothing over the rest."""

_LOWEST = 0.005
_TEST_BATCH = 1000


@dataclass(frozen=True)
class Data:
    """Pictures (uint8, n x 3 x 32 x 32) and labels (int64) to train on, and to test with."""

    pictures: Tensor
    labels: Tensor
    test_pictures: Tensor
    test_labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> Data:
        """A part that is spread over all classes, for a short run."""
        some = torch.linspace(0, len(self) - 1, min(count, len(self))).long()
        return Data(self.pictures[some], self.labels[some], self.test_pictures, self.test_labels)


def data(folder: Path, *, keep: Path | None = None) -> Data:
    """The pictures in `folder`, decoded. Ids follow the names of the files, class after class.

    Args:
        folder: with `train` and `test`, a folder per class in each.
        keep: a file (.npz) for the decoded pictures; if it is there, it is read instead.

    Raises `BenchmarkError` if there are none.
    """
    names = ("pictures", "labels", "test_pictures", "test_labels")
    if keep is not None and keep.exists():
        with np.load(keep) as kept:
            return Data(*(torch.from_numpy(kept[name]) for name in names))
    found = [*_decode(folder / "train"), *_decode(folder / "test")]
    if keep is not None:
        np.savez(keep, **dict(zip(names, found, strict=True)))
    return Data(*(torch.from_numpy(array) for array in found))


def _decode(folder: Path) -> tuple[Array, Array]:
    from PIL import Image

    from benchmarks.photos import jpeg_files

    files = [path for path in jpeg_files(folder) if path.parent.parent == folder]
    if not files:
        raise BenchmarkError(f"{folder} has no CLASS/*.jpg: give the folder of CIFAR-10 as JPEG files")
    classes = sorted({file.parent.name for file in files})
    pictures = np.empty((len(files), 3, SIDE, SIDE), np.uint8)
    for at, file in enumerate(files):
        with Image.open(file) as picture:
            pictures[at] = np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
    return pictures, np.array([classes.index(file.parent.name) for file in files])


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(inputs, outputs, 3, stride), _convolution(outputs, outputs, 3, 1)
        self.short = nn.Identity() if inputs == outputs else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))) + self.short(x))


class Net(nn.Module):
    """Three residual blocks (He et al., CVPR 2016) of 16, 32 and 64 channels behind a stem of stride 2."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = _convolution(3, width, 3, 2)
        self.blocks = nn.Sequential(
            _Block(width, width, 1), _Block(width, 2 * width, 2), _Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(functional.relu(self.stem(x))).mean((2, 3)))
        return out


def best_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Pictures:
    """Pictures on a device, as a network wants them.

    Args:
        pictures: uint8, n x 3 x 32 x 32.
        device: to work on.
    """

    def __init__(self, pictures: Tensor, device: torch.device) -> None:
        self.device = device
        self._padded = functional.pad(pictures, (PAD, PAD, PAD, PAD)).to(device)
        self._mean, self._deviation = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))

    def augmented(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        """Random crops of the padded pictures, half of them mirrored."""
        count, line = len(ids), torch.arange(SIDE)
        down, right = (torch.randint(0, 2 * PAD + 1, (count, 1), generator=generator) for _ in range(2))
        mirrored = torch.rand(count, 1, generator=generator) < 0.5
        rows, columns = line + down, torch.where(mirrored, line.flip(0), line) + right
        at = [place.to(self.device) for place in (ids[:, None, None], rows[:, :, None], columns[:, None, :])]
        return self._scaled(self._padded[at[0], :, at[1], at[2]].permute(0, 3, 1, 2))

    def plain(self, start: int, stop: int) -> Tensor:
        """Those from `start` to `stop` as they are."""
        return self._scaled(self._padded[start:stop, :, PAD:-PAD, PAD:-PAD])

    def _scaled(self, pictures: Tensor) -> Tensor:
        return ((pictures.float() - self._mean) / self._deviation).contiguous(memory_format=torch.channels_last)


def train(
    data: Data,
    batches: Iterable[Batch],
    *,
    total_samples: float,
    seed: int = 0,
    rate: float = 0.2,
    decay: float = 5e-4,
    on_step: Callable[[Array, Tensor], object] | None = None,
    device: torch.device | None = None,
) -> Net:
    """Train a fresh network: stochastic gradient descent, Nesterov momentum of 0.9, one step per batch.

    Args:
        data: see `data`.
        batches: ids and weights of all epochs, one after the other; asked for one at a time, so that a plan can depend
            on the losses before it. The gradient is that of the mean of (loss x weight).
        total_samples: how many they will be in all; the learning rate follows the samples seen (see `RISE`).
        seed: of the initial weights and of the augmentation.
        rate: highest learning rate, for batches of 128.
        decay: weight decay.
        on_step: is called after each step with the ids and their losses (float32, on the device).
        device: a GPU if there is one, if None.
    """
    device = device or best_device()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    net = Net().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=decay)
    pictures, labels = Pictures(data.pictures, device), data.labels.to(device)
    seen = 0
    for ids, weights in batches:
        done = min(1.0, seen / total_samples)
        for group in optimizer.param_groups:
            group["lr"] = rate * max(_LOWEST, done / RISE if done < RISE else (1 - done) / (1 - RISE))
        chosen = torch.from_numpy(ids)
        with torch.autocast(device.type, torch.bfloat16):
            out = net(pictures.augmented(chosen, generator))
        losses = functional.cross_entropy(out.float(), labels[chosen.to(device)], reduction="none")
        weighted = losses if weights is None else losses * torch.as_tensor(weights, device=device, dtype=torch.float32)
        optimizer.zero_grad()
        weighted.mean().backward()
        optimizer.step()
        seen += len(ids)
        if on_step is not None:
            on_step(ids, losses.detach())
    return net


def accuracy(net: Net, data: Data) -> float:
    """Share of the test pictures whose class is found, in percent."""
    device = next(net.parameters()).device
    pictures, right = Pictures(data.test_pictures, device), 0
    net.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for start in range(0, len(data.test_labels), _TEST_BATCH):
            stop = min(start + _TEST_BATCH, len(data.test_labels))
            found = net(pictures.plain(start, stop)).argmax(1).cpu()
            right += int((found == data.test_labels[start:stop]).sum())
    net.train()
    return 100 * right / len(data.test_labels)
