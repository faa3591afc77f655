"""The probes of `shared_probes.py` against stallfree's `SharedLoader`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

import stallfree as sf
from benchmarks.shared_probes import BATCH, Numbers, serve
from benchmarks.shared_team import family


class Stallfree:
    """stallfree's side."""

    by_hand = False

    def produce(self, consumers: int) -> None:
        """Nothing: the first consumer starts what prepares."""

    def open(self, **options: Any) -> Any:
        return sf.SharedLoader(Numbers(), group="probes", batch_size=BATCH, num_workers=2, **options)

    def close(self, loader: Any) -> None:
        loader.close()

    def producer(self, pids: list[int]) -> int:
        """The process below one of the consumers that has others below it."""
        below = [pid for consumer in pids for pid in family(consumer)[1:]]
        return next(pid for pid in below if len(family(pid)) > 1)


if __name__ == "__main__":
    serve(Stallfree(), stallfree=version("stallfree"), torch=torch.__version__)
