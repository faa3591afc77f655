"""The supervisor as a program: restarts of the server, giving up, and what `identify` accepts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_tools import is_alive, record

from redis_servers import PATIENCE, needs_server, until
from stallfree.stores.launch import supervisor
from stallfree.stores.launch.server import find_server
from stallfree.stores.launch.supervisor import Supervisor, birth, identify, read_json, write_json


class Folder:
    """A node's folder, to which this process is attached."""

    def __init__(self, path: Path, **settings: Any) -> None:
        path.mkdir(mode=0o700)
        self.path = path
        self.attached = os.open(path / "attached", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.attached, fcntl.LOCK_SH)
        write_json(path / "node.json", {"memory": 1 << 26, "host": "127.0.0.1", "port": 0, "lives": 20, **settings})

    def start(self, program: str | None = None, before: Callable[[], None] | None = None) -> None:
        """Start a supervisor; it has the folder, or has ended, when this returns."""
        command = [sys.executable, "-I", "-S", supervisor.__file__, str(self.path), program or find_server()]
        with open(self.path / "log", "ab") as log:
            subprocess.run(command, cwd=self.path, stdout=log, stderr=log, start_new_session=True, preexec_fn=before)

    def leave(self) -> None:
        """No process is attached any more."""
        if self.attached >= 0:
            os.close(self.attached)
            self.attached = -1

    def failed(self) -> dict[str, Any]:
        """Why the supervisor gave up."""
        return until(lambda: read_json(self.path / "failed.json"), "the supervisor has given up")


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
            until(lambda path=folder.path: not path.exists(), "the supervisor has removed the folder")


# --- the server -------------------------------------------------------------------------------------------------------


@needs_server
def test_it_gives_up_a_server_that_dies_again_and_again(make: Callable[..., Folder]) -> None:
    folder = make(lives=3)
    folder.start()
    now: dict[str, Any] = {"start": 0}
    for _ in range(3):
        now = record(folder.path, now["start"])
        os.kill(now["pid"], signal.SIGKILL)
    failed = folder.failed()
    until(lambda: not is_alive(now["supervisor"]), "the supervisor has ended")
    assert failed["kind"] == "server"
    assert failed["text"].startswith("the server died 3 times in a row")
    assert not (folder.path / "server.json").exists()
    folder.start()  # another one tries again
    assert record(folder.path)["start"] > now["start"]
    assert not (folder.path / "failed.json").exists()


def test_pauses_double_up_to_5_seconds_until_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now)
    looked_at = Supervisor.__new__(Supervisor)
    looked_at._deaths = 0
    pauses = []
    for life in (1, 1, 1, 1, 1, 1, 1, 1, 11):
        looked_at._started, now = now, now + life
        looked_at._postpone()
        pauses.append(round(looked_at._due - now, 6))
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 0.0]


@needs_server
def test_a_free_port_that_another_process_takes_first_is_replaced(make: Callable[..., Folder], tmp_path: Path) -> None:
    """The first program to be started is one that finds its port in use."""
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\n"
        f"[ -e {tmp_path}/tried ] && exec {find_server()} -\n"
        f"touch {tmp_path}/tried; echo 'bind: Address already in use'; exit 1\n"
    )
    program.chmod(0o700)
    folder = make()
    folder.start(str(program))
    assert record(folder.path)["start"] == 2


@needs_server
def test_a_given_port_is_kept_and_taken_up_again_when_it_is_free(make: Callable[..., Folder]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        folder = make(port=port)
        folder.start()
        assert (folder.failed()["kind"], folder.failed()["text"]) == (
            "port",
            f"port {port} of 127.0.0.1: Address already in use",
        )
    folder.start()
    first = record(folder.path)
    os.kill(first["pid"], signal.SIGKILL)
    second = record(folder.path, first["start"])
    assert (first["port"], second["port"]) == (port, port)
    assert first["password"] != second["password"]


def test_a_program_that_is_not_there(make: Callable[..., Folder], tmp_path: Path) -> None:
    folder = make()
    folder.start(str(tmp_path / "nothing"))
    assert f"{tmp_path}/nothing cannot be run: No such file" in folder.failed()["text"]


def test_a_process_that_has_ended_has_no_birth() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert birth(process.pid) > 0
        process.kill()
        until(lambda: not is_alive(process.pid), "it has ended")  # and is a zombie
        assert birth(process.pid) == 0
    assert birth(process.pid) == 0


# --- answers ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(path: Path, *pieces: bytes, hold: bool) -> Iterator[str]:
    """A server that sends `pieces` on a connection, and closes it unless `hold`."""
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
        ([INFO[at : at + 1] for at in range(len(INFO))], False, 4711),
        ([INFO], True, 4711),
        ([INFO[: INFO.index(b"4711") + 2]], False, None),
        ([b"-ERR AUTH <password> called without any password configured\r\n" + INFO[5:]], False, None),
        ([b"-WRONGPASS\r\n"], False, None),
        ([b"HTTP/1.1 400 Bad Request\r\nprocess_id:4711\r\n"], False, None),
        ([], True, None),
        ([b"+OK\r\n", b"x" * 100_000], True, None),
    ],
)
def test_identify_accepts_only_the_reply_of_a_server(
    tmp_path: Path, pieces: list[bytes], hold: bool, expected: int | None
) -> None:
    with answering(tmp_path / "socket", *pieces, hold=hold) as path:
        assert identify(path, "secret", 0.25 if expected is None else PATIENCE) == expected
