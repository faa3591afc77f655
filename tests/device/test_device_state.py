"""The state of a loader behind a prefetcher counts the batches yielded, not those loaded ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes import World

import stallfree as sf
from stallfree.device.prefetcher import DevicePrefetcher

COUNT = 8


class Stateful:
    """A loader whose state is its epoch and its position in it."""

    def __init__(self) -> None:
        self.epoch, self.at = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < COUNT:
            self.at += 1
            yield torch.tensor([100 * self.epoch + self.at - 1])
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Positioned(Stateful):
    """A loader that can return its state at an earlier position, and is not asked for its state before."""

    made = 0

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.at

    def state_at(self, position: tuple[int, int]) -> dict[str, int]:
        self.made += 1
        return {"epoch": position[0], "at": position[1]}


class Nested(DevicePrefetcher):
    """A prefetcher of a prefetcher."""

    def __init__(self, loader: Any, device: str, *arguments: Any) -> None:
        super().__init__(DevicePrefetcher(loader, device, 1), device, *arguments)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with made.installed():
        yield made
    made.check()


def take(world: World, iterator: Iterator[torch.Tensor], count: int = COUNT) -> list[int]:
    found = []
    for _ in range(count):
        batch = next(iterator, None)
        if batch is None:
            break
        world.synchronize()
        found.append(int(batch[0]))
    return found


@pytest.mark.parametrize(
    ("loader", "kind", "close"),
    [
        (Stateful, DevicePrefetcher, True),
        (Stateful, Nested, False),
        (Positioned, Nested, True),
        (Positioned, DevicePrefetcher, False),
    ],
)
def test_a_state_of_any_moment_leaves_exactly_what_was_not_given(
    world: World, loader: type[Stateful], kind: type[DevicePrefetcher], close: bool
) -> None:
    for given in range(COUNT + 1):
        prefetcher = kind(loader(), "cuda", 2)
        iterator = iter(prefetcher)
        assert take(world, iterator, given) == list(range(given))
        if close:
            prefetcher.close()
        state = prefetcher.state_dict()
        prefetcher.close()
        other = kind(loader(), "cuda", 3)
        other.load_state_dict(state)
        assert take(world, iter(other)) == list(range(given, COUNT))
        other.close()


def test_a_state_behind_an_epoch_begins_the_next_one(world: World) -> None:
    prefetcher = DevicePrefetcher(Stateful(), "cuda")
    assert take(world, iter(prefetcher), COUNT + 1) == list(range(COUNT))
    assert prefetcher.state_dict() == {"epoch": 1, "at": 0}
    iterator = iter(prefetcher)
    assert take(world, iterator, 2) == [100, 101]
    assert prefetcher.state_dict() == {"epoch": 1, "at": 2}
    prefetcher.load_state_dict({"epoch": 0, "at": 6})
    assert prefetcher.state_dict() == {"epoch": 0, "at": 6}
    assert take(world, iter(prefetcher)) == [6, 7]
    prefetcher.close()


def test_a_loader_that_knows_its_past_makes_a_state_only_when_it_is_asked_for(world: World) -> None:
    loader = Positioned()
    prefetcher = DevicePrefetcher(loader, "cuda")
    iterator = iter(prefetcher)
    take(world, iterator, 5)
    assert loader.made == 0
    assert prefetcher.state_dict() == {"epoch": 0, "at": 5}
    assert loader.made == 1
    prefetcher.close()


def test_on_a_cpu_the_state_is_the_loaders(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stallfree.device.prefetcher.find_device", lambda device: (torch.device(device), None))
    prefetcher = DevicePrefetcher(Stateful(), "cpu")
    iterator = iter(prefetcher)
    next(iterator), next(iterator)
    assert prefetcher.state_dict() == {"epoch": 0, "at": 2}
    prefetcher.load_state_dict({"epoch": 4, "at": 7})
    assert [int(batch[0]) for batch in prefetcher] == [407]


def test_a_loader_without_a_state_is_one_clear_error() -> None:
    prefetcher = DevicePrefetcher([], "cpu")
    with pytest.raises(sf.errors.InputError, match=r"a list, has no state_dict\(\)"):
        prefetcher.state_dict()
    with pytest.raises(sf.errors.InputError, match=r"a list, has no load_state_dict\(\)"):
        prefetcher.load_state_dict({})
