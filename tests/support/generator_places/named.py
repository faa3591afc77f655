"""Generators of NumPy."""

from typing import Any

import numpy as np

from generator_places import SEED, P


def made() -> Any:
    return np.random.default_rng(SEED)


def flipped(x: Any, rng: Any) -> Any:
    return -x if rng.random() < P else x


def method_of(rng: Any) -> Any:
    return rng.random
