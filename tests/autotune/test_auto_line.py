"""The line of `cache="auto"` promises no rate that the loader does not give."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

import stallfree as sf

COUNT = 200
RATE = re.compile(r"([\d][\d,.]*(?:e\+?\d+)?)/s")


class Stored(Dataset[Any]):
    """Small samples from storage that takes 1 ms for each."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> Any:
        time.sleep(0.001)
        return np.full(64, id, np.float32)


class Transformed(Stored):
    def __init__(self) -> None:
        self.transform = shifted

    def __getitem__(self, id: int) -> Any:
        return self.transform(super().__getitem__(id))


class InMemory(Stored):
    """No cache is faster than this one."""

    def __getitem__(self, id: int) -> Any:
        return np.full(64, id, np.float32)


class Augmented(Stored):
    """Random in `__getitem__`: nothing can be cached."""

    def __getitem__(self, id: int) -> Any:
        return super().__getitem__(id) + random.random()


def shifted(x: Any) -> Any:
    return x + random.random()


def reached(loader: Any) -> float:
    """Samples/s of the best one of the epochs after the first."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        assert sum(len(batch) for batch in loader) == COUNT
        seconds.append(time.perf_counter() - began)
    return COUNT / min(seconds[1:])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Stored, Transformed, InMemory, Augmented])
def test_rates_are_reached_within_a_factor_of_two(
    kind: type[Stored], workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with sf.DataLoader(kind(), 4, num_workers=workers, cache="auto", capacity="4MiB") as loader:
        rate = reached(loader)
        lines = loader.decision, *capfd.readouterr().err.splitlines()
    for line in lines:
        promised = [float(number.replace(",", "")) for number in RATE.findall(line)]
        assert not [number for number in promised if number > 2 * rate], f"{line!r}: {rate:,.0f}/s were reached"
