"""Deterministic entries that are seeded, random by name only, or keep state that does not reach their output."""

from __future__ import annotations

import datetime
import functools
import itertools
import logging
import math
import random as pyrandom
import time
import zlib
from typing import Any

import numpy as np
import torch
from zoo_entry import either_entry, named, rows, steady_entry, tensors, texts

log = logging.getLogger(__name__)

RANDOM_CROP_SIZE = 32

# -- seeded, or random by name only ----------------------------------------------------------------------------------


@steady_entry()
def projection_drawn_in_the_constructor() -> Any:
    class Project:
        def __init__(self) -> None:
            self.matrix = np.random.default_rng(0).normal(size=(64, 8))

        def __call__(self, x: Any) -> Any:
            return x @ self.matrix

    return Project()


@steady_entry()
def generator_kept_but_used_in_the_constructor_only() -> Any:
    class Shuffle:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)
            self.order = self.rng.permutation(64)

        def __call__(self, x: Any) -> Any:
            return x[self.order]

    return Shuffle()


@steady_entry()
def permutation_with_a_constant_seed() -> Any:
    return lambda x: x[np.random.default_rng(0).permutation(len(x))]


@steady_entry()
def legacy_state_with_a_constant_seed() -> Any:
    return lambda x: x + np.random.RandomState(17).normal(size=64)


@steady_entry()
def python_with_a_constant_seed() -> Any:
    def subset(x: Any) -> Any:
        draw = pyrandom.Random(42)
        return x[draw.sample(range(64), 16)]

    return subset


@steady_entry(tensors)
def torch_with_a_constant_seed() -> Any:
    def project(x: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        return x[torch.randperm(64, generator=generator)]

    return project


@steady_entry()
def seeded_by_content() -> Any:
    return lambda x: x + np.random.default_rng(zlib.crc32(x.tobytes())).normal(size=64)


@steady_entry(named)
def seeded_by_id() -> Any:
    return lambda sample: sample["x"] + pyrandom.Random(sample["id"]).random()


@steady_entry()
def random_in_names_only() -> Any:
    def random_crop_disabled(x: Any, randomise: bool = False) -> Any:
        seed = random_offset = 3
        return x[random_offset : random_offset + RANDOM_CROP_SIZE] * seed

    return random_crop_disabled


@steady_entry()
def augmentation_that_is_off() -> Any:
    class Prepare:
        def __init__(self, augment: bool = False) -> None:
            self.augment = augment

        def __call__(self, x: Any) -> Any:
            if self.augment:
                x = x + np.random.normal(0, 1, 64)
            return x * 2

    return Prepare()


@steady_entry()
def draws_behind_a_constant() -> Any:
    probability = 0.0

    def flip(x: Any) -> Any:
        if probability > 0 and pyrandom.random() < probability:
            return x[::-1]
        return x

    return flip


@steady_entry()
def random_in_text() -> Any:
    options = {"random": 1.0, "shuffle": 2.0}

    def weigh(x: Any) -> Any:
        """Uses no random numbers, nor time.time()."""
        return x * options["random"] + len("os.urandom") - options["shuffle"]

    return weigh


@steady_entry()
def shuffled_bits() -> Any:
    def shuffle_bits(value: int) -> int:
        value = (value ^ value >> 16) * 0x45D9F3B & 0xFFFFFFFF
        return value ^ value >> 16

    return lambda x: np.array([shuffle_bits(int(abs(value) * 1000)) for value in x])


# -- stateful, but what comes out does not depend on it --------------------------------------------------------------


@steady_entry()
def remembers_results() -> Any:
    @functools.lru_cache(maxsize=8)
    def table(length: int) -> Any:
        return np.hanning(length)

    return lambda x: x * table(len(x))


@steady_entry(texts)
def remembers_words() -> Any:
    class Tokenise:
        def __init__(self) -> None:
            self.known: dict[str, int] = {}

        def __call__(self, text: str) -> Any:
            for word in text.split():
                if word not in self.known:
                    self.known[word] = zlib.crc32(word.encode()) % 1000
            return [self.known[word] for word in text.split()]

    return Tokenise()


@steady_entry()
def counts_its_calls() -> Any:
    class Counted:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            if self.calls % 1000 == 0:
                log.debug("%d samples", self.calls)
            return np.cumsum(x)

    return Counted()


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
def logs_each_sample() -> Any:
    def step(x: Any) -> Any:
        log.debug("sample of %d values, %.3f", len(x), x.mean())
        return np.diff(x)

    return step


@steady_entry()
def buffer_of_its_own() -> Any:
    class Scale:
        def __init__(self) -> None:
            self.out = np.empty(64, np.float32)

        def __call__(self, x: Any) -> Any:
            np.multiply(x, 3, out=self.out)
            return self.out.copy()

    return Scale()


@steady_entry()
def loops_over_an_iterator() -> Any:
    return lambda x: [sum(pair) for pair in itertools.pairwise(x.tolist())] + [math.fsum(x.tolist())]


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
def logs_with_the_time() -> Any:
    def step(x: Any) -> Any:
        log.debug("%s: sample", datetime.datetime.now())
        return np.sort(x)

    return step


@either_entry()
def draws_and_does_not_use_it() -> Any:
    def step(x: Any) -> Any:
        pyrandom.random()
        return np.sort(x)

    return step


@either_entry()
def drawn_and_multiplied_by_zero() -> Any:
    return lambda x: x + 0 * np.random.normal()


@either_entry()
def seeds_the_global_generator_with_a_constant() -> Any:
    def step(x: Any) -> Any:
        np.random.seed(0)
        return x + np.random.normal(size=64)

    return step
