"""What batches have to be: those of torch's loader, with the generators seeded for each sample as stallfree does."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from stallfree.datasets.epoch_source import make_plan
from stallfree.pipeline.randomness import Randomness


class Seeded(torch.utils.data.Dataset[Any]):
    """`dataset`, whose samples draw from generators that (seed, epoch, id) decide. Nothing is cached or recorded.

    torch seeds its generators per worker, so what a sample draws depends on the samples before it. stallfree seeds
    them per sample. The two can be compared only if both are seeded alike, which this does for torch.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0
        self.randomness = Randomness(dataset.__getitem__)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, id: int) -> Any:
        with self.randomness:
            self.randomness.seed(self.seed, self.epoch, id)
            return self.dataset[id]


def torch_epochs(dataset: Any, epochs: int, *, seed: int, **options: Any) -> Iterator[list[str]]:
    """The digests of the batches of some epochs by torch's loader, in the order of stallfree's.

    That is the order of `sf.DataLoader(dataset, shuffle=True, seed=seed)`. Compare only loaders that both have workers:
    in these, torch computes with one thread, and sums of several threads differ in their last bits.
    """
    seeded = Seeded(dataset, seed)
    for epoch in range(epochs):
        seeded.epoch = epoch
        order = make_plan(len(seeded), shuffle=True, seed=seed, epoch=epoch).ids.tolist()
        yield list(map(digest, torch.utils.data.DataLoader(seeded, sampler=order, **options)))


def digest(value: Any) -> str:
    """A hash of all types, shapes and bytes in a batch."""
    state = hashlib.sha256()
    _add(value, state)
    return state.hexdigest()


def _add(value: Any, state: Any) -> None:
    state.update(type(value).__qualname__.encode())
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        state.update(value.detach().as_subclass(torch.Tensor).contiguous().numpy().tobytes())
        _add({**getattr(value, "meta", {})}, state)  # of MONAI's MetaTensor
    elif isinstance(value, np.ndarray) and value.dtype != object:
        state.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            state.update(repr(key).encode())
            _add(value[key], state)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(item, state)
    else:
        state.update(repr(value).encode())
