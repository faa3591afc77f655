"""The servers that stores of this user have started, as `running_servers` and `stallfree top` show them."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import typer
from typer.testing import CliRunner

import stallfree as sf
from stallfree.cli.top import top
from stallfree.observe import servers as module
from stallfree.observe.servers import ServerRow, running_servers
from stallfree.stores import RedisCache
from stallfree.stores.addresses import Address
from stallfree.stores.launch.server import PROGRAMS, server_folders

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, PROGRAMS)),
    reason="neither valkey-server nor redis-server is installed: apt install redis-server",
)


@contextlib.contextmanager
def made() -> Iterator[RedisCache]:
    """Of a data set of 100 samples; the servers hold 40 of them, of which 30 were read, and 10 that are not there."""
    with (
        sf.RedisStore(capacity_per_node="64MiB", name="shown", timeout=60.0) as store,
        store.attach(100, fingerprint="f", name="data") as cache,
    ):
        cache.put_many(range(40), [np.arange(100_000)] * 40)
        cache.flush()
        cache.get_many(range(10, 50))
        yield cache


def shown() -> str:
    """The row of a server in `stallfree top --once`."""
    app = typer.Typer()
    app.command()(top)
    done = CliRunner().invoke(app, ["--once"], catch_exceptions=False, env={"COLUMNS": "140"})
    assert done.exit_code == 0
    return next(line for line in done.output.splitlines() if "shown" in line)


@contextlib.contextmanager
def frozen(root: Path) -> Iterator[None]:
    """The server of the store stands still."""
    server = psutil.Process(json.loads((server_folders(root)["shown"] / "server.json").read_bytes())["pid"])
    server.suspend()
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


def test_no_servers(store_root: Path) -> None:
    assert running_servers(store_root) == []


def test_a_server_with_its_keys_memory_and_hits(store_root: Path) -> None:
    with made() as cache:
        (row,) = running_servers(store_root)
        (status,) = cache.status()
        words = shown().split()
    assert (row.store, row.address, row.lost, row.keys) == ("shown", status.name, False, 40)
    assert (row.hits, row.misses) == (status.hits, status.misses) == (30, 11)  # and the key of a random step
    assert 30 << 20 < row.used_bytes < row.capacity_bytes == status.capacity_bytes == 64 << 20
    assert row.connections >= 1
    assert words[:4] == ["shown", row.address, "answers", "40"]
    assert words[5:9] == ["of", "64.0", "MiB", "73.2%"]


def test_a_server_that_does_not_answer_is_lost(store_root: Path) -> None:
    with made():
        (before,) = running_servers(store_root)
        with frozen(store_root):
            assert running_servers(store_root) == [ServerRow("shown", before.address, True)]
            assert shown().split() == ["shown", before.address, "lost", "-", "-", "-", "-"]
    assert not before.lost


def test_servers_are_probed_at_the_same_time(store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many lost servers delay the others no longer than one does."""
    addresses = [Address(port=port) for port in range(1, 9)]
    together = threading.Barrier(len(addresses))

    def look(store: str, address: Address) -> ServerRow:
        together.wait(60)
        return ServerRow(store, str(address), True)

    monkeypatch.setattr(module, "server_folders", lambda root: {"one": root, "two": root})
    monkeypatch.setattr(module, "known_addresses", lambda folder: addresses[:4])
    monkeypatch.setattr(module, "_look", look)
    rows = running_servers(store_root)
    assert [(row.store, row.address) for row in rows] == [
        (name, str(address)) for name in ("one", "two") for address in addresses[:4]
    ]
