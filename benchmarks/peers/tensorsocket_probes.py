"""The probes of `shared_probes.py` against TensorSocket."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.peers.tensorsocket_side import OWN, SHARED, Setting, free_ports, make_consumer, make_producer
from benchmarks.shared_probes import BATCH, Numbers, serve


class TensorSocket:
    """TensorSocket's side. It has no choice of how to join, and none for laggards."""

    by_hand = True

    def __init__(self, packing: str) -> None:
        self.setting, self.ports = Setting(packing, 2), free_ports()

    def produce(self, consumers: int) -> None:
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=BATCH, num_workers=2)
        producer = make_producer(loader, self.ports, self.setting)
        while len(producer.hb.consumers) < consumers:
            time.sleep(0.05)
        while True:
            for _ in producer:
                pass

    def open(self) -> Any:
        return make_consumer(self.ports, self.setting, BATCH)

    def close(self, loader: Any) -> None:
        """It has no end."""

    def producer(self, pids: list[int]) -> int:
        raise NotImplementedError("it is started by hand")


if __name__ == "__main__":
    packing = {"own": OWN, "shared": SHARED}[json.loads(sys.argv[1])["packing"]]
    serve(TensorSocket(packing), tensorsocket=version("tensorsocket"), pyzmq=version("pyzmq"), torch=torch.__version__)
