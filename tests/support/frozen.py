"""Reads epochs of random samples through caches, and names the samples that stay the same."""

import contextlib
import copy
import io
import itertools
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import stallfree as sf

LATE = 3
"""Epochs after which nothing may be frozen any more."""

EPOCHS = LATE + 4
_names = itertools.count()

Step = Callable[[Any], Any]
Epochs = list[list[Any]]
Way = Callable[[Any, "Step | None", int], "Epochs | None"]
"""Reads a data set, whose samples go through a step, with so many workers. Returns None for one that is refused."""


def rows(count: int) -> list[Any]:
    """Rows of 16 pixel values; those of sample `id` are a function of it, the first is `id + 1`."""
    records = [np.random.default_rng(id).integers(1, 255, 16).astype(np.float32) for id in range(count)]
    for id, record in enumerate(records):
        record[0] = id + 1
    return records


class Rows(Dataset[Any]):
    """Records in memory; each read returns a copy."""

    def __init__(self, records: Sequence[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, id: int) -> Any:
        return copy.deepcopy(self.records[id])


class Transformed(Dataset[Any]):
    """Applies the transform of an attribute to what slow storage holds."""

    def __init__(self, data: Any, transform: Step) -> None:
        self.data, self.transform = data, transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, id: int) -> Any:
        time.sleep(0.0005)
        return self.transform(self.data[id])


def augmented(data: Any, step: Step | None, seconds: float = 0.0) -> Any:
    """A data set whose `__getitem__` calls `step`, which is in no attribute."""

    class Augmented(Rows):
        def __getitem__(self, id: int) -> Any:
            if seconds:
                time.sleep(seconds)
            return step(data[id]) if step is not None else data[id]

    return data if step is None and not seconds else Augmented(data)


def sealed(sample: Any) -> Any:
    """`sample` as something that can be compared bit for bit."""
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        array = np.asarray(sample)
        return str(array.dtype), array.shape, array.tobytes()
    if isinstance(sample, (list, tuple)):
        return tuple(map(sealed, sample))
    if isinstance(sample, dict):
        return tuple((key, sealed(value)) for key, value in sorted(sample.items()))
    return pickle.dumps(sample) if isinstance(sample, float) else sample


def read(loader: Any) -> Epochs:
    return [[sealed(sample) for batch in loader for sample in batch] for _ in range(EPOCHS)]


def unique() -> str:
    return f"frozen-{os.getpid()}-{next(_names)}"


def loader(dataset: Any, workers: int, **options: Any) -> Any:
    options |= {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": list, "seed": 1}
    return sf.DataLoader(dataset, max(8, len(dataset) // 32), **options)


def cached(dataset: Any, workers: int, make: Callable[[Any, int], Any] = loader, **options: Any) -> Epochs | None:
    """The epochs of a `CachedDataset`, by a loader of it; None if the data set was refused."""
    try:
        cache = sf.CachedDataset(dataset, capacity="8MiB", name=unique(), **options)
    except sf.InputError:
        assert options.get("transform") is None, "a step is not refused"
        return None
    with cache, contextlib.ExitStack() as stack:
        batches = make(cache, workers)
        if hasattr(batches, "__enter__"):
            stack.enter_context(batches)
        return read(batches)


def under_auto(dataset: Any, workers: int) -> Epochs:
    with contextlib.redirect_stderr(io.StringIO()), loader(dataset, workers, cache="auto", capacity="8MiB") as batches:
        return read(batches)


WAYS: dict[str, Way] = {
    "step": lambda data, step, workers: cached(data, workers, transform=step),
    "data set": lambda data, step, workers: cached(augmented(data, step), workers),
    "auto": lambda data, step, workers: under_auto(augmented(data, step, 0.0005), workers),
    "auto, cut": lambda data, step, workers: under_auto(Transformed(data, step or _same), workers),
}


def _same(sample: Any) -> Any:
    return sample


def frozen(epochs: Epochs | None, ids: Iterable[int]) -> list[int]:
    """Those of `ids` that are the same in all late epochs."""
    return [] if epochs is None else [id for id in ids if len({epoch[id] for epoch in epochs[LATE:]}) == 1]


def frozen_in(way: str, records: Sequence[Any], step: Step, ids: Iterable[int], workers: int = 0) -> list[int]:
    """Those of `ids` that the cache of a way freezes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return frozen(WAYS[way](Rows(records), step, workers), ids)
