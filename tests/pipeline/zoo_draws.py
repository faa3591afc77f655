"""Entries that draw: in some branches only, and from every kind of generator."""

from __future__ import annotations

import random as pyrandom
from random import random as draw_number
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from zoo_entry import COUNT, first_is_short, labelled, named, random_entry, tensors

# -- branches: some samples are drawn for, others are not ------------------------------------------------------------


@random_entry(first_is_short, draws=lambda id: id > 0, coarse=True)
def crop_or_pad() -> Any:
    def crop_or_pad(x: Any) -> Any:
        if len(x) <= 64:
            return np.pad(x, (0, 64 - len(x)))
        start = np.random.randint(0, len(x) - 64 + 1)
        return x[start : start + 64]

    return crop_or_pad


@random_entry(labelled, draws=lambda id: id % 10 == 7)
def minority_class() -> Any:
    def augment(sample: Any) -> Any:
        x, label = sample
        if label == 7:
            x = x + np.random.normal(0, 1, 64).astype(np.float32)
        return x, label

    return augment


@random_entry(draws=lambda id: id == COUNT - 1)
def only_the_last() -> Any:
    def augment(x: Any) -> Any:
        return x if x[0] < COUNT - 1 else x + draw_number()

    return augment


@random_entry(named, draws=lambda id: id % 4 == 1)
def in_an_exception_handler() -> Any:
    known = {id: 1.0 for id in range(COUNT) if id % 4 != 1}

    def scale(sample: Any) -> Any:
        try:
            return sample["x"] * known[sample["id"]]
        except KeyError:
            return sample["x"] * np.random.random()

    return scale


# -- kinds of generators --------------------------------------------------------------------------------------------


@random_entry()
def python_random() -> Any:
    return lambda x: x + pyrandom.random()


@random_entry()
def numpy_legacy() -> Any:
    return lambda x: x + np.random.normal(0, 1, 64)


@random_entry()
def numpy_shuffle_in_place() -> Any:
    def shuffle(x: Any) -> Any:
        np.random.shuffle(x)
        return x

    return shuffle


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
def generator_made_inside() -> Any:
    def augment(x: Any) -> Any:
        rng = np.random.default_rng()
        return x + rng.normal()

    return augment


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


@random_entry()
def bound_method_of_a_generator() -> Any:
    return np.random.default_rng(2).normal


@random_entry()
def permutation_of_numpy() -> Any:
    return np.random.permutation


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
def torch_random_in_place() -> Any:
    return lambda x: x.clone().random_()


@random_entry(tensors)
def dropout_module() -> Any:
    return nn.Dropout(0.5)
