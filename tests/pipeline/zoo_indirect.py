"""Entries that draw in roundabout ways, or behind a steady step."""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
import random as pyrandom
from typing import Any

import numpy as np
from zoo_draws import made_crop_or_pad
from zoo_entry import first_is_short, random_entry, tensors

# -- roundabout ways -------------------------------------------------------------------------------------------------


def jitter(x: Any) -> Any:
    return x + np.random.normal()


def hidden(x: Any) -> Any:
    return x + np.random.default_rng().normal()


@random_entry()
def through_a_helper() -> Any:
    return lambda x: jitter(x)


@random_entry()
def through_a_helper_with_hidden_generator() -> Any:
    def outer(x: Any) -> Any:
        return hidden(x * 2)

    return lambda x: outer(x)


@random_entry()
def through_a_method() -> Any:
    class Augment:
        def noise(self) -> float:
            return pyrandom.random()

        def apply(self, x: Any) -> Any:
            return x + self.noise()

    return Augment().apply


@random_entry()
def through_a_property() -> Any:
    class Augment:
        @property
        def noise(self) -> float:
            return float(np.random.default_rng().normal())

        def __call__(self, x: Any) -> Any:
            return x + self.noise

    return Augment()


@random_entry()
def through_a_dict_of_functions() -> Any:
    ways = {"jitter": jitter, "none": lambda x: x}
    return lambda x: ways["jitter"](x)


@random_entry(draws=lambda id: id % 2 == 1)
def through_a_list_of_functions_by_content() -> Any:
    ways = [lambda x: x, hidden]
    return lambda x: ways[int(x[0]) % 2](x)


@random_entry()
def through_a_partial() -> Any:
    def scale(low: float, x: Any) -> Any:
        return x * pyrandom.uniform(low, 2)

    return functools.partial(scale, 0.5)


@random_entry()
def through_a_decorator() -> Any:
    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args)

        return wrapper

    return logged(hidden)


@random_entry(tensors)
def through_a_methodcaller() -> Any:
    return operator.methodcaller("uniform_")


@random_entry()
def through_getattr() -> Any:
    def augment(x: Any, name: str = "normal") -> Any:
        return x + getattr(np.random, name)()

    return augment


@random_entry()
def through_getattr_with_hidden_generator() -> Any:
    name = "default" + "_rng"
    return lambda x: x + getattr(np.random, name)().normal()


@random_entry()
def through_import_module() -> Any:
    return lambda x: x + importlib.import_module("random").Random().random()


@random_entry()
def through_an_import_inside() -> Any:
    def augment(x: Any) -> Any:
        from random import SystemRandom as Source

        return x + Source().random()

    return augment


@random_entry()
def through_eval() -> Any:
    return lambda x: x + eval("np.random.default_rng().normal()")


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


@random_entry()
def through_a_sort_key() -> Any:
    return lambda x: np.array(sorted(x.tolist(), key=lambda value: pyrandom.random()))


@random_entry()
def through_map_and_star() -> Any:
    def augment(x: Any) -> Any:
        return np.array(list(itertools.starmap(pyrandom.uniform, ((value, value + 1) for value in x.tolist()))))

    return augment


# -- a steady step before a random one -------------------------------------------------------------------------------


@random_entry(prefix=True)
def steady_then_random() -> Any:
    def normalise(x: Any) -> Any:
        return (x - x.mean()) / x.std()

    return [normalise, jitter]


@random_entry(prefix=True)
def steady_then_hidden() -> Any:
    def spectrum(x: Any) -> Any:
        return np.abs(np.fft.rfft(x)).astype(np.float32)

    return [spectrum, hidden]


@random_entry(first_is_short, draws=lambda id: id > 0, coarse=True, prefix=True)
def steady_then_crop_or_pad() -> Any:
    def scale(x: Any) -> Any:
        return x * 2

    return [scale, made_crop_or_pad()]
