"""Trains a ResNet-50 on photographs from slow storage, with torch's loader and with stallfree's in its place."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.contenders.device_gpu import plain
from benchmarks.contenders.resnet50 import make_resnet50
from stallfree.vision import native

Json = dict[str, Any]
Batches = Iterable[Any]
SIDE = 224


class Trainer:
    """A ResNet-50 on `device`, trained with batches of bytes (batch, height, width, 3) and labels."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model: Any = make_resnet50().to(device)
        self.model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, pictures: torch.Tensor, labels: torch.Tensor) -> None:
        """One step; does not wait for the device."""
        images = ((pictures.float() - 116) / 58).permute(0, 3, 1, 2)
        with torch.autocast(self.device, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def epoch(self, batches: Iterable[Any]) -> Json:
        """Seconds of an epoch: to the end of its first step, and in all."""
        self.finish()
        begun, first, steps = time.perf_counter(), 0.0, 0
        for pictures, labels in batches:
            self.step(pictures, labels)
            steps += 1
            if steps == 1:
                self.finish()
                first = time.perf_counter() - begun
        self.finish()
        return {"first": first, "seconds": time.perf_counter() - begun, "steps": steps}

    def finish(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    given = json.loads(sys.argv[1])
    device: str = given["device"]
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    paths = sorted(Path(given["photos"]).glob("*/*.jpg"))
    paths = (paths * -(-given["count"] // len(paths)))[: given["count"]]
    files = sf.FileDataset(paths, [id % 1000 for id in range(len(paths))], sf.DecodeRandomResizedCrop(SIDE, flip=0.5))
    options: Json = {
        "batch_size": given["batch"],
        "shuffle": True,
        "num_workers": given["workers"],
        "persistent_workers": True,
        "drop_last": True,
    }
    slow = sf.testing.ThrottledSource(files, bandwidth=given["bandwidth"])
    trainer = Trainer(device)
    standing = next(iter(torch.utils.data.DataLoader(files, batch_size=given["batch"])))  # type: ignore[arg-type]
    standing = [leaf.to(device) for leaf in standing]
    for _ in range(given["warm"]):
        trainer.step(*standing)
    steps = len(paths) // given["batch"]
    with (
        sf.CachedDataset(slow, capacity="6GiB", form="fetched", name="encoded") as encoded,
        sf.CachedDataset(slow, capacity="12GiB", form="prepared", name="decoded") as decoded,
        sf.DataLoader(encoded, device=device, **options) as from_encoded,
        sf.DataLoader(decoded, device=device, **options) as from_decoded,
    ):
        warm: Batches = torch.utils.data.DataLoader(files, pin_memory=device == "cuda", **options)  # type: ignore[arg-type]
        theirs: Batches = torch.utils.data.DataLoader(slow, pin_memory=device == "cuda", **options)  # type: ignore[arg-type]

        def sent(batches: Iterable[Any]) -> Iterator[Any]:
            return plain(batches) if device == "cuda" else iter(batches)

        ways: dict[str, tuple[int, Callable[[], Iterable[Any]]]] = {
            "one batch that stays": (given["epochs"], lambda: [standing] * steps),
            "stallfree, encoded in the cache": (1 + given["epochs"], lambda: from_encoded),
            "stallfree, decoded in the cache": (1 + given["epochs"], lambda: from_decoded),
            "torch": (1, lambda: sent(theirs)),
            "torch, files in memory": (1 + given["epochs"], lambda: sent(warm)),
        }
        found = {name: [trainer.epoch(batches()) for _ in range(epochs)] for name, (epochs, batches) in ways.items()}
    name = torch.cuda.get_device_name() if device == "cuda" else "processor"
    result = {"found": found, "device": name, "native": native.library() is not None}
    emit(result, stallfree=version("stallfree"), torch=torch.__version__)


if __name__ == "__main__":
    main()
