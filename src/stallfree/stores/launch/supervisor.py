"""The process that keeps a node's server running, and stops it with the job.

    python -I -S supervisor.py FOLDER PROGRAM

PROGRAM is valkey-server or redis-server. `server.NodeServer` starts this process, which outlives its starter. Ten times
a second the supervisor checks whether any process is still attached to FOLDER; if not, it kills the server and removes
the folder.
If the supervisor is killed, the kernel kills the server. The supervisor imports only the standard library, so it starts
quickly and needs little memory.

A server that has died is restarted, empty, with another password and, unless the user set the port, on another port.
Another user may take the old port; no process sends a password there, because `server.json` is removed first.

Files in the folder, beside `attached` (see ipc/folders.py):

    node.json     the settings of the server, written once
    supervisor    byte 1 is locked by the supervisor while it runs
    starts.json   the number of starts of the server
    server.json   the server's process, address and password, while it runs
    failed.json   the reason why the last supervisor gave up
    socket        a Unix socket of the server; only the supervisor uses it, to check a start without sending a password
    log           output of the server and the supervisor
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

try:
    import fcntl
    import resource
except ImportError:  # Windows, where it is never started
    fcntl = resource = None  # type: ignore[assignment]

VERSION = 2
NODE, SERVER, FAILED, LOG = "node.json", "server.json", "failed.json", "log"
SUPERVISOR = "supervisor"

_REMOVING = ".del-"
"""Start of the name of a folder that is being removed, as in ipc/folders.py."""

LOOK_SECONDS = 0.1
"""Seconds between two checks for attached processes."""

_STARTS, _SOCKET = "starts.json", "socket"
_ANSWER_SECONDS = 0.25
_START_SECONDS = 20.0  # after which an unresponsive server is killed
_PORT_SECONDS = 1.0  # for an exiting server to release its port
_LONG_LIFE = 10.0  # seconds after which an earlier death no longer counts
_LOG_BYTES = 1 << 20
_MOST_CLIENTS = 1 << 16
_PORT_TRIES = 10
_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4
_PROCESS_ID = re.compile(rb"process_id:(\d+)\r\n")


def identify(where: str | tuple[str, int], password: str, seconds: float = _ANSWER_SECONDS) -> int | None:
    """The process id sent by the server at `where` (path of a Unix socket, or host and port).

    None if no server answers within `seconds`, or it refuses the password.
    """
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    received = b""
    try:
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            deadline = time.monotonic() + seconds
            connection.settimeout(seconds)
            connection.connect(where)
            connection.sendall(f"AUTH {password}\r\nINFO server\r\n".encode())
            while (found := _PROCESS_ID.search(received)) is None:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                piece = connection.recv(65536)
                received += piece
                if not piece or not received.startswith(b"+OK\r\n"[: len(received)]) or len(received) > 1 << 16:
                    return None
    except OSError:
        return None
    return int(found[1])


def birth(pid: int) -> int:
    """Start time of a process, in clock ticks since boot; 0 if it does not exist or is exiting.

    A process that is not exiting still has all its sockets: no other process can have its port.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") or int(fields[6]) & _PF_EXITING else int(fields[19])


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The object in a file; None if there is none."""
    try:
        with open(path, "rb") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
    """Replace a file that only this user can read."""
    new = f"{os.fspath(path)}.{os.getpid()}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(value, file)
    os.replace(new, path)


class Failure(Exception):
    """Raised when the supervisor gives up. `kind` is "port" if the port is in use, else "server"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Supervisor:
    """See the module docstring. The working directory is the node's folder, whose path is `folder`."""

    def __init__(self, folder: str, program: str) -> None:
        self._folder, self._program = folder, program
        self._setup = read_json(NODE) or {}
        self._attached = os.open("attached", os.O_RDWR | os.O_CLOEXEC)
        self._alone = False
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._clients = min(most - 100, _MOST_CLIENTS) if most > 0 else _MOST_CLIENTS
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        self._started = self._due = 0.0
        self._password = ""
        self._answered = False

    def run(self) -> None:
        """Run until no process is attached, the folder is deleted, or the server cannot be kept running."""
        try:
            _remove(SERVER)  # that server died with the last supervisor
            while not self._is_over():
                if self._process is None and time.monotonic() >= self._due:
                    try:
                        self._start_server()
                    except Failure as failure:
                        fixed_port = failure.kind != "port" or self._setup["port"]
                        if not self._answered and (fixed_port or self._deaths >= _PORT_TRIES):
                            raise
                self._reap(LOOK_SECONDS)
                if self._deaths >= self._setup["lives"]:
                    raise _failure(f"the server died {self._deaths} times in a row")
                if os.fstat(2).st_size > _LOG_BYTES:
                    os.ftruncate(2, 0)
        except Failure as failure:
            text = str(failure).replace(self._password or "...", "...")
            write_json(FAILED, {"supervisor": os.getpid(), "time": time.time(), "kind": failure.kind, "text": text})
        finally:
            _remove(SERVER)
            self._end()

    # -- the server ---------------------------------------------------------------------------------------------------

    def _start_server(self) -> None:
        """Start the server, and write `server.json` when it answers. Raises `Failure` if it cannot be started."""
        start = (read_json(_STARTS) or {"start": 0})["start"] + 1
        write_json(_STARTS, {"start": start})
        log = os.fstat(2).st_size
        self._started = time.monotonic()
        with self._bind() as bound:
            port = int(bound.getsockname()[1])
            self._password = os.urandom(32).hex()
            try:
                self._process = _start(self._program, self._config(port).encode())
            except OSError as error:
                self._postpone()
                raise Failure("server", f"{self._program} cannot be run: {error.strerror}") from error
            pid = self._process.pid
            if self._wait_for_answer(pid):
                self._answered = True
                _remove(FAILED)
                address = {"host": self._setup["host"], "port": port, "password": self._password}
                process = {"pid": pid, "birth": birth(pid), "supervisor": os.getpid()}
                write_json(SERVER, {"start": start, **process, **address})
            elif self._process is None:
                raise _failure("the server ended when it was started", log)

    def _bind(self) -> socket.socket:
        """A socket that reserves the port of the next server until the server binds it."""
        host, port = self._setup["host"], self._setup["port"]
        deadline = time.monotonic() + _PORT_SECONDS
        while True:
            bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the server can bind it too
            try:
                bound.bind((host, port))
                return bound
            except OSError as error:
                bound.close()
                if time.monotonic() > deadline or self._is_over():
                    self._postpone()
                    raise Failure("port", f"port {port} of {host}: {error.strerror}") from error
                time.sleep(0.02)

    def _config(self, port: int) -> str:
        """The server's configuration, sent to its standard input, where no other user can read it."""
        return f"""
            bind {self._setup["host"]}
            port {port}
            unixsocket {_SOCKET}
            unixsocketperm 700
            requirepass {self._password}
            protected-mode yes
            maxmemory {self._setup["memory"]}
            maxmemory-policy noeviction
            maxclients {self._clients}
            timeout 30
            tcp-keepalive 30
            tcp-backlog 4096
            client-output-buffer-limit normal 256mb 64mb 5
            save ""
            appendonly no
            databases 1
            daemonize no
            always-show-logo no
        """

    def _wait_for_answer(self, pid: int) -> bool:
        """Whether the server answers; False if it has died, or no process is attached.

        The server listens on its port before the Unix socket. The socket is in a folder of mode 0700, so no other user
        can answer.
        """
        deadline = time.monotonic() + _START_SECONDS
        look = time.monotonic() + LOOK_SECONDS
        while identify(_SOCKET, self._password) != pid:
            now = time.monotonic()
            if now > look:
                if self._is_over():
                    return False
                look = now + LOOK_SECONDS
            if now > deadline:
                os.kill(pid, signal.SIGKILL)
            if self._reap(0.001):
                return False
        return True

    def _reap(self, seconds: float) -> bool:
        """Wait up to `seconds` for the server to die. Returns whether it has died since the last call."""
        if self._process is None:
            time.sleep(seconds)
            return False
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        _remove(SERVER)
        self._process = None
        self._postpone()
        return True

    def _postpone(self) -> None:
        """Schedule the restart: immediately, then after pauses that double from 0.1 to 5 s with consecutive deaths."""
        now = time.monotonic()
        self._deaths = 1 if now - self._started > _LONG_LIFE else self._deaths + 1
        self._due = now + (min(5.0, 0.1 * 2 ** (self._deaths - 2)) if self._deaths > 1 else 0.0)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """Whether no process is attached to the folder, or it no longer exists."""
        try:
            fcntl.flock(self._attached, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._alone = True
        except BlockingIOError:
            return not self._is_in_place()
        return True

    def _is_in_place(self) -> bool:
        try:
            there = os.stat(os.path.join(self._folder, "attached"))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(self._attached))

    def _end(self) -> None:
        """Kill the server, which has no data to save, and remove the folder if no process is attached.

        Another process may have renamed the folder to remove it, and failed as this process wrote files to it.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._alone and self._is_in_place():  # and no process can attach: the lock is held
            removed = f"{_REMOVING}{os.getpid()}-{os.urandom(6).hex()}"
            os.rename(self._folder, os.path.join(os.path.dirname(self._folder), removed))
        with contextlib.suppress(FileNotFoundError):
            there = os.getcwd()
            if os.path.basename(there).startswith(_REMOVING):
                import shutil  # imported late: it is large

                shutil.rmtree(there, ignore_errors=True)


def _failure(what: str, since: int = 0) -> Failure:
    """The error, with the end of the log from byte `since` on."""
    with open(LOG, "rb") as log:
        size = os.fstat(log.fileno()).st_size
        log.seek(max(min(since, size), size - 1500))
        output = log.read().decode(errors="replace").strip()
    kind = "port" if "ddress already in use" in output else "server"
    return Failure(kind, f"{what}; its output: {output[-1000:]}" if output else f"{what}, without any output")


def _start(program: str, text: bytes) -> subprocess.Popen[bytes]:
    """Start a server with `text` on its standard input. May raise `OSError`.

    The kernel kills the server when this process exits.
    """
    supervisor = os.getpid()

    def end_with_supervisor() -> None:
        # The signal is sent when the forking thread exits: this process has only one.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)

    process = subprocess.Popen([program, "-"], stdin=subprocess.PIPE, preexec_fn=end_with_supervisor)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(text)
    return process


def _remove(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)


def _claim() -> bool:
    """Lock the folder for this process until its exit; return False if another supervisor has locked it.

    Forked children do not inherit the lock.
    """
    fd = os.open(SUPERVISOR, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)
    except (BlockingIOError, PermissionError):
        return False
    return True


def main() -> None:
    """Start the supervisor in the background; it holds its lock when this returns, unless another process does."""
    os.umask(0o077)
    claimed, send = os.pipe()
    if os.fork():
        os.close(send)
        os.read(claimed, 1)
        os._exit(0)
    os.close(claimed)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the starter may have ignored or blocked it
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if _claim():
        supervisor = Supervisor(sys.argv[1], sys.argv[2])
        os.close(send)
        supervisor.run()


if __name__ == "__main__":
    main()
