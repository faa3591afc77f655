"""Entries that draw: in some branches only, rarely, in roundabout ways, from every kind of generator, or by clocks."""

from __future__ import annotations

import collections
import operator
import os
import random as pyrandom
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import random as draw_number
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from zoo_entry import (
    COUNT,
    either_entry,
    first_is_short,
    labelled,
    many,
    named,
    of_step,
    random_entry,
    tensors,
    texts,
    unchanged,
)

# -- branches: some samples are drawn for, others are not ------------------------------------------------------------


@of_step(random_entry(first_is_short, draws=lambda id: id > 0, coarse=True))
def crop_or_pad(x: Any) -> Any:
    if len(x) <= 64:
        return np.pad(x, (0, 64 - len(x)))
    start = np.random.randint(0, len(x) - 64 + 1)
    return x[start : start + 64]


@of_step(random_entry(labelled, draws=lambda id: id % 10 == 7))
def minority_class(sample: Any) -> Any:
    x, label = sample
    if label == 7:
        x = x + np.random.normal(0, 1, 64).astype(np.float32)
    return x, label


@of_step(random_entry(draws=lambda id: id == COUNT - 1))
def only_the_last(x: Any) -> Any:
    return x if x[0] < COUNT - 1 else x + draw_number()


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


random_entry()(lambda: lambda x: x + pyrandom.random(), "python_random")
random_entry()(lambda: lambda x: x + np.random.normal(0, 1, 64), "numpy_legacy")


@of_step(random_entry())
def numpy_shuffle_in_place(x: Any) -> Any:
    np.random.shuffle(x)
    return x


@random_entry()
def generator_closure() -> Any:
    rng = np.random.default_rng(2)
    return lambda x: x + rng.normal()


@random_entry()
def generator_default_argument() -> Any:
    def augment(x: Any, rng: Any = np.random.default_rng(2)) -> Any:  # noqa: B008
        return x + rng.normal()

    return augment


@of_step(random_entry())
def generator_made_inside(x: Any) -> Any:
    rng = np.random.default_rng()
    return x + rng.normal()


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


random_entry()(lambda: np.random.default_rng(2).normal, "bound_method_of_a_generator")
random_entry()(lambda: np.random.permutation, "permutation_of_numpy")


@of_step(random_entry(tensors))
def torch_generator_seeded_by_entropy(x: Any) -> Any:
    generator = torch.Generator()
    generator.seed()
    return x + torch.rand((), generator=generator)


random_entry(tensors)(lambda: lambda x: F.dropout(x, 0.5, training=True), "torch_functional_dropout")
random_entry(tensors)(lambda: lambda x: x.clone().random_(), "torch_random_in_place")
random_entry(tensors)(lambda: nn.Dropout(0.5), "dropout_module")


# -- roundabout ways -------------------------------------------------------------------------------------------------


def jitter(x: Any) -> Any:
    return x + np.random.normal()


def hidden(x: Any) -> Any:
    return x + np.random.default_rng().normal()


@random_entry()
def through_a_helper_with_hidden_generator() -> Any:
    def outer(x: Any) -> Any:
        return hidden(x * 2)

    return lambda x: outer(x)


@random_entry()
def through_a_property() -> Any:
    class Augment:
        @property
        def noise(self) -> float:
            return float(np.random.default_rng().normal())

        def __call__(self, x: Any) -> Any:
            return x + self.noise

    return Augment()


random_entry(tensors)(lambda: operator.methodcaller("uniform_"), "through_a_methodcaller")


@random_entry()
def through_getattr_with_hidden_generator() -> Any:
    name = "default" + "_rng"
    return lambda x: x + getattr(np.random, name)().normal()


random_entry()(lambda: lambda x: x + eval("np.random.default_rng().normal()"), "through_eval")


@random_entry()
def through_a_subclass() -> Any:
    class Base:
        def amount(self) -> float:
            return 0.0

        def __call__(self, x: Any) -> Any:
            return x + self.amount()

    class Child(Base):
        def amount(self) -> float:
            return float(np.random.default_rng().normal())

    return Child()


# -- a steady step before a random one -------------------------------------------------------------------------------


@random_entry(prefix=True)
def steady_then_hidden() -> Any:
    def spectrum(x: Any) -> Any:
        return np.abs(np.fft.rfft(x)).astype(np.float32)

    return [spectrum, hidden]


# -- rare draws ------------------------------------------------------------------------------------------------------


@of_step(random_entry(many, base=unchanged))
def rare_numpy(x: Any) -> Any:
    if np.random.rand() < 0.01:
        x = x + np.random.normal(0, 1, 64).astype(np.float32)
    return x


@of_step(random_entry(many, base=unchanged))
def rare_with_generator_made_inside(x: Any) -> Any:
    rng = np.random.default_rng()
    return x + rng.normal(0, 1, 64).astype(np.float32) if rng.random() < 0.01 else x


random_entry(many, draws=lambda id: id == 200)(
    lambda: lambda x: x + np.random.normal() if x[0] == 200 else x, "one_sample_of_many"
)


# -- clocks, entropy, surroundings -----------------------------------------------------------------------------------


random_entry()(lambda: lambda x: np.append(x.astype(np.float64), time.time()), "clock_time")
random_entry()(lambda: lambda x: x + np.random.default_rng(time.time_ns()).normal(), "clock_seeds_a_generator")


@of_step(random_entry(draws=lambda id: id % 4 == 3))
def clock_for_some(x: Any) -> Any:
    return (x, time.time() if int(x[0]) % 4 == 3 else 0.0)


random_entry()(lambda: lambda x: (x, os.urandom(8)), "os_urandom")
random_entry()(lambda: lambda x: (x, secrets.token_hex(8)), "secrets_token")


@random_entry(local=True)  # forked processes may use the same addresses
def address_of_an_object() -> Any:
    kept: collections.deque[Any] = collections.deque(maxlen=4096)

    def augment(x: Any) -> Any:
        kept.append(object())
        return x.astype(np.float64) + id(kept[-1]) % 2**40

    return augment


either_entry(texts)(lambda: lambda x: hash(x), "hash_of_a_string")
either_entry(texts)(lambda: lambda x: list(set(x.split())), "order_of_a_set")


# -- state -----------------------------------------------------------------------------------------------------------


@random_entry(local=True)
def counter_every_ten_calls() -> Any:
    class Counted:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            return x + self.calls // 10

    return Counted()


@random_entry(local=True)
def counter_of_a_function_attribute() -> Any:
    def step(x: Any) -> Any:
        step.calls += 1  # type: ignore[attr-defined]
        return x + step.calls  # type: ignore[attr-defined]

    step.calls = 0  # type: ignore[attr-defined]
    return step


@random_entry(local=True)
def mixed_with_earlier_samples() -> Any:
    class MixUp:
        def __init__(self) -> None:
            self.earlier: list[Any] = []

        def __call__(self, x: Any) -> Any:
            self.earlier.append(x)
            return x + pyrandom.random() * self.earlier[pyrandom.randrange(len(self.earlier))]

    return MixUp()


@random_entry(local=True)
def python_generator_attribute() -> Any:
    class Stream:
        def __init__(self) -> None:
            self.numbers = self.draw()

        def draw(self) -> Any:
            while True:
                yield pyrandom.random()

        def __call__(self, x: Any) -> Any:
            return x + next(self.numbers)

    return Stream()


@random_entry(local=True)
def begins_to_draw_later() -> Any:
    class Curriculum:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            return x + np.random.normal() if self.calls > 3 * COUNT // 2 else x

    return Curriculum()


# -- threads ---------------------------------------------------------------------------------------------------------


@random_entry()
def drawn_in_a_thread_with_hidden_generator() -> Any:
    def noise(out: list[float]) -> None:
        out.append(np.random.default_rng().normal())

    def augment(x: Any) -> Any:
        out: list[float] = []
        thread = threading.Thread(target=noise, args=(out,))
        thread.start()
        thread.join()
        return x + out[0]

    return augment


@of_step(random_entry(draws=lambda id: id % 6 == 5))
def drawn_in_a_pool_for_some(x: Any) -> Any:
    if int(x[0]) % 6 != 5:
        return x
    with ThreadPoolExecutor(1) as pool:
        return x + pool.submit(np.random.normal).result()
