"""Nodes: who is let in, where they listen, how much they take, and what is wrong with what they are given."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from node_tools import Seen, ask, make_node, needs_server, server_at, told, until
from stallfree.stores.endpoint import Address
from stallfree.stores.spawn import find_address, find_server

from stallfree.errors import InputError, MissingServerError, StorageError
from stallfree.folders import default_root, in_use

pytestmark = needs_server
redis = pytest.importorskip("redis", reason="the package redis is not installed: pip install 'stallfree[redis]'")


def client(address: Address) -> Any:
    if address.path:
        return redis.Redis(unix_socket_path=address.path, password=address.password)
    return redis.Redis(host=address.host, port=address.port, password=address.password)


@pytest.fixture
def free_port() -> int:
    """A port that nobody has, nor the next one."""
    while True:
        with socket.socket() as server, socket.socket() as clerk, contextlib.suppress(OSError, OverflowError):
            server.bind(("127.0.0.1", 0))
            port: int = server.getsockname()[1]
            clerk.bind(("127.0.0.1", port + 1))
            return port


# --- secrets, limits, and what is left --------------------------------------------------------------------------------


def test_nobody_else_sees_the_password() -> None:
    with make_node(interface="127.0.0.1") as node, make_node("two") as other:
        seen = Seen.of(node.folder)
        password = node.unix.server.password
        assert len(password) >= 40
        addresses = [address for doors in (node.unix, node.public) for address in (doors.server, doors.clerk)]
        assert [address.password for address in addresses] == [password] * 4
        assert other.unix.server.password != password
        for text in (node, node.unix, node.public):
            assert password not in repr(text) + str(text)
        for pid in seen.pids:
            for file in ("cmdline", "environ"):
                assert password.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()
        assert stat.S_IMODE(node.folder.stat().st_mode) == 0o700
        holders = []
        for path in node.folder.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
            if path.is_file() and password.encode() in path.read_bytes():
                holders.append(path.name)
        assert holders == ["node.json"]


def test_nobody_is_let_in_without_the_password() -> None:
    with make_node(interface="127.0.0.1") as node:
        for address in (node.unix.server, node.public.server):
            assert ask(address, "PING").startswith(b"-NOAUTH")
            assert ask(address, "AUTH wrong", "PING").startswith(b"-WRONGPASS")
            assert ask(address, f"AUTH {address.password}") == b"+OK\r\n"


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process listens for other hosts."""
    connections = psutil.Process(pid).net_connections("inet")
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


def sockets(pid: int) -> set[str]:
    """All sockets that a process has."""
    found = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return {target for target in found if target.startswith("socket:")}


def test_they_listen_at_their_interface_only() -> None:
    with make_node(interface="127.0.0.2") as node, make_node("private") as private:
        seen = Seen.of(node.folder)
        assert listening(seen.server) == {("127.0.0.2", node.public.server.port)}
        assert listening(seen.clerk) == {("127.0.0.2", node.public.clerk.port)} == listening(seen.keeper)
        assert len(sockets(seen.clerk)) == 2
        assert not sockets(seen.clerk) & sockets(seen.server)  # the server inherits none of them
        assert sockets(seen.clerk) < sockets(seen.keeper)
        there = Seen.of(private.folder)
        assert private.public is None
        assert not any(map(listening, there.pids))
        assert len(sockets(there.clerk)) == 1 == len(sockets(there.keeper))
    for port in (node.public.server.port, node.public.clerk.port):
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.2", port))
            free.listen()


def test_limits() -> None:
    with make_node(memory="5MiB") as node, client(node.unix.server) as server:
        config = server.config_get("*")
        assert {
            key: config[key] for key in ("maxmemory", "maxmemory-policy", "save", "appendonly", "protected-mode")
        } == {
            "maxmemory": str(5 << 20),
            "maxmemory-policy": "noeviction",
            "save": "",
            "appendonly": "no",
            "protected-mode": "yes",
        }
        assert server.info("memory")["maxmemory"] == 5 << 20
        assert (server.info("persistence")["aof_enabled"], server.lastsave() is not None) == (0, True)
        server.set("first", b"x" * 1_000_000)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            all(server.set(f"more{number}", b"x" * 1_000_000) for number in range(10))
        assert server.exists("first")  # nothing was evicted
        assert server.info("stats")["evicted_keys"] == 0


def test_nothing_is_left_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with make_node() as node:
        with client(node.unix.server) as server:
            server.set("key", "value")
            server.save()  # as if somebody asked for it
        os.kill(told(node.folder)["pid"], signal.SIGTERM)
        with make_node("two"):
            pass
        assert (node.folder / "dump.rdb").exists()
    assert list(tmp_path.iterdir()) == []


# --- ports ------------------------------------------------------------------------------------------------------------


def test_a_port_that_somebody_elses_server_has_is_an_error(tmp_path: Path, free_port: int) -> None:
    """Not even a server without a password, which lets everybody in, is taken for ours; and it is left alone."""
    command = [find_server(), "--bind", "127.0.0.1", "--port", str(free_port), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as theirs:
        try:
            address = Address(host="127.0.0.1", port=free_port)

            def answers() -> bool:
                with contextlib.suppress(OSError):
                    return ask(address, "SET theirs 1") == b"+OK\r\n"
                return False

            until(answers, "their server answers")
            said = (
                rf"port {free_port} of 127\.0\.0\.1: Address already in use\. Give another port, or port=0 for a free"
            )
            with pytest.raises(InputError, match=said):
                make_node(interface="127.0.0.1", port=free_port)
            assert not (default_root() / "redis-one").exists()
            assert ask(address, "GET theirs") == b"$1\r\n1\r\n"
            assert theirs.poll() is None
        finally:
            theirs.kill()


def test_given_ports_are_used_and_free_again_after_close(free_port: int) -> None:
    for _ in range(2):
        with make_node(interface="127.0.0.1", port=free_port) as node:
            assert (node.public.server.port, node.public.clerk.port) == (free_port, free_port + 1)
            assert listening(Seen.of(node.folder).clerk) == {("127.0.0.1", free_port + 1)}
            assert server_at(node.public.server) == told(node.folder)["pid"]


def test_a_port_of_the_clerk_that_somebody_has_is_an_error(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port + 1)):
        said = rf"the clerk's port {free_port + 1} of 127\.0\.0\.1: Address already in use\. Give another port"
        with pytest.raises(InputError, match=said):
            make_node(interface="127.0.0.1", port=free_port)
        assert not (default_root() / "redis-one").exists()


# --- what can be wrong ------------------------------------------------------------------------------------------------


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_without_a_server_the_error_says_how_to_get_one(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(bare_path / "python"))
    with pytest.raises(
        MissingServerError, match=r"neither valkey-server nor redis-server .* `apt install redis-server`"
    ):
        make_node()
    assert not (default_root() / "redis-one").exists()


def test_valkey_comes_first(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = program(bare_path / "redis-server", "")
    assert find_server() == str(second)
    first = program(bare_path / "valkey-server", "")
    assert find_server() == str(first)


def test_it_is_found_beside_an_interpreter_that_is_not_on_the_path(
    bare_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = program(tmp_path / "valkey-server", "")
    assert find_server() == str(found)


@pytest.mark.parametrize(
    ("script", "said"),
    [("echo no room for me; cat; exit 3", "it said: no room for me"), ("exit 0", "without a word")],
)
def test_a_server_that_cannot_be_started_is_an_error_with_its_own_words(
    bare_path: Path, script: str, said: str
) -> None:
    os.symlink("/bin/cat", bare_path / "cat")
    program(bare_path / "valkey-server", script)
    with pytest.raises(MissingServerError, match="cannot be kept alive: the server ended when it was started") as error:
        make_node()
    assert said in str(error.value)
    assert ("requirepass ..." in str(error.value)) == ("cat" in script)  # it told its password, and we do not
    assert not (default_root() / "redis-one").exists()


def test_a_keeper_that_cannot_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "python", "echo I am no python >&2; exit 1")))
    with pytest.raises(MissingServerError, match=r"died 3 times; the end of .*log: I am no python"):
        make_node()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match=r"cannot be started: .*nothing"):
        make_node()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": ""}, "cannot name a store"),
        ({"name": "../up"}, "cannot name a store"),
        ({"name": 7}, "cannot name a store"),
        ({"memory": "much"}, "is no size"),
        ({"memory": "1MiB"}, "give 4.0 MiB or more"),
        ({"port": 6379}, "without an interface"),
        ({"port": 65535, "interface": "lo"}, "from 1 to 65534"),
        ({"port": True, "interface": "lo"}, "from 1 to 65534"),
        ({"interface": ""}, "such as '10.1.2.3' or 'eth0'"),
        ({"interface": "0.0.0.0"}, "stands for all networks"),
        ({"interface": "::"}, "stands for all networks"),
        ({"interface": "192.0.2.1"}, "none of this host"),
        ({"interface": "no.such.host.invalid"}, "none of this host"),
    ],
)
def test_values_that_cannot_be_used(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_node(**options)


def test_an_interface_is_an_address_or_a_name() -> None:
    assert [find_address(name) for name in ("lo", "127.0.0.3", "localhost")] == ["127.0.0.1", "127.0.0.3", "127.0.0.1"]


def test_the_first_decides_and_others_are_told(free_port: int) -> None:
    with make_node(memory="64MiB", interface="127.0.0.1") as node:
        with pytest.warns(UserWarning, match=r"keeps the limit of 64.0 MiB .* not 32.0 MiB"), make_node(memory="32MiB"):
            pass
        with pytest.raises(InputError, match=r"listen on 127.0.0.1, not on 127.0.0.2"):
            make_node(memory="64MiB", interface="127.0.0.2")
        with pytest.raises(InputError, match=f"on port {node.public.server.port}, not on port={free_port}"):
            make_node(memory="64MiB", interface="127.0.0.1", port=free_port)
        with make_node(memory="64MiB") as private:
            assert private.public is None
        assert in_use(node.folder)
    with make_node(), pytest.raises(InputError, match="listen on this host only"):
        make_node(interface="127.0.0.1")


def test_a_folder_of_another_release_is_refused() -> None:
    with make_node() as node:
        given = json.loads((node.folder / "node.json").read_text())
        (node.folder / "node.json").write_text(json.dumps({**given, "version": 99}))
        with pytest.raises(StorageError, match="another release"):
            make_node()
        (node.folder / "node.json").write_text("{")
        with pytest.raises(StorageError, match="is damaged"):
            make_node()


def test_a_pickle_attaches_to_the_same_node() -> None:
    with make_node() as node, pickle.loads(pickle.dumps(node)) as again:
        assert (again.folder, again.unix, again.started) == (node.folder, node.unix, False)
