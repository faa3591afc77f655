"""What `stallfree run` costs an unchanged script."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.contender import emit
from benchmarks.harness import (
    CHILD_SECONDS,
    ROOT,
    BenchmarkError,
    Check,
    Json,
    Options,
    Report,
    Spread,
    say,
    scratch_folder,
)

NAME = "observer"
QUESTION = (
    "`stallfree run train.py` beside `python train.py`: how much longer does the training loop of the script take?"
)
WANTED = 1.01

LOOPS: dict[str, Json] = {
    "nothing but the loader: single numbers, no workers, no step": {
        "size": 1, "batch": None, "workers": 0, "step": 0, "busy": True, "batches": 20_000,
    },
    "many small batches: 16 numbers, no workers, steps of 1 ms": {
        "size": 1, "batch": 16, "workers": 0, "step": 0.001, "busy": True, "batches": 250,
    },
    "pictures: 32 of 64x64x3, 2 workers, steps of 20 ms": {
        "size": 64 * 64 * 3, "batch": 32, "workers": 2, "step": 0.020, "busy": False, "batches": 25,
    },
}  # fmt: skip


def run(options: Options) -> Report:
    rows, checks, raw = [], [], {}
    with scratch_folder() as scratch:
        for what, loop in LOOPS.items():
            plain: list[float] = []
            watched: list[float] = []
            for number in range(options.rounds):
                pair = [(plain, False), (watched, True)]
                for figures, observed in pair if number % 2 == 0 else reversed(pair):
                    result = _start(loop | {"seconds": options.seconds}, observed, scratch)
                    figures.append(statistics.median(result["seconds_per_batch"]))
                say(f"  round {number + 1}: {what}: {watched[-1] / plain[-1]:.4f}")
            ratio = Spread.of([a / b for a, b in zip(watched, plain, strict=True)])
            beyond = Spread.of([(a - b) * 1e6 for a, b in zip(watched, plain, strict=True)])
            raw[what] = {"python": plain, "stallfree run": watched}
            rows.append([what, _ms(plain), _ms(watched), beyond.show("+.2f"), ratio.show(".4f")])
            if not loop["step"]:
                continue
            checks.append(
                Check(
                    f"`stallfree run`, {what.partition(':')[0]}: time of the loop over that under `python`",
                    ratio.median, WANTED, "<", ".4f", (ratio.low, ratio.high),
                )
            )  # fmt: skip
    return Report(
        columns=["loop", "python, ms/batch", "stallfree run, ms/batch", "difference, µs/batch", "ratio"],
        rows=rows,
        checks=checks,
        notes=[
            "The script measures its own loop per epoch, steps included; a run's figure is the median of its epochs, "
            "of which the first is left out. Steps of 1 ms keep the processor busy until they are over, so that "
            f"nothing can hide in them. {options.rounds} pairs of runs, each run in a fresh process, either kind first "
            "in turn; medians (lowest to highest), ratio and difference within a pair."
        ],
        versions={name: version(name) for name in ("stallfree", "torch")},
        raw=raw,
    )


def _start(params: Json, observed: bool, scratch: Path) -> Json:
    """This file as a script, with or without `stallfree run` before it."""
    command = [sys.executable, "-m", *(["stallfree", "run", "-m"] if observed else []), "benchmarks.observer"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "STALLFREE_ROOT": str(scratch / "stallfree")}
    done = subprocess.run(
        [*command, json.dumps(params)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS
    )
    if done.returncode or observed != ("waited for data" in done.stderr):
        raise BenchmarkError(f"{command} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    result: Json = json.loads(done.stdout.splitlines()[-1])
    return result


def _ms(figures: list[float]) -> str:
    return Spread.of([figure * 1000 for figure in figures]).show(".4f")


class _Numbers(Dataset[torch.Tensor]):
    """Samples of so many numbers."""

    def __init__(self, length: int, size: int) -> None:
        self._length, self._size = length, size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, id: int) -> torch.Tensor:
        return torch.full((self._size,), float(id))


def child() -> None:
    params: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    loader = DataLoader(
        _Numbers(params["batches"] * (params["batch"] or 1), params["size"]),
        batch_size=params["batch"],
        num_workers=params["workers"],
        persistent_workers=params["workers"] > 0,
    )
    step, busy = params["step"], params["busy"]
    figures: list[float] = []
    end = time.perf_counter() + params["seconds"]
    while len(figures) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        for _ in loader:
            if step and busy:
                until = time.perf_counter() + step
                while time.perf_counter() < until:
                    pass
            elif step:
                time.sleep(step)
        figures.append((time.perf_counter() - begun) / params["batches"])
    emit({"seconds_per_batch": figures[1:]})


if __name__ == "__main__":
    child()
