"""Which record goes: each policy by hand, and against a plain model that sorts all scores anew each time."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
from cache_tools import PAGE, make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stallfree.cache import POLICIES, SampleCache
from stallfree.cache.policies import Policy, Victims, make_policy
from stallfree.errors import InputError

BLOCK = b"x" * 2000  # with its description about as large as the blocks that are chosen for it


def small(policy: str, blocks: int, num_ids: int = 100) -> SampleCache:
    """A cache of exactly `blocks` records of 4 KiB."""
    return make(num_ids, blocks, policy=policy, example=np.zeros(PAGE, np.uint8))


def record(id: int) -> np.ndarray:
    return np.full(PAGE, id % 256, np.uint8)


def residents(cache: SampleCache) -> list[int]:
    return np.flatnonzero(cache.resident(np.arange(cache.num_ids))).tolist()


# Three places. A number puts that id (one that is there is just asked for); what is there afterwards follows.
BY_HAND = {
    "minio": [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3]), (1, [1, 2, 3]), (5, [1, 2, 3])],
    "fifo": [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (1, [1, 2, 3]), (4, [2, 3, 4]), (2, [2, 3, 4]), (5, [3, 4, 5])],
    "lru": [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (1, [1, 2, 3]), (4, [1, 3, 4]), (3, [1, 3, 4]), (5, [3, 4, 5])],
    # 3 and 4 have been used once, 1 and 2 twice or more; the newcomer counts as used once
    "lfu": [(1, [1]), (1, [1]), (2, [1, 2]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (4, [1, 2, 4]),
            (4, [1, 2, 4]), (1, [1, 2, 4]), (5, [1, 4, 5])],
}  # fmt: skip


@pytest.mark.parametrize("policy", sorted(BY_HAND))
def test_by_hand(policy: str) -> None:
    with small(policy, 3) as cache:
        for step, (id, expected) in enumerate(BY_HAND[policy]):
            if residents(cache).count(id):
                cache.get(id)
            else:
                cache.put(id, record(id))
            assert residents(cache) == expected, f"step {step}"


def test_minio_rejects_and_counts_what_does_not_fit() -> None:
    with small("minio", 3) as cache:
        assert cache.put_many(range(5), [record(id) for id in range(5)]).tolist() == [True] * 3 + [False] * 2
        assert not cache.put(7, record(7))
        assert (cache.stats().rejected, cache.stats().evictions) == (3, 0)


@pytest.mark.parametrize("policy", ["fifo", "lru", "lfu", "random"])
def test_evictions_are_counted(policy: str) -> None:
    with small(policy, 3) as cache:
        for id in range(10):
            assert cache.put(id, record(id))
        assert (cache.stats().evictions, cache.stats().rejected) == (7, 0)


@pytest.mark.parametrize("policy", ["fifo", "lru", "lfu", "random"])
def test_a_batch_larger_than_the_cache(policy: str) -> None:
    with small(policy, 4) as cache:
        assert cache.put_many(range(30), [record(id) for id in range(30)]).sum() == 4
        assert cache.check() == []
        values = cache.get_many(residents(cache))
        assert [int(value[0]) for value in values] == residents(cache)


class Naive:
    """The same policies in the simplest form: every score is looked at each time."""

    def __init__(self, policy: str, blocks: int) -> None:
        self.policy, self.blocks = policy, blocks
        self.score: dict[int, float] = {}
        self.size: dict[int, int] = {}
        self.clock = 0

    def put(self, id: int, size: int) -> None:
        if id in self.score or size > self.blocks:
            return
        while sum(self.size.values()) + size > self.blocks:
            self.forget(min(self.score, key=lambda one: (self.score[one], one)))
        self.clock += 1
        self.score[id], self.size[id] = (1 if self.policy == "lfu" else self.clock), size

    def forget(self, id: int) -> None:
        del self.score[id], self.size[id]

    def use(self, ids: list[int]) -> None:
        for id in ids:
            if id in self.score:
                self.clock += 1
                if self.policy == "lru":
                    self.score[id] = self.clock
                elif self.policy == "lfu":
                    self.score[id] += 1


ids = st.integers(0, 99)
steps = st.lists(
    st.tuples(st.just("put"), ids, st.integers(1, 6))
    | st.tuples(st.just("use"), st.lists(ids, max_size=8), st.none())
    | st.tuples(st.just("drop"), ids, st.none()),
    max_size=300,
)
many = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("varied", [False, True], ids=["uniform", "varied"])
@pytest.mark.parametrize("policy", ["fifo", "lru", "lfu"])
@many
@given(steps)
def test_decides_like_sorting_all_scores(policy: str, varied: bool, steps: list) -> None:
    example = BLOCK if varied else np.zeros(PAGE, np.uint8)
    with make(100, 40, policy=policy, example=example, name=f"naive-{policy}-{os.getpid()}") as cache:
        naive = Naive(policy, cache.meta.num_blocks)
        for what, argument, size in steps:
            if what == "put":
                assert isinstance(argument, int)
                cache.put(argument, b"x" * (size * 256 - 100) if varied else record(argument))
                naive.put(argument, size if varied else 1)
            elif what == "use":
                cache.get_many(argument)
                naive.use(argument)
            elif argument in naive.score:
                cache.drop([argument])
                naive.forget(argument)
            assert residents(cache) == sorted(naive.score)
        assert cache.check() == []


@pytest.mark.parametrize("policy", ["fifo", "lru", "lfu"])
def test_decides_like_sorting_all_scores_in_the_long_run(policy: str) -> None:
    rng = np.random.default_rng(1)
    with small(policy, 120, num_ids=300) as cache:
        naive = Naive(policy, cache.meta.num_blocks)
        for _ in range(4000):
            id = int(rng.zipf(1.3)) % 300
            if rng.random() < 0.8:
                cache.put(id, record(id))
                naive.put(id, 1)
            else:
                wanted = rng.integers(0, 300, 8).tolist()
                cache.get_many(wanted)
                naive.use(wanted)
            assert residents(cache) == sorted(naive.score)
        assert cache.check() == []
        assert cache.stats().evictions > 500


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_lru_hits_what_theory_says(share: float) -> None:
    """Each epoch another permutation: lru hits c + (1 - c) ln(1 - c) of it, where c is the share that fits."""
    num_ids, batch, epochs = 4096, 16, 14
    rng = np.random.default_rng(0)
    example = np.zeros(64, np.uint8)
    with make(num_ids, int(share * num_ids), policy="lru", example=example) as cache:
        room = cache.meta.num_blocks / num_ids
        outs = [np.empty((batch, 64), np.uint8)]
        for epoch in range(epochs):
            if epoch == 4:
                before = cache.stats()
            for wanted in rng.permutation(num_ids).reshape(-1, batch):
                missed = wanted[~cache.gather(wanted, outs)]
                cache.put_many(missed, [example] * len(missed))
        after = cache.stats()
    hits, asked = after.hits - before.hits, (epochs - 4) * num_ids
    assert after.hits + after.misses - before.hits - before.misses == asked
    assert hits / asked == pytest.approx(room + (1 - room) * math.log(1 - room), abs=0.01)


def victims_of(policy: Policy, num_ids: int) -> tuple[Victims, np.ndarray]:
    state = SimpleNamespace(
        victim_ids=np.zeros(64, np.uint32),
        victim_scores=np.zeros(64),
        victims_limit=np.zeros(2),
        first=np.ones(num_ids, np.uint32),
    )
    return Victims(policy, state, np.zeros(2, np.int64)), np.zeros(num_ids)


def test_random_takes_each_with_the_same_probability() -> None:
    num_ids, rounds = 200, 20_000
    policy = make_policy("random")
    victims, score = victims_of(policy, num_ids)
    policy.entered(score, np.arange(num_ids), 0)
    times = np.zeros(num_ids)
    for tick in range(rounds):
        victim = victims.choose(1, score, tick)
        times[victim] += 1
        policy.entered(score, victim, tick)  # its place goes to a newcomer of the same number
        victims.entered(score, victim)
    expected = rounds / num_ids
    chi_square = ((times - expected) ** 2 / expected).sum()
    assert chi_square < 270  # 199 degrees of freedom: above that in one case of a thousand


def test_newcomers_do_not_go_before_the_next_choice_when_random() -> None:
    with small("random", 32) as cache:
        for id in range(32):
            cache.put(id, record(id))
        cache.put(50, record(50))
        cache.put(51, record(51))
        assert cache.resident([50, 51]).all()


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(InputError, match="policy='lru2' is unknown: use one of fifo, lfu"):
        make_policy("lru2")
    assert set(POLICIES) == {"minio", "fifo", "lru", "lfu", "random"}
