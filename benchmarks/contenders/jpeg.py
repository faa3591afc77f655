"""JPEG files, decoded, cropped and flipped by workers: torch's loader on warm files, or stallfree's on its cache."""

from __future__ import annotations

import json
import statistics
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
        return self.change(self.decode(self.paths[index].read_bytes())), self.labels[index]


def main() -> None:
    given = json.loads(sys.argv[1])
    folder, batch, workers = Path(given["photos"]), given["batch"], given["workers"]
    torch_data = Files(folder)
    size = sum(len(path.read_bytes()) for path in torch_data.paths)  # warms the files, too
    loader: Iterable[Any]
    options: dict[str, Any] = {
        "batch_size": batch,
        "shuffle": True,
        "num_workers": workers,
        "persistent_workers": True,
        "drop_last": True,
    }
    if given["who"] == "torch":
        loader = torch.utils.data.DataLoader(torch_data, **options)
    else:
        source = sf.ImageFolder(folder, CropAndFlip())
        cached = sf.CachedDataset(source, capacity=2 * size + (64 << 20), form="fetched")
        loader = sf.DataLoader(cached, **options)
    batches = len(torch_data) // batch
    rates: list[float] = []
    for epoch in range(10_000):
        start = time.perf_counter()
        got = sum(1 for _batch in loader)
        taken = time.perf_counter() - start
        if got != batches:
            raise AssertionError(f"{got} batches instead of {batches}")
        if epoch > 0:  # the first fills the cache
            rates.append(batch * batches / taken)
        if len(rates) >= MIN_EPOCHS and sum(batch * batches / rate for rate in rates) > given["seconds"]:
            break
    result: dict[str, Any] = {"rates": rates, "median": statistics.median(rates)}
    if given["who"] != "torch":
        stats = cached.stats()
        if stats.resident_items != len(torch_data) or stats.storage_reads > len(torch_data) + 1:
            raise AssertionError(f"not all files stayed in the cache: {stats}")
        loader.close()  # type: ignore[attr-defined]
        cached.close()
    try:
        decoder = {"simplejpeg": version("simplejpeg")}
    except PackageNotFoundError:
        decoder = {"pillow": version("pillow")}
    emit(result, stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__, **decoder)


if __name__ == "__main__":
    main()
