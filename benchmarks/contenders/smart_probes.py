"""The probes of `smart_probes.py` against stallfree's Smart Cache, under its own loader or torch's."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import torch

import stallfree as sf
from benchmarks.smart_probes import BATCH, SIZE, serve


@sf.mark_random
def draw(sample: Any) -> Any:
    return {**sample, "draw": random.random()}


class Stallfree:
    """stallfree's side."""

    def __init__(self, loader: str) -> None:
        self.loader = loader

    def make(self, items: list[Any], read: Callable[[Any], Any], *, rate: float) -> Any:
        steps = sf.Compose([sf.mark_deterministic(read), draw])
        # Epochs of the probes take no time: but for the probe of late ones, replacements are waited for.
        late = "partial" if getattr(read, "slow", SIZE + 1) <= SIZE else "wait"
        return sf.SmartCacheDataset(items, steps, cache_num=SIZE, replace_rate=rate, shuffle=False, on_late=late)

    def load(self, data: Any, workers: int, **more: Any) -> Iterable[Any]:
        make = sf.DataLoader if self.loader == "stallfree" else torch.utils.data.DataLoader
        return make(data, batch_size=BATCH, shuffle=True, num_workers=workers, **more)

    def move(self, data: Any) -> None:
        """Nothing: the loader says when an epoch begins."""

    def keeper(self, data: Any, loader: Any) -> Any:
        return loader if self.loader == "stallfree" else data


if __name__ == "__main__":
    serve(Stallfree(json.loads(sys.argv[1])["loader"]), stallfree=version("stallfree"), torch=torch.__version__)
