"""Prepared pictures of ImageNet's size in memory: samples/s."""

from __future__ import annotations

from benchmarks.harness import Options, Report
from benchmarks.prepared import report

NAME = "prepared_224"
QUESTION = "How fast do prepared 224x224x3 samples come out of memory, in batches of 64?"


def run(options: Options) -> Report:
    wanted = {"torch": 10, "limit": 0.6, "ffcv": 1.3, "tfdata": 1.3}
    return report(options, side=224, samples=200 * 64, batch=64, wanted=wanted)
