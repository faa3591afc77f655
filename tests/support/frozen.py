"""Reads epochs of random samples through caches, and names the samples that stay the same."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import stallfree as sf

LATE = 3
"""Epochs after which nothing may be frozen any more."""

EPOCHS = LATE + 4
_names = itertools.count()

Records = list[np.ndarray[Any, Any]]


def rows(count: int) -> Records:
    """Rows of 16 pixel values; those of sample `id` are a function of it, the first is `id + 1`."""
    records = [np.random.default_rng(id).integers(1, 255, 16).astype(np.float32) for id in range(count)]
    for id, record in enumerate(records):
        record[0] = id + 1
    return records


class Rows(Dataset[Any]):
    """Records in memory; each read returns a copy."""

    def __init__(self, records: Records, seconds: float = 0.0) -> None:
        self.records, self.seconds = records, seconds

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, id: int) -> Any:
        return self.read(id)

    def read(self, id: int) -> Any:
        if self.seconds:
            time.sleep(self.seconds)  # storage
        return self.records[id].copy()


class Transformed(Rows):
    """Applies the transform of an attribute."""

    def __init__(self, records: Records, seconds: float, transform: Callable[[Any], Any]) -> None:
        super().__init__(records, seconds)
        self.transform = transform

    def __getitem__(self, id: int) -> Any:
        return self.transform(self.read(id))


def augmented(records: Records, step: Callable[[Any], Any], seconds: float = 0.0) -> Rows:
    """A data set whose `__getitem__` calls `step`, which is in no attribute."""

    class Augmented(Rows):
        def __getitem__(self, id: int) -> Any:
            return step(self.read(id))

    return Augmented(records, seconds)


def sealed(sample: Any) -> Any:
    """`sample` as something that can be compared bit for bit."""
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return np.asarray(sample).tobytes()
    return tuple(map(sealed, sample)) if isinstance(sample, (list, tuple)) else sample


Epochs = list[list[Any]]
Way = Callable[[Records, Callable[[Any], Any], int], "Epochs | None"]


def read(loader: Any, epochs: int = EPOCHS) -> Epochs:
    """The samples of each epoch, by id."""
    return [[sealed(sample) for batch in loader for sample in batch] for _ in range(epochs)]


def _cached(dataset: Any, workers: int, **options: Any) -> Epochs | None:
    """The epochs of a `CachedDataset`; None if the data set was refused."""
    name = f"frozen-{os.getpid()}-{next(_names)}"
    try:
        cached = sf.CachedDataset(dataset, capacity="4MiB", name=name, **options)
    except sf.InputError:
        assert not options, "a step is not refused"
        return None
    with cached, _loader(cached, workers) as loader:
        return read(loader)


def _loader(dataset: Any, workers: int, **options: Any) -> Any:
    batch = max(8, len(dataset) // 32)
    return sf.DataLoader(
        dataset, batch, num_workers=workers, persistent_workers=workers > 0, collate_fn=list, seed=1, **options
    )


def as_step(records: Records, step: Callable[[Any], Any], workers: int) -> Epochs | None:
    return _cached(Rows(records), workers, transform=step)


def as_dataset(records: Records, step: Callable[[Any], Any], workers: int) -> Epochs | None:
    return _cached(augmented(records, step), workers)


def _auto(dataset: Any, workers: int) -> Epochs:
    with (
        contextlib.redirect_stderr(io.StringIO()),
        _loader(dataset, workers, cache="auto", capacity="4MiB") as loader,
    ):
        return read(loader)


def under_auto(records: Records, step: Callable[[Any], Any], workers: int) -> Epochs | None:
    return _auto(augmented(records, step, 0.0005), workers)


def cut_by_auto(records: Records, step: Callable[[Any], Any], workers: int) -> Epochs | None:
    return _auto(Transformed(records, 0.0005, step), workers)


WAYS: dict[str, Way] = {"step": as_step, "data set": as_dataset, "auto": under_auto, "auto, cut": cut_by_auto}


def frozen(epochs: Epochs | None, ids: Iterable[int]) -> list[int]:
    """Those of `ids` that are the same in all late epochs."""
    return [] if epochs is None else [id for id in ids if len({epoch[id] for epoch in epochs[LATE:]}) == 1]


def frozen_in(
    way: str, records: Records, step: Callable[[Any], Any], ids: Iterable[int], workers: int = 0
) -> list[int]:
    """Those of `ids` that the cache of a way freezes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return frozen(WAYS[way](records, step, workers), ids)
