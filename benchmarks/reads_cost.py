"""What `form="reads"` costs beside warm local files: on a hit, and on a miss."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import stallfree as sf
from benchmarks.harness import Check, Options, Report, Spread, say, scratch_folder
from benchmarks.photos import jpeg_files, make_photos

NAME = "reads_cost"
QUESTION = (
    'The data set reads files in `__getitem__`, and `form="reads"` serves or records them. How long does a sample '
    "take, beside one from a warm local file?"
)
BATCH, COUNT = 32, 192
WANTED = {"hit": 1.0, "miss": 1.05}


class Files:
    """Gives what `read` makes of each file."""

    def __init__(self, paths: list[Path], read: Callable[[Path], Any]) -> None:
        self.paths, self.read = paths, read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, id: int) -> Any:
        return self.read(self.paths[id])


def _decoded(path: Path) -> Any:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB").resize((224, 224)))


def run(options: Options) -> Report:
    rows, checks, raw = [], [], {}
    rounds = 5 if options.quick else 25
    with scratch_folder() as scratch:
        what = make_photos(scratch / "photos", options.data, COUNT)
        arrays = scratch / "arrays"
        arrays.mkdir()
        for id in range(COUNT):
            np.save(arrays / f"{id}.npy", np.random.default_rng(id).random((150, 128), np.float32))
        photos, saved = jpeg_files(scratch / "photos"), sorted(arrays.iterdir())
        kinds = {
            "photographs, decoded and resized by Pillow": Files(photos, _decoded),
            "arrays of 77 KB, `numpy.load`": Files(saved, np.load),
            "the bytes of the photographs, nothing else": Files(photos, Path.read_bytes),
        }
        for name, data in kinds.items():
            seconds: dict[str, list[float]] = {"plain": [], "hit": [], "miss": []}
            for _ in range(rounds):
                _measure(data, seconds)
            cells = []
            for kind in ("hit", "miss"):
                ratio = Spread.of([one / plain for one, plain in zip(seconds[kind], seconds["plain"], strict=True)])
                cells.append(ratio.show(".2f"))
                checks.append(
                    Check(
                        f'`form="reads"`, {name.partition(",")[0]}: time of a {kind} over that of a plain read',
                        ratio.median,
                        WANTED[kind],
                        "<=",
                        ".2f",
                        (ratio.low, ratio.high),
                    )
                )
            each = {kind: statistics.median(values) / COUNT for kind, values in seconds.items()}
            say(f"  {name}: " + ", ".join(f"{kind} {value * 1e6:.0f} us" for kind, value in each.items()))
            rows.append([name, *(f"{each[kind] * 1e6:,.0f}" for kind in ("plain", "hit", "miss")), *cells])
            raw[name] = seconds
    return Report(
        columns=["data set", "plain, µs", "hit, µs", "miss, µs", "hit over plain", "miss over plain"],
        rows=rows,
        checks=checks,
        notes=[
            f"{what}. Batches of {BATCH} samples in one process, files in the page cache; a miss stores the record. "
            f"{rounds} rounds in turn; ratios within a round, medians (lowest to highest)."
        ],
        versions={name: version(name) for name in ("stallfree", "numpy", "pillow")},
        raw=raw,
    )


def _measure(data: Files, seconds: dict[str, list[float]]) -> None:
    """One round: plain, misses into a new cache, hits."""
    batches = [range(start, start + BATCH) for start in range(0, COUNT, BATCH)]
    seconds["plain"].append(_time(lambda ids: [data[id] for id in ids], batches))
    with sf.CachedDataset(data, capacity="256MiB", form="reads", name="reads-cost", seed=0) as cached:
        seconds["miss"].append(_time(cached.__getitems__, batches))
        seconds["hit"].append(_time(cached.__getitems__, batches))


def _time(make: Callable[[Any], Any], batches: list[range]) -> float:
    gc.collect()
    began = time.perf_counter()
    for ids in batches:
        make(ids)
    return time.perf_counter() - began
