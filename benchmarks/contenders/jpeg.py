"""JPEG files, decoded, cropped and flipped by workers: torch's loader on warm files, or stallfree's on its cache."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import stallfree as sf
from benchmarks.contender import MIN_EPOCHS, emit
from benchmarks.photos import CropAndFlip


class Files(Dataset[tuple[torch.Tensor, int]]):
    """(picture, label) by index: read, decode, crop and flip, with the same decoder and transform as stallfree's."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.jpg"))
        classes = sorted({path.parent.name for path in self.paths})
        self.labels = [classes.index(path.parent.name) for path in self.paths]
        self.decode, self.change = sf.DecodeImage(), CropAndFlip()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.change(np.asarray(self.decode(self.paths[index].read_bytes()))), self.labels[index]


def main() -> None:
    given = json.loads(sys.argv[1])
    folder, batch, workers = Path(given["photos"]), given["batch"], given["workers"]
    torch_data = Files(folder)
    size = sum(len(path.read_bytes()) for path in torch_data.paths)  # warms the files, too
    options: dict[str, Any] = {
        "batch_size": batch,
        "shuffle": True,
        "num_workers": workers,
        "persistent_workers": True,
        "drop_last": True,
    }
    if given["who"] == "torch":
        rates = time_loader(torch.utils.data.DataLoader(torch_data, **options), len(torch_data) // batch, given)
    else:
        source = sf.ImageFolder(folder, CropAndFlip())
        with sf.CachedDataset(source, capacity=2 * size + (64 << 20), form="fetched") as cached:
            with sf.DataLoader(cached, **options) as loader:
                rates = time_loader(loader, len(torch_data) // batch, given)
            stats = cached.stats()
        if stats.resident_items != len(torch_data) or stats.storage_reads > len(torch_data) + 1:
            raise AssertionError(f"not all files stayed in the cache: {stats}")
    try:
        decoder = {"simplejpeg": version("simplejpeg")}
    except PackageNotFoundError:
        decoder = {"pillow": version("pillow")}
    emit({"rates": rates}, stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__, **decoder)


def time_loader(loader: Iterable[Any], batches: int, given: dict[str, Any]) -> list[float]:
    """Samples/s of each epoch but the first, which fills the cache."""
    rates: list[float] = []
    spent = 0.0
    for epoch in itertools.count():
        start = time.perf_counter()
        got = sum(1 for _batch in loader)
        taken = time.perf_counter() - start
        if got != batches:
            raise AssertionError(f"{got} batches instead of {batches}")
        if epoch > 0:
            rates.append(given["batch"] * batches / taken)
            spent += taken
        if len(rates) >= MIN_EPOCHS and spent > given["seconds"]:
            break
    return rates


if __name__ == "__main__":
    main()
