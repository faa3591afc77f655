"""A thread takes batches ahead, on a CPU one, and draws no random numbers concurrently with the model."""

import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from fakes import World, join_prefetchers

import stallfree as sf
from children import PATIENCE, until
from loader_data import Made
from stallfree.device import ahead
from stallfree.device.ahead import Items

COUNT = 6


class Noted:
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


WAYS: dict[str, Callable[[Any], Any]] = {
    "an iterable": lambda noted: noted, "a generator": iter, "torch's loader": torch.utils.data.DataLoader,
    "one whose sampler draws a seed": lambda noted: torch.utils.data.DataLoader(noted, shuffle=True),
}  # fmt: skip


def test_storage_that_never_answers_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_END_SECONDS", 0.1)
    asked, answer = threading.Event(), threading.Event()
    prefetcher = sf.DevicePrefetcher((asked.set() or answer.wait(PATIENCE) for _ in range(2)), "cpu")  # type: ignore
    with ThreadPoolExecutor(1) as loop:
        done = loop.submit(lambda: [*prefetcher])
        assert asked.wait(PATIENCE)
        prefetcher.close()
        assert done.running()
        answer.set()


@pytest.mark.parametrize("way", WAYS)
def test_one_batch_and_no_more_is_asked_for_before_the_step_has_ended(way: str) -> None:
    noted = Noted()
    torch.manual_seed(0)
    order = [int(batch) for batch in WAYS[way](noted)]
    for event in noted.asked:
        event.clear()
    torch.manual_seed(0)
    prefetcher = sf.DevicePrefetcher(WAYS[way](noted), "cpu", depth=4)
    for number, batch in enumerate(prefetcher):
        assert int(batch) == order[number]
        if (number or "seed" not in way) and number + 1 < COUNT:
            assert noted.asked[order[number + 1]].wait(PATIENCE)  # this is the step
        assert not any(noted.asked[id].is_set() for id in order[number + 2 :])
    assert number == COUNT - 1
    prefetcher.close()


@pytest.mark.parametrize("own", [True, False])
def test_batches_out_of_a_cache_are_taken_ahead(own: bool) -> None:
    """Without workers: generators are watched while the cache is filled, so the thread waits for the step to end."""
    with sf.DataLoader(cached(), device="cpu" if own else None) as loader:
        prefetcher = sf.DevicePrefetcher(loader, "cpu")
        batches = loader if own else prefetcher
        torch.manual_seed(1)
        for _ in batches:
            torch.rand(1)  # would be taken for a draw of the data set
        for number, batch in enumerate(batches):
            assert int(batch) == number
            until(lambda: loader.stats().batches == min(COUNT + number + 2, 2 * COUNT))  # noqa: B023
        prefetcher.close()


def drawn(id: int = 0) -> torch.Tensor:
    return torch.rand(3) + random.random() + np.random.random()


@sf.mark_random
def noisy(sample: torch.Tensor) -> torch.Tensor:
    return sample + drawn()


def cached(transform: Any = None) -> sf.CachedDataset:
    return sf.CachedDataset(Noted(), capacity="1MiB", form="prepared", transform=transform)


DRAWING: Any = Made(COUNT, drawn)
DRAWN: dict[str, Callable[[], Any]] = {
    "an iterable": lambda: map(drawn, range(2 * COUNT)),
    "torch's loader": lambda: torch.utils.data.DataLoader(DRAWING, batch_size=2),
    "torch's loader, shuffled": lambda: torch.utils.data.DataLoader(DRAWING, shuffle=True),
    "stallfree's": lambda: sf.DataLoader(cached(noisy), seed=1),
    "stallfree's collate": lambda: sf.DataLoader(
        cached(), batch_size=2, seed=1, collate_fn=lambda batch: torch.stack(batch) + drawn()[0]
    ),
}


def train(batches: Any, world: World | None = None) -> list[float]:
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
    prefetcher = sf.DevicePrefetcher(DRAWN[way](), "cpu")
    assert train(prefetcher, world) == expected
    prefetcher.close()


def test_what_draws_does_not_run_during_a_step(world: World | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the loop takes an item while the thread looks, and when it stops. The state can be read meanwhile."""
    stepping = [False]
    during: list[bool] = []
    look: Any = Items.all_taken.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Items, "all_taken", property(lambda items: not threading.Event().wait(0.002) and look(items)))

    def watched(id: int) -> torch.Tensor:
        during.append(stepping[0])
        return drawn()

    with sf.DataLoader(Made(COUNT, watched), device="cpu") as loader:
        iterator = iter(loader)
        for given in range(1, 4):
            next(iterator)
            stepping[0] = True
            assert loader.state_dict()["batches"] == given
            threading.Event().wait(0.02)  # for a thread that does not wait to be seen
            stepping[0] = False
        stepping[0] = True
        del iterator
        gc.collect()
        join_prefetchers()
    assert during
    assert not any(during)
