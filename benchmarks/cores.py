"""Speed with 1, 2, 4, ... workers, up to the cores of the machine."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.fast_prep import make_pictures
from benchmarks.harness import Check, Json, Options, Report, run_child, say, scratch_folder

NAME = "cores"
QUESTION = "How does speed grow with workers, from 1 to the number of cores?"
MODULE = "benchmarks.contenders.cores"
WANTED = 0.8
"""Of the speed of one worker, for each."""

WORDS = {
    "prepared": "prepared 224x224x3",
    "photographs": "photographs",
    "shared": "photographs",
}


def run(options: Options) -> Report:
    cores = len(os.sched_getaffinity(0))
    workers = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= cores]
    given: Json = {
        "workers": workers,
        "epochs": 1 if options.quick else 2,
        "pictures": 3200 if options.quick else 12_800,
        "each": 256 if options.quick else 512,
    }
    with scratch_folder() as scratch:
        what = make_pictures(scratch / "photos", options.data, 200 if options.quick else 1000)
        given |= {"photos": str(scratch / "photos"), "folder": str(scratch)}
        found: dict[str, Any] = {}
        for part in WORDS:
            say(f"  {part}")
            found[part] = run_child(MODULE, {**given, "part": part}, scratch=scratch)
    columns, checks = ["workers"], []
    rows = [[str(count)] for count in workers]
    for part, result in found.items():
        for who, rates in result["rates"].items():
            name = f"{WORDS[part]}: {who}"
            columns.append(name)
            shares = [rate / count / rates[0] for rate, count in zip(rates, workers, strict=True)]
            for row, rate, share in zip(rows, rates, shares, strict=True):
                row.append(f"{rate:,.0f} ({share:.2f})")
            if who.startswith("stallfree"):
                text = f"{name}: speed of each of {workers[-1]} workers over that of one"
                checks.append(Check(text, shares[-1], WANTED))
    return Report(
        columns=columns,
        rows=rows,
        checks=checks,
        notes=[
            f"Samples/s; in parentheses that per worker, over the speed of one worker. Prepared: {given['pictures']:,} "
            "pictures in memory, batches of 64; torch's loader indexes a tensor in shared memory. Photographs: "
            f"{what}; decoded, cut at random, resized to 224 and mirrored; torch's loader reads files in memory and "
            "decodes them with simplejpeg, stallfree has them encoded in its cache, which the first epoch fills (the "
            f"start of the workers is in it). 8 jobs: one `SharedLoader` for 8 processes, samples/s of each; the jobs "
            f"need processor time beside the workers. Photographs are {given['each']} per worker, so that all epochs "
            f"are of about the same length; the median of {given['epochs']} after the first."
            + ("" if found["photographs"]["native"] else " Without the compiled part of `stallfree.vision`.")
        ],
        versions=found["prepared"]["versions"],
        raw={part: result["rates"] for part, result in found.items()},
    )
