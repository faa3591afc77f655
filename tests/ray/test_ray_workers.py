"""Workers on a Ray cluster of three nodes: the same batches as without, whatever dies."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from torch.utils.data import get_worker_info

import stallfree as sf
from loader_data import Made
from ray_cluster import RayCluster
from redis_servers import Server, needs_server, until
from stallfree.loader.messages import READY, Result
from stallfree.ray import ray_executor
from stallfree.ray.ray_executor import Demand

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

SAMPLES = 96
ALL = [(0, 1), (0, 3), (1, 3), (2, 1), (2, 4)]
"""Local and Ray workers."""


def noisy(id: int) -> tuple[torch.Tensor, int, dict[str, Any]]:
    """A sample with random numbers, a number and a dictionary."""
    return torch.rand(300) + id, id, {"name": str(id), "large": torch.full((64, 64), id)}


def slow(id: int) -> tuple[torch.Tensor, int]:
    time.sleep(0.003)
    return torch.rand(30) + id, id


def fails(id: int) -> torch.Tensor:
    if id == 7:
        raise ValueError("the file is damaged")
    return torch.tensor(id)


def dies(id: int) -> torch.Tensor:
    if id == 7 and get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.tensor(id)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    running = RayCluster(tmp_path_factory.mktemp("ray"), nodes=2)
    yield running
    running.close()


def ray_loader(cluster: RayCluster, dataset: Any, workers: int = 2, **options: Any) -> sf.DataLoader:
    arguments: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 5, **options}
    return sf.DataLoader(dataset, workers=sf.RayWorkers(workers, address=cluster.address), **arguments)


def copied(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)


def assert_equal(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def bridges() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name == "stallfree-ray"]


@pytest.mark.parametrize("combinations", [[(0, 2), (1, 1)], pytest.param(ALL, marks=pytest.mark.slow)])
def test_batches_equal_those_of_local_workers(cluster: RayCluster, combinations: list[tuple[int, int]]) -> None:
    dataset = Made(SAMPLES, noisy)
    with sf.DataLoader(dataset, batch_size=8, shuffle=True, seed=5, num_workers=1) as plain:
        expected = [[copied(batch) for batch in plain] for _ in range(2)]
    for local, remote in combinations:
        with ray_loader(cluster, dataset, remote, num_workers=local, persistent_workers=True) as loader:
            for epoch in expected:
                for batch, other in zip(epoch, loader, strict=True):
                    assert batch[2]["name"] == other[2]["name"]
                    assert_equal((batch[0], batch[1], batch[2]["large"]), (other[0], other[1], other[2]["large"]))


@pytest.mark.slow
def test_prep_runs_on_the_cluster_once_workers_are_ready(cluster: RayCluster) -> None:
    with ray_loader(cluster, Made(SAMPLES, where), num_workers=0, persistent_workers=True) as loader:
        wait_until_ready(loader)
        jobs = {int(flag) for batch in loader for flag in batch}
    assert jobs == {1}


def where(id: int) -> int:
    return int("RAY_JOB_ID" in os.environ)


def wait_until_ready(loader: sf.DataLoader) -> None:
    """Iterate until a whole epoch was prepared on the cluster."""
    while not all(bool(flag) for batch in loader for flag in batch):
        time.sleep(0.05)


@pytest.mark.slow
def test_an_error_of_a_sample_is_raised_here(cluster: RayCluster) -> None:
    with (
        ray_loader(cluster, Made(16, fails), shuffle=False) as loader,
        pytest.raises(OSError, match=r"the file is damaged\n.*sample 7"),
    ):
        list(loader)


def test_a_cluster_that_cannot_be_reached_is_one_error() -> None:
    with (
        sf.DataLoader(Made(16, noisy), workers=sf.RayWorkers(1, address="127.0.0.1:9")) as loader,
        pytest.raises(sf.WorkerError, match=r"no Ray workers could be started.*address='127\.0\.0\.1:9'.*refused"),
    ):
        list(loader)


class Locked(Made):
    """Has an attribute that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(16, noisy)
        self.lock = threading.Lock()


def _locks(_: object, lock: Any) -> None:
    lock.acquire()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"dataset": Locked()},
            r"^the data set cannot be sent to Ray workers: .*pickle",
        ),
        ({"collate_fn": partial(_locks, lock=threading.Lock())}, "^collate_fn cannot be sent to Ray workers: .*lock"),
        ({"worker_init_fn": partial(_locks, lock=threading.Lock())}, "^worker_init_fn cannot be sent to Ray workers: "),
    ],
)
def test_what_cannot_be_pickled_is_one_error(method: str, wrong: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"dataset": Made(16, noisy), "batch_size": 4, "multiprocessing_context": method}
    with sf.DataLoader(**{**options, **wrong}, workers=sf.RayWorkers(1, address="127.0.0.1:9")) as loader:
        for _ in range(2):
            with pytest.raises(sf.InputError, match=message) as caught:
                next(iter(loader))
            assert caught.value.page == "not-picklable"
        until(lambda: not bridges(), "the bridges have ended")


def test_resources_that_no_node_has_are_named(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_executor, "PATIENCE", 5.0)
    workers = sf.RayWorkers(1, address=cluster.address, resources={"CPU": 2, "licence": 3})
    with sf.DataLoader(Made(16, noisy), batch_size=8, workers=workers) as loader:
        assert [ids.tolist() for _, ids, _ in loader] == [list(range(8)), list(range(8, 16))]
    assert "resources={'CPU': 2, 'licence': 3}" in caplog.text
    assert "'CPU': 4.0" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_workers": 0}, "1 or more"),
        ({"num_workers": 2.5}, "1 or more"),
        ({"num_workers": 1, "resources": {"CPU": "two"}}, "amounts by name"),
        ({"num_workers": 1, "address": 6379}, "host:6379"),
        ({"num_workers": 1, "runtime_env": ["."]}, "dictionary"),
    ],
)
def test_arguments_that_cannot_be_used(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(sf.InputError, match=message):
        sf.RayWorkers(**wrong)


def test_what_ray_workers_do_not_do() -> None:
    workers = sf.RayWorkers(1)
    with pytest.raises(sf.InputError, match="cache='auto'"):
        sf.DataLoader(Made(4, noisy), workers=workers, cache="auto")
    with pytest.raises(sf.InputError, match="RayWorkers"):
        sf.DataLoader(Made(4, noisy), workers=4)  # type: ignore[arg-type]


@pytest.mark.slow
def test_samples_are_cached_where_the_workers_are(cluster: RayCluster) -> None:
    with sf.CachedDataset(Made(SAMPLES, picture_of), capacity="8MiB") as dataset:
        with ray_loader(cluster, dataset, persistent_workers=True) as loader:
            first = sorted(int(label) for batch in loader for label in batch[1])
            hits = loader.stats().hits
            second = sorted(int(label) for batch in loader for label in batch[1])
        assert first == second == list(range(SAMPLES))
        assert loader.stats().hits - hits == SAMPLES


@needs_server
@pytest.mark.slow
def test_workers_of_all_nodes_share_the_samples_in_servers(cluster: RayCluster, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(tmp_path))
        store = stack.enter_context(sf.RedisStore(hosts=[{"host": "127.0.0.1", "port": server.port}]))
        dataset = stack.enter_context(sf.CachedDataset(Made(SAMPLES, picture_of), capacity=0, store=store))
        loader = stack.enter_context(ray_loader(cluster, dataset, persistent_workers=True))
        for epoch in range(3):
            hits = loader.stats().hits
            assert sorted(int(label) for batch in loader for label in batch[1]) == list(range(SAMPLES))
            with redis.Redis(port=server.port) as client:
                until(lambda: client.dbsize() >= SAMPLES, "all samples are in the server")
            assert not epoch or loader.stats().hits - hits == SAMPLES


def picture_of(id: int) -> tuple[torch.Tensor, int]:
    return torch.full((16, 16), id, dtype=torch.uint8), id


@pytest.mark.slow
def test_a_batch_that_kills_workers_is_an_error_with_its_ids(cluster: RayCluster) -> None:
    """If no Ray worker is left before that, local workers die of it."""
    with ray_loader(cluster, Made(SAMPLES, dies), shuffle=False, persistent_workers=True) as loader:
        with pytest.raises(sf.WorkerError, match="died one after the other") as caught:
            list(loader)
        assert 7 in caught.value.ids


@pytest.mark.slow
def test_nothing_is_lost_or_repeated_under_kills(tmp_path: Path) -> None:
    """A hundred kills: of actors, of nodes, of the process that is connected to the head, and of the head."""
    chance = random.Random(int(os.environ.get("STALLFREE_SEED", "1")))
    kinds = ["actor"] * 70 + ["node"] * 16 + ["bridge"] * 10 + ["head"] * 4
    chance.shuffle(kinds)
    cluster = RayCluster(tmp_path)
    dataset = Made(40 * 64, slow)
    with sf.DataLoader(dataset, batch_size=64, shuffle=True, seed=5) as plain:
        sums = {}
        for epoch in range(3):
            plain.set_epoch(epoch)
            sums[epoch] = [(float(values.double().sum()), ids.tolist()) for values, ids in plain]
    longest, epoch, over = 0.0, 0, threading.Event()

    killed = 0

    def kill_all() -> None:
        nonlocal killed
        try:
            for kind in kinds:
                if over.wait(chance.random() * 2):
                    return
                kill(cluster, kind, chance)
                killed += 1
        finally:
            over.set()

    killer = threading.Thread(target=kill_all)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with ray_loader(cluster, dataset, 4, batch_size=64, persistent_workers=True) as loader:
            iterator = iter(loader)
            next(iterator)
            del iterator
            killer.start()
            try:
                while not over.is_set():
                    loader.set_epoch(epoch % 3)
                    begun, got = time.monotonic(), []
                    for values, ids in loader:
                        longest = max(longest, time.monotonic() - begun)
                        got.append((float(values.double().sum()), ids.tolist()))
                        begun = time.monotonic()
                    assert got == sums[epoch % 3]
                    epoch += 1
            finally:
                over.set()
                killer.join()
    cluster.close()
    print(f"{killed} kills, {epoch} epochs, longest wait {longest:.1f} s")
    assert killed == len(kinds)


def kill(cluster: RayCluster, kind: str, chance: random.Random) -> None:
    if kind == "node":
        cluster.do("kill")
        cluster.do("add")
    elif kind == "head":
        cluster.do("head")
    else:
        victims = [process.pid for process in (bridges() if kind == "bridge" else cluster.workers())]
        for pid in chance.sample(victims, min(1, len(victims))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# -- how many workers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "passed", "waited", "seconds", "workers"),
    [
        (10, 10.0, 0.0, 0.5, 1),  # a step takes 1 s, a batch half of that
        (10, 10.0, 5.0, 0.5, 2),  # a step takes 0.5 s: one worker would do, without a margin
        (95, 10.0, 9.0, 1.0, 105),
    ],
)
def test_needed_workers(batches: int, passed: float, waited: float, seconds: float, workers: int) -> None:
    assert Demand.needed(batches, passed, waited, seconds) == workers


def test_demand_grows_at_once_and_shrinks_after_several_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    counts = {"batches": 0, "wait_seconds": 0.0}
    demand = Demand(counts, local=0)
    demand.restart(asked=1)
    result = Result(READY, 1, 0, 0, prep_seconds=0.4)

    def window(step: float, wait: float) -> int:
        nonlocal now
        for _ in range(20):
            counts["batches"] += 1
            counts["wait_seconds"] += wait
            now += step + wait
        return demand.workers([result])

    assert window(0.1, 0.3) == 5  # 1.1 * 0.4 / 0.1
    assert window(0.1, 0.0) == 0  # as many as there are
    assert [window(0.4, 0.0) for _ in range(3)] == [0, 0, 2]
    assert window(0.05, 0.1) == 9


@pytest.mark.slow
def test_auto_starts_the_workers_that_the_loop_needs_and_ends_them(cluster: RayCluster) -> None:
    with sf.DataLoader(
        Made(64 * 8, sleeps),
        batch_size=8,
        workers=sf.RayWorkers("auto", address=cluster.address),
        persistent_workers=True,
    ) as loader:
        most, deadline, step = 0, time.monotonic() + 120, 0.02
        while time.monotonic() < deadline and not (most >= 5 and len(cluster.workers()) <= 2):
            for _ in loader:
                time.sleep(step)
                most = max(most, len(cluster.workers()))
                if most >= 5:
                    step = 0.4
        assert most >= 5
        assert len(cluster.workers()) <= 2


def sleeps(id: int) -> torch.Tensor:
    time.sleep(0.02)
    return torch.tensor(id)
