"""The probes of `smart_probes.py` against MONAI's SmartCacheDataset, used as its documentation says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import torch
from monai.data import DataLoader, SmartCacheDataset
from monai.transforms import Compose, RandomizableTransform

from benchmarks.peers.monai_smart import Fixed
from benchmarks.smart_probes import BATCH, SIZE, serve


class Draw(RandomizableTransform):
    """Draws from its own random state, as MONAI wants it."""

    def __call__(self, data: Any) -> Any:
        return {**data, "draw": self.R.rand()}


class Monai:
    """MONAI's side."""

    def make(self, items: list[Any], read: Callable[[Any], Any], *, rate: float) -> Any:
        steps = Compose([Fixed(read), Draw()])
        data = SmartCacheDataset(items, steps, cache_num=SIZE, replace_rate=rate, shuffle=False, progress=False)
        data.start()
        return data

    def load(self, data: Any, workers: int, **more: Any) -> Iterable[Any]:
        return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers, **more)

    def move(self, data: Any) -> None:
        data.update_cache()

    def keeper(self, data: Any, loader: Any) -> Any:
        return data


if __name__ == "__main__":
    serve(Monai(), monai=version("monai"), torch=torch.__version__)
