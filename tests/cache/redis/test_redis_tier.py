"""The samples of a data set in given servers, as a process uses them, and what is wrong with them or with a server."""

import contextlib
import pickle
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from children import Child
from redis_servers import Cluster, FakeServer, Server, free_port, needs_server, until
from redis_tiers import ALL, COUNT, PATIENT, admin, given, held, put, record, sample, tier_of
from stallfree.cache.records import MISS
from stallfree.cache.redis.store import RedisStore, RedisTier
from stallfree.errors import InputError, StorageError

pytestmark = needs_server


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with Server(tmp_path_factory.mktemp("one")) as one, Server(tmp_path_factory.mktemp("two")) as two:
        yield [one, two]


@pytest.fixture
def pair(both: list[Server]) -> list[Server]:
    """Two servers without values and limits."""
    for server in both:
        with admin(server) as client:
            client.flushall()
            client.config_set("maxmemory", 0)
            client.execute_command("ACL", "SETUSER", "default", "+@all")
    return both


@pytest.fixture
def tier(pair: list[Server]) -> Iterator[RedisTier]:
    with given(*pair) as store:
        yield tier_of(store)


# -- a tier -----------------------------------------------------------------------------------------------------------


def test_what_was_stored_comes_back_until_it_is_dropped(tier: RedisTier) -> None:
    assert held(tier) == []
    assert put(tier, ALL[::2]).all()
    assert held(tier, ALL[::-1]) == ALL[::2][::-1].tolist()
    tier.drop(ALL[:100])
    assert held(tier) == ALL[100::2].tolist()
    tier.put_many(ALL[:1], [record((np.zeros(3), "other"))])
    assert put(tier, [0]).all(), "a value is replaced"
    (mine,), (other,) = tier.get_many(ALL[:1]), tier.get_many(ALL[:1])
    mine[0][:] = -1
    assert np.array_equal(other[0], sample(0)[0])
    assert (tier.put_many(ALL[:0], []).tolist(), tier.get_many(ALL[:0])) == ([], [])
    parts = tier.parts(ALL)
    assert sorted(np.concatenate(parts).tolist()) == ALL.tolist()
    assert [(len(part), set(tier.owner(part).tolist())) for part in parts] == [(COUNT // 2, {0}), (COUNT // 2, {1})]
    assert (tier.me, tier.num_nodes) == (None, 1)
    tier.begin_epoch()
    rows = tier.status()
    assert all(row.used_bytes > 0 == row.capacity_bytes and row.hits > 0 and not row.lost for row in rows)
    assert len({row.name for row in rows}) == 2


def test_data_sets_do_not_touch_each_other(pair: list[Server]) -> None:
    names = [("a", "f"), ("a", "g"), ("b", "f"), ("a*", "f"), ("a[b]/\n", "f")]
    with given(*pair) as store, given(*pair[::-1]) as again, admin(pair[0]) as client:
        tiers = [tier_of(store, name, fingerprint) for name, fingerprint in names]
        client.set("mine", "x")
        for salt, tier in enumerate(tiers):
            assert held(tier) == []
            put(tier, ALL, salt)
        assert [len(held(tier, ALL, salt)) for salt, tier in enumerate(tiers)] == [COUNT] * 5
        assert held(tier_of(again, "a"), ALL) == ALL.tolist(), "the order of servers does not matter"
        tiers[0].clear()
        assert [len(held(tier, ALL, salt)) for salt, tier in enumerate(tiers)] == [0, *[COUNT] * 4]
        assert client.get("mine") == b"x"


# -- values that are wrong --------------------------------------------------------------------------------------------


def test_a_value_that_is_wrong_is_a_miss_and_is_removed(tier: RedisTier, pair: list[Server]) -> None:
    put(tier, ALL)
    with admin(pair[0]) as client:
        keys = sorted(client.keys("stallfree:*"))[:7]
        wrong = sorted(int(key.rpartition(b":")[2]) for key in keys[:6])
        client.setrange(keys[0], 80, b"?!")
        client.append(keys[1], b"x")
        client.set(keys[2], client.getrange(keys[2], 0, 99))
        client.set(keys[3], client.get(keys[6]))
        client.set(keys[4], b"")
        client.delete(keys[5])
        client.rpush(keys[5], "a list")
        assert held(tier) == sorted(set(ALL.tolist()) - set(wrong))
        assert [client.exists(key) for key in keys] == [0, 0, 0, 0, 0, 1, 1]
    assert put(tier, wrong).all()
    assert held(tier) == ALL.tolist()


def test_nothing_is_unpickled_unless_allowed(pair: list[Server]) -> None:
    value = {1, 2, 3}  # no record without pickle
    with given(*pair) as store, given(*pair, allow_pickle=True) as open_store:
        tier = tier_of(store)
        tier.put_many(ALL[:1], [record(value, allow_pickle=True)])
        assert tier.get_many(ALL[:1]) == [MISS]
        assert tier_of(open_store).get_many(ALL[:1]) == [value]


# -- servers that are full, lost, slow or wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("limited", [False, True])
def test_a_full_server_stores_nothing_and_keeps_what_it_has(limited: bool, pair: list[Server]) -> None:
    with (
        given(*pair[:1], capacity_per_node=1 if limited else None) as store,
        given(*pair[:1]) as other,
        admin(pair[0]) as client,
    ):
        put(tier_of(other), ALL[:50])
        tier = tier_of(store)
        client.config_set("maxmemory", 0 if limited else 1)
        assert not put(tier, ALL).any()
        assert held(tier) == ALL[:50].tolist()
        client.config_set("maxmemory", 0)
        if not limited:
            until(lambda: put(tier, ALL).all(), "it stores again")
            assert held(tier) == ALL.tolist()


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_lost_server_costs_its_hits_until_it_is_back(how: str, tmp_path: Path, pair: list[Server]) -> None:
    with Server(tmp_path) as lost, given(pair[0], lost, timeout=0.25) as store:
        tier = tier_of(store)
        until(lambda: put(tier, ALL).all(), "all are stored")
        (index,) = [at for at, row in enumerate(tier.status()) if str(lost.port) in row.name]
        theirs = tier.owner(ALL) == index
        lost.kill() if how == "killed" else lost.freeze()
        start = time.monotonic()
        for _ in range(20):
            assert not set(held(tier)) & set(ALL[theirs].tolist())
            assert not put(tier, ALL)[theirs].any()
        if how == "killed":
            tier.clear()
        assert tier.status()[index].lost
        assert time.monotonic() - start < 20
        with contextlib.closing(pickle.loads(pickle.dumps(tier))) as copy:
            assert copy.status()[index].lost, "all processes of a node share the breaker"
        lost.start() if how == "killed" else lost.thaw()
        until(lambda: put(tier, ALL).all() and held(tier) == ALL.tolist(), "hits return")


NONSENSE = {
    "garbage": b"\x00\xff garbage\r\n",
    "a number": b":7\r\n",
    "too few values": b"*1\r\n$1\r\nx\r\n",
    "too many values": b"*300\r\n" + b"$-1\r\n" * 300,
    "a nested list": b"*200\r\n" + b"*1\r\n:1\r\n" * 200,
    "an endless length": b"$999999999999\r\n",
    "half a reply": b"*200\r\n$100\r\nxyz",
    "more than requested": b"*200\r\n" + b"$-1\r\n" * 200 + b"$1\r\nx\r\n",
    "byte by byte": b"",
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_is_a_miss(kind: str) -> None:
    def answer(connection: socket.socket, words: list[bytes]) -> None:
        if words[0] == b"PING":
            connection.sendall(b"+PONG\r\n")
        elif words[0] == b"INFO":
            connection.sendall(b"$0\r\n\r\n")
        elif kind == "byte by byte":
            while True:
                connection.sendall(b"*" if words else b"1")
                words.clear()
                time.sleep(0.01)
        else:
            connection.sendall(NONSENSE[kind])

    with FakeServer(answer) as server, given(server, timeout=0.1) as store:
        tier, start = tier_of(store), time.monotonic()
        for _ in range(3):
            assert held(tier) == []
        put(tier, ALL[:3])
        assert time.monotonic() - start < 10, "a reply has a time limit, however slowly it comes"


def test_a_server_that_refuses_is_an_error_for_the_caller(tier: RedisTier, pair: list[Server]) -> None:
    for server in pair:
        with admin(server) as client:
            client.execute_command("ACL", "SETUSER", "default", "-mget", "-set")
    for use in (held, lambda tier: put(tier, ALL)):
        with pytest.raises(StorageError, match="refuses a request"):
            use(tier)


# -- stores -----------------------------------------------------------------------------------------------------------


def test_a_closed_store(pair: list[Server]) -> None:
    store = given(*pair)
    tier = tier_of(store)
    put(tier, ALL)
    tier.close()
    assert str(pair[0].port) in repr(store)
    assert store.room == 0
    store.close()
    store.close()
    assert (held(tier), put(tier, ALL).any()) == ([], False)
    with pytest.raises(InputError, match="is closed"):
        tier_of(store)


def test_servers_and_arguments_that_cannot_be_used(tmp_path: Path, pair: list[Server]) -> None:
    for host, message in (
        ("localhost:6379", "no address of a server"),
        ({"hots": "a"}, "hots"),
        ({"port": "first"}, "port"),
        ({"path": "/a", "port": 1}, "port"),
        ({"ssl_certfile": "a"}, "ssl_certfile"),
    ):
        with pytest.raises(InputError, match=message):
            RedisStore([host])  # type: ignore[list-item]
    some: list[dict[str, Any]] = [{"hosts": []}, {"hosts": {"host": "a"}}, {"timeout": 0}, {"port": -1}, {"name": "/"}]
    for options in ({}, *({"capacity_per_node": "1MiB", **one} for one in some)):
        with pytest.raises(InputError):
            RedisStore(**options)
    with pytest.raises(InputError, match="each of them once"):
        given(pair[0], pair[0])
    with pytest.raises(StorageError, match="does not answer"):
        RedisStore([pair[0].host, {"host": "127.0.0.1", "port": free_port()}])
    with Server(tmp_path, "requirepass secret") as closed:
        for password in (None, "hidden"):
            with pytest.raises(InputError, match="refuses access") as caught:
                RedisStore([{**closed.host, "password": password}])
            assert "hidden" not in str(caught.value)
        with RedisStore([{**closed.host, "password": "secret"}], timeout=PATIENT) as store:
            assert put(tier_of(store), ALL).all()


def test_a_cluster_as_the_library_gives_it(tmp_path: Path, pair: list[Server]) -> None:
    with Cluster(tmp_path) as cluster:
        with pytest.raises(InputError, match="not both"):
            given(pair[0], cluster.servers[0])
        with given(cluster.servers[1], timeout=2.0) as store:
            tier = tier_of(store)
            until(lambda: put(tier, ALL).all(), "all are stored")
            assert held(tier) == ALL.tolist()
            assert len(tier.parts(ALL)) == 1
            assert min(cluster.said(server, "DBSIZE") for server in cluster.servers) > COUNT / 5
            assert Child(lambda: held(tier) == ALL.tolist() or 1 / 0).wait() == 0
            with contextlib.closing(pickle.loads(pickle.dumps(tier))) as copy:
                assert held(copy) == ALL.tolist()
            assert [row.lost for row in tier.status()] == [False]
            tier.drop(ALL[:50])
            assert held(tier) == ALL[50:].tolist()
            tier.clear()
            assert [cluster.said(server, "DBSIZE") for server in cluster.servers] == [0, 0, 0]
            for server in cluster.servers:
                server.kill()
            assert (held(tier), put(tier, ALL).any()) == ([], False)
