"""A data set's cache in servers that run already: against a dict as the model, and what goes wrong with servers."""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import redis
import torch
from redis_servers import Server, free_port, needs_server, until

from children import Child
from stallfree.cache import MISS
from stallfree.errors import CapacityError, CodecError, InputError, StorageError
from stallfree.stores import shelf as module
from stallfree.stores.endpoint import Address
from stallfree.stores.servers import ServerCache

pytestmark = needs_server

ENOUGH = 60.0  # seconds that a server may be silent where that is not what is tested
SOON = 0.05  # the same where it is


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with Server(tmp_path_factory.mktemp("one")) as one, Server(tmp_path_factory.mktemp("two")) as two:
        yield [one, two]


@pytest.fixture(autouse=True)
def empty(pair: list[Server]) -> None:
    for server in pair:
        client(server).flushall()
        client(server).config_set("maxmemory", 0)


def client(server: Server) -> redis.Redis:
    return redis.Redis.from_url(f"unix://{server.path}", single_connection_client=False)


def attach(servers: list[Server], num_ids: int = 1000, **options: Any) -> ServerCache:
    given = {"capacity": "1GiB", "name": "train", "fingerprint": "f", "timeout": ENOUGH} | options
    return ServerCache(num_ids, addresses=[server.tcp for server in servers], **given)


class Pair(NamedTuple):
    """A named tuple."""

    id: int
    text: str


def test_a_named_tuple_whose_class_is_not_imported_is_a_miss(
    pair: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach(pair) as cache:
        until(lambda: bool(cache.put(1, Pair(1, "one")) or cache.resident([1])[0]), "it is stored")
        assert cache.get(1) == Pair(1, "one")
        monkeypatch.delattr(sys.modules[__name__], "Pair")
        assert cache.get(1) is MISS


def really_held(servers: list[Server]) -> tuple[int, int]:
    """Samples and their bytes, as the servers say."""
    sizes = [client(server).strlen(key) for server in servers for key in client(server).scan_iter("stallfree:*")]
    return len(sizes), sum(sizes)


def counted(cache: ServerCache) -> tuple[int, int]:
    return cache.stats().resident_items, cache.stats().resident_bytes


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("count", [1, 2])
def test_samples_come_back_in_order(pair: list[Server], count: int) -> None:
    values = [None, 0, "", False, b"", [], 7, "text", torch.arange(5), (torch.zeros(2, 3), {"label": 4})]
    with attach(pair[:count]) as cache:
        assert all(value is MISS for value in cache.get_many([5, 1, 5]))
        assert cache.put_many(range(10), values).all()
        order = [9, 0, 3, 3, 500, 8, 1, 2, 4, 5, 6, 7]
        found = cache.get_many(order)
        assert found[4] is MISS
        del found[4], order[4]
        assert torch.equal(found.pop(0)[0], torch.zeros(2, 3))
        assert all(same(value, values[id]) for id, value in zip(order[1:], found, strict=True))
        assert cache.get(7) == "text"
        assert cache.put(7, "another")
        assert cache.get(7) == "text", "what is there stays"
        stats = cache.stats()
        assert (stats.hits, stats.misses, stats.rejected) == (13, 4, 0)
        assert counted(cache) == really_held(pair)
        assert cache.num_keys() == 10
        assert not cache.resident(range(10)).any()
        if count == 2:
            assert all(client(server).dbsize() > 1 for server in pair), "both have a part"


def test_each_value_is_ones_own(pair: list[Server]) -> None:
    with attach(pair) as cache:
        cache.put_many([1, 2], [torch.zeros(1000), torch.ones(1000)])
        first = cache.get_many([1, 1, 2, 1])
        for tensor in first:
            tensor += 5
        kept = [tensor.clone() for tensor in first]
        for _ in range(5):
            again = cache.get_many([1, 2, 2, 1])
        assert [tensor[0].item() for tensor in again] == [0, 1, 1, 0]
        assert all(map(torch.equal, kept, first))
        assert cache.put_many([3, 3, 4, 3], [torch.zeros(1)] * 4).all()
        assert cache.num_keys() == 4


def test_it_does_what_a_dict_does(pair: list[Server]) -> None:
    rng, model = np.random.default_rng(0), dict[int, int]()
    with attach(pair, num_ids=60) as cache, attach(pair[::-1], num_ids=60) as other:
        for _ in range(60):
            some = cache if rng.random() < 0.5 else other
            ids = rng.integers(0, 60, rng.integers(0, 12))
            if rng.random() < 0.5:
                values = rng.integers(0, 1000, len(ids)).tolist()
                for id, value in zip(ids.tolist(), values, strict=True):
                    model.setdefault(id, value)
                assert some.put_many(ids, values).all()
            elif rng.random() < 0.05:
                some.clear()
                model.clear()
            else:
                assert some.get_many(ids) == [model.get(id, MISS) for id in ids.tolist()]
        assert cache.num_keys() == other.num_keys() == len(model)
        assert counted(cache) == really_held(pair)


def test_data_sets_are_apart(pair: list[Server]) -> None:
    with (
        attach(pair, 102, name="a") as one,
        attach(pair, 102, name="b") as two,
        attach(pair, 102, name="a", fingerprint="g") as clash,
    ):
        caches = (one, two, clash)
        for offset, cache in enumerate(caches):
            assert cache.get_many(range(102)) == [MISS] * 102
            for start in range(0, 102, 10):
                ids = range(start, min(102, start + 10))
                assert cache.put_many(ids, [id + 1000 * offset for id in ids]).all()
            assert cache.num_keys() == 102
        assert sum(cache.num_keys() for cache in caches) == 306
        for _ in range(3):
            for offset, cache in enumerate(caches):
                assert cache.get_many(range(102)) == [id + 1000 * offset for id in range(102)]
        client(pair[0]).set("somebody's", "own")
        one.clear()
        assert [cache.num_keys() for cache in caches] == [0, 102, 102]
        assert counted(one) == (0, 0)
        assert one.get_many(range(102)) == [MISS] * 102
        assert clash.get_many(range(102)) == list(range(2000, 2102))
        assert client(pair[0]).get("somebody's") == b"own"
        assert one.put(3, 5)
        assert one.get(3) == 5


def test_nothing_is_stored_above_the_capacity_and_nothing_evicted(
    pair: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST", 20_000)  # several requests per batch
    value = torch.zeros(1000, dtype=torch.uint8)
    with attach(pair) as probe:
        probe.put(0, value)
        size = counted(probe)[1]
        probe.clear()
    with attach(pair, capacity=200 * size) as cache:
        there = np.concatenate(
            [cache.put_many(range(start, start + 100), [value] * 100) for start in range(0, 1000, 100)]
        )
        assert really_held(pair) == counted(cache) == (200, 200 * size)
        assert there.sum() == 200
        assert cache.stats().rejected == 800
        hits = [one is not MISS for one in cache.get_many(range(1000))]
        assert hits == there.tolist()
        for _ in range(60):
            cache.put_many(range(1000), [value] * 1000)
        assert [one is not MISS for one in cache.get_many(range(1000))] == hits
        cache.clear()
        assert cache.put(999, value)
    with attach(pair, capacity=size - 1) as small:
        small.clear()
        assert not small.put(1, value)
        assert counted(small) == really_held(pair) == (0, 0)


def test_processes_and_threads_that_store_at_once_count_right(pair: list[Server]) -> None:
    values = [torch.full((300 + id,), id, dtype=torch.uint8) for id in range(200)]
    with attach(pair, capacity=60_000) as cache:
        travelled = pickle.dumps(cache)

        def store(mine: ServerCache, seed: int) -> None:
            order = np.random.default_rng(seed).permutation(200)
            for start in range(0, 200, 10):
                ids = order[start : start + 10]
                mine.put_many(ids, [values[id] for id in ids])
                for id, found in zip(ids.tolist(), mine.get_many(ids), strict=True):
                    assert found is MISS or torch.equal(found, values[id])

        def child(seed: int) -> None:
            threads = [threading.Thread(target=store, args=(cache, 10 * seed + number)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with pickle.loads(travelled) as other:
                store(other, seed)

        cache.get_many(range(200))
        children = [Child(child, seed) for seed in range(3)]
        child(3)
        assert [process.wait() for process in children] == [0, 0, 0]
        assert counted(cache) == really_held(pair)
        assert 0 < counted(cache)[1] <= 60_000
        stats = cache.stats()
        assert stats.hits + stats.misses == 200 + 4 * 4 * 200, "over all processes"


def test_a_full_server_stops_the_storing_for_a_while(pair: list[Server]) -> None:
    value = torch.zeros(1000, dtype=torch.uint8)
    with attach(pair[:1]) as cache:
        assert cache.put(0, value)
        client(pair[0]).config_set("maxmemory", 1)
        with pytest.warns(RuntimeWarning, match="OOM") as warned:
            there = [cache.put(id, value) for id in range(1, 40)]
        assert not any(there)
        assert len(warned) == 1
        assert cache.get(0) is not MISS
        client(pair[0]).config_set("maxmemory", 0)
        assert not cache.put(1, value)
        there = [cache.put(id, value) for id in range(40, 80)]
        assert there == sorted(there), "once it has begun it goes on"
        assert any(there), "it is tried again"
        assert cache.stats().rejected == 40 + there.count(False)
        assert counted(cache) == really_held(pair)


def test_a_damaged_value_is_a_miss_and_is_replaced(pair: list[Server]) -> None:
    with attach(pair) as cache:
        cache.put_many(range(20), [torch.full((100,), id) for id in range(20)])
        keys = {int(key.split(b":")[2]): server for server in pair for key in client(server).scan_iter("stallfree:*")}
        prefix = next(client(pair[0]).scan_iter("stallfree:*")).rpartition(b":")[0]
        for id, change in ((3, "flip"), (4, "foreign"), (5, "short"), (6, "more")):
            at, key = client(keys[id]), b"%b:%d" % (prefix, id)
            if change == "flip":
                at.setrange(key, 300, b"\x01\x02")
            elif change == "foreign":
                other = next(one for one in keys if keys[one] is keys[id] and one not in (3, 4, 5, 6))
                at.set(key, at.get(b"%b:%d" % (prefix, other)))
            elif change == "short":
                at.set(key, at.get(key)[:-1])
            else:
                at.append(key, b"x")
        for ids in (range(20), [3, 4, 5, 6]):
            found = cache.get_many(ids)
            assert [id for id, one in zip(ids, found, strict=True) if one is MISS] == [3, 4, 5, 6]
        assert cache.stats().damaged == 4
        assert cache.num_keys() == 16
        assert cache.put_many([3, 4, 5, 6], [torch.full((100,), id) for id in (3, 4, 5, 6)]).all()
        assert [int(one[50]) for one in cache.get_many(range(20))] == list(range(20))
        assert counted(cache)[0] == 20


def test_what_could_not_be_counted_is_counted_later(pair: list[Server]) -> None:
    with attach(pair[:1]) as cache, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert cache.put_many(range(3), [0, 1, 2]).all()
        client(pair[0]).setrange(next(client(pair[0]).scan_iter("stallfree:*")), 0, b"wrong")
        client(pair[0]).config_set("maxmemory", 1)
        assert cache.get_many(range(3)).count(MISS) == 1, "it is dropped"
        cache._shelves[0].pause = 0
        assert not cache.put(8, 5)
        client(pair[0]).config_set("maxmemory", 0)
        cache._shelves[0].pause = 0
        assert cache.put(9, 5)
        assert counted(cache) == really_held(pair)


def test_pickles_do_not_travel_unless_they_may(pair: list[Server]) -> None:
    with attach(pair) as cache, attach(pair, allow_pickle=True) as other:
        with pytest.raises(CodecError):
            cache.put_many([0, 1], [5, Path("/tmp")])
        assert cache.get_many([0, 1]) == [MISS, MISS], "nothing of it was stored"
        assert other.put(1, Path("/tmp"))
        assert other.get(1) == Path("/tmp")
        assert cache.get(1) is MISS


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_lost_server_costs_its_hits_only(tmp_path: Path, pair: list[Server], how: str) -> None:
    with Server(tmp_path) as server, attach([pair[0], server], 100, timeout=ENOUGH if how == "killed" else 1) as cache:
        until(lambda: cache.put_many(range(100), list(range(100))).all(), "all are stored")
        owner = cache._here.owner.copy()
        lost = next(place for place, one in enumerate(cache._shelves) if one.endpoint.address.port == server.port)
        if how == "killed":
            server.kill()
        else:
            server.freeze()
        assert (owner == lost).any()
        for _ in range(20):
            found = cache.get_many(range(100))
            assert all(one is MISS or one == id for id, one in enumerate(found))
            assert all(one is MISS for id, one in enumerate(found) if owner[id] == lost)
            there = cache.put_many(range(100), list(range(100)))
            assert not there[owner == lost].any()
        assert cache._shelves[lost].endpoint.breaker.trips >= 1
        assert cache.num_keys() < 100
        if how == "killed":
            server.restart()
            until(lambda: cache.put_many(range(100), list(range(100))).all(), "it is used again")
        else:
            server.thaw()
        until(lambda: cache.get_many(range(100)) == list(range(100)), "all are there")


def test_servers_that_cannot_be_used(tmp_path: Path, pair: list[Server]) -> None:
    with Server(tmp_path, "requirepass secret", "cluster-enabled no") as closed:
        with pytest.raises(InputError, match="does not let us in"):
            attach([closed])
        with pytest.raises(InputError, match="does not let us in"):
            ServerCache(
                5, addresses=[Address(path=closed.path, password="hidden")], capacity=1, name="a", fingerprint="b"
            )
    with pytest.raises(StorageError, match=r"no server answers at 127\.0\.0\.1"):
        ServerCache(5, addresses=[Address("127.0.0.1", free_port())], capacity=1, name="a", fingerprint="b")
    with Server(tmp_path, "cluster-enabled yes") as cluster:
        with pytest.raises(StorageError, match="serves no slots"):
            attach([cluster])
        with pytest.raises(InputError, match="let us in: SELECT"):
            ServerCache(5, addresses=[Address("127.0.0.1", cluster.port, db=1)], capacity=1, name="a", fingerprint="b")


def test_arguments_that_cannot_be(pair: list[Server]) -> None:
    for num_ids, servers, options, kind in (
        (0, pair, {}, InputError),
        (5, [], {}, InputError),
        (5, [pair[0], pair[0]], {}, InputError),
        (5, pair, {"timeout": 0}, InputError),
        (5, pair, {"capacity": "much"}, CapacityError),
    ):
        with pytest.raises(kind):
            attach(servers, num_ids, **options)
    with attach(pair, 5) as cache:
        for wrong in ([5], [-1], ["a"], [[1]]):
            with pytest.raises(InputError):
                cache.get_many(wrong)
        with pytest.raises(InputError, match="2 ids and 1 values"):
            cache.put_many([1, 2], [3])
        assert cache.get_many([]) == []
        assert cache.put_many([], []).shape == (0,)


def test_the_end_of_it(pair: list[Server]) -> None:
    cache = attach(pair)
    cache.put(1, 2)
    cache.count_fetch(3, 400)
    cache.close()
    cache.close()
    stats = cache.stats()
    assert (stats.storage_reads, stats.storage_bytes, stats.resident_items) == (3, 400, 1)
    with pytest.raises(InputError, match="closed"):
        cache.get(1)
    with attach(pair) as again:
        assert again.get(1) == 2, "samples stay"
        assert again.stats().storage_reads == 0
    forgotten = attach(pair)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del forgotten
