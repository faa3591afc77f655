"""Is a whole training faster?"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

import stallfree as sf
from benchmarks.harness import Case, Condition, Contender, Figure, Options
from benchmarks.photos import repeat_photos
from benchmarks.slow_disk import forget_pages, join, make_slow_disk, why_not
from benchmarks.small_resnet import Net

Figures = dict[str, Any]
SIDE, BATCH, WORKERS = 64, 50, 2
AREA, RATIO = (0.35, 1.0), (0.75, 4 / 3)


# -- the script of a user ---------------------------------------------------------------------------------------------


class Photographs(torch.utils.data.Dataset[Any]):
    """Pictures in folders that are named after their class: a random part, of one size, mirrored half the time."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*/*.jpg"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = self.files[index]
        with Image.open(file) as picture:
            pixels = np.array(random_part(picture.convert("RGB")))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), self.classes.index(file.parent.name)


def random_part(picture: Image.Image) -> Image.Image:
    """A random part of the picture, resized; mirrored half the time."""
    area = picture.width * picture.height * random.uniform(*AREA)
    ratio = random.uniform(*RATIO)
    width = min(picture.width, round((area * ratio) ** 0.5))
    height = min(picture.height, round((area / ratio) ** 0.5))
    left, top = random.randint(0, picture.width - width), random.randint(0, picture.height - height)
    part = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else part


def train(make_loader: Callable[[], Any], photos: str, epochs: int, slow: str) -> Figures:
    """Seconds from before the data set is made to the end of the last epoch, and of an epoch after the first.

    Args:
        make_loader: makes the data set and its loader.
        photos: folder of the photographs.
        epochs: to train.
        slow: control group whose processes read `photos` slowly; the page cache is then emptied before each epoch.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    if slow:
        join(Path(slow))
    net = Net().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    net(torch.rand(BATCH, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)).sum().backward()
    begun, ends, losses = time.perf_counter(), [], []
    loader = make_loader()
    for _ in range(epochs):
        if slow:
            forget_pages(Path(photos))
        losses = []
        for pictures, labels in loader:
            scaled = (pictures.float() / 255 - 0.45) / 0.25
            loss = functional.cross_entropy(net(scaled.contiguous(memory_format=torch.channels_last)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ends.append(time.perf_counter() - begun)
    later = (ends[-1] - ends[0]) / max(1, epochs - 1)
    return {"seconds": ends[-1], "later": later, "loss": sum(losses) / len(losses)}


def one_line(photos: str, epochs: int, loader: str, round: int, disk: str = "", throttled: bool = False) -> Figures:
    """The script as it is ("torch"), or with one changed line."""
    options: Figures = {"batch_size": BATCH, "shuffle": True, "num_workers": WORKERS}
    kept = options | {"persistent_workers": True}
    lines: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.utils.data.DataLoader(Photographs(photos), **kept),
        "auto": lambda: sf.DataLoader(Photographs(photos), cache="auto", **kept),
        "shared": lambda: sf.SharedLoader(Photographs(photos), group=f"training-{round}", **options),
    }
    _imported = sf.DataLoader, sf.SharedLoader  # before the clock starts
    return train(lines[loader], photos, epochs, disk if throttled else "")


# -- the case ---------------------------------------------------------------------------------------------------------


def photos_on_disk(scratch: Path, options: Options) -> Figures:
    disk = make_slow_disk(scratch, 100 if options.quick else 800, rate=60_000_000)
    about = repeat_photos(disk.folder / "photos", options.data, 100 if options.quick else 2000)
    os.sync()
    return {"photos": str(disk.folder / "photos"), "disk": str(disk.slow), "about": about}


HERE = "benchmarks.questions.training"
CASES = {
    "training": Case(
        question="A script trains a small residual network on photographs: how long does it take to the end of 5 "
        "epochs with torch's loader, with one line changed for stallfree, and rewritten for tf.data and FFCV?",
        setup="On the processor: a network of 78,042 weights on 3x64x64 with one thread, batches of 50, loaders of 2 "
        "processes or threads. Each picture is decoded, cropped at random, resized and mirrored for each epoch. The "
        "time runs from before the data set is made, after the imports: it contains the start of workers, the "
        "measuring of `cache=` and the compiling of FFCV and tf.data, not the writing of FFCV's file. tf.data keeps "
        "the encoded files in memory. Slow storage is a disk image whose reads the kernel throttles, with the page "
        "cache emptied before each epoch. Of two jobs, the slower counts.",
        contenders=[
            Contender("torch", "torch DataLoader", f"{HERE}:one_line", {"loader": "torch"}),
            Contender("auto", 'stallfree DataLoader(cache="auto")', f"{HERE}:one_line", {"loader": "auto"}),
            Contender("shared", "stallfree SharedLoader", f"{HERE}:one_line", {"loader": "shared"}, only=("two",)),
            Contender("tfdata", "tf.data", "benchmarks.peers.training:tfdata", venv="training"),
            Contender("ffcv", "FFCV", "benchmarks.peers.training:ffcv", venv="training"),
        ],
        figures={
            "seconds": Figure("s", ".1f", less=True),
            "later": Figure("s, an epoch after the first", ".1f", less=True),
            "loss": Figure("mean loss of the last epoch", ".2f", less=True),
        },
        conditions=[
            Condition("warm", "warm files"),
            Condition("slow", "storage of 60 MB/s", {"throttled": True}),
            Condition("two", "two jobs, warm files", copies=2),
        ],
        ours="auto",
        params={"epochs": 5},
        quick={"epochs": 2},
        rounds=3,
        prepare=photos_on_disk,
        needs=why_not,
    )
}
