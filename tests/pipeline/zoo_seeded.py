"""Deterministic entries that are seeded, random by name only, or keep state that does not reach their output.

Those that are seeded may count as random: their code has the names of generators.
"""

from __future__ import annotations

import logging
import random as pyrandom
import time
import zlib
from typing import Any

import numpy as np
import torch
from zoo_entry import either_entry, rows, steady_entry, tensors

log = logging.getLogger(__name__)

RANDOM_CROP_SIZE = 32

# -- seeded, or random by name only ----------------------------------------------------------------------------------


@either_entry()
def generator_kept_but_used_in_the_constructor_only() -> Any:
    class Shuffle:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)
            self.order = self.rng.permutation(64)

        def __call__(self, x: Any) -> Any:
            return x[self.order]

    return Shuffle()


@either_entry()
def permutation_with_a_constant_seed() -> Any:
    return lambda x: x[np.random.default_rng(0).permutation(len(x))]


@either_entry(tensors)
def torch_with_a_constant_seed() -> Any:
    def project(x: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        return x[torch.randperm(64, generator=generator)]

    return project


@either_entry()
def seeded_by_content() -> Any:
    return lambda x: x + np.random.default_rng(zlib.crc32(x.tobytes())).normal(size=64)


@steady_entry()
def random_in_names_only() -> Any:
    def random_crop_disabled(x: Any, randomise: bool = False) -> Any:
        seed = random_offset = 3
        return x[random_offset : random_offset + RANDOM_CROP_SIZE] * seed

    return random_crop_disabled


@steady_entry()
def random_in_text() -> Any:
    options = {"random": 1.0, "shuffle": 2.0}

    def weigh(x: Any) -> Any:
        """Uses no random numbers, nor time.time()."""
        return x * options["random"] + len("os.urandom") - options["shuffle"]

    return weigh


# -- stateful, but what comes out does not depend on it --------------------------------------------------------------


@steady_entry()
def collects_statistics() -> Any:
    class Statistics:
        def __init__(self) -> None:
            self.means: list[float] = []

        def __call__(self, x: Any) -> Any:
            self.means.append(float(x.mean()))
            return x - x.mean()

    return Statistics()


@steady_entry()
def buffer_of_its_own() -> Any:
    class Scale:
        def __init__(self) -> None:
            self.out = np.empty(64, np.float32)

        def __call__(self, x: Any) -> Any:
            np.multiply(x, 3, out=self.out)
            return self.out.copy()

    return Scale()


@steady_entry(rows)
def changes_its_input() -> Any:
    def scale(x: Any) -> Any:
        x *= 2
        return x

    return [scale, scale]


@either_entry()
def measures_its_own_time() -> Any:
    class Timed:
        def __init__(self) -> None:
            self.seconds = 0.0

        def __call__(self, x: Any) -> Any:
            began = time.perf_counter()
            out = np.sort(x)
            self.seconds += time.perf_counter() - began
            return out

    return Timed()


@either_entry()
def draws_and_does_not_use_it() -> Any:
    def step(x: Any) -> Any:
        pyrandom.random()
        return np.sort(x)

    return step


@either_entry()
def seeds_the_global_generator_with_a_constant() -> Any:
    def step(x: Any) -> Any:
        np.random.seed(0)
        return x + np.random.normal(size=64)

    return step
