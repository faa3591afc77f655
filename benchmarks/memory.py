"""Peak memory of the cache and the staging ring, index included, against what they were given."""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, run_child, scratch_folder

NAME = "memory"
QUESTION = "Do cache and staging ring together stay within the memory that they were given, index included?"
CASES = (
    # records, policy, capacity, staging
    ("fixed", "minio", "256MiB", "80MiB"),
    ("fixed", "lru", "256MiB", "80MiB"),
    ("varied", "minio", "256MiB", "80MiB"),
    ("varied", "lru", "256MiB", "80MiB"),
    ("small", "lru", "64MiB", "16MiB"),
)
SAMPLES = {"fixed": 4_000, "varied": 4_000, "small": 60_000}
MIB = 1 << 20


def run(options: Options) -> Report:
    with scratch_folder() as scratch:
        runs = [
            run_child(
                "benchmarks.memory",
                {"records": records, "policy": policy, "capacity": capacity, "staging": staging},
                scratch=scratch,
            )
            for records, policy, capacity, staging in (CASES[:2] if options.quick else CASES)
        ]
    words = {
        "fixed": "224x224x3 pictures of one size",
        "varied": "arrays of 10 to 250 KB",
        "small": "arrays of 4 KB",
    }
    rows, checks = [], []
    for found in runs:
        share = found["peak"] / found["asked"]
        rows.append(
            [
                f"{words[found['records']]}, {found['policy']}",
                f"{found['asked'] / MIB:.1f}",
                f"{found['peak'] / MIB:.1f}",
                f"{found['cache'] / MIB:.1f}",
                f"{found['ring'] / MIB:.1f}",
                f"{found['data'] / MIB:,.0f}",
                f"{found['evictions']:,}",
            ]
        )
        what = f"{words[found['records']]}, {found['policy']}: peak memory of cache and staging over what was asked"
        checks.append(Check(what, share, 1.0, "<=", ".3f"))
    return Report(
        columns=[
            "records, policy",
            "asked, MiB",
            "peak, MiB",
            "peak of the cache",
            "peak of the ring",
            "data",
            "evictions",
        ],
        rows=rows,
        checks=checks,
        notes=[
            "Asked: `capacity` of the cache plus `staging` of the loader. Peak: pages that the files of both take in "
            "shared memory, looked at every 2 ms during two epochs with 2 workers over data several times as large."
        ],
        versions=runs[0]["versions"],
        raw=runs,
    )


class Arrays(Dataset[Any]):
    """Made-up records: of one size, of varied sizes, or small."""

    def __init__(self, records: str) -> None:
        self.records = records

    def __len__(self) -> int:
        return SAMPLES[self.records]

    def __getitem__(self, id: int) -> Any:
        return np.full(self.size(id), id % 251, np.uint8), id

    def size(self, id: int) -> int:
        if self.records == "varied":
            return 10_000 + id * 7919 % 240_000
        return 224 * 224 * 3 if self.records == "fixed" else 4096


def _first_bytes(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of records whose sizes differ: all of them in one tensor, and their labels."""
    return torch.from_numpy(np.concatenate([array for array, _ in samples])), torch.tensor([id for _, id in samples])


class Watch:
    """Looks at the memory that the files below a folder take, as often as it can."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.peak = {"all": 0, "cache": 0, "ring": 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def look(self) -> None:
        cache = ring = 0
        for folder, _, files in os.walk(self.root):
            for file in files:
                try:
                    size = os.stat(os.path.join(folder, file)).st_blocks * 512
                except FileNotFoundError:
                    continue
                if Path(folder).name.startswith("ring-"):
                    ring += size
                else:
                    cache += size
        for name, size in (("all", cache + ring), ("cache", cache), ("ring", ring)):
            self.peak[name] = max(self.peak[name], size)

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self.look()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.look()


def child() -> None:
    given = json.loads(sys.argv[1])
    data = Arrays(given["records"])
    varied = given["records"] == "varied"
    with Watch(Path(os.environ["STALLFREE_ROOT"])) as watch:
        cached = sf.CachedDataset(data, capacity=given["capacity"], policy=given["policy"])
        loader = sf.DataLoader(
            cached,
            batch_size=64 if given["records"] != "small" else 256,
            shuffle=True,
            num_workers=2,
            staging=given["staging"],
            collate_fn=_first_bytes if varied else None,
        )
        for _ in range(2):
            if (samples := sum(len(labels) for _, labels in loader)) != len(data):
                raise AssertionError(f"{samples} samples instead of {len(data)}")
            watch.look()
        evictions = cached.stats().evictions
        cached.close()
    asked = sum(int(text.removesuffix("MiB")) * MIB for text in (given["capacity"], given["staging"]))
    size = sum(data.size(id) for id in range(len(data)))
    peak = {"peak": watch.peak["all"], "cache": watch.peak["cache"], "ring": watch.peak["ring"]}
    emit(
        {**given, **peak, "asked": asked, "data": size, "evictions": evictions},
        stallfree=version("stallfree"),
        torch=torch.__version__,
        numpy=np.__version__,
    )


if __name__ == "__main__":
    child()
