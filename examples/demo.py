"""Train a small network on pictures behind slow storage, with PyTorch's loader and with stallfree, and compare.

    make demo                              # or: python examples/demo.py
    make demo ARGS="--data PATH"           # your own pictures, one folder per class

Both loaders read the same files through a source that is slowed down to the bandwidth of a network disk, and both run
the same transforms in as many workers. After the first epoch stallfree has the decoded, resized pictures in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

import stallfree as sf

CLASSES = ("discs", "rings", "squares", "stripes")
SIZE = (500, 375)
HEADINGS = "loader    epoch  seconds  samples/s  read from storage  waits for data   hits  right"
ROW = "{:<9} {:>5} {:>8.2f} {:>10,.0f} {:>15,.0f} MB {:>15.0%} {:>6.0%} {:>6.0%}"


def make_pictures(folder: Path, count: int) -> None:
    """Write JPEG files that take as long to read and decode as photographs: shapes on noise of every scale."""
    rng = np.random.default_rng(20)
    noise = np.zeros((1024, 1024, 3), np.float32)
    for octave in range(2, 11):
        coarse = Image.fromarray(rng.integers(0, 256, (2**octave, 2**octave, 3), np.uint8))
        noise += (np.asarray(coarse.resize((1024, 1024), Image.Resampling.BICUBIC), np.float32) - 128) / 2
    background = Image.fromarray(np.clip(noise + 128, 0, 255).astype(np.uint8))

    def make(number: int) -> None:
        rng = np.random.default_rng(number)
        left, top = rng.integers(0, [1024 - SIZE[0], 1024 - SIZE[1]]).tolist()
        picture = background.crop((left, top, left + SIZE[0], top + SIZE[1]))
        kind = CLASSES[number % len(CLASSES)]
        for _ in range(4):
            draw_shape(ImageDraw.Draw(picture), kind, rng)
        picture.save(folder / kind / f"{number:05d}.jpg", quality=90)

    for name in CLASSES:
        (folder / name).mkdir()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(make, range(count)))


def draw_shape(draw: ImageDraw.ImageDraw, kind: str, rng: np.random.Generator) -> None:
    """Draw one shape of this class somewhere, in some colour."""
    side = int(rng.integers(70, 160))
    x, y = rng.integers(0, [SIZE[0] - side, SIZE[1] - side]).tolist()
    colour = tuple(rng.integers(30, 226, 3).tolist())
    if kind == "discs":
        draw.ellipse((x, y, x + side, y + side), fill=colour)
    elif kind == "rings":
        draw.ellipse((x, y, x + side, y + side), outline=colour, width=side // 6)
    elif kind == "squares":
        draw.rectangle((x, y, x + side, y + side), fill=colour)
    else:
        for line in range(y, y + side, 24):
            draw.rectangle((x, line, x + side, line + 12), fill=colour)


def network(classes: int) -> nn.Module:
    """Three convolutions: a CPU trains on pictures faster than it decodes them."""
    layers: list[nn.Module] = []
    for inputs, outputs, size, stride in ((3, 16, 5, 4), (16, 32, 3, 2), (32, 64, 3, 2)):
        layers += [nn.Conv2d(inputs, outputs, size, stride, padding=size // 2), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def train(
    name: str, loader: Iterable[Any], epochs: int, classes: int, counts: Callable[[], tuple[int, int]]
) -> list[float]:
    """Train a new network, print a row for each epoch, and return the seconds of each.

    `counts` gives the bytes read from storage and the hits of the cache so far.
    """
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = network(classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seconds = []
    for epoch in range(1, epochs + 1):
        samples, right, waited = 0, 0, 0.0
        counts_before = counts()
        start = asked = time.perf_counter()
        for pictures, labels in loader:
            waited += time.perf_counter() - asked
            labels = labels.to(device)
            scores = model(pictures.to(device).float() / 127.5 - 1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, labels).backward()
            optimizer.step()
            samples += len(labels)
            right += int((scores.argmax(1) == labels).sum())
            asked = time.perf_counter()
        waited += time.perf_counter() - asked
        seconds.append(time.perf_counter() - start)
        read, hits = (now - before for now, before in zip(counts(), counts_before, strict=True))
        shares = waited / seconds[-1], hits / samples, right / samples
        print(ROW.format(name, epoch, seconds[-1], samples / seconds[-1], read / 1e6, *shares), flush=True)
    return seconds


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Train with both loaders on the pictures in `folder`."""
    augment = sf.DecodeRandomResizedCrop(96, flip=0.5, layout="CHW")  # random, in each epoch
    files = sf.ImageFolder(folder, augment)
    classes, workers = len(files.classes), options.workers
    print(f"{len(files):,} pictures in {classes} classes behind storage of {options.bandwidth}, {workers} workers")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # the other cores are for the workers
    arguments: dict[str, Any] = {
        "batch_size": options.batch_size,
        "shuffle": True,
        "num_workers": workers,
        "persistent_workers": True,
    }
    print(HEADINGS)

    with contextlib.closing(sf.testing.ThrottledSource(files, options.bandwidth)) as source:
        data: Any = source  # torch's loader takes any map-style data set, but declares its own base class
        loader = torch.utils.data.DataLoader[Any](data, **arguments)
        before = train("torch", loader, options.epochs, classes, lambda: (source.bytes, 0))
        del loader  # ends its workers
        with (
            sf.CachedDataset(source, capacity=options.capacity) as cached,
            sf.DataLoader(cached, **arguments) as loader,
        ):
            after = train("stallfree", loader, options.epochs, classes, lambda: (source.bytes, loader.stats().hits))
    print(f"\nAll epochs: {sum(before):.1f} s with torch, {sum(after):.1f} s with stallfree.")
    if options.epochs > 1:
        print(f"Later epochs: {sum(before[1:]) / sum(after[1:]):.1f} times as fast with stallfree.")
    print("How long your own script waits for its data: stallfree run train.py")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare PyTorch's loader and stallfree on slow storage.")
    parser.add_argument("--data", type=Path, help="a folder of pictures, one folder per class; made if not given")
    parser.add_argument("--pictures", type=int, default=2000, help="how many to make")
    parser.add_argument("--bandwidth", default="60MB/s", help="speed of the storage")
    parser.add_argument("--capacity", default="256MiB", help="memory for the cache")
    parser.add_argument("--epochs", type=int, default=3, help="epochs with each loader")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each loader")
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stallfree-demo-") as made:
        if options.data is None:
            print(f"making {options.pictures:,} pictures", flush=True)
            make_pictures(Path(made), options.pictures)
        try:
            compare(options.data or Path(made), options)
        except (sf.InputError, sf.CapacityError) as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
