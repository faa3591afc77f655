"""No cache freezes an augmentation, wherever its random numbers come from."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import frozen as fr
import generator_places
from cases import half

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


@pytest.mark.parametrize(("way", "place", "hidden", "workers"), [
    *(("step", place, False, 0) for place in PLACES[::2]),
    *(("data set", place, True, 0) for place in sorted({*PLACES[1::2], *SOME})),
    *((way, SOME[0], True, 0) for way in ("auto", "auto, cut")), *(("step", place, True, 2) for place in SOME[:2]),
])  # fmt: skip
def test_a_flip_by_a_seeded_generator(way: str, place: str, hidden: bool, workers: int) -> None:
    assert len(PLACES) >= 25
    assert not most(still(way, place, 1, hidden=hidden, workers=workers))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "hidden", "workers"), [
    ("step", False, 0), ("data set", False, 0), ("step", True, 2), ("auto", True, 2), *((w, True, 0) for w in fr.WAYS),
])  # fmt: skip
@pytest.mark.parametrize("place", PLACES)
def test_by_many_seeds(place: str, way: str, hidden: bool, workers: int) -> None:
    assert [seed for seed in SEEDS if most(still(way, place, seed, hidden=hidden, workers=workers))] == []


def changes(way: str, place: str, seed: int, *, hidden: bool = True) -> int:
    """Of 2,000 samples that are flipped with p = 0.02, those that differ between late epochs; 150 are expected."""
    step = generator_places.fresh(seed, p=0.02, hidden=hidden)[place]
    return 2000 - len(fr.frozen_in(way, fr.rows(2000), step, range(2000)))


@pytest.mark.parametrize("way", ["step", "data set"])
def test_a_rare_flip(way: str) -> None:
    assert changes(way, "class_attribute", 1) > 50


@pytest.mark.slow
@pytest.mark.parametrize("way", ["step", "data set"])
@pytest.mark.parametrize("place", PLACES)
def test_a_rare_flip_by_many_seeds(place: str, way: str) -> None:
    """Names show it for every seed, however rare it is, and outcomes for nine of ten."""
    found = [changes(way, place, seed) > 50 for seed in SEEDS]
    assert sum(found) >= 0.9 * len(found)
    assert all(changes("step", place, seed, hidden=False) > 50 for seed in range(2, 5))


DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),  # every second one is in reserve
    "python, bits": lambda: random.getrandbits(20), "python, shuffle": lambda: random.sample(range(2**20), 1)[0],
    "python, whole state": lambda: sum(random.getrandbits(32) for _ in range(624)) % 2**20, "numpy": np.random.rand,
    "numpy, normal": np.random.randn,  # every second one is in reserve
    "numpy, integers": lambda: np.random.randint(2**20),
    "numpy, bytes": lambda: int.from_bytes(np.random.bytes(4 * 624)[:2], "little"),
    "torch": lambda: torch.rand(()).item(), "torch, normal": lambda: torch.randn(()).item(),
    "torch, normal, float64": lambda: torch.randn((), dtype=torch.float64).item(),
    "torch, permutation": lambda: torch.randperm(2**10)[0].item(),
    "torch, integers": lambda: torch.randint(2**20, (624,))[0].item(),
}  # fmt: skip


@pytest.mark.parametrize(("way", "kind"), half(["step", "data set"], DRAWS))
def test_each_kind_of_draw_from_a_global_generator(kind: str, way: str) -> None:
    """For 1 sample in 16, by a function that no name in the step shows."""

    def augment(x: Any) -> Any:
        return x + DRAWS[kind]() if int(x[0]) % 16 == 11 else x

    assert fr.frozen_in(way, fr.rows(128), augment, range(10, 128, 16)) == []
