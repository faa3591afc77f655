"""The server of a node: who starts it, who finds it, and when it ends; and which node of a job this is."""

import contextlib
import os
import signal
import stat
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import redis
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import stallfree as sf
from children import Child, Holder, gone, run_threads
from redis_servers import needs_server, server_in, until
from redis_tiers import ALL, PATIENT, held, put, tier_of
from stallfree.cache.redis.launch import NodeServer, find_host, find_node, find_server
from stallfree.ipc.folders import default_root


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def open_store(name: str = "one", **options: Any) -> sf.RedisStore:
    return sf.RedisStore(**{"capacity_per_node": "64MiB", "name": name, "timeout": PATIENT, **options})


def server_of(name: str = "one") -> psutil.Process:
    return server_in(default_root() / f"redis-{name}")


def kill(process: psutil.Process) -> None:
    process.kill()
    with contextlib.suppress(ChildProcessError):  # of another process, or waited for already
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it counts as a zombie while its threads still run
    until(lambda: gone(process.pid))


@needs_server
def test_all_processes_of_a_node_share_the_server_of_the_first() -> None:
    def child() -> None:
        with open_store() as store:
            tier = tier_of(store)
            until(lambda: put(tier, ALL).all() and held(tier) == ALL.tolist(), "it works")
            os.kill(os.getpid(), signal.SIGSTOP)

    children = [Child(child) for _ in range(4)]
    for one in children:
        one.wait_until_stopped()
    server, folder = server_of(), default_root() / "redis-one"
    assert sum(psutil.Process(one.pid).children() == [server] for one in children) == 1
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.getsid(server.pid) != os.getsid(0), "Ctrl-C does not end it"
    assert "requirepass" not in " ".join(server.cmdline())
    assert not [at for at in server.net_connections() if at.status == psutil.CONN_LISTEN], "it has no port"
    with redis.Redis(unix_socket_path=str(folder / "socket")) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    for one in children:
        one.signal(signal.SIGCONT)
    assert [one.wait() for one in children] == [0] * 4
    until(lambda: gone(server.pid))
    assert not folder.exists()


@needs_server
def test_a_server_that_has_died_is_replaced_when_an_epoch_begins(tmp_path: Path) -> None:
    stores: list[sf.RedisStore] = []
    run_threads(lambda: stores.append(open_store()))  # the thread that starts it may end
    with stores[0] as store:
        tier, before = tier_of(store), server_of()
        put(tier, ALL)
        tier.begin_epoch()
        assert held(tier) == ALL.tolist()

        def work() -> None:
            until(lambda: held(tier) == [], "it is lost")
            (tmp_path / "lost").touch()
            until(lambda: len(held(tier)) == 3, "it is back")

        worker = Child(work)
        kill(before)
        assert (held(tier), put(tier, ALL).any(), tier.status()[0].lost) == ([], False, True)
        until((tmp_path / "lost").exists)  # before another one has anything
        until(lambda: before.pid not in (tier.begin_epoch() or [server_of().pid]), "another one runs")
        assert put(tier, ALL[:3]).all()
        assert held(tier) == [0, 1, 2]
        assert worker.wait() == 0, "a worker that is older than the server finds it"


@needs_server
def test_every_way_to_begin_an_epoch_replaces_it() -> None:
    with open_store() as store, sf.CachedDataset(range(50), capacity=0, store=store, name="rows") as cached:
        for kind, options in ((None, {}), (sf.DataLoader, {}), (sf.SharedLoader, {"group": "rows"})):
            kill(server_of())
            if kind is None:
                cached.set_epoch(1)
            else:
                with kind(cached, batch_size=10, **options) as loader:
                    assert sorted(int(id) for batch in loader for id in batch) == list(range(50))
            assert server_of().is_running()


@needs_server
def test_another_process_takes_over_when_the_starter_has_died() -> None:
    starter = Holder(lambda: open_store().close)
    with open_store() as store:
        tier, server = tier_of(store), server_of()
        put(tier, ALL)
        assert Child(tier.begin_epoch).wait() == 0
        starter.kill()
        until(lambda: gone(server.pid))
        assert held(tier) == []
        tier.begin_epoch()
        assert put(tier, ALL).all()
        assert held(tier) == ALL.tolist()


@needs_server
def test_stores_of_one_process_and_of_a_forked_child() -> None:
    with open_store() as first, open_store() as same, open_store("two") as other:
        put(tier_of(first), ALL)
        assert (held(tier_of(same)), held(tier_of(other))) == (ALL.tolist(), [])
        assert repr(first) == "RedisStore('one', redis-one of node 0 )"
        assert (first.sample_bytes, tier_of(first).num_nodes, tier_of(first).me) == (64 << 20, 1, 0)
        assert Child(first.close).wait() == 0
        assert held(tier_of(first)) == ALL.tolist(), "a child takes nothing from its parent"
        first.close()
        tier = tier_of(same)
        assert held(tier) == []
        tier.begin_epoch()
        assert put(tier, ALL).all()


@pytest.fixture
def only_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a script the only server on the PATH."""

    def write(script: str) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr("sys.executable", os.path.realpath("/proc/self/exe"))
        (tmp_path / "valkey-server").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "valkey-server").chmod(0o700 if script else 0o600)

    return write


def test_without_a_server(only_server: Callable[[str], None]) -> None:
    for script, message in (("", "apt install redis-server"), ("echo it is broken; exit 3", "it is broken")):
        only_server(script)
        with pytest.raises(sf.MissingServerError, match=message):
            open_store()
    with pytest.raises(sf.CapacityError, match="capacity_per_node"):
        open_store(capacity_per_node=1 << 60)
    assert not (default_root() / "redis-one").exists()


@needs_server
def test_a_restart_that_fails_is_no_error(only_server: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    only_server(f'exec {find_server()} "$@"')
    with open_store() as store:
        tier = tier_of(store)
        only_server("echo it is broken; exit 3")
        kill(server_of())
        until(lambda: tier.begin_epoch() or "it is broken" in caplog.text, "it is in the log")
        assert held(tier) == []


BEATS = {"5a 6a 6a": "", "5a 6a 7a": "7a", "5a 0b": "0b", "5a 6a 0b": "0b"}  # records, and the one that is confirmed


@pytest.mark.parametrize("beats", BEATS)
def test_a_lost_server_is_used_again_after_two_beats_or_a_start(beats: str) -> None:
    """One beat may have been under way when it died: its port may belong to a stranger by now."""
    records = [{"beat": int(beat[0]), "password": beat[1]} for beat in beats.split()]
    node: Any = object.__new__(NodeServer)
    node._stop = Mock(wait=Mock(side_effect=[*[False] * len(records), True]))
    node._launch = lambda: (Mock(poll=lambda: None), {"beat": 0})
    node._exchange = Mock(side_effect=[{"lost": record} for record in records])
    node.servers = Mock()
    node._keep(Future())
    found = [call.args[0] for call in node.servers.confirm.call_args_list]
    assert "".join(f"{record['beat']}{record['password']}" for record in found) == BEATS[beats]


NODES: dict[str, Any] = {  # by RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR
    "": (0, 1), "5 8 4 127.0.0.1": (1, 2), "3 4 4 a": (0, 1), "3 4 - 127.0.0.1": (0, 1), "3 4 - 10.0.0.1": (3, 4),
    "3 5 2 10.0.0.1": (3, 5), "x": None, "2 2": None, "-1 2": None,
}  # fmt: skip


@pytest.mark.parametrize("values", NODES)
def test_the_node_by_the_environment(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"), values.split(), strict=False):
        if value != "-":
            monkeypatch.setenv(name, value)
    with pytest.raises(sf.InputError) if NODES[values] is None else contextlib.nullcontext():
        assert find_node() == NODES[values]


@needs_server
def test_a_job_without_a_store_another_node_or_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 1.0 if torch.__version__ < "2.5" else 0.1  # older ones take whole seconds
    monkeypatch.setattr("stallfree.cache.redis.launch.RENDEZVOUS_SECONDS", seconds)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    no_answer, no_store = "does not answer", "number 1 did not create the store"
    for rank, port, message in (("1", "", no_answer), ("1", "1", no_answer), ("0", str(store.port), no_store)):
        if message is no_store:  # it answers, on a busy machine too
            monkeypatch.setattr("stallfree.cache.redis.launch.RENDEZVOUS_SECONDS", 2.0)
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(TimeoutError, match=message):
            open_store()
    assert find_host("127.0.0.1") == "127.0.0.1"
    with pytest.raises(sf.InputError, match="no route to it"):
        find_host("no.such.host.")
