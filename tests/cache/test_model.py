"""The cache does what a dict does, but for what it may forget: a Hypothesis state machine against a dict."""

import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cache_tools import MISS, PAGE, SampleCache, capacity_for, crc, problems

NUM_IDS = 40
ALL = np.arange(NUM_IDS)
SIZES: dict[str, Any] = {"uniform": (torch.zeros(PAGE - 32, dtype=torch.uint8), 0), "varied": b"x" * 300}

ids = st.integers(0, NUM_IDS - 1)
batches = st.lists(ids, max_size=12)
uniform = st.integers(0, 250).map(lambda n: (torch.full((PAGE - 32,), n, dtype=torch.uint8), n))
varied = st.sampled_from([0, 1, 200, 255, 256, 3000, 20_000, 60_000]).flatmap(
    lambda size: st.integers(0, 255).map(lambda n: bytes([n]) * size)
)
small = st.sampled_from([None, 0, False, "", (), {}, [], 0.0, b"", np.zeros((0, 3)), {"a": None}, {1, 2}])
pairs = st.lists(st.tuples(ids, uniform | varied | small), max_size=12)
either = st.integers(0, 1)


class Machine(RuleBasedStateMachine):
    """One or two objects on one cache; `self.stored` maps each id to the value that a hit has to give."""

    def __init__(self, policy: str, on_disk: bool, example: Any) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="stallfree-disk-") if on_disk else None
        capacity = capacity_for(20, NUM_IDS, policy=policy, example=example, on_disk=on_disk)
        self.arguments: dict[str, Any] = {"capacity": capacity, "fingerprint": "model", "policy": policy}
        self.arguments |= {"store": self.folder or "memory", "example": example, "persist": True}
        self.caches = [SampleCache(NUM_IDS, **self.arguments)]
        self.stored: dict[int, Any] = {}

    def pick(self, which: int) -> SampleCache:
        return self.caches[which % len(self.caches)]

    @rule(which=either, pairs=pairs)
    def put_many(self, which: int, pairs: list[tuple[int, Any]]) -> None:
        cache, wanted = self.pick(which), [id for id, _ in pairs]
        before = cache.resident(ALL)
        assert cache.put_many(wanted, [value for _, value in pairs]).tolist() == cache.resident(wanted).tolist()
        resident = cache.resident(ALL)
        evicted = [id for id in self.stored if not resident[id]]
        assert not evicted or cache.policy.evicts
        first = dict(reversed(pairs))
        self.stored = {id: value for id, value in self.stored.items() if resident[id]}
        self.stored |= {id: value for id, value in first.items() if resident[id] and not before[id]}

    @rule(which=either, wanted=batches)
    def get_many(self, which: int, wanted: list[int]) -> None:
        before, found = self.caches[0].stats(), self.pick(which).get_many(wanted)
        for id, value in zip(wanted, found, strict=True):
            assert (value is not MISS) == (id in self.stored)
            assert value is MISS or crc(value) == crc(self.stored[id])
            if isinstance(value, tuple) and len(value) == 2:
                value[0].fill_(251)  # a hit is the caller's own
        after, hits = self.caches[0].stats(), sum(value is not MISS for value in found)
        assert (after.hits - before.hits, after.misses - before.misses) == (hits, len(wanted) - hits)

    @rule(which=either, wanted=batches)
    def gather(self, which: int, wanted: list[int]) -> None:
        cache = self.pick(which)
        if cache.structure is None:
            return
        outs = [np.zeros((len(wanted), leaf.nbytes), np.uint8) for leaf in cache.structure.leaves]
        for at, (id, hit) in enumerate(zip(wanted, cache.gather(wanted, outs).tolist(), strict=True)):
            value = self.stored.get(id, MISS)
            assert hit == (isinstance(value, tuple) and len(value) == 2)
            if hit:
                assert (outs[0][at] == value[0].numpy()).all()
                assert outs[1][at].view(np.int64)[0] == value[1]

    @rule(which=either, wanted=batches)
    def drop(self, which: int, wanted: list[int]) -> None:
        self.pick(which).drop(wanted)
        self.stored = {id: value for id, value in self.stored.items() if id not in wanted}

    @rule(which=either)
    def clear(self, which: int) -> None:
        self.pick(which).clear()
        self.stored = {}

    @precondition(lambda self: len(self.caches) == 1)
    @rule()
    def attach_again(self) -> None:
        self.caches.append(SampleCache(NUM_IDS, **self.arguments))

    @precondition(lambda self: len(self.caches) == 2)
    @rule(which=either)
    def leave(self, which: int) -> None:
        self.caches.pop(which).close()

    @rule()
    def reopen(self) -> None:
        while self.caches:
            self.caches.pop().close()
        self.caches = [SampleCache(NUM_IDS, **self.arguments)]

    @invariant()
    def is_sound(self) -> None:
        for cache in self.caches:
            assert problems(cache) == []
            assert set(np.flatnonzero(cache.resident(ALL)).tolist()) == set(self.stored)
        stats = self.caches[0].stats()
        assert (stats.resident_items, stats.damaged) == (len(self.stored), 0)
        assert stats.used_bytes <= stats.capacity_bytes

    def teardown(self) -> None:
        path = self.caches[0].path
        for cache in self.caches:
            cache.close()
        shutil.rmtree(path)
        if self.folder:
            shutil.rmtree(self.folder)


@pytest.mark.parametrize(("policy", "on_disk", "sizes"), [
    ("minio", False, "varied"), ("importance", False, "uniform"), ("lru", True, "varied"), ("lfu", True, "uniform"),
])  # fmt: skip
def test_like_a_dict(policy: str, on_disk: bool, sizes: str) -> None:
    run_state_machine_as_test(
        lambda: Machine(policy, on_disk, SIZES[sizes]),
        settings=settings(max_examples=6, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )
