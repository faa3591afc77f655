"""The prefetcher on a GPU, against torch's own way and the published disciplines of others."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.harness import Check, Json, Options, Report, Spread, run_child, scratch_folder

NAME = "device_gpu"
QUESTION = (
    "How long is a training step on a GPU when batches are prefetched, against the longer of copy and step; how fast "
    "is a copy out of the staging ring; and how busy is the GPU with a ResNet-50?"
)
MODULE = "benchmarks.contenders.device_gpu"
STEPS = {10: 0.97, 5: 0.95}
"""Milliseconds of a step, and what max(copy, step) / measured is to be."""

BANDWIDTH = 0.95
HOST_MICROSECONDS = 100
BUSY = 0.95


def run(options: Options) -> Report:
    given = {
        "size": 256 * 3 * 224 * 224,
        "count": 60 if options.quick else 220,
        "workers": 4,
        "rounds": 1 if options.quick else 3,
        "steps": list(STEPS),
        "pictures": 2048 if options.quick else 16_384,
        "batch": 256,
    }
    with scratch_folder() as scratch:
        result = run_child(MODULE, given, scratch=scratch)
    found: Json = result["found"]
    rows, checks = _steps(found["steps"])
    slot, pinned = found["bandwidth"]["slot"], found["bandwidth"]["pinned"]
    ratio = Spread.of([b / a for a, b in zip(slot, pinned, strict=True)])
    text = "copy out of a slot of the loader's ring: bandwidth over that of torch's pinned memory"
    checks.append(Check(text, ratio.median, BANDWIDTH, ">=", ".2f", (ratio.low, ratio.high)))
    host: Json = found["host_time"]
    for name, words in (("loop", "the training loop"), ("both", "both threads")):
        text = f"a dict of 20 leaves: µs of processor time per batch, {words}"
        checks.append(Check(text, host[name], HOST_MICROSECONDS, "<=", ".0f"))
    training: Json = found["training"]
    stays = training["one batch that stays"]
    for name in ("stallfree", "torch"):
        busy = Spread.of([b / a for a, b in zip(training[name], stays, strict=True)])
        seconds = statistics.median(training[name])
        rows.append([f"ResNet-50, {name}", f"{seconds * 1000:.2f} ms", "", f"busy {busy.show('.3f')}"])
        if name == "stallfree":
            checks.append(
                Check(
                    "ResNet-50, stallfree: busy share of the GPU", busy.median, BUSY, ">=", ".3f", (busy.low, busy.high)
                )
            )
    return Report(
        columns=["way", "ms per step", "ms, the longer of copy and step", "that over the first"],
        rows=rows,
        checks=checks,
        notes=[
            f"{result['device']}. Batches of 256 pictures of 3x224x224 bytes; a step is `torch.cuda._sleep`. "
            f"`sf.DataLoader` gathers them from its cache with {given['workers']} workers; the others are given "
            f"batches that are there already by torch's loader with {given['workers']} workers, which pins them for "
            "all but `DevicePrefetcher`. timm's and Apex's ways are their published disciplines, written for this "
            "benchmark. Busy share: the time of the same steps on one batch that stays on the GPU, over the time with "
            "the loader; pictures are in the cache of stallfree's, and in the memory of the data set of torch's."
        ],
        versions=result["versions"],
        raw=found,
    )


def _steps(found: Any) -> tuple[list[list[str]], list[Check]]:
    rows, checks = [], []
    copy = found["copy"]
    for milliseconds, wanted in STEPS.items():
        case = found["steps"][str(milliseconds)]
        bound = max(copy, case["bare"])
        best = {name: Spread.of([bound / seconds for seconds in each]) for name, each in case["seconds"].items()}
        for name, share in best.items():
            seconds = statistics.median(case["seconds"][name])
            rows.append([f"{name}, {milliseconds} ms", f"{seconds * 1e3:.2f}", f"{bound * 1e3:.2f}", share.show(".3f")])
        for ours in ("`sf.DataLoader`", "`DevicePrefetcher`"):
            share = best[ours]
            text = f"steps of {milliseconds} ms, {ours}: the longer of copy and step over the measured one"
            checks.append(Check(text, share.median, wanted, ">=", ".3f", (share.low, share.high)))
            for name in ("torch, pinned", "timm's way", "Apex's way"):
                pairs = zip(case["seconds"][ours], case["seconds"][name], strict=True)
                ahead = Spread.of([theirs / own for own, theirs in pairs])
                text = f"steps of {milliseconds} ms, {ours}: speed over {name}"
                checks.append(Check(text, ahead.median, 0.99, ">=", ".3f", (ahead.low, ahead.high)))
    return rows, checks
