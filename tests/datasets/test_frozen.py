"""No cache freezes an augmentation, wherever its random numbers come from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import frozen as fr
import generator_places

PLACES = sorted(generator_places.fresh(1))
SEEDS = range(2, 22)
SOME = ("class_attribute", "context_variable", "lazy_global", "python_generator", "two_dots_away")
COUNT = 32


def still(way: str, place: str, seed: int, *, hidden: bool, workers: int = 0) -> list[int]:
    """The samples that do not change after epoch 3 if each is flipped with p = 0.5."""
    step = generator_places.fresh(seed, hidden=hidden)[place]
    return fr.frozen_in(way, fr.rows(COUNT), step, range(COUNT), workers)


def most(ids: list[int]) -> bool:
    """Whether more samples of the four late epochs are the same than chance allows: 4 of 32 are expected."""
    return len(ids) > COUNT // 2


class TestPlaces:
    """A flip with p = 0.5 by a seeded generator."""

    def test_there_are_enough(self) -> None:
        assert len(PLACES) >= 25

    @pytest.mark.parametrize("place", PLACES)
    def test_as_a_step(self, place: str) -> None:
        assert not most(still("step", place, 1, hidden=False))

    @pytest.mark.parametrize("place", PLACES)
    def test_in_a_data_set(self, place: str) -> None:
        assert not most(still("data set", place, 1, hidden=True))

    @pytest.mark.parametrize("way", ["auto", "auto, cut"])
    @pytest.mark.parametrize("place", SOME)
    def test_under_auto(self, place: str, way: str) -> None:
        assert not most(still(way, place, 1, hidden=True))

    @pytest.mark.parametrize("place", SOME)
    def test_in_workers(self, place: str) -> None:
        assert not most(still("step", place, 1, hidden=True, workers=2))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("way", "hidden"), [("step", False), ("data set", False), *((way, True) for way in fr.WAYS)]
    )
    @pytest.mark.parametrize("place", PLACES)
    def test_by_many_seeds(self, place: str, way: str, hidden: bool) -> None:
        assert [seed for seed in SEEDS if most(still(way, place, seed, hidden=hidden))] == []

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["step", "auto"])
    @pytest.mark.parametrize("place", PLACES)
    def test_by_many_seeds_in_workers(self, place: str, way: str) -> None:
        assert [seed for seed in SEEDS if most(still(way, place, seed, hidden=True, workers=2))] == []


class TestRareFlips:
    """A flip with p = 0.02 in a data set of 2,000 samples."""

    COUNT = 2000

    def changes(self, way: str, place: str, seed: int, *, hidden: bool = True) -> int:
        """Samples that differ between late epochs; 150 of 2,000 are expected."""
        step = generator_places.fresh(seed, p=0.02, hidden=hidden)[place]
        return self.COUNT - len(fr.frozen_in(way, fr.rows(self.COUNT), step, range(self.COUNT)))

    @pytest.mark.parametrize("way", ["step", "data set"])
    def test_of_one_place(self, way: str) -> None:
        assert self.changes(way, "class_attribute", 1) > 50

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["step", "data set"])
    @pytest.mark.parametrize("place", PLACES)
    def test_nine_of_ten_seeds(self, place: str, way: str) -> None:
        found = [self.changes(way, place, seed) > 50 for seed in SEEDS]
        assert sum(found) >= 0.9 * len(found)

    @pytest.mark.slow
    @pytest.mark.parametrize("place", PLACES)
    def test_names_show_it_for_every_seed(self, place: str) -> None:
        """However rare the flip."""
        assert all(self.changes("step", place, seed, hidden=False) > 50 for seed in range(2, 5))


DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),  # every second one is in reserve
    "python, bits": lambda: random.getrandbits(20),
    "python, shuffle": lambda: random.sample(range(2**20), 1)[0],
    "python, whole state": lambda: sum(random.getrandbits(32) for _ in range(624)) % 2**20,
    "numpy": np.random.rand,
    "numpy, normal": np.random.randn,  # every second one is in reserve
    "numpy, integers": lambda: np.random.randint(2**20),
    "numpy, bytes": lambda: int.from_bytes(np.random.bytes(4 * 624)[:2], "little"),
    "torch": lambda: torch.rand(()).item(),
    "torch, normal": lambda: torch.randn(()).item(),
    "torch, normal, float64": lambda: torch.randn((), dtype=torch.float64).item(),
    "torch, permutation": lambda: torch.randperm(2**10)[0].item(),
    "torch, integers": lambda: torch.randint(2**20, (624,))[0].item(),
}


class TestGlobalGenerators:
    """A draw for 1 sample in 16, by a function that no name in the step shows."""

    @staticmethod
    def step(kind: str) -> Callable[[Any], Any]:
        def augment(x: Any) -> Any:
            return x + DRAWS[kind]() if int(x[0]) % 16 == 11 else x

        return augment

    @pytest.mark.parametrize("kind", DRAWS)
    @pytest.mark.parametrize("way", ["step", "data set"])
    def test_each_kind_of_draw(self, kind: str, way: str) -> None:
        assert fr.frozen_in(way, fr.rows(128), self.step(kind), range(10, 128, 16)) == []
