"""Jobs that join, leave, die and lag: the batches of the others. Only jobs that are killed have their own process."""

import multiprocessing
import os
import signal
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from group_jobs import BATCHES, GROUP, SAMPLES, Pictures, Taken, children_of, flat, loader, right, taken

from children import Holder, until
from loader_data import Made
from stallfree.errors import WorkerError
from stallfree.ipc.folders import sweep
from stallfree.shared import link, member

SLOTS = 2 + 4 * 2  # of the ring of two jobs and a worker: two per worker, four per job
FAR = BATCHES // 2  # so many batches are more than the ring holds


class Job:
    """A job in this process. Each command runs in its thread."""

    def __init__(self, dataset: Pictures, **changes: Any) -> None:
        self.loader, self.thread = loader(dataset, **changes), ThreadPoolExecutor(1)
        self.taken = 0
        self._iterator: Iterator[Any] = iter(())

    def _run(self, count: int | None = None) -> list[Taken]:
        batches = []
        for batch in islice(self._iterator, count):
            batches.append(taken(self.loader, batch))
            self.taken += 1
        return batches

    def begin(self) -> None:
        self._iterator = iter(self.loader)

    def epoch(self) -> list[Taken]:
        self.begin()
        return self._run()

    def visit(self) -> list[Taken]:
        """An epoch, then leave."""
        batches = self.epoch()
        self.loader.close()
        return batches

    def take(self, count: int) -> list[Taken]:
        return self.thread.submit(self._run, count).result()

    def do(self, name: str = "_run") -> Future[Any]:
        """Begin with a command, or go on to the end of the epoch."""
        return self.thread.submit(getattr(self, name))

    def close(self) -> None:
        self._iterator = iter(())
        self.loader.close()
        self.thread.shutdown()


class Team:
    """The jobs of a group in this process, and their data set."""

    def __init__(self, folder: Path) -> None:
        self.dataset, self.opened = Pictures(folder / "decodes"), ExitStack()

    def job(self, **changes: Any) -> Job:
        made = Job(self.dataset, **changes)
        self.opened.callback(made.close)
        return made

    def jobs(self, count: int, **changes: Any) -> list[Job]:
        """Jobs that have joined and taken no batch."""
        made = [self.job(**changes) for _ in range(count)]
        for each in made:
            each.begin()
        return made

    def other(self, take: int) -> Holder:
        """A job in a process of its own, which has taken batches and holds the last one."""

        def begin() -> Callable[[], Any]:
            own = loader(self.dataset)
            batches = iter(own)
            kept = [next(batches) for _ in range(take)][-1]
            return lambda: (own.close(), batches, kept)

        return Holder(begin)


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    made = Team(tmp_path)
    with made.opened:
        yield made


def coordinator() -> psutil.Process:
    """Return the process that runs the workers, a child of this one."""
    (found,) = children_of(psutil.Process())
    return found


def rests(jobs: list[Job], begun: list[list[Taken]]) -> set[int]:
    """Let all go on to the end of the epoch, and check it; returns the group's epochs."""
    running = [job.do() for job in jobs]
    return {right([*before, *rest.result()]) for before, rest in zip(begun, running, strict=True)}


def epochs(jobs: list[Job]) -> set[int]:
    return {right(batches.result()) for batches in [job.do("epoch") for job in jobs]}


# --- coming and going -------------------------------------------------------------------------------------------------


def test_a_newcomer_waits_for_the_next_epoch(team: Team) -> None:
    (first,) = team.jobs(1)
    begun = first.take(FAR)
    newcomer = team.job()
    epoch = newcomer.do("visit")
    assert rests([first], [begun]) == {0}
    while not epoch.done():
        right(first.epoch())
    assert right(epoch.result()) >= 1


def test_a_job_leaves_in_the_midst_of_an_epoch_and_comes_again(team: Team) -> None:
    jobs = team.jobs(3)
    begun = [job.take(3) for job in jobs]
    jobs[2].close()
    rest = jobs[1].do()
    jobs[0].close()
    assert right([*begun[1], *rest.result()]) == 0
    again = team.job().do("visit")
    while not again.done():
        jobs[1].epoch()
    assert right(again.result()) >= 1


def test_batches_that_are_held_when_a_job_leaves_stay_as_they_are(team: Team) -> None:
    first, second = team.jobs(2)
    rest = first.do()
    kept = list(islice(second._iterator, 3))
    before = [taken(second.loader, batch) for batch in kept]
    second.close()
    right(rest.result())
    for _ in range(2):
        right(first.epoch())
    assert [taken(second.loader, batch)[1:] for batch in kept] == [each[1:] for each in before]


def test_the_last_one_out_leaves_nothing(team: Team, store_root: Path) -> None:
    first, second = team.jobs(2)
    assert stat.S_IMODE((store_root / f"group-{GROUP}").stat().st_mode) == 0o700
    assert rests([first, second], [[], []]) == {0}
    first.close()
    assert right(second.epoch()) >= 1
    second.close()
    assert not children_of(psutil.Process())
    assert not list(store_root.iterdir())
    assert right(team.job().epoch()) == 0  # of a new group


# --- deaths -----------------------------------------------------------------------------------------------------------


def test_a_job_is_killed_that_holds_batches(team: Team) -> None:
    """The killed job lags behind, so that the others need the slots that it holds."""
    first, third = team.jobs(2)
    second = team.other(1)
    begun = [first.take(2), third.take(1)]
    second.kill()
    assert rests([first, third], begun) == {0}
    assert epochs([first, third]) == {1}
    assert len(team.dataset.decodes()) == 2 * SAMPLES


def test_the_job_is_killed_that_started_the_coordinator(team: Team) -> None:
    first = team.other(1)
    jobs = [team.job() for _ in range(2)]
    for job in jobs:
        job.begin()
    begun = [jobs[0].take(3), jobs[1].take(7)]
    first.kill()
    assert len(rests(jobs, begun)) == 1
    assert len(epochs(jobs)) == 1
    assert [job.loader.stats().takeovers for job in jobs] == [1, 1]


def test_all_die_and_a_new_job_begins_anew(team: Team) -> None:
    for other in [team.other(1), team.other(3)]:
        other.kill()
    assert right(team.job().epoch()) <= 1


def test_the_coordinator_is_killed(team: Team) -> None:
    jobs = team.jobs(2)
    for turn in range(2):
        begun = [jobs[0].take(2), jobs[1].take(5)]
        coordinator().kill()
        assert rests(jobs, begun) == {turn}
        assert [job.loader.stats().takeovers for job in jobs] == [turn + 1, turn + 1]
        for job in jobs:
            job.begin()


def test_a_newcomer_after_the_death_of_a_coordinator_begins_with_an_epoch_of_its_own(team: Team) -> None:
    (first,) = team.jobs(1)
    assert rests([first], [[]]) == {0}
    first.begin()
    begun = first.take(2)
    coordinator().kill()
    newcomer = team.job()
    newcomer.begin()  # starts another coordinator
    assert newcomer.loader.epoch == 2
    rest, epoch = first.do(), newcomer.do()
    assert right([*begun, *rest.result()]) == 1
    first.close()
    assert right(epoch.result()) == 2


@pytest.mark.parametrize(("timeout", "after"), [(60, 0.1), (2, 60)])
def test_the_coordinator_is_stopped(timeout: float, after: float, team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is seen to be stopped, or does not answer, is replaced, and does nothing more afterwards."""
    monkeypatch.setattr(link, "_STOPPED_SECONDS", after)
    monkeypatch.setattr(link, "_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(member, "ANSWER_SECONDS", 0.5)
    jobs = team.jobs(2, timeout=timeout)
    begun = [jobs[0].take(2), jobs[1].take(5)]
    stopped = coordinator()
    stopped.suspend()
    assert rests(jobs, begun) == {0}
    assert [job.loader.stats().takeovers for job in jobs] == [1, 1]
    with suppress(psutil.NoSuchProcess):
        stopped.resume()
    assert epochs(jobs) == {1}
    assert coordinator() != stopped


def kill_coordinator(id: int) -> int:
    if multiprocessing.current_process().name.startswith("stallfree-worker"):
        os.kill(os.getppid(), signal.SIGKILL)
    return id


def test_a_data_set_on_which_coordinators_die(monkeypatch: pytest.MonkeyPatch, store_root: Path) -> None:
    monkeypatch.setattr(member, "LIVES", 2)
    said = "2 coordinators of the group 'team' died in a row"
    with loader(Made(8, kill_coordinator)) as job, pytest.raises(WorkerError, match=said):
        next(iter(job))
    until(lambda: sweep(store_root) == [] and not list(store_root.iterdir()), "the workers of the last one end")


def test_workers_are_killed(team: Team) -> None:
    jobs = team.jobs(2, num_workers=2)
    before = coordinator()
    batches: list[list[Taken]] = [[], []]
    for _ in range(2):
        for worker in children_of(before):
            worker.kill()
        for job, seen in zip(jobs, batches, strict=True):
            seen += job.take(6)
    assert rests(jobs, batches) == {0}
    assert coordinator() == before
    assert [job.loader.stats().takeovers for job in jobs] == [0, 0]


# --- a slow job -------------------------------------------------------------------------------------------------------


def test_a_slow_job_holds_the_others_up_by_the_ring_only(team: Team) -> None:
    fast, slow = team.jobs(2)
    seen = slow.take(1)
    begun = fast.take(SLOTS // 2)  # which takes nothing of the slow one
    rest = fast.do()
    while len(seen) < BATCHES:
        assert fast.taken <= slow.taken + SLOTS + 1
        seen += slow.take(1)
    assert right([*begun, *rest.result()]) == right(seen) == 0
    assert len(team.dataset.decodes()) == SAMPLES == len(flat(seen))
