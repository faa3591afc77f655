"""Photographs decoded on CPU cores and on a GPU: the figures that `benchmarks/gpu.py` wrote."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import harness
from benchmarks import run as runner
from benchmarks.harness import BenchmarkError, Check, Json, Options, Report

NAME = "gpu_prep"
QUESTION = (
    "How many photographs do CPU cores and the GPU's decoder prepare, and how busy is the GPU that trains on them?"
)


def run(options: Options) -> Report:
    raise BenchmarkError("run `python benchmarks/gpu.py OUT` on a machine with a GPU, then again with --page")


def write_page(out: Path) -> None:
    """Write the results and the pages from the figures in `out`."""
    found: dict[str, Json] = {name: _read(out / f"{name}.json") for name in ("training", "pixels", "copies", "decoder")}
    path = harness.save(_Case(), _report(found), Options())
    content = json.loads(path.read_text()) | {"machine": found["training"]["machine"]}
    path.write_text(json.dumps(content, indent=1) + "\n")
    harness.write_pages(runner.NAMES + runner.NAMED)


class _Case:
    NAME, QUESTION, run = NAME, QUESTION, staticmethod(run)


def _read(path: Path) -> Json:
    if not path.exists():
        raise BenchmarkError(f"{path} is missing: the part has written no figures")
    found: Json = json.loads(path.read_text())
    return found


def _report(found: dict[str, Json]) -> Report:
    training = found["training"]
    rows, alone = [], {}
    for name, each in training.items():
        if isinstance(each, dict) and "loader alone" in each:
            both, alone[name] = each["with a ResNet-50"], each["loader alone"]["pictures/s"]
            rows.append([name, f"{alone[name]:,.0f}", f"{both['pictures/s']:,.0f}", f"{both['busy']:.3f}"])
    ratio = alone["2 cores, GPU"] / alone["2 cores, CPU"]
    checks = [
        Check("2 cores, loader alone: the GPU's decoder over the CPUs'", ratio, 3.0),
        Check("1,000 pictures: mean difference between both placements", found["pixels"]["mean"], 2.0, "<", ".2f"),
    ]
    for milliseconds in (5, 10):
        low, middle, high = sorted(found["copies"][f"steps of {milliseconds} ms"]["`DevicePrefetcher`"])
        text = f"steps of {milliseconds} ms, `DevicePrefetcher`: the longer of copy and step over the measured one"
        checks.append(Check(text, middle, 0.97, ">=", ".3f", (low, high)))
    notes = [
        f"{training['device']}. 200 photographs of 113 KB in memory, repeated; a random part of each is resized to 224 "
        "and mirrored half the time; batches of 128; autocast to bfloat16. All processes and threads run on so many "
        "cores, one worker for each. One batch that stays on the GPU: "
        f"{training['its pictures/s']:,.0f} pictures/s. torchvision: `decode_jpeg` of the batch, then its "
        "`RandomResizedCrop` and flip, picture by picture on the GPU. Differences: five crops of each photograph."
    ]
    columns = [
        "cores, who decodes",
        "loader alone, pictures/s",
        "with a ResNet-50, pictures/s",
        "busy share of the GPU",
    ]
    return Report(columns, rows, checks, notes, {"torch": training["torch"]}, raw=found)
