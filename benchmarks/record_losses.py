"""Record the loss of every sample in every epoch of a real training, for `importance_counts`.

    python benchmarks/record_losses.py --data CIFAR10_AS_JPEG --epochs 30 --seed 0 --out losses.npz

A small residual network (`small_resnet.py`) is trained on CIFAR-10 with the full plan, on a GPU if there is one. The
loss is the one that the step computed: of the augmented picture, before the weights changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `benchmarks` is found when this file is started

from benchmarks.harness import BenchmarkError, machine, say
from benchmarks.small_resnet import Array, Batch, Data, accuracy, best_device, data, train
from stallfree.datasets.epoch_source import make_plan

BATCH = 128
_MOST = float(np.finfo(np.float16).max)


def record(data: Data, epochs: int, seed: int) -> tuple[Array, float]:
    """The losses, float16 [epochs, samples], and the accuracy on the test pictures in percent."""
    count = len(data)
    losses = np.full((epochs, count), np.nan, np.float16)
    epoch = 0

    def batches() -> Iterator[Batch]:
        nonlocal epoch
        for epoch in range(epochs):
            start = time.perf_counter()
            ids = make_plan(count, shuffle=True, seed=seed, epoch=epoch).ids
            for at in range(0, count, BATCH):
                yield ids[at : at + BATCH], None
            mean = float(losses[epoch].mean(dtype=np.float64))
            say(f"  epoch {epoch + 1}: mean loss {mean:.4f}, {time.perf_counter() - start:.1f} s")

    def keep(ids: Array, found: torch.Tensor) -> None:
        losses[epoch, ids] = found.clamp(max=_MOST).cpu().numpy()

    net = train(data, batches(), total_samples=epochs * count, seed=seed, on_step=keep)
    return losses, accuracy(net, data)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-10 as JPEG files: train/CLASS/*.jpg, test/...")
    parser.add_argument("--out", type=Path, required=True, help="the file (.npz) to write")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of torch on the CPU; as many as torch likes without it")
    parser.add_argument("--keep", type=Path, help="a file (.npz) for the decoded pictures, to be read the next time")
    given = parser.parse_args()
    if given.epochs < 1:
        parser.error(f"--epochs {given.epochs}: give 1 or more")
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        pictures = data(given.data, keep=given.keep)
    except BenchmarkError as error:
        say(str(error))
        return 2
    losses, top1 = record(pictures, given.epochs, given.seed)
    about = {
        "data": "CIFAR-10, JPEG files",
        "network": "small_resnet.Net, 78,042 weights",
        "epochs": given.epochs,
        "seed": given.seed,
        "batch": BATCH,
        "top1_percent": round(top1, 2),
        "device": str(best_device()),
        "torch": torch.__version__,
        "machine": machine(),
    }
    np.savez_compressed(given.out, losses=losses, about=np.array(json.dumps(about)))
    say(f"top-1 {top1:.2f}%; {given.out}: losses of {losses.shape[1]:,} samples in {losses.shape[0]} epochs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
