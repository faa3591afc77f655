"""Accuracy: a small 3D U-Net trained with the Smart Cache and without, on as many steps."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, Spread, run_child, say, scratch_folder
from benchmarks.volumes import Load, Pad, RandomCrop, RandomNoise, Resample, Scale, Volumes, find_pairs, make_volumes

NAME = "dice"
QUESTION = (
    "Does a model learn as much from a window that moves as from all samples in each epoch? A small 3D U-Net, the same "
    "number of steps."
)
WHO = {
    "none": "no cache, all volumes in each epoch",
    "smart": "Smart Cache, a window of 50, a tenth replaced per epoch",
}
SEEDS = (0, 1, 2)
SIDE, MARGIN = 32, 2
SIZE, RATE = 50, 0.1
BATCH, STEPS = 4, 400
CLASSES = 3
HELD_OUT = 5
"""Every fifth volume is for validation."""


def run(options: Options) -> Report:
    steps, seeds = (20, SEEDS[:2]) if options.quick else (STEPS, SEEDS)
    found: dict[str, list[dict[str, Any]]] = {who: [] for who in WHO}
    with scratch_folder() as scratch:
        folder, what = make_volumes(scratch / "volumes", options.data)
        for seed, who in itertools.product(seeds, WHO):
            task = {"volumes": str(folder), "who": who, "seed": seed, "steps": steps}
            found[who].append(run_child("benchmarks.dice", task, scratch=scratch))
            say(f"  seed {seed}, {WHO[who]}: Dice {found[who][-1]['dice']:.4f}")
    scores = {who: [result["dice"] for result in results] for who, results in found.items()}
    spread = max(max(all_seeds) - min(all_seeds) for all_seeds in scores.values())
    apart = abs(statistics.mean(scores["smart"]) - statistics.mean(scores["none"]))
    return Report(
        columns=["training data", "Dice, mean", "lowest to highest", "anterior part", "posterior part", "epochs", "s"],
        rows=[_row(WHO[who], results) for who, results in found.items()],
        checks=[
            Check(
                f"Dice with the Smart Cache and without, means of {len(seeds)} seeds: apart by; wanted: the spread",
                apart,
                spread,
                "<=",
                ".4f",
            )
        ],
        notes=[
            f"{what}, scaled and resampled to {SIDE}x{SIDE}x{SIDE}; random shift by up to {2 * MARGIN} voxels, noise. "
            f"{steps} steps of {BATCH} volumes with AdamW, cross entropy and soft Dice; the same first weights for "
            f"both at each seed. Dice of both parts in every {HELD_OUT}th volume; these are never trained on. "
            "The spread is that of the seeds, the larger of both."
        ],
        versions=found["smart"][0]["versions"],
        raw=found,
    )


def _row(name: str, results: list[dict[str, Any]]) -> list[str]:
    scores = Spread.of([result["dice"] for result in results])
    parts = np.mean([result["parts"] for result in results], axis=0)
    return [
        name,
        f"{statistics.mean(result['dice'] for result in results):.4f}",
        f"{scores.low:.4f} to {scores.high:.4f}",
        *(f"{part:.4f}" for part in parts),
        f"{statistics.mean(result['epochs'] for result in results):.0f}",
        f"{statistics.mean(result['seconds'] for result in results):.0f}",
    ]


# -- model ------------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Three levels of 8, 16 and 32 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = _block(1, 8), _block(8, 16), _block(16, 32)
        self.narrow, self.last = _block(32 + 16, 16), _block(16 + 8, 8)
        self.out = nn.Conv3d(8, CLASSES, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        fine = self.first(image)
        middle = self.second(functional.max_pool3d(fine, 2))
        coarse = self.third(functional.max_pool3d(middle, 2))
        middle = self.narrow(torch.cat((functional.interpolate(coarse, scale_factor=2), middle), 1))
        return self.out(self.last(torch.cat((functional.interpolate(middle, scale_factor=2), fine), 1)))


def _block(channels: int, out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(channels, out, 3, padding=1),
        nn.GroupNorm(4, out),
        nn.LeakyReLU(0.1),
        nn.Conv3d(out, out, 3, padding=1),
        nn.GroupNorm(4, out),
        nn.LeakyReLU(0.1),
    )


def loss_of(scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Cross entropy, in which the background weighs less, and soft Dice."""
    wanted = functional.one_hot(label, CLASSES).movedim(-1, 1).float()
    found = scores.softmax(1)
    both = (found * wanted).sum((0, 2, 3, 4))
    overlap = (2 * both + 1) / (found.sum((0, 2, 3, 4)) + wanted.sum((0, 2, 3, 4)) + 1)
    return functional.cross_entropy(scores, label, torch.tensor([0.2, 1.0, 1.0])) + 1 - overlap[1:].mean()


def train(model: UNet, batches: Iterator[Any], steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for batch in itertools.islice(batches, steps):
        loss = loss_of(model(batch["image"]), batch["label"][:, 0].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def dice_of(model: UNet, held_out: list[Any]) -> list[float]:
    """Mean Dice of each part."""
    model.eval()
    scores = []
    for sample in Volumes(held_out, [Load(), Scale(), Resample(SIDE)]):
        found, label = model(sample["image"][None])[0].argmax(0), sample["label"][0]
        pairs = [(found == part, label == part) for part in range(1, CLASSES)]
        scores.append([float(2 * (a & b).sum() / (a.sum() + b.sum()).clamp(min=1)) for a, b in pairs])
    return [float(score) for score in np.mean(scores, axis=0)]


# -- data -------------------------------------------------------------------------------------------------------------


@contextmanager
def loader_of(who: str, pairs: list[Any], seed: int) -> Iterator[Any]:
    """Batches of `pairs` for one epoch after the other, through the Smart Cache or without a cache."""
    fixed, random = [Load(), Scale(), Resample(SIDE), Pad(MARGIN)], [RandomCrop(SIDE), RandomNoise()]
    common: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": 1, "persistent_workers": True}
    if who == "none":
        yield torch.utils.data.DataLoader(Volumes(pairs, fixed + random), drop_last=True, **common)
        return
    steps = sf.Compose([*fixed, *map(sf.mark_random, random)])
    with (
        sf.SmartCacheDataset(pairs, steps, cache_num=SIZE, replace_rate=RATE, seed=seed) as data,
        sf.DataLoader(data, drop_last=True, **common) as loader,
    ):
        yield loader


def child() -> None:
    given = json.loads(sys.argv[1])
    pairs = find_pairs(given["volumes"])
    held_out = pairs[::HELD_OUT]
    training = [pair for number, pair in enumerate(pairs) if number % HELD_OUT]
    torch.manual_seed(given["seed"])
    torch.set_num_threads(1)  # the other processor prepares samples
    model = UNet().to(memory_format=torch.channels_last_3d)
    start = time.perf_counter()
    with loader_of(given["who"], training, given["seed"]) as loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        train(model, batches, given["steps"])
        epochs = given["steps"] / len(loader)
    seconds = time.perf_counter() - start
    parts = dice_of(model, held_out)
    result = {"dice": statistics.mean(parts), "parts": parts, "seconds": seconds, "epochs": epochs}
    emit(result, stallfree=version("stallfree"), torch=torch.__version__, nibabel=version("nibabel"))


if __name__ == "__main__":
    child()
