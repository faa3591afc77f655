"""The training job of the demo: transforms, a small network, and an epoch with a stopwatch on every wait."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn

from stallfree.pipeline import Compose, mark_deterministic, mark_random

SHORT_SIDE = 112
CROP = 96

Pixels = npt.NDArray[np.uint8]


@mark_deterministic
class ShrinkTo:
    """The picture with its shorter side `side` pixels long."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, pixels: Pixels) -> Pixels:
        height, width = pixels.shape[:2]
        scale = self.side / min(height, width)
        size = (max(self.side, round(width * scale)), max(self.side, round(height * scale)))
        return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0))


@mark_random
class RandomCrop:
    """A square of `side` pixels from anywhere in the picture."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, pixels: Pixels) -> Pixels:
        top = random.randint(0, pixels.shape[0] - self.side)
        left = random.randint(0, pixels.shape[1] - self.side)
        return pixels[top : top + self.side, left : left + self.side]


@mark_random
class RandomFlip:
    """The picture, or with a chance of one half its mirror image."""

    def __call__(self, pixels: Pixels) -> Pixels:
        return pixels[:, ::-1] if random.random() < 0.5 else pixels


@mark_deterministic
class ToTensor:
    """An array (height, width, channels) as a tensor (channels, height, width) of bytes."""

    def __call__(self, pixels: Pixels) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def transform() -> Compose:
    """What follows decoding: shrink, random crop, random flip, to a tensor."""
    return Compose([ShrinkTo(SHORT_SIDE), RandomCrop(CROP), RandomFlip(), ToTensor()])


def network(classes: int) -> nn.Module:
    """Three convolutions and a linear layer: cheap enough for a CPU to train faster than it can decode."""
    layers: list[nn.Module] = []
    for before, after, size, stride in ((3, 16, 5, 4), (16, 32, 3, 2), (32, 64, 3, 2)):
        layers += [
            nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class Trainer:
    """A network with its optimiser. The same seed gives the same start."""

    def __init__(self, classes: int, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = network(classes).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)

    def step(self, pictures: torch.Tensor, labels: torch.Tensor) -> int:
        """One step of training; how many of the batch the network had right before it."""
        inputs = pictures.to(self.device, non_blocking=True).float().div_(127.5).sub_(1)
        wanted = labels.to(self.device, non_blocking=True)
        logits = self.model(inputs)
        loss = nn.functional.cross_entropy(logits, wanted)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return int((logits.argmax(1) == wanted).sum())


@dataclass(frozen=True)
class Waits:
    """What happened beneath the training loop in one epoch.

    Attributes:
        fetch: seconds that the loop waited because samples were not fetched yet.
        prep: seconds that it waited because samples were not prepared yet.
        hits: samples that came out of the cache.
        storage_bytes: bytes read from storage.
    """

    fetch: float
    prep: float
    hits: int
    storage_bytes: int


class Job(Protocol):
    """A loader with its counters."""

    name: str

    def batches(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Begins the next epoch: pairs of pictures and labels."""

    def waits(self, waited: float) -> Waits:
        """What happened since `batches`, given the seconds that the training loop waited in that time."""


@dataclass(frozen=True)
class Epoch:
    """One epoch of one loader.

    Attributes:
        loader: the loader's name.
        number: 1 for the first.
        samples: samples trained on.
        seconds: from asking for the first batch to the end of the last step.
        correct: samples that the network had right at the time it saw them.
        waits: what the loader counted meanwhile.
    """

    loader: str
    number: int
    samples: int
    seconds: float
    correct: int
    waits: Waits

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    @property
    def hit_ratio(self) -> float:
        """Share of the samples that came out of the cache."""
        return self.waits.hits / self.samples


def run_epoch(job: Job, number: int, trainer: Trainer, progress: Callable[[int], None]) -> Epoch:
    """Train on one epoch of `job`, the one with this `number`; `progress` hears of the samples of each batch."""
    samples = correct = 0
    waited = 0.0
    start = asked = time.perf_counter()
    for pictures, labels in job.batches():
        waited += time.perf_counter() - asked
        correct += trainer.step(pictures, labels)
        samples += len(labels)
        progress(len(labels))
        asked = time.perf_counter()
    end = time.perf_counter()
    return Epoch(job.name, number, samples, end - start, correct, job.waits(waited + end - asked))
