"""SIGKILL at any instant: records read afterwards are correct, no block is lost, no process hangs."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from cache_tools import is_signed, make, problems, signed
from children import Child
from stallfree.cache import policies, records, sample_cache, space
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache

NUM_IDS = 64
WRITING = {module.__file__ for module in (sample_cache, records, space, policies)}
UNIFORM, VARIED = (4064,), (4064, 700, 20_000)


def cache_of(place: str, policy: str, sizes: tuple[int, ...], tmp_path: Path) -> SampleCache:
    blocks, example = (12, signed(0, 0)) if sizes == UNIFORM else (200, b"x" * 300)
    return make(NUM_IDS, blocks, policy=policy, example=example, store="memory" if place == "memory" else tmp_path)


def read_all(cache: SampleCache) -> None:
    for id, value in enumerate(cache.get_many(np.arange(NUM_IDS))):
        assert value is MISS or is_signed(id, value)


def verify(cache: SampleCache) -> None:
    """Everything that is resident is right, and every block is either free or used once."""
    assert problems(cache, killed=cache.meta.on_disk) == []
    assert MISS not in cache.get_many(np.flatnonzero(cache.resident(np.arange(NUM_IDS))))
    read_all(cache)
    assert cache.stats().damaged == 0


def fill(cache: SampleCache, seed: int, sizes: tuple[int, ...], rounds: int) -> None:
    rng = np.random.default_rng(seed)
    for nonce in range(rounds):
        ids = rng.permutation(NUM_IDS)[:5].tolist()
        cache.put_many(ids, [signed(id, seed * 1000 + nonce, int(rng.choice(sizes))) for id in ids])
        if nonce % 7 == 3:
            cache.drop(ids[:2])


def fill_for_ever(cache: SampleCache, seed: int, sizes: tuple[int, ...]) -> None:
    while True:
        fill(cache, seed, sizes, 100)


# -- at every line ----------------------------------------------------------------------------------------------------


def killed_at_line(number: int, files: set[str | None], function: str, work: Callable[..., Any], *args: Any) -> None:
    """Do `work` and die before line `number` that runs in `files` (in and below `function`, if given)."""
    left = [number]
    inside: list[FrameType] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code: CodeType = frame.f_code
        if code.co_filename not in files:
            return None
        if event == "call" and code.co_name == function:
            inside.append(frame)
        if event == "line" and (inside or not function):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if event == "return" and inside and inside[-1] is frame:
            inside.pop()
        return trace

    sys.settrace(trace)
    work(*args)
    sys.settrace(None)


def one_of_each(cache: SampleCache, nonce: int, sizes: tuple[int, ...]) -> None:
    """A put that has to evict, and a drop. A put on a disk reserves blocks, writes, and publishes."""
    resident = cache.resident(np.arange(NUM_IDS))
    ids = np.flatnonzero(~resident)[nonce % 7 :][:3].tolist()
    cache.put_many(ids, [signed(id, nonce, size) for id, size in zip(ids, sizes * 3, strict=False)])
    cache.drop(np.flatnonzero(resident)[:2])


def kill_at_lines(every: int, cache: SampleCache, before: Callable[[int], None], *work: Any) -> None:
    """Kill a process that does `work` at every one of its lines, or at some, and look at what it leaves."""
    for line in range(1, 2000, every):
        before(line)
        if (code := Child(killed_at_line, line, *work[:3], cache, line, *work[3:]).wait()) == 0:
            break
        assert code == -signal.SIGKILL
        verify(cache)
    assert line > 25
    verify(cache)


@pytest.mark.parametrize(
    ("place", "policy", "sizes", "every"),
    [
        ("memory", "lru", UNIFORM, 23),
        ("disk", "lru", VARIED, 37),
        *(
            pytest.param(place, policy, sizes, 1, marks=pytest.mark.slow)
            for place, policy in (("memory", "lru"), ("disk", "lru"), ("memory", "minio"))
            for sizes in (UNIFORM, VARIED)
        ),
    ],
)
def test_a_writer_killed_at_every_line(
    place: str, policy: str, sizes: tuple[int, ...], every: int, tmp_path: Path
) -> None:
    with cache_of(place, policy, sizes, tmp_path) as cache:

        def before(line: int) -> None:
            if policy != "minio" or line % 3 == 1:  # one that evicts nothing is not full all the time
                fill(cache, line, sizes, 2)

        kill_at_lines(every, cache, before, WRITING, "", one_of_each, sizes)


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_recovery_killed_at_every_line(every: int, tmp_path: Path) -> None:
    with cache_of("memory", "lru", VARIED, tmp_path) as cache:

        def before(line: int) -> None:
            fill(cache, line, VARIED, 3)
            lost = Child(killed_at_line, 8, {space.__file__}, "_free", one_of_each, cache, line, VARIED)
            assert lost.wait() == -signal.SIGKILL

        kill_at_lines(every, cache, before, {space.__file__}, "recover", fill, VARIED, 1)


# -- at random points -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "sizes", "times"),
    [
        ("memory", VARIED, 8),
        ("disk", UNIFORM, 8),
        *(
            pytest.param(place, sizes, 300, marks=pytest.mark.slow)
            for place in ("memory", "disk")
            for sizes in (UNIFORM, VARIED)
        ),
    ],
)
def test_kills_at_random(place: str, sizes: tuple[int, ...], times: int, tmp_path: Path) -> None:
    rng = random.Random(times)
    with cache_of(place, "lru", sizes, tmp_path) as cache:
        fill(cache, 0, sizes, 5)
        other = Child(fill_for_ever, cache, 1, sizes)  # goes on all the while
        for number in range(times):
            child = Child(fill_for_ever, cache, 2 + number, sizes)
            time.sleep(rng.uniform(0, 0.03))  # the instant of death
            child.kill()
            if number % 4 == 0:
                assert Child(read_all, cache).wait() == 0
        other.kill()
        assert Child(verify, cache).wait() == 0
        verify(cache)
        assert cache.stats().evictions > 0
