"""TensorSocket: batches of 64 pictures for several consumers."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from benchmarks import shared_team
from benchmarks.contender import Task, emit, read_task
from benchmarks.peers.tensorsocket_side import COPIED, OWN, SHARED, Setting, free_ports, make_consumer, make_producer
from benchmarks.shared_consumers import PLANES, load_planes, orders, producing, run_consumers
from benchmarks.shared_team import TeamError

SETTINGS = {
    "own": [Setting(packing, 2) for packing in (OWN, COPIED)],
    "shared": [Setting(SHARED, together) for together in (2, 4, 8)],
}
"""With `producer_batch_size=1` no second batch comes; its own packing is the slower the larger it is."""
TRIES = 2
LENGTHS = {OWN: 24, COPIED: 24, SHARED: 400}


class Loader:
    """Gathers each batch into one of some standing buffers; as little work as can be.

    Args:
        length: batches of what it calls an epoch. When one takes half a second or less, its consumers and its producer
            now and then wait for one another for ever.
    """

    def __init__(self, task: Task, planes: torch.Tensor, length: int) -> None:
        self.task, self.planes, self.length = task, planes, length
        self.buffers = itertools.cycle([torch.empty((task.batch, *PLANES), dtype=torch.uint8) for _ in range(20)])
        self.batches = itertools.chain.from_iterable(orders(task))

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids in itertools.islice(self.batches, self.length):
            buffer = next(self.buffers)
            torch.index_select(self.planes, 0, ids, out=buffer)
            yield buffer, ids


class Side:
    """Its producer and its consumers."""

    def __init__(self, task: Task, planes: torch.Tensor, consumers: int, setting: Setting) -> None:
        self.task, self.planes, self.consumers, self.setting = task, planes, consumers, setting
        self.ports = free_ports()

    def produce(self) -> None:
        producer = make_producer(
            Loader(self.task, self.planes, LENGTHS[self.setting.packing]), self.ports, self.setting
        )
        while len(producer.hb.consumers) < self.consumers:  # so that all begin with the first batch
            time.sleep(0.05)
        while True:
            for _ in producer:
                pass

    @contextmanager
    def open(self, number: int) -> Iterator[Callable[[], Iterable[Any]]]:
        consumer = make_consumer(self.ports, self.setting, self.task.batch)
        yield lambda: consumer


def measure(task: Task, planes: torch.Tensor, consumers: int, setting: Setting) -> dict[str, Any]:
    """Begins anew when it stands still. Raises `TeamError` when it always does."""
    for number in range(1, TRIES + 1):
        side = Side(task, planes, consumers, setting)
        try:
            with producing(side.produce):
                return run_consumers(side, consumers, task) | {"tries": number}
        except TeamError as error:
            print(f"try {number}: {setting.name}: {error}", file=sys.stderr)
    raise TeamError(f"{setting.name} stood still {TRIES} times")


def tune(task: Task, planes: torch.Tensor, settings: list[Setting]) -> dict[str, float]:
    """Samples/s of each setting with one consumer."""
    tried = {}
    for setting in settings:
        try:
            tried[setting.name] = measure(task, planes, 1, setting)["rates"][0]
        except TeamError:
            tried[setting.name] = 0.0
    return tried


def main() -> None:
    given = json.loads(sys.argv[1])
    task = read_task()
    torch.set_num_threads(1)
    shared_team.PATIENCE = 15.0  # it stands still now and then
    planes = load_planes(task)
    settings = {setting.name: setting for setting in SETTINGS[given["packing"]]}
    if task.setting == "tune":
        tried = tune(task, planes, list(settings.values()))
        result: dict[str, Any] = {"tried": tried, "setting": max(tried, key=lambda name: tried[name])}
    else:
        result = measure(task, planes, given["consumers"], settings[task.setting])
    emit(
        result,
        tensorsocket=version("tensorsocket"),
        pyzmq=version("pyzmq"),
        torch=torch.__version__,
        numpy=np.__version__,
    )


if __name__ == "__main__":
    main()
