"""A data set's cache in a Redis Cluster of real servers: whoever serves a slot, now and later."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis_servers import Cluster, FakeServer, Server, free_port, needs_server, until

import stallfree as sf
from children import Child
from stallfree.cache import MISS
from stallfree.errors import CapacityError, InputError, StorageError
from stallfree.stores.cluster import SlotEndpoint, Spot, find_spots, look, slot_of
from stallfree.stores.endpoint import Address
from stallfree.stores.servers import ServerCache
from stallfree.stores.wire import Refused

pytestmark = needs_server

ENOUGH = 60.0  # seconds that a server may be silent where that is not what is tested


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def empty(trio: Cluster) -> None:
    for server in trio.servers:
        trio.said(server, "FLUSHALL")


def attach(cluster: Cluster, num_ids: int = 300, *, by: int = 0, **options: Any) -> ServerCache:
    given = {"capacity": "1GiB", "name": "train", "fingerprint": "f", "timeout": ENOUGH} | options
    return ServerCache(num_ids, addresses=[cluster.servers[by].tcp], **given)


def keys_on(cluster: Cluster) -> list[list[str]]:
    """All keys of each node."""
    return [sorted(key.decode() for key in cluster.said(server, "KEYS", "*")) for server in cluster.servers]


def holder(cluster: Cluster, slot: int) -> Server:
    """The node that serves a slot, as all of them say."""

    def agreed() -> Any:
        layouts = [look(server.tcp, ENOUGH) for server in cluster.servers if server.process]
        ports = {layout.masters[slot].port for layout in layouts if layout and slot in layout.masters}
        return ports.pop() if len(ports) == 1 else None

    port = until(agreed, "all agree who serves the slot")
    return next(server for server in cluster.servers if server.port == port)


def start_to_move(cluster: Cluster, slot: int) -> tuple[Server, Server]:
    """Begin to give a slot to another master: whose it is, and who gets it."""
    source = holder(cluster, slot)
    target = next(server for server in cluster.servers if server is not source)
    cluster.said(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
    cluster.said(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(target))
    return source, target


def move_keys(cluster: Cluster, slot: int, source: Server, target: Server, count: int) -> None:
    keys = cluster.said(source, "CLUSTER", "GETKEYSINSLOT", slot, count)
    cluster.said(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 60000, "KEYS", *keys)


def finish_the_move(cluster: Cluster, slot: int, source: Server, target: Server) -> None:
    move_keys(cluster, slot, source, target, 1 << 20)
    for server in (target, source):
        cluster.said(server, "CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(target))
    until(lambda: holder(cluster, slot) is target, "everybody knows of the move")


def test_samples_spread_over_all_masters_and_come_back(trio: Cluster) -> None:
    samples = [torch.full((200 + id,), id) for id in range(300)]
    with attach(trio) as cache, attach(trio, by=2) as other:
        assert cache.get_many(range(300)) == [MISS] * 300
        for start in range(0, 300, 25):
            assert cache.put_many(range(start, start + 25), samples[start : start + 25]).all()
        order = np.random.default_rng(0).permutation(300)
        for some in (cache, other):
            assert all(map(torch.equal, some.get_many(order), [samples[id] for id in order]))
            assert some.num_keys() == some.stats().resident_items == 300
        samples_on = [Counter("-held" in key or "-tags" in key for key in keys)[False] for keys in keys_on(trio)]
        assert samples_on == [100, 100, 100]
        prefixes = {key.rpartition(":")[0] for keys in keys_on(trio) for key in keys if key.startswith("stallfree:")}
        assert len(prefixes) == 3, "each master has one tag, and so one slot"
        size = sum(
            trio.said(server, "STRLEN", key)
            for server, keys in zip(trio.servers, keys_on(trio), strict=True)
            for key in keys
            if key.startswith("stallfree:")
        )
        assert cache.stats().resident_bytes == size
        with pickle.loads(pickle.dumps(cache)) as travelled:
            child = Child(lambda: torch.equal(cache.get(8), samples[8]) or 1 / 0)
            assert torch.equal(travelled.get(7), samples[7])
            assert child.wait() == 0


def test_data_sets_are_apart_and_keep_to_their_capacity(trio: Cluster) -> None:
    value = torch.zeros(1000, dtype=torch.uint8)
    with attach(trio) as probe:
        probe.put(0, value)
        size = probe.stats().resident_bytes
        probe.clear()
    assert keys_on(trio) == [[], [], []], "nothing is left"
    with attach(trio, name="a", capacity=60 * size) as one, attach(trio, name="b") as two:
        there = [one.put(id, value) for id in range(300)]
        assert sum(there) == one.num_keys() == one.stats().resident_items == 60
        assert two.put_many(range(300), list(range(300))).all()
        assert [found is not MISS for found in one.get_many(range(300))] == there
        one.clear()
        assert (one.num_keys(), two.num_keys()) == (0, 300)
        assert one.stats().resident_bytes == 0
        assert two.get_many(range(300)) == list(range(300))
        assert one.put(5, value), "it is used again"


def test_a_loader_gets_the_same_samples_as_without_a_store(trio: Cluster) -> None:
    plain = [(torch.arange(40) * id, id) for id in range(90)]
    hosts = [{"host": "127.0.0.1", "port": server.port} for server in trio.servers[:2]]
    store = sf.RedisStore(hosts=hosts, capacity_per_node="1MiB", timeout=ENOUGH)
    with pytest.raises(CapacityError, match="3 servers times capacity_per_node"):
        sf.CachedDataset(plain, capacity="4MiB", store=store, name="loaded")
    with sf.CachedDataset(plain, capacity="3MiB", store=store, name="loaded") as data:
        for _ in range(2):
            with contextlib.closing(sf.DataLoader(data, batch_size=16, shuffle=True, num_workers=2)) as loader:
                seen = {int(label): row for rows, labels in loader for row, label in zip(rows, labels, strict=True)}
            assert sorted(seen) == list(range(90))
            assert all(torch.equal(seen[id], plain[id][0]) for id in seen)
        assert data.stats().storage_reads <= 90 + 2, "each once, and what was looked at when it was made"
        assert data.stats().hits >= 90


def test_a_slot_that_is_given_away_while_samples_are_read(trio: Cluster) -> None:
    with attach(trio) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.put_many(range(300), list(range(300))).all()
        shelf = cache._shelves[0]
        slot = slot_of(shelf.endpoint._spot.tag)
        owned = cache._here.owner == 0
        stop, seen = threading.Event(), list[Any]()

        def read() -> None:
            while not stop.is_set():
                seen.append(cache.get_many(range(300)))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            source, target = start_to_move(trio, slot)
            until(lambda: len(seen) > 3, "samples are read")
            move_keys(trio, slot, source, target, 50)
            halfway = cache.get_many(range(300))
            assert [found is MISS for found in halfway] == owned.tolist(), "of that part none, of the others all"
            assert not cache.put_many(range(300), list(range(300)))[owned].all()
            finish_the_move(trio, slot, source, target)
        finally:
            stop.set()
            reader.join()
        assert all(found is MISS or found == id for batch in seen for id, found in enumerate(batch))
        assert cache.get_many(range(300)) == list(range(300)), "all were moved"
        assert shelf.endpoint.address.port == target.port
        assert cache.put_many(range(300), list(range(300))).all()
        assert cache.num_keys() == cache.stats().resident_items == 300, "what is counted was moved too"
        with attach(trio) as later:
            assert later.get_many(range(300)) == list(range(300)), "whoever comes later uses the same tags"
            finish_the_move(trio, slot, *start_to_move(trio, slot)[:2])
            assert later.num_keys() == 300, "it asks who has them"
            later.clear()
        assert cache.num_keys() == 0


def test_a_lost_master_costs_its_hits_until_a_replica_takes_over(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, attach(cluster, timeout=2) as cache, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be told that the cluster is down
        assert cache.put_many(range(300), list(range(300))).all()
        lost = next(place for place, one in enumerate(cache._shelves) if one.endpoint.address == cluster.servers[0].tcp)
        owned = cache._here.owner == lost
        replica = cluster.add_replica(cluster.servers[0])
        until(lambda: cluster.said(replica, "DBSIZE") == cluster.said(cluster.servers[0], "DBSIZE"), "it has them")

        def child() -> None:
            assert cache.get_many(range(300)) == list(range(300))
            os.kill(os.getpid(), signal.SIGSTOP)
            assert cache.get_many(range(300)) == list(range(300)), "it finds the replica without a loss of its own"

        other = Child(child)
        other.wait_until_stopped()
        cluster.servers[0].kill()
        for _ in range(30):
            found = cache.get_many(range(300))
            assert all(one is MISS or one == id for id, one in enumerate(found))
            assert all(one is MISS for one, gone in zip(found, owned, strict=True) if gone)
            assert not cache.put_many(range(300), list(range(300)))[owned].any()
        with attach(cluster, by=1) as later:
            assert later._here.owner.tolist() == cache._here.owner.tolist()
        until(
            lambda: b"slave" not in cluster.said(replica, "CLUSTER", "FAILOVER", "TAKEOVER") and True, "it is promoted"
        )
        until(lambda: cache.get_many(range(300)) == list(range(300)), "the replica is asked")
        assert cache._shelves[lost].endpoint.address == replica.tcp
        other.signal(signal.SIGCONT)
        assert other.wait() == 0


@pytest.mark.slow
def test_a_cluster_that_is_down_costs_hits(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3, "cluster-node-timeout 2000") as cluster, attach(cluster, timeout=2) as cache:
        assert cache.put_many(range(300), list(range(300))).all()
        cluster.servers[0].kill()
        others = cluster.servers[1:]
        until(lambda: all(b"state:fail" in cluster.said(one, "CLUSTER", "INFO") for one in others), "they see it")

        def use() -> None:
            for _ in range(10):
                assert cache.get_many(range(300)) == [MISS] * 300
                assert not cache.put_many(range(300), list(range(300))).any()

        with pytest.warns(RuntimeWarning, match="CLUSTERDOWN") as warned:
            use()
        assert len(warned) == 2, "once for each server"
        cluster.servers[0].start()
        until(lambda: all(map(cluster.knows_all, cluster.servers)), "it is up again")
        until(lambda: cache.put_many(range(300), list(range(300))).all(), "all are stored again")
        assert cache.get_many(range(300)) == list(range(300))


def test_servers_that_do_not_belong_together(trio: Cluster, tmp_path: Path) -> None:
    with Server(tmp_path) as alone:
        for addresses in ([trio.servers[0].tcp, alone.tcp], [alone.tcp, trio.servers[0].tcp]):
            with pytest.raises(InputError, match="do not belong together"):
                find_spots(addresses, "key")
    gone = Address("127.0.0.1", free_port())
    with pytest.raises(StorageError, match="no server answers"):
        find_spots([gone], "key")
    assert find_spots([gone, trio.servers[1].tcp], "key") == find_spots([trio.servers[2].tcp], "key")


def reply(text: str) -> FakeServer:
    """A server that says PONG, and `text` when it is asked for slots."""
    return FakeServer(lambda there, words: there.sendall(b"+PONG\r\n" if words[0] == b"PING" else text.encode()))


def slots(*names: str) -> str:
    """The reply of a cluster whose slots are served by one node."""
    return f"*1\r\n*3\r\n:0\r\n:16383\r\n{names[0]}"


@pytest.mark.parametrize(
    ("node", "host"),
    [
        ("*3\r\n$5\r\nnode7\r\n:7000\r\n$2\r\nid\r\n", "node7"),
        ("*3\r\n$0\r\n\r\n:7000\r\n$2\r\nid\r\n", "127.0.0.1"),
        ("*3\r\n$-1\r\n:7000\r\n$2\r\nid\r\n", "127.0.0.1"),
        ("*4\r\n$1\r\n?\r\n:7000\r\n$2\r\nid\r\n*2\r\n$2\r\nip\r\n$8\r\n10.0.0.9\r\n", "10.0.0.9"),
        ("*3\r\n$3\r\n::1\r\n:7000\r\n$2\r\nid\r\n", "::1"),
    ],
)
def test_nodes_as_servers_name_them(node: str, host: str) -> None:
    with reply(slots(node)) as server:
        layout = look(server.tcp, ENOUGH)
    assert layout
    assert layout.nodes == (Address(host, 7000),)
    assert set(layout.masters) == set(range(16384))


@pytest.mark.parametrize(
    "text", ["*1\r\n:5\r\n", "+OK\r\n", slots("*1\r\n:5\r\n"), "*1\r\n*2\r\n:0\r\n:1\r\n", ":7\r\n"]
)
def test_nonsense_about_slots(text: str) -> None:
    with reply(text) as server, pytest.raises(StorageError, match=r"nobody understands|no slots"):
        look(server.tcp, ENOUGH)


@pytest.mark.parametrize("text", ["-ERR This instance has cluster support disabled\r\n", "-NOPERM no\r\n"])
def test_a_server_that_stands_alone(text: str) -> None:
    with reply(text) as server:
        assert find_spots([server.tcp], "key") == [Spot(server.tcp)]


def test_where_it_moves_is_told_by_the_server() -> None:
    endpoint = SlotEndpoint(Spot(Address("a", 1, password="p"), "0", ()))
    for text, host in (("MOVED 7 b:2", "b"), ("MOVED 7 ::1:2", "::1"), ("MOVED 7 :2", "::1")):
        assert endpoint.moved(Refused("MOVED", text))
        assert endpoint.address == Address(host, 2, password="p")
    assert not endpoint.moved(Refused("ASK", "ASK 7 c:2"))
    assert not endpoint.moved(Refused("OOM", "OOM no"))
    assert endpoint.address.host == "::1"
    endpoint.close()
