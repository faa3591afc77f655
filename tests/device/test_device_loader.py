"""`sf.DataLoader(..., device=...)`: one copy from a worker to the device, from pinned slots."""

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import World

import stallfree as sf
from stallfree.events import read_events
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


def staged(world: World, patch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which sizes of staged memory are added from now on."""
    sizes: list[int] = []
    plain = world.backend.stage

    def stage(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        sizes.extend(source.nbytes for source in sources)
        plain(targets, sources)

    patch.setattr(world.backend, "stage", stage)
    return sizes


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
def test_epochs_are_those_of_the_host_and_pictures_go_straight_out_of_pinned_slots(
    world: World, monkeypatch: pytest.MonkeyPatch, workers: int, persistent: bool
) -> None:
    sizes = staged(world, monkeypatch)
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
