"""`sf.DataLoader(..., device=...)` copies from pinned slots; and how long a step takes, in virtual time."""

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import World
from hypothesis import given, settings
from hypothesis import strategies as st

import stallfree as sf
from stallfree.analysis.simulate import read_events
from stallfree.device.prefetcher import DevicePrefetcher
from stallfree.loader.epochs import Epochs
from stallfree.loader.ring import Ring

SAMPLES, BATCH = 40, 4
SIDE = 40


class Pictures:
    """Pictures filled with their number, and their labels."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, id: int) -> tuple[torch.Tensor, int]:
        return torch.full((SIDE, SIDE), id, dtype=torch.uint8), id


@pytest.fixture
def world() -> Iterator[World]:
    """A slow device that detects when a slot is refilled."""
    made = World(copy_seconds=0.01)
    lease = Ring.lease

    def watch(ring: Ring, slot: int, size: int, most: int) -> Any:
        memory = lease(ring, slot, size, most)
        if memory is not None:
            weakref.finalize(memory, made.refill, memory.ctypes.data).atexit = False
        return memory

    with made.installed() as patch:
        patch.setattr(Ring, "lease", watch)
        yield made
    for thread in threading.enumerate():
        if thread.name == "stallfree-prefetch":  # of a loader that nobody closed
            thread.join()
    gc.collect()
    made.check()
    assert made.in_use("device") == 0
    assert sum(made.registrations) == 0


def loader_of(dataset: Any = None, **options: Any) -> Any:
    options = {"batch_size": BATCH, "seed": 3, "device": "cuda", "shuffle": True, "num_workers": 1} | options
    return sf.DataLoader(dataset or Pictures(), **options)


def labels(world: World, batches: Iterator[Any], end: int | None = None, step: float = 0.02) -> list[list[int]]:
    """A training loop that compares each picture with its label."""
    found: list[list[int]] = []
    for pictures, label in batches:
        world.use(pictures, seconds=step)
        world.synchronize()
        assert world.on_device(pictures)
        assert torch.equal(pictures, label[:, None, None].to(torch.uint8).expand(-1, SIDE, SIDE))
        found.append(label.tolist())
        if len(found) == end:
            break
    return found


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
def test_epochs_are_those_of_the_host_and_pictures_go_straight_out_of_pinned_slots(
    world: World, monkeypatch: pytest.MonkeyPatch, workers: int, persistent: bool
) -> None:
    sizes, plain = list[int](), world.backend.stage

    def stage(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        sizes.extend(source.nbytes for source in sources)
        plain(targets, sources)

    monkeypatch.setattr(world.backend, "stage", stage)
    host = loader_of(device=None, num_workers=0)
    with loader_of(num_workers=workers, persistent_workers=persistent) as loader:
        pinned = []
        for _ in range(2):
            assert labels(world, iter(loader)) == [label.tolist() for _, label in host]
            pinned.append(world.registrations.count(1))
        assert loader.device == torch.device("cpu")
    if workers:
        assert set(sizes) == {BATCH * 8}
        assert pinned[0] > 0
        assert pinned[1] == pinned[0]


def test_an_epoch_that_is_broken_off_is_followed_by_another(world: World) -> None:
    with loader_of(shuffle=False) as loader:
        every = [list(range(at, at + BATCH)) for at in range(0, SAMPLES, BATCH)]
        for end in (1, 3, None):
            assert labels(world, iter(loader), end) == every[:end]


def test_the_wait_that_counts_is_that_of_the_training_loop(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waits of the prefetcher's thread for workers are not counted, nor are its calls of `next` as steps."""
    waits: list[float] = []
    monkeypatch.setattr(Epochs, "count_wait", lambda _, seconds: waits.append(seconds))
    with loader_of(event_log=tmp_path / "log") as loader:
        for _ in loader:
            pass
        assert len(waits) == SAMPLES // BATCH + 1
        assert all(seconds >= 0 for seconds in waits)
        assert loader.stats().wait_seconds == 0
    steps = [event for event in read_events(tmp_path / "log") if event.what == "compute"]
    assert steps == []


def test_a_prefetcher_around_a_loader_does_what_the_loader_does_by_itself(world: World) -> None:
    """Slots are pinned, and waits are those of the training loop."""
    with loader_of(device=None, persistent_workers=True) as loader:
        prefetcher = sf.DevicePrefetcher(loader, "cuda")
        for _ in range(2):
            assert sum(1 for _ in prefetcher) == SAMPLES // BATCH
        pool = loader._epochs.kept
        assert pool is not None
        assert pool.ring.slots._pinned
        prefetcher.close()
        assert sorted(id for _, labels in loader for id in labels.tolist()) == list(range(SAMPLES))
        assert loader.stats().wait_seconds > 0


# -- the pace, in virtual time -----------------------------------------------------------------------------------------

SECONDS = st.integers(1, 100).map(lambda number: number / 1000)


class Loaders:
    """Several loaders, each `load` seconds per batch, and `ahead` batches ahead of the consumer."""

    def __init__(self, world: World, workers: int, load: float, batches: int, ahead: int = 2) -> None:
        self.world, self.workers, self.load, self.batches, self.ahead = world, workers, load, batches, ahead

    def __iter__(self) -> Iterator[torch.Tensor]:
        world, room = self.world, self.workers * self.ahead
        done = [world.here.time] * self.workers
        taken: list[float] = []
        for number in range(self.batches):
            at = number % self.workers
            begin = max(done[at], taken[number - room] if number >= room else 0.0)
            done[at] = begin + self.load
            world.sleep_until(done[at])
            taken.append(world.here.time)
            yield torch.tensor(float(number))


def train(world: World, batches: Iterator[torch.Tensor], step: float) -> list[float]:
    """Run steps that are waited for, as by `loss.item()`; returns their end times."""
    times = []
    for number, batch in enumerate(batches):
        world.use(batch, torch.tensor(float(number)), step)
        world.synchronize()
        times.append(world.here.time)
    return times


def without_prefetch(world: World, loader: Loaders) -> Iterator[torch.Tensor]:
    """The usual loop: copy to the device in the training stream, and wait."""
    for batch in loader:
        pinned, sent = world.backend.empty_pinned(4).view(torch.float32), world.backend.empty(4).view(torch.float32)
        world.backend.stage([pinned[0]], [batch])
        world.backend.copy(sent, pinned)
        world.synchronize()
        yield sent[0]


def rate(times: list[float], workers: int) -> float:
    """Return batches per second in the second half, over whole rounds of the loaders."""
    count = len(times) // (2 * workers) * workers
    return count / (times[-1] - times[-1 - count])


def rates(workers: int, load: float, copy: float, step: float, depth: int = 2, rounds: int = 12) -> tuple[float, float]:
    """Return the rates with and without a prefetcher."""
    found = []
    for prefetch in (True, False):
        world = World(copy_seconds=copy)
        loader = Loaders(world, workers, load, workers * rounds)
        with world.installed():
            if prefetch:
                prefetcher = DevicePrefetcher(loader, "cuda", depth)
                times = train(world, iter(prefetcher), step)
                prefetcher.close()
                assert world.main.name not in world.copies
            else:
                times = train(world, without_prefetch(world, loader), step)
        world.check()
        found.append(rate(times, workers))
    return found[0], found[1]


@given(st.integers(1, 6), SECONDS, SECONDS, SECONDS, st.sampled_from([1, 2, 4]))
@settings(max_examples=8)
def test_the_slowest_of_loading_copying_and_training_sets_the_pace(
    workers: int, load: float, copy: float, step: float, depth: int
) -> None:
    ours, without = rates(workers, load, copy, step, depth)
    assert ours == pytest.approx(min(workers / load, 1 / max(copy, step)), rel=0.02)
    assert without == pytest.approx(min(workers / load, 1 / (copy + step)), rel=0.02)


@pytest.mark.parametrize("waits", [False, True])
def test_the_memory_of_the_device_is_that_of_few_batches_whether_or_not_the_loop_waits_for_it(waits: bool) -> None:
    """Steps take three times as long as copies: without a limit, the host would run ever further ahead."""
    world, depth = World(copy_seconds=0.01), 2
    reserved = []
    with world.installed():
        prefetcher = DevicePrefetcher([torch.full((256,), float(number)) for number in range(40)], "cuda", depth)
        for _ in range(5):
            for number, batch in enumerate(prefetcher):
                world.use(batch, torch.full((256,), float(number)), 0.03)
                if waits:
                    world.synchronize()
            reserved.append(world.reserved)
        prefetcher.close()
    world.check()
    assert max(reserved) <= (depth + 2) * 1024  # one of them may still be referred to when the next is sent


def test_a_loader_with_a_device_is_freed_without_the_garbage_collector() -> None:
    loader = sf.DataLoader(list(range(12)), 4, num_workers=1, persistent_workers=True, device="cpu")
    assert len(list(loader)) == 3
    parts = [weakref.ref(part) for part in (loader, loader._prefetcher, loader._epochs)]
    loader.close()
    gc.disable()
    try:
        del loader
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()
