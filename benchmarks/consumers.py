"""Several processes that take the same batches and look at them or read them, for `shared_batches`.

Needs NumPy and torch only, because it also runs in the environment of TensorSocket.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from benchmarks.processes import Meet, Team
from benchmarks.timing import load_noise_pictures

PLANES = (3, 224, 224)
MEETING_SECONDS = 60.0

Consume = Callable[[int], AbstractContextManager[Callable[[], Any]]]
"""In the process of a consumer, by its number: what starts an epoch of pairs of pictures and labels."""


def load_planes(folder: str) -> torch.Tensor:
    """Return the noise pictures as one tensor (samples, 3, 224, 224) in shared memory."""
    pictures = load_noise_pictures(folder, 224)
    planes = torch.empty((len(pictures), *PLANES), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    planes.numpy()[:] = pictures.reshape(len(pictures), *PLANES)
    return planes


def run_consumers(consume: Consume, count: int, batches: int, seconds: float) -> dict[str, Any]:
    """Return batches/s of each of `count` consumers that view, and that read, `batches` per epoch.

    The first epoch is not timed: it tells how many epochs the others should have.
    """
    warm = get_context("fork").Array("d", count)
    with Team(count, _consume, consume, warm, batches, seconds, patience=MEETING_SECONDS) as team:
        for _ in range(6):
            team.meet()
        rates = team.results()
    return {use: sum(each[use] for each in rates) / count for use in ("view", "read")}


def _consume(number: int, meet: Meet, consume: Consume, warm: Any, batches: int, seconds: float) -> dict[str, float]:
    torch.set_num_threads(1)
    rates = {}
    with consume(number) as epoch:
        first = iter(epoch())
        meet()  # all are there before anyone takes a batch
        begun = time.perf_counter()
        warm[number] = sum(1 for _batch in first) / (time.perf_counter() - begun)
        meet()
        epochs = max(1, math.ceil(seconds * min(warm[:]) / batches))
        for use in ("view", "read"):
            meet()
            begun, taken, standing = time.perf_counter(), 0, None
            for _ in range(epochs):
                for pictures, _labels in epoch():
                    if use == "read":
                        standing = np.empty(tuple(pictures.shape), np.uint8) if standing is None else standing
                        np.copyto(standing[: len(pictures)], pictures.numpy())
                    taken += 1
            rates[use] = taken / (time.perf_counter() - begun)
            meet()
    return rates
