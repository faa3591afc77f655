"""Randomness of a sample is a function of (seed, epoch, id), and the generators are given back as they were."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loader_data import same
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.randomness import Drew, Randomness, States, sample_seed

numbers = st.integers(0, 2**63 - 1)
few = settings(max_examples=15)
IMAGE = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)


def draw_globals(value: Any) -> Any:
    return random.random(), np.random.rand(), torch.rand(()).item()


class Owner:
    """A step with one generator of each kind, made without a seed."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()
        self.philox = np.random.Generator(np.random.Philox())
        self.legacy = np.random.RandomState()
        self.legacy_pcg = np.random.RandomState(np.random.PCG64())
        self.python = random.Random()
        self.torch = torch.Generator()

    def __call__(self, value: Any) -> Any:
        return (
            self.generator.random(),
            self.philox.random(),
            self.legacy.rand(),
            self.legacy_pcg.rand(),
            self.python.random(),
            torch.rand((), generator=self.torch).item(),
        )

    def states(self) -> Any:
        return (
            self.generator.bit_generator.state,
            self.philox.bit_generator.state,
            self.legacy.get_state(legacy=False),
            self.legacy_pcg.get_state(legacy=False),
            self.python.getstate(),
            self.torch.get_state(),
        )


def drawn(transform: Any, key: tuple[int, int, int], value: Any = 0) -> Any:
    with Randomness(transform) as randomness:
        randomness.seed(*key)
        return transform(value)


def global_states() -> Any:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


@given(numbers, numbers, st.sets(numbers, min_size=2, max_size=50))
def test_seeds_are_64_bit_numbers_that_no_two_ids_share(seed: int, epoch: int, ids: set[int]) -> None:
    made = {sample_seed(seed, epoch, id) for id in ids}
    assert len(made) == len(ids)
    assert all(0 <= number < 2**64 for number in made)
    assert made == {sample_seed(np.int64(seed), np.int64(epoch), np.int64(id)) for id in ids}  # type: ignore[arg-type]


def test_seeds_are_well_mixed() -> None:
    """Neighbours in seed, epoch and id differ in about half of the bits, and swapping the three matters."""
    keys = [(seed, epoch, id) for seed in range(12) for epoch in range(12) for id in range(12)]
    assert len({sample_seed(*key) for key in keys}) == len(keys)
    for change in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        flips = [
            (sample_seed(*key) ^ sample_seed(*(a + b for a, b in zip(key, change, strict=True)))).bit_count()
            for key in keys
        ]
        assert 31 < np.mean(flips) < 33


@given(st.tuples(numbers, numbers, numbers), st.tuples(numbers, numbers, numbers))
@few
def test_the_same_key_gives_the_same_sample_and_another_one_another(
    one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    for step in (draw_globals, Owner()):
        again = step if step is draw_globals else Owner()
        assert drawn(step, one) == drawn(again, one)
        assert one == other or drawn(step, one) != drawn(step, other)


@given(numbers, st.lists(numbers, min_size=1, max_size=5))
@few
def test_all_generators_are_given_back(seed: int, ids: list[int]) -> None:
    owner = Owner()
    before = (global_states(), owner.states())
    with Randomness(Compose([draw_globals, owner])) as randomness:
        for id in ids:
            randomness.seed(seed, 0, id)
            draw_globals(0), owner(0)
    assert same(before, (global_states(), owner.states()))


def test_blocks_nest() -> None:
    randomness = Randomness(draw_globals)
    before = global_states()
    with randomness:
        randomness.seed(0, 0, 1)
        inside = global_states()
        with randomness:
            randomness.seed(0, 0, 2)
        assert same(inside, global_states())
    assert same(before, global_states())


def test_generators_of_one_sample_draw_different_numbers() -> None:
    one, other = Owner(), Owner()
    values = drawn(lambda value: (*draw_globals(value), *one(value), *other(value)), (1, 2, 3))
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("transform", [None, Compose([]), Compose([Compose([])])])
def test_without_steps_nothing_is_touched(transform: Any) -> None:
    before = global_states()
    with Randomness(transform) as randomness:
        randomness.seed(1, 2, 3)
        assert same(before, global_states())
        random.random()
    assert not same(before, global_states())


@pytest.mark.libraries
@pytest.mark.parametrize("wrap", ["step", "closure", "list"])
def test_albumentations(wrap: str) -> None:
    A = pytest.importorskip("albumentations")

    def make() -> Any:
        flips = A.Compose([A.RandomCrop(9, 9, p=1), A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=1)])
        return {
            "step": flips,
            "closure": lambda value: flips(image=value)["image"],
            "list": A.Sequential([flips], p=1),
        }[wrap]

    def sample(id: int) -> Any:
        return drawn(Compose([make()]), (0, 0, id), IMAGE)

    assert all((sample(id) == sample(id)).all() for id in range(10))
    assert len({sample(id).tobytes() for id in range(10)}) == 10


@pytest.mark.libraries
def test_monai() -> None:
    M = pytest.importorskip("monai.transforms")

    def sample(id: int) -> Any:
        choice = M.OneOf([M.RandFlipd("image"), M.RandZoomd("image")])
        transform = M.Compose([M.RandGaussianNoised("image", prob=1), choice])
        with Randomness(transform) as randomness:
            randomness.seed(0, 0, id)
            return np.asarray(Compose([transform])({"image": IMAGE.transpose(2, 0, 1).astype(np.float32)})["image"])

    assert all((sample(id) == sample(id)).all() for id in range(5))
    assert len({sample(id).tobytes() for id in range(5)}) == 5


def test_a_pickle_finds_the_generators_of_its_own_transform() -> None:
    pipeline = Compose([Owner()])
    sent, randomness = pickle.loads(pickle.dumps((pipeline, Randomness(pipeline))))
    with randomness:
        randomness.seed(1, 2, 3)
        assert sent(0) == drawn(pipeline, (1, 2, 3))


DRAWS: dict[str, Any] = {
    "nothing": lambda: 0.0,
    "python": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(()).item(),
    "normal": lambda: (random.gauss(0, 1), np.random.randn(), torch.randn(()).item()),
}


def prepared(randomness: Randomness, batches: list[list[tuple[int, str]]]) -> list[list[Any]]:
    """The samples of each batch; each is an id and what it draws."""
    found = []
    for batch in batches:
        while True:
            values = []
            try:
                with randomness:
                    for id, kind in batch:
                        randomness.seed(1, 2, id)
                        values.append(DRAWS[kind]())
            except Drew:
                continue
            break
        found.append(values)
    return found


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([*DRAWS])), min_size=1), max_size=4))
def test_samples_that_are_seeded_only_if_one_draws_are_those_of_samples_that_always_are(
    batches: list[list[tuple[int, str]]],
) -> None:
    assert prepared(Randomness(draw_globals, lazy=True), batches) == prepared(Randomness(draw_globals), batches)


GLOBAL_DRAWS: list[Any] = [
    *(random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1), lambda: random.shuffle([1, 2, 3])),
    *(np.random.rand, np.random.randn, np.random.randn, lambda: np.random.seed(3), lambda: torch.rand(1)),
    *(lambda: torch.randn(1, dtype=torch.float64), lambda: torch.randn(1, dtype=torch.float64)),
    *(lambda: torch.randperm(4), lambda: torch.manual_seed(3)),
]


def test_each_draw_is_seen_once_and_looks_move_nothing() -> None:
    with Randomness(draw_globals):  # restores them
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        states = States()
        for number, draw in enumerate(GLOBAL_DRAWS * 3):
            before = global_states()
            assert not states.moved(), number
            assert same(before, global_states())
            draw()
            assert states.moved(), number
