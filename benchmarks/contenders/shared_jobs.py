"""Several jobs over the same photographs: one shared loader, or each a loader of its own. The device is a sleep.

With `who` = "prep" it gives P: samples/s of two processes that run the pipeline on records in memory.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.part_rates import prep_rate
from benchmarks.photos import SIDE, Pixels
from benchmarks.shared_team import Meet, Team, bytes_below, family, shared_pss
from stallfree.ipc.folders import default_root

WORKERS = 2
BATCH = 32
CACHE = "photos"
"""Name of the cache that the jobs share."""


@dataclass(frozen=True)
class Task:
    """What the jobs do.

    Attributes:
        photos: folder of the pictures.
        ledger: file that grows by one byte per picture decoded.
        who: "shared": one `SharedLoader`; "torch": torch's loader in each job; "prep": no job, P.
        jobs: how many.
        device: G, samples/s of each job's device.
        epochs: that are timed; one before them is not.
        bandwidth: bytes/s of the storage that all jobs share; None: files in memory.
        capacity: share of the data that the cache of the host may hold.
        policy: of the cache.
    """

    photos: str
    ledger: str
    who: str
    jobs: int = 1
    device: float = math.inf
    epochs: int = 2
    bandwidth: float | None = None
    capacity: float = 1.5
    policy: str = "minio"


@sf.mark_random
class ResizedCrop:
    """8 to 100% of the picture, sides 3:4 to 4:3, scaled to 224 pixels, mirrored half the time. Notes each picture."""

    def __init__(self, ledger: str) -> None:
        self.ledger = ledger

    def __call__(self, pixels: Pixels) -> torch.Tensor:
        fd = os.open(self.ledger, os.O_WRONLY | os.O_APPEND)
        os.write(fd, b".")
        os.close(fd)
        height, width = pixels.shape[:2]
        area = height * width * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = min(width, round(math.sqrt(area * ratio))), min(height, round(math.sqrt(area / ratio)))
        left, top = random.randint(0, width - wide), random.randint(0, height - high)
        picture = Image.fromarray(pixels).resize(
            (SIDE, SIDE), Image.Resampling.BILINEAR, box=(left, top, left + wide, top + high)
        )
        if random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1)))


class Files(Dataset[tuple[torch.Tensor, int]]):
    """(picture, label) by index, for torch's loader, with the same decoder and transform."""

    def __init__(self, folder: sf.ImageFolder, change: ResizedCrop) -> None:
        self.samples = list(folder.samples)
        self.decode, self.change = sf.DecodeImage(), change

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        return self.change(np.asarray(self.decode(Path(path).read_bytes()))), label


def make_loader(task: Task, folder: sf.ImageFolder, cached: sf.CachedDataset | None) -> Any:
    """The loader of one job. Torch's reads files in memory as they are, and slow storage through the cache."""
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "drop_last": True}
    if task.who == "shared":
        return sf.SharedLoader(cached, group="jobs", num_workers=WORKERS, **options)
    workers = max(1, WORKERS // task.jobs)
    data = cached if cached is not None else Files(folder, ResizedCrop(task.ledger))
    return torch.utils.data.DataLoader(data, num_workers=workers, persistent_workers=True, **options)  # type: ignore[arg-type]


def job(number: int, meet: Meet, task: Task, folder: sf.ImageFolder, source: Any) -> dict[str, Any]:
    """One job: an epoch that fills the cache, then those that are timed."""
    torch.set_num_threads(1)
    torch.manual_seed(number)  # jobs that share nothing have orders of their own
    cached = None
    if task.who == "shared" or task.bandwidth is not None:
        size = sum(os.stat(path).st_size for path, _ in folder.samples)
        room = int(size * task.capacity)
        cached = sf.CachedDataset(source, capacity=room, form="fetched", policy=task.policy, name=CACHE)
    loader = make_loader(task, folder, cached)
    batches, samples = len(loader), 0
    first = iter(loader)
    meet()  # all are in the group before anyone takes a batch
    for _batch in first:
        samples += 1
    meet()
    resident = None if cached is None else cached.cache.resident(np.arange(len(folder))).tolist()
    meet()  # the counters have been read
    begun, waited = time.perf_counter(), 0.0
    for _ in range(task.epochs):
        waited += run_epoch(loader, task, batches)
    taken = time.perf_counter() - begun
    meet()
    found = {
        "rate": task.epochs * batches * BATCH / taken,
        "wait_share": waited / taken,
        "resident": resident,
        "first": samples,
        "stats": getattr(loader.stats(), "__dict__", {}) if task.who == "shared" else {},
    }
    meet()  # memory has been looked at
    if task.who == "shared":
        loader.close()
    if cached is not None:
        cached.close()
    return found


def run_epoch(loader: Iterable[Any], task: Task, batches: int) -> float:
    """Go through one epoch at the device's speed: the seconds that were spent waiting for batches."""
    waited, got, pause = 0.0, 0, BATCH / task.device
    before = time.perf_counter()
    for _batch in loader:
        now = time.perf_counter()
        waited += now - before
        if pause:
            time.sleep(pause)
        got += 1
        before = time.perf_counter()
    waited += time.perf_counter() - before
    if got != batches:
        raise AssertionError(f"{got} batches instead of {batches}")
    return waited


def run_jobs(task: Task) -> dict[str, Any]:
    """All jobs of `task`: their rates, and what they decoded, read and took together."""
    folder = sf.ImageFolder(task.photos, ResizedCrop(task.ledger))
    sizes = np.array([os.stat(path).st_size for path, _ in folder.samples])
    source: Any = folder if task.bandwidth is None else sf.testing.ThrottledSource(folder, bandwidth=task.bandwidth)
    ledger = Path(task.ledger)
    with Team(task.jobs, job, task, folder, source) as team:
        team.meet()
        team.meet()
        decoded, read = ledger.stat().st_size, getattr(source, "bytes", 0)
        team.meet()
        team.meet()
        decoded, read = ledger.stat().st_size - decoded, getattr(source, "bytes", 0) - read
        memory = {
            "shared_pss": shared_pss(family()),
            "cache": bytes_below(default_root() / CACHE),
            "beside": bytes_below(default_root(), without=CACHE),
        }
        team.meet()
        found = team.results()
    ring = max((each["stats"].get("staging_bytes", 0) for each in found), default=0)
    resident = found[0]["resident"]
    return {
        "rates": [sum(each["rate"] for each in found) / task.jobs],
        "each": [each["rate"] for each in found],
        "wait_share": sum(each["wait_share"] for each in found) / task.jobs,
        "decodes": decoded / task.epochs,
        "samples": len(folder) // BATCH * BATCH,
        "read": read / task.epochs,
        "absent": None if resident is None else int(sizes[~np.array(resident)].sum()),
        "total": int(sizes.sum()),
        "ring": ring,
        "memory": memory,
        "stats": [each["stats"] for each in found],
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    task = Task(**{field.name: given[field.name] for field in fields(Task) if field.name in given})
    Path(task.ledger).touch()
    if task.who == "prep":
        folder = sf.ImageFolder(task.photos, ResizedCrop(task.ledger))
        records = [folder.fetch(id) for id in range(0, len(folder), -(-len(folder) // 256))]
        result: dict[str, Any] = {"rates": [prep_rate(folder.pipeline, records, WORKERS, seconds=given["seconds"])]}
    else:
        result = run_jobs(task)
    emit(result, stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__)


if __name__ == "__main__":
    main()
