"""Nodes: one server for all processes that use it, gone with the last of them, whoever is killed and when."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest
from node_tools import CLERK, Seen, clerks, is_alive, make_node, needs_server, server_at, told, until, where
from stallfree.stores.spawn import Node, read_server

from children import Child, Holder
from stallfree.folders import default_root
from stallfree.stores import spawn

pytestmark = needs_server


# --- one server, as long as anybody is there --------------------------------------------------------------------------


def test_16_processes_that_start_at_once_find_one_server_which_ends_when_all_are_killed(tmp_path: Path) -> None:
    wait, go = os.pipe()

    def work(number: int) -> None:
        os.close(go)
        os.read(wait, 1)
        node = make_node()
        found = {"server": server_at(node.unix.server), "started": node.started, **told(node.folder)}
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
    assert server_at(second.unix.server) == seen.server
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
        assert server_at(node.unix.server) == seen.server
    assert not seen.folder.exists()


def test_the_thread_that_started_it_may_end() -> None:
    nodes: list[Node] = []
    thread = threading.Thread(target=lambda: nodes.append(make_node()))
    thread.start()
    thread.join()
    with nodes[0] as node:
        seen = Seen.of(node.folder)
        seen.wait_for_a_look()
        assert server_at(node.unix.server) == seen.server


def _attach(node: Node, tell: Any) -> None:
    with node:
        tell.send((server_at(node.unix.server), node.started))


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
        assert (process.exitcode, server_at(node.unix.server)) == (0, told(node.folder)["pid"])
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
        for doors in ([node.unix for node in nodes], [node.public for node in nodes]):
            assert all(doors)
            assert len({each.server.password for each in doors}) == 4
            assert len({server_at(each.server) for each in doors} - {None}) == 4
            assert len({where(each.clerk) for each in doors}) == 4


def test_a_long_path_is_no_hindrance(tmp_path: Path) -> None:
    root = tmp_path / ("r" * 120)

    def clerk(folder: Path) -> None:
        os.chdir(folder)
        assert server_at(read_server(folder)) == told(folder)["pid"]

    with make_node(root=root) as node:
        assert len(str(node.folder)) > 107
        assert server_at(node.unix.server) == told(node.folder)["pid"]
        with make_node(root=root) as again:
            assert server_at(again.unix.server) == told(node.folder)["pid"]
        assert Child(lambda: os._exit(server_at(node.unix.server) != told(node.folder)["pid"])).wait() == 0
        assert Child(clerk, node.folder).wait() == 0
        with pytest.raises(ValueError, match="longer than 107 bytes"):
            read_server(node.folder)
    assert list(root.iterdir()) == []


def test_read_server_needs_no_attachment(tmp_path: Path) -> None:
    with make_node() as node:
        assert read_server(node.folder) == node.unix.server
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
        assert {server_at(node.unix.server), server_at(node.public.server)} == {after["pid"]}
        assert (after["keeper"], after["port"]) == (before.keeper, node.public.server.port)
        assert is_alive(before.clerk)
        with make_node() as other:
            assert other.unix == node.unix


def test_server_and_clerk_die_with_a_killed_keeper_and_the_next_process_starts_another() -> None:
    with make_node(interface="127.0.0.1") as node:
        before = Seen.of(node.folder)
        os.kill(before.keeper, signal.SIGKILL)
        until(lambda: not any(map(is_alive, before.pids)), "keeper, server and clerk are dead")
        assert server_at(node.unix.server) is None
        with make_node(interface="127.0.0.1") as other:
            assert other.started
            after = until(lambda: len(clerks(node.folder)) == 2 and Seen.of(node.folder), "another clerk has started")
            assert not set(before.pids) & set(after.pids)
            assert (other.unix, other.public) == (node.unix, node.public)
            assert {server_at(node.unix.server), server_at(node.public.server)} == {after.server}
    after.wait_until_gone()


def test_what_a_killed_job_and_its_keeper_left_does_not_count() -> None:
    def job() -> None:
        with make_node(interface="127.0.0.1", memory="32MiB") as node:
            os.kill(Seen.of(node.folder).keeper, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    assert Child(job).wait() == -signal.SIGKILL
    assert (default_root() / "redis-one" / "node.json").exists()
    with make_node(interface="127.0.0.2", memory="64MiB") as node:
        assert node.public.server.host == "127.0.0.2"


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
        assert server_at(node.unix.server) == server
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
