"""Entries that draw: in some branches only, and from every kind of generator."""

from __future__ import annotations

import functools
import random as pyrandom
from random import random as draw_number
from random import uniform
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import normal as draw_normal
from torch import nn
from zoo_entry import COUNT, first_is_short, labelled, named, random_entry, rows, tensors

RNG = np.random.default_rng(5)
TORCH_RNG = torch.Generator().manual_seed(5)
PY_RNG = pyrandom.Random(5)

# -- branches: some samples are drawn for, others are not ------------------------------------------------------------


def made_crop_or_pad() -> Any:
    def crop_or_pad(x: Any) -> Any:
        if len(x) <= 64:
            return np.pad(x, (0, 64 - len(x)))
        start = np.random.randint(0, len(x) - 64 + 1)
        return x[start : start + 64]

    return crop_or_pad


@random_entry(first_is_short, draws=lambda id: id > 0, coarse=True)
def crop_or_pad() -> Any:
    return made_crop_or_pad()


@random_entry(first_is_short, draws=lambda id: id > 0)
def crop_with_generator_made_inside() -> Any:
    def crop(x: Any) -> Any:
        if len(x) == 64:
            return x
        return np.random.default_rng().choice(x, 64)

    return crop


@random_entry(draws=lambda id: id > 0)
def not_for_sample_0() -> Any:
    def augment(x: Any) -> Any:
        return x + np.random.normal(0, 1) if x[0] else x

    return augment


@random_entry(labelled, draws=lambda id: id % 10 == 7)
def minority_class() -> Any:
    def augment(sample: Any) -> Any:
        x, label = sample
        if label == 7:
            x = x + np.random.normal(0, 1, 64).astype(np.float32)
        return x, label

    return augment


@random_entry(labelled, draws=lambda id: id % 10 in (3, 9))
def by_table_of_labels() -> Any:
    strength = {3: 0.5, 9: 1.0}

    class Augment:
        def __call__(self, sample: Any) -> Any:
            x, label = sample
            noise = strength.get(label, 0)
            return (x + noise * torch.randn(64).numpy() if noise else x), label

    return Augment()


@random_entry(named, draws=lambda id: id % 5 == 3)
def by_id() -> Any:
    def augment(sample: Any) -> Any:
        if sample["id"] % 5 == 3:
            sample["x"] = sample["x"] * pyrandom.uniform(0.5, 1.5)
        return sample

    return augment


@random_entry(draws=lambda id: float(rows()[id][1:].mean()) > 0.1)
def by_content() -> Any:
    return lambda x: x + pyrandom.random() if float(x[1:].mean()) > 0.1 else x


@random_entry(draws=lambda id: id == COUNT - 1)
def only_the_last() -> Any:
    def augment(x: Any) -> Any:
        return x if x[0] < COUNT - 1 else x + draw_number()

    return augment


@random_entry(draws=lambda id: id >= COUNT // 2)
def only_the_second_half() -> Any:
    class Augment:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(1)

        def __call__(self, x: Any) -> Any:
            return x if x[0] < COUNT // 2 else x + self.rng.normal()

    return Augment()


@random_entry(named, draws=lambda id: id % 4 == 1)
def in_an_exception_handler() -> Any:
    known = {id: 1.0 for id in range(COUNT) if id % 4 != 1}

    def scale(sample: Any) -> Any:
        try:
            return sample["x"] * known[sample["id"]]
        except KeyError:
            return sample["x"] * np.random.random()

    return scale


@random_entry(labelled, draws=lambda id: id % 10 == 7)
def minority_class_with_hidden_generator() -> Any:
    def augment(sample: Any) -> Any:
        x, label = sample
        return (x + pyrandom.Random().random() if label == 7 else x), label

    return augment


@random_entry(draws=lambda id: id % 3 == 2)
def second_step_of_two_by_content() -> Any:
    def scale(x: Any) -> Any:
        return x * 2

    def augment(x: Any) -> Any:
        return x + torch.rand(1).item() if int(x[0]) // 2 % 3 == 2 else x

    return [scale, augment]


# -- kinds of generators --------------------------------------------------------------------------------------------


@random_entry()
def python_random() -> Any:
    return lambda x: x + pyrandom.random()


@random_entry()
def python_alias() -> Any:
    return lambda x: x * uniform(0.5, 2)


@random_entry()
def python_gauss_and_choices() -> Any:
    def augment(x: Any) -> Any:
        return x[pyrandom.choices(range(64), k=64)] + pyrandom.gauss(0, 1)

    return augment


@random_entry()
def python_shuffle() -> Any:
    def shuffle(x: Any) -> Any:
        values = x.tolist()
        pyrandom.shuffle(values)
        return np.array(values)

    return shuffle


@random_entry()
def python_sample() -> Any:
    return lambda x: x[sorted(pyrandom.sample(range(64), 32))]


@random_entry()
def module_level_random() -> Any:
    return lambda x: x + PY_RNG.random()


@random_entry()
def system_random_attribute() -> Any:
    class Augment:
        def __init__(self) -> None:
            self.draw = pyrandom.SystemRandom()

        def __call__(self, x: Any) -> Any:
            return x + self.draw.random()

    return Augment()


@random_entry()
def system_random_inside() -> Any:
    return lambda x: x + pyrandom.SystemRandom().random()


@random_entry()
def numpy_legacy() -> Any:
    return lambda x: x + np.random.normal(0, 1, 64)


@random_entry()
def numpy_alias() -> Any:
    return lambda x: x + draw_normal()


@random_entry()
def numpy_shuffle_in_place() -> Any:
    def shuffle(x: Any) -> Any:
        np.random.shuffle(x)
        return x

    return shuffle


@random_entry()
def numpy_random_state_inside() -> Any:
    def augment(x: Any) -> Any:
        return x + np.random.RandomState().uniform()

    return augment


@random_entry()
def numpy_random_state_attribute() -> Any:
    class Augment:
        def __init__(self) -> None:
            self.random = np.random.RandomState(3)

        def __call__(self, x: Any) -> Any:
            return x + self.random.uniform()

    return Augment()


@random_entry()
def generator_of_the_module() -> Any:
    return lambda x: x + RNG.normal()


@random_entry()
def generator_attribute() -> Any:
    class Augment:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(2)

        def __call__(self, x: Any) -> Any:
            return x + self.rng.normal(size=64)

    return Augment()


@random_entry()
def generator_closure() -> Any:
    rng = np.random.default_rng(2)
    return lambda x: x + rng.normal()


@random_entry()
def generator_default_argument() -> Any:
    def augment(x: Any, rng: Any = np.random.default_rng(2)) -> Any:  # noqa: B008
        return x + rng.normal()

    return augment


@random_entry()
def generator_keyword_default() -> Any:
    def augment(x: Any, *, rng: Any = np.random.default_rng()) -> Any:  # noqa: B008
        return x + rng.normal()

    return augment


@random_entry()
def generator_made_inside() -> Any:
    def augment(x: Any) -> Any:
        rng = np.random.default_rng()
        return x + rng.normal()

    return augment


@random_entry()
def generator_of_bits_made_inside() -> Any:
    return lambda x: x + np.random.Generator(np.random.PCG64()).normal()


@random_entry()
def generators_in_a_list() -> Any:
    rngs = [np.random.default_rng(seed) for seed in range(3)]
    return lambda x: x + rngs[int(x[0]) % 3].normal()


@random_entry()
def generator_in_an_object_of_an_object() -> Any:
    class Noise:
        def __init__(self) -> None:
            self.state = {"generators": (np.random.default_rng(4),)}

    class Augment:
        def __init__(self) -> None:
            self.noise = Noise()

        def __call__(self, x: Any) -> Any:
            return x + self.noise.state["generators"][0].normal()

    return Augment()


@random_entry()
def generator_made_lazily() -> Any:
    class Augment:
        def __init__(self) -> None:
            self.rng: Any = None

        def __call__(self, x: Any) -> Any:
            if self.rng is None:
                self.rng = np.random.default_rng()
            return x + self.rng.normal()

    return Augment()


@random_entry(local=True)
def generator_made_lazily_with_a_seed() -> Any:
    @functools.cache
    def generator() -> Any:
        return np.random.default_rng(8)

    return lambda x: x + generator().normal()


@random_entry()
def bound_method_of_a_generator() -> Any:
    return np.random.default_rng(2).normal


@random_entry()
def permutation_of_a_generator() -> Any:
    return np.random.default_rng(2).permutation


@random_entry()
def permutation_of_numpy() -> Any:
    return np.random.permutation


@random_entry()
def torch_rand() -> Any:
    return lambda x: x + torch.rand(64).numpy()


@random_entry(tensors)
def torch_randn_like() -> Any:
    return torch.randn_like


@random_entry()
def torch_randperm() -> Any:
    return lambda x: x[torch.randperm(len(x)).numpy()]


@random_entry(tensors)
def torch_own_generator() -> Any:
    generator = torch.Generator().manual_seed(7)
    return lambda x: x + torch.randn(64, generator=generator)


@random_entry(tensors)
def torch_generator_of_the_module() -> Any:
    return lambda x: x + torch.rand((), generator=TORCH_RNG)


@random_entry(tensors)
def torch_generator_seeded_by_entropy() -> Any:
    def augment(x: Any) -> Any:
        generator = torch.Generator()
        generator.seed()
        return x + torch.rand((), generator=generator)

    return augment


@random_entry(tensors)
def torch_functional_dropout() -> Any:
    return lambda x: F.dropout(x, 0.5, training=True)


@random_entry(tensors)
def torch_bernoulli() -> Any:
    return lambda x: x * torch.bernoulli(torch.full((64,), 0.5))


@random_entry(tensors)
def torch_random_in_place() -> Any:
    return lambda x: x.clone().random_()


@random_entry(tensors)
def torch_multinomial() -> Any:
    return lambda x: x[torch.multinomial(torch.ones(64), 32)]


@random_entry(tensors)
def torch_distribution() -> Any:
    distribution = torch.distributions.Normal(0.0, 1.0)
    return lambda x: x + distribution.sample()


@random_entry(tensors)
def dropout_module() -> Any:
    return nn.Dropout(0.5)


@random_entry(tensors)
def dropout_in_a_sequential() -> Any:
    return nn.Sequential(nn.Tanh(), nn.Dropout(0.5))


@random_entry(tensors)
def dropout_in_a_module() -> Any:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            return self.drop(x) * 2

    return Noisy()
