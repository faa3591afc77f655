"""What every contender shares: the task it is given, the samples, the clock, and the JSON that it prints.

A contender is a module that is started as `python -m MODULE '{"side": 224, ...}'` in a fresh process. It needs the
standard library and NumPy only, because it also runs in the environments of the peers.

All contenders follow one rule: an epoch is timed from asking for its first batch until the loader says that it has
ended; the loop receives each batch and touches nothing in it. The first epoch is not timed. It is checked instead:
every sample once, under its own label, with its own pixels.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Epoch = Callable[[], Iterable[Any]]
"""Starts an epoch: gives an iterable of batches."""

MIN_EPOCHS = 3


@dataclass(frozen=True)
class Task:
    """One measurement: the same for all contenders.

    Attributes:
        side: height and width of the uint8 pictures, which have three channels.
        samples: how many; a multiple of `batch`.
        batch: samples per batch.
        workers: processes or threads that the contender may use.
        seconds: how long to time, at least; never fewer than three epochs.
        folder: where `samples-SIDE.npy` lies, and where a contender may write; in memory.
        setting: one of the contender's settings; "tune" tries them all and names the best.
    """

    side: int
    samples: int
    batch: int
    workers: int
    seconds: float
    folder: str
    setting: str = ""

    def __post_init__(self) -> None:
        if self.samples % self.batch:
            raise ValueError(f"samples={self.samples} is no multiple of batch={self.batch}")


def read_task() -> Task:
    """The task on the command line."""
    given = json.loads(sys.argv[1])
    return Task(**{f.name: given[f.name] for f in fields(Task) if f.name in given})


def samples_path(task: Task) -> Path:
    return Path(task.folder) / f"samples-{task.side}.npy"


def make_samples(task: Task) -> Path:
    """Write the pictures of `task` (noise, with a fixed seed). The label of a picture is its index."""
    path = samples_path(task)
    if not path.exists():
        shape = (task.samples, task.side, task.side, 3)
        out = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        generator = np.random.default_rng(task.side)
        for start in range(0, task.samples, 256):
            out[start : start + 256] = generator.integers(0, 256, out[start : start + 256].shape, dtype=np.uint8)
        out.flush()
    return path


def load_samples(task: Task) -> tuple[Images, Labels]:
    """The pictures, mapped from their file in memory, and their labels."""
    images: Images = np.load(samples_path(task), mmap_mode="r")
    if images.shape != (task.samples, task.side, task.side, 3):
        raise ValueError(f"{samples_path(task)} holds {images.shape}, not {task.samples} pictures of {task.side}")
    return images, np.arange(task.samples, dtype=np.int64)


def check_epoch(epoch: Epoch, task: Task, images: Images) -> None:
    """Run one epoch and raise unless each sample came exactly once, with the pixels of its label."""
    seen = np.zeros(task.samples, dtype=np.int64)
    for got_images, got_labels in epoch():
        labels = np.asarray(got_labels).reshape(-1)
        pictures = np.asarray(got_images).reshape(len(labels), task.side, task.side, 3)
        np.add.at(seen, labels, 1)
        for position in (0, len(labels) - 1):
            if not np.array_equal(pictures[position], images[labels[position]]):
                raise AssertionError(f"the picture under label {labels[position]} is another one")
    if not (seen == 1).all():
        raise AssertionError(f"{(seen == 0).sum()} samples missing, {(seen > 1).sum()} more than once")


def time_epochs(epoch: Epoch, task: Task) -> list[float]:
    """Samples per second, one figure per epoch."""
    rates: list[float] = []
    end = time.perf_counter() + task.seconds
    while len(rates) < MIN_EPOCHS or time.perf_counter() < end:
        batches = 0
        start = time.perf_counter()
        for _batch in epoch():
            batches += 1
        taken = time.perf_counter() - start
        if batches != task.samples // task.batch:
            raise AssertionError(f"{batches} batches instead of {task.samples // task.batch}")
        rates.append(task.samples / taken)
    return rates


def measure(epoch: Epoch, task: Task, images: Images) -> dict[str, Any]:
    """Check one epoch, time the others."""
    check_epoch(epoch, task, images)
    return {"rates": time_epochs(epoch, task)}


def measure_settings(settings: dict[str, Callable[[], Epoch]], task: Task, images: Images) -> dict[str, Any]:
    """Measure `task.setting`; for "tune", measure each setting and name the one with the best median."""
    if task.setting != "tune":
        return measure(settings[task.setting](), task, images) | {"setting": task.setting}
    tried: dict[str, float] = {}
    for name, make in settings.items():
        try:
            tried[name] = float(np.median(measure(make(), task, images)["rates"]))
        except Exception as error:
            print(f"setting {name}: {error!r}", file=sys.stderr)
            tried[name] = 0.0
    return {"tried": tried, "setting": max(tried, key=lambda name: tried[name])}


def emit(result: dict[str, Any], **versions: str) -> None:
    """Print the result as the last line on standard output."""
    print(json.dumps(result | {"versions": {"python": sys.version.split()[0], **versions}}), flush=True)
