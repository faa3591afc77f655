"""Entries that draw rarely, read clocks or entropy, keep state, or start threads."""

from __future__ import annotations

import collections
import os
import random as pyrandom
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from zoo_entry import COUNT, either_entry, many, random_entry, texts, unchanged

# -- rare draws ------------------------------------------------------------------------------------------------------


@random_entry(many, base=unchanged)
def rare_numpy() -> Any:
    def augment(x: Any) -> Any:
        if np.random.rand() < 0.01:
            x = x + np.random.normal(0, 1, 64).astype(np.float32)
        return x

    return augment


@random_entry(many, base=unchanged)
def rare_with_generator_made_inside() -> Any:
    def augment(x: Any) -> Any:
        rng = np.random.default_rng()
        return x + rng.normal(0, 1, 64).astype(np.float32) if rng.random() < 0.01 else x

    return augment


@random_entry(many, draws=lambda id: id == 200)
def one_sample_of_many() -> Any:
    return lambda x: x + np.random.normal() if x[0] == 200 else x


# -- clocks, entropy, surroundings -----------------------------------------------------------------------------------


@random_entry()
def clock_time() -> Any:
    return lambda x: np.append(x.astype(np.float64), time.time())


@random_entry()
def clock_seeds_a_generator() -> Any:
    return lambda x: x + np.random.default_rng(time.time_ns()).normal()


@random_entry(draws=lambda id: id % 4 == 3)
def clock_for_some() -> Any:
    def stamp(x: Any) -> Any:
        return (x, time.time() if int(x[0]) % 4 == 3 else 0.0)

    return stamp


@random_entry()
def os_urandom() -> Any:
    return lambda x: (x, os.urandom(8))


@random_entry()
def secrets_token() -> Any:
    return lambda x: (x, secrets.token_hex(8))


@random_entry(local=True)  # forked processes may use the same addresses
def address_of_an_object() -> Any:
    kept: collections.deque[Any] = collections.deque(maxlen=4096)

    def augment(x: Any) -> Any:
        kept.append(object())
        return x.astype(np.float64) + id(kept[-1]) % 2**40

    return augment


@either_entry(texts)
def hash_of_a_string() -> Any:
    return lambda x: hash(x)


@either_entry(texts)
def order_of_a_set() -> Any:
    return lambda x: list(set(x.split()))


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


@random_entry(draws=lambda id: id % 6 == 5)
def drawn_in_a_pool_for_some() -> Any:
    def augment(x: Any) -> Any:
        if int(x[0]) % 6 != 5:
            return x
        with ThreadPoolExecutor(1) as pool:
            return x + pool.submit(np.random.normal).result()

    return augment
