"""How busy a GPU is while it trains on photographs from slow storage."""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.fast_prep import make_pictures
from benchmarks.harness import BenchmarkError, Check, Json, Options, Report, Spread, run_child, scratch_folder

NAME = "gpu_photos"
QUESTION = (
    "A ResNet-50 is trained on photographs from storage of 60 MB/s: how busy is the GPU with torch's loader, and with "
    "a cache and stallfree's loader?"
)
MODULE = "benchmarks.contenders.gpu_photos"
BUSY = 0.95


def run(options: Options) -> Report:
    if not torch.cuda.is_available():
        raise BenchmarkError("there is no GPU")
    given: Json = {
        "device": "cuda",
        "count": 1280 if options.quick else 12_800,
        "batch": 128,
        "workers": len(os.sched_getaffinity(0)),
        "bandwidth": 60e6,
        "epochs": 1 if options.quick else 2,
        "warm": 20,
    }
    with scratch_folder() as scratch:
        what = make_pictures(scratch / "photos", options.data, 1000)
        result = run_child(MODULE, {**given, "photos": str(scratch / "photos")}, scratch=scratch)
    found = result["found"]
    bare = Spread.of([epoch["seconds"] / epoch["steps"] for epoch in found["one batch that stays"]]).median
    rows = [["one batch that stays on the GPU", *_cells(found["one batch that stays"], bare, given["batch"])]]
    for name, epochs in found.items():
        if name != "one batch that stays":
            rows.append([f"{name}, first epoch", *_cells(epochs[:1], bare, given["batch"])])
            if epochs[1:]:
                rows.append([f"{name}, later epochs", *_cells(epochs[1:], bare, given["batch"])])
    decoded = found["stallfree, decoded in the cache"][1:]
    busy = Spread.of([bare * epoch["steps"] / epoch["seconds"] for epoch in decoded])
    text = "ResNet-50 on photographs from slow storage, decoded in the cache, later epochs: busy share of the GPU"
    return Report(
        columns=["loader", "pictures/s", "busy share of the GPU", "the same without the first step", "first step, ms"],
        rows=rows,
        checks=[Check(text, busy.median, BUSY, ">=", ".3f", (busy.low, busy.high))],
        notes=[
            f"{result['device']}, {given['workers']} workers. {what}; an epoch is {given['count']:,} of them, decoded, "
            f"cut at random, resized to 224 and mirrored, in batches of {given['batch']}; autocast to bfloat16. "
            "Storage is a `ThrottledSource`; stallfree's cache holds the photographs encoded or decoded. Busy share: "
            "the time of the same steps on one batch that stays on the GPU, over the time of the epoch; the first step "
            "of an epoch waits for the first batch of its own."
            + ("" if result["native"] else " Without the compiled part of `stallfree.vision`.")
        ],
        versions=result["versions"],
        raw=found,
    )


def _cells(epochs: list[Json], bare: float, batch: int) -> list[str]:
    steps = [epoch["steps"] for epoch in epochs]
    speed = Spread.of([count * batch / epoch["seconds"] for epoch, count in zip(epochs, steps, strict=True)])
    busy = Spread.of([bare * count / epoch["seconds"] for epoch, count in zip(epochs, steps, strict=True)])
    later: list[Any] = [
        bare * (count - 1) / (epoch["seconds"] - epoch["first"]) for epoch, count in zip(epochs, steps, strict=True)
    ]
    first = Spread.of([epoch["first"] * 1000 for epoch in epochs])
    return [speed.show(), busy.show(".3f"), Spread.of(later).show(".3f"), first.show(".0f")]
