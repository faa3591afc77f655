"""Prepared pictures of CIFAR's size in memory: samples/s."""

from __future__ import annotations

from benchmarks.harness import Options, Report
from benchmarks.prepared import report

NAME = "prepared_32"
QUESTION = "How fast do prepared 32x32x3 samples come out of memory, in batches of 256?"


def run(options: Options) -> Report:
    return report(options, side=32, samples=200 * 256, batch=256, wanted={"torch": 10, "ffcv": 1.3, "tfdata": 1.3})
