"""Entries that draw rarely, read clocks or entropy, keep state, or start threads."""

from __future__ import annotations

import collections
import datetime
import itertools
import os
import queue
import random as pyrandom
import secrets
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime as moment
from typing import Any

import numpy as np
import torch
from zoo_entry import COUNT, either_entry, many, random_entry, texts, unchanged

COUNTED = {"calls": 0}
_calls = 0

# -- rare draws ------------------------------------------------------------------------------------------------------


@random_entry(many, base=unchanged)
def rare_python() -> Any:
    return lambda x: x + pyrandom.random() if pyrandom.random() < 0.01 else x


@random_entry(many, base=unchanged)
def rare_numpy() -> Any:
    def augment(x: Any) -> Any:
        if np.random.rand() < 0.01:
            x = x + np.random.normal(0, 1, 64).astype(np.float32)
        return x

    return augment


@random_entry(many, base=unchanged)
def rare_torch() -> Any:
    def augment(x: Any) -> Any:
        return x + torch.rand(64).numpy() if torch.rand(()) < 0.01 else x

    return augment


@random_entry(many, base=unchanged)
def rare_with_generator_made_inside() -> Any:
    def augment(x: Any) -> Any:
        rng = np.random.default_rng()
        return x + rng.normal(0, 1, 64).astype(np.float32) if rng.random() < 0.01 else x

    return augment


@random_entry(many, base=unchanged)
def rare_with_random_made_inside() -> Any:
    def augment(x: Any) -> Any:
        draw = pyrandom.Random()
        return x + np.float32(draw.random()) if draw.random() < 0.01 else x

    return augment


@random_entry(base=unchanged)
def one_in_ten_with_random_made_inside() -> Any:
    return lambda x: x * np.float32(1 + time.time() % 1) if pyrandom.Random().random() < 0.1 else x


@random_entry(many, draws=lambda id: id % 97 == 96)
def rare_by_content() -> Any:
    return lambda x: x + np.random.default_rng().normal() if int(x[0]) % 97 == 96 else x


@random_entry(many, draws=lambda id: id == 200)
def one_sample_of_many() -> Any:
    return lambda x: x + np.random.normal() if x[0] == 200 else x


# -- clocks, entropy, surroundings -----------------------------------------------------------------------------------


@random_entry()
def clock_time() -> Any:
    return lambda x: np.append(x.astype(np.float64), time.time())


@random_entry()
def clock_perf_counter() -> Any:
    return lambda x: np.append(x.astype(np.float64), time.perf_counter())


@random_entry()
def clock_nanoseconds() -> Any:
    def stamp(x: Any) -> Any:
        return x.astype(np.float64) + time.monotonic_ns() % 10**9

    return stamp


@random_entry()
def clock_seeds_a_generator() -> Any:
    return lambda x: x + np.random.default_rng(time.time_ns()).normal()


@random_entry()
def clock_datetime() -> Any:
    return lambda x: (x, datetime.datetime.now().isoformat())


@random_entry()
def clock_datetime_alias() -> Any:
    return lambda x: (x, moment.now().timestamp())


@random_entry(draws=lambda id: id % 4 == 3)
def clock_for_some() -> Any:
    def stamp(x: Any) -> Any:
        return (x, time.time() if int(x[0]) % 4 == 3 else 0.0)

    return stamp


@random_entry()
def processor_time() -> Any:
    return lambda x: np.append(x.astype(np.float64), time.thread_time_ns())


@random_entry()
def uuid_4() -> Any:
    return lambda x: (x, str(uuid.uuid4()))


@random_entry()
def os_urandom() -> Any:
    return lambda x: (x, os.urandom(8))


@random_entry()
def urandom_device() -> Any:
    def augment(x: Any) -> Any:
        with open("/dev/urandom", "rb") as device:
            return x, device.read(8)

    return augment


@random_entry()
def secrets_token() -> Any:
    return lambda x: (x, secrets.token_hex(8))


@random_entry()
def seeded_by_urandom() -> Any:
    return lambda x: x + pyrandom.Random(int.from_bytes(os.urandom(8), "little")).random()


@random_entry(local=True)  # forked processes may use the same addresses
def address_of_an_object() -> Any:
    kept: collections.deque[Any] = collections.deque(maxlen=4096)

    def augment(x: Any) -> Any:
        kept.append(object())
        return x.astype(np.float64) + id(kept[-1]) % 2**40

    return augment


@random_entry()
def temporary_name() -> Any:
    def augment(x: Any) -> Any:
        with tempfile.NamedTemporaryFile() as file:
            return x, file.name

    return augment


@random_entry()
def file_that_changes() -> Any:
    def augment(x: Any) -> Any:
        with open("/proc/sys/kernel/random/uuid") as file:
            return x, file.read()

    return augment


@random_entry()
def process_id() -> Any:
    return lambda x: x.astype(np.float64) + os.getpid()


@random_entry()
def seeded_by_process_id_and_clock() -> Any:
    return lambda x: x + np.random.RandomState((os.getpid() * 7919 + time.time_ns()) % 2**32).normal()


@either_entry(texts)
def hash_of_a_string() -> Any:
    return lambda x: hash(x)


@either_entry(texts)
def order_of_a_set() -> Any:
    return lambda x: list(set(x.split()))


@either_entry()
def time_of_a_file() -> Any:
    return lambda x: x + os.stat(__file__).st_mtime % 7


@either_entry()
def name_of_the_host() -> Any:
    return lambda x: (x, os.uname().nodename)


# -- state -----------------------------------------------------------------------------------------------------------


@random_entry(local=True)
def counter_attribute() -> Any:
    class Counted:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, x: Any) -> Any:
            self.calls += 1
            return x * self.calls

    return Counted()


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
def counter_nonlocal() -> Any:
    calls = 0

    def step(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return x + calls // 10

    return step


@random_entry(local=True)
def counter_global() -> Any:
    def step(x: Any) -> Any:
        global _calls
        _calls += 1
        return x + _calls

    return step


@random_entry(local=True)
def counter_in_a_global_dict() -> Any:
    def step(x: Any) -> Any:
        COUNTED["calls"] += 1
        return x + COUNTED["calls"] // 10

    return step


@random_entry(local=True)
def counter_of_a_function_attribute() -> Any:
    def step(x: Any) -> Any:
        step.calls += 1  # type: ignore[attr-defined]
        return x + step.calls  # type: ignore[attr-defined]

    step.calls = 0  # type: ignore[attr-defined]
    return step


@random_entry(local=True)
def counter_of_itertools() -> Any:
    numbers = itertools.count()
    return lambda x: x + next(numbers)


@random_entry(local=True)
def cycle_of_itertools() -> Any:
    strengths = itertools.cycle(np.linspace(0, 1, 1009).tolist())
    return lambda x: x + next(strengths)


@random_entry(local=True)
def rotating_deque() -> Any:
    strengths = collections.deque(range(1009))

    def step(x: Any) -> Any:
        strengths.rotate(1)
        return x + strengths[0]

    return step


@random_entry(local=True)
def running_mean() -> Any:
    class Centre:
        def __init__(self) -> None:
            self.seen, self.total = 0, 0.0

        def __call__(self, x: Any) -> Any:
            self.seen += 1
            self.total += float(x.mean()) + 1
            return x - self.total / self.seen / 1000 * self.seen

    return Centre()


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
def drawn_in_a_thread() -> Any:
    def augment(x: Any) -> Any:
        out: queue.SimpleQueue[float] = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: out.put(np.random.normal()))
        thread.start()
        thread.join()
        return x + out.get()

    return augment


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


@random_entry()
def drawn_in_a_pool() -> Any:
    def draw(value: float) -> float:
        return value + pyrandom.random()

    def augment(x: Any) -> Any:
        with ThreadPoolExecutor(2) as pool:
            return np.array(list(pool.map(draw, x[:4].tolist())))

    return augment


@random_entry(draws=lambda id: id % 6 == 5)
def drawn_in_a_pool_for_some() -> Any:
    def augment(x: Any) -> Any:
        if int(x[0]) % 6 != 5:
            return x
        with ThreadPoolExecutor(1) as pool:
            return x + pool.submit(np.random.normal).result()

    return augment
