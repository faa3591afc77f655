"""K processes that take the same batches and look at them or read them: how fast do they go together?

Needs the standard library, NumPy and torch only, because it also runs in the environment of a peer.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.contender import Task, load_samples
from benchmarks.shared_team import Meet, Team

PLANES = (3, 224, 224)
USES = ("view", "read")
"""View: nothing in the batch is touched. Read: it is copied into a standing buffer of the consumer."""


class Side(Protocol):
    """One way for batches to get to consumers."""

    def open(self, number: int) -> AbstractContextManager[Callable[[], Iterable[Any]]]:
        """In the process of consumer `number`: what starts an epoch of pairs of pictures and labels."""


def load_planes(task: Task) -> torch.Tensor:
    """The pictures of `task` as one tensor (samples, 3, 224, 224) in shared memory."""
    images, _ = load_samples(task)
    planes = torch.empty((task.samples, *PLANES), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    planes.numpy()[:] = images.reshape(task.samples, *PLANES)
    return planes


def orders(task: Task) -> Iterator[list[torch.Tensor]]:
    """The ids of each batch of one epoch after the other, another random order each time."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(task.samples, generator=generator)
        yield list(order.split(task.batch))


def run_consumers(side: Side, count: int, task: Task) -> dict[str, Any]:
    """Batches/s of each of `count` consumers that go together, for each use, and samples/s of those that view.

    The first epoch is not timed: it tells how many epochs the others should have.
    """
    context = get_context("fork")
    epochs, warm = context.Value("l", 1), context.Array("d", count)
    found: dict[str, Any] = {}
    with Team(count, _consume, side, epochs, warm) as team:
        team.meet()
        team.meet()
        rate = min(warm[:])
        for _ in USES:
            epochs.value = max(1, math.ceil(task.seconds * rate * task.batch / task.samples))
            team.meet()
            team.meet()
        each = team.results()
    for use in USES:
        found[use] = sum(rates[use] for rates in each) / count
    return found | {"rates": [found["view"] * task.batch], "each": each}


def _consume(number: int, meet: Meet, side: Side, epochs: Any, warm: Any) -> dict[str, float]:
    torch.set_num_threads(1)
    found = {}
    with side.open(number) as epoch:
        first = iter(epoch())
        meet()  # all are there before anyone takes a batch
        begun = time.perf_counter()
        warm[number] = sum(1 for _batch in first) / (time.perf_counter() - begun)
        meet()
        for use in USES:
            meet()
            begun, batches = time.perf_counter(), 0
            standing = None
            for _ in range(epochs.value):
                for pictures, _labels in epoch():
                    if use == "read":
                        if standing is None:
                            standing = np.empty(tuple(pictures.shape), np.uint8)
                        np.copyto(standing, pictures.numpy())
                    batches += 1
            found[use] = batches / (time.perf_counter() - begun)
            meet()
    return found


@contextmanager
def producing(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """A process that runs `target(*arguments)` meanwhile and is killed afterwards."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            target(*arguments)
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
