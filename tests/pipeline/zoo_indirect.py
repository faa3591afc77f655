"""Entries that draw in roundabout ways, or behind a steady step."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from zoo_entry import random_entry, tensors

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


@random_entry(tensors)
def through_a_methodcaller() -> Any:
    return operator.methodcaller("uniform_")


@random_entry()
def through_getattr_with_hidden_generator() -> Any:
    name = "default" + "_rng"
    return lambda x: x + getattr(np.random, name)().normal()


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


# -- a steady step before a random one -------------------------------------------------------------------------------


@random_entry(prefix=True)
def steady_then_hidden() -> Any:
    def spectrum(x: Any) -> Any:
        return np.abs(np.fft.rfft(x)).astype(np.float32)

    return [spectrum, hidden]
