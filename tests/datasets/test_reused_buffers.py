"""Steps and data sets that return the same buffer again and again, filled anew, as `out=` and `dst=` do."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import stallfree as sf

SAMPLES, WIDTH = 96, 50


class InOneArray:
    """Writes to one array, and gives what `wrap` makes of it."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self.out, self.wrap = np.empty(WIDTH, np.float32), wrap

    def __call__(self, row: Any) -> Any:
        return self.wrap(np.multiply(row, 1, out=self.out))


def shifted(value: Any) -> torch.Tensor:
    row = value[0] if isinstance(value, tuple) else value
    return torch.as_tensor(np.asarray(row) + np.float32(random.random() * 0.5))


class Rows(torch.utils.data.Dataset[Any]):
    """Row `id` is all `id`. It holds its transform in an attribute, and may return one buffer itself."""

    def __init__(self, transform: Callable[[Any], Any] | None = None, *, reuses: bool = False) -> None:
        self.transform, self.reuses, self.row = transform, reuses, np.empty(WIDTH, np.float32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, id: int) -> Any:
        row = self.row if self.reuses else np.empty(WIDTH, np.float32)
        row[:] = id
        return row if self.transform is None else self.transform(row)


STEPS: dict[str, Callable[[Any], Any]] = {"numpy": np.asarray, "torch": torch.from_numpy, "tuple": lambda out: (out, 1)}


@contextmanager
def loading(kind: str, step: Any) -> Iterator[Any]:
    """A loader of rows whose deterministic part reuses a buffer, with a cache of one kind."""
    steps = sf.Compose([step, sf.mark_random(shifted)])
    options: dict[str, Any] = {"batch_size": 8, "num_workers": 0}
    if kind == "auto":
        with sf.DataLoader(Rows(steps), cache="auto", **options) as loader:
            yield loader
    elif kind == "smart":
        with sf.SmartCacheDataset(Rows(), cache_num=32, replace_rate=0.25, transform=steps) as window:
            yield sf.DataLoader(window, **options)
    else:
        form = "fetched" if kind == "fetched" else "auto"
        data: Any = sf.cut(Rows(steps), "transform") if kind == "cut" else Rows(reuses=kind == "data set")
        with sf.CachedDataset(data, capacity="1MiB", form=form, transform=None if kind == "cut" else steps) as cached:
            own = kind != "torch's loader"
            yield (sf.DataLoader if own else torch.utils.data.DataLoader)(cached, **options)


KINDS = ["auto", "smart", "cut", "transform", "data set", "fetched", "torch's loader"]


@pytest.mark.parametrize(("kind", "step", "marked"), [
    *((kind, [*STEPS][number % 3], number % 2 == 0) for number, kind in enumerate(KINDS)), ("transform", "torch", True),
])  # fmt: skip
def test_each_sample_keeps_its_values(kind: str, step: str, marked: bool) -> None:
    made = InOneArray(STEPS[step])
    with loading(kind, sf.mark_deterministic(made) if marked else made) as loader:
        for _ in range(3):
            seen = []
            for batch in loader:
                rows = batch.floor()
                assert (rows == rows[:, :1]).all()
                seen += rows[:, 0].int().tolist()
            assert len(set(seen)) == len(seen)
            if kind != "smart":
                assert seen == list(range(SAMPLES))
