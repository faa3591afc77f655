"""TensorSocket: a producer around an iterable, and consumers, on four free ports."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors are pickled by name
from tensorsocket import TensorConsumer, TensorProducer
from tensorsocket.producer import pack

from benchmarks.consumers import PLANES, load_planes, run_consumers

TOGETHER = 2
"""Its `producer_batch_size`: with 1 no second batch comes; its own packing is the slower the larger it is."""
LENGTHS = {False: 24, True: 400}
"""Batches of what it calls an epoch. When one takes half a second or less, it now and then stands still."""


class Batches:
    """Gathers each batch into one of some standing buffers, with as little work as possible."""

    def __init__(self, planes: torch.Tensor, batch: int, length: int) -> None:
        self.planes, self.batch, self.length = planes, batch, length
        self.buffers = itertools.cycle([torch.empty((batch, *PLANES), dtype=torch.uint8) for _ in range(20)])

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.length):
            ids = torch.randperm(len(self.planes))[: self.batch]
            buffer = next(self.buffers)
            torch.index_select(self.planes, 0, ids, out=buffer)
            yield buffer, ids


def batches(folder: str, batch: int, consumers: int, by_name: bool, seconds: float) -> dict[str, Any]:
    """Batches/s of each consumer; `by_name` passes tensors through shared memory, through its arguments for that."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    planes, ports = load_planes(folder), _free_ports()

    @contextmanager
    def consume(number: int) -> Iterator[Callable[[], Any]]:
        options = {"unpack_fn": pickle.loads} if by_name else {}
        consumer = TensorConsumer(batch_size=batch, **ports, **options)
        yield lambda: consumer

    pid = os.fork()
    if pid == 0:
        try:
            _produce(Batches(planes, batch, LENGTHS[by_name]), ports, consumers, by_name)
        finally:
            os._exit(1)
    try:
        return run_consumers(consume, consumers, LENGTHS[by_name], seconds)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _produce(loader: Batches, ports: dict[str, Any], consumers: int, by_name: bool) -> None:
    torch.set_num_threads(1)
    producer = TensorProducer(
        loader, pack_fn=_pack_names if by_name else _pack_copies, producer_batch_size=TOGETHER, **ports
    )
    while len(producer.hb.consumers) < consumers:  # so that all begin with the first batch
        time.sleep(0.05)
    while True:
        for _ in producer:
            pass


def _pack_copies(data: tuple[torch.Tensor, ...]) -> Any:
    return pack(tuple(tensor.clone() for tensor in data))


def _pack_names(data: tuple[torch.Tensor, ...]) -> bytes:
    return bytes(ForkingPickler.dumps(data))


def _free_ports() -> dict[str, Any]:
    sockets = [socket.create_server(("", 0)) for _ in range(4)]
    first, second, *heart = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return {"port": first, "ack_port": second, "heart_ports": tuple(heart)}
