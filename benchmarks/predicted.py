"""Predicted against measured throughput over sizes of the cache, and the size that ends the fetch stall."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, Spread, run_child, scratch_folder
from benchmarks.photos import SIDE, make_photos
from stallfree.analysis.analyze import Analysis
from stallfree.analysis.job import make_job

NAME = "predicted"
QUESTION = "How near do predictions come to what is measured, for caches from 0 to 100% of the data?"
CASES = (
    # what storage crosses, prep, MB/s, samples/s of the device
    ("P", "work", 25, 10_000),
    ("G", "work", 20, 900),
    ("P, real decoding", "pictures", 25, 10_000),
)
SHARES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
BATCH = 32
WORKERS = 2
ROUNDS = 5
SECONDS = 1.5
"""Of each run of the analysis, and of the job with each cache, in each round."""
WARM_UP = 0.5
WORK_SECONDS = 1.5e-3


def run(options: Options) -> Report:
    with scratch_folder() as scratch:
        what = make_photos(scratch / "photos", options.data, 400 if options.quick else 2000)
        found = {}
        for name, prep, bandwidth, device in CASES:
            params = {"photos": str(scratch / "photos"), "prep": prep, "bandwidth": bandwidth, "device": device}
            params |= {"seconds": 0.5 if options.quick else SECONDS, "rounds": 3 if options.quick else ROUNDS}
            found[name] = run_child("benchmarks.predicted", params, scratch=scratch)
    rows, checks = [], []
    for name, prep, bandwidth, device in CASES:
        points = found[name]["points"]
        for point in points:
            rows.append(
                [
                    f"{prep}, {bandwidth} MB/s, device {device:,}/s",
                    f"{point['hits']:.1%}",
                    f"{point['F']:,.0f}",
                    f"{point['predicted']:,.0f} ({point['low']:,.0f} to {point['high']:,.0f}; {point['binds']})"
                    if point["low"] is not None
                    else f"{point['predicted']:,.0f} ({point['binds']})",
                    Spread.of(point["measured"]).show(),
                    f"{statistics.median(point['measured']) / point['predicted'] - 1:+.1%}",
                    Spread.of([rate - 1 for rate in _within(point)]).show("+.1%"),
                    f"{point['measured'][-1] / point['rounds'][0] - 1:+.1%}",
                ]
            )
        checks += _checks(f"F crosses {name}", found[name])
    return Report(
        columns=[
            "prep, storage",
            "hits",
            "F",
            "predicted (95% interval; binds)",
            "measured, samples/s",
            "measured / predicted",
            "the same within a round: what the model is off",
            "last measured / first predicted: drift as well",
        ],
        rows=rows,
        checks=checks,
        notes=[
            f'{what}. Prep "work": {1000 * WORK_SECONDS:g} ms of processor time per sample, so that a processor whose '
            'speed drifts does not count; "pictures": decode, random resized crop (Pillow), flip, normalised floats. '
            f"Batches of {BATCH}, {WORKERS} workers, `minio`. Measuring and checking alternate: each of {ROUNDS} "
            f"rounds has all runs of an analysis of the job without a cache, {SECONDS:g} s at most each, and then the "
            f"whole job with a cache of each size, {SECONDS:g} s in its steady state. The predictions are "
            "`Report.predict(cache=...)` of the analysis of all rounds, for the share of hits that was found. Within a "
            "round, a measurement is compared with the prediction from the rates of that round alone, so that what "
            "changes from round to round does not count. Medians (lowest to highest). The error of a size is that of "
            "its median. The measured end of the fetch stall is where the line through 1/throughput of the sizes that "
            "are bound by fetching meets the mean of those that are not (linear in the share of hits, as 1/F is).",
        ],
        versions=found["P"]["versions"],
        raw=found,
    )


def _within(point: dict[str, Any]) -> list[float]:
    """Measured over predicted, round by round."""
    return [rate / told for rate, told in zip(point["measured"], point["rounds"], strict=True)]


def _checks(label: str, result: dict[str, Any]) -> list[Check]:
    points = result["points"]
    errors = [abs(statistics.median(point["measured"]) / point["predicted"] - 1) for point in points]
    model = [abs(statistics.median(_within(point)) - 1) for point in points]
    apart = [abs(point["measured"][-1] / point["rounds"][0] - 1) for point in points]
    held = [
        point["low"] <= rate <= point["high"]
        for point in points
        if point["low"] is not None
        for rate in point["measured"]
    ]
    knee = _measured_knee(points)
    ends = f"{label}: predicted end of the fetch stall {result['knee']:.1%}, measured {knee:.1%}: apart"
    inside = statistics.fmean(held) if held else None
    return [
        Check(f"{label}: error, median over the sizes", statistics.median(errors), 0.02, "<=", ".1%"),
        Check(f"{label}: largest error", max(errors), 0.04, "<=", ".1%"),
        Check(f"{label}: error within a round, median over the sizes", statistics.median(model), 0.02, "<=", ".1%"),
        Check(f"{label}: error from the first round to the last, median", statistics.median(apart), 0.04, "<=", ".1%"),
        Check(f"{label}: runs within the predicted interval", inside, 0.90, ">=", ".0%"),
        Check(ends, abs(result["knee"] - knee), 0.05, "<=", ".1%"),
    ]


def _measured_knee(points: list[dict[str, Any]]) -> float:
    """Where the rising part of the measured curve meets its flat part."""
    hits = np.array([point["hits"] for point in points])
    seconds = 1 / np.array([statistics.median(point["measured"]) for point in points])
    flat = seconds[-2:].mean()
    rising = seconds > 1.08 * flat
    slope, start = np.polyfit(hits[rising], seconds[rising], 1)
    return float((flat - start) / slope)


@sf.mark_random
class Work:
    """So many seconds of processor time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, data: bytes) -> Any:
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            zlib.crc32(data)
        return torch.zeros(256)


@sf.mark_random
class ResizedCrop:
    """A random part of 8 to 100% of a picture at 224x224, mirrored half the time, as normalised floats."""

    def __call__(self, pixels: Any) -> torch.Tensor:
        height, width = pixels.shape[:2]
        area, ratio = (
            height * width * random.uniform(0.08, 1),
            math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3))),
        )
        wide, high = (min(side, math.sqrt(area * part)) for side, part in ((width, ratio), (height, 1 / ratio)))
        left, top = random.uniform(0, width - wide), random.uniform(0, height - high)
        picture = Image.fromarray(pixels).resize(
            (SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + wide, top + high)
        )
        square = np.asarray(picture)
        if random.random() < 0.5:
            square = square[:, ::-1]
        planes = torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1)))
        return planes.float().sub_(118.0).div_(58.0)


def child() -> None:
    given = json.loads(sys.argv[1])
    paths = sorted(str(path) for path in Path(given["photos"]).rglob("*.jpg"))
    real = given["prep"] == "pictures"
    prepare, decode = (ResizedCrop(), sf.DecodeImage()) if real else (Work(WORK_SECONDS), None)
    folder = sf.FileDataset(paths, list(range(len(paths))), prepare, decode=decode)
    source = sf.testing.ThrottledSource(folder, bandwidth=given["bandwidth"] * 1e6)
    pause = BATCH / given["device"]

    def step(_: object) -> None:
        time.sleep(pause)

    samples = len(folder)
    sizes = np.array([len(folder.fetch(id)[0]) for id in range(samples)])
    caches = [_cache(source, share, int(sizes.sum())) for share in SHARES]
    measured: list[list[float]] = [[] for _ in SHARES]
    job, rounds = make_job(source, step, BATCH, WORKERS, None, {}), given["rounds"]
    with Analysis(job, given["seconds"] * rounds) as analysis:
        for _ in range(rounds):
            analysis.round()
            for at, cached in enumerate(caches):
                measured[at].append(_job(cached if cached is not None else source, step, samples, given["seconds"]))
        report = analysis.report()
    points = []
    for share, cached, rates in zip(SHARES, caches, measured, strict=True):
        hits = 0.0 if cached is None else cached.cache.stats().resident_items / samples
        told = report.predict(cache=f"{100 * hits:.4f}%")
        point = {"share": share, "hits": hits, "predicted": told.throughput, "binds": told.binds, "F": told.F}
        point |= {"P": told.P, "G": told.G, "low": told.low, "high": told.high, "measured": rates}
        each = [report.setting(number).with_hits(hits).throughput for number in range(rounds)]
        points.append(point | {"rounds": each})
    for cached in caches:
        if cached is not None:
            cached.close()
    result = {"points": points, "knee": report.data["curve"]["best"] or 0.0, "report": report.data}
    emit(result, stallfree=version("stallfree"), torch=torch.__version__, numpy=np.__version__)


def _cache(source: Any, share: float, total: int) -> sf.CachedDataset | None:
    """A cache of that share of the data, filled as the first epoch would."""
    if not share:
        return None
    samples = len(source)
    capacity = int(total * share * (1.06 if share == 1 else 1.0)) + (1 << 20) * (share == 1)
    cached = sf.CachedDataset(source, capacity=capacity, form="fetched", name=f"predicted-{100 * share:.0f}")
    order = np.random.default_rng(0).permutation(samples).tolist()
    for first in range(0, samples, BATCH):
        ids = order[first : first + BATCH]
        cached.cache.put_many(ids, [source.source.fetch(id) for id in ids])
    return cached


def _job(dataset: Any, step: Any, samples: int, seconds: float) -> float:
    """Samples/s of the job in its steady state."""
    ends: list[float] = []
    loader = sf.DataLoader(dataset, BATCH, sampler=_Passes(samples), num_workers=WORKERS)
    started = time.perf_counter()
    for batch in loader:
        step(batch)
        now = time.perf_counter()
        if now - started > WARM_UP:
            ends.append(now)
            if len(ends) > 1 and now - ends[0] > seconds:
                break
    loader.close()
    return BATCH * (len(ends) - 1) / (ends[-1] - ends[0])


class _Passes:
    """A sampler: pass after pass over all samples, without an end."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        rng = np.random.default_rng(1)
        while True:
            yield from rng.permutation(self._samples).tolist()


if __name__ == "__main__":
    child()
