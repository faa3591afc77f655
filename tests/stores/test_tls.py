"""Given servers that speak TLS, and that know users: what is asked of them, and that samples are whole."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
from redis_servers import Cluster, Server, needs_server
from stallfree.stores.endpoint import Address, Endpoint
from stallfree.stores.wire import Wire, command

import stallfree as sf
from stallfree.cache import MISS
from stallfree.errors import InputError, StorageError
from stallfree.stores.buffers import Buffers
from stallfree.stores.servers import ServerCache

ENOUGH = 60.0  # seconds that a server may be silent where that is not what is tested

RIGHTS = "~stallfree* +ping +get +mget +set +strlen +unlink +del +hmget +hincrby +scan +cluster|slots"
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
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={host}", "-days", "2",
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
    order = np.random.default_rng(0).permutation(len(sizes)).tolist()
    values = {b"v%d" % at: np.random.default_rng(at).bytes(size) for at, size in enumerate(sizes)}
    made, buffers = Endpoint(Address.of(trusted(files, server)), ENOUGH), Buffers()
    for key, value in values.items():
        assert made.run(lambda wire, key=key, value=value: wire.call("SET", key, value)) == b"OK"
    keys = [b"v%d" % at for at in order] + [b"none", b"v3", b"v3", b"v3", b"v3", b"v3", b"none"]
    for typical in (100, 20_000, 1 << 20):
        found = made.run(lambda wire, typical=typical: wire.mget(keys, typical, buffers))
        assert found
        assert [one if one is None else one.tobytes() for one in found] == [values.get(key) for key in keys]
    number = made.run(lambda wire: wire.call("CLIENT", "ID"))
    assert number == made.run(lambda wire: wire.call("CLIENT", "ID")), "the connection is kept"
    made.close()


def test_waiting_takes_no_work(server: Server, files: Path) -> None:
    def wait(wire: Wire) -> float:
        wire.send(command("BLPOP", "nothing", "0.4"))
        wire.expect(ENOUGH)
        before = time.thread_time()
        assert wire.reply() is None
        return time.thread_time() - before

    made = Endpoint(Address.of(trusted(files, server)), ENOUGH)
    worked = made.run(wait)
    assert worked is not None
    assert worked < 0.1
    made.close()


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
            stranger = Endpoint(address, 5)
            assert stranger.run(lambda wire: wire.call("PING")) is None
            assert stranger.breaker.trips == 1
            stranger.close()
            with pytest.raises(StorageError, match="no server answers at localhost"):
                ServerCache(5, addresses=[address], capacity=1, name="a", fingerprint="b")


def test_a_data_set_by_tls(server: Server, files: Path) -> None:
    plain = [(torch.arange(9000) * id, id) for id in range(60)]
    store = sf.RedisStore(hosts=[trusted(files, server)], capacity_per_node="64MiB", timeout=ENOUGH)
    with sf.CachedDataset(plain, capacity="64MiB", store=store, name="encrypted") as data:
        for _ in range(2):
            with contextlib.closing(sf.DataLoader(data, batch_size=8, shuffle=True, num_workers=2)) as loader:
                seen = {int(label): row for rows, labels in loader for row, label in zip(rows, labels, strict=True)}
            assert all(torch.equal(seen[id], plain[id][0]) for id in range(60))
        assert data.stats().hits >= 60
        data.cache.clear()


def use(cache: ServerCache, admin: redis.Redis) -> None:
    """All that is done with a cache."""
    assert cache.put_many(range(50), list(range(50))).all()
    damaged = next(key for key in admin.scan_iter("stallfree:*"))
    admin.append(damaged, b"x")
    assert sum(found is MISS for found in cache.get_many(range(50))) == 1
    assert cache.put_many(range(50), list(range(50))).all()
    assert cache.get_many(range(50)) == list(range(50))
    assert (cache.num_keys(), cache.stats().resident_items, cache.stats().damaged) == (50, 50, 1)
    cache.clear()
    assert cache.num_keys() == 0


def test_what_a_user_needs(tmp_path: Path) -> None:
    users = ["user default off", "user admin on >all ~* &* +@all", f"user worker on >word {RIGHTS}"]
    with (
        Server(
            tmp_path, *users, f"user other on >word {RIGHTS} +select", "user reader on >word ~stallfree* +@read +ping"
        ) as server,
        redis.Redis(unix_socket_path=server.path, username="admin", password="all", protocol=2) as admin,
    ):
        worker = dataclasses.replace(server.tcp, username="worker", password="word")
        with ServerCache(50, addresses=[worker], capacity="1GiB", name="a", fingerprint="f", timeout=ENOUGH) as cache:
            use(cache, admin)
        assert admin.acl_log() == [], "nothing else was asked"
        third = dataclasses.replace(worker, username="other", db=3)
        with ServerCache(50, addresses=[third], capacity="1GiB", name="a", fingerprint="f", timeout=ENOUGH) as cache:
            cache.put(1, 2)
            assert cache.get(1) == 2
        assert admin.acl_log() == []
        with pytest.raises(InputError, match="does not let us in"):
            ServerCache(50, addresses=[dataclasses.replace(worker, db=3)], capacity=1, name="a", fingerprint="f")
        for right in [one for one in RIGHTS.split() if one not in ("~stallfree*", "+ping", "+get", "+cluster|slots")]:
            assert admin.execute_command(
                "ACL", "SETUSER", "poor", "reset", "on", ">word", *RIGHTS.split(), f"-{right[1:]}"
            )
            poor = dataclasses.replace(worker, username="poor")
            admin.acl_log_reset()
            with (
                ServerCache(
                    50, addresses=[poor], capacity="1GiB", name=right, fingerprint="f", timeout=ENOUGH
                ) as cache,
                pytest.warns(RuntimeWarning, match="NOPERM") if right in WARNED else contextlib.nullcontext(),
                contextlib.suppress(AssertionError),
            ):
                use(cache, admin)
            denied = admin.acl_log()
            assert [entry["object"] for entry in denied][-1:] == [right[1:]], f"without {right} something is missing"
            admin.flushall()


WARNED = ("+mget", "+set", "+strlen", "+unlink", "+hmget", "+hincrby")


def test_a_cluster_by_tls_with_users(files: Path, tmp_path: Path) -> None:
    extra = [*lines(files), "tls-cluster yes", "tls-replication yes"]
    with Cluster(tmp_path, 3, *extra, "user admin on >all ~* &* +@all", f"user worker on >word {RIGHTS}") as cluster:
        for server in cluster.servers:
            cluster.said(server, "ACL", "LOG", "RESET")
        given = trusted(files, cluster.servers[1], username="worker", password="word")
        addresses = [Address.of(given)]
        with ServerCache(90, addresses=addresses, capacity="1GiB", name="a", fingerprint="f", timeout=ENOUGH) as cache:
            values = [torch.full((7000,), id) for id in range(90)]
            assert cache.put_many(range(90), values).all()
            assert all(map(torch.equal, cache.get_many(range(90)), values))
            assert [cluster.said(server, "DBSIZE") >= 30 for server in cluster.servers] == [True] * 3
            assert cache.num_keys() == 90
            cache.clear()
        assert [cluster.said(server, "DBSIZE") for server in cluster.servers] == [0] * 3
        assert [cluster.said(server, "ACL", "LOG") for server in cluster.servers] == [[], [], []]
