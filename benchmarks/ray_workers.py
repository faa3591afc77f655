"""Prep on a Ray cluster: does it scale with the workers, and what does the way through Ray cost?"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness import BenchmarkError, Check, Json, Options, Report, Spread, run_child, say, scratch_folder

NAME = "ray_workers"
QUESTION = (
    "Prep by `RayWorkers` on a cluster of three nodes (on one machine): does it scale with the number of workers, what "
    "does the way through Ray's object store cost, and how do Ray Data and torch's loader do on the same job?"
)
MODULE = "benchmarks.contenders.ray_workers"
WORKERS = (1, 4, 16, 64)
OTHERS = {"torch": "torch's loader", "ray_data": "Ray Data"}


def run(options: Options) -> Report:
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        raise BenchmarkError("Ray Data is not installed: pip install 'ray[data]'")
    with scratch_folder() as scratch:
        counts = WORKERS[:2] if options.quick else WORKERS
        sleeping = _child({"job": "sleep", "counts": counts, "others": [counts[-1]]}, scratch)
        say(f"  sleeping prep: {sleeping['found']}")
        rounds = 1 if options.quick else 5
        computing = _child({"job": "compute", "workers": 2, "rounds": rounds}, scratch)
        say(f"  computing prep: {computing['found']}")
    return _report(sleeping["found"], computing["found"], sleeping["versions"])


def _child(params: Json, scratch: Path) -> Json:
    return run_child(MODULE, params, scratch=scratch, python=sys.executable)


def _report(sleeping: Json, computing: Json, versions: dict[str, str]) -> Report:
    rows, checks = [], []
    rates = {int(count): rate for count, rate in sleeping["ray"].items()}
    for count, rate in rates.items():
        share = rate / count / rates[1]
        rows.append(
            ["20 ms of sleep per sample", f"stallfree, {count} Ray workers", f"{rate:,.2f}", f"{share:.2f} of linear"]
        )
        if count > 1:
            checks.append(Check(f"ray_workers: {count} Ray workers against one, as a share of linear", share, 0.9))
    most = max(rates)
    for name, shown in OTHERS.items():
        rate = sleeping[name]
        rows.append(
            ["", f"{shown}, {most} workers", f"{rate:,.2f}", f"stallfree has {rates[most] / rate:.2f} times that"]
        )
        checks.append(Check(f"ray_workers: {most} Ray workers, sleeping prep, over {shown}", rates[most] / rate, 1.0))
    local = Spread.of(computing["local"])
    rows.append(["9.6 MB batches, computing prep", "stallfree, 2 local workers", local.show(",.2f"), ""])
    ray = computing["ray"]
    for name, shown, wanted in (
        ("local", "local workers", 0.85),
        ("torch", "torch's loader", 1.0),
        ("ray_data", "Ray Data", 1.0),
    ):
        ratio = Spread.of([mine / other for mine, other in zip(ray, computing[name], strict=True)])
        if name != "local":
            rows.append(["", f"{shown}, 2 workers", Spread.of(computing[name]).show(",.2f"), ""])
        checks.append(
            Check(
                f"ray_workers: 2 Ray workers, 9.6 MB batches, over {shown}",
                ratio.median,
                wanted,
                spread=(ratio.low, ratio.high),
            )
        )
    rows.append(["", "stallfree, 2 Ray workers", Spread.of(ray).show(",.2f"), ""])
    return Report(
        columns=["prep", "loader", "batches/s", ""],
        rows=rows,
        checks=checks,
        notes=[
            "Batches of 64. Measured in an epoch in which all workers are ready. All nodes, the training process and "
            "the workers share the cores of this machine, so the sleeping prep shows how the loader scales, and the "
            "computing prep, on as many workers as there are cores, what it costs. Ray Data: `map_batches` by as many "
            "tasks at once, and `iter_torch_batches` with `prefetch_batches`; torch's loader: as many local workers."
        ],
        versions=versions,
        raw={"sleeping": sleeping, "computing": computing},
    )
