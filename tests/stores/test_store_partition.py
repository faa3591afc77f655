"""The sample cache over several nodes, as each of them sees it, beside a dict."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from nodes import Office, offices, parts, settle, show, stamp, until
from redis_servers import needs_server

from children import Child
from stallfree import CachedDataset, CacheLoader, CapacityError, InputError, RedisStore
from stallfree.cache import MISS
from stallfree.errors import CodecError
from stallfree.pipeline.codec import encode
from stallfree.stores.partition import PartitionedCache
from stallfree.stores.spread import owners
from stallfree.stores.values import data_key

pytestmark = needs_server

NUM = 60
COUNTS = [1, 2, 3]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Office]]:
    with offices(tmp_path_factory.mktemp("partition"), 3) as made:
        yield made


@pytest.fixture
def two(three: list[Office]) -> list[Office]:
    return three[:2]


def sample(id: int, salt: int = 0) -> Any:
    return stamp(id, salt), id


# --- an independent model -------------------------------------------------------------------------------------------


class Walk:
    """Random steps on a cache over several nodes, each compared with a dict."""

    def __init__(self, caches: list[PartitionedCache], seed: int) -> None:
        self.caches, self.chance = caches, random.Random(seed)
        self.model: dict[int, Any] = {}

    def run(self, steps: int) -> None:
        kinds = [self.put, self.put, self.get, self.get, self.get, self.put_known, self.clear, self.drop, self.look]
        weights = [8, 8, 8, 8, 8, 3, 1, 3, 4]
        for _ in range(steps):
            (step,) = self.chance.choices(kinds, weights)
            step(self.chance.choice(self.caches))
            assert settle(self.caches) == len(self.model)

    def ids(self) -> list[int]:
        return [self.chance.randrange(NUM) for _ in range(self.chance.choice([0, 1, 1, 3, 20]))]

    def put(self, cache: PartitionedCache) -> None:
        """Varied samples; of an id that is twice in a batch the first counts, and one that is there stays."""
        ids = self.ids()
        values = [self.value(id) for id in ids]
        assert cache.put_many(ids, values).all()
        for id, value in zip(ids, values, strict=True):
            self.model.setdefault(id, value)

    def value(self, id: int) -> Any:
        stamped = sample(id, self.chance.randrange(9))
        return self.chance.choice([stamped, stamped, None, 0, "", {"id": id}, [id] * (id % 5), b"x"])

    def put_known(self, cache: PartitionedCache) -> None:
        if self.model:
            id = self.chance.choice(list(self.model))
            assert cache.put(id, "another")

    def get(self, cache: PartitionedCache) -> None:
        ids = self.ids()
        found = cache.get_many(ids)
        assert len(found) == len(ids)
        for id, value in zip(ids, found, strict=True):
            assert same(value, self.model.get(id, MISS)), (id, value)

    def clear(self, cache: PartitionedCache) -> None:
        cache.clear()
        self.model.clear()

    def drop(self, cache: PartitionedCache) -> None:
        """Each node drops its own."""
        ids = self.ids()
        cache.drop(ids)
        for id in ids:
            if cache.owns(id):
                self.model.pop(id, None)

    def look(self, cache: PartitionedCache) -> None:
        ids = self.ids()
        there = [id in self.model and cache.owns(id) for id in ids]
        assert cache.resident(ids).tolist() == there


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool(one.equal(other))
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return one is other if one is MISS else bool(one == other)


@pytest.mark.parametrize("count", COUNTS)
def test_several_nodes_hold_what_a_dict_holds(count: int, three: list[Office]) -> None:
    with parts(three[:count], NUM) as caches:
        Walk(caches, seed=count).run(60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", COUNTS)
def test_several_nodes_hold_what_a_dict_holds_in_long_walks(count: int, seed: int, three: list[Office]) -> None:
    with parts(three[:count], NUM) as caches:
        Walk(caches, seed=100 + seed).run(600)


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_values_come_in_the_order_of_the_ids_and_a_miss_is_marked(count: int, three: list[Office]) -> None:
    chance = random.Random(count)
    with parts(three[:count], NUM) as caches:
        known = chance.sample(range(NUM), 40)
        caches[0].put_many(known, [sample(id) for id in known])
        settle(caches)
        for cache in caches:
            ids = chance.sample(range(NUM), NUM)
            expected = [id if id in known else None for id in ids]
            assert show(cache.get_many(ids)) == expected
            assert show([cache.get(id) for id in ids]) == expected
            assert show(cache.get_many(np.array(ids, np.uint16))) == expected
            assert cache.get_many([]) == []


def test_each_sample_lies_once_with_its_owner_and_is_counted_where_it_is_read(three: list[Office]) -> None:
    with parts(three, NUM) as caches:
        caches[1].put_many(range(NUM), [sample(id) for id in range(NUM)])
        settle(caches)
        names = [f"node{number}" for number in range(3)]
        expected = owners(NUM, names)
        for me, cache in enumerate(caches):
            assert cache.owner(range(NUM)).tolist() == expected.tolist()
            assert cache.resident(range(NUM)).tolist() == (expected == me).tolist()
            assert [cache.owns(id) for id in range(NUM)] == (expected == me).tolist()
            away = cache.away(np.arange(NUM))
            assert sorted(int(id) for ids in away for id in ids) == np.flatnonzero(expected != me).tolist()
        caches[2].get_many(range(NUM))
        caches[2].drop(range(NUM))
        caches[2].get_many(range(NUM))
        own, stats = int((expected == 2).sum()), caches[2].stats()
        assert (stats.hits, stats.misses, stats.other_hits) == (2 * NUM - own, own, 2 * (NUM - own))
        assert all(cache.stats().hits == 0 == cache.stats().misses for cache in caches[:2])


def test_none_and_falsy_samples_are_samples(two: list[Office]) -> None:
    falsy = [None, 0, 0.0, False, "", b"", (), [], {}, torch.zeros(0), torch.tensor(0), np.zeros((0, 3))]
    with parts(two, len(falsy)) as caches:
        caches[0].put_many(range(len(falsy)), falsy)
        assert settle(caches) == len(falsy)
        for cache in caches:
            for value, expected in zip(cache.get_many(range(len(falsy))), falsy, strict=True):
                assert type(value) is type(expected)
                assert repr(value) == repr(expected)


def test_an_id_that_is_twice_in_a_batch_gives_two_samples(two: list[Office]) -> None:
    ids = [5, 6, 5, 7, 5, 6, 6]
    with parts(two, NUM) as caches:
        caches[0].put_many(range(NUM), [sample(id) for id in range(NUM)])
        settle(caches)
        for cache in caches:
            for at in range(len(ids)):
                values = cache.get_many(ids)
                values[at][0][:] = -1
                assert show(values[:at] + values[at + 1 :]) == ids[:at] + ids[at + 1 :]
            assert show(cache.get_many(ids)) == ids


def test_samples_that_are_kept_stay_as_they_are(two: list[Office]) -> None:
    """Their memory is used again, but not before the last of them is gone."""
    with parts(two, NUM) as caches:
        caches[0].put_many(range(NUM), [sample(id) for id in range(NUM)])
        settle(caches)
        kept = []
        for number in range(200):
            values = caches[number % 2].get_many(range(number % 7, NUM, 3))
            kept.append(values.pop(number % len(values))[0])
            assert all(int(numbers[0]) >> 16 < NUM for numbers in kept)
        for numbers in kept:
            assert numbers.equal(stamp(int(numbers[0]) >> 16))


@pytest.mark.parametrize("ids", [[NUM], [-1], ["x"], [[1]], [0.5], None])
def test_what_is_no_list_of_ids_is_one_clear_error(ids: Any, two: list[Office]) -> None:
    with parts(two, NUM) as (cache, _):
        for call in (cache.get_many, cache.resident, cache.owner, cache.drop):
            with pytest.raises(InputError, match=r"give a sequence of integers|outside of the data set"):
                call(ids)
        with pytest.raises(InputError):
            cache.put_many(ids, [0])
    with parts(two, NUM) as (cache, _), pytest.raises(InputError, match="2 ids and 1 values"):
        cache.put_many([1, 2], [0])


def test_processes_of_a_node_and_copies_of_it_read_and_write_alike(two: list[Office]) -> None:
    with parts(two, NUM) as caches:

        def write(first: int) -> None:
            cache = caches[first % 2]
            assert cache.put_many(range(first, NUM, 4), [sample(id) for id in range(first, NUM, 4)]).all()

        children = [Child(write, first) for first in range(4)]
        assert [child.wait() for child in children] == [0] * 4
        assert settle(caches) == NUM
        for cache in caches:
            with pickle.loads(pickle.dumps(cache)) as copy:
                assert show(copy.get_many(range(NUM))) == list(range(NUM))
                assert copy.stats().hits == cache.stats().hits == NUM
    with pytest.raises(InputError, match="closed"):
        caches[0].get_many([1])
    assert caches[0].stats().hits == NUM


# --- storing --------------------------------------------------------------------------------------------------------


def test_two_data_sets_of_102_items_over_10_passes(three: list[Office]) -> None:
    """Bagua's own expectation of its Cached Dataset."""
    order = random.Random(0)
    with parts(three, 102, name="one") as one, parts(three, 102, name="two") as two:
        for caches, salt, keys in ((one, 1, 102), (two, 2, 204)):
            loads: list[int] = []
            for _ in range(10):
                ids = order.sample(range(102), 102)
                for start in range(0, 102, 17):
                    cache, some = order.choice(caches), ids[start : start + 17]
                    found = cache.get_many(some)
                    missing = [id for id, value in zip(some, found, strict=True) if value is MISS]
                    cache.put_many(missing, [sample(id, salt) for id in missing])
                    loads += missing
                    for id, value in zip(some, found, strict=True):
                        assert value is MISS or value[0].equal(stamp(id, salt))
                settle(caches)
            assert sorted(loads) == list(range(102))
            assert settle(one) + settle(two) == keys
        one[1].clear()
        assert (settle(one), settle(two)) == (0, 102)
        assert show(two[0].get_many(range(102))) == list(range(102))


def test_data_sets_of_one_name_are_never_mixed(two: list[Office]) -> None:
    with parts(two, NUM, fingerprint="a") as a, parts(two, NUM, fingerprint="b") as b:
        a[0].put_many(range(0, NUM, 2), [sample(id, 1) for id in range(0, NUM, 2)])
        b[1].put_many(range(0, NUM, 3), [sample(id, 2) for id in range(0, NUM, 3)])
        assert (settle(a), settle(b)) == (NUM // 2, NUM // 3)
        for caches, salt, step in ((a, 1, 2), (b, 2, 3)):
            for cache in caches:
                values = cache.get_many(range(NUM))
                assert [value is MISS for value in values] == [id % step != 0 for id in range(NUM)]
                assert all(values[id][0].equal(stamp(id, salt)) for id in range(0, NUM, step))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_full_store_never_evicts_and_hits_what_it_holds(share: float, two: list[Office]) -> None:
    count, size = 800, 512
    capacity = int(count / 2 * share * size * 8) + 100_000
    example = stamp(0, size=size)
    with parts(two, count, capacity=capacity, example=example) as caches:
        caches[0].put_many(range(0, count, 2), [stamp(id, size=size) for id in range(0, count, 2)])
        caches[1].put_many(range(1, count, 2), [stamp(id, size=size) for id in range(1, count, 2)])
        held = settle(caches)
        assert held >= 0.95 * share * count
        before = [value is not MISS for value in caches[0].get_many(range(count))]
        assert sum(before) == held
        for cache in caches:
            cache.put_many(range(count), [stamp(id, size=size) for id in range(count)])
            settle(caches)
            hits = cache.stats().hits
            there = [value is not MISS for value in cache.get_many(range(count))]
            assert there == before
            assert cache.stats().hits - hits == held
        for cache in caches:
            stats = cache.stats()
            assert stats.evictions == 0
            assert stats.used_bytes <= stats.capacity_bytes <= capacity


def test_a_full_node_is_handed_nothing_until_it_has_room(two: list[Office]) -> None:
    count = 800
    with parts(two, count, capacity="150KiB", example=stamp(0, size=128)) as caches:
        mine = np.flatnonzero(caches[0].owner(range(count)) == 1)
        values = [stamp(id, size=128) for id in mine.tolist()]
        caches[0].put_many(mine, values)
        settle(caches)
        rejected = caches[1].stats().rejected
        held = caches[1].stats().resident_items
        assert 0 < held < len(mine)
        caches[0].get_many(mine[:3])  # it hears that the other is full
        for _ in range(3):
            assert not caches[0].put_many(mine[held:], values[held:]).any()
        settle(caches)
        assert caches[1].stats().rejected == rejected
        caches[1].drop(mine)
        caches[0].get_many(mine[:3])
        assert caches[0].put_many(mine[:5], values[:5]).all()
        settle(caches)
        assert caches[1].resident(mine[:5]).all()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_what_others_read_counts_as_used(policy: str, two: list[Office]) -> None:
    with parts(two, 800, capacity="150KiB", example=stamp(0, size=128), policy=policy) as caches:
        mine = np.flatnonzero(caches[1].owner(range(800)) == 1)
        often = mine[:10]
        caches[1].put_many(often, [stamp(id, size=128) for id in often.tolist()])
        for start in range(10, 300, 20):
            caches[0].get_many(often)
            some = mine[start : start + 20]
            caches[1].put_many(some, [stamp(id, size=128) for id in some.tolist()])
        assert caches[1].stats().evictions > 0
        assert caches[1].resident(often).all()


def test_a_server_without_room_pauses_its_node_with_one_warning(tmp_path: Path) -> None:
    with offices(tmp_path, 2) as two, parts(two, NUM) as caches:
        mine = np.flatnonzero(caches[0].owner(range(NUM)) == 1).tolist()
        client = two[1].client()
        client.config_set("maxmemory", 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not any(caches[0].put(id, sample(id)) for id in mine[:5])
        assert ["no room for more samples" in str(warning.message) for warning in caught] == [True]
        assert not client.exists("post")
        client.config_set("maxmemory", 0)
        client.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            until(lambda: caches[0].put(mine[0], sample(mine[0])), "it is handed samples again")
        settle(caches)
        assert show(caches[0].get_many(mine[:2])) == [mine[0], None]


def test_samples_that_only_pickle_can_hold_are_refused_unless_pickles_are_allowed(two: list[Office]) -> None:
    with parts(two, NUM) as caches:
        for id in range(4):
            with pytest.raises(CodecError, match="Odd"):
                caches[0].put(id, Odd(id))
        assert settle(caches) == 0
    with parts(two, NUM, allow_pickle=True) as caches:
        caches[0].put_many(range(4), [Odd(id) for id in range(4)])
        assert settle(caches) == 4
        assert [value.id for value in caches[1].get_many(range(4))] == [0, 1, 2, 3]


def test_named_tuples_whose_class_is_not_imported_are_misses(
    two: list[Office], monkeypatch: pytest.MonkeyPatch
) -> None:
    with parts(two, NUM) as caches:
        caches[0].put_many(range(4), [Pair(id, str(id)) for id in range(4)])
        assert settle(caches) == 4
        assert caches[1].get_many(range(4))[2] == Pair(2, "2")
        monkeypatch.delattr(sys.modules[__name__], "Pair")
        assert show(caches[1].get_many(range(4))) == [None] * 4


class Pair(NamedTuple):
    """A named tuple."""

    id: int
    text: str


class Odd:
    """A class that the codec does not know."""

    def __init__(self, id: int) -> None:
        self.id = id


def test_samples_handed_in_before_the_owner_has_its_part_are_kept(two: list[Office]) -> None:
    key = data_key("late", "f")
    mine = np.flatnonzero(owners(NUM, ["node0", "node1"]) == 1).tolist()
    office = two[1].post()
    assert office.hand_in(key, mine, [encode(sample(id)) for id in mine]) is True
    assert office.num_keys(key) == 0
    office.close()
    with parts(two, NUM, name="late") as caches:
        until(lambda: caches[0].num_keys() == len(mine), "they are put away")
        assert show(caches[0].get_many(mine)) == mine


def test_the_owner_learns_what_was_handed_in_before_it_looks(two: list[Office]) -> None:
    with parts(two, NUM) as caches:
        mine = np.flatnonzero(caches[0].owner(range(NUM)) == 1)
        for id in mine[:-1].tolist():
            assert caches[0].put(id, sample(id))
            assert caches[1].settle(np.array([id, mine[-1]])).tolist() == [False, True]


def test_jobs_of_other_nodes_that_share_a_part_have_owners_of_their_own(two: list[Office]) -> None:
    with parts(two, NUM) as caches:
        caches[0].put_many(range(NUM), [sample(id) for id in range(NUM)])
        settle(caches)
        with pickle.loads(pickle.dumps(caches[0].local)) as local:
            alone = PartitionedCache(local, ["node0"], 0, [], caches[0].key)
            found = show(alone.get_many(range(NUM)))
            assert [id for id in found if id is not None] == np.flatnonzero(caches[0].resident(range(NUM))).tolist()
            assert alone.owner(range(NUM)).tolist() == [0] * NUM
        assert show(caches[0].get_many(range(NUM))) == list(range(NUM))


# --- the store ------------------------------------------------------------------------------------------------------


def test_data_sets_together_take_no_more_than_the_store_has() -> None:
    for cluster_mode in (True, False):
        with RedisStore(capacity_per_node="16MiB", cluster_mode=cluster_mode, name="sums") as store:
            with store.attach(NUM, capacity=10 << 20, fingerprint="a", name="first"):
                with store.attach(NUM, capacity=10 << 20, fingerprint="a", name="first"):
                    pass  # the same one again takes nothing more
                with pytest.raises(CapacityError, match=r"'second'.*6\.0 MiB of capacity_per_node=16\.0 MiB"):
                    store.attach(NUM, capacity=10 << 20, fingerprint="a", name="second")
                store.attach(NUM, capacity=5 << 20, fingerprint="a", name="third").close()
            store.attach(NUM, capacity=10 << 20, fingerprint="a", name="second").close()
    with RedisStore(capacity_per_node="16MiB", name="sums") as store:

        def die() -> None:
            store.attach(NUM, capacity=10 << 20, fingerprint="a", name="first")
            os.kill(os.getpid(), signal.SIGKILL)

        assert Child(die).wait() == -signal.SIGKILL
        store.attach(NUM, capacity=10 << 20, fingerprint="a", name="second").close()


def test_a_store_of_one_node_caches_a_data_set_and_values_by_key() -> None:
    numbers = [(stamp(id), id) for id in range(102)]
    with RedisStore(capacity_per_node="32MiB", name="alone") as store:
        assert store.num_nodes == 1
        with CachedDataset(numbers, capacity="8MiB", store=store, name="numbers") as dataset:
            for _ in range(10):
                assert show(dataset.__getitems__(range(102))) == list(range(102))
            assert dataset.cache.num_keys() == 102
            assert dataset.stats().misses == 102 - 2
        loader = CacheLoader(capacity="8MiB", store=store, name="keys")
        loads = []
        for _ in range(3):
            for key in ("a", 1, "none"):
                assert loader.get(key, lambda key: loads.append(key) or (None if key == "none" else key)) in (key, None)
        assert loads == ["a", 1, "none"]
        loader.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_per_node": "much"}, "capacity_per_node"),
        ({"capacity_per_node": "1MiB", "timeout": 0}, "timeout=0"),
        ({"capacity_per_node": "1MiB", "name": "a/b"}, "a/b"),
    ],
)
def test_arguments_that_cannot_be_used_are_one_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RedisStore(**options)
