"""A small residual network of 78,042 weights, and its training on CIFAR-10 from whatever batches it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.photos import jpeg_files

Array = npt.NDArray[Any]
MEAN, DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
PAD, SIDE = 4, 32
RISE = 0.2
"""The learning rate rises over this part of the training and falls over the rest."""


def read_cifar(folder: Path, keep: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pictures (n, 3, 32, 32) and labels of `folder`/train/CLASS/*.jpg and of `folder`/test; kept in `keep`."""
    if not keep.exists():
        np.savez(keep, *_decode(folder / "train"), *_decode(folder / "test"))
    with np.load(keep) as kept:
        pictures, labels, test_pictures, test_labels = (torch.from_numpy(kept[name]) for name in kept.files)
    return pictures, labels, test_pictures, test_labels


def _decode(folder: Path) -> tuple[Array, Array]:
    files = jpeg_files(folder)
    if not files:
        raise FileNotFoundError(f"{folder} has no CLASS/*.jpg: give the folder of CIFAR-10 as JPEG files")
    classes = sorted({file.parent.name for file in files})
    pictures = np.empty((len(files), 3, SIDE, SIDE), np.uint8)
    for number, file in enumerate(files):
        with Image.open(file) as picture:
            pictures[number] = np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
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


def augmented(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Return random crops of the padded pictures, half of them mirrored, scaled."""
    count, line = len(pictures), torch.arange(SIDE)
    padded = functional.pad(pictures, (PAD, PAD, PAD, PAD))
    down, right = (torch.randint(0, 2 * PAD + 1, (count, 1), generator=generator) for _ in range(2))
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    rows, columns = line + down, torch.where(mirrored, line.flip(0), line) + right
    crops = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return scaled(crops.permute(0, 3, 1, 2))


def scaled(pictures: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, DEVIATION))
    return ((pictures.float() - mean) / deviation).contiguous(memory_format=torch.channels_last)


def train(
    batches: Iterable[tuple[Tensor, Tensor, Array, Any]],
    total: float,
    seed: int,
    on_step: Callable[[Array, Tensor], object],
    rate: float = 0.2,
) -> Net:
    """Train a fresh network: stochastic gradient descent, Nesterov momentum of 0.9, one step per batch.

    Args:
        batches: pictures, labels, ids and weights (or None) of all epochs.
        total: how many samples they are in all; the learning rate follows the samples seen.
        seed: of the initial weights and of the augmentation.
        on_step: called after each step with the ids and their losses.
        rate: highest learning rate.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    net = Net().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    seen = 0
    for pictures, labels, ids, weights in batches:
        done = min(1.0, seen / total)
        for group in optimizer.param_groups:
            group["lr"] = rate * max(0.005, done / RISE if done < RISE else (1 - done) / (1 - RISE))
        with torch.autocast("cpu", torch.bfloat16):
            out = net(augmented(pictures, generator))
        losses = functional.cross_entropy(out.float(), labels, reduction="none")
        loss = losses.mean() if weights is None else (losses * torch.as_tensor(weights).float()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(ids)
        on_step(ids, losses.detach())
    return net


def accuracy(net: Net, pictures: Tensor, labels: Tensor) -> float:
    """Return the percentage of the pictures whose class is found."""
    net.eval()
    with torch.no_grad():
        outputs = [net(scaled(part)).argmax(1) for part in pictures.split(1000)]
    return 100 * float((torch.cat(outputs) == labels).float().mean())
