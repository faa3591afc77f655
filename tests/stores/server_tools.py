"""Tools of the tests of servers: a server of this node with its processes, and a port that another process takes."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import psutil

from redis_servers import PATIENCE, until
from stallfree.stores.addresses import Address
from stallfree.stores.launch.server import NodeServer
from stallfree.stores.launch.supervisor import identify, read_json


def make_server(name: str = "one", **options: Any) -> NodeServer:
    """A server of this node."""
    return NodeServer(name, **{"memory": "64MiB", **options})


def record(folder: Path, after: int = 0) -> dict[str, Any]:
    """What `server.json` contains, once the start of the server has a number above `after`."""

    def read() -> Any:
        found = read_json(folder / "server.json")
        return found if found and found["start"] > after else None

    return until(read, "the server runs")


def server_at(address: Address | None) -> int | None:
    """The process id of the server at an address, however busy the machine is; None if there is none."""
    return address and identify((address.host, address.port), address.password, PATIENCE)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(folder: Path, *pids: int) -> None:
    """Until neither the processes nor the folder exist."""
    until(lambda: not any(map(is_alive, pids)), "the processes have ended")
    until(lambda: not folder.exists(), "the folder is gone")


class Listener:
    """Another program at a port, which reads what it is sent."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        until(lambda: self._bind(port), "the port is free")
        self._socket.listen()
        self._thread = threading.Thread(target=self._read)
        self.connections = 0
        self.received = b""
        self._thread.start()

    def _bind(self, port: int) -> bool:
        with contextlib.suppress(OSError):
            self._socket.bind(("127.0.0.1", port))
            return True
        return False

    def _read(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            self.connections += 1
            with connection, contextlib.suppress(OSError):
                connection.settimeout(1)
                received = connection.recv(4096)
                if received == b"end":
                    return
                self.received += received

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Read what has come until now, and end."""
        with socket.create_connection(self._socket.getsockname()) as last:
            last.sendall(b"end")
            self._thread.join()
        self._socket.close()
        self.connections -= 1
