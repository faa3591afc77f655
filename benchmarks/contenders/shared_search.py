"""A search with Ray Tune: so many trials at once, all on the same photographs behind one slow storage and one cache."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import tune

import stallfree as sf
from benchmarks.contender import emit
from benchmarks.photos import CropAndFlip

MEETING = 180.0
"""Longest wait of a trial for the others, in seconds."""

Json = dict[str, Any]


def trial(config: Json, source: sf.testing.ThrottledSource, given: Json) -> None:
    """Train, which is a wait per batch, for a fixed number of epochs; report after each, as trials do."""
    with open_cache(source, given) as cached, open_loader(cached, given) as loader:
        meet(Path(given["meeting"]), config["number"], given["trials"])
        times = [time.monotonic()]
        for _ in range(given["epochs"]):
            samples = 0
            for pictures, _labels in loader:
                samples += len(pictures)
                time.sleep(given["step"])
            if samples != len(source):
                raise AssertionError(f"{samples} samples instead of {len(source)}")
            times.append(time.monotonic())
            alone = 0
            tune.report({"times": times, "alone": alone})


def open_cache(source: sf.testing.ThrottledSource, given: Json) -> sf.CachedDataset:
    """The one cache of the host."""
    return sf.CachedDataset(source, capacity=given["capacity"], form="fetched", name="shared-search")


@contextlib.contextmanager
def open_loader(cached: sf.CachedDataset, given: Json) -> Iterator[Any]:
    """The loader of one trial."""
    options: Json = {"batch_size": given["batch"], "shuffle": True}
    if given["who"] == "shared":
        with sf.SharedLoader(cached, group="search", num_workers=2, **options) as loader:
            yield loader
    else:
        yield torch.utils.data.DataLoader(cached, num_workers=1, persistent_workers=True, **options)  # type: ignore[arg-type]


def meet(folder: Path, number: int, count: int) -> None:
    """Wait until all trials have started."""
    (folder / f"trial-{number}").touch()
    deadline = time.monotonic() + MEETING
    while len(list(folder.iterdir())) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(list(folder.iterdir()))} of {count} trials have started in {MEETING:.0f} s")
        time.sleep(0.01)


def search(source: sf.testing.ThrottledSource, given: Json) -> Json:
    """Run the search. When its trials began and ended, and what it read."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # or Ray would leave one in the home folder
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        meeting = Path(folder, "meeting")
        meeting.mkdir()
        start = time.monotonic()
        memory = 80 << 20  # of Ray's object store, the least that it takes
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=memory, log_to_driver=False, _temp_dir=folder)
        try:
            ready = tune.with_parameters(trial, source=source, given=given | {"meeting": str(meeting)})
            results = tune.Tuner(
                tune.with_resources(ready, {"cpu": 2 / given["trials"]}),
                param_space={"number": tune.grid_search(list(range(given["trials"])))},
                run_config=tune.RunConfig(name="search", storage_path=folder, verbose=0),
            ).fit()
        finally:
            ray.shutdown()
        whole = time.monotonic() - start
    if results.errors:
        raise results.errors[0]
    found = [result.metrics for result in results]
    times = np.array([metrics["times"] for metrics in found])
    return {
        "seconds": float(times[:, -1].max() - times[:, 0].min()),
        "whole": whole,
        "epochs": np.diff(times, axis=1).tolist(),
        "alone": sum(metrics["alone"] for metrics in found),
        "read": source.bytes,
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    photos = sf.ImageFolder(given["photos"], CropAndFlip())
    sizes = np.array([len(photos.fetch(id)[0]) for id in range(len(photos))])
    given["capacity"] = int(sizes.sum() * given["share"])
    source = sf.testing.ThrottledSource(photos, bandwidth=given["bandwidth"])
    with open_cache(source, given) as cached:
        for _ in sf.DataLoader(cached, batch_size=given["batch"]):  # fills the cache
            pass
        absent = ~cached.cache.resident(np.arange(len(sizes)))
        source.reset()
        found = search(source, given)
    source.close()
    emit(
        found | {"samples": len(sizes), "total": int(sizes.sum()), "absent": int(sizes[absent].sum())},
        stallfree=version("stallfree"),
        torch=torch.__version__,
        ray=ray.__version__,
    )


if __name__ == "__main__":
    main()
