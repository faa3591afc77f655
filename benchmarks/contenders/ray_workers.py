"""stallfree with Ray workers and with local ones, torch's loader and Ray Data, on the same prep."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import islice
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.contender import emit

BATCH, SIDE = 64, 224
READY_SECONDS = 900.0


class Sleeping(torch.utils.data.Dataset[Any]):
    """Prep of 20 ms that needs no processor."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, id: int) -> Any:
        time.sleep(0.02)
        return torch.tensor(id), os.getpid()


class Computing(torch.utils.data.Dataset[Any]):
    """A picture of 150 KB, prepared by some milliseconds of computation."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, id: int) -> Any:
        values = np.random.default_rng(id).random((SIDE, SIDE, 3), np.float32)
        for _ in range(4):
            values = np.sin(values)
        return torch.from_numpy((values * 255).astype(np.uint8)), os.getpid()


def prepared(dataset: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The prep of a whole batch, for Ray Data."""

    def prepare(batch: dict[str, Any]) -> dict[str, Any]:
        samples = [dataset[int(id)] for id in batch["id"]]
        return {
            "data": np.stack([sample.numpy() for sample, _ in samples]),
            "pid": np.array([pid for _, pid in samples]),
        }

    return prepare


def rate_of(batches: Iterator[Any], workers: int, count: int, pids: Callable[[Any], Iterable[int]]) -> float:
    """Batches per second over `count` batches, once all workers have delivered some."""
    seen: dict[int, int] = {}
    end = time.monotonic() + READY_SECONDS
    while len([pid for pid, delivered in seen.items() if delivered >= 2]) < workers:
        if time.monotonic() > end:
            raise RuntimeError(f"{len(seen)} of {workers} workers were ready within {READY_SECONDS:g} s")
        for pid in set(pids(next(batches))):
            seen[pid] = seen.get(pid, 0) + 1
    for _ in islice(batches, 2 * workers + 2):  # what is ready already
        pass
    begun = time.perf_counter()
    for _ in islice(batches, count):
        pass
    return count / (time.perf_counter() - begun)


def of_pair(batch: Any) -> list[int]:
    return batch[1].tolist()  # type: ignore[no-any-return]


def with_loader(loader: Any, workers: int, count: int) -> float:
    batches = iter(loader)
    try:
        return rate_of(batches, workers, count, of_pair)
    finally:
        del batches
        if isinstance(loader, sf.DataLoader):
            loader.close()


def with_ray(dataset: Any, workers: int, count: int, address: str) -> float:
    spec = sf.RayWorkers(workers, address=address)
    return with_loader(sf.DataLoader(dataset, batch_size=BATCH, workers=spec), workers, count)


def with_local(dataset: Any, workers: int, count: int) -> float:
    return with_loader(sf.DataLoader(dataset, batch_size=BATCH, num_workers=workers), workers, count)


def with_torch(dataset: Any, workers: int, count: int) -> float:
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=workers)
    return with_loader(loader, workers, count)


def with_ray_data(dataset: Any, workers: int, count: int, address: str) -> float:
    import ray
    import ray.data

    ray.init(address=address, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        ids = ray.data.range(BATCH * (count + 4 * workers), override_num_blocks=count + 4 * workers)
        made = ids.map_batches(
            prepared(dataset), batch_size=BATCH, batch_format="numpy", concurrency=workers, num_cpus=1
        )
        batches = made.iter_torch_batches(batch_size=BATCH, prefetch_batches=8)
        found = iter(batches)
        for _ in islice(found, 2 * workers):  # Ray Data starts a process per task at first
            pass
        begun = time.perf_counter()
        got = sum(1 for _ in islice(found, count))
        return got / (time.perf_counter() - begun)
    finally:
        ray.shutdown()


def sleep(given: dict[str, Any], address: str) -> dict[str, Any]:
    found: dict[str, Any] = {"ray": {}}
    for workers in given["counts"]:
        found["ray"][workers] = with_ray(Sleeping(), workers, max(16, 6 * workers), address)
        print(f"{workers} Ray workers: {found['ray'][workers]:.2f} batches/s", file=sys.stderr, flush=True)
    for workers in given["others"]:
        found["torch"] = with_torch(Sleeping(), workers, 6 * workers)
        found["ray_data"] = with_ray_data(Sleeping(), workers, 6 * workers, address)
    return found


def compute(given: dict[str, Any], address: str) -> dict[str, Any]:
    workers, count = given["workers"], 40
    ways: dict[str, Callable[[], float]] = {
        "local": lambda: with_local(Computing(), workers, count),
        "ray": lambda: with_ray(Computing(), workers, count, address),
        "torch": lambda: with_torch(Computing(), workers, count),
        "ray_data": lambda: with_ray_data(Computing(), workers, count, address),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given["rounds"]):
        for name, way in ways.items():
            found[name].append(way())
            print(f"{name}: {found[name][-1]:.2f} batches/s", file=sys.stderr, flush=True)
    return found


def main() -> None:
    given = json.loads(sys.argv[1])
    from ray.cluster_utils import Cluster

    cpus = 32 if given["job"] == "sleep" else 2
    sizes = {"num_cpus": cpus, "object_store_memory": 1 << 30}
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**sizes)
    try:
        found = {"sleep": sleep, "compute": compute}[given["job"]](given, cluster.address)
    finally:
        cluster.shutdown()
    emit({"found": found}, **{name: version(name) for name in ("stallfree", "torch", "ray", "pyarrow")})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
