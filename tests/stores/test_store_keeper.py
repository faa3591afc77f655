"""The keeper as a program: what it starts again, when it gives up, how it ends what it keeps."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from node_tools import PATIENCE, Seen, clerks, is_alive, needs_server, told, until
from stallfree.stores.keeper import Kept, identify
from stallfree.stores.spawn import find_server

from stallfree.stores import keeper

DIES = ["/bin/sh", "-c", 'date +%s.%N >> "$0/births"; echo $$ >> "$0/clerks"; exit 1']
WAITS = ["/bin/sh", "-c", 'echo $$ >> "$0/clerks"; exec sleep 1000']


class Folder:
    """A node's folder, to which somebody is attached."""

    def __init__(self, path: Path, **settings: Any) -> None:
        path.mkdir(mode=0o700)
        self.path = path
        self.attached = os.open(path / "attached", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.attached, fcntl.LOCK_SH)
        given = {"version": 1, "memory": 1 << 26, "host": "", "port": 0, "password": "secret", "lives": 20, **settings}
        (path / "node.json").write_text(json.dumps(given))

    def start(self, *clerk: str, server: str | None = None, before: Callable[[], None] | None = None) -> None:
        """Start a keeper; it has the folder, or has ended, when this returns."""
        command = [sys.executable, "-I", "-S", keeper.__file__, str(self.path), server or find_server(), *clerk]
        with open(self.path / "log", "ab") as log:
            subprocess.run(command, cwd=self.path, stdout=log, stderr=log, start_new_session=True, preexec_fn=before)

    def leave(self) -> None:
        """Nobody is attached any more."""
        if self.attached >= 0:
            os.close(self.attached)
            self.attached = -1

    @property
    def log(self) -> str:
        """What all had to say."""
        return (self.path / "log").read_text()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Folder]]:
    made: list[Folder] = []

    def make(**settings: Any) -> Folder:
        made.append(Folder(tmp_path / f"node{len(made)}", **settings))
        return made[-1]

    yield make
    for folder in made:
        kept = (folder.path / "server.json").exists()
        folder.leave()
        if kept:
            until(lambda path=folder.path: not path.exists(), "the keeper has removed the folder")


# --- the clerk --------------------------------------------------------------------------------------------------------


@needs_server
def test_a_clerk_that_dies_at_once_is_started_less_and_less_often(make: Callable[..., Folder]) -> None:
    folder = make()
    folder.start(*DIES)
    births = folder.path / "births"
    until(lambda: births.exists() and births.read_text().count("\n") >= 3, "the clerk was started three times")
    times = [float(line) for line in births.read_text().split()]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    for least, gap in zip((0.2, 0.4), gaps, strict=False):
        assert gap > 0.9 * least, gaps


@needs_server
def test_a_clerk_may_let_go_of_what_it_holds(make: Callable[..., Folder], tmp_path: Path) -> None:
    folder = make()
    end = f"trap 'echo bye > {tmp_path}/end; exit 0' TERM; echo $$ >> \"$0/clerks\"; while :; do sleep 0.02; done"
    folder.start("/bin/sh", "-c", end)
    seen = Seen.of(folder.path)
    folder.leave()
    seen.wait_until_gone()
    assert (tmp_path / "end").read_text() == "bye\n"


@needs_server
def test_a_clerk_that_does_not_end_is_killed(make: Callable[..., Folder]) -> None:
    folder = make()
    folder.start("/bin/sh", "-c", "trap '' TERM; echo $$ >> \"$0/clerks\"; while :; do sleep 0.02; done")
    seen = Seen.of(folder.path)
    folder.leave()
    seen.wait_until_gone()


@needs_server
def test_the_log_stays_small(make: Callable[..., Folder]) -> None:
    folder = make()
    folder.start("/bin/sh", "-c", 'head -c 3000000 /dev/zero; echo done; echo $$ >> "$0/clerks"; exec sleep 1000')
    seen = Seen.of(folder.path)
    until(lambda: (folder.path / "log").stat().st_size < 1000, "the log has been cut")
    folder.leave()
    seen.wait_until_gone()


@pytest.mark.parametrize(
    ("at_once", "expected"),
    [(False, [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 0.2]), (True, [0.0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 0.0])],
)
def test_pauses_double_up_to_5_seconds_until_a_long_life(
    at_once: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(keeper, "_start", lambda command, text, inherited: 4711)
    monkeypatch.setattr(keeper.os, "waitpid", lambda pid, options: (pid, 0))
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now)
    kept = Kept(["program"], pause=0.2, at_once=at_once)
    pauses = []
    for life in (1, 1, 1, 1, 1, 1, 1, 11):
        kept.start()
        now += life
        assert kept.has_died()
        assert not kept.has_died()
        pauses.append(round(kept.due - now, 6))
    assert pauses == expected
    assert kept.deaths == 1


SPEAKS = """
import os, selectors, socket, sys
doors = selectors.DefaultSelector()
for number in sys.argv[2:]:
    doors.register(socket.socket(fileno=int(number)), selectors.EVENT_READ)
with open(sys.argv[1] + "/clerks", "a") as file:
    file.write(f"{os.getpid()}\\n")
while True:
    for key, _ in doors.select():
        key.fileobj.accept()[0].sendall(str(os.getpid()).encode())
"""
"""A clerk that tells everybody its process id."""


def heard(family: int, where: Any) -> int:
    """Which clerk answers there; it is waited for."""
    with socket.socket(family) as asker:
        asker.settimeout(PATIENCE)
        asker.connect(where)
        return int(asker.recv(99))


@needs_server
def test_a_clerk_goes_on_where_the_one_before_it_listened(make: Callable[..., Folder]) -> None:
    folder = make(host="127.0.0.1")
    folder.start(sys.executable, "-I", "-S", "-c", SPEAKS)
    seen = Seen.of(folder.path)
    places = [(socket.AF_INET, ("127.0.0.1", told(folder.path)["clerk"])), (socket.AF_UNIX, str(folder.path / "clerk"))]
    for _ in range(2):
        (now,) = {heard(*place) for place in places}
        assert now == clerks(folder.path)[-1]
        os.kill(now, signal.SIGKILL)
        assert heard(*places[1]) != now  # nobody is turned away meanwhile
    os.kill(seen.server, signal.SIGKILL)
    until(lambda: told(folder.path)["pid"] != seen.server, "another server is there")
    (now,) = {heard(*place) for place in places}
    assert now == clerks(folder.path)[-1]
    assert len(clerks(folder.path)) == 3
    folder.leave()
    seen.wait_until_gone()
    with pytest.raises(ConnectionRefusedError):
        heard(*places[0])


@needs_server
def test_what_a_killed_keeper_left_of_the_socket_is_no_hindrance(make: Callable[..., Folder]) -> None:
    folder = make()
    folder.start(sys.executable, "-I", "-S", "-c", SPEAKS)
    first = Seen.of(folder.path)
    os.kill(first.keeper, signal.SIGKILL)
    until(lambda: not any(map(is_alive, first.pids)), "keeper, server and clerk are dead")
    with pytest.raises(ConnectionRefusedError):
        heard(socket.AF_UNIX, str(folder.path / "clerk"))
    folder.start(sys.executable, "-I", "-S", "-c", SPEAKS)
    until(lambda: len(clerks(folder.path)) == 2, "another clerk has started")
    assert heard(socket.AF_UNIX, str(folder.path / "clerk")) == clerks(folder.path)[-1]


# --- the server -------------------------------------------------------------------------------------------------------


@needs_server
def test_it_gives_up_a_server_that_dies_again_and_again(make: Callable[..., Folder]) -> None:
    folder = make(lives=3)
    folder.start(*WAITS)
    seen = Seen.of(folder.path)
    servers = [seen.server]
    for _ in range(2):
        os.kill(servers[-1], signal.SIGKILL)
        servers.append(until(lambda: (now := told(folder.path)["pid"]) not in servers and now, "another server"))
    os.kill(servers[-1], signal.SIGKILL)
    until(lambda: not any(map(is_alive, (seen.keeper, seen.clerk))), "the keeper has given up")
    failed = json.loads((folder.path / "failed.json").read_text())
    assert failed["kind"] == "server"
    assert failed["text"].startswith("the server died 3 times in a row")
    assert not (folder.path / "server.json").exists()
    folder.start(*WAITS)  # another one tries anew
    again = told(folder.path)
    assert again["keeper"] != seen.keeper
    assert identify(str(folder.path / "socket"), "secret", PATIENCE) == again["pid"]


@needs_server
def test_it_notices_deaths_when_its_starter_ignored_and_blocked_the_signal(make: Callable[..., Folder]) -> None:
    folder = make()

    def deaf() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})

    folder.start(*WAITS, before=deaf)
    seen = Seen.of(folder.path)
    os.kill(seen.server, signal.SIGKILL)
    until(lambda: told(folder.path)["pid"] != seen.server, "another server is there")
    with open(f"/proc/{told(folder.path)['pid']}/status") as status:
        masks = dict(line.split(":\t") for line in status if line.startswith("Sig"))
    assert int(masks["SigBlk"], 16) == 0


def bound(thief: socket.socket, port: int) -> bool:
    with contextlib.suppress(OSError):  # a process that was just being started may still hold it
        thief.bind(("127.0.0.1", port))
        return True
    return False


@needs_server
def test_a_new_keeper_takes_the_port_of_the_last_one(make: Callable[..., Folder]) -> None:
    folder = make(host="127.0.0.1")
    folder.start(*WAITS)
    first = told(folder.path)
    os.kill(first["keeper"], signal.SIGKILL)
    until(lambda: not is_alive(first["pid"]), "the server is dead")
    folder.start(*WAITS)
    second = until(lambda: (now := told(folder.path))["keeper"] != first["keeper"] and now, "another keeper")
    assert second["port"] == first["port"]
    os.kill(second["keeper"], signal.SIGKILL)
    until(lambda: not is_alive(second["pid"]), "the server is dead")
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        until(lambda: bound(thief, first["port"]), "the port is free")
        thief.listen()
        folder.start(*WAITS)
        third = until(lambda: (now := told(folder.path))["keeper"] != second["keeper"] and now, "another keeper")
        assert third["port"] != first["port"]
        assert first["clerk"] == second["clerk"] == third["clerk"] not in (first["port"], third["port"])
        assert identify(("127.0.0.1", third["port"]), "secret", PATIENCE) == third["pid"]


@needs_server
def test_a_second_keeper_leaves_the_folder_to_the_first(make: Callable[..., Folder]) -> None:
    folder = make()
    folder.start(*WAITS)
    seen = Seen.of(folder.path)
    folder.start(*DIES)
    assert told(folder.path) == {"pid": seen.server, "keeper": seen.keeper}
    os.kill(seen.clerk, signal.SIGKILL)
    until(lambda: len(clerks(folder.path)) == 2, "the first keeper has started a clerk")
    assert not (folder.path / "births").exists()


def test_a_program_that_is_not_there(make: Callable[..., Folder], tmp_path: Path) -> None:
    folder = make()
    folder.start(*WAITS, server=str(tmp_path / "nothing"))
    until((folder.path / "failed.json").exists, "the keeper has given up")
    failed = json.loads((folder.path / "failed.json").read_text())
    assert f"{tmp_path}/nothing cannot be run: No such file" in failed["text"]
    assert clerks(folder.path) == []


# --- who answers ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(path: Path, *pieces: bytes, hold: bool = False) -> Iterator[str]:
    """A server that says `pieces` to whoever comes, and then hangs up, or holds the line."""
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(PATIENCE)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(PATIENCE)
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.001)  # so that pieces come one by one
                if hold:
                    over.wait(PATIENCE)

        thread = threading.Thread(target=serve)
        thread.start()
        yield str(path)
        over.set()
        thread.join()


INFO = b"+OK\r\n$40\r\n# Server\r\nredis_version:7.0.15\r\nprocess_id:4711\r\nport:0\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "hold", "expected"),
    [
        ([INFO], False, 4711),
        ([INFO[at : at + 1] for at in range(len(INFO))], False, 4711),
        ([INFO], True, 4711),
        ([INFO[: INFO.index(b"4711") + 2]], False, None),
        ([b"-ERR AUTH <password> called without any password configured\r\n" + INFO[5:]], False, None),
        ([b"-WRONGPASS\r\n"], False, None),
        ([b"+OK\r\n$-1\r\n"], False, None),
        ([b"HTTP/1.1 400 Bad Request\r\nprocess_id:4711\r\n"], False, None),
        ([], False, None),
        ([], True, None),
        ([b"+OK\r\n", b"x" * 100_000], True, None),
    ],
)
def test_identify_takes_nonsense_for_nobody(
    tmp_path: Path, pieces: list[bytes], hold: bool, expected: int | None
) -> None:
    with answering(tmp_path / "socket", *pieces, hold=hold) as path:
        assert identify(path, "secret", 0.25 if expected is None else PATIENCE) == expected


def test_identify_where_nobody_is(tmp_path: Path) -> None:
    assert identify(str(tmp_path / "nothing"), "secret") is None
    assert identify("x" * 200, "secret") is None
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert identify(bound.getsockname(), "secret") is None
