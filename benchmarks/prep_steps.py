"""What the contenders of `fast_prep` share: the pictures, what is asked for, the check and the clock.

Needs the standard library and NumPy only, because it also runs in the environments of the peers.
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

from benchmarks.contender import MIN_EPOCHS, Epoch

SIDE = 224
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class PrepTask:
    """One measurement: the same for all contenders.

    Attributes:
        photos: folder with CLASS/NAME.jpg.
        batch: samples per batch; what is left at the end of an epoch is dropped.
        workers: processes or threads that the contender may use.
        seconds: how long to time, at least.
        setting: one of the contender's settings; "tune" tries them all and names the best.
    """

    photos: str
    batch: int
    workers: int
    seconds: float
    setting: str = ""


def read_task() -> PrepTask:
    """The task on the command line."""
    given = json.loads(sys.argv[1])
    return PrepTask(**{f.name: given[f.name] for f in fields(PrepTask) if f.name in given})


def find_photos(task: PrepTask) -> list[Path]:
    """All pictures; the label of one is its position."""
    return sorted(Path(task.photos).glob("*/*.jpg"))


def measure(epoch: Epoch, task: PrepTask) -> dict[str, Any]:
    """Samples/s, one figure per epoch. The first epoch is not timed but checked; it may fill caches."""
    samples = len(find_photos(task))
    batches = samples // task.batch
    _check(epoch, batches, samples, task.batch)
    rates: list[float] = []
    spent = 0.0
    while len(rates) < MIN_EPOCHS or spent < task.seconds:
        begun = time.perf_counter()
        got = sum(1 for _batch in epoch())
        taken = time.perf_counter() - begun
        if got != batches:
            raise AssertionError(f"{got} batches instead of {batches}")
        rates.append(task.batch * batches / taken)
        spent += taken
    return {"rates": rates}


def _check(epoch: Callable[[], Iterable[Any]], batches: int, samples: int, batch: int) -> None:
    """Raise unless the batches of an epoch have bytes of the shape asked for, and no sample twice."""
    labels: list[int] = []
    for pictures, its_labels in epoch():
        array = np.asarray(pictures)
        if array.dtype != np.uint8 or sorted(array.shape) != sorted((batch, SIDE, SIDE, 3)):
            raise AssertionError(f"a batch of {array.dtype}, shape {array.shape}")
        if not 20 < array.mean() < 235 or array.std() < 10:
            raise AssertionError(f"these are no photographs: mean {array.mean()}, standard deviation {array.std()}")
        labels += np.asarray(its_labels).reshape(-1).tolist()
    if len(labels) != batches * batch or len(set(labels)) != len(labels) or not set(labels) <= set(range(samples)):
        raise AssertionError(f"{len(labels)} samples, {len(set(labels))} different ones, of {samples}")


def measure_settings(settings: dict[str, Callable[[], Epoch]], task: PrepTask) -> dict[str, Any]:
    """Measure `task.setting`; for "tune", measure each setting and name the one with the best median."""
    if task.setting != "tune":
        return measure(settings[task.setting](), task) | {"setting": task.setting}
    tried: dict[str, float] = {}
    for name, make in settings.items():
        try:
            tried[name] = float(np.median(measure(make(), task)["rates"]))
        except Exception as error:
            print(f"setting {name}: {error!r}", file=sys.stderr)
            tried[name] = 0.0
    return {"tried": tried, "setting": max(tried, key=lambda name: tried[name])}
