"""Jobs that share what samples are worth: processes that join, end, are killed and fork."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from children import Child, Holder
from stallfree.importance.jobs import THRESHOLD, Jobs, benefit

N = 5
ONE = [0.0, 0.25, 0.5, 0.75, 1.0]
TWO = [1.0, 1.0, 0.5, 0.0, 0.0]


def files(folder: Path) -> list[str]:
    assert os.listdir(folder) == ["importance"]
    return sorted(name for name in os.listdir(folder / "importance") if name != "lock")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Jobs]:
    with closing(Jobs(tmp_path, N)) as job:
        yield job


def another(folder: Path, importance: Any, gain: float) -> Holder:
    def begin() -> Callable[[], None]:
        job = Jobs(folder, N)
        job.publish(importance, gain)
        return job.close

    return Holder(begin)


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    """The body warns once, and of that."""
    with pytest.warns(RuntimeWarning, match=match) as caught:
        yield
    assert [warning.filename for warning in caught] == [__file__]


def check(job: Jobs, expected: Any, live: int) -> None:
    worth, count = job.combined()
    assert (worth.dtype, worth.tolist(), count) == (np.float64, [float(value) for value in expected], live)


@pytest.mark.parametrize(("benefits", "expected"), [
    ((2.0, 3.0), [3.0, 3.5, 2.5, 1.5, 2.0]), ((THRESHOLD, 1.49), [1.5 * value for value in ONE]),
    ((1.0, 4.0), [4 * value for value in TWO]),
    ((1.0, 0.5), [0.5, 0.75, 0.75, 0.75, 1.0]),  # nobody gains enough: all count
])  # fmt: skip
def test_the_sum_is_over_those_who_gain_enough(job: Jobs, tmp_path: Path, benefits: Any, expected: Any) -> None:
    job.publish(ONE, benefits[0])
    other = another(tmp_path, TWO, benefits[1])
    check(job, expected, 2)
    other.end()
    check(job, benefits[0] * np.array(ONE), 1)
    assert files(tmp_path) == ["job-1"]


def test_the_benefit_is_the_time_of_an_epoch_without_the_cache_over_that_with_it() -> None:
    assert benefit(1.0, 0.1, 1.0, workers=2, batch_size=8) == 4.0  # storage limits without it, the device with it
    assert benefit(0.1, 0.1, 1.0, workers=4, batch_size=8) == 10.0
    assert benefit(9.0, 0.1, 1.0, workers=0, batch_size=8) == 1.0


def test_a_job_that_is_killed_leaves_the_sum_whoever_looks(job: Jobs, tmp_path: Path) -> None:
    holders = [another(tmp_path, TWO, 2.0) for _ in range(3)]
    job.publish(ONE, 2.0)
    check(job, 2 * np.array(ONE) + 6 * np.array(TWO), 4)
    holders[1].kill()
    (tmp_path / "importance" / "new-2").write_bytes(b"half")  # as if it had died in the midst of it
    (tmp_path / "importance" / "of another").touch()

    # One that has never published looks.
    assert Child(lambda: check(Jobs(tmp_path, N), 2 * np.array(ONE) + 4 * np.array(TWO), 3)).wait() == 0
    assert files(tmp_path) == ["job-1", "job-3", "job-4", "of another"]
    fourth = another(tmp_path, ONE, 2.0)  # has the place that is free
    assert files(tmp_path) == ["job-1", "job-2", "job-3", "job-4", "of another"]
    check(job, 4 * np.array(ONE) + 4 * np.array(TWO), 4)
    for holder in (holders[0], holders[2], fourth):
        holder.kill()
    check(job, 2 * np.array(ONE), 1)
    assert files(tmp_path) == ["job-4", "of another"]


def test_a_forked_child_is_not_the_job(job: Jobs, tmp_path: Path) -> None:
    job.publish(ONE, 2.0)

    def leave() -> None:
        check(job, 2 * np.array(ONE), 1)
        job.close()

    def publish() -> None:
        job.publish(TWO, 2.0)
        check(job, 2 * np.array(ONE) + 2 * np.array(TWO), 2)
        job.publish(TWO, 3.0)
        assert files(tmp_path) == ["job-1", "job-2"]
        os.kill(os.getpid(), signal.SIGKILL)

    assert Child(leave).wait() == 0
    check(job, 2 * np.array(ONE), 1)
    assert Child(publish).wait() == -signal.SIGKILL
    check(job, 2 * np.array(ONE), 1)
    assert files(tmp_path) == ["job-1"]


def test_nobody_reads_half_of_what_is_written(tmp_path: Path) -> None:
    count = 100_000

    def write(value: float) -> None:
        job = Jobs(tmp_path, count)
        while True:
            job.publish(np.full(count, value), 2.0)
            job.publish(np.zeros(count), 5.0)

    writers = [Child(write, value) for value in (0.25, 0.5)]
    reader = Jobs(tmp_path, count)
    seen = list[float]()
    while len(seen) < 100 or len({*seen}) < 3:
        worth, _ = reader.combined()
        assert worth.min() == worth.max()
        seen.append(worth[0])
    for writer in writers:
        writer.kill()
    assert {*seen} <= {0.0, 0.5, 1.0, 1.5}  # and never 0.25 or 0.5 with the benefit of 5 that belongs to 0
    assert reader.combined()[1] == 0
    assert files(tmp_path) == []
    reader.close()


def test_a_full_file_system_is_one_warning_and_the_job_goes_by_its_own(tmp_path: Path) -> None:
    other = another(tmp_path, TWO, 2.0)

    def run() -> None:
        job = Jobs(tmp_path, N)
        job.publish(TWO, 2.0)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))
        with one_warning("File too large.*its own losses alone"):
            job.publish(ONE, 3.0)
            job.publish(ONE, 3.0)
            check(job, 3 * np.array(ONE), 1)
        assert files(tmp_path) == ["job-1"]  # what it had told before counts no more
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        job.publish(ONE, 3.0)
        check(job, 3 * np.array(ONE) + 2 * np.array(TWO), 2)
        job.close()

    assert Child(run).wait() == 0
    other.end()
