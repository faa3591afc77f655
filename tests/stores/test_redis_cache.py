"""The samples of a data set in servers: against dicts as the model, and with wrong values, full and lost servers."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from children import Child
from redis_servers import Server, needs_server, until
from redis_tools import COUNT, attach, client, emptied, keys_of, load, name_of, samples, shown
from stallfree.cache import MISS
from stallfree.cache.tiers import write_behind
from stallfree.errors import CodecError, InputError
from stallfree.stores import redis_writer as module
from stallfree.stores.redis_cache import RedisCache
from stallfree.stores.values import data_key, pack_head

pytestmark = needs_server

ALL = list(range(COUNT))
SOON = 1.0  # seconds that a server may be silent where that is what is tested; a loaded machine may be slow


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with Server(tmp_path_factory.mktemp("one")) as one, Server(tmp_path_factory.mktemp("two")) as two:
        yield [one, two]


@pytest.fixture
def pair(both: list[Server]) -> list[Server]:
    """Two servers that stand alone, empty and without a limit."""
    return emptied(both)


def fill_up(server: Server) -> None:
    """Leave a server no room."""
    with client(server) as there:
        there.config_set("maxmemory", 1)


# --- a cache --------------------------------------------------------------------------------------------------------


def test_threads_forked_processes_and_copies_use_it_at_once(pair: list[Server]) -> None:
    with attach(pair) as cache:
        copied = pickle.dumps(cache)
        cache.get_many(ALL)  # connections and threads are there when it forks

        def use(some: RedisCache, seed: int) -> None:
            order = np.random.default_rng(seed).permutation(COUNT).tolist()
            for start in range(0, COUNT, 20):
                load(some, order[start : start + 20])

        def child(seed: int) -> None:
            threads = [threading.Thread(target=use, args=(cache, 10 * seed + number)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with pickle.loads(copied) as copy:
                use(copy, seed)

        children = [Child(child, seed) for seed in range(2)]
        child(2)
        assert [process.wait() for process in children] == [0, 0]
        assert shown(cache.get_many(ALL)) == ALL
        assert cache.num_keys() == COUNT
        stats = cache.stats()
        assert stats.hits + stats.misses == 2 * COUNT + 3 * 4 * COUNT, "over all processes"


def test_a_process_that_ends_stores_what_it_handed_over(pair: list[Server]) -> None:
    with attach(pair) as cache:
        cache.put_many(ALL[:50], samples(ALL[:50]))

        def child() -> None:
            cache.put_many(ALL[50:], samples(ALL[50:]))
            cache.close()

        assert Child(child).wait() == 0
        cache.flush()
        assert cache.drain(np.array(ALL)).all()
        assert shown(cache.get_many(ALL)) == ALL
    assert cache.stats().hits == COUNT
    with pytest.raises(InputError, match="is closed"):
        cache.get(1)
    cache.close()


def test_a_sample_on_its_way_is_not_fetched(pair: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "DRAIN_SECONDS", 60.0)
    go, write, fetched = threading.Event(), module.RedisWriter.write, list[int]()
    monkeypatch.setattr(module.RedisWriter, "write", lambda *given: (go.wait(60), write(*given)))
    with attach(pair) as cache, ThreadPoolExecutor(2) as pool:
        cache.put_many(ALL[:8], samples(ALL[:8]))
        reading = cache.begin_read(np.arange(10), lambda: pool, fetched.extend)
        threading.Timer(0.05, go.set).start()
        assert shown(reading.result()) == [*ALL[:8], None, None]
    assert sorted(fetched) == [8, 9]


def test_keys_can_be_read(pair: list[Server]) -> None:
    with attach(pair) as cache:
        load(cache, ALL[:3])
        fingerprint = data_key("train", "f").hex()[:8]
        assert keys_of(pair) == {b"stallfree:train-%b:%d" % (fingerprint.encode(), id) for id in range(3)}
        states = cache.status()
        assert {state.name for state in states} == {str(server.tcp) for server in pair}
        assert all(state.used_bytes > 0 and not state.lost for state in states)
        with client(pair[0]) as there:
            there.set("stallfree:other", "own")
        cache.clear()
        assert keys_of(pair) == {b"stallfree:other"}


# --- values that are wrong ------------------------------------------------------------------------------------------


def forged(id: int, key: bytes, record: bytes) -> bytes:
    return pack_head(key, id, record) + record


WRONG: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a flipped bit of the record": lambda value, _: value[:90] + bytes([value[90] ^ 1]) + value[91:],
    "a flipped bit of the header": lambda value, _: bytes([value[0] ^ 128]) + value[1:],
    "cut": lambda value, _: value[:-1],
    "longer": lambda value, _: value + b"x",
    "empty": lambda value, _: b"",
    "another sample": lambda _, other: other,
    "another data set of the name": lambda value, _: forged(3, data_key("train", "g"), value[64:]),
    "garbage": lambda value, _: np.random.default_rng(0).bytes(len(value)),
}


def test_a_value_that_is_wrong_is_a_miss_and_is_replaced(pair: list[Server]) -> None:
    with attach(pair[:1]) as cache, client(pair[0]) as there:
        load(cache, ALL)
        for count, (kind, wrong) in enumerate(WRONG.items(), 1):
            key, other = name_of(cache, 3), there.get(name_of(cache, 4))
            there.set(key, wrong(there.get(key), other))
            assert shown(cache.get_many(ALL[:9])) == [None if id == 3 else id for id in ALL[:9]], kind
            assert cache.stats().damaged == count
            assert load(cache, ALL) == [3]
            assert load(cache, ALL) == []


def test_only_what_a_node_has_written_there_ends_the_use(pair: list[Server]) -> None:
    with attach(pair[:1]) as cache, client(pair[0]) as there:
        load(cache, ALL)
        mark = name_of(cache, 3)[:-1] + b"random"
        for value in (b"1", b"", b"garbage", there.get(name_of(cache, 3)), data_key("train", "other")):
            there.set(mark, value)
            assert shown(cache.get_many(ALL)) == ALL
            assert not cache.uncached_steps
        assert cache.uncache_steps()
        assert there.get(mark) == data_key("train", "f")


def test_a_forged_record_is_a_miss_and_is_never_unpickled(pair: list[Server]) -> None:
    """Somebody who can write to the server makes headers that are right."""

    class Bomb:
        def __reduce__(self) -> Any:
            return os._exit, (1,)

    with attach(pair[:1]) as cache, attach(pair[:1], allow_pickle=True) as trusting, client(pair[0]) as there:
        rng = np.random.default_rng(0)
        for record in (b"", b"x", pickle.dumps(Bomb()), *(rng.bytes(size) for size in range(1, 400, 7))):
            there.set(name_of(cache, 3), forged(3, data_key("train", "f"), record))
            assert cache.get(3) is MISS
        there.flushall()
        assert trusting.put(3, Path("/tmp"))
        trusting.flush()
        assert trusting.get(3) == Path("/tmp")
        assert cache.get(3) is MISS
        with pytest.raises(CodecError):
            cache.put_many([4, 5], [1, Path("/tmp")])
        cache.flush()
        assert not there.exists(name_of(cache, 4)), "nothing of it was stored"


# --- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limited", [False, True])
def test_a_full_server_keeps_what_it_has_and_stores_again_when_there_is_room(
    limited: bool, pair: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FULL_SECONDS", 0.0)
    with attach(pair[:1], limit=(1 << 40) if limited else None) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        load(cache, ALL[:100])
        if limited:
            cache._storing._limit = 1
        else:
            fill_up(pair[0])
        for _ in range(3):
            assert load(cache, ALL) == ALL[100:]
        assert cache.stats().rejected == 300
        assert cache.num_keys() == 100
        if limited:
            cache._storing._limit = 1 << 40
        else:
            with client(pair[0]) as there:
                there.config_set("maxmemory", 0)
        load(cache, ALL)
        assert load(cache, ALL) == []


def test_a_full_server_is_left_alone_for_a_while(pair: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FULL_SECONDS", 1e6)
    with attach(pair[:1]) as cache, client(pair[0]) as there:
        fill_up(pair[0])
        load(cache, ALL[:10])
        sets = there.info("commandstats")["cmdstat_set"]["calls"]
        assert not cache.accepts
        load(cache, ALL[:10])
        assert there.info("commandstats")["cmdstat_set"]["calls"] == sets


def test_what_a_server_evicts_by_its_own_policy_is_a_miss(pair: list[Server]) -> None:
    big = np.arange(100_000)
    with attach(pair[:1]) as cache, client(pair[0]) as there:
        there.config_set("maxmemory-policy", "allkeys-lru")
        there.config_set("maxmemory", there.info("memory")["used_memory"] + 10 * big.nbytes)
        for id in range(40):
            cache.put(id, big + id)
            cache.flush()
        assert there.info("stats")["evicted_keys"] > 0
        found = cache.get_many(range(40))
        hits = [id for id in range(40) if found[id] is not MISS]
        assert 0 < len(hits) < 20
        assert all(np.array_equal(found[id], big + id) for id in hits)
        assert np.flatnonzero(cache.known(np.arange(40))).tolist() == hits
        assert cache.stats().rejected == 0


# --- servers that are lost ------------------------------------------------------------------------------------------


def fault(server: Server, how: str) -> Callable[[], None]:
    """Make a server useless; what is returned brings it back."""
    if how == "frozen":
        server.freeze()
        return server.thaw
    server.kill()
    return server.start


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_lost_server_costs_its_hits_only(how: str, tmp_path: Path, pair: list[Server]) -> None:
    with Server(tmp_path) as server, attach([pair[0], server], timeout=SOON) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        until(lambda: load(cache, ALL) == [], "all are stored")
        place = sorted([pair[0], server], key=lambda one: str(one.tcp)).index(server)
        gone = cache.owner(ALL) == place
        back, copied = fault(server, how), pickle.dumps(cache)

        def child() -> None:
            lost = cache._servers.shards[place]
            assert lost.lost
            check()
            with pickle.loads(copied) as late:  # a worker of another start method
                assert late._servers.shards[place].lost
                assert lost.breaker.trips + late._servers.shards[place].breaker.trips <= 1

        def check() -> None:
            found = shown(cache.get_many(ALL))
            assert all(one in (None, id) for id, one in zip(ALL, found, strict=True))
            assert all(found[id] is None for id in np.flatnonzero(gone).tolist())
            cache.put_many(ALL, samples(ALL))
            cache.flush()

        for _ in range(3):
            check()
        until(lambda: cache.known(np.array(ALL)).tolist() == (~gone).tolist(), "the other server is used")
        assert [state.lost for state in cache.status()] == [one == place for one in range(2)]
        assert cache.num_keys() <= COUNT - gone.sum()
        cache.drop(ALL[:2])
        assert Child(child).wait() == 0
        back()
        until(lambda: load(cache, ALL) == [], "all are there again")


def test_a_server_that_was_emptied_is_filled_again(pair: list[Server]) -> None:
    with attach(pair) as cache:
        load(cache, ALL)
        with client(pair[0]) as there:
            there.flushall()
        first = sorted(pair, key=lambda one: str(one.tcp)).index(pair[0])
        left = (cache.owner(ALL) != first).tolist()
        assert cache.verify(np.array(ALL)).tolist() == cache.known(np.array(ALL)).tolist() == left
        cache.set_known(np.ones(COUNT, bool))
        assert cache.known(np.array(ALL)).all()
        assert [found is not None for found in shown(cache.get_many(ALL))] == left
        assert cache.known(np.array(ALL)).tolist() == left
        assert load(cache, ALL) == [id for id in ALL if not left[id]]
        assert load(cache, ALL) == []


def test_a_writer_that_is_killed_costs_what_it_handed_over(pair: list[Server]) -> None:
    with attach(pair) as cache:

        def child() -> None:
            cache.put_many(ALL, samples(ALL))
            os.kill(os.getpid(), signal.SIGKILL)

        assert Child(child).wait() == -signal.SIGKILL
        assert cache.drain(np.array(ALL)).all()
        load(cache, ALL)
        assert load(cache, ALL) == []
