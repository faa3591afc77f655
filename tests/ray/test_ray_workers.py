"""Workers on a Ray cluster of several nodes: the same batches as without, whatever dies."""

import os
import queue
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_ray
import pytest
import ray_job

import stallfree as sf
from loader_data import Made
from stallfree.ray import workers
from torch_batches import digest

JOB = Path(__file__).with_name("ray_job.py")


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


@pytest.mark.parametrize(("lost", "ends"), [(3, True), (8, True), (1000, False)])
def test_actors_are_lost_before_they_run(lost: int, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches that wait for them are not to blame, but a job does not start actors for ever."""
    monkeypatch.setattr(fake_ray.Handle, "stillborn", lost)
    comes: Any = nullcontext() if ends else pytest.raises(sf.WorkerError, match="lost one after the other")
    with fake_ray.installed(), ray_job.loader(Made(96, ray_job.noisy), 1) as remote, comes:
        assert (sum(1 for _ in remote), remote.stats().workers_replaced) == (12, lost)


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
@pytest.mark.parametrize("name", ["equal", "pickles", "deadly", "kills"])
def test_a_job_on_a_cluster(name: str, tmp_path: Path) -> None:
    """In a process of its own, so that this one imports no Ray."""
    pytest.importorskip("ray")
    paths = os.pathsep.join([str(JOB.parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    with (tmp_path / "printed").open("w+") as printed:  # no pipe, which Ray's processes would keep open
        done = subprocess.run([sys.executable, str(JOB), name], env=environment, stdout=printed, stderr=printed)
    assert done.returncode == 0, (tmp_path / "printed").read_text()[-3000:]


DATA = Made(4, int)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: sf.RayWorkers(0), "1 or more"), (lambda: sf.RayWorkers("auto"), "1 or more"),  # type: ignore[arg-type]
    (lambda: sf.RayWorkers(1, {"CPU": "two"}), "give a number of 0 or more"),  # type: ignore[dict-item]
    (lambda: sf.RayWorkers(1, ["CPU"]), "amounts by name"),  # type: ignore[arg-type]
    (lambda: sf.DataLoader(DATA, workers=sf.RayWorkers(1), cache="auto"), "cache='auto'"),
    (lambda: sf.DataLoader(DATA, workers=sf.RayWorkers(1), num_workers=2), "num_workers=2: give one of them"),
    (lambda: sf.DataLoader(DATA, workers=4), "RayWorkers"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_arguments_that_cannot_be_used(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(sf.InputError, match=message), fake_ray.installed():
        make()
