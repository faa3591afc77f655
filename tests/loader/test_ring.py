"""The ring: a held batch is never overwritten, also for a forked process, and every slot becomes free again."""

import contextlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import stallfree as sf
from cases import half
from children import Child, Holder
from loader_data import Made, loading, picture, pixels, same, values_of, zero_dim
from stallfree.loader.messages import NO_SLOT
from stallfree.loader.pool import KEPT
from stallfree.loader.ring import Ring


def fill(ring: Ring, slot: int, value: int, size: int = 100) -> None:
    memory = ring.slots.reserve(slot, size)
    assert memory is not None
    memory[:size] = value


def test_a_full_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with contextlib.closing(Ring(4, None)) as ring:
        fill(ring, 0, 1, 100)
        before = ring.bytes
        monkeypatch.setattr(os, "posix_fallocate", full)
        assert {ring.slots.reserve(*wanted) for wanted in ((0, 1 << 20), (1, 1 << 20), (NO_SLOT, 1))} == {None}
        assert ring.bytes == before
        assert ring.slots.reserve(0, 100) is not None
        ring.slots.discard(1, free=True)  # it has a file, and no memory


class RingModel(RuleBasedStateMachine):
    """Compares a ring with a list of the values written to each held batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(5, None)
        self.filling: list[tuple[int, int, int]] = []  # slot, value, size
        self.kept: list[tuple[list[torch.Tensor], int]] = []  # views, value
        self.counter = 0

    @rule(size=st.sampled_from([1, 64, 5000, 100_000]))
    def take_and_fill(self, size: int) -> None:
        slot = self.ring.take()
        if slot == NO_SLOT:
            assert len(self.filling) + len(self.kept) == 5
            return
        self.counter = (self.counter + 1) % 251
        fill(self.ring, slot, self.counter, size)
        self.filling.append((slot, self.counter, size))

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def hand_out(self, data: st.DataObject) -> None:
        slot, value, size = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        memory = self.ring.lease(slot, size, 100)
        assert memory is not None
        tensor = torch.from_numpy(memory[:size])
        self.kept.append(([tensor, tensor[size // 2 :]], value))

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), view=st.integers(0, 1))
    def drop(self, data: st.DataObject, view: int) -> None:
        at = data.draw(st.integers(0, len(self.kept) - 1))
        views, _ = self.kept[at]
        if len(views) == 1:
            del self.kept[at]
        else:
            views.pop(view)

    @invariant()
    def what_is_kept_is_untouched(self) -> None:
        for views, value in self.kept:
            assert all((view == value).all() for view in views)

    @invariant()
    def no_slot_is_lost(self) -> None:
        assert self.ring.free == 5 - len(self.kept) - len(self.filling)

    def teardown(self) -> None:
        self.kept.clear()
        self.ring.close()


TestRingModel = RingModel.TestCase
TestRingModel.settings = settings(max_examples=5, stateful_step_count=30)


class ResizedRing(RuleBasedStateMachine):
    """Compares a ring whose size changes during use with the set of slots in use.

    They are filled by a worker, which never unmaps a slot.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(3, None)
        self.count = 3
        self.used: dict[int, int] = {}  # slot -> what is in it
        self.worker = pickle.loads(pickle.dumps(self.ring.slots))

    @rule(value=st.integers(0, 250))
    def take_and_fill(self, value: int) -> None:
        slot = self.ring.take()
        assert (slot != NO_SLOT) == (len(self.used) < self.count)
        if slot != NO_SLOT:
            assert slot not in self.used
            self.worker.reserve(slot, 100)[:100] = value
            self.used[slot] = value

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.used)))
        assert (self.ring.slots.view(slot, 100)[:100] == self.used.pop(slot)).all()
        self.ring.give(slot)
        self.ring.give(NO_SLOT)

    @rule(count=st.integers(1, 7))
    def resize(self, count: int) -> None:
        self.ring.resize(count)
        self.count = count

    @invariant()
    def as_many_as_there_are_to_be(self) -> None:
        assert self.ring.count == self.count
        assert self.ring.free == max(0, self.count - len(self.used))

    @invariant()
    def memory_is_given_back(self) -> None:
        there = {int(path.name[5:]) for path in self.ring.slots.folder.glob("slot-*") if path.stat().st_blocks}
        assert there >= self.used.keys()
        assert len(there) <= max(self.count, len(self.used))

    def teardown(self) -> None:
        self.worker.close()
        self.ring.close()


TestResizedRing = ResizedRing.TestCase
TestResizedRing.settings = settings(max_examples=5, stateful_step_count=30)


@pytest.mark.parametrize(("workers", "cached"), [(2, False), (0, True)])
def test_all_batches_may_be_kept(workers: int, cached: bool) -> None:
    with loading(Made(60, picture), 4, cached=cached, num_workers=workers) as loader:
        kept = [batch for _ in range(3) for batch in loader]
        stats = loader.stats()
        # As soon as three are on lease, the others are copies, and no slot waits for the loop.
        if workers:  # without, batches are objects of the process itself, but for those that threads gather
            assert stats.private_copies == stats.batches - KEPT
    for number, (images, labels) in enumerate(kept):
        ids = [4 * (number % 15) + k for k in range(4)]
        assert labels.tolist() == ids
        assert same(images, torch.stack([pixels(id) for id in ids]))


@pytest.mark.parametrize("cached", [False, True])
def test_staging_is_a_limit(cached: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A ring with batches of 768 to 16 x 768 bytes, the larger of which do not fit."""
    sizes = [1, 4, 16, 1, 16, 4, 16, 1]
    ids = iter(range(1000))
    batches = [[next(ids) for _ in range(size)] for size in sizes * 4]
    limit, data = (2 * 2 + KEPT) * 4096, Made(400, picture)
    with loading(data, cached=cached, batch_sampler=batches, num_workers=2, staging=limit) as loader:
        for epoch in range(1, 3):
            for (images, labels), expected in zip(loader, batches, strict=True):
                assert labels.tolist() == expected
                assert same(images, torch.stack([pixels(id) for id in expected]))
                assert loader.stats().staging_bytes <= limit
            assert loader.stats().private_copies == epoch * sum(size == 16 for size in sizes * 4)
    [told] = [record.message for record in caplog.records if "staging" in record.message]
    assert "no room in the staging ring (slots of 4.0 KiB)" in told


def test_staging_without_room_for_anything() -> None:
    with sf.DataLoader(Made(10, zero_dim), 2, num_workers=1, staging=0) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        assert loader.stats().staging_bytes == 0


def test_large_batches_by_way_of_the_connection() -> None:
    """Results larger than the kernel's buffers arrive while tasks are sent the other way."""
    big = Made(12, lambda id: torch.full((1 << 18,), id, dtype=torch.float64))
    with sf.DataLoader(big, num_workers=2, staging="64KiB", prefetch_factor=3) as loader:
        assert [batch.unique().tolist() for batch in loader] == [[id] for id in range(12)]
        next(iter(loader))  # and leave


@pytest.mark.parametrize("persistent", [False, True])
def test_a_forked_child_cannot_go_on_with_an_iteration(persistent: bool) -> None:
    def next_in_child() -> None:
        with pytest.raises(sf.StallfreeError, match=r"is that of process \d+, which was forked"):
            next(batches)

    with sf.DataLoader(Made(96, pixels), 4, num_workers=2, with_ids=True, persistent_workers=persistent) as loader:
        batches = iter(loader)
        seen = [next(batches) for _ in range(3)]
        assert Child(next_in_child).wait() == 0
        seen += batches
        assert [batch.ids.tolist() for batch in seen] == [list(range(at, at + 4)) for at in range(0, 96, 4)]
        assert all(torch.equal(batch.data, torch.stack([pixels(id) for id in batch.ids.tolist()])) for batch in seen)


def test_a_ring_that_is_closed_makes_no_folder() -> None:
    """The garbage collector may close it while a thread gathers."""
    ring = Ring(2, None)
    ring.close()
    for use in (ring.take, lambda: ring.slots.reserve(0, 100)):
        with pytest.raises(sf.StorageError, match="ring is closed"):
            use()


@pytest.mark.parametrize(("workers", "cached"), [(2, False), (0, True)])
def test_no_code_runs_where_a_batch_is_freed(workers: int, cached: bool) -> None:
    """Ctrl-C that comes while it runs would be lost: an exception in a callback of the collector is ignored."""
    called: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    with loading(Made(60, picture), 4, cached=cached, num_workers=workers) as loader:
        list(loader)
        for batch in loader:
            ring = loader._epochs._living()[-1].pool.ring
            free = ring.free
            sys.setprofile(note)
            del batch
            sys.setprofile(None)
            assert ring.free == free + 1
            del ring
    assert called == []


COUNT, SIZE = 48, 5000


def row(id: int) -> Any:
    return np.full(SIZE, id, np.float32)


def saver(batch: Any) -> Holder:
    """A forked process that looks at a batch only when it is told to end."""
    values = np.unique(batch).tolist()

    def check() -> None:
        assert np.unique(batch).tolist() == values

    return Holder(lambda: check)


@pytest.mark.parametrize(("workers", "cached"), [(2, False), (0, True)])
def test_a_forked_process_keeps_its_batch(workers: int, cached: bool) -> None:
    with loading(Made(COUNT, row), 4, cached=cached, num_workers=workers) as loader:
        list(loader)  # later epochs are gathered from the cache
        savers = []
        for _ in range(2):
            for number, batch in enumerate(loader):
                if number in (2, 5):
                    savers.append(saver(batch))
                del batch
        assert len(savers) == 4
        for one in savers:
            one.end()


def _maps(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/slot-" in line]


@pytest.mark.parametrize("cached", [False, True])
def test_the_memory_of_forked_batches_is_given_back(cached: bool) -> None:
    """A process forked for each batch: neither files nor mappings of the ring grow, here and in the workers."""
    with loading(Made(COUNT, row), 4, cached=cached, num_workers=2) as loader:
        list(loader)
        most = 2 * 2 + 3  # two batches in flight per worker, and three that may be kept
        size = loader.stats().staging_bytes
        for batch in loader:
            saver(batch).end()
            del batch
            assert loader.stats().staging_bytes <= max(size, most * (4 * SIZE * 4 * 9 // 8 + 2 * 4096))
        for process in [psutil.Process(), *psutil.Process().children()]:
            assert len(_maps(process.pid)) <= 2 * most


def test_a_fork_costs_no_slot_of_a_batch_that_is_not_held() -> None:
    with loading(Made(COUNT, row), 4, num_workers=1) as loader:
        list(loader)
        before = {line.split()[-1] for line in _maps(os.getpid())}
        for batch in loader:
            del batch
            assert Child(int).wait() == 0
        assert {line.split()[-1] for line in _maps(os.getpid())} == before


EACH = 120


def whole(loader: Any) -> bool:
    return sorted(values_of(loader)) == list(range(EACH))


def in_child(loader: Any) -> None:
    assert whole(loader)
    assert whole(loader)
    loader.close()


@pytest.mark.parametrize(
    ("moment", "workers", "cached"), half(["in mid-epoch", "between epochs"], [0, 1, 2], [False, True])
)
def test_parent_and_child_have_every_sample(moment: str, workers: int, cached: bool) -> None:
    with loading(Made(EACH, int), 4, cached=cached, shuffle=True, num_workers=workers, timeout=60) as loader:
        seen = []
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            if number == 5 and moment == "in mid-epoch":
                child = Child(in_child, loader)
        assert sorted(seen) == list(range(EACH))
        if moment == "between epochs":
            child = Child(in_child, loader)
        assert whole(loader)
        assert child.wait() == 0
        assert whole(loader)
