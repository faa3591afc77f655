"""Readers take no lock: whatever writers do meanwhile, a hit is whole and is the sample that was asked for."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from typing import Any

import numpy as np
import pytest

from cache_tools import is_signed, make, problems, signed
from children import Child
from stallfree.cache import sample_cache as module
from stallfree.cache.records import MISS
from stallfree.cache.sample_cache import SampleCache
from stallfree.ipc.locks import FileLock

NUM_IDS = 48
EXAMPLE = signed(0, 0)


def churn(cache: SampleCache, rounds: int, seed: int, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    for nonce in range(rounds):
        ids = rng.permutation(NUM_IDS)[:6].tolist()
        cache.put_many(ids, [signed(id, seed * rounds + nonce, int(rng.choice(sizes))) for id in ids])


def read(cache: SampleCache, rounds: int, seed: int) -> None:
    """Checks every hit, and that there are hits."""
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(rounds):
        ids = rng.integers(0, NUM_IDS, 12).tolist()
        for id, value in zip(ids, cache.get_many(ids), strict=True):
            assert value is MISS or is_signed(id, value), f"id {id}"
            hits += value is not MISS
    assert hits


@pytest.mark.parametrize(("place", "sizes"), [("memory", "uniform"), ("disk", "varied")])
def test_every_hit_is_right_while_a_writer_churns(place: str, sizes: str, tmp_path: Any) -> None:
    store = "memory" if place == "memory" else str(tmp_path)
    bytes_, example, blocks = ((4064,), EXAMPLE, 12) if sizes == "uniform" else ((4064, 100, 30_000), b"x" * 300, 300)
    with make(NUM_IDS, blocks, policy="lru", example=example, store=store) as cache:
        churn(cache, 3, 9, bytes_)
        children = [Child(churn, cache, 60, seed, bytes_) for seed in (1, 2)]
        children += [Child(read, cache, 80, seed) for seed in (3, 4)]
        assert [child.wait() for child in children] == [0] * 4
        assert problems(cache) == []
        assert cache.stats().damaged == 0
        assert cache.stats().evictions > 100


def gather(cache: SampleCache, rounds: int) -> None:
    rng = np.random.default_rng(5)
    assert cache.structure is not None
    outs = [np.empty((16, leaf.nbytes), np.uint8) for leaf in cache.structure.leaves]
    for _ in range(rounds):
        ids = rng.integers(0, NUM_IDS, 16)
        good = cache.gather(ids, outs)
        for at in np.flatnonzero(good).tolist():
            there, nonce = outs[0][at].view(np.int64)[0], outs[1][at].view(np.int64)[0]
            assert there == ids[at]
            assert (outs[2][at] == signed(int(there), int(nonce))[2].numpy()).all()


def test_gather_while_a_writer_churns() -> None:
    with make(NUM_IDS, 12, policy="lru", example=EXAMPLE) as cache:
        children = [Child(churn, cache, 100, 1, (4064,)), Child(gather, cache, 200)]
        assert [child.wait() for child in children] == [0, 0]


def test_threads_share_one_object() -> None:
    errors: list[BaseException] = []

    def run(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            errors.append(error)

    with make(NUM_IDS, 12, policy="lru", example=EXAMPLE) as cache:
        churn(cache, 3, 9, (4064,))
        threads = [threading.Thread(target=run, args=(churn, cache, 40, seed, (4064,))) for seed in (1, 2)]
        threads += [threading.Thread(target=run, args=(read, cache, 40, seed)) for seed in (3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert problems(cache) == []
        stats = cache.stats()
        assert stats.hits + stats.misses == 2 * 40 * 12


def stop_while_holding(cache: SampleCache) -> None:
    with FileLock(cache.path / "lock").hold(10, "the test"):
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_writer_costs_puts_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    with make(NUM_IDS, 12, policy="lru", example=EXAMPLE) as cache:
        assert cache.put_many([1, 2], [signed(1, 0), signed(2, 0)]).all()
        writer = Child(stop_while_holding, cache)
        writer.wait_until_stopped()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for id in range(3, 6):
                assert not cache.put_many([id], [signed(id, 0)]).any()
        assert len(caught) == 1
        assert "storing in the cache" in str(caught[0].message)
        assert "another process (stopped?) held" in str(caught[0].message)
        assert is_signed(1, cache.get_many([1])[0])
        assert Child(read, cache, 5, 1).wait() == 0  # another process still joins, reads and counts
        stats = cache.stats()
        assert stats.rejected == 3
        assert (stats.hits > 1, stats.hits + stats.misses) == (True, 1 + 5 * 12)
        writer.signal(signal.SIGCONT)
        assert writer.wait() == 0
        assert cache.put_many([20], [signed(20, 0)]).all(), "samples are stored again at once"


def test_attaching_does_not_wait_for_a_stopped_writer() -> None:
    with make(NUM_IDS, 12, policy="lru", example=EXAMPLE, name="stopped") as cache:
        writer = Child(stop_while_holding, cache)
        writer.wait_until_stopped()
        with SampleCache(NUM_IDS, capacity=0, fingerprint="data", policy="lru", name="stopped") as other:
            assert other.get_many([1]) == [MISS]
        writer.signal(signal.SIGCONT)
        assert writer.wait() == 0
