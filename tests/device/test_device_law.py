"""The duration of a step with and without a prefetcher, in virtual time."""

from collections.abc import Iterator

import pytest
import torch
from fakes import World
from hypothesis import given, settings
from hypothesis import strategies as st

from stallfree.device.prefetcher import DevicePrefetcher

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
