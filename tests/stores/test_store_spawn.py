"""Nodes: one server for all processes that use it, gone with the last of them, whoever is killed and when."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest
from node_tools import CLERK, Seen, ask, clerks, is_alive, make_node, needs_server, server_at, told, until

from children import Child, Holder
from stallfree.errors import InputError, MissingServerError, StorageError
from stallfree.folders import default_root, in_use
from stallfree.stores import spawn
from stallfree.stores.endpoint import Address
from stallfree.stores.spawn import Node, find_address, find_server, read_server

pytestmark = needs_server
redis = pytest.importorskip("redis", reason="the package redis is not installed: pip install 'stallfree[redis]'")


def client(address: Address) -> Any:
    if address.path:
        return redis.Redis(unix_socket_path=address.path, password=address.password)
    return redis.Redis(host=address.host, port=address.port, password=address.password)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return any_socket.getsockname()[1]


# --- one server, as long as anybody is there --------------------------------------------------------------------------


def test_16_processes_that_start_at_once_find_one_server_which_ends_when_all_are_killed(tmp_path: Path) -> None:
    wait, go = os.pipe()

    def work(number: int) -> None:
        os.close(go)
        os.read(wait, 1)
        node = make_node()
        found = {"server": server_at(node.unix), "started": node.started, **told(node.folder)}
        (tmp_path / f"{number}.new").write_text(json.dumps(found))
        os.rename(tmp_path / f"{number}.new", tmp_path / f"{number}")
        signal.pause()

    children = [Child(work, number) for number in range(16)]
    os.close(wait)
    os.close(go)  # now
    files = [tmp_path / str(number) for number in range(16)]
    until(lambda: all(file.exists() for file in files), "all have found a server")
    found = [json.loads(file.read_text()) for file in files]
    seen = Seen.of(default_root() / "redis-one")
    assert {(each["server"], each["pid"], each["keeper"]) for each in found} == {
        (seen.server, seen.server, seen.keeper)
    }
    assert sum(each["started"] for each in found) == 1
    assert len(clerks(seen.folder)) == 1
    for child in children:
        child.signal(signal.SIGKILL)
    seen.wait_until_gone()
    for child in children:
        child.wait()


def test_the_last_one_out_ends_it_before_close_returns() -> None:
    first, second = make_node(), make_node()
    assert (first.started, second.started) == (True, False)
    assert first.unix == second.unix
    seen = Seen.of(first.folder)
    first.close()
    first.close()
    seen.wait_for_a_look()
    assert server_at(second.unix) == seen.server
    second.close()
    assert not is_alive(seen.server)
    assert not is_alive(seen.clerk)
    assert not seen.folder.exists()
    seen.wait_until_gone()  # its keeper is ending


def test_a_forked_worker_keeps_it_when_its_parent_is_killed(tmp_path: Path) -> None:
    def parent() -> None:
        make_node()
        worker = Child(signal.pause)
        (tmp_path / "worker").write_text(str(worker.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    assert Child(parent).wait() == -signal.SIGKILL
    seen = Seen.of(default_root() / "redis-one")
    seen.wait_for_a_look()
    assert told(seen.folder) == {"pid": seen.server, "keeper": seen.keeper}
    assert is_alive(seen.server)
    os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)
    seen.wait_until_gone()


def test_closing_in_a_forked_worker_takes_nothing_from_the_parent() -> None:
    with make_node() as node:
        seen = Seen.of(node.folder)
        assert Child(node.close).wait() == 0
        seen.wait_for_a_look()
        assert server_at(node.unix) == seen.server
    assert not seen.folder.exists()


def test_the_thread_that_started_it_may_end() -> None:
    nodes: list[Node] = []
    thread = threading.Thread(target=lambda: nodes.append(make_node()))
    thread.start()
    thread.join()
    with nodes[0] as node:
        seen = Seen.of(node.folder)
        seen.wait_for_a_look()
        assert server_at(node.unix) == seen.server


def _attach(node: Node, tell: Any) -> None:
    with node:
        tell.send((server_at(node.unix), node.started))


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_inherit_nothing_attach_anew(method: str) -> None:
    context = get_context(method)
    with make_node(interface="127.0.0.1") as node:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_attach, args=(node, theirs))
        process.start()
        theirs.close()
        assert ours.recv() == (told(node.folder)["pid"], False)
        process.join()
        ours.close()
        assert (process.exitcode, server_at(node.unix)) == (0, told(node.folder)["pid"])
        process.close()


def test_an_interpreter_that_ends_without_closing_leaves_nothing(interpreter: Any) -> None:
    ended = interpreter.run(
        "import os, sys\nfrom stallfree.stores.spawn import Node\n"
        f"node = Node('one', clerk={CLERK!r})\nprint(node.folder)\nos.system('true')"
    )
    assert (ended.code, ended.err, ended.files) == (0, "", [])
    until(lambda: not Path(ended.out.strip()).exists(), "the folder is gone")


# --- nodes are apart --------------------------------------------------------------------------------------------------


def test_two_names_are_two_servers_and_so_are_two_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(make_node(name, interface="lo")) for name in ("one", "two")]
        for number in range(2):
            (tmp_path / str(number)).mkdir(mode=0o700)
            monkeypatch.setenv("STALLFREE_ROOT", str(tmp_path / str(number)))
            nodes.append(stack.enter_context(make_node("one", interface="lo")))
        assert all(node.started for node in nodes)
        for addresses in ([node.unix for node in nodes], [node.public for node in nodes]):
            assert all(addresses)
            assert len({address.password for address in addresses}) == 4
            assert len({server_at(address) for address in addresses} - {None}) == 4


def test_a_long_path_is_no_hindrance(tmp_path: Path) -> None:
    root = tmp_path / ("r" * 120)

    def clerk(folder: Path) -> None:
        os.chdir(folder)
        assert server_at(read_server(folder)) == told(folder)["pid"]

    with make_node(root=root) as node:
        assert len(str(node.folder)) > 107
        assert server_at(node.unix) == told(node.folder)["pid"]
        with make_node(root=root) as again:
            assert server_at(again.unix) == told(node.folder)["pid"]
        assert Child(lambda: os._exit(server_at(node.unix) != told(node.folder)["pid"])).wait() == 0
        assert Child(clerk, node.folder).wait() == 0
        with pytest.raises(ValueError, match="longer than 107 bytes"):
            read_server(node.folder)
    assert list(root.iterdir()) == []


def test_read_server_needs_no_attachment(tmp_path: Path) -> None:
    with make_node() as node:
        assert read_server(node.folder) == node.unix
    with pytest.raises(OSError, match=r"server\.json"):
        read_server(node.folder)


# --- kills ------------------------------------------------------------------------------------------------------------


def kill_server(node: Node) -> None:
    server = told(node.folder)["pid"]
    os.kill(server, signal.SIGKILL)
    until(lambda: told(node.folder)["pid"] != server, "another server is there")


def test_a_killed_server_is_back_with_its_address_and_password() -> None:
    with make_node(interface="127.0.0.1") as node:
        before = Seen.of(node.folder)
        for _ in range(2):
            kill_server(node)
        after = told(node.folder)
        assert {server_at(node.unix), server_at(node.public)} == {after["pid"]}
        assert (after["keeper"], after["port"]) == (before.keeper, node.public.port)
        assert is_alive(before.clerk)
        with make_node() as other:
            assert other.unix == node.unix


def test_server_and_clerk_die_with_a_killed_keeper_and_the_next_process_starts_another() -> None:
    with make_node(interface="127.0.0.1") as node:
        before = Seen.of(node.folder)
        os.kill(before.keeper, signal.SIGKILL)
        until(lambda: not any(map(is_alive, before.pids)), "keeper, server and clerk are dead")
        assert server_at(node.unix) is None
        with make_node(interface="127.0.0.1") as other:
            assert other.started
            after = until(lambda: len(clerks(node.folder)) == 2 and Seen.of(node.folder), "another clerk has started")
            assert not set(before.pids) & set(after.pids)
            assert (other.unix, other.public) == (node.unix, node.public)
            assert {server_at(node.unix), server_at(node.public)} == {after.server}
    after.wait_until_gone()


def test_what_a_killed_job_and_its_keeper_left_does_not_count() -> None:
    def job() -> None:
        with make_node(interface="127.0.0.1", memory="32MiB") as node:
            os.kill(Seen.of(node.folder).keeper, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    assert Child(job).wait() == -signal.SIGKILL
    assert (default_root() / "redis-one" / "node.json").exists()
    with make_node(interface="127.0.0.2", memory="64MiB") as node:
        assert node.public.host == "127.0.0.2"


def test_nobody_keeps_the_folder_of_a_killed_keeper() -> None:
    node = make_node()
    seen = Seen.of(node.folder)
    os.kill(seen.keeper, signal.SIGKILL)
    node.close()
    seen.wait_until_gone()


def die_at_the_look_for_a_server() -> None:
    spawn.find_server = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]


def die_when_the_keeper_is_about_to_start() -> None:
    spawn.subprocess.Popen.wait = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "die",
    [die_at_the_look_for_a_server, die_when_the_keeper_is_about_to_start],
)
@pytest.mark.parametrize("waiting", [False, True])
def test_the_starter_may_be_killed_while_it_starts(die: Callable[[], None], waiting: bool) -> None:
    """Somebody else is attached meanwhile, or comes later."""

    def start() -> None:
        die()
        make_node()

    other = Holder(lambda: make_node().close) if waiting else None
    if other is not None:  # and without its keeper it is as if no server had been there
        before = Seen.of(default_root() / "redis-one")
        os.kill(before.keeper, signal.SIGKILL)
        until(lambda: not any(map(is_alive, before.pids)), "keeper, server and clerk are dead")
    assert Child(start).wait() == -signal.SIGKILL
    with make_node() as node:
        server = told(node.folder)["pid"]
        assert server_at(node.unix) == server
        if other is not None:
            other.end()
        assert is_alive(server)
    until(lambda: not is_alive(server), "the server has ended")


def processes_of(folder: Path) -> list[int]:
    processes = psutil.process_iter(["pid", "cmdline"])
    return [process.pid for process in processes if str(folder) in (process.info["cmdline"] or [])]


def test_a_started_keeper_ends_when_its_starter_was_killed_at_once() -> None:
    def start() -> None:
        die_when_the_keeper_is_about_to_start()
        make_node()

    folder = default_root() / "redis-one"
    assert Child(start).wait() == -signal.SIGKILL
    until(lambda: not folder.exists(), "the folder is gone")
    until(lambda: not processes_of(folder), "its processes have ended")


def test_a_server_that_stands_still_holds_nobody_up() -> None:
    with make_node() as node:
        server = told(node.folder)["pid"]
        os.kill(server, signal.SIGSTOP)
        try:
            with make_node() as other:
                assert other.unix == node.unix
        finally:
            os.kill(server, signal.SIGCONT)


def test_a_folder_that_somebody_deleted_has_no_server() -> None:
    with make_node() as node:
        seen = Seen.of(node.folder)
        shutil.rmtree(node.folder)
        seen.wait_until_gone()


# --- secrets, limits, and what is left --------------------------------------------------------------------------------


def test_nobody_else_sees_the_password() -> None:
    with make_node(interface="127.0.0.1") as node, make_node("two") as other:
        seen = Seen.of(node.folder)
        password = node.unix.password
        assert len(password) >= 40
        assert node.public.password == password != other.unix.password
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
        for address in (node.unix, node.public):
            assert ask(address, "PING").startswith(b"-NOAUTH")
            assert ask(address, "AUTH wrong", "PING").startswith(b"-WRONGPASS")
            assert ask(address, f"AUTH {address.password}") == b"+OK\r\n"


def test_it_listens_at_its_interface_only() -> None:
    with make_node(interface="127.0.0.2") as node, make_node("private") as private:
        listening = [
            connection.laddr
            for each in (node, private)
            for connection in psutil.Process(told(each.folder)["pid"]).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening == [("127.0.0.2", node.public.port)]
        assert private.public is None


def test_limits() -> None:
    with make_node(memory="5MiB") as node, client(node.unix) as server:
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
        with client(node.unix) as server:
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


def test_a_given_port_is_used_and_free_again_after_close(free_port: int) -> None:
    for _ in range(2):
        with make_node(interface="127.0.0.1", port=free_port) as node:
            assert node.public.port == free_port
            assert server_at(node.public) == told(node.folder)["pid"]


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
    with pytest.raises(MissingServerError, match="died 3 times: I am no python"):
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
        ({"port": 65536, "interface": "lo"}, "from 1 to 65535"),
        ({"port": True, "interface": "lo"}, "from 1 to 65535"),
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
        with pytest.raises(InputError, match=f"on port {node.public.port}, not on port={free_port}"):
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
