"""Data and transforms for the tests of the Smart Cache, importable by processes that tests start."""

import time
from collections.abc import Iterable
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
import torch

from children import until as until
from stallfree import Compose
from stallfree.sources.mapped import BaseSource


class Rows(BaseSource):
    """Sample `id` is eight times the number `id`, and `id`; those of `bad` cannot be read.

    Until the file `gate` exists, processes that this one starts wait in `fetch`. Each fetch adds its id to `log`.
    """

    def __init__(self, samples: int = 20, *, bad: Any = (), gate: Path | None = None, log: Path | None = None) -> None:
        self.samples, self.bad, self.gate, self.log = samples, frozenset(bad), gate, log
        self.pipeline = Compose([])

    def __len__(self) -> int:
        return self.samples

    def _record(self, id: int) -> Any:
        while self.gate is not None and is_started() and not self.gate.exists():
            time.sleep(0.001)
        if self.log is not None:
            with open(self.log, "a") as out:
                out.write(f"{id}\n")
        if id in self.bad:
            raise OSError("the file is cut short")
        return np.full(8, id, np.int32), id

    def _where(self, id: int) -> str:
        return f"/data/row-{id}.bin"

    def fingerprint(self) -> str:
        return f"Rows {self.samples} {sorted(self.bad)}"


def is_started() -> bool:
    """Whether this is a process of multiprocessing; that of the first look at a data set is none."""
    return parent_process() is not None


def noisy(sample: Any) -> Any:
    return (*sample, torch.rand(()).item())


def ids_of(batches: Iterable[Any]) -> list[int]:
    """The ids in order; each must come with its own numbers."""
    ids: list[int] = []
    for numbers, labels, *_ in batches:
        assert (numbers == labels[:, None]).all()
        ids += labels.tolist()
    return ids
