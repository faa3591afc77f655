"""A thread takes batches ahead, on a CPU one, and draws no random numbers concurrently with the model."""

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from fakes import World

import stallfree as sf
from stallfree.device.ahead import Items, LoaderThread
from stallfree.device.prefetcher import DevicePrefetcher

PATIENCE = 60.0
COUNT = 6


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stallfree-prefetch"]


class Noted:
    """A data set or loader that records its requests; `until` waits for one."""

    def __init__(self) -> None:
        self.asked = [threading.Event() for _ in range(COUNT)]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> torch.Tensor:
        self.asked[id].set()
        return torch.tensor([id])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[id] for id in range(COUNT))

    def fingerprint(self) -> str:
        return str(id(self))

    def until(self, id: int) -> None:
        assert self.asked[id].wait(PATIENCE)


# -- overlap ----------------------------------------------------------------------------------------------------------


@contextmanager
def around(loader: Any) -> Iterator[DevicePrefetcher]:
    prefetcher = DevicePrefetcher(loader, "cpu")
    yield prefetcher
    prefetcher.close()


WAYS: dict[str, Callable[[Any], Any]] = {
    "an iterable": lambda noted: noted,
    "a generator": iter,
    "torch's loader": torch.utils.data.DataLoader,
    "one whose sampler draws a seed": lambda noted: torch.utils.data.DataLoader(noted, shuffle=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_next_batch_is_asked_for_before_the_step_has_ended(way: str) -> None:
    noted = Noted()
    torch.manual_seed(0)
    order = [int(batch) for batch in WAYS[way](noted)]
    for event in noted.asked:
        event.clear()
    torch.manual_seed(0)
    with around(WAYS[way](noted)) as batches:
        for number, batch in enumerate(batches):
            assert int(batch) == order[number]
            if (number or "seed" not in way) and number + 1 < COUNT:
                noted.until(order[number + 1])  # this is the step
        assert number == COUNT - 1


@pytest.mark.parametrize("own", [True, False])
def test_batches_out_of_a_cache_are_taken_ahead(own: bool) -> None:
    """Without workers: generators are watched while the cache is filled, so the thread waits for the step to end."""
    ended = time.monotonic() + PATIENCE
    with (
        sf.CachedDataset(Noted(), capacity="1MiB", form="prepared") as data,
        sf.DataLoader(data, device="cpu" if own else None) as loader,
        around(loader) as prefetcher,
    ):
        batches = loader if own else prefetcher
        torch.manual_seed(1)
        for _ in batches:
            torch.rand(1)  # would be taken for a draw of the data set
        for number, batch in enumerate(batches):
            assert int(batch) == number
            while loader.stats().batches < min(COUNT + number + 2, 2 * COUNT) and time.monotonic() < ended:
                threading.Event().wait(0.001)
            assert loader.stats().batches == min(COUNT + number + 2, 2 * COUNT)


def test_it_is_one_batch_ahead_and_no_more() -> None:
    noted = Noted()
    prefetcher = DevicePrefetcher(noted, "cpu", depth=4)
    iterator = iter(prefetcher)
    next(iterator)
    noted.until(1)
    next(iterator)
    noted.until(2)
    assert [event.is_set() for event in noted.asked] == [True] * 3 + [False] * 3
    prefetcher.close()
    assert not prefetching()
    assert not noted.asked[3].is_set()


def test_batches_pass_as_they_are_and_the_transform_runs_in_the_training_loop() -> None:
    given = [{"x": torch.tensor([number])} for number in range(4)]
    prefetcher = DevicePrefetcher(given, "cpu")
    for _ in range(2):
        for found, batch in zip(prefetcher, given, strict=True):
            assert found is batch
    where = DevicePrefetcher([1, 2], "cpu", transform_on_device=lambda _: threading.get_ident())
    assert list(where) == [threading.get_ident()] * 2


# -- random numbers ---------------------------------------------------------------------------------------------------


class Drawing:
    """Draws from all global generators."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, id: int) -> torch.Tensor:
        return torch.rand(3) + random.random() + np.random.random()


def cached(dataset: Any, transform: Any = None) -> sf.CachedDataset:
    return sf.CachedDataset(dataset, capacity="1MiB", form="prepared", transform=transform)


@sf.mark_random
def noisy(sample: torch.Tensor) -> torch.Tensor:
    return sample + torch.rand(3) + random.random() + np.random.random()


DRAWN: dict[str, Callable[[], Any]] = {
    "an iterable": lambda: (sample for sample in map(Drawing().__getitem__, range(2 * COUNT))),
    "torch's loader": lambda: torch.utils.data.DataLoader(Drawing(), batch_size=2),  # type: ignore[arg-type]
    "torch's loader, shuffled": lambda: torch.utils.data.DataLoader(Drawing(), shuffle=True),  # type: ignore[arg-type]
    "stallfree's": lambda: sf.DataLoader(cached(Noted(), noisy), seed=1),
    "stallfree's collate": lambda: sf.DataLoader(
        cached(Noted()),
        batch_size=2,
        seed=1,
        collate_fn=lambda batch: torch.stack(batch) + torch.rand(1) + np.random.random(),
    ),
}


def train(batches: Any, world: World | None = None) -> list[float]:
    """Return the results of a model that also draws."""
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    found = []
    for _ in range(2):
        for batch in batches:
            if world is not None:
                world.use(batch)
                world.synchronize()
            found += batch.flatten().tolist()
            threading.Event().wait(0.002)  # for a thread that draws now to be seen
            found += [float(torch.rand(1)), float(np.random.random()), random.random()]
    return found


@pytest.mark.parametrize("way", DRAWN)
def test_all_random_numbers_are_those_without_a_prefetcher(way: str, world: World | None) -> None:
    expected = train(DRAWN[way]())
    with around(DRAWN[way]()) as prefetcher:
        assert train(prefetcher, world) == expected


def test_a_loop_that_takes_its_item_while_the_thread_looks_does_not_wait(
    world: World | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Items.all_taken.fget  # type: ignore[attr-defined]
    assert look is not None

    def slowly(items: Items) -> bool:
        threading.Event().wait(0.002)
        return bool(look(items))

    monkeypatch.setattr(Items, "all_taken", property(slowly))
    expected = train(DRAWN["stallfree's"]())
    with around(DRAWN["stallfree's"]()) as prefetcher:
        assert train(prefetcher, world) == expected


def test_what_draws_does_not_run_during_a_step(world: World | None) -> None:
    """Also when it is stopped while waiting; the state can be read meanwhile."""
    stepping = [False]
    during: list[bool] = []

    class Watching(Drawing):
        def __getitem__(self, id: int) -> torch.Tensor:
            during.append(stepping[0])
            return super().__getitem__(id)

    with sf.DataLoader(Watching(), device="cpu") as loader:
        iterator = iter(loader)
        for given in range(1, 4):
            next(iterator)
            stepping[0] = True
            assert loader.state_dict()["batches"] == given
            threading.Event().wait(0.002)  # for a thread that does not wait to be seen
            stepping[0] = False
        stepping[0] = True
        del iterator
        gc.collect()
        for thread in prefetching():
            thread.join()
    assert during
    assert not any(during)


# -- errors and ends --------------------------------------------------------------------------------------------------


def test_ctrl_c_at_any_point_of_the_wait(world: World | None) -> None:
    """The loop may continue, and ends."""
    main, interrupts = threading.get_ident(), [0]

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is LoaderThread.take.__code__:
                interrupts[0] += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    def interrupted() -> Iterator[int]:
        for number in range(COUNT):
            signal.pthread_kill(main, signal.SIGINT)
            yield number

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for _ in range(20):
            iterator = iter(DevicePrefetcher(interrupted(), "cpu"))
            found: list[int] = []
            while len(found) < COUNT:
                try:
                    found.append(next(iterator))
                except KeyboardInterrupt:
                    continue
                except StopIteration:
                    break
            assert found == sorted(set(found))
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupts[0]
