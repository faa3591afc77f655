"""What the tests of the packager share: a job that has a data set, a cache and flags."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np

from smart_data import Rows
from stallfree import Compose
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.reader import Reader
from stallfree.importance.packages import LOW, PENDING, Packages, PackageWork, SharedFlags
from stallfree.importance.source import Packager
from stallfree.pipeline.codec import encode

WANTED = LOW | PENDING
RECORD = 104
"""Bytes of a record of `Rows`."""

TEN = 10 * RECORD
"""`package_bytes` of packages of ten samples."""


def package_size(samples: int) -> int:
    """Of a package, counted by hand: records at multiples of 64."""
    return 128 * (samples - 1) + RECORD


class Job:
    """What a training process has: a data set, a cache, flags."""

    def __init__(self, path: Path, count: int = 200, *, capacity: int = 1 << 20, step: Any = None, **rows: Any) -> None:
        self.folder, self.log = path / "packages", path / "log"
        self.source = Rows(count, log=self.log, **rows)
        example, policy = (np.zeros(8, np.int32), 0), "importance"
        self.cache = SampleCache(count, capacity=capacity, fingerprint="rows", policy=policy, example=example)
        self.reader = Reader(self.source, self.cache, Compose([step] if step else []), Compose([]))
        self.shared = SharedFlags(count)
        self.packager: Packager | None = None
        self.works: list[PackageWork] = []

    def flag(self, ids: Any, flags: int = WANTED) -> None:
        self.shared.flags[ids] = flags

    def start(self, *, budget: int = 1 << 20) -> Packager:
        options: Any = {"write_budget": budget, "context": multiprocessing.get_context("fork"), "package_bytes": TEN}
        self.packager = Packager(self.reader, self.folder, **options)
        given, self.shared = self.shared, self.packager.shared
        self.shared.flags[:], self.shared.fields[:] = given.flags, given.fields
        given.close()
        return self.packager

    def work(self, *, budget: int = 1 << 20) -> PackageWork:
        """What the packaging process does, in this process."""
        self.folder.mkdir(exist_ok=True)
        self.works.append(PackageWork(self.reader, self.shared, self.folder, budget, TEN))
        return self.works[-1]

    def add(self, packages: Packages, ids: Any) -> None:
        assert packages.add(list(ids), [encode(self.source.fetch(id), allow_pickle=False) for id in ids])

    def fetched(self) -> list[int]:
        return list(map(int, self.log.read_text().split())) if self.log.exists() else []

    def packed(self, packages: Packages) -> dict[int, int]:
        """Which package each sample is in; all of them hold what they should."""
        found: dict[int, int] = {}
        counts = self.shared.fields.copy()
        for number in range(len(packages.sizes)):
            ids, values = packages.read(number, lambda ids: np.ones(len(ids), bool))
            assert len(ids)
            assert not {*ids.tolist()} & {*found}
            assert all(label == id and (row == id).all() for id, (row, label) in zip(ids.tolist(), values, strict=True))
            found |= dict.fromkeys(ids.tolist(), number)
        self.shared.fields[:] = counts
        return found

    def resident(self) -> set[int]:
        return set(np.flatnonzero(self.cache.resident(range(len(self.source)))).tolist())

    def close(self) -> None:
        while self.works:
            self.works.pop().close()
        if self.packager is not None:
            self.packager.close()
        self.shared.close()
        self.cache.close()
