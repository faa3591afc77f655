"""`GlobalDraws`: draws from the global generators are noticed, each of them, and nothing is moved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stallfree.pipeline import global_draws
from stallfree.pipeline.global_draws import GlobalDraws

DRAWS: list[Callable[[], Any]] = [
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.gauss(0, 1),  # the one in reserve
    lambda: random.getrandbits(8),
    lambda: random.shuffle([1, 2, 3]),
    lambda: [random.getrandbits(32) for _ in range(624)],  # a whole pass over the state
    lambda: random.seed(3),
    np.random.rand,
    np.random.randn,
    np.random.randn,  # the one in reserve
    lambda: np.random.randint(3),
    lambda: np.random.bytes(4 * 624),
    lambda: np.random.seed(3),
    lambda: torch.rand(1),
    lambda: torch.randn(1),
    lambda: torch.randn(1, dtype=torch.float64),
    lambda: torch.randn(1, dtype=torch.float64),  # the one in reserve
    lambda: torch.randperm(4),
    lambda: torch.randint(2, (624,)),
    lambda: torch.manual_seed(3),
]


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture(params=["positions", "states"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GlobalDraws:
    if request.param == "states":  # as where the memory is not as expected
        monkeypatch.setattr(global_draws, "_python_offset", lambda: None)
        monkeypatch.setattr(global_draws, "_torch_offset", lambda: None)
        monkeypatch.setattr(global_draws, "_numpy_position", lambda bits: lambda: repr(bits.get_state(legacy=False)))
    return GlobalDraws()


def test_positions_are_found_here() -> None:
    assert global_draws._python_offset() is not None
    assert global_draws._torch_offset() is not None


@pytest.mark.parametrize("number", sorted(set(range(len(DRAWS))) - {6}))  # `random.seed` alone draws nothing
def test_a_draw_after_all_were_seeded_is_seen(looks: GlobalDraws, number: int) -> None:
    looks.mark()
    np.random.randn()  # the next one is in reserve, until it is seeded
    for _ in range(2):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        looks.mark(seeded=True)
        assert not looks.moved()
        DRAWS[number]()
        assert looks.moved()


def test_each_draw_is_seen_once(looks: GlobalDraws) -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    looks.mark()
    for number, draw in enumerate(DRAWS * 3):
        assert not looks.moved(), number
        draw()
        assert looks.moved(), number


def test_looks_move_nothing(looks: GlobalDraws) -> None:
    def drawn() -> list[float]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        found = []
        for _ in range(20):
            found += [random.random(), random.gauss(0, 1), np.random.randn(), torch.randn(1).item()]
            if looking:
                looks.mark()
                looks.moved()
        return found

    looking = False
    before = drawn()
    looking = True
    assert drawn() == before


def test_another_legacy_generator(looks: GlobalDraws) -> None:
    np.random.seed(0)
    looks.mark()
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        looks.mark()
        assert not looks.moved()
        np.random.rand()
        assert looks.moved()
    finally:
        np.random.set_bit_generator(before)
