"""Given servers that use TLS and ACL users: what is requested of them, and that samples are whole."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from redis_servers import Cluster, Server, needs_server
from redis_tools import COUNT, ENOUGH, load, name_of
from stallfree.errors import InputError, StorageError
from stallfree.stores.addresses import Address
from stallfree.stores.redis_cache import RedisCache
from stallfree.stores.servers import find_servers
from stallfree.stores.shard import FixedLocation, Shard

ALL = list(range(COUNT))

RIGHTS = "~stallfree:* +ping +info +get +mget +set +unlink +scan +cluster|slots"
"""What `RedisStore` says that a user needs."""

pytestmark = [
    needs_server,
    pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make certificates with: apt install openssl"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates that sign themselves, "server" and "other", and their keys."""
    folder = tmp_path_factory.mktemp("certificates")
    for name, host in (("server", "localhost"), ("other", "localhost"), ("elsewhere", "elsewhere")):
        numbers = ",IP:127.0.0.1" if host == "localhost" else ""
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-subj", f"/CN={host}", "-days", "2",
             "-addext", f"subjectAltName=DNS:{host}{numbers}",
             "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"],
            check=True, capture_output=True,
        )  # fmt: skip
    return folder


def lines(files: Path, name: str = "server") -> list[str]:
    """What a server's configuration needs for TLS."""
    return [
        f"tls-cert-file {files / name}.pem",
        f"tls-key-file {files / name}.key",
        f"tls-ca-cert-file {files / name}.pem",
    ]


@pytest.fixture(scope="module")
def server(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), *lines(files)) as there:
        yield there


def trusted(files: Path, server: Server, **options: Any) -> dict[str, Any]:
    """The server as users give it."""
    mine = {"ssl_certfile": str(files / "server.pem"), "ssl_keyfile": str(files / "server.key")}
    known = {"host": "localhost", "port": server.port, "ssl": True, "ssl_ca_certs": str(files / "server.pem")}
    return known | mine | options


def test_values_of_all_sizes(server: Server, files: Path) -> None:
    """A record of TLS has 16 KiB at most, and what was decrypted may wait where no poll sees it."""
    sizes = [*range(1, 40, 3), *(16384 + step for step in range(-70, 10)), 60_000, 65_536, 110_000, 600_000, 3_000_000]
    values = {b"v%d" % at: np.random.default_rng(at).bytes(size) for at, size in enumerate(sizes)}
    shard = Shard(FixedLocation(Address.of(trusted(files, server))), ENOUGH)
    assert shard.send([("SET", key, value) for key, value in values.items()]) == [b"OK"] * len(values)
    keys = [b"none", *reversed(values), b"v3", b"v3", b"none"]
    for step in (1, 20, 200):
        found: dict[int, Any] = {}
        requests = [[("MGET", *keys[start : start + step])] for start in range(0, len(keys), step)]
        assert shard.read(requests, found.__setitem__)
        assert [found[at] for at in range(len(keys))] == [values.get(key) for key in keys]
    assert shard.send([("CLIENT", "ID")]) == shard.send([("CLIENT", "ID")]), "the connection is kept"
    shard.close()


def test_servers_that_are_not_who_they_should_be(server: Server, files: Path, tmp_path: Path) -> None:
    with Server(tmp_path, *lines(files, "elsewhere")) as elsewhere:
        cases: list[dict[str, Any]] = [
            trusted(files, server, ssl_ca_certs=None),
            trusted(files, server, ssl_ca_certs=str(files / "other.pem")),
            trusted(files, server, ssl_ca_certs=str(files / "none.pem")),
            trusted(files, server, ssl_certfile=None, ssl_keyfile=None),
            trusted(files, elsewhere, ssl_ca_certs=str(files / "elsewhere.pem")),
            {"host": "localhost", "port": server.port},
        ]
        for given in cases:
            address = Address.of(given)
            shard = Shard(FixedLocation(address), 5)
            assert shard.send([("PING",)]) is None
            assert shard.breaker.trips == 1
            shard.close()
            with pytest.raises(StorageError, match=r"localhost:\d+ does not answer"):
                find_servers([address], 1)


def use(cache: RedisCache) -> bool:
    """Use all of a cache; whether all of it worked."""
    load(cache, ALL)
    with client_of_admin(cache) as admin:
        admin.append(name_of(cache, 3), b"x")
    good = load(cache, ALL) == [3] and load(cache, ALL) == [] and cache.num_keys() == COUNT
    good = bool(cache.verify(np.array(ALL)).all()) and good and not any(state.lost for state in cache.status())
    cache.uncache_steps()
    return good and cache.num_keys() == 0


def client_of_admin(cache: RedisCache) -> redis.Redis:
    """A client that may do everything."""
    address = cache._servers.shards[0].location.find()[1]
    return dataclasses.replace(address, username="admin", password="all", db=address.db).client(ENOUGH)


def attach_as(server: Server, name: str, user: str, db: int = 0) -> RedisCache:
    address = Address("127.0.0.1", server.port, username=user, password="word", db=db)
    return RedisCache(COUNT, servers=find_servers([address], ENOUGH), name=name, fingerprint="f", limit=1 << 40)


def test_what_a_user_needs(tmp_path: Path) -> None:
    users = ["user default off", "user admin on >all ~* &* +@all", f"user worker on >word {RIGHTS}"]
    with (
        Server(tmp_path, *users, f"user other on >word {RIGHTS} +select") as server,
        redis.Redis(unix_socket_path=server.path, username="admin", password="all", protocol=2) as admin,
    ):
        for user, db in (("worker", 0), ("other", 3)):
            with attach_as(server, user, user, db) as cache:
                assert use(cache)
        assert admin.acl_log() == [], "nothing else was requested"
        with pytest.raises(InputError, match="refuses access"):
            attach_as(server, "a", "worker", 3)
        for right in RIGHTS.split()[1:]:
            admin.execute_command("ACL", "SETUSER", "poor", "reset", "on", ">word", *RIGHTS.split(), f"-{right[1:]}")
            admin.acl_log_reset()
            if right == "+ping":
                with pytest.raises(InputError, match="refuses access"):
                    attach_as(server, "a", "poor")
            elif right not in ("+get", "+cluster|slots"):  # which a Redis Cluster needs
                with warnings.catch_warnings(record=True) as caught, attach_as(server, right[1:], "poor") as cache:
                    warnings.simplefilter("always")
                    assert not use(cache)
                assert "refuses samples" in str([warning.message for warning in caught]), right
            denied = {entry["object"] for entry in admin.acl_log()}
            assert denied == ({right[1:]} if right not in ("+get", "+cluster|slots") else set())


@pytest.mark.slow
def test_a_cluster_by_tls_with_users(files: Path, tmp_path: Path) -> None:
    extra = [*lines(files), "tls-cluster yes", "tls-replication yes"]
    with Cluster(tmp_path, 3, *extra, "user admin on >all ~* &* +@all", f"user worker on >word {RIGHTS}") as cluster:
        given = trusted(files, cluster.servers[1], username="worker", password="word")
        servers = find_servers([Address.of(given)], ENOUGH)
        with RedisCache(COUNT, servers=servers, name="a", fingerprint="f") as cache:
            load(cache, ALL)
            assert load(cache, ALL) == []
            assert cache.num_keys() == COUNT
            assert min(cluster.said(server, "DBSIZE") for server in cluster.servers) > 0
            cache.uncache_steps()
        assert sum(cluster.said(server, "DBSIZE") for server in cluster.servers) == 1, "the key that ends its use"
        assert [cluster.said(server, "ACL", "LOG") for server in cluster.servers] == [[], [], []]
