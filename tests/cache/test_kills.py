"""SIGKILL at any instant: records read afterwards are correct, no block is lost, no process hangs."""

from __future__ import annotations

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
EXAMPLE = signed(0, 0)
WRITING = {module.__file__ for module in (sample_cache, records, space, policies)}


def verify(cache: SampleCache) -> None:
    """Everything that is resident is right, and every block is either free or used once."""
    assert problems(cache, killed=cache.meta.on_disk) == []
    resident = np.flatnonzero(cache.resident(np.arange(NUM_IDS)))
    for id, value in zip(resident.tolist(), cache.get_many(resident), strict=True):
        assert value is not MISS
        assert is_signed(id, value)
    assert cache.stats().damaged == 0


def in_child(work: Callable[..., Any], *arguments: Any) -> None:
    assert Child(work, *arguments).wait() == 0


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


# -- at every line ---------------------------------------------------------------------------------------------------


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
    there = cache.resident(np.arange(NUM_IDS))
    ids = np.flatnonzero(~there)[nonce % 7 :][:3].tolist()
    cache.put_many(ids, [signed(id, nonce, size) for id, size in zip(ids, sizes * 3, strict=False)])
    cache.drop(np.flatnonzero(there)[:2])


UNIFORM, VARIED = (4064,), (4064, 700, 20_000)


def kill_at_lines(every: int, place: str, policy: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    store = "memory" if place == "memory" else str(tmp_path)
    example = EXAMPLE if sizes == UNIFORM else b"x" * 300
    with make(NUM_IDS, 12 if sizes == UNIFORM else 200, policy=policy, example=example, store=store) as cache:
        for line in range(1, 2000, every):
            if policy != "minio" or line % 3 == 1:  # one that evicts nothing is not full all the time
                fill(cache, line, sizes, 2)
            child = Child(killed_at_line, line, WRITING, "", one_of_each, cache, line, sizes)
            if (code := child.wait()) == 0:
                break
            assert code == -signal.SIGKILL
            verify(cache)
        assert line > 25
        verify(cache)


@pytest.mark.parametrize(("place", "sizes", "every"), [("memory", UNIFORM, 23), ("disk", VARIED, 37)])
def test_a_writer_killed_at_some_lines(place: str, sizes: tuple[int, ...], every: int, tmp_path: Path) -> None:
    kill_at_lines(every, place, "lru", sizes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [UNIFORM, VARIED], ids=["uniform", "varied"])
@pytest.mark.parametrize(("place", "policy"), [("memory", "lru"), ("disk", "lru"), ("memory", "minio")])
def test_a_writer_killed_at_every_line(place: str, policy: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    kill_at_lines(1, place, policy, sizes, tmp_path)


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_recovery_killed_at_lines(every: int) -> None:
    with make(NUM_IDS, 200, policy="lru", example=b"x" * 300) as cache:
        for line in range(1, 2000, every):
            fill(cache, line, VARIED, 3)
            lost = Child(killed_at_line, 8, {space.__file__}, "_free", one_of_each, cache, line, VARIED)
            assert lost.wait() == -signal.SIGKILL
            child = Child(killed_at_line, line, {space.__file__}, "recover", fill, cache, line, VARIED, 1)
            if (code := child.wait()) == 0:
                break
            assert code == -signal.SIGKILL
            verify(cache)
        assert line > 25
        verify(cache)


# -- at random points ------------------------------------------------------------------------------------------------


def kill_at_random(times: int, place: str, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    rng = random.Random(times)
    store = "memory" if place == "memory" else str(tmp_path)
    example = EXAMPLE if sizes == UNIFORM else b"x" * 300
    with make(NUM_IDS, 12 if sizes == UNIFORM else 200, policy="lru", example=example, store=store) as cache:
        fill(cache, 0, sizes, 5)
        other = Child(fill_for_ever, cache, 1, sizes)  # goes on all the while
        for number in range(times):
            child = Child(fill_for_ever, cache, 2 + number, sizes)
            time.sleep(rng.uniform(0, 0.03))  # the instant of death
            child.kill()
            if number % 4 == 0:
                in_child(read_all, cache)
        other.kill()
        in_child(verify, cache)
        verify(cache)
        assert cache.stats().evictions > 0


def read_all(cache: SampleCache) -> None:
    for id, value in enumerate(cache.get_many(np.arange(NUM_IDS))):
        assert value is MISS or is_signed(id, value)


@pytest.mark.parametrize(
    ("place", "sizes"), [("memory", VARIED), ("disk", UNIFORM)], ids=["memory-varied", "disk-uniform"]
)
def test_some_kills(place: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    kill_at_random(8, place, tmp_path, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [UNIFORM, VARIED], ids=["uniform", "varied"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_hundreds_of_kills(place: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    kill_at_random(300, place, tmp_path, sizes)
