"""Which server holds a sample: servers that are found, and a Redis Cluster whose slots and masters change."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from redis.crc import key_slot

from children import Child
from redis_servers import Cluster, Server, free_port, needs_server, until
from redis_tools import COUNT, ENOUGH, attach, load, name_of, node, samples, shown
from stallfree.errors import InputError, StorageError
from stallfree.stores import servers as module
from stallfree.stores.addresses import Address
from stallfree.stores.servers import find_servers

pytestmark = needs_server

ALL = list(range(COUNT))


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of slots may be read at any moment."""
    monkeypatch.setattr(module, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.0)


@pytest.fixture
def cluster(trio: Cluster) -> Cluster:
    """The same one, empty."""
    for server in trio.servers:
        trio.said(server, "FLUSHALL")
    return trio


def held(cluster: Cluster) -> list[int]:
    """The samples on each node."""
    return [len(cluster.said(server, "KEYS", "stallfree:*")) for server in cluster.servers if server.process]


# --- servers that are given -----------------------------------------------------------------------------------------


def test_servers_that_cannot_be_used(cluster: Cluster, tmp_path: Path) -> None:
    gone, one = Address("127.0.0.1", free_port()), cluster.servers[0].tcp
    for addresses in ([], [one, one]):
        with pytest.raises(InputError, match="each of them once"):
            find_servers(addresses, ENOUGH)
    with Server(tmp_path, "requirepass secret") as closed:
        for password in ("", "hidden"):
            with pytest.raises(InputError, match="refuses access") as caught:
                find_servers([Address("127.0.0.1", closed.port, password=password)], ENOUGH)
            assert "hidden" not in str(caught.value)
        alone = Address("127.0.0.1", closed.port, password="secret")
        for addresses in ([one, alone], [alone, one]):
            with pytest.raises(InputError, match="do not belong together"):
                find_servers(addresses, ENOUGH)
        for address in (gone, Address("a" * 300), Address("no.such.host.")):
            with pytest.raises(StorageError, match="does not answer"):
                find_servers([alone, address], ENOUGH)
    find_servers([gone, one], ENOUGH).close()  # of a cluster, one node is enough


def test_the_order_of_servers_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    with Server(tmp_path) as one, Server(tmp_path / "two") as two:
        with attach([one, two]) as cache:
            load(cache, ALL)
            owner = cache.owner(ALL)
        with node(tmp_path / "node"), attach([two, one]) as cache:
            assert cache.owner(ALL).tolist() == owner.tolist()
            assert shown(cache.get_many(ALL)) == ALL
            assert np.bincount(owner).tolist() == [COUNT // 2] * 2
            assert cache.num_nodes == 1


# --- a Redis Cluster ------------------------------------------------------------------------------------------------


def test_samples_lie_on_all_masters(cluster: Cluster) -> None:
    with attach(cluster.servers[:1]) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(cache, ALL) == ALL
        assert load(cache, ALL) == []
        assert cache.num_keys() == sum(held(cluster)) == COUNT
        assert min(held(cluster)) > COUNT / 5
        assert cache.verify(np.array(ALL)).all()
        assert len(cache.status()) == 3
        with pickle.loads(pickle.dumps(cache)) as copy:
            assert shown(copy.get_many(ALL[::-1])) == ALL[::-1]
        assert Child(lambda: shown(cache.get_many(ALL)) == ALL or 1 / 0).wait() == 0
        cache.drop(ALL[:50])
        assert shown(cache.get_many(ALL)) == [None] * 50 + ALL[50:]
        cache.clear()
        assert held(cluster) == [0, 0, 0]


def test_a_step_that_is_random_ends_the_use_of_a_cluster_too(cluster: Cluster, tmp_path: Path) -> None:
    with attach(cluster.servers[:1]) as cache, node(tmp_path / "other"), attach(cluster.servers[1:2]) as other:
        load(cache, ALL)
        cache.uncache_steps()
        assert shown(other.get_many(ALL)) == [None] * COUNT
        assert other.uncached_steps


def test_a_full_cluster_makes_room_for_samples_of_higher_score(cluster: Cluster) -> None:
    with attach(cluster.servers[:1], policy="importance") as cache:
        cache.set_scores(ALL, np.arange(COUNT))
        load(cache, ALL[:100])
        for server in cluster.servers:
            cluster.said(server, "CONFIG", "SET", "maxmemory", 1)
        try:
            load(cache, ALL[170:])
        finally:
            for server in cluster.servers:
                cluster.said(server, "CONFIG", "SET", "maxmemory", 0)
        assert cache.stats().evictions == 30
        left = cache.verify(np.arange(100))
        masters = np.array([key_slot(name_of(cache, id)) * 3 // 16384 for id in range(100)])
        for one in range(3):
            here = left[masters == one].tolist()
            assert here == sorted(here), "those of lowest score went"
        assert left.sum() == 70


def test_a_slot_that_moves_while_samples_are_read(cluster: Cluster) -> None:
    with attach(cluster.servers[:1]) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        load(cache, ALL)
        slot = key_slot(name_of(cache, 7))
        source, target = cluster.begin_move(slot)
        stop, seen = threading.Event(), list[list[int | None]]()

        def read() -> None:
            while not stop.is_set():
                seen.append(shown(cache.get_many(ALL)))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            until(lambda: len(seen) > 3, "samples are read")
            cluster.move_keys(slot, source, target)
            assert shown(cache.get_many([7])) == [None], "its master asks for another command"
            cluster.end_move(slot, source, target)
            until(lambda: shown(cache.get_many([7])) == [7], "the new master is read")
        finally:
            stop.set()
            reader.join()
        assert all(found in (None, id) for batch in seen for id, found in zip(ALL, batch, strict=True))
        assert shown(cache.get_many(ALL)) == ALL
        cache.drop([7])
        assert load(cache, [7]) == [7]
        assert shown(cache.get_many([7])) == [7]


@pytest.mark.slow
def test_a_lost_master_costs_its_hits_until_a_replica_takes_over(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, attach(cluster.servers[:1], timeout=2.0) as cache:
        until(lambda: load(cache, ALL) == [], "all are stored")
        lost = cluster.servers[0]
        (shard,) = (one for one in cache._servers.shards if str(one) == str(lost.tcp))
        mine = {int(key.split(b":")[2]) for key in cluster.said(lost, "KEYS", "stallfree:*")}
        replica = cluster.add_replica(lost)
        until(lambda: cluster.said(replica, "DBSIZE") == len(mine), "the replica has them")

        def child() -> None:
            assert shown(cache.get_many(ALL)) == ALL
            os.kill(os.getpid(), signal.SIGSTOP)
            until(lambda: shown(cache.get_many(ALL)) == ALL, "the child reads the replica")

        other = Child(child)
        other.wait_until_stopped()
        lost.kill()
        for _ in range(10):
            assert shown(cache.get_many(ALL)) == [None if id in mine else id for id in ALL]
            assert cache.put_many(ALL, samples(ALL)).any()
        cache.flush()
        with pickle.loads(pickle.dumps(cache)) as late:
            assert shown(late.get_many(ALL)) == [None if id in mine else id for id in ALL], "it asks another node"
        cluster.said(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
        until(lambda: shown(cache.get_many(ALL)) == ALL, "the replica is read")
        assert shard._closed, "nothing is sent to the old master any more"
        other.signal(signal.SIGCONT)
        assert other.wait() == 0


def test_a_cluster_of_which_nothing_is_left_costs_hits(cluster: Cluster) -> None:
    """The last test that uses it."""
    with attach(cluster.servers[:1]) as cache:
        load(cache, ALL)
        copied = pickle.dumps(cache)
        for server in cluster.servers:
            server.kill()
        with pickle.loads(copied) as copy:
            for some in (cache, copy):
                assert load(some, ALL) == ALL
                some.verify(np.array(ALL))
                some.clear()
                assert some.num_keys() == 0
                assert not some.accepts
