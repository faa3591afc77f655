"""Given servers that use TLS and ACL users."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from redis_servers import Server, needs_server
from redis_tiers import ALL, PATIENT, held, put, record, tier_of
from stallfree.cache.redis.store import RedisStore, RedisTier
from stallfree.errors import InputError, StorageError

RIGHTS = "~stallfree:* +ping +info +get +mget +set +unlink"
"""What `RedisStore` says that a user needs."""

pytestmark = needs_server
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl: apt install openssl")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates that sign themselves, and their keys."""
    folder = tmp_path_factory.mktemp("certificates")
    for name, host in (("server", "localhost"), ("other", "localhost"), ("elsewhere", "elsewhere")):
        numbers = ",IP:127.0.0.1" if host == "localhost" else ""
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ]
        command += ["-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}{numbers}"]
        command += ["-keyout", f"{folder / name}.key", "-out", f"{folder / name}.pem"]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def lines(files: Path, name: str = "server") -> list[str]:
    """What a server's configuration needs for TLS."""
    pem = files / f"{name}.pem"
    return [f"tls-cert-file {pem}", f"tls-key-file {files / name}.key", f"tls-ca-cert-file {pem}"]


@pytest.fixture
def server(files: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, *lines(files)) as server:
        yield server


def trusted(files: Path, server: Server, **options: Any) -> dict[str, Any]:
    """The server as users give it."""
    mine = {"ssl_certfile": files / "server.pem", "ssl_keyfile": files / "server.key"}
    known = {"host": "localhost", "port": server.port, "ssl": True, "ssl_ca_certs": files / "server.pem"}
    return known | mine | options


@needs_openssl
def test_values_of_all_sizes_by_tls(server: Server, files: Path) -> None:
    """A record of TLS has 16 KiB at most, and what was decrypted may wait where no poll sees it."""
    sizes = [1, 40, *(16384 + step for step in range(-70, 10, 3)), 65_536, 110_000, 600_000, 3_000_000]
    with RedisStore([trusted(files, server)], timeout=PATIENT) as store:
        tier, ids = tier_of(store), ALL[: len(sizes)]
        values = [np.random.default_rng(at).integers(0, 256, size, np.uint8) for at, size in enumerate(sizes)]
        assert tier.put_many(ids, list(map(record, values))).all()
        for _ in range(3):
            assert all(np.array_equal(*both) for both in zip(tier.get_many(ids), values, strict=True))
        assert not tier.status()[0].lost


@needs_openssl
def test_servers_that_are_not_who_they_should_be(server: Server, files: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with Server(tmp_path / "elsewhere", *lines(files, "elsewhere")) as elsewhere:
        for host in (
            trusted(files, server, ssl_ca_certs=None),
            trusted(files, server, ssl_ca_certs=files / "other.pem"),
            trusted(files, server, ssl_ca_certs=files / "none.pem"),
            trusted(files, server, ssl_certfile=None, ssl_keyfile=None),
            trusted(files, elsewhere, ssl_ca_certs=files / "elsewhere.pem"),
            {"host": "localhost", "port": server.port},
        ):
            with pytest.raises(StorageError, match=r"localhost:\d+ does not answer"):
                RedisStore([host])


def works(tier: RedisTier) -> bool:
    """Use all of a tier; whether all of it worked."""
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
