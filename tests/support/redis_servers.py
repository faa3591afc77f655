"""Servers for tests: real ones, to be killed and frozen, and one that says whatever a test wants."""

import contextlib
import shutil
import signal
import socket
import socketserver
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import psutil
import pytest
import redis

from children import until as until
from stallfree.cache.redis.launch import PROGRAMS, find_server

needs_server = pytest.mark.skipif(
    not any(shutil.which(program) for program in PROGRAMS),
    reason="neither valkey-server nor redis-server is installed: apt install redis-server",
)


class Closing(contextlib.AbstractContextManager[Any]):
    def close(self) -> None:
        """End it."""

    def __exit__(self, *_: object) -> None:
        self.close()


class Server(Closing):
    """A real server on a Unix socket and on a free TCP port of this host. Tests that use it are marked `needs_server`.

    `extra` are lines of its configuration. With a certificate, its TCP port speaks TLS and nothing else.
    """

    def __init__(self, folder: Path, *extra: str) -> None:
        self._folder, self._extra = folder, extra
        self._sockets = tempfile.mkdtemp(prefix="sf-")  # the path of a socket has at most 107 bytes
        self.path = f"{self._sockets}/s"
        self.port = 0
        self.process: Popen[bytes] | None = None
        self.start()

    @property
    def host(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self.port}

    def start(self) -> None:
        """Start it; again with the same port and socket, empty."""
        kind = "port 0\ntls-port" if any(line.startswith("tls-cert-file") for line in self._extra) else "port"
        while True:
            port = self.port or free_port()
            lines = [f"{kind} {port}", "bind 127.0.0.1", f"unixsocket {self.path}", 'save ""', "appendonly no"]
            lines += [f"dir {self._folder}", *self._extra]
            process = Popen([find_server(), "-"], stdin=PIPE, stdout=DEVNULL, cwd=self._folder)
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write("\n".join(lines).encode() + b"\n")
            if until(lambda process=process: process.poll() or self._answers(), "a server answers") is True:
                break
            assert not self.port, f"the server ended with {process.returncode}"  # else somebody took the port
        self.port, self.process = port, process

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(self.path)
                client.sendall(b"PING\r\n")
                return bool(client.recv(1))  # also an error: it wants a password
            except OSError:
                return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        """Stop it: its sockets stay, and it says nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        there = psutil.Process(self.process.pid)
        until(lambda: there.status() == psutil.STATUS_STOPPED, "the server stands still")

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)


class Cluster(Closing):
    """A Redis Cluster on this host; each master has an equal share of the slots. For tests marked `needs_server`."""

    def __init__(self, folder: Path) -> None:
        self.servers: list[Server] = []
        try:
            for number in range(3):
                own = folder / f"node{number}"
                own.mkdir()
                self.servers.append(server := Server(own, "cluster-enabled yes"))
                self.said(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                self.said(server, "CLUSTER", "ADDSLOTS", *range(16384 * number // 3, 16384 * (number + 1) // 3))
            for server in self.servers[1:]:
                self.said(server, "CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
            until(lambda: all(map(self._knows_all, self.servers)), "the nodes know each other")
        except BaseException:
            self.close()
            raise

    def _knows_all(self, server: Server) -> bool:
        info = self.said(server, "CLUSTER", "INFO").split()
        return b"cluster_state:ok" in info and b"cluster_known_nodes:3" in info

    def said(self, server: Server, *command: Any) -> Any:
        with redis.Redis.from_url(f"unix://{server.path}") as client:
            return client.execute_command(*command)

    def close(self) -> None:
        for server in self.servers:
            server.close()


def server_in(folder: Path) -> psutil.Process:
    """The process of the server that a store has started, which works in its folder."""

    def find() -> psutil.Process | None:
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.info["name"] in PROGRAMS and process.cwd() == str(folder):
                    return process
        return None

    return until(find, "the server runs")  # type: ignore[no-any-return]


def free_port() -> int:
    """A TCP port of this host that nobody has at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class FakeServer(Closing):
    """Says OK to what a client says when it connects, and to any other command what `answer` does."""

    def __init__(self, answer: Callable[[socket.socket, list[bytes]], None]) -> None:
        self._open = opened = list[socket.socket]()

        class Talk(socketserver.StreamRequestHandler):
            disable_nagle_algorithm = True

            def handle(self) -> None:
                opened.append(self.request)
                with contextlib.suppress(OSError, ValueError):  # the client has gone
                    while line := self.rfile.readline():
                        words = []
                        for _ in range(int(line[1:])):
                            words.append(self.rfile.read(int(self.rfile.readline()[1:])))
                            self.rfile.read(2)
                        if words[0].upper() in (b"CLIENT", b"AUTH", b"SELECT"):
                            self.wfile.write(b"+OK\r\n")
                        else:
                            answer(self.request, words)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Talk)
        self.host = {"host": "127.0.0.1", "port": self._server.server_address[1]}
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()

    def close(self) -> None:
        self._server.shutdown()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
