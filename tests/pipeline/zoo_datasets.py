"""Data sets whose `__getitem__` augments, and some that do not."""

from __future__ import annotations

import pathlib
import random as pyrandom
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, TensorDataset
from zoo_entry import COUNT, many, random_entry, rows, steady_entry, unchanged


class Stored(Dataset[Any]):
    """Records in memory, of which each reading gives a copy; `change` is what a subclass does to it."""

    def __init__(self, records: list[Any] | None = None) -> None:
        self.records = rows() if records is None else records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, id: int) -> Any:
        return self.change(id, self.records[id].copy())

    def change(self, id: int, x: Any) -> Any:
        return x


@random_entry(None, draws=lambda id: id % 4 == 2)
def data_set_that_crops_some() -> Any:
    class Cropped(Stored):
        def change(self, id: int, x: Any) -> Any:
            return np.random.permutation(x)[:32] if id % 4 == 2 else x[:32]

    return Cropped()


@random_entry(None, draws=lambda id: id % 3 == 1)
def data_set_with_transform_for_some() -> Any:
    class Transformed(Stored):
        def __init__(self, transform: Any) -> None:
            super().__init__()
            self.transform = transform

        def change(self, id: int, x: Any) -> Any:
            return self.transform(x) if id % 3 == 1 else x

    return Transformed(lambda x: x + np.random.default_rng().normal())


@random_entry(None, base=unchanged)
def data_set_with_rare_draws() -> Any:
    class Rare(Stored):
        def change(self, id: int, x: Any) -> Any:
            return x + np.float32(pyrandom.random()) if pyrandom.random() < 0.01 else x

    return Rare(many())


@random_entry(None, draws=lambda id: id >= COUNT // 2)
def data_set_of_two_parts() -> Any:
    class Noisy(Stored):
        def change(self, id: int, x: Any) -> Any:
            return x + np.random.normal()

    half = rows()[: COUNT // 2]
    return ConcatDataset([Stored(half), Noisy(half)])


@random_entry(None, draws=lambda id: id == 5)
def data_set_with_the_clock() -> Any:
    class Stamped(Stored):
        def change(self, id: int, x: Any) -> Any:
            return x, time.time() if id == 5 else 0.0

    return Stamped()


steady_entry(None)(lambda: Stored(), "data_set_in_memory")
steady_entry(None)(
    lambda: TensorDataset(torch.from_numpy(np.stack(rows())), torch.arange(COUNT)), "data_set_of_tensors"
)


@steady_entry(None)
def data_set_of_files() -> Any:
    class Files(Dataset[Any]):
        def __init__(self) -> None:
            self.folder = tempfile.TemporaryDirectory()
            self.files = [pathlib.Path(self.folder.name) / f"{id}.npy" for id in range(COUNT)]
            for file, row in zip(self.files, rows(), strict=True):
                np.save(file, row)

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, id: int) -> Any:
            return np.load(self.files[id])

    return Files()
