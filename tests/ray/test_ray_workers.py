"""Workers on a Ray cluster of several nodes: the same batches as without, whatever dies."""

import contextlib
import os
import queue
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_ray
import pytest
import ray_job

import stallfree as sf
from loader_data import Made
from ray_cluster import RayCluster
from redis_servers import until
from stallfree.ray import workers
from torch_batches import digest

JOB = Path(__file__).with_name("ray_job.py")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    pytest.importorskip("ray")
    running = RayCluster(tmp_path_factory.mktemp("ray"), nodes=2)
    yield running
    running.close()


def start(name: str, cluster: RayCluster, folder: Path) -> subprocess.Popen[str]:
    """Start a job of `ray_job.py` in a process of its own, which imports Ray."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(JOB.parent), *filter(None, sys.path)])}
    command = [sys.executable, str(JOB), name, cluster.address]
    with (folder / "errors").open("w") as file:
        return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=file)


def errors(folder: Path) -> str:
    """Return the last errors of its job."""
    return (folder / "errors").read_text()[-3000:]


@pytest.mark.parametrize("name", ["equal", "pickles", "deadly"])
def test_a_job(name: str) -> None:
    """Each function of `ray_job.py` says what it checks. Actors are processes of this one, without Ray."""
    with fake_ray.installed() as actors:
        getattr(ray_job, name)()
        assert actors == []


@pytest.mark.parametrize("seed", range(2))
def test_a_job_whose_actors_are_killed(seed: int) -> None:
    chance, dataset = random.Random(seed), Made(192, ray_job.noisy)
    with sf.DataLoader(dataset, batch_size=16, shuffle=True, seed=5, num_workers=1) as plain:
        expected = [[digest(batch) for batch in plain] for _ in range(2)]
    with fake_ray.installed() as actors, ray_job.loader(dataset, 3, batch_size=16) as remote:
        kills = 0
        for epoch in range(2):
            for number, batch in enumerate(remote):
                assert digest(batch) == expected[epoch][number]
                if number in (1, 5):
                    os.kill(chance.choice(actors).process.pid or 0, signal.SIGKILL)
                    kills += 1
            assert number == 11
        assert 0 < remote.stats().workers_replaced <= kills


def test_a_result_that_arrives_twice_is_delivered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(queue.SimpleQueue[Any]):
        def put(self, item: Any, *_: Any) -> None:
            for _ in range(2):
                super().put(item)

    delivered, deliver = [], workers.RayExecutor.deliver
    monkeypatch.setattr(workers, "queue", SimpleNamespace(SimpleQueue=Twice))
    monkeypatch.setattr(workers.RayExecutor, "deliver", lambda *given: (delivered.append(given[1]), deliver(*given)))
    with fake_ray.installed(), ray_job.loader(Made(96, ray_job.noisy)) as remote:
        assert [sum(1 for _ in remote) for _ in range(2)] == [12, 12]
    assert len({(result.token, result.number) for result in delivered}) == len(delivered) == 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["equal", "pickles", "deadly"])
def test_a_job_on_the_cluster(name: str, cluster: RayCluster, tmp_path: Path) -> None:
    job = start(name, cluster, tmp_path)
    out, _ = job.communicate()
    finished = job.returncode == 0 and out.endswith("done\n")  # after what Ray says of lost processes
    assert finished, errors(tmp_path)
    until(lambda: not cluster.workers(), "the actors have ended")


DATA = Made(4, int)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: sf.RayWorkers(0), "1 or more"),
    (lambda: sf.RayWorkers("auto"), "1 or more"),  # type: ignore[arg-type]
    (lambda: sf.RayWorkers(1, {"CPU": "two"}), "amounts by name"),  # type: ignore[dict-item]
    (lambda: sf.DataLoader(DATA, workers=sf.RayWorkers(1), cache="auto"), "cache='auto'"),
    (lambda: sf.DataLoader(DATA, workers=sf.RayWorkers(1), num_workers=2), "num_workers=2: give one of them"),
    (lambda: sf.DataLoader(DATA, workers=4), "RayWorkers"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_arguments_that_cannot_be_used(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(sf.InputError, match=message), fake_ray.installed():
        make()


@pytest.mark.slow
def test_nothing_is_lost_or_repeated_under_kills(tmp_path: Path) -> None:
    """A hundred kills, of actors and of nodes."""
    chance = random.Random(int(os.environ.get("STALLFREE_SEED", "1")))
    kinds = ["actor"] * 80 + ["node"] * 20
    chance.shuffle(kinds)
    with contextlib.closing(RayCluster(tmp_path)) as cluster:
        job = start("kills", cluster, tmp_path)
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "begun\n", errors(tmp_path)
            for kind in kinds:
                time.sleep(chance.random() * 2)
                assert job.poll() is None, errors(tmp_path)
                if kind == "node":
                    cluster.replace_node()
                elif victims := cluster.workers():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(victims).pid, signal.SIGKILL)
            (tmp_path / "over").touch()
            out, _ = job.communicate()
        finally:
            job.kill()
    print(out)
    assert job.returncode == 0, errors(tmp_path)
