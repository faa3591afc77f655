"""Which record is evicted: each policy by hand, and against a model that sorts all scores each time."""

import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_tools import PAGE, SampleCache, make, problems
from children import Child
from stallfree.analysis.replay import SimulatedCache
from stallfree.cache.policies import Victims, make_policy, next_uses
from stallfree.errors import InputError

BLOCK = b"x" * 2000  # with its description about as large as the blocks that are chosen for it


def small(policy: str, blocks: int, num_ids: int = 100) -> SampleCache:
    return make(num_ids, blocks, policy=policy, example=np.zeros(PAGE, np.uint8))


def put(cache: SampleCache, *ids: int) -> list[bool]:
    return cache.put_many(ids, [np.full(PAGE, id % 256, np.uint8) for id in ids]).tolist()  # type: ignore[no-any-return]


def residents(cache: SampleCache) -> list[int]:
    return np.flatnonzero(cache.resident(np.arange(cache.num_ids))).tolist()


# Three places. A number puts that id (one that is there is just asked for); what is there afterwards follows.
BY_HAND = {
    "minio": [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3]), (1, [1, 2, 3]), (5, [1, 2, 3])],
    "fifo": [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (1, [1, 2, 3]), (4, [2, 3, 4]), (2, [2, 3, 4]), (5, [3, 4, 5])],
    "lru": [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (1, [1, 2, 3]), (4, [1, 3, 4]), (3, [1, 3, 4]), (5, [3, 4, 5])],
    # 3 and 4 have been used once, 1 and 2 twice or more; the newcomer counts as used once; a list is one request
    "lfu": [(1, [1]), (1, [1]), (2, [1, 2]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (4, [1, 2, 4]),
            (4, [1, 2, 4]), (1, [1, 2, 4]), (5, [1, 4, 5]), ([5] * 4, [1, 4, 5]), (6, [4, 5, 6])],
}  # fmt: skip


@pytest.mark.parametrize("policy", sorted(BY_HAND))
def test_by_hand(policy: str) -> None:
    with small(policy, 3) as cache:
        for step, (id, expected) in enumerate(BY_HAND[policy]):
            asked = id if isinstance(id, list) else [id]
            if asked[0] in residents(cache):
                cache.get_many(asked)
            else:
                put(cache, asked[0])
            assert residents(cache) == expected, f"step {step}"
        assert cache.stats().evictions == len({id for _, there in BY_HAND[policy] for id in there}) - 3
        assert cache.stats().rejected == (2 if policy == "minio" else 0)


def test_importance_by_hand() -> None:
    with small("importance", 3) as cache:
        cache.set_scores([1, 2, 3, 4, 5, 6], [1.0, 2.0, 3.0, 2.5, 1.0, 9.0])  # all before they come
        assert put(cache, 1, 2, 3) == [True] * 3
        assert put(cache, 5) == [False]  # as important as the least important: not above it
        assert put(cache, 4) == [True]
        assert residents(cache) == [2, 3, 4]
        cache.set_scores([3, 5], [0.5, 2.25])  # one falls, one that is not there rises
        assert put(cache, 5) == [True]
        assert residents(cache) == [2, 4, 5]
        assert Child(cache.set_scores, [2], [7.0]).wait() == 0  # any process may give scores
        assert put(cache, 7, 1, 6) == [False, False, True]
        assert residents(cache) == [2, 4, 6]
        assert cache.get_many([2, 4, 6])[2][0] == 6
        assert (cache.stats().evictions, cache.stats().rejected) == (3, 3)
        assert problems(cache) == []


def test_residents_that_the_queue_has_no_room_for_are_not_passed_over() -> None:
    """The queue has 64 entries. It is filled with 48, of which 20 insertions push out the last."""
    scores = np.arange(400.0)
    with small("importance", 150, 400) as cache:
        cache.set_scores(range(400), scores)
        put(cache, *range(150))
        expected = set(range(150))
        for new in range(200, 280):
            if new in (201, 212):
                changed = range(100, 120) if new == 201 else [149]
                scores[changed] = np.linspace(10.1, 10.9, 20) if new == 201 else 46.5
                cache.set_scores(changed, scores[changed])
            expected.remove(min(expected, key=scores.__getitem__))
            expected.add(new)
            put(cache, new)
            assert residents(cache) == sorted(expected)


def test_who_is_chosen_is_chosen_once_although_its_score_fell_in_the_queue() -> None:
    """Its old entry stands there too. Taken twice, its place would be given to two newcomers."""
    queue, score = np.zeros(40, np.complex128), np.arange(40.0)
    state = SimpleNamespace(victims=queue, victims_limit=np.zeros(1, np.complex128), first=np.ones(40, np.uint32))
    victims = Victims(state, np.zeros(2, np.int64))
    assert victims.choose(1, score).tolist() == [0]  # they are queued
    victims.give_back(score, np.array([0]))
    score[15] = -1.0
    victims.entered(score, np.array([15]))
    state.first[[0, 1, 2, 3, 4, *range(6, 14)]] = 0  # so that four cannot be found in one look
    assert victims.choose(4, score).tolist() == [15, 5, 14, 16]


def test_scores_that_cannot_be_used() -> None:
    with small("importance", 2) as cache:
        for ids, scores, message in (([1, 2], [1.0], "2 ids and the scores"), ([1], [math.nan], "no NaN")):
            with pytest.raises(InputError, match=message):
                cache.set_scores(ids, scores)
    with small("lru", 2) as cache, pytest.raises(InputError, match="'lru', which computes its own scores"):
        cache.set_scores([1], [1.0])


class Naive:
    """The same policies in the simplest form: every score is looked at each time."""

    def __init__(self, policy: str, blocks: int) -> None:
        self.policy, self.blocks = policy, blocks
        self.score: dict[int, float] = {}
        self.size: dict[int, int] = {}
        self.given: dict[int, float] = {}
        self.clock = 0

    def put(self, id: int, size: int) -> None:
        if id in self.score or size > self.blocks:
            return
        going: list[int] = []
        while sum(self.size.values()) - sum(self.size[one] for one in going) + size > self.blocks:
            going.append(min(self.score.keys() - set(going), key=lambda one: (self.score[one], one)))
        if self.policy == "importance" and any(self.score[one] >= self.given.get(id, 0) for one in going):
            return
        for one in going:
            self.forget(one)
        self.clock += 1
        self.score[id] = {"lfu": 1, "importance": self.given.get(id, 0)}.get(self.policy, self.clock)
        self.size[id] = size

    def give(self, id: int, score: float) -> None:
        self.given[id] = score
        if id in self.score:
            self.score[id] = score

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


@pytest.mark.parametrize("varied", [False, True], ids=["uniform", "varied"])
@pytest.mark.parametrize("policy", ["fifo", "lru", "lfu", "importance"])
def test_decides_like_sorting_all_scores(policy: str, varied: bool) -> None:
    rng, num_ids = np.random.default_rng(1), 200
    with make(num_ids, 80, policy=policy, example=BLOCK if varied else np.zeros(PAGE, np.uint8)) as cache:
        naive = Naive(policy, cache.meta.num_blocks)
        for step in range(350):
            ids = rng.integers(0, num_ids, 6).tolist()
            chance = rng.random()
            if policy == "importance" and chance < 0.5:
                scores = rng.random(6) if step % 2 else rng.integers(0, 4, 6) / 4
                cache.set_scores(ids, scores)
                for id, score in zip(ids, scores.tolist(), strict=True):
                    naive.give(id, score)
            elif chance < 0.65:
                size = int(rng.integers(1, 7)) if varied else 1
                cache.put_many([ids[0]], [b"x" * (size * 256 - 100) if varied else np.zeros(PAGE, np.uint8)])
                naive.put(ids[0], size)
            elif chance < 0.75 and policy == "importance":
                cache.put_many(ids, [b"x" * 100 if varied else np.zeros(PAGE, np.uint8)] * 6)
                absent = [id for id in dict.fromkeys(ids) if id not in naive.score]
                for id in sorted(absent, key=lambda one: -naive.given.get(one, 0)):
                    naive.put(id, 1)
            elif chance < 0.97:
                cache.get_many(ids + ids[:2])
                naive.use(ids + ids[:2])
            elif ids[0] in naive.score:
                cache.drop(ids[:1])
                naive.forget(ids[0])
            assert residents(cache) == sorted(naive.score)
        assert problems(cache) == []
        assert cache.stats().evictions > 50


def test_random_takes_the_oldest_as_often_as_the_youngest() -> None:
    """Newcomers only: each victim's position by age among the residents."""
    batch, size, num_ids, ranks, at = 3, 40, 800, list[int](), 0
    with tempfile.TemporaryDirectory() as folder:
        cache = SimulatedCache(Path(folder), num_ids, make_policy("random"), size, None)
        there: list[int] = []  # the oldest first
        while cache.evictions < 3000:
            new = [id for id in ((at + step) % num_ids for step in range(batch)) if id not in there]
            at += batch
            cache.use(np.array(new, np.int64))
            left = set(cache.resident().tolist())
            ranks += [rank for rank, id in enumerate(there) if id not in left]
            there = [id for id in there if id in left] + new
    times, expected = np.bincount(ranks, minlength=size), len(ranks) / size
    assert len(times) == size
    assert ((times - expected) ** 2 / expected).sum() < 73  # 39 degrees of freedom: above it once in a thousand cases


@given(st.lists(st.lists(st.integers(0, 9), max_size=15), max_size=4))
def test_next_uses(epochs: list[list[int]]) -> None:
    flat = [id for ids in epochs for id in ids]
    expected = [next((later for later in range(at + 1, len(flat)) if flat[later] == id), np.inf)
                for at, id in enumerate(flat)]  # fmt: skip
    found = next_uses([np.array(ids, np.int64) for ids in epochs], 10)
    assert [len(uses) for uses in found] == [len(ids) for ids in epochs]
    assert [use for uses in found for use in uses.tolist()] == expected
