"""The servers that stores of this user have started, as `running_servers` and `stallfree top` show them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from redis_tiers import ALL, put, tier_of
from stallfree.cache.redis import RedisStore, RedisTier
from stallfree.cache.redis.addresses import Address, shown_address
from stallfree.cache.redis.launch import PROGRAMS
from stallfree.cli.top import top
from stallfree.observe import servers as module
from stallfree.observe.servers import ServerRow, running_servers

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, PROGRAMS)),
    reason="neither valkey-server nor redis-server is installed: apt install redis-server",
)


@contextlib.contextmanager
def made() -> Iterator[RedisTier]:
    """The servers hold 40 samples, of which 30 were read, and 10 that are not there."""
    with RedisStore(capacity_per_node="64MiB", name="shown", timeout=60.0) as store:
        tier = tier_of(store)
        put(tier, ALL[:40])
        tier.get_many(ALL[10:50])
        yield tier


def shown() -> str:
    """The row of a server in `stallfree top --once`."""
    app = typer.Typer()
    app.command()(top)
    done = CliRunner().invoke(app, ["--once"], catch_exceptions=False, env={"COLUMNS": "140"})
    assert done.exit_code == 0
    return next(line for line in done.output.splitlines() if "shown" in line)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """The server of the store stands still."""
    (server,) = [at for at in psutil.Process().children() if at.name() in PROGRAMS]
    server.suspend()
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


def test_no_servers(store_root: Path) -> None:
    assert running_servers(store_root) == []


def test_a_server_with_its_keys_memory_and_hits(store_root: Path) -> None:
    with made() as tier:
        (row,) = running_servers(store_root)
        (status,) = tier.status()
        words = shown().split()
    assert (row.store, row.address) == ("shown", str(store_root / "redis-shown" / "socket"))
    assert (row.lost, row.keys) == (False, 40)
    assert (row.hits, row.misses) == (status.hits, status.misses) == (30, 10)
    assert 0 < row.used_bytes < row.capacity_bytes == status.capacity_bytes == 64 << 20
    assert row.connections >= 1
    assert {"shown", "answers", "40", "75.0%"} <= set(words)


def test_a_server_that_does_not_answer_is_lost(store_root: Path) -> None:
    with made():
        (before,) = running_servers(store_root)
        with frozen():
            assert running_servers(store_root) == [ServerRow("shown", before.address, True)]
            assert {"shown", "lost"} <= set(shown().split())
    assert not before.lost


def test_servers_are_probed_at_the_same_time(store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many lost servers delay the others no longer than one does."""
    found = [(name, {"port": port}) for name in ("one", "two") for port in range(1, 5)]
    together = threading.Barrier(len(found))

    def look(store: str, address: Address) -> ServerRow:
        together.wait(60)
        return ServerRow(store, shown_address(address), True)

    monkeypatch.setattr(module, "_addresses", lambda root: found)
    monkeypatch.setattr(module, "_look", look)
    rows = running_servers(store_root)
    assert [(row.store, row.address) for row in rows] == [(name, shown_address(address)) for name, address in found]
