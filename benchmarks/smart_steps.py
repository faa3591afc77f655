"""What every contender of the Smart Cache shares: the task, the emulated step, the clock, and the check of the windows.

Needs NumPy and torch only, because it also runs in the environment of a peer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contender import MIN_EPOCHS
from benchmarks.volumes import window


@dataclass(frozen=True)
class SmartTask:
    """One measurement: the same for all contenders.

    Attributes:
        volumes: folder of the volumes.
        batch: samples per batch.
        size: samples of the window.
        rate: share of it that is replaced after each epoch.
        step: seconds that the device takes for a batch.
        seconds: how long to time, at least; never fewer than three epochs.
        setting: one of the contender's settings; "tune" tries them all and names the best.
    """

    volumes: str
    batch: int
    size: int
    rate: float
    step: float
    seconds: float
    setting: str = ""

    @property
    def replace(self) -> int:
        return int(np.ceil(round(self.size * self.rate, 9)))


def read_task() -> SmartTask:
    """The task on the command line."""
    given = json.loads(sys.argv[1])
    return SmartTask(**{f.name: given[f.name] for f in fields(SmartTask) if f.name in given})


def measure(epoch: Callable[[int], Iterable[Any]], task: SmartTask, total: int, *, windowed: bool) -> dict[str, Any]:
    """Time whole epochs, from before the window moves to after the last step; the first is not timed.

    Every epoch of a window must have exactly the samples that a window over `total` samples has then; without one, all
    samples. Raises `AssertionError` otherwise.
    """
    found: dict[str, list[Any]] = {name: [] for name in ("steps", "rates", "device", "begun", "first", "windows")}
    number, spent, worked = 0, 0.0, 0.0
    batches_timed = 0
    while len(found["steps"]) < MIN_EPOCHS or spent < task.seconds:
        ids: list[int] = []
        busy = first = 0.0
        steps, worked_before = 0, processor_seconds()
        start = time.perf_counter()
        batches = iter(epoch(number))
        begun = time.perf_counter() - start
        for batch in batches:
            stepped = time.perf_counter()
            first = first or stepped - start
            if task.step:
                time.sleep(task.step)
            busy += time.perf_counter() - stepped
            ids += np.asarray(batch["id"]).tolist()
            steps += 1
        taken = time.perf_counter() - start
        wanted = window(total, task.size, task.replace, number).tolist() if windowed else range(total)
        if sorted(ids) != sorted(wanted):
            raise AssertionError(f"epoch {number} trained on other samples than its window")
        found["windows"].append(sorted(ids) if windowed else [])
        if number:
            found["steps"].append(steps / taken)
            found["rates"].append(len(ids) / taken)
            found["device"].append(steps / busy)
            found["begun"].append(begun)
            found["first"].append(first)
            worked += processor_seconds() - worked_before
            batches_timed += steps
            spent += taken
        number += 1
    return found | {"processor": worked / batches_timed}


def measure_settings(settings: dict[str, Callable[[], dict[str, Any]]], task: SmartTask) -> dict[str, Any]:
    """Run `task.setting`; for "tune", run each setting and name the one with the best median."""
    if task.setting != "tune":
        return settings[task.setting]() | {"setting": task.setting}
    tried: dict[str, float] = {}
    for name, run in settings.items():
        try:
            tried[name] = float(np.median(run()["rates"]))
        except Exception as error:
            print(f"setting {name}: {error!r}", file=sys.stderr)
            tried[name] = 0.0
    return {"tried": tried, "setting": max(tried, key=lambda name: tried[name])}


def processor_seconds() -> float:
    """Processor time of this process and of all below it, ended ones included."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            numbers = path.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(numbers[1])
        ticks[int(path.parent.name)] = sum(map(int, numbers[11:15]))
    mine, total = os.getpid(), 0
    for pid, used in ticks.items():
        above = pid
        while above not in (mine, 0):
            above = parents.get(above, 0)
        total += used if above == mine else 0
    return total / float(os.sysconf("SC_CLK_TCK"))
