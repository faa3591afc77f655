"""The process that keeps a node's server and its clerk alive, and ends both when the job is gone.

    python -I -S keeper.py FOLDER SERVER CLERK...

SERVER is its program, CLERK a command, to which FOLDER and the numbers of sockets that listen are added.

It is started by `spawn.Node`, which has put into the folder what it needs to know, and outlives the process that
started it. It looks ten times a second whether any process is still attached to the folder; when none is, or the folder
is gone, it ends the server and the clerk, removes the folder and ends. When it is killed itself, the kernel kills both.
Only the standard library is imported here: that is quick, and small.

What lies in the folder beside `attached` (see folders.py):

    node.json     the password and the settings of the server: written once
    keeper        byte 1 is locked by the keeper as long as it lives
    server.json   the server's process and port, and the clerk's port, once the server answers
    failed.json   why the last keeper gave up
    socket        where the server listens
    clerk         where the clerk does; the keeper holds it open too, and the next clerk goes on there
    log           what the server, the clerk and the keeper have to say
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where nobody starts it
    fcntl = None  # type: ignore[assignment]

VERSION = 1
NODE, SERVER, FAILED, LOG = "node.json", "server.json", "failed.json", "log"
SOCKET, CLERK = "socket", "clerk"

LOOK_SECONDS = 0.1
"""Time between two looks at whether anybody is left."""

ANSWER_SECONDS = 0.25
"""Longest wait for an answer that tells which process a server is."""

_START_SECONDS = 20.0  # until a server that does not answer counts as dead
_PORT_SECONDS = 1.0  # for a server that is just ending to let go of the port
_LONG_LIFE = 10.0  # seconds after which an earlier death counts no more
_CLERK_SECONDS = 0.5  # that the clerk has to end by itself
_LOG_BYTES = 1 << 20
_BACKLOG = 1024  # askers that wait to be let in
_PR_SET_PDEATHSIG = 1
_SIGNALS = {getattr(signal, name, 0) for name in ("SIGCHLD", "SIGIO")}  # a child has ended; a file was deleted
_PROCESS_ID = re.compile(rb"process_id:(\d+)\r\n")


def identify(where: str | tuple[str, int], password: str, seconds: float = ANSWER_SECONDS) -> int | None:
    """The process id that the server at `where` (the path of a socket, or host and port) tells.

    None if there is none, it does not answer within `seconds`, or does not know the password.
    """
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    told = b""
    try:
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            deadline = time.monotonic() + seconds
            connection.settimeout(seconds)
            connection.connect(where)
            connection.sendall(f"AUTH {password}\r\nINFO server\r\n".encode())
            while (found := _PROCESS_ID.search(told)) is None:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                piece = connection.recv(65536)
                told += piece
                if not piece or not told.startswith(b"+OK\r\n"[: len(told)]) or len(told) > 1 << 16:
                    return None
    except OSError:
        return None
    return int(found[1])


class Failure(Exception):
    """The keeper gives up. `kind` is "port" if the port is taken, else "server"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Kept:
    """A process that is started, and started again when it has died.

    Args:
        command: its program and arguments.
        config: gives the text for its standard input.
        pause: seconds between its first death and the next start; doubled with each further death in a row, up to 5.
            The first start in a row is at once if `at_once`.
        sockets: that it inherits; their numbers are its last arguments.

    Attributes:
        pid: of the process; 0 while there is none.
        deaths: in a row, none of them after a long life.
        due: when to start it.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: Callable[[], str] = str,
        *,
        pause: float,
        at_once: bool = False,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        self.pid = self.deaths = 0
        self.due = 0.0
        self._command, self._config, self._sockets = list(command), config, sockets
        self._pause, self._at_once = pause, at_once
        self._born = 0.0

    def start(self) -> None:
        """Start it now."""
        self._born = time.monotonic()
        numbers = [inherited.fileno() for inherited in self._sockets]
        self.pid = _start([*self._command, *map(str, numbers)], self._config().encode(), numbers)

    def has_died(self) -> bool:
        """Whether it has died since the last look; then `due` says when it is to be started again."""
        if not self.pid or not os.waitpid(self.pid, os.WNOHANG)[0]:
            return False
        now = time.monotonic()
        self.deaths = 1 if now - self._born > _LONG_LIFE else self.deaths + 1
        doublings = self.deaths - 1 - self._at_once
        self.due = now + (min(5.0, self._pause * 2**doublings) if doublings >= 0 else 0.0)
        self.pid = 0
        return True

    def end(self, number: int) -> None:
        """Send it a signal, if it is there."""
        if self.pid:
            os.kill(self.pid, number)


class Keeper:
    """See the module. The working directory is the node's folder, whose path is `folder`."""

    def __init__(self, folder: str, server: str, clerk: Sequence[str]) -> None:
        self._folder = folder
        self._setup = _read(NODE) or {}
        self._attached = os.open("attached", os.O_RDWR | os.O_CLOEXEC)
        self._alone = False
        with contextlib.suppress(OSError):  # else the next look will do
            folder_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.fcntl(folder_fd, fcntl.F_NOTIFY, fcntl.DN_DELETE | fcntl.DN_MULTISHOT)
        self._port: socket.socket | None = None  # bound and never listening: nobody else is given it meanwhile
        self._counters: list[socket.socket] = []  # where the clerk listens
        self._server = Kept([server, "-"], self._config, pause=0.1, at_once=True)
        self._clerk = Kept([*clerk, folder], pause=0.2, sockets=self._counters)

    def run(self) -> None:
        """Until nobody is left, the folder is gone, or the server cannot be kept alive."""
        try:
            last = _read(SERVER) or {}
            wished = self._setup["port"]
            if self._setup["host"]:
                self._port = self._bind(wished, int(last.get("port", 0)))
                self._counters.append(self._bind(wished and wished + 1, int(last.get("clerk", 0)), "the clerk's "))
            self._counters.append(_listen_here(CLERK))
            for counter in self._counters:
                counter.listen(_BACKLOG)
            _remove(SERVER)
            self._server.start()
            self._wait_for_answer(first=True)
            while not self._is_over():
                self._look_after()
                signal.sigtimedwait(_SIGNALS, LOOK_SECONDS)
        except Failure as failure:
            text = str(failure).replace(self._setup["password"], "...")
            _write(FAILED, {"keeper": os.getpid(), "time": time.time(), "kind": failure.kind, "text": text})
        finally:
            _remove(SERVER)
            self._end()

    # -- the server ---------------------------------------------------------------------------------------------------

    def _bind(self, wished: int, last: int, whose: str = "") -> socket.socket:
        """A socket that is bound to a port: the one wished for, else the `last` one, else a free one."""
        host = self._setup["host"]
        deadline = time.monotonic() + _PORT_SECONDS
        port = wished or last
        while True:
            bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the server can bind it too
            try:
                bound.bind((host, port))
                return bound
            except OSError as error:
                bound.close()
                if time.monotonic() > deadline or self._is_over():
                    if wished or not port:
                        raise Failure("port", f"{whose}port {port} of {host}: {error.strerror}") from error
                    port = 0
                time.sleep(0.02)

    @property
    def _port_number(self) -> int:
        return 0 if self._port is None else int(self._port.getsockname()[1])

    def _config(self) -> str:
        """For the server's standard input, where no other user can read it."""
        lines = [
            f"port {self._port_number}",
            f"unixsocket {SOCKET}",  # relative: an address has room for 107 bytes
            "unixsocketperm 700",
            f"requirepass {self._setup['password']}",
            "protected-mode yes",
            f"maxmemory {self._setup['memory']}",
            "maxmemory-policy noeviction",
            "client-output-buffer-limit normal 256mb 64mb 5",
            'save ""',
            "appendonly no",
            "databases 1",
            "daemonize no",
            "always-show-logo no",
        ]
        if self._port is not None:
            lines.append(f"bind {self._setup['host']}")
        return "\n".join(lines) + "\n"

    def _wait_for_answer(self, first: bool) -> None:
        """Write `server.json` when the server answers. Ends early when it dies or nobody is left."""
        deadline = time.monotonic() + _START_SECONDS
        look = time.monotonic() + LOOK_SECONDS
        while identify(SOCKET, self._setup["password"]) != self._server.pid:
            now = time.monotonic()
            if now > look:
                if self._is_over():
                    return
                look = now + LOOK_SECONDS
            if now > deadline:
                self._server.end(signal.SIGKILL)
            if self._server.has_died():
                if first:
                    raise _failure("the server ended when it was started")
                return
            signal.sigtimedwait(_SIGNALS, 0.001)
        told = {"pid": self._server.pid, "keeper": os.getpid()}
        if self._port is not None:
            told["port"] = self._port_number
            told["clerk"] = int(self._counters[0].getsockname()[1])
        _write(SERVER, told)

    # -- the life of a keeper -----------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Start what has died and is due."""
        self._clerk.has_died()
        self._server.has_died()
        if not self._server.pid:
            if self._server.deaths >= self._setup["lives"]:
                raise _failure(f"the server died {self._server.deaths} times in a row")
            if time.monotonic() >= self._server.due:
                self._server.start()
                self._wait_for_answer(first=False)
        if not self._clerk.pid and time.monotonic() >= self._clerk.due:
            self._clerk.start()
        if os.fstat(2).st_size > _LOG_BYTES:
            os.ftruncate(2, 0)

    def _is_over(self) -> bool:
        """Whether nobody is attached to the folder, or it is not there any more."""
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
        """The clerk may let go of what it holds. The server has nothing to save."""
        self._clerk.end(signal.SIGTERM)
        self._server.end(signal.SIGKILL)
        deadline = time.monotonic() + _CLERK_SECONDS
        while (left := deadline - time.monotonic()) > 0 and (self._clerk.pid or self._server.pid):
            self._clerk.has_died()
            self._server.has_died()
            if self._clerk.pid or self._server.pid:
                signal.sigtimedwait(_SIGNALS, left)
        for process in (self._clerk, self._server):
            process.end(signal.SIGKILL)
            if process.pid:
                os.waitpid(process.pid, 0)
        for bound in (self._port, *self._counters):
            if bound is not None:
                bound.close()
        if self._alone and self._is_in_place():  # and nobody can come: the lock is held
            self._remove_folder()

    def _remove_folder(self) -> None:
        import shutil  # only now: it is large

        away = os.path.join(os.path.dirname(self._folder), f".del-{os.getpid()}-{os.urandom(6).hex()}")
        os.rename(self._folder, away)
        shutil.rmtree(away, ignore_errors=True)


def _failure(what: str) -> Failure:
    with open(LOG, "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - 1500))
        said = log.read().decode(errors="replace").strip()
    kind = "port" if "ddress already in use" in said else "server"
    return Failure(kind, f"{what}; it said: {said[-1000:]}" if said else f"{what}, without a word")


def _listen_here(name: str) -> socket.socket:
    """A socket in the working directory, in the place of one that another keeper left."""
    _remove(name)
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(name)  # relative: an address has room for 107 bytes
    return bound


def _start(command: Sequence[str], text: bytes, inherited: Sequence[int]) -> int:
    """Start a program with `text` on its standard input, that is killed when this process ends; its process id.

    It inherits the descriptors `inherited`, and no other but the standard ones.
    """
    told, tell = os.pipe()
    os.write(tell, text)  # less than a pipe holds
    os.close(tell)
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        os.close(told)
        return pid
    try:
        # The signal comes when the thread that forked ends: this process has only one.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == keeper:
            os.dup2(told, 0)
            for number in inherited:
                os.set_inheritable(number, True)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execv(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]} cannot be run: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _read(name: str) -> dict[str, Any] | None:
    try:
        with open(name, "rb") as file:
            told = json.load(file)
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def _write(name: str, told: dict[str, Any]) -> None:
    making = f"{name}.{os.getpid()}"
    with open(making, "w") as file:
        json.dump(told, file)
    os.rename(making, name)


def _remove(name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)


def _claim() -> bool:
    """Whether this is now the keeper of the folder, for the rest of its life: forked children do not inherit that."""
    fd = os.open("keeper", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)
    except (BlockingIOError, PermissionError):
        return False
    return True


def main() -> None:
    """Leave a keeper behind that nobody has to wait for. It is the folder's when this returns, or there was one."""
    os.umask(0o077)
    claimed, tell = os.pipe()
    if os.fork():
        os.close(tell)
        os.read(claimed, 1)
        os._exit(0)
    os.close(claimed)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # whoever started this may have ignored them
    signal.pthread_sigmask(signal.SIG_SETMASK, _SIGNALS)  # they are waited for
    if _claim():
        keeper = Keeper(sys.argv[1], sys.argv[2], sys.argv[3:])
        os.close(tell)
        keeper.run()


if __name__ == "__main__":
    main()
