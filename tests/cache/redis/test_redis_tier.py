"""The samples of a data set in given servers, as a process uses them, and what is wrong with them or with a server."""

import contextlib
import pickle
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from children import Child
from redis_servers import Cluster, FakeServer, Server, free_port, needs_server, until
from redis_tiers import ALL, COUNT, PATIENT, admin, given, held, put, record, tier_of
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


def test_values_are_replaced_and_come_in_parts(tier: RedisTier) -> None:
    """All else that a tier does is in `testing.TierContract`."""
    tier.put_many(ALL[:1], [record((np.zeros(3), "other"))])
    assert put(tier, ALL).all()
    assert held(tier, ALL[::-1]) == ALL[::-1].tolist()
    parts = tier.parts(ALL)
    assert sorted(np.concatenate(parts).tolist()) == ALL.tolist()
    assert [(len(part), set(tier.owner(part).tolist())) for part in parts] == [(COUNT // 2, {0}), (COUNT // 2, {1})]
    assert (tier.me, tier.num_nodes) == (None, 1)
    rows = tier.status()
    assert all(row.used_bytes > 0 == row.capacity_bytes and row.hits > 0 and not row.lost for row in rows)
    assert len({row.name for row in rows}) == 2


def test_data_sets_do_not_touch_each_other(pair: list[Server]) -> None:
    names = [("a", "f"), ("a", "g"), ("b", "f"), ("a*", "f"), ("a[b]/\n", "f")]
    with given(*pair) as store, given(*pair[::-1]) as again, admin(pair[0]) as client:
        tiers = [tier_of(store, name, fingerprint) for name, fingerprint in names]
        client.set("mine", "x")
        assert all(put(tier, ALL, salt).all() for salt, tier in enumerate(tiers))
        assert [len(held(tier, ALL, salt)) for salt, tier in enumerate(tiers)] == [COUNT] * 5
        assert held(tier_of(again, "a"), ALL) == ALL.tolist(), "the order of servers does not matter"
        tiers[0].clear()
        assert [len(held(tier, ALL, salt)) for salt, tier in enumerate(tiers)] == [0, *[COUNT] * 4]
        assert client.get("mine") == b"x"


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


@pytest.mark.parametrize("limited", [False, True])
def test_a_full_server_stores_nothing_and_keeps_what_it_has(limited: bool, pair: list[Server]) -> None:
    full, room = pair[0], 1 if limited else None
    with given(full, capacity_per_node=room) as store, given(full) as other, admin(full) as client:
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


@pytest.mark.parametrize("reply", [
    b"\x00\xff garbage\r\n", b":7\r\n",
    b"*1\r\n$1\r\nx\r\n",  # too few values
    b"*300\r\n" + b"$-1\r\n" * 300,
    b"*200\r\n" + b"*1\r\n:1\r\n" * 200,  # a nested list
    b"$999999999999\r\n",
    b"*200\r\n$100\r\nxyz",  # half a reply
    b"*200\r\n" + b"$-1\r\n" * 200 + b"$1\r\nx\r\n",  # more than requested
    b"",  # a reply that comes byte by byte
])  # fmt: skip
def test_nonsense_is_a_miss(reply: bytes) -> None:
    def answer(connection: socket.socket, words: list[bytes]) -> None:
        known = {b"PING": b"+PONG\r\n", b"INFO": b"$0\r\n\r\n"}.get(words[0], reply)
        connection.sendall(known or b"*200\r\n$100000\r\n")
        while not known:
            connection.sendall(b"x")
            time.sleep(0.01)

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


def test_a_closed_store(pair: list[Server]) -> None:
    store = given(*pair)
    tier = tier_of(store)
    put(tier, ALL)
    tier.close()
    assert str(pair[0].port) in repr(store)
    assert store.sample_bytes == 0
    store.close()
    store.close()
    assert (held(tier), put(tier, ALL).any()) == ([], False)
    with pytest.raises(InputError, match="is closed"):
        tier_of(store)


def test_servers_and_arguments_that_cannot_be_used(tmp_path: Path, pair: list[Server]) -> None:
    hosts: list[Any] = ["localhost:6379", {"hots": "a"}, {"port": "first"}, {"path": "/a", "port": 1}]
    for host, message in zip(hosts, ("no list of dicts", "hots", "port", "port"), strict=True):
        with pytest.raises(InputError, match=message):
            RedisStore([host])
    for options in ({}, {"capacity_per_node": 0}, {"hosts": []}, {"hosts": {"host": "a"}}, {"port": -1}, {"name": "/"}):
        with pytest.raises(InputError):
            RedisStore(**({"capacity_per_node": "1MiB", **options} if options else {}))  # type: ignore[arg-type]
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


RIGHTS = "~stallfree:* +ping +info +get +mget +set +unlink"  # what `RedisStore` says that a user needs
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl: apt install openssl")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name, host in (("server", "localhost"), ("other", "localhost"), ("elsewhere", "elsewhere")):
        names = "DNS:localhost,IP:127.0.0.1" if host == "localhost" else "DNS:elsewhere"
        command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={host}"
        command += f" -addext subjectAltName={names} -keyout {folder / name}.key -out {folder / name}.pem"
        subprocess.run(command.split(), check=True, capture_output=True)
    return folder


def started(folder: Path, files: Path, name: str = "server") -> Server:
    pem = files / f"{name}.pem"
    return Server(folder, f"tls-cert-file {pem}", f"tls-key-file {files / name}.key", f"tls-ca-cert-file {pem}")


def trusted(files: Path, server: Server, **options: Any) -> dict[str, Any]:
    mine = {"ssl_certfile": files / "server.pem", "ssl_keyfile": files / "server.key"}
    known = {"host": "localhost", "port": server.port, "ssl": True, "ssl_ca_certs": files / "server.pem"}
    return known | mine | options


@needs_openssl
def test_values_of_all_sizes_by_tls(files: Path, tmp_path: Path) -> None:
    """A record of TLS has 16 KiB at most, and what was decrypted may wait where no poll sees it."""
    sizes = [1, 40, *(16384 + step for step in range(-70, 10, 3)), 65_536, 110_000, 600_000, 3_000_000]
    with started(tmp_path, files) as server, RedisStore([trusted(files, server)], timeout=PATIENT) as store:
        tier, ids = tier_of(store), ALL[: len(sizes)]
        values = [np.random.default_rng(at).integers(0, 256, size, np.uint8) for at, size in enumerate(sizes)]
        assert tier.put_many(ids, list(map(record, values))).all()
        for _ in range(3):
            assert all(np.array_equal(*both) for both in zip(tier.get_many(ids), values, strict=True))
        assert not tier.status()[0].lost


@needs_openssl
def test_servers_that_are_not_who_they_should_be(files: Path, tmp_path: Path) -> None:
    with started(tmp_path, files) as server, started(tmp_path, files, "elsewhere") as elsewhere:
        for host in (
            trusted(files, server, ssl_ca_certs=None), trusted(files, server, ssl_ca_certs=files / "other.pem"),
            trusted(files, server, ssl_ca_certs=files / "none.pem"),
            trusted(files, server, ssl_certfile=None, ssl_keyfile=None),
            trusted(files, elsewhere, ssl_ca_certs=files / "elsewhere.pem"), {"host": "localhost", "port": server.port},
        ):  # fmt: skip
            with pytest.raises(StorageError, match=r"localhost:\d+ does not answer"):
                RedisStore([host])


def works(tier: RedisTier) -> bool:
    with contextlib.suppress(StorageError):
        stored = put(tier, ALL).all() and held(tier) == ALL.tolist() and tier.status()[0].used_bytes > 0
        tier.drop(ALL[:5])
        left = held(tier) == ALL[5:].tolist()
        tier.clear()
        return bool(stored and left and held(tier) == [] and not tier.status()[0].lost)
    return False


def test_what_a_user_needs(tmp_path: Path) -> None:
    users = ["user default off", "user admin on >all ~* &* +@all", f"user worker on >word {RIGHTS}"]
    with (
        Server(tmp_path, *users, f"user other on >word {RIGHTS} +select") as server,
        redis.Redis(unix_socket_path=server.path, username="admin", password="all", protocol=2) as admin,
    ):
        mine = {**server.host, "password": "word"}
        for user, db in (("worker", None), ("other", 3)):
            with RedisStore([{**mine, "username": user, "db": db}], timeout=PATIENT) as store:
                assert works(tier_of(store))
        with pytest.raises(InputError, match="refuses access"):
            RedisStore([{**mine, "username": "worker", "db": 3}])
        for right in RIGHTS.split()[1:]:
            admin.execute_command("ACL", "SETUSER", "poor", "reset", "on", ">word", *RIGHTS.split(), f"-{right[1:]}")
            if right in ("+ping", "+info"):
                with pytest.raises(InputError, match="refuses access"):
                    RedisStore([{**mine, "username": "poor"}])
            elif right != "+get":  # which a Redis Cluster needs
                with RedisStore([{**mine, "username": "poor"}], timeout=PATIENT) as store:
                    assert not works(tier_of(store)), right
