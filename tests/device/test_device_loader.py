"""`sf.DataLoader(..., device=...)` copies from pinned slots; and how long a step takes, in virtual time."""

import gc
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import TIME, World, join_prefetchers
from hypothesis import given, settings
from hypothesis import strategies as st

import stallfree as sf
from children import until
from loader_data import Made
from stallfree.analysis.simulate import read_events
from stallfree.loader.epochs import Epochs
from stallfree.loader.ring import Ring

SAMPLES, BATCH, SIDE = 40, 4, 40
IN_ORDER = [list(range(at, at + BATCH)) for at in range(0, SAMPLES, BATCH)]


def picture(id: int) -> tuple[torch.Tensor, int]:
    return torch.full((SIDE, SIDE), id, dtype=torch.uint8), id


REFUSED: list[int] = []  # slots that were not leased, because three batches are kept already: they are copied


@pytest.fixture
def world() -> Iterator[World]:
    """A slow device that detects when a slot is refilled."""
    made, lease = World(copy_seconds=0.01), Ring.lease
    REFUSED.clear()

    def watch(ring: Ring, slot: int, size: int, most: int) -> Any:
        memory = lease(ring, slot, size, most)
        if memory is None:
            REFUSED.append(slot)
        else:
            weakref.finalize(memory, made.refill, memory.ctypes.data).atexit = False
        return memory

    with made.installed() as patch:
        patch.setattr(Ring, "lease", watch)
        yield made
    join_prefetchers()  # of loaders that nobody closed
    gc.collect()
    made.check()
    assert not made.in_use("device", "registered")


def loader_of(**options: Any) -> Any:
    options = {"batch_size": BATCH, "seed": 3, "device": "cuda", "shuffle": True, "num_workers": 1} | options
    return sf.DataLoader(Made(SAMPLES, picture), **options)


def labels(world: World, batches: Iterator[Any], end: int | None = None) -> list[list[int]]:
    found: list[list[int]] = []
    for pictures, label in islice(batches, end):
        world.use(pictures, seconds=0.02)
        world.synchronize()
        assert world.on_device(pictures)
        assert torch.equal(pictures, label[:, None, None].to(torch.uint8).expand(-1, SIDE, SIDE))
        found.append(label.tolist())
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_those_of_the_host(world: World, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """And pictures go straight out of pinned slots."""
    sizes, plain = list[int](), world.stage

    def stage(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        sizes.extend(source.nbytes for source in sources)
        plain(targets, sources)

    monkeypatch.setattr(world, "stage", stage)
    host = loader_of(device=None, num_workers=0)
    with loader_of(num_workers=workers, persistent_workers=workers > 0) as loader:
        pins = []
        for end in (1, 3, None, None):  # some are broken off
            assert labels(world, iter(loader), end) == [label.tolist() for _, label in islice(host, end)]
            pins.append(world.pins)
        assert loader.device == torch.device("cpu")
    if workers:
        labels_staged, pictures_staged = (sizes.count(BATCH * size) for size in (8, SIDE * SIDE))
        assert labels_staged + pictures_staged == len(sizes)
        assert pictures_staged <= len(REFUSED) < labels_staged
        assert pins[-1] == pins[-2] > 0


@pytest.mark.parametrize("own", [True, False])
def test_the_wait_of_the_loop_counts(world: World, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits of the prefetcher's thread for workers are not counted, nor are its calls of `next` as steps. A
    prefetcher around a loader does what the loader does by itself.
    """
    waits: list[float] = []
    options = {"device": "cuda" if own else None, "shuffle": False, "persistent_workers": True}
    with loader_of(event_log=tmp_path / "log", **options) as loader:
        prefetcher = loader if own else sf.DevicePrefetcher(loader, "cuda")
        with monkeypatch.context() as patch:
            patch.setattr(Epochs, "count_wait", lambda _, seconds: waits.append(seconds))
            assert labels(world, iter(prefetcher)) == IN_ORDER
        assert len(waits) == SAMPLES // BATCH + 1
        assert all(seconds >= 0 for seconds in waits)
        assert loader.stats().wait_seconds == 0
        kinds = {event.what for event in read_events(tmp_path / "log")}
        assert "prep" in kinds
        assert "compute" not in kinds
        assert world.in_use("registered")
        prefetcher.close()
        assert sum(1 for _ in loader) == len(IN_ORDER)
        assert loader.stats().wait_seconds > 0


SECONDS = st.integers(1, 100).map(lambda number: number / 1000)
AHEAD = 2  # batches that a worker is ahead of the consumer


def loaded(world: World, workers: int, load: float, batches: int) -> Iterator[torch.Tensor]:
    """A loader with workers, each of which takes `load` seconds per batch."""
    done = [world.here.clock[TIME]] * workers
    taken: list[float] = []
    for number in range(batches):
        at = number % workers
        done[at] = max(done[at], taken[number - workers * AHEAD] if number >= workers * AHEAD else 0.0) + load
        world.meet({TIME: done[at]})
        taken.append(world.here.clock[TIME])
        yield torch.tensor(float(number))


@given(st.integers(1, 6), SECONDS, SECONDS, SECONDS, st.sampled_from([1, 2, 4]))
@settings(max_examples=8)
def test_the_slowest_of_three_sets_the_pace(workers: int, load: float, copy: float, step: float, depth: int) -> None:
    world, times = World(copy_seconds=copy), list[float]()
    with world.installed():
        prefetcher = sf.DevicePrefetcher(loaded(world, workers, load, 12 * workers), "cuda", depth)
        for number, batch in enumerate(prefetcher):
            world.use(batch, torch.tensor(float(number)), step)
            world.synchronize()  # as by `loss.item()`
            times.append(world.here.clock[TIME])
        prefetcher.close()
    world.check()
    assert world.main not in world.copies
    rate = 6 * workers / (times[-1] - times[-1 - 6 * workers])  # of the second half
    assert rate == pytest.approx(min(workers / load, 1 / max(copy, step)), rel=0.02)


@pytest.mark.parametrize("waits", [False, True])
def test_the_memory_of_the_device_is_that_of_few_batches_whether_or_not_the_loop_waits_for_it(waits: bool) -> None:
    """Steps take three times as long as copies: without a limit, the host would run ever further ahead."""
    world, depth = World(copy_seconds=0.01), 2
    with world.installed():
        prefetcher = sf.DevicePrefetcher([torch.full((256,), float(number)) for number in range(40)], "cuda", depth)
        for _ in range(5):
            for number, batch in enumerate(prefetcher):
                world.use(batch, torch.full((256,), float(number)), 0.03)
                if waits:
                    world.synchronize()
        prefetcher.close()
    world.check()
    assert world.reserved <= (depth + 2) * 1024  # one of them may still be referred to when the next is sent


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


def test_a_state_of_a_sampler_has_what_was_not_delivered() -> None:
    """Also what the prefetcher, which is ahead, has taken."""
    loader, resumed = (sf.DataLoader(range(20), 2, sampler=range(19, -1, -1), num_workers=1) for _ in range(2))
    batches = iter(prefetcher := sf.DevicePrefetcher(loader, "cpu", 3))
    assert [next(batches).tolist() for _ in range(2)] == [[19, 18], [17, 16]]
    until(lambda: loader.stats().batches == 3)
    resumed.load_state_dict(prefetcher.state_dict())
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in batches]
