"""Randomness of a sample is a function of (seed, epoch, id), and the generators are given back as they were."""

import contextlib
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standins import global_states

from loader_data import same
from stallfree.pipeline.compose import Compose
from stallfree.pipeline.randomness import Drew, Randomness, States, WorkerStates, sample_seed

numbers = st.integers(0, 2**63 - 1)
few = settings(max_examples=15)
IMAGE = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)


def draw_globals(value: Any) -> Any:
    return random.random(), np.random.rand(), torch.rand(()).item()


class Owner:
    """A step with one generator of each kind, made without a seed."""

    def __init__(self) -> None:
        self.numpy = [np.random.default_rng(), np.random.Generator(np.random.Philox())]
        self.legacy = [np.random.RandomState(), np.random.RandomState(np.random.PCG64())]
        self.python, self.torch = random.Random(), torch.Generator()

    def __call__(self, value: Any) -> Any:
        drawn = [generator.random() for generator in (*self.numpy, *self.legacy, self.python)]
        return (*drawn, torch.rand((), generator=self.torch).item())

    def states(self) -> Any:
        states = [generator.bit_generator.state for generator in self.numpy]
        legacy = [generator.get_state(legacy=False) for generator in self.legacy]
        return states, legacy, self.python.getstate(), self.torch.get_state()


def drawn(transform: Any, key: tuple[int, int, int], value: Any = 0) -> Any:
    with Randomness(transform) as randomness:
        randomness.seed(*key)
        return transform(value)


@given(numbers, numbers, st.sets(numbers, min_size=2, max_size=50))
@few
def test_seeds_are_64_bit_numbers_that_no_two_ids_share(seed: int, epoch: int, ids: set[int]) -> None:
    made = {sample_seed(seed, epoch, id) for id in ids}
    assert len(made) == len(ids)
    assert all(0 <= number < 2**64 for number in made)
    assert made == {sample_seed(np.int64(seed), np.int64(epoch), np.int64(id)) for id in ids}  # type: ignore[arg-type]


def test_seeds_are_well_mixed() -> None:
    """Neighbours in seed, epoch and id differ in about half of the bits, and swapping the three matters."""
    keys = [(seed, epoch, id) for seed in range(9) for epoch in range(9) for id in range(9)]
    assert len({sample_seed(*key) for key in keys}) == len(keys)
    for one, two, three in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        flips = [sample_seed(*key) ^ sample_seed(key[0] + one, key[1] + two, key[2] + three) for key in keys]
        assert 31 < np.mean([flip.bit_count() for flip in flips]) < 33


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
            inside = global_states()
            with randomness:  # blocks nest
                randomness.seed(seed, 1, id)
            assert same(inside, global_states())
    assert same(before, (global_states(), owner.states()))


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
def test_steps_of_libraries() -> None:
    A, M = pytest.importorskip("albumentations"), pytest.importorskip("monai.transforms")

    def flips() -> Any:
        return A.Compose([A.RandomCrop(9, 9, p=1), A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=1)])

    def in_a_closure() -> Any:
        inner = flips()
        return lambda value: inner(image=value)["image"]

    def volumes() -> Any:
        choice = M.OneOf([M.RandFlip(), M.RandZoom()])
        return M.Compose([lambda image: image.astype(np.float32), M.RandGaussianNoise(prob=1), choice])

    for make in (flips, in_a_closure, lambda: A.Sequential([flips()], p=1), volumes):
        samples = [np.asarray(drawn(Compose([make()]), (0, 0, id % 5), IMAGE)).tobytes() for id in range(10)]
        assert samples[:5] == samples[5:]
        assert len(set(samples)) == 5


def test_a_pickle_finds_the_generators_of_its_own_transform() -> None:
    pipeline = Compose([Owner()])
    sent, randomness = pickle.loads(pickle.dumps((pipeline, Randomness(pipeline))))
    with randomness:
        randomness.seed(1, 2, 3)
        assert sent(0) == drawn(pipeline, (1, 2, 3))


DRAWS: dict[str, Any] = {
    "nothing": lambda: 0.0, "python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(()).item(),
    "normal": lambda: (random.gauss(0, 1), np.random.randn(), torch.randn(()).item()),
}  # fmt: skip


def prepared(randomness: Randomness, batches: list[list[tuple[int, str]]]) -> list[list[Any]]:
    """The samples of each batch; each is an id and what it draws."""
    found: list[list[Any]] = []
    while len(found) < len(batches):
        with contextlib.suppress(Drew):
            values = []
            with randomness:
                for id, kind in batches[len(found)]:
                    randomness.seed(1, 2, id)
                    values.append(DRAWS[kind]())
            found.append(values)
    return found


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([*DRAWS])), min_size=1, max_size=6), max_size=4))
@settings(max_examples=40)
def test_samples_that_are_seeded_only_if_one_draws_are_those_of_samples_that_always_are(
    batches: list[list[tuple[int, str]]],
) -> None:
    assert prepared(Randomness(draw_globals, lazy=True), batches) == prepared(Randomness(draw_globals), batches)


@pytest.mark.parametrize("kind", [States, WorkerStates])
def test_each_draw_is_seen_once_and_looks_move_nothing(kind: type[Any]) -> None:
    twice = [lambda: random.gauss(0, 1), np.random.randn, lambda: torch.randn(1, dtype=torch.float64)]
    once = [random.random, lambda: random.shuffle([1, 2, 3]), np.random.rand, lambda: np.random.seed(3)]
    once += [lambda: torch.rand(1), lambda: torch.randperm(4), lambda: torch.manual_seed(3)]
    with Randomness(draw_globals):  # restores them
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        random.gauss(0, 1), np.random.randn()  # each keeps a number for the next call
        states = kind()
        for number, draw in enumerate([*(draw for draw in twice for _ in "ab"), *once] * 3):
            before = global_states()
            assert not states.moved(), number
            assert same(before, global_states()) or kind is WorkerStates
            draw()
            assert states.moved(), number
