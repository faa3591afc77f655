"""stallfree with Ray workers and with local ones, torch's loader and Ray Data, on the same prep."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from typing import Any

import numpy as np
import psutil
import torch

import stallfree as sf
from benchmarks.contender import emit

BATCH, SIDE = 64, 224
READY_SECONDS = 900.0
SETTLE_SECONDS = 1.5
READY_BATCHES = 20
"""Most batches that two workers have prepared ahead."""


class Sleeping(torch.utils.data.Dataset[Any]):
    """Prep of 20 ms that needs no processor."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, id: int) -> Any:
        time.sleep(0.02)
        return torch.tensor(id), os.getpid()


class Computing(torch.utils.data.Dataset[Any]):
    """A picture of 150 KB, prepared by `rounds` sines per value (about 0.6 ms each)."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, id: int) -> Any:
        values = np.random.default_rng(id).random((SIDE, SIDE, 3), np.float32)
        for _ in range(self.rounds):
            np.sin(values, out=values)
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


class Loader:
    """An open loader whose rate is measured in windows."""

    def __init__(self, loader: Any, workers: int) -> None:
        self._loader, self._workers = loader, workers
        self._batches = iter(loader)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        """Until each worker has delivered two batches; local workers stand in for Ray workers that start."""
        seen: dict[int, int] = {}
        end = time.monotonic() + READY_SECONDS
        while len([pid for pid, delivered in seen.items() if delivered >= 2]) < self._workers:
            if time.monotonic() > end:
                raise RuntimeError(f"{len(seen)} of {self._workers} workers were ready within {READY_SECONDS:g} s")
            ours = {child.pid for child in psutil.Process().children()}
            local = isinstance(self._loader, sf.DataLoader) and isinstance(self._loader.workers, sf.RayWorkers)
            for pid in set(next(self._batches)[1].tolist()):
                if not (local and pid in ours):
                    seen[pid] = seen.get(pid, 0) + 1

    def rate(self, count: int) -> tuple[float, float]:
        """Batches per second over `count` batches, after those that are ready already, and the cores in use."""
        for _ in islice(self._batches, max(READY_BATCHES, 2 * self._workers + 2)):
            pass
        begun, busy = time.perf_counter(), _busy_seconds()
        for _ in islice(self._batches, count):
            pass
        took = time.perf_counter() - begun
        return count / took, (_busy_seconds() - busy) / took

    def close(self) -> None:
        del self._batches
        if isinstance(self._loader, sf.DataLoader):
            self._loader.close()


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def with_ray(dataset: Any, workers: int, address: str) -> Loader:
    spec = sf.RayWorkers(workers, address=address)
    return Loader(sf.DataLoader(dataset, batch_size=BATCH, workers=spec), workers)


def with_local(dataset: Any, workers: int) -> Loader:
    return Loader(sf.DataLoader(dataset, batch_size=BATCH, num_workers=workers), workers)


def with_torch(dataset: Any, workers: int) -> Loader:
    return Loader(torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=workers), workers)


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
        took = time.perf_counter() - begun
        for _ in found:  # Ray ends the process if it is shut down under way
            pass
        return got / took
    finally:
        ray.shutdown()


def sleep(given: dict[str, Any], address: str) -> dict[str, Any]:
    workers, count = given["workers"], max(16, 6 * given["workers"])
    if given["loader"] == "ray_data":
        return {"rates": [with_ray_data(Sleeping(), workers, count, address)]}
    loader = with_ray(Sleeping(), workers, address) if given["loader"] == "ray" else with_torch(Sleeping(), workers)
    windows = [loader.rate(count) for _ in range(given["rounds"])]
    loader.close()
    return {"rates": [rate for rate, _ in windows], "cores": [cores for _, cores in windows]}


def compute(given: dict[str, Any], address: str) -> dict[str, Any]:
    """Windows of loaders that stay open, in turn; Ray Data after them, as it computes ahead as far as it has memory."""
    workers, count, dataset = given["workers"], given["batches"], Computing(given["sines"])
    loaders = {
        "local": with_local(dataset, workers),
        "ray": with_ray(dataset, workers, address),
        "torch": with_torch(dataset, workers),
    }
    found: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(given["rounds"] + 1):
        for name, loader in loaders.items():
            time.sleep(SETTLE_SECONDS)  # the loader before it prepares ahead
            rate, cores = loader.rate(count)
            print(f"{name}: {rate:.2f} batches/s on {cores:.2f} cores", file=sys.stderr, flush=True)
            if number:  # the first is a warm-up
                found[name].append(rate)
    for loader in loaders.values():
        loader.close()
    found["ray_data"] = [with_ray_data(dataset, workers, 40, address) for _ in range(given["ray_data"])]
    return found


def main() -> None:
    given = json.loads(sys.argv[1])
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - as local workers have it; Ray's default is 15
    from ray.cluster_utils import Cluster

    cpus = 32 if given["job"] == "sleep" else 2
    sizes = {"num_cpus": cpus, "object_store_memory": 1 << 30}
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    for _ in range(given["nodes"] - 1):
        cluster.add_node(**sizes)
    try:
        found = {"sleep": sleep, "compute": compute}[given["job"]](given, cluster.address)
    finally:
        cluster.shutdown()
    emit({"found": found}, **{name: version(name) for name in ("stallfree", "torch", "ray", "pyarrow")})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
