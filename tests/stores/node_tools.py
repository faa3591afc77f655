"""What the tests of nodes share: stand-in clerks, and a look at the processes of a node from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from stallfree.stores.endpoint import Address
from stallfree.stores.keeper import identify
from stallfree.stores.spawn import PROGRAMS, Node
from stallfree.stores.wire import command

PATIENCE = 30.0  # seconds until something that should come counts as never coming

needs_server = pytest.mark.skipif(
    not any(shutil.which(program) for program in PROGRAMS),
    reason="neither valkey-server nor redis-server is installed: apt install redis-server",
)

CLERK = ["/bin/sh", "-c", 'echo $$ >> "$0/clerks"; exec sleep 1000']
"""A clerk that notes its process id in the node's folder, and does nothing."""


def make_node(name: str = "one", **options: Any) -> Node:
    """A node whose clerk does nothing."""
    return Node(name, **{"clerk": CLERK, **options})


def until(met: Callable[[], Any], what: str) -> Any:
    """Wait until `met` gives something true, and give that. Never coming fails the test."""
    deadline = time.monotonic() + PATIENCE
    while not (found := met()):
        assert time.monotonic() < deadline, f"after {PATIENCE:.0f} s still not so: {what}"
        time.sleep(0.002)
    return found


def told(folder: Path) -> dict[str, Any]:
    """What the keeper says of the server; waits for it."""

    def read() -> Any:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((folder / "server.json").read_bytes())

    return until(read, "the keeper tells of a server")


def clerks(folder: Path) -> list[int]:
    """The clerks there have been."""
    with contextlib.suppress(OSError):
        return [int(line) for line in (folder / "clerks").read_text().split()]
    return []


def where(address: Address) -> str | tuple[str, int]:
    """An address as `identify` and sockets want it."""
    return address.path or (address.host, address.port)


def server_at(address: Address, seconds: float = PATIENCE) -> int | None:
    """The process that answers at an address, however busy the machine is; None if nobody does."""
    return identify(where(address), address.password, seconds)


def ask(address: Address, *commands: str) -> bytes:
    """What a server or a clerk answers first to commands that a stranger sends it."""
    family = socket.AF_UNIX if address.path else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.connect(where(address))
        for given in commands:
            connection.sendall(b"".join(map(bytes, command(*given.split()))))
        return connection.recv(4096)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Seen:
    """The processes of a node: its keeper, its server and its clerk."""

    folder: Path
    keeper: int
    server: int
    clerk: int

    @staticmethod
    def of(folder: Path) -> Seen:
        """Waits until all are there."""
        found = until(lambda: clerks(folder), "a clerk has started")
        now = told(folder)
        return Seen(folder, now["keeper"], now["pid"], found[-1])

    @property
    def pids(self) -> tuple[int, int, int]:
        """Of all three."""
        return self.keeper, self.server, self.clerk

    def wait_until_gone(self) -> None:
        """Of server, keeper, clerk and folder nothing is left."""
        until(lambda: not any(map(is_alive, self.pids)), "keeper, server and clerk have ended")
        until(lambda: not self.folder.exists(), "the folder is gone")

    def wait_for_a_look(self) -> None:
        """Until the keeper has looked whether anybody is left, from now on, and has found that somebody is.

        It starts a clerk again only after such a look.
        """
        before = clerks(self.folder)
        os.kill(before[-1], signal.SIGKILL)
        until(lambda: len(clerks(self.folder)) > len(before), "the keeper has started the clerk again")
