"""Slow storage and a cache smaller than the data: how many bytes still come from storage."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.harness import Check, Options, Report, run_child, scratch_folder
from benchmarks.photos import CropAndFlip, make_photos

NAME = "cold_storage"
QUESTION = (
    "With storage of 60 MB/s and a cache for a part of the data (policy minio), how many bytes come from storage in "
    "each epoch after the first?"
)
SHARES = (0.35, 0.65)
EPOCHS = 3


def run(options: Options) -> Report:
    with scratch_folder() as scratch:
        what = make_photos(scratch / "photos", options.data, 400 if options.quick else 2000)
        runs = [
            run_child("benchmarks.cold_storage", {"photos": str(scratch / "photos"), "share": share}, scratch=scratch)
            for share in (0.0, *SHARES)
        ]
    rows, checks = [], []
    for found in runs:
        later = found["epochs"][1:]
        shares = [epoch["bytes"] / found["total"] for epoch in later]
        expected = [epoch["absent"] / found["total"] for epoch in later]
        rows.append(
            [
                f"stallfree, {found['share']:.0%} cache" if found["share"] else "torch DataLoader, no cache",
                f"{1 - expected[0]:.4f}",
                f"{expected[0]:.4f}",
                ", ".join(f"{share:.4f}" for share in shares),
                f"{found['epochs'][0]['seconds']:.1f}",
                ", ".join(f"{epoch['seconds']:.1f}" for epoch in later),
            ]
        )
        if found["share"]:
            off = max(abs(epoch["bytes"] - epoch["absent"]) for epoch in later)
            checks.append(
                Check(
                    f"60 MB/s, cache of {found['share']:.0%}: bytes from storage per later epoch, away from "
                    "1 - resident share (bytes)",
                    off,
                    0,
                    "==",
                    ",.0f",
                )
            )
    return Report(
        columns=[
            "loader",
            "resident share",
            "1 - resident share",
            "share of the data read, later epochs",
            "s, first epoch",
            "s, later epochs",
        ],
        rows=rows,
        checks=checks,
        notes=[
            f"{what}, behind a `ThrottledSource` that counts; random order, batches of 64, 2 workers. Shares are of "
            "bytes; what is resident is looked up before each epoch. Records lie in blocks, so slightly less fits than "
            "was asked."
        ],
        versions=runs[-1]["versions"],
        raw=runs,
    )


def child() -> None:
    given = json.loads(sys.argv[1])
    source = sf.testing.ThrottledSource(sf.ImageFolder(given["photos"], CropAndFlip()), bandwidth="60MB/s")
    sizes = np.array([len(source.source.fetch(id)[0]) for id in range(len(source))])
    total = int(sizes.sum())
    options: dict[str, Any] = {"batch_size": 64, "shuffle": True, "num_workers": 2, "persistent_workers": True}
    cached = None
    loader: Any
    if given["share"]:
        cached = sf.CachedDataset(source, capacity=int(total * given["share"]), form="fetched")
        loader = sf.DataLoader(cached, **options)
    else:
        loader = torch.utils.data.DataLoader(source, **options)  # type: ignore[arg-type]
    epochs = []
    for _ in range(1 + EPOCHS):
        resident = np.zeros(len(sizes), bool) if cached is None else cached.cache.resident(np.arange(len(sizes)))
        source.reset()
        start = time.perf_counter()
        samples = sum(len(labels) for _, labels in loader)
        seconds = time.perf_counter() - start
        if samples != len(sizes):
            raise AssertionError(f"{samples} samples instead of {len(sizes)}")
        epochs.append({"bytes": source.bytes, "absent": int(sizes[~resident].sum()), "seconds": seconds})
    if cached is not None:
        loader.close()
        cached.close()
    emit(
        {"share": given["share"], "total": total, "epochs": epochs},
        stallfree=version("stallfree"),
        torch=torch.__version__,
        numpy=np.__version__,
    )


if __name__ == "__main__":
    child()
