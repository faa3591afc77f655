"""stallfree's loader and torch's over data sets of everyday shapes, without a cache, epoch by epoch in turns."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import stallfree as sf
from benchmarks.contender import emit

BATCH = 64


class Made(torch.utils.data.Dataset[Any]):
    """Samples that are in memory, made by `sample(id)`."""

    def __init__(self, count: int, shape: str) -> None:
        self.count, self.shape = count, shape
        rng = np.random.default_rng(0)
        self.floats = torch.from_numpy(rng.random((8, 3, 224, 224), np.float32))
        self.large = rng.integers(0, 255, (8, 256 << 10), np.uint8)
        self.ten = torch.from_numpy(rng.random((count, 10, 4), np.float32))
        self.lengths = rng.integers(5, 200, count)
        self.words = torch.from_numpy(rng.integers(0, 30_000, (200,)))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> Any:
        if self.shape == "tuples":
            return self.ten[id, 0], id
        if self.shape == "dicts":
            return {f"field_{at}": self.ten[id, at] for at in range(10)}
        if self.shape == "lengths":
            return self.words[: self.lengths[id]], id
        if self.shape == "strings":
            return f"sample number {id}"
        if self.shape == "floats":
            return self.floats[id % 8], id
        return self.large[id % 8], id


def pad(samples: list[Any]) -> Any:
    """The usual `collate_fn` for sequences."""
    return pad_sequence([tokens for tokens, _ in samples], batch_first=True), torch.tensor([id for _, id in samples])


def epoch(loader: Any) -> tuple[float, float, int]:
    """Seconds to the first batch, of the whole epoch, and how many batches there were."""
    began, first, batches = time.perf_counter(), 0.0, 0
    for _ in loader:
        if not batches:
            first = time.perf_counter() - began
        batches += 1
    return first, time.perf_counter() - began, batches


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    data = Made(given["samples"], given["shape"])
    workers = given["workers"]
    common: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": workers}
    common |= {"persistent_workers": workers > 0, "collate_fn": pad if given["shape"] == "lengths" else None}
    loaders = {"torch": torch.utils.data.DataLoader(data, **common), "stallfree": sf.DataLoader(data, **common)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    for turn in range(given["epochs"] + 1):
        for name in sorted(loaders, reverse=turn % 2 == 1):
            first, seconds, batches = epoch(loaders[name])
            assert batches == -(-given["samples"] // BATCH)
            if turn:  # the first epoch starts the workers
                found[name].append((first, seconds))
    emit({"found": found, "versions": {"torch": version("torch")}})


if __name__ == "__main__":
    main()
