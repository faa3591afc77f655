"""What it costs to look for random steps while a cache is filled."""

from __future__ import annotations

import gc
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.fast_prep import make_pictures
from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, say, scratch_folder
from stallfree.datasets.split import TransformSplit

NAME = "watch_cost"
QUESTION = (
    "While a cache is filled, one sample in 32 is made twice, and the states of the global generators are compared per "
    "batch. How much longer does that make the first epoch, after the first 64 samples, which are all made twice?"
)
WANTED = 1.04
PAIRS = 4
"""First epochs with the watch and without, in turns, at least, in each round."""

BATCH, SKIPPED = 64, 2
WORKERS = (0, 2)
STEPS = ("one step", "four steps")

_names = count()


def run(options: Options) -> Report:
    rows, checks, raw = [], [], {}
    with scratch_folder() as scratch:
        photos = scratch / "photos"
        what = make_pictures(photos, options.data, 320 if options.quick else 640)
        for steps in STEPS:
            for workers in WORKERS:
                case = f"{steps}, {workers or 'no'} workers"
                common = {"photos": str(photos), "workers": workers, "steps": steps}
                rounds = []
                for number in range(options.rounds):
                    given = common | {"seconds": options.seconds, "first": number % 2}
                    rounds.append(run_child("benchmarks.watch_cost", given, scratch=scratch))
                    say(f"  round {number + 1}: {case}: {_ratio(rounds[-1]):.4f}")
                ratio = Spread.of([_ratio(found) for found in rounds])
                raw[case] = rounds
                busy = Spread.of([_ratio(found, 1) for found in rounds])
                seconds = [_seconds(rounds, way) for way in ("without", "with")]
                rows.append([case, *seconds, ratio.show(".4f"), busy.show(".4f")])
                checks.append(
                    Check(
                        f"the first epoch with the looks over that without, {case}",
                        ratio.median, WANTED, "<=", ".4f", (ratio.low, ratio.high),
                    )
                )  # fmt: skip
    return Report(
        columns=["pipeline", "first epoch without, s", "with the looks, s", "ratio", "ratio of processor time"],
        rows=rows,
        checks=checks,
        notes=[
            f"{what}, in memory, cached prepared in batches of {BATCH}. One step decodes with Pillow, resizes to "
            "224x224 and scales; four steps do the same one by one. The steps are functions of the user's, not "
            f"marked. A first epoch begins with an empty cache and is timed after its first {SKIPPED} batches, whose "
            f"samples are all made twice. {options.rounds} rounds in fresh processes, in each at least {PAIRS} pairs "
            "of epochs with and without, either kind first in turn. A round's ratio is the median of its pairs' "
            "ratios. Processor time is that of all processes, to their end."
        ],
        versions={name: version(name) for name in ("stallfree", "torch", "pillow")},
        raw=raw,
    )


def _ratio(found: Json, which: int = 0) -> float:
    return statistics.median(a[which] / b[which] for a, b in zip(found["with"], found["without"], strict=True))


def _seconds(rounds: list[Json], way: str) -> str:
    return Spread.of([statistics.median(epoch[0] for epoch in found[way]) for found in rounds]).show(".2f")


# -- one round -------------------------------------------------------------------------------------------------------


def child() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    figures: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    _first_epoch(given)  # imports what is imported late, and reads the files once
    end = time.perf_counter() + given["seconds"]
    while len(figures["with"]) < PAIRS or time.perf_counter() < end:
        order = ["with", "without"]
        if (len(figures["with"]) + given["first"]) % 2:
            order.reverse()
        for way in order:
            with without_looks() if way == "without" else nullcontext():
                figures[way].append(_first_epoch(given))
    emit(figures)


@contextmanager
def without_looks() -> Iterator[None]:
    """No sample is made twice and no states are compared meanwhile, also in workers that are forked meanwhile."""
    usual = TransformSplit.takes_look, TransformSplit.watch
    TransformSplit.takes_look = lambda _self: False  # type: ignore[method-assign]
    TransformSplit.watch = lambda _self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        TransformSplit.takes_look, TransformSplit.watch = usual  # type: ignore[method-assign]


def _first_epoch(given: Json) -> tuple[float, float]:
    """Seconds of an epoch that begins with an empty cache, and seconds of processor in all processes."""
    workers = given["workers"]
    source = _Files(sorted(Path(given["photos"]).glob("*/*.jpg")))
    steps = [prepare] if given["steps"] == STEPS[0] else [decode, resize, to_array, scale]
    room = 4 * 224 * 224 * 3 * (len(source) + BATCH)
    with sf.CachedDataset(
        source, capacity=room, form="prepared", name=f"watch-{next(_names)}", transform=sf.Compose(steps)
    ) as cached:
        loader = sf.DataLoader(cached, BATCH, num_workers=workers, multiprocessing_context="fork")
        gc.collect()
        batches = iter(loader)
        samples = sum(len(next(batches)) for _ in range(SKIPPED))
        begun, busy = time.perf_counter(), sum(os.times()[:4])
        samples += sum(len(batch) for batch in batches)
        taken = time.perf_counter() - begun
        if samples != len(source) or len(cached.reader.deterministic) != len(steps):
            raise AssertionError(f"{samples} samples of {len(source)}, cached after {cached.reader.deterministic}")
        loader.close()  # ends the workers: only then their time is counted
        busy = sum(os.times()[:4]) - busy
    return taken, busy


class _Files:
    """The bytes of files."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, id: int) -> bytes:
        return self.files[id].read_bytes()


def decode(data: bytes) -> Any:
    return Image.open(io.BytesIO(data)).convert("RGB")


def resize(image: Any) -> Any:
    return image.resize((224, 224), Image.Resampling.BILINEAR)


def to_array(image: Any) -> npt.NDArray[np.uint8]:
    return np.asarray(image).transpose(2, 0, 1)


def scale(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return pixels.astype(np.float32) / np.float32(255)


def prepare(data: bytes) -> npt.NDArray[np.float32]:
    return scale(to_array(resize(decode(data))))


if __name__ == "__main__":
    child()
