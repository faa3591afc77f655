"""What a loader tells other processes about itself."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf
from children import PATIENCE, Child, Holder
from loader_data import Gate, Made, floats
from smart_data import until
from stallfree.ipc.folders import default_root, sweep
from stallfree.workers import status
from stallfree.workers.status import LoaderStatus, Status, running_loaders
from stallfree.workers.worker_pool import new_counts

SAMPLES, BATCH = 10, 3


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is an update."""
    monkeypatch.setattr(status, "INTERVAL", 0.0)


def only() -> LoaderStatus:
    (found,) = running_loaders(default_root())
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("always")
def test_counts_are_those_of_the_loader(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/jobs/train.py", "--lr", "1"])
    begun = time.monotonic()
    loader = sf.DataLoader(Made(SAMPLES, floats), BATCH, num_workers=workers)
    assert running_loaders(default_root()) == []
    for epoch in range(2):
        for number, batch in enumerate(loader, 1):
            found = only()
            assert (found.pid, found.script, found.dataset) == (os.getpid(), "train.py", "Made")
            assert found.epoch == epoch
            assert begun <= found.begun <= found.at <= time.monotonic()
            now = loader.stats()
            assert found.stats.staging_bytes <= now.staging_bytes  # a worker may have made a slot larger meanwhile
            assert found.stats == replace(now, staging_bytes=found.stats.staging_bytes)
            assert found.stats.batches == 4 * epoch + number
            assert found.stats.num_workers == workers
            assert len(batch) <= BATCH
        assert running_loaders(default_root()) == []
    assert loader.stats().samples == 2 * SAMPLES


def test_the_first_update_is_there_before_the_first_batch() -> None:
    iterator = iter(sf.DataLoader(Made(SAMPLES, floats), BATCH, num_workers=1))
    assert only().stats.batches == 0
    next(iterator)
    del iterator
    assert running_loaders(default_root()) == []


def test_persistent_workers_and_close() -> None:
    with (
        sf.CachedDataset(Made(SAMPLES, floats), capacity="4MiB") as dataset,
        sf.DataLoader(dataset, BATCH, num_workers=1, persistent_workers=True) as loader,
    ):
        list(loader)
        found = only()
        assert found.dataset == "CachedDataset(Made)"
        assert (found.stats.batches, found.stats.samples, found.stats.queue_depth) == (4, SAMPLES, 0)
    assert running_loaders(default_root()) == []


@pytest.mark.usefixtures("always")
def test_a_wait_that_goes_on_is_counted() -> None:
    gate = Gate()
    loader = sf.DataLoader(Made(SAMPLES, gate), 6, num_workers=1, multiprocessing_context="fork")
    trainer = threading.Thread(target=lambda: list(loader))
    trainer.start()
    try:
        until(lambda: any(found.stats.wait_seconds > 0.1 for found in running_loaders(default_root())))
        assert only().stats.batches == 0
        assert loader.stats().wait_seconds == 0
    finally:
        gate.open()
        trainer.join()
        gate.close()
    assert loader.stats().batches == 2


def test_a_killed_process_is_gone_and_swept(store_root: Path) -> None:
    iterators: list[Any] = []

    def begin() -> Callable[[], None]:
        iterators.append(iter(sf.DataLoader(Made(100, floats), BATCH, num_workers=1, multiprocessing_context="fork")))
        next(iterators[0])
        return lambda: None

    holder = Holder(begin)
    found = only()
    assert found.pid != os.getpid()
    holder.kill()
    assert running_loaders(default_root()) == []
    until(lambda: bool(sweep(store_root)) or not list(store_root.iterdir()))  # its worker ends a little later
    assert list(store_root.iterdir()) == []


@pytest.mark.usefixtures("always")
def test_a_forked_child_does_not_write_its_parents_status() -> None:
    loader = sf.DataLoader(Made(SAMPLES, floats), BATCH)
    iterator = iter(loader)
    next(iterator)
    before = only()

    def child() -> None:
        loader.counts["batches"] = 77
        iterator._epoch._publish()  # type: ignore[attr-defined]
        assert only() == before
        own = iter(sf.DataLoader(Made(SAMPLES, floats), BATCH))
        found = running_loaders(default_root())
        assert [status.pid for status in found] == [os.getppid(), os.getpid()]
        del own
        assert only() == before

    assert Child(child).wait() == 0
    assert only() == before
    assert len(list(iterator)) == 3
    assert running_loaders(default_root()) == []


def test_without_room_there_is_no_status_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(status, "_make", fail)
    loader = sf.DataLoader(Made(SAMPLES, floats), BATCH, num_workers=1)
    for _ in loader:
        assert running_loaders(default_root()) == []
    assert loader.stats().samples == SAMPLES


def test_what_is_no_status_is_passed_over(store_root: Path) -> None:
    iterator = iter(sf.DataLoader(Made(SAMPLES, floats), BATCH, num_workers=1))
    (folder,) = store_root.iterdir()
    file = folder / "status"
    whole = file.read_bytes()
    for bad in (b"", b"x" * 100, bytes(len(whole)), bytes(8) + whole[8:], whole[:8] + bytes(8) + whole[16:]):
        file.write_bytes(bad)
        assert running_loaders(store_root) == []
    del iterator
    assert running_loaders(store_root / "never") == []


def test_readers_never_see_half_an_update(tmp_path: Path) -> None:
    """Every update has one number in all counts, so a mixture of two would show."""
    names = list(new_counts())
    Status(lambda: tmp_path, [], 0.0, at_once=True).publish(0.0, 0, dict.fromkeys(names, 0))
    enough = tmp_path / "enough"

    def write() -> None:
        own = Status(lambda: tmp_path, [], 0.0, at_once=True)
        number = 0
        while not enough.exists():
            for _ in range(100):
                number += 1
                own.publish(float(number), number, dict.fromkeys(names, number))

    child = Child(write)
    seen: set[int] = set()
    last = 0
    deadline = time.monotonic() + PATIENCE
    try:
        while len(seen) < 30 and time.monotonic() < deadline:
            found = status._read(tmp_path)
            if found is None:
                continue
            values = {getattr(replace(found.stats, staging_bytes=found.epoch), name) for name in names}
            assert values == {found.epoch} == {found.at}
            assert found.epoch >= last
            last = found.epoch
            seen.add(last)
    finally:
        enough.touch()
        code = child.wait()
    assert code == 0
    assert len(seen) == 30


def test_a_short_epoch_without_workers_makes_no_file(store_root: Path) -> None:
    for _ in sf.DataLoader(Made(SAMPLES, floats), BATCH):
        assert list(store_root.iterdir()) == []
