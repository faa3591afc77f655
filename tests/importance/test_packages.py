"""Packages: what goes in comes out, within the budget; what is packed and which are read, against models."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from package_job import WANTED, Job, package_size

from cache_tools import crc, is_signed, signed
from stallfree import mark_deterministic
from stallfree.cache.records import MISS
from stallfree.errors import CodecError
from stallfree.importance import packages as packages_module
from stallfree.importance.packages import LOW, MISSED, PENDING, Field, Packages, PackageWork, SharedFlags
from stallfree.pipeline.codec import encode

NUM_IDS = 1000


def everything(ids: Any) -> Any:
    return np.ones(len(ids), bool)


class Some(Packages):
    """Packages that take values, and whose counts are at hand."""

    def __init__(self, folder: Path) -> None:
        self.shared = SharedFlags(NUM_IDS)
        super().__init__(folder, self.shared, allow_pickle=False, write_budget=1 << 40)

    def put(self, ids: Any, values: list[Any]) -> bool:
        return self.add(list(ids), [encode(value, allow_pickle=False) for value in values])

    def all_of(self, number: int) -> dict[int, Any]:
        ids, values = self.read(number, everything)
        return dict(zip(ids.tolist(), values, strict=True))

    def file_size(self) -> int:
        return os.fstat(self._file.fileno()).st_size


arrays = (np.arange(12.0).reshape(3, 4), torch.arange(10).view(2, 5), torch.zeros(0), np.float32(2))
values = st.sampled_from([None, 3.5, "text", (1, "a", None), {"a": [1, 2.0]}, *arrays]) | st.binary(max_size=3000)
quick = settings(max_examples=15, suppress_health_check=list(HealthCheck))
packages = st.lists(st.tuples(st.integers(0, NUM_IDS - 1), values), min_size=1, max_size=8)


@quick
@given(st.lists(packages, min_size=1, max_size=4))
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, contents: list[Any]) -> None:
    some = Some(tmp_path_factory.mktemp("packages"))
    newest: dict[int, int] = {}
    for content in contents:
        newest.update({id: len(some.sizes) for id, _ in content})
        assert some.put([id for id, _ in content], [value for _, value in content])
    assert some.holding(range(NUM_IDS)).tolist() == [newest.get(id, -1) for id in range(NUM_IDS)]
    assert some.sizes.tolist() == [len(content) for content in contents]
    for number, content in enumerate(contents):
        for _ in range(2):  # the first time they are changed
            ids, found = some.read(number, everything)
            assert ids.tolist() == [id for id, _ in content]
            assert [(type(value), crc(value)) for value in found] == [(type(value), crc(value)) for _, value in content]
            for value in found:
                if isinstance(value, torch.Tensor) and value.numel():
                    value.zero_()
    size, number, samples = some.file_size(), len(contents), sum(map(len, contents))
    written = {"packages_written": number, "samples_packed": samples, "package_bytes_written": size}
    read = {"packages_read": 2 * number, "package_bytes_read": 2 * size, "packages_dropped": 0}
    assert some.shared.stats() == written | read
    some.close()


def test_more_than_one_call_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel moves 2 GiB at most in one call; here it moves 1,000 bytes."""

    def limited(call: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, into, at: call(fd, [into[0][:1000]], at)

    monkeypatch.setattr(os, "preadv", limited(os.preadv))
    monkeypatch.setattr(os, "pwritev", limited(os.pwritev))
    some = Some(tmp_path)
    assert some.put(range(9), [signed(id, 7, 500) for id in range(9)])
    assert some.shared.stats()["package_bytes_written"] == some.file_size() > 4000
    assert all(is_signed(id, value) for id, value in some.all_of(0).items())


def test_flipped_bytes_are_noticed(tmp_path: Path) -> None:
    """A damaged package is forgotten and counted; no sample of it is read; another one takes its place."""
    some, fd = Some(tmp_path), None
    assert some.put([5, 6], [1, 2])
    for at in range(0, 180, 2):
        start = some.file_size()
        assert some.put([3, 999], [22, 6994])
        size, fd = some.file_size() - start, some._file.fileno()
        os.pwrite(fd, bytes([os.pread(fd, 1, start + at % size)[0] ^ 1 << at % 8]), start + at % size)
        assert some.all_of(int(some.holding([3])[0])) == {}
        assert some.holding([3, 999]).tolist() == [-1, -1]
    assert some.shared.stats()["packages_dropped"] == 90
    os.ftruncate(fd, some.file_size() - 1)
    assert some.put([3, 999], [22, 6994])
    assert some.all_of(int(some.holding([3])[0])) == {3: 22, 999: 6994}
    assert some.all_of(0) == {5: 1, 6: 2}
    os.ftruncate(fd, some.file_size() - 1)
    assert some.all_of(int(some.holding([3])[0])) == {}


def do(work: PackageWork, times: int = 1) -> None:
    for _ in range(times):
        work.work(threading.Event())


def test_full_packages_of_what_is_not_there(job: Job) -> None:
    """47 of 60 are neither resident nor in a package: four packages of ten, and seven are not even fetched."""
    work = job.work()
    job.add(work.packages, range(8))
    job.cache.put_many(range(50, 55), [job.source.fetch(id) for id in range(50, 55)])
    job.log.unlink()
    job.flag(range(60))
    job.flag(range(60, 70), LOW)
    job.flag(range(70, 80), PENDING)
    do(work, 3)
    fetched = job.fetched()
    assert len(set(fetched)) == len(fetched) == 40
    assert set(fetched) <= {*range(8, 50), *range(55, 60)}
    assert job.packed(work.packages).keys() == set(fetched) | set(range(8))
    stats = job.shared.stats()
    assert (stats["packages_written"], stats["samples_packed"]) == (5, 48)
    assert stats["package_bytes_written"] == 4 * package_size(10) + package_size(8)
    assert job.cache.stats().storage_reads == 40
    assert (job.cache.stats().hits, job.cache.stats().misses) == (0, 0)
    job.flag(range(100, 103))  # with those that were left, enough for one more
    do(work)
    left = {*range(8, 50), *range(55, 60)} - set(fetched)
    assert (len(job.fetched()), set(job.fetched()[40:])) == (50, {100, 101, 102} | left)


def test_missed_samples_come_first(job: Job) -> None:
    job.flag(range(200))
    missed = list(range(5, 200, 9))
    job.flag(missed, WANTED | MISSED)
    do(job.work(budget=3 * package_size(10)))
    assert len(missed) == 22
    assert set(job.fetched()[:20]) <= set(missed) <= set(job.fetched())
    assert (len(job.fetched()), job.shared.stats()["packages_written"]) == (30, 3)


@pytest.mark.parametrize("more", [-1, 0])
def test_nothing_is_fetched_that_cannot_be_written(job: Job, more: int, caplog: pytest.LogCaptureFixture) -> None:
    job.flag(range(200))
    do(job.work(budget=3 * package_size(10) + more), 3)
    packages = 3 - (more < 0)
    assert len(job.fetched()) == 10 * packages
    assert job.shared.stats()["package_bytes_written"] == packages * package_size(10)
    assert caplog.text.count("is spent") == len(caplog.records) == 1


def test_bad_samples_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: Any, **arguments: Any) -> Any:
        if value[1] == 18:
            raise CodecError("of a strange kind")
        return encode(value, **arguments)

    encode = packages_module.encode
    monkeypatch.setattr(packages_module, "encode", refuse)
    job = Job(tmp_path, step=mark_deterministic(plus_one), bad=[3])
    job.flag(range(23))
    job.flag([3, 12, 17], WANTED | MISSED)
    do(work := job.work(), 3)
    assert [job.fetched().count(id) for id in (3, 12, 17)] == [1, 1, 1]
    assert set(np.flatnonzero(work.packages.holding(range(200)) >= 0)) == set(range(23)) - {3, 12, 17}
    for number in range(2):
        content = work.packages.read(number, everything)
        assert all((value[0] == id + 1).all() for id, value in zip(*content, strict=True))
    job.close()


def plus_one(sample: Any) -> Any:
    numbers, id = sample
    if id == 12:
        raise ValueError("twelve")
    numbers += 1
    return numbers, id + 1


def test_nothing_is_packed_once_a_step_has_proved_random(job: Job) -> None:
    job.flag(range(60))
    job.cache.uncache_steps(1)
    do(job.work())
    assert job.shared.stats()["packages_written"] == 0


def reading(job: Job) -> PackageWork:
    work = job.work()
    work._full = True
    return work


def model(packages: list[list[int]], flags: np.ndarray, resident: set[int], region: int) -> list[int]:
    """Which packages are read, by the definition alone."""
    read: list[int] = []
    there = set(resident)
    newest = {id: number for number, ids in enumerate(packages) for id in ids}
    while sum(1 for id in there if flags[id] & WANTED == WANTED) < region:
        worth = {}
        for number, ids in enumerate(packages):
            use = [id for id in ids if newest[id] == number and id not in there and flags[id] & WANTED == WANTED]
            missed = [id for id in use if flags[id] & MISSED]
            if missed or (use and len(use) >= len(ids) / 4):
                worth[number] = len(use) + len(missed)
        if not worth:
            break
        best = max(worth, key=lambda number: (worth[number], -number))
        read.append(best)
        there |= {id for id in packages[best] if flags[id] & WANTED == WANTED}
    return read


@pytest.mark.parametrize("seed", range(6))
def test_the_packages_that_bring_most_are_read(job: Job, seed: int) -> None:
    rng, work = np.random.default_rng(seed), reading(job)
    cuts = np.sort(rng.choice(np.arange(1, 200), 11, replace=False))
    packages = [part.tolist() for part in np.split(rng.permutation(200), cuts)]
    if seed % 2:
        packages.append(rng.permutation(200)[:20].tolist())  # some are in two
    for part in packages:
        job.add(work.packages, part)
    before = rng.permutation(200)[:30].tolist()
    job.cache.put_many(before, [job.source.fetch(id) for id in before])
    job.flag(slice(None), rng.choice([0, LOW, PENDING, WANTED, WANTED, WANTED | MISSED], 200, p=[0.2] * 4 + [0.1] * 2))
    if seed % 3 == 0:
        job.flag(rng.permutation(200)[:150], PENDING)
    flags = job.shared.flags.copy()
    job.shared.fields[Field.REGION] = region = int(rng.integers(0, 60))
    job.log.unlink()
    read = model(packages, flags, set(before), region)
    do(work, 2)
    stats = job.shared.stats()
    assert stats["packages_read"] == len(read)
    assert stats["package_bytes_read"] == sum(package_size(len(packages[number])) for number in read)
    brought = sorted({id for number in read for id in packages[number] if flags[id] & WANTED == WANTED})
    assert job.resident() == {*before, *brought}
    assert job.fetched() == []
    values = job.cache.get_many(brought)
    assert all(value is not MISS and (value[0] == id).all() for id, value in zip(brought, values, strict=True))


def full_cache(folder: Path) -> tuple[Job, list[int]]:
    """A cache that is full of H-samples; their ids, by rising score."""
    job = Job(folder, 2000, capacity=140_000)
    ids = np.random.default_rng(0).permutation(np.arange(1000, 2000))
    job.cache.set_scores(ids, np.arange(1000) + 1.0)
    job.cache.put_many(ids, [job.source.fetch(id) for id in ids.tolist()])
    there = [id for id in ids.tolist() if id in job.resident()]
    assert 50 < len(there) < 900
    assert there == ids[-len(there) :].tolist()
    return job, there


def test_a_cache_that_takes_no_more_is_left_in_peace(tmp_path: Path) -> None:
    """No package is read again and again for samples that find no place."""
    job, high = full_cache(tmp_path)
    room, work = len(high), reading(job)
    for first in range(0, 1000, 50):
        job.add(work.packages, range(first, first + 50))
    job.flag(range(1000))
    job.shared.fields[Field.REGION] = 1000
    do(work, 5)
    assert job.shared.stats()["packages_read"] == room // 50 + 1
    low = sorted(job.resident())
    assert (len(low), max(low) < 1000) == (room, True)
    job.flag(low[:60], LOW)  # served, and used
    job.cache.set_scores(low[:60], np.zeros(60))
    do(work)
    assert job.shared.stats()["packages_read"] <= room // 50 + 4
    assert len(set(job.resident()) - set(low)) == 60
    job.shared.fields[Field.EPOCH] += 1  # whatever the reason was, a new epoch is a new try
    reads = job.shared.stats()["packages_read"]
    do(work, 2)
    assert job.shared.stats()["packages_read"] == reads + 1
    job.close()


def test_a_sample_that_is_served_meanwhile_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer takes `PENDING` away and lowers the score just before the score is raised."""
    job, high = full_cache(tmp_path)
    job.add((work := reading(job)).packages, range(10))
    job.flag(range(10))
    job.shared.fields[Field.REGION] = 10
    put_many = job.cache.put_many

    def served_first(ids: Any, values: Any) -> Any:
        job.flag(range(4), LOW)
        return put_many(ids, values)

    monkeypatch.setattr(job.cache, "put_many", served_first)
    do(work)
    monkeypatch.undo()
    assert job.resident() == set(range(10)) | set(high[10:])
    job.cache.put_many(high[:10], [job.source.fetch(id) for id in high[:10]])
    assert job.resident() == set(range(4, 10)) | set(high[6:])
    job.close()


def test_samples_of_a_damaged_package_are_packed_again(job: Job) -> None:
    job.flag(range(10))
    do(work := job.work())
    os.pwrite(work.packages._file.fileno(), b"damaged", 200)
    assert work.packages.read(0, everything)[1] == []
    do(work)
    assert (work.packages.holding(range(10)) == 1).all()
