"""Jobs that join, leave, die and lag: the batches of the others.

The tests control each job by commands, so no result depends on the speed of a job.
"""

from __future__ import annotations

import contextlib
import itertools
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from group_jobs import (
    BATCH,
    BATCHES,
    GROUP,
    SAMPLES,
    Pictures,
    Served,
    Taken,
    Team,
    children_of,
    coordinator_of,
    flat,
    let_in,
    right,
    taken,
    together,
)

from stallfree.shared import link, member

SLOTS = 2 + 4 * 2  # of the ring of two jobs and a worker: two per worker, four per job
FAR = BATCHES // 2  # so many batches are more than the ring holds


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    with Team(tmp_path) as team:
        yield team


# --- coming and going -------------------------------------------------------------------------------------------------


def test_a_newcomer_waits_for_the_next_epoch(team: Team) -> None:
    (first,) = team.jobs(1)
    begun = first.take(FAR)
    newcomer = team.job()
    newcomer.ask("begin")
    assert right([*begun, *first.rest()]) == 0
    assert newcomer.answer() is None
    batches = let_in(newcomer, first)
    assert right(batches) >= 1


def test_a_job_leaves_in_the_midst_of_an_epoch(team: Team) -> None:
    """With the job that started the coordinator and with one that did not; the remaining job continues."""
    first, second, third = team.jobs(3)
    begun = [job.take(3) for job in (first, second, third)]
    third.do("close")
    second.ask("rest")
    first.do("close")
    assert right([*begun[1], *second.answer()]) == 0
    assert right(second.epoch()) == 1
    first.do("again")
    batches = let_in(first, second)
    assert right(batches) >= 1


def leave_with_batches(served: Served) -> list[Taken]:
    """Close the loader while batches are held; returns their values."""
    kept = list(itertools.islice(served.loader, 3))
    served.batch = kept
    served.loader.close()
    return [taken(served.loader, batch) for batch in kept]


def held(served: Served) -> list[Taken]:
    return [taken(served.loader, batch) for batch in served.batch]


def test_batches_that_are_held_when_a_job_leaves_stay_as_they_are(team: Team) -> None:
    first, second = team.jobs(2)
    first.begin()
    second.ask("call", leave_with_batches)
    rest = first.rest()
    before = second.answer()
    assert len(before) == 3
    for batches in (rest, first.epoch(), first.epoch()):
        right(batches)
    assert second.do("call", held) == before


def break_out(served: Served, count: int) -> list[list[Taken]]:
    """Begin several epochs, and take one batch of each."""
    begun = []
    for _ in range(count):
        served.begin()
        begun.append(served.take(1))
    return begun


def test_a_job_breaks_out_of_every_epoch(team: Team) -> None:
    """The others are always one epoch behind, so batches of two epochs are in flight at once."""
    first, second = team.jobs(2, prefetch_factor=8, dataset=Pictures(team.dataset.book, 6 * BATCH, seconds=0.001))
    first.ask("call", break_out, 8)
    first.ask("close")
    begun = [second.rest()]
    while first.busy:
        begun.append(second.epoch())
    for batches in begun:
        right(batches, range(6 * BATCH))
    for batches in first.answer():
        right(batches, flat(batches))
    assert first.answer() is None


def test_the_last_one_out_leaves_nothing(team: Team, store_root: Path) -> None:
    first, second = team.jobs(2)
    folder = store_root / f"group-{GROUP}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    together([first, second], "rest")
    first.do("close")
    assert right(second.epoch()) >= 1
    second.do("close")
    team.all_gone(but=[first, second])
    assert not list(store_root.iterdir())
    second.do("again")
    assert right(second.epoch()) == 0  # of a new group


# --- deaths -----------------------------------------------------------------------------------------------------------


def test_a_job_is_killed_that_holds_batches(team: Team) -> None:
    """The killed job lags behind, so that the others need the slots that it holds."""
    first, second, third = team.jobs(3)
    begun = [first.take(2), third.take(1)]
    second.take(1)
    second.kill()
    rests = together([first, third], "rest")
    assert {right([*before, *rest]) for before, rest in zip(begun, rests, strict=True)} == {0}
    assert {right(batches) for batches in together([first, third], "epoch")} == {1}
    assert len(team.dataset.decodes()) == 2 * SAMPLES


def test_the_job_is_killed_that_started_the_coordinator(team: Team) -> None:
    first, second, third = team.jobs(3)
    begun = [second.take(3), third.take(7)]
    first.take(1)
    first.kill()
    rests = together([second, third], "rest")
    assert {right([*before, *rest]) for before, rest in zip(begun, rests, strict=True)} == {0}
    assert {right(batches) for batches in together([second, third], "epoch")} == {1}
    assert [job.stats().takeovers for job in (second, third)] == [1, 1]


def test_the_coordinator_is_killed(team: Team) -> None:
    first, second = team.jobs(2)
    for turn in range(2):
        begun = [first.take(2), second.take(5)]
        coordinator_of(first, second).kill()
        rests = together([first, second], "rest")
        assert {right([*before, *rest]) for before, rest in zip(begun, rests, strict=True)} == {turn}
        assert [job.stats().takeovers for job in (first, second)] == [turn + 1, turn + 1]
        for job in (first, second):
            job.begin()
    team.end()


@pytest.mark.parametrize(("timeout", "after"), [(60, 0.1), pytest.param(3, 60, marks=pytest.mark.slow)])
def test_the_coordinator_is_stopped(timeout: float, after: float, team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator stopped longer than the limit is replaced, and does nothing more afterwards."""
    monkeypatch.setattr(link, "_STOPPED_SECONDS", after)
    monkeypatch.setattr(link, "_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(member, "ANSWER_SECONDS", 0.5)
    first, second = team.jobs(2, timeout=timeout)
    begun = [first.take(2), second.take(5)]
    stopped = coordinator_of(first, second)
    stopped.suspend()
    rests = together([first, second], "rest")
    assert {right([*before, *rest]) for before, rest in zip(begun, rests, strict=True)} == {0}
    assert [job.stats().takeovers for job in (first, second)] == [1, 1]
    with contextlib.suppress(psutil.NoSuchProcess):
        stopped.resume()
    assert {right(batches) for batches in together([first, second], "epoch")} == {1}
    assert coordinator_of(first, second) != stopped


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_while_a_job_joins(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_STOPPED_SECONDS", 0.1)
    monkeypatch.setattr(link, "_CHECK_SECONDS", 0.1)
    (first,) = team.jobs(1)
    begun = first.take(2)
    coordinator_of(first).suspend()
    second = team.job()
    batches = second.epoch()
    assert right(batches) in (0, 1)  # the group goes on without the first job, if that does nothing for a second
    assert right([*begun, *first.rest()]) == 0


def test_workers_are_killed(team: Team) -> None:
    first, second = team.jobs(2, num_workers=2)
    coordinator = coordinator_of(first)
    batches: list[list[Taken]] = [[], []]
    for _ in range(2):
        for worker in children_of(coordinator):
            worker.kill()
        batches[0] += first.take(6)
        batches[1] += second.take(6)
    for seen, rest in zip(batches, together([first, second], "rest"), strict=True):
        assert right([*seen, *rest]) == 0
    assert coordinator_of(first) == coordinator
    assert first.stats().takeovers == second.stats().takeovers == 0


def test_all_die_and_a_new_job_begins_anew(team: Team, store_root: Path) -> None:
    first, second = team.jobs(2)
    first.take(1)
    second.take(3)
    first.kill()
    second.kill()
    (third,) = team.jobs(1)
    assert right(third.rest()) <= 1
    team.end()
    assert not list(store_root.iterdir())


# --- a slow job ------------------------------------------------------------------------------------------------------


def test_a_slow_job_holds_the_others_up_by_the_ring_only(team: Team) -> None:
    fast, slow = team.jobs(2)
    seen = slow.take(1)
    begun = fast.take(SLOTS // 2)  # which takes nothing of the slow one
    fast.ask("rest")
    while len(seen) < BATCHES:
        assert fast.progress <= slow.progress + SLOTS + 1
        seen += slow.take(1)
    assert right([*begun, *fast.answer()]) == right(seen) == 0
    assert len(team.dataset.decodes()) == SAMPLES
