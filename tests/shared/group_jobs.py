"""Data of the jobs of a group, for the tests of `SharedLoader`, and what each batch must be."""

import os
import random
import struct
import time
from collections.abc import Iterable
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import stallfree as sf
from loader_data import checksum, pixels
from stallfree.pipeline.randomness import Randomness

SAMPLES, BATCH = 104, 4
BATCHES = SAMPLES // BATCH
SEED, GROUP = 3, "team"
_DECODE = struct.Struct("<II")


def noisy_pixels(id: int) -> torch.Tensor:
    return pixels(id).float() + torch.rand(()) + random.random()


class Pictures:
    """A data set that logs each decode (process, id) to a file; sample `bad` cannot be read."""

    def __init__(self, book: Path, count: int = SAMPLES, bad: int = -1, seconds: float = 0.0) -> None:
        self.book, self.count, self.bad, self.seconds = book, count, bad, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        if id == self.bad:
            raise ValueError(f"no picture {id}")
        book = os.open(self.book, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(book, _DECODE.pack(os.getpid(), id))
        os.close(book)
        time.sleep(self.seconds)
        return noisy_pixels(id), id

    def decodes(self) -> list[int]:
        return [id for _, id in _DECODE.iter_unpack(self.book.read_bytes())] if self.book.exists() else []


def loader(dataset: Any, **changes: Any) -> sf.SharedLoader[Any]:
    given: dict[str, Any] = {"group": GROUP, "batch_size": BATCH, "shuffle": True, "seed": SEED, "with_ids": True}
    return sf.SharedLoader(dataset, **given | {"multiprocessing_context": "fork"} | changes)


@lru_cache(maxsize=100_000)
def expected(epoch: int, id: int, seed: int = SEED) -> int:
    """Return the checksum of picture `id` in `epoch`, computed without a loader."""
    with Randomness(noisy_pixels) as randomness:
        randomness.seed(seed, epoch, id)
        return checksum(noisy_pixels(id))


class Taken(NamedTuple):
    """A batch that a job received: the group's epoch, the ids and their checksums."""

    epoch: int
    ids: list[int]
    sums: list[int]


class Group:
    """Makes the loaders of a group, whose data set logs its decodes."""

    def __init__(self, folder: Path) -> None:
        self.dataset, self.opened = Pictures(folder / "decodes"), ExitStack()

    def job(self, **changes: Any) -> sf.SharedLoader[Any]:
        return self.opened.enter_context(loader(changes.pop("dataset", self.dataset), **changes))


def taken(job: sf.SharedLoader[Any], batch: sf.Batch) -> Taken:
    images, labels = batch.data
    ids = batch.ids.tolist()
    assert labels.tolist() == ids
    return Taken(job.epoch, ids, [checksum(image) for image in images])


def flat(batches: Iterable[Taken]) -> list[int]:
    return [id for batch in batches for id in batch.ids]


def ids_of(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def right(batches: Iterable[Taken], ids: Iterable[int] = range(SAMPLES)) -> int:
    """Assert that the batches are one epoch with each of `ids` once and correct; returns the group's epoch."""
    batches = list(batches)
    (epoch,) = {batch.epoch for batch in batches}
    assert sorted(flat(batches)) == sorted(ids)
    for batch in batches:
        assert batch.sums == [expected(epoch, id) for id in batch.ids]
    return epoch


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """Return its living children, without those that other tests share: the servers of `multiprocessing`, `warm.py`."""
    return [
        child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE
        and not any(part.startswith("from multiprocessing.") or part.endswith("warm.py") for part in child.cmdline())
    ]  # fmt: skip
