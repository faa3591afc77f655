"""What does Ray give: prep on a cluster, and a search whose trials share their loader?"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stallfree as sf
from benchmarks.data import FromFunction
from benchmarks.harness import Case, Condition, Contender, Figure
from benchmarks.photos import photos
from benchmarks.questions.prep import CropAndFlip

Figures = dict[str, Any]
BATCH, SIDE = 64, 224
READY_SECONDS, MEETING_SECONDS = 900.0, 180.0


# -- prep on a cluster ------------------------------------------------------------------------------------------------


def sleeping(id: int) -> Any:
    """Prep of 20 ms that needs no processor."""
    time.sleep(0.02)
    return torch.tensor(id), os.getpid()


def computing(id: int, rounds: int) -> Any:
    """A picture of 150 KB, prepared by `rounds` sines per value (about 0.6 ms each)."""
    values = np.random.default_rng(id).random((SIDE, SIDE, 3), np.float32)
    for _ in range(rounds):
        np.sin(values, out=values)
    return torch.from_numpy((values * 255).astype(np.uint8)), os.getpid()


def batches_per_second(loader: str, workers: int, sines: int, nodes: int, short: bool) -> Figures:
    """Batches/s of a loader on a Ray cluster of `nodes` nodes on this machine, after all workers are ready."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - as local workers have it; Ray's default is 15
    import ray
    from ray.cluster_utils import Cluster

    torch.set_num_threads(1)
    data = FromFunction(1 << 20, partial(computing, rounds=sines) if sines else sleeping)
    sizes: Figures = {"num_cpus": 2 if sines else 32, "object_store_memory": 1 << 30}
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(**sizes)
    count = 4 if short else max(16, 6 * workers)
    try:
        if loader == "ray_data":
            return {"rate": _ray_data_rate(data, workers, count, cluster.address)}
        if loader == "ray":
            ray.init(address=cluster.address, log_to_driver=False)
            made: Any = sf.DataLoader(data, batch_size=BATCH, workers=sf.RayWorkers(workers))
        else:
            kind: Any = torch.utils.data.DataLoader if loader == "torch" else sf.DataLoader
            made = kind(data, batch_size=BATCH, num_workers=workers)
        batches = iter(made)
        _wait_for_workers(batches, workers)
        ahead = 2 if short else max(20, 2 * workers + 2)
        for _ in islice(batches, ahead):  # those that are prepared already
            pass
        begun = time.perf_counter()
        for _ in islice(batches, count):
            pass
        rate = count / (time.perf_counter() - begun)
        del batches
        if isinstance(made, sf.DataLoader):
            made.close()
        return {"rate": rate}
    finally:
        ray.shutdown()
        cluster.shutdown()


def _wait_for_workers(batches: Iterator[Any], workers: int) -> None:
    """Wait until each worker has delivered two batches."""
    delivered: dict[int, int] = {}
    end = time.monotonic() + READY_SECONDS
    while sum(count >= 2 for count in delivered.values()) < workers:
        if time.monotonic() > end:
            raise RuntimeError(f"{len(delivered)} of {workers} workers were ready within {READY_SECONDS:g} s")
        for pid in set(next(batches)[1].tolist()):
            delivered[pid] = delivered.get(pid, 0) + 1


def _ray_data_rate(data: Any, workers: int, count: int, address: str) -> float:
    import ray
    import ray.data

    def prepare(batch: Figures) -> Figures:
        samples = [data[int(id)] for id in batch["id"]]
        return {"data": np.stack([sample.numpy() for sample, _ in samples])}

    ray.init(address=address, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        blocks = count + 4 * workers
        ids = ray.data.range(BATCH * blocks, override_num_blocks=blocks)
        made = ids.map_batches(prepare, batch_size=BATCH, batch_format="numpy", concurrency=workers, num_cpus=1)
        batches = iter(made.iter_torch_batches(batch_size=BATCH, prefetch_batches=8))
        for _ in islice(batches, 2 * workers):  # Ray Data starts a process per task at first
            pass
        begun = time.perf_counter()
        received = sum(1 for _ in islice(batches, count))
        taken = time.perf_counter() - begun
        for _ in batches:  # Ray ends the process if it is shut down during a job
            pass
        return received / taken
    finally:
        ray.shutdown()


# -- a search ---------------------------------------------------------------------------------------------------------


def search(
    photos: str, shared: bool, trials: int, epochs: int, bandwidth: float, fraction: float, step: float
) -> Figures:
    """Seconds of a search with Ray Tune whose trials train at once, each with a loader or with one for all.

    All trials use one cache, which is full when the search begins. A training step is a wait.
    """
    import ray
    from ray import tune

    folder = sf.ImageFolder(photos, CropAndFlip())
    sizes = np.array([len(folder.fetch(id)[0]) for id in range(len(folder))])
    source = sf.testing.ThrottledSource(folder, bandwidth=bandwidth)
    capacity = int(sizes.sum() * fraction)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # or it is left in the home
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as scratch,
        open_cache(folder, capacity) as filled,
    ):
        for _ in sf.DataLoader(filled, batch_size=BATCH):  # fills the cache
            pass
        options: Figures = {"shared": shared, "capacity": capacity, "trials": trials, "epochs": epochs, "step": step}
        options["meeting"] = str(Path(scratch, "meeting"))
        os.mkdir(options["meeting"])
        memory = 80 << 20  # of Ray's object store, the least that it takes
        ray.init(
            num_cpus=2, include_dashboard=False, object_store_memory=memory, log_to_driver=False, _temp_dir=scratch
        )
        try:
            ready = tune.with_parameters(trial, source=source, options=options)
            results = tune.Tuner(
                tune.with_resources(ready, {"cpu": 2 / trials}),
                param_space={"number": tune.grid_search(list(range(trials)))},
                run_config=tune.RunConfig(name="search", storage_path=scratch, verbose=0),
            ).fit()
        finally:
            ray.shutdown()
    if results.errors:
        raise results.errors[0]
    times = np.array([result.metrics["times"] for result in results])
    return {"seconds": float(times[:, -1].max() - times[:, 0].min()), "read": source.bytes / sizes.sum() / epochs}


def open_cache(source: Any, capacity: int) -> Any:
    """The one cache of the host."""
    return sf.CachedDataset(source, capacity=capacity, form="fetched", name="search")


def trial(config: Figures, source: Any, options: Figures) -> None:
    """Train, which is a wait per batch, and report after each epoch."""
    from ray import tune

    with open_cache(source, options["capacity"]) as cached, contextlib.ExitStack() as stack:
        if options["shared"]:
            made: Any = sf.SharedLoader(cached, group="search", num_workers=2, batch_size=BATCH, shuffle=True)
            loader = stack.enter_context(made)
        else:
            loader = torch.utils.data.DataLoader(cached, BATCH, shuffle=True, num_workers=1, persistent_workers=True)
        meeting = Path(options["meeting"])
        (meeting / f"trial-{config['number']}").touch()
        deadline = time.monotonic() + MEETING_SECONDS
        while len(list(meeting.iterdir())) < options["trials"]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(list(meeting.iterdir()))} of {options['trials']} trials have started")
            time.sleep(0.01)
        times = [time.monotonic()]
        for _ in range(options["epochs"]):
            samples = 0
            for pictures, _labels in loader:
                samples += len(pictures)
                time.sleep(options["step"])
            if samples != len(source):
                raise AssertionError(f"{samples} samples instead of {len(source)}")
            times.append(time.monotonic())
            tune.report({"times": times})


# -- cases ------------------------------------------------------------------------------------------------------------

HERE = "benchmarks.questions.ray_cluster"


def ray_missing(*modules: str) -> Callable[[], str | None]:
    def needs() -> str | None:
        missing = [module for module in modules if find_spec(module) is None]
        return f"{', '.join(missing)} not installed: pip install 'ray[data,tune]'" if missing else None

    return needs


CASES = {
    "ray_workers": Case(
        question="Prep by `RayWorkers` on a cluster of three nodes (on one machine): does it scale with the number "
        "of workers, and how do Ray Data and torch's loader do on the same job?",
        setup="Batches of 64, measured after all workers are ready. All nodes, the training process and the workers "
        "share the cores of this machine: sleeping prep shows how the loader scales, and computing prep, on as many "
        "workers as there are cores, what the way through Ray costs. Ray Data: `map_batches` and "
        "`iter_torch_batches(prefetch_batches=8)`.",
        contenders=[
            Contender("torch", "torch DataLoader", f"{HERE}:batches_per_second", {"loader": "torch"}),
            Contender("ray_data", "Ray Data", f"{HERE}:batches_per_second", {"loader": "ray_data"}),
            Contender("local", "stallfree, local workers", f"{HERE}:batches_per_second", {"loader": "local"}),
            Contender("ray", "stallfree, Ray workers", f"{HERE}:batches_per_second", {"loader": "ray"}),
        ],
        figures={"rate": Figure("batches/s", ",.2f")},
        conditions=[
            *(
                Condition(
                    f"sleep {n}",
                    f"20 ms of sleep per sample, {n} worker{'s' * (n > 1)}",
                    {"workers": n, "sines": 0, "nodes": 3},
                )
                for n in (1, 4, 16, 64)
            ),
            Condition("light", "light prep of 9.6 MB batches, 2 workers", {"workers": 2, "sines": 4, "nodes": 3}),
            Condition(
                "photos", "prep as of photographs, 9.6 MB batches, 2 workers", {"workers": 2, "sines": 16, "nodes": 3}
            ),
        ],
        ours="ray",
        subject="Ray workers",
        rounds=3,
        needs=ray_missing("ray", "pyarrow"),
    ),
    "shared_search": Case(
        question="A search of 8 trials with Ray Tune, all at once, behind storage of 60 MB/s and a cache for 35% of "
        "the data: how much sooner is it through when the trials share their loader?",
        setup="Decode, random crop of 224, flip; batches of 64; 4 epochs per trial, reported to Ray after each; a "
        "step is a wait of 20 ms. The time is from the first trial's first batch to the end of the last one, without "
        "the start and end of Ray.",
        contenders=[
            Contender("own", "own torch DataLoader, 1 worker each", f"{HERE}:search", {"shared": False}),
            Contender("shared", "stallfree SharedLoader, 2 workers for all", f"{HERE}:search", {"shared": True}),
        ],
        figures={"seconds": Figure("s", ".1f", less=True), "read": Figure("read per epoch / data", ".3f", less=True)},
        ours="shared",
        subject="SharedLoader",
        params={"trials": 8, "epochs": 4, "bandwidth": 60e6, "fraction": 0.35, "step": 0.02},
        quick={"trials": 2, "epochs": 2},
        rounds=2,
        prepare=photos(2000),
        needs=ray_missing("ray", "pandas", "pyarrow"),
    ),
}
