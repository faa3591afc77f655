"""The packager's process: exact counts, and whatever dies or hangs, training goes on and nothing is left behind."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from package_job import WANTED, Job, package_size

from cache_tools import problems
from children import Child, until
from stallfree.cache.records import MISS
from stallfree.importance import source as packager_module
from stallfree.importance.packages import LOW, MISSED, Field


def helpers() -> dict[str, Any]:
    return {child.name: child for child in multiprocessing.active_children() if child.name.startswith("stallfree-")}


def test_everything_together(job: Job) -> None:
    """95 samples: nine packages are written, and read as there is room for them. The counts are exact."""
    packager = job.start()
    job.flag(range(95))
    job.flag(range(5), WANTED | MISSED)
    job.shared.fields[Field.REGION] = 1
    packager.wake()
    until(lambda: packager.stats().packages_written == 9)
    packed = set(job.fetched())
    assert set(range(5)) <= packed
    packager.wake()
    until(lambda: len(job.resident()) == 10)
    for region in (11, 30, 90):
        job.shared.fields[Field.REGION] = region
        until(lambda region=region: (packager.wake(), len(job.resident()) >= region)[1])
    job.flag(range(100, 200))  # as soon as these are packed, all earlier changes have been seen
    until(lambda: (packager.wake(), packager.stats().packages_written == 19)[1])
    packager.close()
    stats = packager.stats()
    assert (stats.packages_read, stats.package_bytes_read, stats.packages_dropped) == (9, 9 * package_size(10), 0)
    assert stats.package_bytes_written == 19 * package_size(10)
    assert job.resident() == packed
    assert len(job.fetched()) == len(set(job.fetched())) == 190 == job.cache.stats().storage_reads
    values = job.cache.get_many(sorted(packed))
    assert all((value[0] == id).all() for id, value in zip(sorted(packed), values, strict=True))
    packager.wake()  # of no use any more, and no harm
    assert helpers() == {}


def test_a_killed_process_is_started_again_three_times(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    budget = 4 * package_size(10)
    packager = job.start(budget=budget)
    job.shared.fields[Field.REGION] = 200
    for life in range(4):
        job.flag(range(10 * life, 10 * life + 10))
        until(lambda life=life: (packager.wake(), len(job.resident()) == 10 * life + 10)[1])
        until(lambda life=life: packager.stats().packages_written == packager.stats().packages_read == life + 1)
        assert caplog.records == []
        helpers()["stallfree-pack"].kill()
        until(lambda: helpers() == {})
    job.flag(range(40, 60))
    packager.wake(), packager.wake()
    assert caplog.text.count("packaging is off: its process died 4 times, the last time it was ended by SIGKILL") == 1
    assert len(caplog.records) == 1
    until(lambda: helpers() == {})
    packager.close()
    stats = packager.stats()  # over all lives
    assert (stats.packages_written, stats.packages_read, stats.samples_packed) == (4, 4, 40)
    assert stats.package_bytes_written == budget  # exactly, though there were four budgets' worth of lives
    assert len(job.fetched()) == 40


def test_a_forked_child_leaves_the_process_alone(job: Job) -> None:
    packager = job.start()
    packager.wake()
    pid = until(lambda: helpers().get("stallfree-pack")).pid
    assert Child(packager.close).wait() == 0
    job.flag(range(10))
    until(lambda: (packager.wake(), packager.stats().packages_written == 1)[1])
    assert helpers()["stallfree-pack"].pid == pid


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_processes_killed_at_random_instants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """No sample is wrong, the budget is kept, and nothing is left. Each life begins without packages."""
    monkeypatch.setattr(packager_module, "LIVES", 1000)
    job = Job(tmp_path, 3000, capacity=200_000)
    packager = job.start(budget=1000 * package_size(10))
    job.shared.fields[Field.REGION] = 500
    job.flag(slice(None))
    rng = np.random.default_rng(seed)
    for _ in range(150):
        packager.wake()
        time.sleep(rng.random() * 0.03)
        alive = helpers()
        if alive and rng.random() < 0.3:
            alive["stallfree-pack"].kill()
            until(lambda: helpers() == {})
        there = sorted(job.resident())
        for id, value in zip(there, job.cache.get_many(there), strict=True):
            assert value is MISS or (value[0] == id).all()
        served = rng.permutation(np.array(there, np.int64))[:100]
        job.flag(served, LOW)
        job.cache.set_scores(served, np.zeros(len(served)))
    packager.close()
    assert problems(job.cache) == []
    stats = packager.stats()
    assert stats.packages_dropped == 0 < 20 < stats.packages_read
    assert stats.package_bytes_written <= 1000 * package_size(10)
    assert list(job.folder.iterdir()) == []
    job.close()
