"""Jobs that join, leave, die and lag: the batches of the others. Only jobs that are killed have their own process."""

import multiprocessing
import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from group_jobs import BATCHES, GROUP, SAMPLES, Group, Taken, children_of, flat, loader, right, taken

import stallfree as sf
from children import Holder, run_threads, until
from loader_data import Made
from stallfree.errors import WorkerError
from stallfree.ipc.folders import sweep
from stallfree.shared import link, member

SLOTS = 2 + 4 * 2  # of the ring of two jobs and a worker: two per worker, four per job
FAR = BATCHES // 2  # so many batches are more than the ring holds


class Job:
    """A job in this process, which has joined and taken no batch."""

    def __init__(self, group: Group, **changes: Any) -> None:
        self.loader, self.taken = group.job(**changes), 0
        self.begin()

    def begin(self) -> None:
        self.batches = iter(self.loader)

    def take(self, count: int | None = None) -> list[Taken]:
        """Take batches; by default, to the end of the epoch."""
        seen = []
        for batch in islice(self.batches, count):
            seen.append(taken(self.loader, batch))
            self.taken += 1
        return seen

    def epoch(self) -> list[Taken]:
        self.begin()
        return self.take()


def other(group: Group, take: int) -> Holder:
    """A job in a process of its own, which has taken batches and holds the last one."""

    def begin() -> Callable[[], Any]:
        own = loader(group.dataset)
        batches = iter(own)
        kept = [next(batches) for _ in range(take)][-1]
        return lambda: (own.close(), batches, kept)

    return Holder(begin)


def coordinator() -> psutil.Process:
    """Return the process that runs the workers, a child of this one."""
    (found,) = children_of(psutil.Process())
    return found


def rests(jobs: list[Job], begun: list[list[Taken]]) -> set[int]:
    """Let all go on to the end of the epoch, and check it; returns the group's epochs."""
    rest = run_threads(*(job.take for job in jobs))
    return {right([*before, *after]) for before, after in zip(begun, rest, strict=True)}


def epochs(jobs: list[Job]) -> set[int]:
    return set(map(right, run_threads(*(job.epoch for job in jobs))))


def test_batches_that_are_held_when_a_job_leaves_stay_as_they_are(group: Group) -> None:
    first, second = Job(group), Job(group)

    def leave() -> tuple[list[sf.Batch], list[Taken]]:
        kept = list(islice(second.batches, 3))
        before = [taken(second.loader, batch) for batch in kept]
        second.loader.close()
        return kept, before

    whole, (kept, before) = run_threads(first.take, leave)
    for seen in (whole, first.epoch(), first.epoch()):
        right(seen)
    assert [taken(second.loader, batch)[1:] for batch in kept] == [each[1:] for each in before]


def test_the_last_one_out_leaves_nothing(group: Group, store_root: Path) -> None:
    first, second = Job(group), Job(group)
    assert stat.S_IMODE((store_root / f"group-{GROUP}").stat().st_mode) == 0o700
    assert rests([first, second], [[], []]) == {0}
    first.loader.close()
    assert right(second.epoch()) >= 1
    second.loader.close()
    assert not children_of(psutil.Process())
    assert not list(store_root.iterdir())
    assert right(Job(group).take()) == 0  # of a new group


def test_a_job_is_killed_that_holds_batches(group: Group) -> None:
    """The killed job lags behind, so that the others need the slots that it holds."""
    first, third = Job(group), Job(group)
    second = other(group, 1)
    begun = [first.take(2), third.take(1)]
    second.kill()
    assert rests([first, third], begun) == {0}
    assert epochs([first, third]) == {1}
    assert len(group.dataset.decodes()) == 2 * SAMPLES


def test_the_job_is_killed_that_started_the_coordinator(group: Group) -> None:
    first = other(group, 1)
    jobs = [Job(group), Job(group)]
    begun = [jobs[0].take(3), jobs[1].take(7)]
    first.kill()
    assert len(rests(jobs, begun)) == 1
    assert len(epochs(jobs)) == 1
    assert [job.loader.stats().takeovers for job in jobs] == [1, 1]


def test_all_die_and_a_new_job_begins_anew(group: Group) -> None:
    for each in [other(group, 1), other(group, 3)]:
        each.kill()
    assert right(Job(group).take()) <= 1


def test_the_coordinator_is_killed(group: Group) -> None:
    jobs = [Job(group), Job(group)]
    for turn in range(2):
        begun = [jobs[0].take(2), jobs[1].take(5)]
        coordinator().kill()
        assert rests(jobs, begun) == {turn}
        assert [job.loader.stats().takeovers for job in jobs] == [turn + 1, turn + 1]
        for job in jobs:
            job.begin()


@pytest.mark.parametrize("made", [member.Child, BaseProcess])
def test_two_jobs_reap_a_coordinator_at_once(made: Any, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, seen = [Job(group), Job(group)], []
    begun, join = [job.take(1) for job in jobs], made.join

    def join_beside(process: Any, seconds: float | None = None) -> Any:
        code = join(process, 5)
        if not seen:
            seen.append(process)
            member.reap(5, Path())  # by the other job
        return code

    coordinator().kill()
    with monkeypatch.context() as patch:
        patch.setattr(made, "join", join_beside)
        member.reap(5, Path())
    assert rests(jobs, begun) == {0}


def test_a_newcomer_after_the_death_of_a_coordinator_begins_with_an_epoch_of_its_own(group: Group) -> None:
    first = Job(group)
    assert rests([first], [[]]) == {0}
    first.begin()
    begun = first.take(2)
    coordinator().kill()
    newcomer = Job(group)  # starts another coordinator
    assert newcomer.loader.epoch == 2
    rest, epoch = run_threads(lambda: (first.take(), first.loader.close()), newcomer.take)
    assert (right([*begun, *rest[0]]), right(epoch)) == (1, 2)


@pytest.mark.parametrize(("timeout", "after"), [(60, 0.1), (2, 60)])
def test_a_coordinator_is_stopped(timeout: float, after: float, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is seen to be stopped, or does not answer, is replaced, and does nothing more afterwards."""
    monkeypatch.setattr(link, "_STOPPED_SECONDS", after)
    monkeypatch.setattr(link, "_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(member, "ANSWER_SECONDS", 0.5)
    jobs = [Job(group, timeout=timeout), Job(group, timeout=timeout)]
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


def test_workers_are_killed(group: Group) -> None:
    jobs = [Job(group, num_workers=2), Job(group, num_workers=2)]
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


def test_a_slow_job_holds_the_others_up_by_the_ring_only(group: Group) -> None:
    fast, slow = Job(group), Job(group)

    def lag() -> list[Taken]:
        seen: list[Taken] = []
        while len(seen) < BATCHES:
            assert fast.taken <= slow.taken + SLOTS + 1
            seen += slow.take(1)
        return seen

    begun = fast.take(SLOTS // 2)  # which takes nothing of the slow one
    rest, seen = run_threads(fast.take, lag)
    assert right([*begun, *rest]) == right(seen) == 0
    assert len(group.dataset.decodes()) == SAMPLES == len(flat(seen))


def test_many_coordinators_die_if_each_has_delivered() -> None:
    found = []
    with sf.SharedLoader(list(range(40)), batch_size=1, group="deaths", num_workers=1, seed=0) as shared:
        for batch in shared:
            found += batch.tolist()
            if len(found) % 3 == 0 and len(found) <= 3 * (member.LIVES + 2):
                os.kill(shared._member._link.pid, signal.SIGKILL)
    assert found == list(range(40))
