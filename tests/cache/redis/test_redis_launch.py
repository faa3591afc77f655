"""The server of a node: who starts it, who finds it, and when it ends; and which node of a job this is."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

import stallfree as sf
from children import Child
from redis_servers import needs_server, until
from redis_tiers import ALL, PATIENT, held, put, tier_of
from stallfree.cache.redis.launch import find_host, find_node, find_server
from stallfree.cache.redis.store import RedisStore
from stallfree.errors import CapacityError, InputError, MissingServerError
from stallfree.ipc.folders import default_root, sweep

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)


def open_store(name: str = "one", **options: Any) -> RedisStore:
    return RedisStore(**{"capacity_per_node": "64MiB", "name": name, "timeout": PATIENT, **options})


def server_of(name: str = "one") -> psutil.Process:
    """The process of a store's server, in whose folder it works."""
    folder = str(default_root() / f"redis-{name}")

    def find() -> psutil.Process | None:
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.info["name"] in ("redis-server", "valkey-server") and process.cwd() == folder:
                    return process
        return None

    found: psutil.Process = until(find, "the server runs")
    return found


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(process: psutil.Process) -> None:
    """Kill a server, and wait until its starter can see it."""
    process.kill()
    with contextlib.suppress(ChildProcessError):  # of another process, or waited for already
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it counts as a zombie while its threads still run
    until(lambda: has_ended(process), "it has ended")


# --- start and end --------------------------------------------------------------------------------------------------


@needs_server
def test_all_processes_of_a_node_share_the_server_of_the_first() -> None:
    ready = threading.Barrier(4)

    def child() -> None:
        with open_store() as store:
            tier = tier_of(store)
            until(lambda: put(tier, ALL).all() and held(tier) == ALL.tolist(), "it works")
            os.kill(os.getpid(), signal.SIGSTOP)

    children = [Child(child) for _ in range(ready.parties)]
    for one in children:
        one.wait_until_stopped()
    server = server_of()
    assert sum(psutil.Process(one.pid).children() == [server] for one in children) == 1
    for one in children:
        one.signal(signal.SIGCONT)
    assert [one.wait() for one in children] == [0] * 4
    until(lambda: has_ended(server), "it ended with its starter")
    assert not (default_root() / "redis-one").exists()


@needs_server
def test_nothing_is_left_after_sigkill_of_everything() -> None:
    def child() -> None:
        with open_store() as store:
            worker = Child(lambda: signal.pause())
            assert put(tier_of(store), ALL).all()
            (default_root() / "worker").write_text(str(worker.pid))
            signal.pause()

    starter = Child(child)
    worker = int(until(lambda: (file := default_root() / "worker").exists() and file.read_text(), "it runs"))
    server = server_of()
    starter.kill()
    until(lambda: has_ended(server), "it ended with its starter, though a worker lives")
    os.kill(worker, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(worker), "the worker has ended")
    (default_root() / "worker").unlink()
    assert "redis-one" in sweep(default_root())
    assert os.listdir(default_root()) == []


@needs_server
def test_it_may_be_started_by_a_thread_that_ends() -> None:
    stores: list[RedisStore] = []
    thread = threading.Thread(target=lambda: stores.append(open_store()))
    thread.start()
    thread.join()
    tier = tier_of(stores[0])
    assert put(tier, ALL).all()
    assert held(tier) == ALL.tolist()
    stores[0].close()


@needs_server
def test_a_server_that_has_died_is_replaced_when_an_epoch_begins() -> None:
    with open_store() as store:
        tier, before = tier_of(store), server_of()
        put(tier, ALL)
        tier.begin_epoch()
        assert held(tier) == ALL.tolist()
        worker = Child(lambda: until(lambda: held(tier) == [], "lost") or until(lambda: len(held(tier)) == 3, "back"))
        kill(before)
        assert held(tier) == []
        assert not put(tier, ALL).any()
        assert tier.status()[0].lost
        until(lambda: before.pid not in (tier.begin_epoch() or [server_of().pid]), "another one runs")
        assert put(tier, ALL[:3]).all()
        assert held(tier) == [0, 1, 2]
        assert worker.wait() == 0, "a worker that is older than the server finds it"


@needs_server
@pytest.mark.parametrize("how", ["DataLoader", "SharedLoader", "set_epoch"])
def test_every_way_to_begin_an_epoch_replaces_it(how: str) -> None:
    with open_store() as store, sf.CachedDataset(range(50), capacity=0, store=store, name="rows") as cached:
        kill(server_of())
        if how == "set_epoch":
            cached.set_epoch(1)
        else:
            options = {"group": "rows"} if how == "SharedLoader" else {}
            with getattr(sf, how)(cached, batch_size=10, **options) as loader:
                assert sorted(int(id) for batch in loader for id in batch) == list(range(50))
        assert server_of().is_running()


@needs_server
def test_another_process_takes_over_when_the_starter_has_died() -> None:
    def child() -> None:
        with open_store():
            os.kill(os.getpid(), signal.SIGSTOP)

    starter = Child(child)
    starter.wait_until_stopped()
    with open_store() as store:
        tier, server = tier_of(store), server_of()
        put(tier, ALL)
        assert Child(tier.begin_epoch).wait() == 0
        starter.kill()
        until(lambda: has_ended(server), "it ended with its starter")
        assert held(tier) == []
        Child(lambda: held(tier) and 1 / 0).wait()
        tier.begin_epoch()
        assert put(tier, ALL).all()
        assert held(tier) == ALL.tolist()


@needs_server
def test_stores_of_one_process() -> None:
    with open_store() as first, open_store() as same, open_store("two") as other:
        put(tier_of(first), ALL)
        assert held(tier_of(same)) == ALL.tolist()
        assert held(tier_of(other)) == []
        assert repr(first) == "RedisStore('one', redis-one of node 0 )"
        assert (first.room, tier_of(first).num_nodes, tier_of(first).me) == (64 << 20, 1, 0)
        first.close()
        tier = tier_of(same)
        assert held(tier) == []
        tier.begin_epoch()
        assert put(tier, ALL).all()


@needs_server
def test_only_this_user_can_reach_it() -> None:
    with open_store():
        folder = default_root() / "redis-one"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        server = server_of()
        assert "requirepass" not in " ".join(server.cmdline())
        assert not [at for at in server.net_connections() if at.status == psutil.CONN_LISTEN], "it has no port"
        with redis.Redis(unix_socket_path=str(folder / "socket")) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


@needs_server
def test_closing_in_a_forked_child_takes_nothing_from_the_parent() -> None:
    with open_store() as store:
        tier = tier_of(store)
        assert Child(store.close).wait() == 0
        assert put(tier, ALL).all()


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> str:
    return find_server()


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a script the only server on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", os.path.realpath("/proc/self/exe"))

    def write(script: str) -> None:
        (tmp_path / "valkey-server").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "valkey-server").chmod(0o700)

    return write


def test_without_a_server(bare_path: Callable[[str], None]) -> None:
    with pytest.raises(MissingServerError, match="apt install redis-server"):
        open_store()
    bare_path("echo it is broken; exit 3")
    with pytest.raises(MissingServerError, match="it is broken"):
        open_store()


@needs_server
def test_a_restart_that_fails_is_no_error(
    server: str, bare_path: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    bare_path(f'exec {server} "$@"')
    with open_store() as store:
        tier = tier_of(store)
        bare_path("echo it is broken; exit 3")
        kill(server_of())
        until(lambda: tier.begin_epoch() or "it is broken" in caplog.text, "it is in the log")
        assert held(tier) == []


def test_more_than_the_free_memory() -> None:
    with pytest.raises(CapacityError, match="capacity_per_node"):
        open_store(capacity_per_node=1 << 60)
    assert not (default_root() / "redis-one").exists()


# --- nodes of a job -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        ({}, (0, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, (1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}, (3, 4)),
        ({"RANK": "3", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, (3, 5)),
    ],
)
def test_the_node_by_the_environment(
    environment: dict[str, str], node: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_node() == node


@pytest.mark.parametrize(
    "environment", [{"RANK": "x"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "-1"}]
)
def test_an_environment_that_makes_no_sense(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError):
        find_node()


def test_the_address_of_this_host() -> None:
    assert find_host("127.0.0.1") == "127.0.0.1"
    with pytest.raises(InputError, match="no route to it"):
        find_host("no.such.host.")


def test_a_job_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stallfree.cache.redis.launch.RENDEZVOUS_SECONDS", 0.1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for port in ("", "1"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(TimeoutError, match="does not answer"):
            open_store()
