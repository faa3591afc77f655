"""Node servers: one for all processes that use it, gone with the last of them, whichever process is killed and when."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_tools import is_alive, make_server, record, server_at, wait_until_gone

from children import Child, Holder
from redis_servers import PATIENCE, needs_server, until
from stallfree.errors import InputError, MissingServerError, StorageError
from stallfree.ipc.folders import default_root
from stallfree.stores.launch import server as module
from stallfree.stores.launch.server import find_address, find_server, read_running
from stallfree.stores.launch.supervisor import read_json

pytestmark = needs_server
redis = pytest.importorskip("redis", reason="the package redis is not installed: pip install 'stallfree[redis]'")


def folder() -> Path:
    """Of the server "one"."""
    return default_root() / "redis-one"


# --- one server, as long as a process is attached ---------------------------------------------------------------------


def test_8_processes_start_one_server_and_nothing_is_left_after_their_sigkill(tmp_path: Path) -> None:
    wait, go = os.pipe()

    def work(number: int) -> None:
        os.close(go)
        os.read(wait, 1)
        server = make_server()
        found = [server_at(server.address()), server.started]
        (tmp_path / f"{number}.new").write_text(json.dumps(found))
        os.rename(tmp_path / f"{number}.new", tmp_path / f"{number}")
        signal.pause()

    children = [Child(work, number) for number in range(8)]
    os.close(wait)
    os.close(go)  # now
    files = [tmp_path / str(number) for number in range(8)]
    until(lambda: all(file.exists() for file in files), "all have found a server")
    found = [json.loads(file.read_text()) for file in files]
    now = record(folder())
    assert {pid for pid, _ in found} == {now["pid"]}
    assert sum(started for _, started in found) == 1
    for child in children:
        child.signal(signal.SIGKILL)
    for child in children:
        child.wait()
    wait_until_gone(folder(), now["pid"], now["supervisor"])


def test_the_last_close_ends_it() -> None:
    first, second = make_server(), make_server()
    assert (first.started, second.started) == (True, False)
    assert first.address() == second.address()
    now = record(folder())
    first.close()
    first.close()
    assert server_at(second.address()) == now["pid"]
    second.close()
    assert not is_alive(now["pid"])
    assert not folder().exists()
    assert second.address() is None


def test_a_forked_worker_keeps_it_when_its_parent_is_killed(tmp_path: Path) -> None:
    def parent() -> None:
        make_server()
        worker = Child(signal.pause)
        (tmp_path / "worker").write_text(str(worker.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    assert Child(parent).wait() == -signal.SIGKILL
    first = record(folder())
    os.kill(first["pid"], signal.SIGKILL)
    second = record(folder(), first["start"])  # the supervisor has checked that a process is attached
    os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)
    wait_until_gone(folder(), second["pid"], second["supervisor"])


def test_closing_in_a_forked_worker_takes_nothing_from_the_parent() -> None:
    with make_server() as server:
        first = record(folder())
        assert Child(server.close).wait() == 0
        os.kill(first["pid"], signal.SIGKILL)
        record(folder(), first["start"])
        assert server_at(server.address())


def test_names_and_roots_are_servers_of_their_own(tmp_path: Path) -> None:
    with make_server() as one, make_server("two") as two, make_server(root=tmp_path / ("r" * 120)) as far:
        assert all(server.started for server in (one, two, far))
        addresses = [server.address() for server in (one, two, far)]
        assert len({server_at(address) for address in addresses} - {None}) == 3
        assert len({address.password for address in addresses if address}) == 3


# --- kills ------------------------------------------------------------------------------------------------------------


def test_server_json_is_removed_when_the_server_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that runs the server once, and then none that listens."""
    real = find_server()
    script = f"[ -e {tmp_path}/tried ] && exec sleep 1000; touch {tmp_path}/tried; exec {real} -"
    monkeypatch.setattr(module, "find_server", lambda: str(program(tmp_path / "server", script)))
    with make_server() as server:
        os.kill(record(folder())["pid"], signal.SIGKILL)
        until(lambda: (read_json(folder() / "starts.json") or {}).get("start") == 2, "the other program is started")
        assert not (folder() / "server.json").exists()
        assert server.address() is None


def test_a_killed_supervisor_takes_the_server_along_and_the_next_process_starts_both() -> None:
    with make_server() as server:
        first = record(folder())
        os.kill(first["supervisor"], signal.SIGKILL)
        until(lambda: server.address() is None, "the server is dead")
        with make_server() as other:
            assert other.started
            second = record(folder(), first["start"])
            assert server_at(server.address()) == second["pid"] != first["pid"]
            assert second["port"] != first["port"]
        os.kill(second["supervisor"], signal.SIGKILL)
        until(lambda: server.address() is None, "the server is dead")
        server.revive()
        until(lambda: server.address(), "another server runs")


def die_while_looking_for_a_program() -> None:
    module.find_server = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]


def die_when_the_supervisor_is_about_to_start() -> None:
    module.subprocess.Popen.wait = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("die", "waiting"),
    [(die_while_looking_for_a_program, True), (die_when_the_supervisor_is_about_to_start, False)],
)
def test_the_starter_may_be_killed_while_it_starts(die: Callable[[], None], waiting: bool) -> None:
    """Another process is attached meanwhile, or comes later."""

    def start() -> None:
        die()
        make_server()

    other = Holder(lambda: make_server().close) if waiting else None
    if other is not None:
        before = record(folder())
        os.kill(before["supervisor"], signal.SIGKILL)
        until(lambda: read_running(folder()) is None, "the server is dead")
    assert Child(start).wait() == -signal.SIGKILL
    with make_server() as server:
        assert server_at(server.address())
        if other is not None:
            other.end()
        assert server_at(server.address())


def test_a_folder_that_was_deleted_has_no_server() -> None:
    with make_server():
        now = record(folder())
        shutil.rmtree(folder())
        wait_until_gone(folder(), now["pid"], now["supervisor"])


def test_a_folder_that_another_process_failed_to_remove_is_removed_by_the_supervisor() -> None:
    with make_server():
        now = record(folder())
        moved = folder().rename(folder().with_name(".del-1-abc"))
        wait_until_gone(moved, now["pid"], now["supervisor"])


# --- access and limits ------------------------------------------------------------------------------------------------


def test_no_other_user_can_read_the_password() -> None:
    with make_server() as server:
        now = record(folder())
        password = server.address().password
        assert len(password) == 64
        assert password not in repr(server) + repr(server.address()) + str(server.address())
        for pid in (now["pid"], now["supervisor"]):
            for file in ("cmdline", "environ"):
                assert password.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()
        assert stat.S_IMODE(folder().stat().st_mode) == 0o700
        files = [path for path in folder().iterdir() if path.is_file()]
        assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folder().iterdir())
        assert [path.name for path in files if password.encode() in path.read_bytes()] == ["server.json"]


def test_it_listens_at_its_interface_and_needs_the_password() -> None:
    with make_server(interface="127.0.0.2") as server:
        address = server.address()
        connections = psutil.Process(record(folder())["pid"]).net_connections("inet")
        listening = {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}
        assert listening == {("127.0.0.2", address.port)}
        for password in ("", "wrong"):
            stranger = replace(address, password=password).client(PATIENCE)
            with stranger, pytest.raises(redis.exceptions.AuthenticationError):
                stranger.ping()


def test_limits() -> None:
    with make_server(memory="5MiB") as server, server.address().client(PATIENCE) as connection:
        config = connection.config_get("*")
        expected = {"maxmemory": str(5 << 20), "maxmemory-policy": "noeviction", "save": "", "appendonly": "no"}
        expected |= {"protected-mode": "yes", "timeout": "30", "tcp-keepalive": "30", "databases": "1"}
        assert {key: config[key] for key in expected} == expected
        most = int(Path("/proc/self/limits").read_text().split("Max open files")[1].split()[1])
        assert int(config["maxclients"]) == min(most - 100, 65536)
        connection.set("first", b"x" * 1_000_000)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            all(connection.set(f"more{number}", b"x" * 1_000_000) for number in range(10))
        assert connection.exists("first")  # nothing was evicted


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_port_that_another_server_has_is_an_error(tmp_path: Path) -> None:
    """Even a server without a password, which lets every client in, is not used; and it is left alone."""
    with make_server() as theirs:
        port = theirs.address().port
        with pytest.raises(InputError, match=rf"port {port} of 127\.0\.0\.1: Address already in use\. Give another"):
            make_server("two", port=port)
        assert not (default_root() / "redis-two").exists()
        assert server_at(theirs.address())
    for _ in range(2):
        with make_server("two", port=port) as server:
            assert server.address().port == port


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    return path


def test_which_program_is_found(bare_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(
        MissingServerError, match=r"neither valkey-server nor redis-server .* `apt install redis-server`"
    ):
        make_server()
    assert not folder().exists()
    beside = program(tmp_path / "redis-server", "")
    assert find_server() == str(beside)
    on_path = program(bare_path / "redis-server", "")
    assert find_server() == str(on_path)
    first = program(bare_path / "valkey-server", "")
    assert find_server() == str(first)


@pytest.mark.parametrize(
    ("script", "output"),
    [("echo no room for me; cat; exit 3", "its output: no room for me"), ("exit 0", "without any output")],
)
def test_a_server_that_cannot_be_started_is_an_error_with_its_output(bare_path: Path, script: str, output: str) -> None:
    os.symlink("/bin/cat", bare_path / "cat")
    program(bare_path / "valkey-server", script)
    with pytest.raises(MissingServerError, match="cannot be kept running: the server ended when it was st") as error:
        make_server()
    assert output in str(error.value)
    assert ("requirepass ..." in str(error.value)) == ("cat" in script)  # it printed its password, and we do not
    assert not folder().exists()


def test_a_supervisor_that_cannot_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "python", "echo I am no python >&2; exit 1")))
    with pytest.raises(MissingServerError, match=r"died 3 times; the end of .*log: I am no python"):
        make_server()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match=r"cannot be started: .*nothing"):
        make_server()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "is not a valid store name"),
        ({"name": "../up"}, "is not a valid store name"),
        ({"name": 7}, "is not a valid store name"),
        ({"memory": "much"}, "is no size"),
        ({"memory": "1MiB"}, "give 4.0 MiB or more"),
        ({"port": 65536}, "from 1 to 65535"),
        ({"port": True}, "from 1 to 65535"),
        ({"interface": ""}, "such as '10.1.2.3' or 'eth0'"),
        ({"interface": "0.0.0.0"}, "means all networks"),
        ({"interface": "::"}, "means all networks"),
        ({"interface": "192.0.2.1"}, "does not exist on this host"),
        ({"interface": "no.such.host.invalid"}, "does not exist on this host"),
    ],
)
def test_values_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_server(**options)


def test_an_interface_is_an_address_or_a_name() -> None:
    assert [find_address(name) for name in ("lo", "127.0.0.3", "localhost")] == ["127.0.0.1", "127.0.0.3", "127.0.0.1"]


def test_the_first_process_decides() -> None:
    with make_server(interface="127.0.0.2") as server:
        with pytest.warns(UserWarning, match=r"with a limit of 64.0 MiB .* requested 32.0 MiB are ignored"):
            make_server(memory="32MiB").close()
        with pytest.raises(InputError, match=r"with interface='127.0.0.2', not '127.0.0.3'"):
            make_server(interface="127.0.0.3")
        with pytest.raises(InputError, match="with port=0, not 6379"):
            make_server(port=6379)
        with make_server() as other:
            assert other.address() == server.address()
    with make_server(), pytest.raises(InputError, match=r"with interface='127.0.0.1', not '127.0.0.2'"):
        make_server(interface="127.0.0.2")


def test_a_folder_of_another_release_is_refused() -> None:
    with make_server() as server:
        for text in ('{"version": 99}', "{"):
            (server.folder / "node.json").write_text(text)
            with pytest.raises(StorageError, match=r"another release .* or is damaged"):
                make_server()
