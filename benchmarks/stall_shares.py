"""Stall shares of jobs whose answer is known beforehand."""

from __future__ import annotations

import json
import sys
import time
import zlib
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, run_child, scratch_folder
from stallfree.sources.base import BaseSource

NAME = "stall_shares"
QUESTION = "How near do stall shares come to those of jobs with known answers?"
CASES = (
    # what binds, milliseconds per sample: fetch, prep, compute
    # long enough for the throttle's own 0.1 ms of processor time per fetch to be little
    ("fetch", 20.0, 5.0, 8.0),
    ("fetch", 16.0, 10.0, 6.0),
    ("prep", 5.0, 10.0, 6.0),
    ("prep, fetch hidden", 8.0, 10.0, 3.0),
    ("compute", 5.0, 6.0, 12.0),
)
BATCH = 8
WORKERS = 1
BYTES = 20_000


def run(options: Options) -> Report:
    with scratch_folder() as scratch:
        found = [
            run_child(
                "benchmarks.stall_shares",
                {"fetch": fetch, "prep": prep, "compute": compute, "seconds": 1.0 if options.quick else 8.0},
                scratch=scratch,
            )
            for _, fetch, prep, compute in CASES
        ]
    rows, worst = [], 0.0
    for (binds, fetch, prep, compute), result in zip(CASES, found, strict=True):
        known = _known(fetch, prep, compute)
        for name, expected in known.items():
            got = result["shares"][name]
            off = max(abs(got[part] - expected[part]) for part in expected)
            worst = max(worst, off)
            rows.append(
                [
                    f"{fetch:g} / {prep:g} / {compute:g}",
                    f"{binds}, {name}",
                    *(f"{100 * expected[part]:.1f} / {100 * got[part]:.1f}" for part in expected),
                    f"{100 * off:.1f}",
                ]
            )
    return Report(
        columns=[
            "ms per sample: fetch / prep / compute",
            "binds",
            "compute %, known / found",
            "prep stall %",
            "fetch stall %",
            "apart",
        ],
        rows=rows,
        checks=[Check("largest difference, points", 100 * worst, 2.0, "<=", ".1f")],
        notes=[
            f"Fetch: a `ThrottledSource` over records of {BYTES:,} bytes in memory. Prep: so much processor time on "
            f"checksums, in {WORKERS} worker, so that no core is wanted twice. Compute: sleep. Batches of {BATCH}. "
            "Known: the epoch takes the longest of the three, with all data in memory the longer of prep and compute."
        ],
        versions=found[0]["versions"],
        raw=found,
    )


def _known(fetch: float, prep: float, compute: float) -> dict[str, dict[str, float]]:
    warm = max(prep, compute)
    cold = max(fetch, warm)
    return {
        name: {
            "compute": compute / whole,
            "prep_stall": (warm - compute) / whole,
            "fetch_stall": (whole - warm) / whole,
        }
        for name, whole in (("cold", cold), ("warm", warm))
    }


class Records(BaseSource):
    """Records in memory."""

    def __init__(self, prep: Any) -> None:
        self.pipeline = sf.Compose([prep])
        self._data = bytes(BYTES)

    def __len__(self) -> int:
        return 2000

    def _record(self, id: int) -> Any:
        return self._data, id

    def _where(self, id: int) -> str:
        return ""

    def fingerprint(self) -> str:
        return "stall-shares"


@sf.mark_random
class Work:
    """So many seconds of processor time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, record: Any) -> Any:
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            zlib.crc32(record[0])
        return np.zeros(256, np.uint8), record[1]


def child() -> None:
    given = json.loads(sys.argv[1])
    bandwidth = BYTES / (given["fetch"] / 1000)
    source = sf.testing.ThrottledSource(Records(Work(WORKERS * given["prep"] / 1000)), bandwidth=bandwidth)
    pause = BATCH * given["compute"] / 1000

    def step(_: object) -> None:
        time.sleep(pause)

    report = sf.analyze(source, step, batch_size=BATCH, num_workers=WORKERS, seconds=given["seconds"], progress=False)
    emit(report.data, stallfree=version("stallfree"), torch=torch.__version__)


if __name__ == "__main__":
    child()
