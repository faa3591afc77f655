"""Measures S, P and C on a few samples, in a child process, for the choice of a cache."""

from __future__ import annotations

import contextlib
import math
import pickle
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from stallfree.autotune.choice import Measured
from stallfree.cache.sample_cache import SampleCache
from stallfree.datasets.probe import FirstLook
from stallfree.errors import CodecError, InputError
from stallfree.notes import note_sample
from stallfree.pipeline.codec import encode, record_size
from stallfree.pipeline.compose import Compose, works_in_place
from stallfree.pipeline.protocol import Source
from stallfree.pipeline.randomness import Randomness, States
from stallfree.pipeline.values import payload_bytes, private

LEVELS = (8, 16, 32, 64)
"""Numbers of concurrent fetches to try, each with twice as many samples."""

SECONDS = 1.0
"""Time budget for all fetches, and again for prep; each level and each part uses at least four samples."""

BYTES = 256 << 20
"""Maximum bytes of records held during the measurement."""

_BUSY = 0.7
_PREPARED = 64
_LEAST = 4


@dataclass
class Probe:
    """The measurement, and the records fetched for it, which need not be fetched again.

    Attributes:
        measured: the rates and sizes.
        records: as fetched, by id.
    """

    measured: Measured
    records: dict[int, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send what can be pickled: the other records are fetched again, and the error names the sample."""
        return Probe, (self.measured, {id: record for id, record in self.records.items() if _is_picklable(record)})


def _is_picklable(record: Any) -> bool:
    with contextlib.suppress(Exception):
        pickle.dumps(record)
        return True
    return False


def measure(source: Source, steps: Compose, first: FirstLook, *, seed: int) -> Probe:
    """Fetch and prepare some random samples, and time it. Samples that fail are left out.

    Takes about two seconds at most if single samples are fast. Raises the error of a sample if all fail.
    """
    ids = np.random.default_rng(seed & (2**64 - 1)).permutation(len(source))[: 2 * sum(LEVELS)].tolist()
    states = States()
    fetched = _fetch_some(source, ids) if getattr(source, "threads", True) else _fetch_in_turn(source, ids)
    drew = states.moved()
    values = list(fetched.records.values())[:_PREPARED]
    with _one_thread(), Randomness(steps if len(first.parts.random) else None) as randomness:
        randomness.seed(seed, 0, first.first.id)
        whole, _ = _seconds(steps, values)
        if len(first.parts.deterministic):
            deterministic, prepared = _seconds(first.parts.deterministic, values)
            random, _ = _seconds(first.parts.random, prepared)
        else:
            deterministic, prepared, random = 0.0, [], whole
    left = (steps, first.parts.random)
    costs = [_cost_in_cache(kind, rest) for kind, rest in zip((values, prepared), left, strict=True)]
    sizes, reading = zip(*costs, strict=True)
    measured = Measured(
        samples=len(source),
        storage=fetched.storage,
        fetching=fetched.processor,
        whole=whole,
        deterministic=deterministic,
        random=random,
        reading=reading,
        sizes=sizes,
    )
    return Probe(measured, {} if drew else fetched.records)  # a cache would freeze random records


@dataclass
class _Fetched:
    """Records, S by the number of concurrent fetches, and the CPU seconds per fetch."""

    source: Source
    storage: dict[int, float]
    records: dict[int, Any] = field(default_factory=dict)
    processor: float = 0.0
    held: int = 0
    problem: Exception | None = None

    def take(self, id: int, fetch: Callable[[], Any]) -> bool:
        """Store the record that `fetch` returns; return whether it succeeded."""
        try:
            self.records[id] = private(fetch())
        except Exception as error:
            note_sample(error, self.source, id, "fetching")
            self.problem = error
            return False
        self.held += payload_bytes(self.records[id])
        return True

    def checked(self) -> _Fetched:
        """Return self. Raises the error of a sample if all failed."""
        if self.problem is not None and not self.records:
            raise self.problem
        return self


def _fetch_some(source: Source, ids: list[int]) -> _Fetched:
    """Fetch with increasing concurrency while that is faster."""
    fetched, ids_left, best, busy, reads = _Fetched(source, {}), iter(ids), 0.0, 0.0, 0
    end = time.monotonic() + SECONDS
    for level in LEVELS:
        with ThreadPoolExecutor(level, thread_name_prefix="stallfree-measure") as pool:
            began, processor, got = time.monotonic(), time.process_time(), 0
            under_way = [(id, pool.submit(source.fetch, id)) for id in islice(ids_left, 2 * level)]
            for id, future in under_way:
                if got >= _LEAST and (time.monotonic() > end or fetched.held > BYTES):
                    future.cancel()
                else:
                    got += fetched.take(id, future.result)
        seconds, processor = time.monotonic() - began, time.process_time() - processor
        if not got:
            break
        busy, reads = busy + processor, reads + got
        rate = math.inf if processor > _BUSY * seconds else got / seconds
        fetched.storage[level] = rate
        if rate <= 1.1 * best or math.isinf(rate) or time.monotonic() > end or fetched.held > BYTES:
            break
        best = rate
    fetched.processor = busy / max(1, reads)
    return fetched.checked()


def _fetch_in_turn(source: Source, ids: list[int]) -> _Fetched:
    """Fetch sequentially, for a data set without thread support: fetches take worker time, waits included."""
    fetched, began = _Fetched(source, {1: math.inf}), time.monotonic()
    for id in ids:
        if len(fetched.records) >= _LEAST and (time.monotonic() - began > SECONDS or fetched.held > BYTES):
            break
        fetched.take(id, partial(source.fetch, id))
    fetched.processor = (time.monotonic() - began) / max(1, len(fetched.records))
    return fetched.checked()


def _seconds(steps: Callable[[Any], Any], values: list[Any]) -> tuple[float, list[Any]]:
    """Seconds per value for `steps`, and their results. The first value is processed twice: it may load libraries."""
    copies = [private(value) for value in values]
    made = []
    with contextlib.suppress(Exception):
        steps(private(values[0]))
    began = time.monotonic()
    for value in copies:
        with contextlib.suppress(Exception):  # raised again when the sample is requested
            made.append(steps(value))
        if len(made) >= _LEAST and time.monotonic() - began > SECONDS / 2:
            break
    return (time.monotonic() - began) / max(1, len(made)), made


def _sizes(values: list[Any]) -> list[int]:
    """Record bytes of the values; empty if they cannot be stored."""
    try:
        return [record_size(*encode(value, allow_pickle=True)) for value in values]
    except (CodecError, RecursionError):
        return []


def _cost_in_cache(values: list[Any], rest: Compose) -> tuple[float, float]:
    """Bytes of a record in a cache, infinite if it cannot be stored, and seconds to read it for the steps `rest`."""
    sizes = _sizes(values)
    if not sizes:
        return math.inf, 0.0
    size, seconds, name = sum(sizes) / len(sizes), 0.0, f"measure-{secrets.token_hex(8)}"
    room, ids = sum(size + size // 4 + 4096 for size in sizes) + (1 << 20), np.arange(len(values))
    with (
        contextlib.suppress(InputError, OSError),
        SampleCache(len(values), capacity=room, fingerprint=name, name=name, example=values[0]) as cache,
    ):
        cache.put_many(ids, values)
        read = cache.borrow if len(rest) and all(map(works_in_place, rest)) else cache.get_many
        read(ids)
        began = time.perf_counter()
        read(ids)
        seconds = (time.perf_counter() - began) / len(values)
    return size, seconds


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, as in workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
