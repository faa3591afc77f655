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
SLEEPING = (("ray", 1), ("ray", 4), ("ray", 16), ("torch", 16), ("ray_data", 16), ("ray", 64))
COMPUTING = (("light prep, 3 nodes", 4, 3), ("light prep, 1 node", 4, 1), ("prep as of photographs, 3 nodes", 16, 3))
SHOWN = {"local": "stallfree, 2 local workers", "ray": "stallfree, 2 Ray workers", "torch": "torch's loader, 2 workers"}
SHOWN["ray_data"] = "Ray Data, 2 tasks at once"


def run(options: Options) -> Report:
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        raise BenchmarkError("Ray Data is not installed: pip install 'ray[data]'")
    sleeping: dict[tuple[str, int], Json] = {}
    computing: dict[str, Json] = {}
    with scratch_folder() as scratch:
        for loader, workers in SLEEPING[:2] if options.quick else SLEEPING:
            params = {"job": "sleep", "loader": loader, "workers": workers, "rounds": 3, "nodes": 3}
            sleeping[loader, workers] = _child(params, scratch)
            say(f"  sleeping prep, {loader}, {workers}: {sleeping[loader, workers]['found']}")
        rounds = 1 if options.quick else 15
        for name, sines, nodes in COMPUTING[:1] if options.quick else COMPUTING:
            params = {"job": "compute", "workers": 2, "rounds": rounds, "sines": sines, "nodes": nodes}
            computing[name] = _child({**params, "batches": 16, "ray_data": 1 if options.quick else 3}, scratch)
            say(f"  {name}: {computing[name]['found']}")
    return _report(sleeping, computing)


def _child(params: Json, scratch: Path) -> Json:
    return run_child(MODULE, params, scratch=scratch, python=sys.executable)


def _report(sleeping: dict[tuple[str, int], Json], computing: dict[str, Json]) -> Report:
    rows, checks = [], []
    one = Spread.of(sleeping["ray", 1]["found"]["rates"]).median
    for (loader, workers), child in sleeping.items():
        rates = Spread.of(child["found"]["rates"])
        share = rates.median / workers / one
        shown = {"ray": f"stallfree, {workers} Ray workers", "torch": f"torch's loader, {workers} workers"}
        cores = Spread.of(child["found"]["cores"]).show(".2f") if "cores" in child["found"] else ""
        rows.append(
            [
                "20 ms of sleep per sample",
                shown.get(loader, f"Ray Data, {workers} tasks at once"),
                rates.show(",.2f"),
                f"{share:.2f} of linear",
                cores,
            ]
        )
        if loader == "ray" and workers > 1:
            what = f"ray_workers: {workers} Ray workers against one, as a share of linear"
            checks.append(Check(what, share, 0.9))
        elif loader != "ray":
            ours = Spread.of(sleeping["ray", workers]["found"]["rates"]).median
            checks.append(
                Check(f"ray_workers: {workers} Ray workers, sleeping prep, over {loader}", ours / rates.median, 1.0)
            )
    for name, child in computing.items():
        found = child["found"]
        local = Spread.of(found["local"]).median
        for loader, shown_as in SHOWN.items():
            rates = Spread.of(found[loader])
            rows.append([name, shown_as, rates.show(",.2f"), f"{rates.median / local:.2f} of local", ""])
        ray = found["ray"]
        for other, wanted in (("local", 0.85), ("torch", 1.0)):
            ratio = Spread.of([mine / theirs for mine, theirs in zip(ray, found[other], strict=True)])
            what = f"ray_workers: 2 Ray workers over {SHOWN[other]}, 9.6 MB batches, {name}"
            checks.append(Check(what, ratio.median, wanted, spread=(ratio.low, ratio.high)))
        ahead = Spread.of(ray).median / Spread.of(found["ray_data"]).median
        checks.append(Check(f"ray_workers: 2 Ray workers over Ray Data, 9.6 MB batches, {name}", ahead, 1.0))
    return Report(
        columns=["prep", "loader", "batches/s", "", "cores in use"],
        rows=rows,
        checks=checks,
        notes=[
            "Batches of 64, measured after all workers are ready. All nodes, the training process and workers share "
            "the cores of this machine: the sleeping prep shows how the loader scales, and the computing prep, on as "
            "many workers as there are cores, what the way through Ray costs. Loaders of the computing prep stay open "
            "and are measured in turn. Ray Data: `map_batches` and `iter_torch_batches(prefetch_batches=8)`, measured "
            "after the others, since it computes ahead. Ray's workers have the priority of local ones "
            "(`RAY_worker_niceness=0`).",
        ],
        versions=next(iter(sleeping.values()))["versions"],
        raw={
            "sleeping": {f"{loader}, {workers}": child["found"] for (loader, workers), child in sleeping.items()},
            "computing": {name: child["found"] for name, child in computing.items()},
        },
    )
