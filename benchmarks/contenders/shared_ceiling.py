"""Batches of 64 pictures for several consumers: stallfree's shared loader, a queue of torch's, a bare ring, memcpy."""

from __future__ import annotations

import json
import mmap
import os
import select
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import Dataset

import stallfree as sf
from benchmarks.contender import Task, emit, read_task
from benchmarks.shared_consumers import PLANES, load_planes, orders, producing, run_consumers

Epoch = Callable[[], Iterable[Any]]
SLOTS = 8
AHEAD = 4
"""Batches that a queue may hold."""


class Planes(Dataset[tuple[torch.Tensor, int]]):
    """(picture, label) by index, out of one tensor in shared memory."""

    def __init__(self, planes: torch.Tensor) -> None:
        self.planes = planes

    def __len__(self) -> int:
        return len(self.planes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.planes[index], index


class Shared:
    """stallfree's `SharedLoader` over a cache that holds all."""

    def __init__(self, task: Task, planes: torch.Tensor) -> None:
        self.task, self.data = task, Planes(planes)

    def cached(self) -> sf.CachedDataset:
        room = 2 * self.task.samples * (planes_bytes() + 1024)
        return sf.CachedDataset(self.data, capacity=room, name="planes")

    @contextmanager
    def open(self, number: int) -> Iterator[Epoch]:
        with self.cached() as cached:
            options = {"batch_size": self.task.batch, "shuffle": True, "num_workers": self.task.workers}
            with sf.SharedLoader(cached, group="ceiling", **options) as loader:  # type: ignore[arg-type]
                yield lambda: loader


class Queue:
    """A queue per consumer and a fresh tensor in shared memory per batch, as torch's loader has it."""

    def __init__(self, task: Task, planes: torch.Tensor, consumers: int) -> None:
        self.task, self.planes = task, planes
        context = torch.multiprocessing.get_context("fork")
        self.queues = [context.Queue(AHEAD) for _ in range(consumers)]

    def produce(self) -> None:
        shape = (self.task.batch, *PLANES)
        for order in orders(self.task):
            for ids in order:
                storage = torch.UntypedStorage._new_shared(self.task.batch * planes_bytes())  # as default_collate does
                batch = torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)  # type: ignore[call-overload]
                torch.index_select(self.planes, 0, ids, out=batch)
                for queue in self.queues:
                    queue.put((batch, ids))

    @contextmanager
    def open(self, number: int) -> Iterator[Epoch]:
        def epoch() -> Iterator[Any]:
            for _ in range(self.task.samples // self.task.batch):
                yield self.queues[number].get()

        yield epoch


class Ring:
    """Standing slots that all map, and their numbers over pipes: as little as can be. Filled by memcpy or a gather."""

    def __init__(self, task: Task, planes: torch.Tensor, consumers: int, *, gather: bool) -> None:
        self.task, self.planes, self.gather = task, planes, gather
        shape = (task.batch, *PLANES)
        size = task.batch * planes_bytes()
        self.slots = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).view(shape) for _ in range(SLOTS)]
        self.down = [os.pipe() for _ in range(consumers)]
        self.up = os.pipe()

    def produce(self) -> None:
        holders, free = [0] * SLOTS, list(range(SLOTS))
        same = self.planes[: self.task.batch]
        for order in orders(self.task):
            for ids in order:
                while select.select([self.up[0]], [], [], 0 if free else None)[0]:  # the slot used last first
                    for slot in os.read(self.up[0], 4096):
                        holders[slot] -= 1
                        if not holders[slot]:
                            free.append(slot)
                slot = free.pop()
                if self.gather:
                    torch.index_select(self.planes, 0, ids, out=self.slots[slot])
                else:
                    self.slots[slot].copy_(same)
                holders[slot] = len(self.down)
                for _, pipe in self.down:
                    os.write(pipe, bytes([slot]))

    @contextmanager
    def open(self, number: int) -> Iterator[Epoch]:
        ready: list[int] = []

        def epoch() -> Iterator[Any]:
            for _ in range(self.task.samples // self.task.batch):
                while not ready:
                    ready.extend(os.read(self.down[number][0], 4096))
                slot = ready.pop(0)
                yield self.slots[slot], None
                os.write(self.up[1], bytes([slot]))

        yield epoch


def planes_bytes() -> int:
    """Bytes of one picture."""
    return int(np.prod(PLANES))


def memcpy(task: Task, planes: torch.Tensor) -> dict[str, Any]:
    """One thread that copies a batch into a standing buffer, over and over."""
    source = np.array(planes[: task.batch])
    standing, taken = np.zeros_like(source), []
    end = time.perf_counter() + task.seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        np.copyto(standing, source)
        taken.append(time.perf_counter() - begun)
    rate = 1 / statistics.median(taken)
    return {"view": rate, "read": rate, "rates": [rate * task.batch]}


def main() -> None:
    given = json.loads(sys.argv[1])
    task = read_task()
    who, consumers = given["who"], given["consumers"]
    torch.set_num_threads(1)
    planes = load_planes(task)
    if who == "memcpy":
        result = memcpy(task, planes)
    elif who == "shared":
        side = Shared(task, planes)
        with side.cached() as cached:
            for ids in next(orders(task)):
                cached.__getitems__(ids.tolist())  # fills the cache
            result = run_consumers(side, consumers, task)
    elif who == "queue":
        queue = Queue(task, planes, consumers)
        with producing(queue.produce):
            result = run_consumers(queue, consumers, task)
    else:
        ring = Ring(task, planes, consumers, gather=who == "gather")
        with producing(ring.produce):
            result = run_consumers(ring, consumers, task)
    emit(result, stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__)


if __name__ == "__main__":
    main()
