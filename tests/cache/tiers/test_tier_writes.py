"""What is on its way to the disk of a tier, processes that die over it, and disks that fail: that costs hits only."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stallfree as sf
from children import Child
from stallfree.cache import MISS, SampleCache
from stallfree.cache.arena import DiskArena
from stallfree.cache.tiers import write_behind
from stallfree.stores import disk_tier
from stallfree.stores.disk_tier import FAILURES, PAUSE, Health
from stallfree.testing import ThrottledSource
from tier_tools import (
    COUNT,
    Samples,
    all_of,
    dataset_of,
    disk_of,
    held,
    is_right,
    open_tiers,
    put,
    sample,
    sound,
)


@pytest.fixture
def source() -> Iterator[ThrottledSource]:
    """The samples, with counters that all processes share."""
    with_counters = ThrottledSource(Samples())
    yield with_counters
    with_counters.close()


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[SampleCache], tuple[threading.Event, threading.Event]]]:
    """Makes the thread that writes to a disk wait: events that say that it does, and let it go on."""
    gates = []

    def hold(disk: SampleCache) -> tuple[threading.Event, threading.Event]:
        waits, go = threading.Event(), threading.Event()
        gates.append(go)
        write = disk.put_records

        def put_records(ids: Any, records: Any) -> Any:
            waits.set()
            assert go.wait(60)
            return write(ids, records)

        monkeypatch.setattr(disk, "put_records", put_records)
        return waits, go

    yield hold
    for gate in gates:
        gate.set()


def test_a_forked_child_has_a_thread_of_its_own(tmp_path: Path, held_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way when it is forked is written once, by the parent; the child writes what comes to it."""
    with open_tiers(tmp_path, 2, COUNT) as cache:
        put(cache, range(4))
        waits, go = held_up(disk_of(cache))
        cache.put_many(range(10, 20), [sample(id) for id in range(10, 20)])
        assert waits.wait(60)

        def child() -> None:
            monkeypatch.undo()
            put(cache, range(20, 30))
            assert set(range(20, 30)) <= held(disk_of(cache))
            assert not set(range(10, 20)) & held(disk_of(cache))
            cache.close()

        assert Child(child).wait() == 0
        go.set()
        cache.flush()
        assert set(range(10, 30)) <= held(disk_of(cache))
        sound(cache)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sample_on_its_way_is_waited_for_by_others(
    tmp_path: Path, held_up: Any, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(write_behind, "DRAIN_SECONDS", 60.0)
    fetched: list[int] = []
    with open_tiers(tmp_path, 2, COUNT) as cache, ThreadPoolExecutor(1) as pool:
        put(cache, range(4))
        waits, go = held_up(disk_of(cache))
        cache.put_many([10], [sample(10)])
        assert waits.wait(60)
        reading = cache.begin_read(np.array([10, 11]), lambda: pool, fetched.extend) if ahead else None
        threading.Timer(0.05, go.set).start()
        assert is_right(10, cache.get(10) if reading is None else reading.result()[0])
    assert fetched == [11] * ahead


def test_what_a_killed_process_had_on_its_way_is_a_miss(tmp_path: Path, held_up: Any) -> None:
    with open_tiers(tmp_path, 2, COUNT) as cache:
        put(cache, range(4))

        def die() -> None:
            waits, _ = held_up(disk_of(cache))
            cache.put_many([10, 11], [sample(10), sample(11)])
            assert waits.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)

        assert Child(die).wait() == -signal.SIGKILL
        assert cache.get_many([10, 11]) == [MISS, MISS]
        assert put(cache, [10, 11]).all()
        assert all(is_right(id, cache.get(id)) for id in (10, 11))


@pytest.mark.parametrize("moment", [1, *[pytest.param(at, marks=pytest.mark.slow) for at in range(0, 30, 3)]])
def test_a_process_killed_while_it_writes(tmp_path: Path, moment: int) -> None:
    """At the system call that writes a record, in the midst of what that has to leave in order."""
    with open_tiers(tmp_path, 12, COUNT, policy="lru") as cache:
        put(cache, range(30))

        def die() -> None:
            write, left = DiskArena.write, [moment]

            def write_or_die(arena: DiskArena, blocks: Any, data: Any) -> None:
                if not left[0]:
                    write(arena, blocks[: len(blocks) // 2], data[: len(blocks) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                write(arena, blocks, data)

            DiskArena.write = write_or_die  # type: ignore[method-assign]
            for round_ in range(moment + 1):
                put(cache, range(30 + round_, 34 + round_))
                cache.drop([31 + round_])

        assert Child(die).wait() == -signal.SIGKILL
        assert put(cache, range(COUNT)).all()
        assert all(is_right(id, value) for id, value in enumerate(cache.get_many(range(COUNT))))
        sound(cache)


# --- on the way to the disk -------------------------------------------------------------------------------------------


def test_the_interpreter_ends_when_all_is_written(tmp_path: Path, interpreter: Any) -> None:
    done = interpreter.run(
        f"""
import numpy as np, time
import stallfree as sf
from stallfree.cache import SampleCache
slow = SampleCache.put_records
def put_records(self, ids, records, **given):
    if self.meta.on_disk:
        time.sleep(0.3)
    return slow(self, ids, records, **given)
SampleCache.put_records = put_records
tier = sf.DiskTier({str(tmp_path)!r}, capacity="4MB", persist=True)
cache = tier.attach(50, capacity=60000, fingerprint="data", policy="minio", name="tiers", example=bytes(4000))
cache.put_many(range(50), [bytes([id]) * 4000 for id in range(50)])
"""
    )
    assert done.code == 0, done.err
    with SampleCache(50, capacity="4MB", fingerprint="data", store=tmp_path, name="tiers") as disk:
        assert disk.get_many(range(50)) == [bytes([id]) * 4000 for id in range(50)]
    shutil.rmtree(disk.path)


# --- a disk that fails ------------------------------------------------------------------------------------------------


def test_a_damaged_record_comes_from_the_source(tmp_path: Path, source: ThrottledSource) -> None:
    with dataset_of(source, tmp_path, 20, COUNT) as dataset:
        loader = sf.DataLoader(dataset, 8)
        all_of(loader)
        with open(disk_of(dataset.cache).path / "data", "r+b") as file:
            file.write(bytes(10_000))  # two records and a part of a third
        all_of(loader)
        assert dataset.stats().damaged == 3
        assert source.requests == COUNT + 3
        all_of(loader)  # they have been stored again
        assert source.requests == COUNT + 3
        sound(dataset.cache)


def test_a_disk_that_gives_nothing_is_left_alone(
    tmp_path: Path, source: ThrottledSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dataset_of(source, tmp_path, 20, COUNT) as dataset:
        loader = sf.DataLoader(dataset, 8)
        all_of(loader)
        disk, calls = disk_of(dataset.cache), []

        def fail(ids: Any) -> list[Any]:
            calls.append(len(ids))
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(disk, "get_many", fail)
        with pytest.warns(RuntimeWarning, match="failed to read samples 3 times in a row: its use is paused") as caught:
            all_of(loader)
        assert len(caught) == 1
        assert FAILURES <= len(calls) < COUNT // 2
        assert source.requests == 2 * COUNT - dataset.stats().resident_items
        calls.clear()
        all_of(loader)
        assert calls == []


def test_a_disk_that_does_not_write(tmp_path: Path, source: ThrottledSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DiskArena, "write", fail)
    with dataset_of(source, tmp_path, 20, COUNT) as dataset, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = sf.DataLoader(dataset, 8)
        for _ in range(2):
            all_of(loader)
            dataset.cache.flush()
        stats = dataset.stats()
        assert [str(one.message).count("failed to store samples 3 times") for one in caught] == [1]
        assert stats.lower.resident_items == 0
        assert source.requests == 2 * COUNT - stats.resident_items
        assert disk_of(dataset.cache).stats().rejected < COUNT - stats.resident_items  # it was not asked any more


def test_a_failing_disk_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(disk_tier.time, "monotonic", lambda: now[0])
    health = Health(Path("/disk"), "did nothing")
    for _ in range(FAILURES - 1):
        health.failed()
    assert health.good
    health.succeeded()
    for _ in range(FAILURES - 1):
        health.failed()
    assert health.good
    with pytest.warns(RuntimeWarning, match="the disk of /disk did nothing 3 times in a row"):
        health.failed()
    assert not health.good
    now[0] += PAUSE
    assert health.good
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        health.failed()  # warned of once
    assert not health.good
