"""One setting of a cache on one workload: none, a form for all samples, a mixture, or what `cache="auto"` chooses."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.contenders.jpeg import MIN_EPOCHS


@sf.mark_deterministic
class Resize:
    """To a square of `side` pixels, then `blurs` blurs, which stand for prep that costs."""

    def __init__(self, side: int, blurs: int) -> None:
        self.side, self.blurs = side, blurs

    def __call__(self, pixels: np.ndarray[Any, Any]) -> torch.Tensor:
        picture = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        small = torch.nn.functional.interpolate(picture, (self.side, self.side), mode="bilinear", antialias=True)[0]
        for _ in range(self.blurs):
            small = torch.nn.functional.avg_pool2d(small.float(), 5, 1, 2).to(torch.uint8)
        return small.contiguous()


@sf.mark_random
class CropAndFlip:
    """A random square of 7/8 of the side, mirrored half the time."""

    def __call__(self, picture: torch.Tensor) -> torch.Tensor:
        side = picture.shape[1] * 7 // 8
        top, left = (random.randint(0, picture.shape[1] - side) for _ in range(2))
        square = picture[:, top : top + side, left : left + side]
        return (square.flip(2) if random.random() < 0.5 else square).contiguous()


def main() -> None:
    given = json.loads(sys.argv[1])
    steps = sf.Compose([Resize(given["side"], given["blurs"]), CropAndFlip()])
    source: Any = sf.ImageFolder(Path(given["photos"]), steps)
    if given["bandwidth"]:
        source = sf.testing.ThrottledSource(source, given["bandwidth"], 0.002)
    with ExitStack() as ending:
        loader, cached = _loader(source, given, ending)
        rates, chosen = _rates(loader, len(source), given), ""
        if given["form"] == "auto":
            chosen = loader.decision
            cached = loader.cached
        held = 0.0 if cached is None else cached.stats().resident_items / len(source)
    emit(
        {"rates": rates, "chosen": chosen, "held": held},
        stallfree=version("stallfree"),
        torch=torch.__version__,
        numpy=np.__version__,
    )


def _loader(source: Any, given: dict[str, Any], ending: ExitStack) -> tuple[Any, Any]:
    common = {"batch_size": given["batch"], "shuffle": True, "drop_last": True}
    if given["form"] == "auto":
        return ending.enter_context(sf.DataLoader(source, cache="auto", capacity=given["capacity"], **common)), None
    cached = None
    if given["form"] is not None:
        cached = ending.enter_context(sf.CachedDataset(source, capacity=given["capacity"], form=given["form"]))
    loader = sf.DataLoader(cached or source, num_workers=given["workers"], **common)
    return ending.enter_context(loader), cached


def _rates(loader: Any, samples: int, given: dict[str, Any]) -> list[float]:
    """Samples/s of each epoch but the first two: one fills the cache, in the other some samples move into it yet."""
    rates: list[float] = []
    spent = 0.0
    for epoch in itertools.count():
        start, batches = time.perf_counter(), 0
        for _batch in loader:
            time.sleep(given["step"] * given["batch"])
            batches += 1
        taken = time.perf_counter() - start
        if batches != samples // given["batch"]:
            raise AssertionError(f"{batches} batches instead of {samples // given['batch']}")
        if epoch > 1:
            rates.append(given["batch"] * batches / taken)
            spent += taken
        if len(rates) >= MIN_EPOCHS and spent > given["seconds"]:
            return rates


if __name__ == "__main__":
    main()
