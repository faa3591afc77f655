"""Several jobs of one group: shared preparation, separate parts, and settings that must be equal.

The tests control each job by commands, so no result depends on the speed of a job.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

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
    afresh,
    flat,
    ids_of,
    right,
    taken,
    together,
)

import stallfree as sf
from loader_data import Made, as_list, checksum, picture, same


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    with Team(tmp_path) as team:
        yield team


# --- what jobs share --------------------------------------------------------------------------------------------------


def test_jobs_get_the_same_batches_and_each_sample_is_decoded_once(team: Team) -> None:
    """Augmentation is fresh in each epoch; `right` computes the expected values."""
    jobs = team.jobs(3, num_workers=2)
    for epoch in range(2):
        seen = together(jobs, "rest" if epoch == 0 else "epoch")
        assert [right(batches) for batches in seen] == [epoch] * 3
        assert all(ids_of(batches) == ids_of(seen[0]) for batches in seen)
        assert Counter(id for _, id in team.dataset.decodes()) == dict.fromkeys(range(SAMPLES), epoch + 1)
    for job in jobs:
        stats = job.stats()
        assert stats.batches == 2 * BATCHES
        assert stats.samples == 2 * SAMPLES
        assert stats.takeovers == 0
    assert not {pid for pid, _ in team.dataset.decodes()} & {job.pid for job in jobs}


@pytest.mark.parametrize(("sample", "collate"), [(lambda id: {"word": "x" * id, "n": id}, None), (picture, as_list)])
def test_batches_without_ids(sample: Callable[[int], Any], collate: Any, team: Team) -> None:
    """Tensors, strings and user-defined objects, as `DataLoader` yields them."""
    made = {"dataset": Made(30, sample), "batch_size": 7, "collate_fn": collate, "seed": 1, "shuffle": True}
    with sf.SharedLoader(group=GROUP, **made) as shared, sf.DataLoader(**made) as plain:
        assert same(list(shared), list(plain))


def test_a_cache_that_jobs_share_is_filled_once(team: Team) -> None:
    with sf.CachedDataset(Made(SAMPLES, picture), capacity="8MiB") as dataset:
        jobs = team.jobs(2, dataset=dataset)
        for name in ("rest", "epoch"):
            for batches in together(jobs, name):
                assert [batch.sums for batch in batches] == [
                    [checksum(picture(id)[0]) for id in batch.ids] for batch in batches
                ]
                assert sorted(flat(batches)) == list(range(SAMPLES))
        for job in jobs:
            job.end()
        stats = dataset.stats()
        assert stats.storage_reads == SAMPLES
        assert stats.hits + stats.misses == 2 * SAMPLES


def spoil(served: Served, count: int) -> None:
    """Take batches and overwrite all of their tensors."""
    for _ in range(count):
        served.take(1)
        images, labels = served.batch.data
        images.fill_(-1)
        labels.fill_(-1)
        served.batch.ids.fill_(-1)


def test_what_a_job_does_to_its_batches_no_other_job_sees(team: Team) -> None:
    first, second = team.jobs(2)
    for _ in range(BATCHES // 4):
        first.do("call", spoil, 4)  # before the other one has them
        batches = second.take(4)
        assert right(batches, flat(batches)) == 0
    assert first.rest() == second.rest() == []
    assert {right(batches) for batches in together([first, second], "epoch")} == {1}


# --- batch sizes, ranks, transforms of a job's own --------------------------------------------------------------------


def test_jobs_of_different_batch_sizes(team: Team) -> None:
    """Batch sizes that are multiples and divisors of one another; the samples come in the same order."""
    sizes = [8, 2, 24]
    jobs = [team.job(batch_size=size) for size in sizes]
    seen = afresh(jobs)
    for size, batches in zip(sizes, seen, strict=True):
        assert right(batches) == 0
        assert flat(batches) == flat(seen[0])
        assert [len(batch.ids) for batch in batches] == [min(size, SAMPLES - at) for at in range(0, SAMPLES, size)]
    assert len(team.dataset.decodes()) == SAMPLES


def test_the_ranks_of_a_job_take_disjoint_parts(team: Team) -> None:
    """A job of 2 ranks beside a job of one process; the group's samples are still prepared once."""
    ranks = [team.job(batch_size=4, environment={"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    other = team.job(batch_size=8)
    first, second, whole = afresh([*ranks, other])
    assert right(whole) == right([*first, *second]) == 0
    assert len(first) == len(second) == len(whole) == SAMPLES // 8
    for parts in zip(first, second, whole, strict=True):
        assert len(parts[0].ids) == len(parts[1].ids) == 4
        assert sorted(parts[0].ids + parts[1].ids) == sorted(parts[2].ids)
    assert len(team.dataset.decodes()) == SAMPLES


def darker(data: Any) -> Any:
    images, labels = data
    return images / 2, labels


def test_a_transform_of_a_jobs_own(team: Team) -> None:
    """The decoding is shared; `job_transform` is applied in each job."""
    plain, own = team.job(), team.job(job_transform=darker)
    batches, others = afresh([plain, own])
    right(batches)
    assert ids_of(batches) == ids_of(others)
    for batch, other in zip(batches, others, strict=True):
        assert not set(batch.sums) & set(other.sums)
    assert len(team.dataset.decodes()) == SAMPLES


# --- samples that cannot be had ---------------------------------------------------------------------------------------


def test_an_error_in_a_sample_reaches_all_jobs(team: Team) -> None:
    jobs = team.jobs(2, dataset=Pictures(team.folder / "decodes", bad=13), shuffle=False)
    lost = list(range(12, 12 + BATCH))
    for job in jobs:
        assert flat(job.take(3)) == list(range(12))
    for job in jobs:
        with pytest.raises(ValueError, match=r"no picture 13\n.*fetching sample 13"):
            job.take(1)
    for batches in together(jobs, "rest"):  # with the batches that follow
        assert right(batches, range(lost[-1] + 1, SAMPLES)) == 0


def test_samples_that_cannot_be_had_are_left_out(team: Team) -> None:
    jobs = team.jobs(2, dataset=Pictures(team.folder / "decodes", bad=13), on_error="skip")
    for batches in together(jobs, "rest"):
        right(batches, [id for id in range(SAMPLES) if id != 13])
    assert [job.stats().skips for job in jobs] == [1, 1]


# --- processes of other kinds -----------------------------------------------------------------------------------------


def test_two_loaders_in_one_process(team: Team) -> None:
    loaders = [sf.SharedLoader(**team.arguments()) for _ in range(2)]
    seen: list[list[Taken]] = [[], []]
    iterators = [iter(loader) for loader in loaders]

    def run(number: int) -> None:
        seen[number] += [taken(loaders[number], batch) for batch in iterators[number]]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loader in loaders:
        loader.close()
    assert seen[0] == seen[1]
    assert right(seen[0]) == 0
    assert len(team.dataset.decodes()) == SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_start_methods(method: str, team: Team) -> None:
    forkserver._forkserver._stop()  # that of an earlier test, which forked jobs would take for their own
    jobs = team.jobs(2, multiprocessing_context=method)
    for epoch in range(2):
        seen = together(jobs, "rest" if epoch == 0 else "epoch")
        assert [right(batches) for batches in seen] == [epoch, epoch]
    assert len(team.dataset.decodes()) == 2 * SAMPLES
