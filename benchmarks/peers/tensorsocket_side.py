"""TensorSocket as the benchmarks use it: a producer around an iterable, and consumers, on four free ports.

Of its own accord it pickles tensors that lie in main memory, one after the other into its socket. `SHARED` replaces
that, through the arguments that it has for it, by what torch's queues do: the tensor goes to shared memory and its name
over the socket. Its pool of buffers is used as on a GPU then.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors are pickled by name
from tensorsocket import TensorConsumer, TensorProducer
from tensorsocket.producer import pack

OWN, COPIED, SHARED = "its own packing", "its own packing, of copies", "shared memory"


@dataclass(frozen=True)
class Setting:
    """How it is set up.

    Attributes:
        packing: `OWN`; `COPIED`, which keeps it from sending all of a producer batch with each part of it; or `SHARED`.
        together: `producer_batch_size`, batches that are put together before they are sent.
    """

    packing: str
    together: int

    @property
    def name(self) -> str:
        return f"{self.packing}, producer_batch_size={self.together}"


def free_ports() -> list[int]:
    """Four ports that nobody listens on at this moment."""
    sockets = [socket.create_server(("", 0)) for _ in range(4)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _ports(ports: list[int]) -> dict[str, Any]:
    return {"port": ports[0], "ack_port": ports[1], "heart_ports": (ports[2], ports[3])}


def _share_by_name() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")


def _pack_copies(data: tuple[torch.Tensor, ...]) -> Any:
    return pack(tuple(tensor.clone() for tensor in data))


def _pack_names(data: tuple[torch.Tensor, ...]) -> bytes:
    return bytes(ForkingPickler.dumps(data))


def make_producer(loader: Iterable[Any], ports: list[int], setting: Setting) -> Any:
    """In the producing process. `loader` must have a length."""
    _share_by_name()
    packing: dict[str, Callable[..., Any]] = {OWN: pack, COPIED: _pack_copies, SHARED: _pack_names}
    return TensorProducer(
        loader, pack_fn=packing[setting.packing], producer_batch_size=setting.together, **_ports(ports)
    )


def make_consumer(ports: list[int], setting: Setting, batch_size: int) -> Any:
    """In a consuming process. Waits until there is a producer."""
    _share_by_name()
    unpacking = {"unpack_fn": pickle.loads} if setting.packing == SHARED else {}
    return TensorConsumer(batch_size=batch_size, **_ports(ports), **unpacking)
