"""Several jobs of one group, each a loader of this process: what they share, and what each has for itself."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from group_jobs import BATCH, BATCHES, SAMPLES, Group, Pictures, Taken, flat, right, taken

import stallfree as sf
from children import run_threads
from loader_data import Made, as_list, checksum, picture, same


def begun(loaders: Any) -> list[Iterator[Any]]:
    """Begin an epoch of each before any takes a batch; ranks wait for one another."""
    return run_threads(*(partial(iter, job) for job in loaders))


def epoch(*loaders: sf.SharedLoader[Any]) -> list[list[Taken]]:
    """The batches of an epoch of each job, at the pace of each."""

    def rest(job: sf.SharedLoader[Any], batches: Iterator[Any]) -> list[Taken]:
        return [taken(job, each) for each in batches]

    return run_threads(*map(partial, [rest] * len(loaders), loaders, begun(loaders)))


def test_jobs_get_the_same_batches_and_each_sample_is_decoded_once(group: Group) -> None:
    """Augmentation is fresh in each epoch; `right` computes the expected values."""
    jobs = [group.job(num_workers=2) for _ in range(3)]
    for number in range(2):
        seen = epoch(*jobs)
        assert [right(batches) for batches in seen] == [number] * 3
        assert all(batches == seen[0] for batches in seen)
        assert Counter(group.dataset.decodes()) == dict.fromkeys(range(SAMPLES), number + 1)
    for job in jobs:
        stats = job.stats()
        assert (stats.batches, stats.samples, stats.takeovers) == (2 * BATCHES, 2 * SAMPLES, 0)


@pytest.mark.parametrize(("sample", "collate"), [(lambda id: {"word": "x" * id, "n": id}, None), (picture, as_list)])
def test_batches_without_ids(sample: Callable[[int], Any], collate: Any, group: Group) -> None:
    """Tensors, strings and user-defined objects, as `DataLoader` yields them."""
    made: dict[str, Any] = {"batch_size": 7, "collate_fn": collate, "seed": 1, "shuffle": True}
    with sf.DataLoader(Made(30, sample), **made) as plain:
        assert same(list(group.job(dataset=Made(30, sample), with_ids=False, **made)), list(plain))


def test_a_cache_that_jobs_share_is_filled_once(group: Group) -> None:
    with sf.CachedDataset(Made(SAMPLES, picture), capacity="8MiB") as dataset:
        jobs = [group.job(dataset=dataset, seed=None) for _ in range(2)]
        for batches in (*epoch(*jobs), *epoch(*jobs)):
            assert [batch.sums for batch in batches] == [[checksum(picture(id)[0]) for id in b.ids] for b in batches]
            assert sorted(flat(batches)) == list(range(SAMPLES))
        group.opened.close()
        stats = dataset.stats()
        assert stats.storage_reads == SAMPLES
        assert stats.hits + stats.misses == 2 * SAMPLES


@pytest.mark.parametrize("table", ["there", "missing", "unreadable"])
def test_no_job_sees_what_another_does_to_batches(table: str, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a page table that shows which pages were written."""
    jobs, plain = [group.job(), group.job()], os.open
    if table == "missing":
        other = {"/proc/self/pagemap": "/proc/self/missing"}
        monkeypatch.setattr(os, "open", lambda path, *rest, **more: plain(other.get(path, path), *rest, **more))
    elif table == "unreadable":
        monkeypatch.setattr(os, "pread", lambda *_: b"")
    for number in range(2):
        first, second = begun(jobs)
        for batch in first:
            seen = taken(jobs[0], batch)
            for tensor in (*batch.data, batch.ids):
                tensor.fill_(-1)  # before the other one has it
            assert right([seen], seen.ids) == number
            assert taken(jobs[1], next(second)) == seen
        assert list(second) == []


def test_jobs_of_different_batch_sizes(group: Group) -> None:
    """Multiples and divisors of one another; the samples come in the same order."""
    sizes = [8, 2, 24]
    seen = epoch(*(group.job(batch_size=size) for size in sizes))
    for size, batches in zip(sizes, seen, strict=True):
        assert right(batches) == 0
        assert flat(batches) == flat(seen[0])
        assert [len(batch.ids) for batch in batches] == [min(size, SAMPLES - at) for at in range(0, SAMPLES, size)]
    assert len(group.dataset.decodes()) == SAMPLES


def test_the_ranks_of_a_job_take_disjoint_parts(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of 2 ranks beside a job of one process; the group's samples are still prepared once."""
    jobs = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        jobs.append(group.job(batch_size=4))
    monkeypatch.undo()
    first, second, whole = epoch(*jobs, group.job(batch_size=8))
    assert right(whole) == right([*first, *second]) == 0
    assert len(first) == len(second) == len(whole) == SAMPLES // 8
    for parts in zip(first, second, whole, strict=True):
        assert len(parts[0].ids) == len(parts[1].ids) == 4
        assert sorted(parts[0].ids + parts[1].ids) == sorted(parts[2].ids)
    assert len(group.dataset.decodes()) == SAMPLES


def test_a_transform_of_a_jobs_own(group: Group) -> None:
    """The decoding is shared; `job_transform` is applied in each job, with draws that (seed, epoch, batch) decides."""
    drawn: list[list[float]] = [[], []]

    def noisier(number: int, data: Any) -> Any:
        drawn[number].append(float(torch.rand(())))
        return data[0] + drawn[number][-1], data[1]

    jobs = [group.job(), *(group.job(job_transform=partial(noisier, number)) for number in range(2))]
    for epoch in range(2):
        for batches in zip(*begun(jobs), strict=True):
            plain, one, other = (taken(job, batch) for job, batch in zip(jobs, batches, strict=True))
            assert right([plain], plain.ids) == epoch
            assert one == other
            assert (plain.ids, set(plain.sums) & set(one.sums)) == (one.ids, set())
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 2 * BATCHES
    assert len(group.dataset.decodes()) == 2 * SAMPLES


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_sample_that_cannot_be_read(on_error: str, group: Group, tmp_path: Path) -> None:
    """An error in all jobs, and the batches that follow come; or it is left out."""
    bad = Pictures(tmp_path / "decodes", bad=13)
    jobs = [group.job(dataset=bad, shuffle=False, on_error=on_error) for _ in range(2)]

    def run(job: sf.SharedLoader[Any], batches: Iterator[Any]) -> None:
        got = [taken(job, next(batches)) for _ in range(3)]
        if on_error == "raise":
            with pytest.raises(ValueError, match=r"no picture 13\n.*fetching sample 13"):
                next(batches)
        got += [taken(job, batch) for batch in batches]
        right(got, set(range(SAMPLES)) - ({13} if on_error == "skip" else set(range(12, 12 + BATCH))))
        assert job.stats().skips == (on_error == "skip")

    run_threads(*map(partial, [run] * 2, jobs, begun(jobs)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_start_methods(method: str, group: Group) -> None:
    forkserver._forkserver._stop()  # that of an earlier test, which forked jobs would take for their own
    jobs = [group.job(multiprocessing_context=method) for _ in range(2)]
    for number in range(2):
        assert [right(batches) for batches in epoch(*jobs)] == [number, number]
    assert len(group.dataset.decodes()) == 2 * SAMPLES
