"""SIGKILL at any instant: records read afterwards are correct, no block is lost, no process hangs.

Readers take no lock: whatever writers do meanwhile, a hit is whole and is the sample that was asked for.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cache_tools import MISS, SampleCache, gathered, hits, make, problems, read, signed
from children import Child
from stallfree.cache import policies, records, sample_cache, space
from stallfree.errors import CodecError
from stallfree.ipc.locks import FileLock

NUM_IDS = 64
WRITING = {module.__file__ for module in (sample_cache, records, space, policies)}
UNIFORM, VARIED = (4064,), (4064, 700, 20_000)
Sizes = tuple[int, ...]


def cache_of(place: str, policy: str, sizes: Sizes, tmp_path: Path) -> SampleCache:
    blocks, example = (12, signed(0, 0)) if sizes == UNIFORM else (200, b"x" * 300)
    return make(NUM_IDS, blocks, policy=policy, example=example, store="memory" if place == "memory" else tmp_path)


def verify(cache: SampleCache) -> None:
    """Everything that is resident is right, and every block is either free or used once."""
    assert problems(cache, killed=cache.meta.on_disk) == []
    hits(cache)
    assert cache.stats().damaged == 0


def fill(cache: SampleCache, seed: int, sizes: Sizes, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    for nonce in range(rounds):
        ids = rng.permutation(NUM_IDS)[:5].tolist()
        cache.put_many(ids, [signed(id, seed * 1000 + nonce, int(rng.choice(sizes))) for id in ids])
        if nonce % 7 == 3:
            cache.drop(ids[:2])


def killed_at_line(number: int, files: set[str | None], function: str, work: Callable[..., Any], *args: Any) -> None:
    """Do `work` and die before line `number` that runs in `files` (in and below `function`, if given)."""
    left, inside = number, list[FrameType]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "call" and frame.f_code.co_name == function:
            inside.append(frame)
        if event == "line" and (inside or not function):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if event == "return" and inside and inside[-1] is frame:
            inside.pop()
        return trace

    sys.settrace(trace)
    work(*args)
    sys.settrace(None)


def one_of_each(cache: SampleCache, nonce: int, sizes: Sizes) -> None:
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


EVERY_LINE = [
    pytest.param(place, policy, sizes, 1, marks=pytest.mark.slow)
    for place, policy in (("memory", "lru"), ("disk", "lru"), ("memory", "minio")) for sizes in (UNIFORM, VARIED)
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "policy", "sizes", "every"), [("memory", "lru", UNIFORM, 23), ("disk", "lru", VARIED, 37), *EVERY_LINE]
)
def test_a_writer_killed_at_every_line(place: str, policy: str, sizes: Sizes, every: int, tmp_path: Path) -> None:
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


def check(cache: SampleCache, rounds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        for how in (read, gathered):
            how(cache, rng.integers(0, NUM_IDS, 12))


@pytest.mark.parametrize(("place", "sizes"), [("memory", UNIFORM), ("memory", VARIED), ("disk", UNIFORM)])
@pytest.mark.parametrize("times", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_every_hit_is_right_while_writers_are_killed(place: str, sizes: Sizes, times: int, tmp_path: Path) -> None:
    rng = random.Random(times)
    with cache_of(place, "lru", sizes, tmp_path) as cache:
        fill(cache, 0, sizes, 5)
        readers = [Child(check, cache, 10 * times, seed) for seed in (1, 2)]
        other = Child(fill, cache, 1, sizes, 1 << 30)  # goes on all the while
        for number in range(times):
            child = Child(fill, cache, 2 + number, sizes, 1 << 30)
            time.sleep(rng.uniform(0, 0.03))  # the instant of death
            child.kill()
            check(cache, 2, number)
        assert [reader.wait() for reader in readers] == [0, 0]
        other.kill()
        assert Child(verify, cache).wait() == 0
        verify(cache)
        assert (cache.stats().evictions > 0, cache.stats().hits > 0) == (True, True)


def stop_while_holding(cache: SampleCache) -> None:
    with FileLock(cache.path / "lock").hold(10, "the test"):
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_writer_costs_puts_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_cache, "LOCK_SECONDS", 0.05)
    with make(NUM_IDS, 12, policy="lru", example=signed(0, 0), name="stopped") as cache:
        assert cache.put_many([1, 2], [signed(1, 0), signed(2, 0)]).all()
        writer = Child(stop_while_holding, cache)
        writer.wait_until_stopped()
        with pytest.warns(match=r"storing in the cache.*another process \(stopped\?\) held") as caught:
            stored = [cache.put_many([id], [signed(id, 0)]).any() for id in range(3, 6)]
        assert (len(caught), stored) == (1, [False] * 3)
        assert read(cache, [1]) == [1]

        def attach() -> None:
            with SampleCache(NUM_IDS, capacity=0, fingerprint="data", policy="lru", name="stopped") as other:
                read(other, range(NUM_IDS))

        assert Child(attach).wait() == 0, "another process still joins, reads and counts"
        stats = cache.stats()
        assert (stats.rejected, stats.hits > 1, stats.hits + stats.misses) == (3, True, 1 + NUM_IDS)
        writer.signal(signal.SIGCONT)
        assert writer.wait() == 0
        assert cache.put_many([20], [signed(20, 0)]).all(), "samples are stored again at once"


LONG = "of another form" * 200


def picture(id: int) -> tuple[torch.Tensor, int]:
    return torch.full((3, 50), id, dtype=torch.uint8), id


@pytest.mark.parametrize("long", [False, True])
def test_a_record_that_is_changed_while_it_is_lent(long: bool) -> None:
    with make(20, 60, example=picture(0)) as cache:
        cache.put_many([1, 2], [LONG if long else picture(1), picture(2)])
        lent = cache.borrow([1, 2, 1, 9])
        assert lent is not None
        assert lent.values[3] is MISS
        assert [lent.unchanged(at) for at in range(3)] == [True, True, True]
        cache.drop([1])
        cache.put_many([3, 4], [picture(3), LONG])  # in its place
        assert [lent.unchanged(at) for at in range(3)] == [False, True, False]
        assert lent.values[1][1] == 2
        cache.put_many([1], [picture(1)])
        assert [lent.unchanged(at) for at in range(3)] == [False, True, False]  # it is another one


@pytest.mark.parametrize(
    ("method", "long"), [("get_many", False), ("get_many", True), ("borrow", False), ("borrow", True), ("find", True)]
)
def test_a_record_that_goes_between_two_looks_is_none(method: str, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is given to others after it was read in the index, and before its chain or its bytes are."""
    with make(20, 60, example=picture(0)) as cache:
        cache.put_many([1, 2], [LONG if long else picture(1), picture(2)])
        part, name = (cache._arena, "read") if method == "find" else (cache._records, "locate")
        unpatched = getattr(part, name)

        def replace(*arguments: Any) -> Any:
            monkeypatch.undo()
            found = unpatched(*arguments)
            cache.drop([1])
            cache.put_many([3, 4, 5], [picture(3), LONG, picture(5)])
            return found

        monkeypatch.setattr(part, name, replace)
        if method == "find":
            assert cache.find([1], lambda value: True) is MISS
        elif method == "borrow":
            lent: Any = cache.borrow([1, 2])
            assert (lent.unchanged(0), lent.unchanged(1)) == (False, True)
        else:
            first, second = cache.get_many([1, 2])
            assert (first, second[1]) == (MISS, 2)


def test_a_length_that_cannot_be_is_none() -> None:
    with make(20, 60, example=picture(0)) as cache:
        cache.put_many([1, 2], [LONG, picture(2)])
        cache._index.length[1] = (1 << 32) - 1  # a writer may be changing it just now
        assert cache.get_many([1]) == [MISS]
        assert cache.get_many([2])[0][1] == 2


def test_what_is_lent_is_not_copied_and_outlives_the_cache() -> None:
    cache = make(20, 60, example=picture(0))
    cache.put_many([1], [picture(1)])
    lent: list[Any] = [cache.borrow([1]) for _ in range(2)]
    assert len({one.values[0][0].data_ptr() for one in lent}) == 1
    cache.close()
    assert torch.equal(lent[0].values[0][0], picture(1)[0])
    assert lent[0].unchanged(0)


class Point(NamedTuple):
    """A named tuple, beside whose text its record has no fixed size."""

    id: int
    text: str


def test_what_is_pickled_or_of_a_class_that_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error where the cache is trusted, and a miss where its records came over a network. It is kept."""
    with make(20, 400, name="none") as cache, make(20, 400, name="none", allow_pickle=False) as other:
        cache.put_many([1, 2], [Point(1, "text"), {1, 2, 3}])
        assert (cache.get_many([2]), other.get_many([2])) == ([{1, 2, 3}], [MISS])
        with monkeypatch.context() as patch:
            patch.delattr(sys.modules[__name__], "Point")
            assert other.get_many([1]) == [MISS]
            with pytest.raises(CodecError, match=r"named tuple \S*test_kills\.Point.*: import \S*test_kills where"):
                cache.get_many([1])
        assert cache.get_many([1]) == other.get_many([1]) == [Point(1, "text")]
