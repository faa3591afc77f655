"""Two epochs behind slow storage, with a cache in memory, one in memory over a disk, or room for all in memory."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.store_team import Records, room_for

WORKERS = 2


def main() -> None:
    given = json.loads(sys.argv[1])
    records = Records(given["samples"], given["size"])
    source = sf.testing.ThrottledSource(records, bandwidth=given["bandwidth"], latency=given["latency"])
    disk = Path(tempfile.mkdtemp(prefix="bench-tier-"))
    try:
        result = run(given, records, source, disk)
    finally:
        source.close()
        shutil.rmtree(disk, ignore_errors=True)
    emit(result, stallfree=version("stallfree"), torch=torch.__version__)


def run(given: dict[str, Any], records: Records, source: Any, disk: Path) -> dict[str, Any]:
    count = len(records)
    memory = count if given["who"] == "all" else round(count * given["share"])
    store: Any = "memory"
    if given["who"] == "tiers":
        store = sf.DiskTier(disk, capacity=room_for(count, records) + 4 * count + (1 << 20))
    with sf.CachedDataset(source, capacity=room_for(memory, records), store=store, form="fetched") as cached:
        options = {"batch_size": given["batch"], "shuffle": True, "num_workers": WORKERS, "persistent_workers": True}
        with sf.DataLoader(cached, **options) as loader:
            seconds, reads = [], []
            for epoch in range(2):
                if epoch and given["who"] == "tiers":
                    tier = cached.cache.tier
                    tier.drain(np.arange(count))  # what the workers are still writing to the disk
                    put_out_of_memory(tier.tier.records.path / "data")
                before = source.requests
                start = time.perf_counter()
                ids = [ids for _, ids in loader]
                seconds.append(time.perf_counter() - start)
                reads.append(source.requests - before)
                if sorted(torch.cat(ids).tolist()) != list(range(count)):
                    raise AssertionError("an epoch did not have each sample once")
        stats = cached.stats()
    return {
        "rates": [count / seconds[1]],
        "seconds": seconds,
        "reads": reads,
        "disk_hits": stats.tier_hits,
        "in_memory": stats.resident_items,
    }


def put_out_of_memory(file: Path) -> None:
    """Have the disk itself read from, and not the kernel's memory."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
