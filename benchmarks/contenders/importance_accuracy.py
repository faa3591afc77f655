"""One training on CIFAR-10 under a plan: the accuracy, and the storage operations that it would have cost.

The plans, their serving and the decisions of the cache are the library's own; the samples lie in memory, and an
operation is a sample that is asked for and not resident.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from benchmarks import small_resnet
from benchmarks.contender import emit
from benchmarks.importance_policies import CountedCache
from stallfree import ImportanceSampler
from stallfree.importance.epoch import Serving
from stallfree.importance.plans import generator

Array = npt.NDArray[Any]

BATCH = 128


class Training:
    """The batches of a whole training, one epoch drawn after the other."""

    def __init__(self, cache: CountedCache, sampler: ImportanceSampler, epochs: int) -> None:
        self.cache, self.sampler, self.epochs = cache, sampler, epochs
        self.served = self.operations = 0

    def batches(self) -> Iterator[tuple[Array, Array]]:
        for epoch in range(self.epochs):
            begun = self.sampler.begin(epoch, BATCH, drop_last=True)
            batches: Any = begun.batches
            if self.sampler.on_miss != "fetch":
                rng = generator(self.sampler.seed, epoch, 3)
                batches = Serving(batches, begun.draw.low, self.cache, self.sampler.on_miss, rng)
            for ids in batches:
                self.operations += self.cache.use(ids)
                self.served += len(ids)
                yield ids, begun.served(ids).numpy()
            begun.end()


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    data = small_resnet.data(Path(given["data"]), keep=Path(given["keep"]))
    if given.get("first"):
        data = data.first(given["first"])
    count = len(data)
    with tempfile.TemporaryDirectory() as folder:
        cache = CountedCache(count, round(given["cache"] * count), given["policy"], Path(folder))
        sampler = ImportanceSampler(count, plan=given["plan"], cache=cache, seed=given["seed"], **given["sampler"])
        training = Training(cache, sampler, given["epochs"])
        started = time.monotonic()
        net = small_resnet.train(
            data,
            training.batches(),
            total_samples=given["served"] * count,
            seed=given["seed"],
            on_step=sampler.update,
        )
        emit(
            {
                "accuracy": small_resnet.accuracy(net, data),
                "operations": training.operations / count,
                "served": training.served / count,
                "seconds": time.monotonic() - started,
            },
            stallfree=version("stallfree"),
            torch=torch.__version__,
        )


if __name__ == "__main__":
    main()
