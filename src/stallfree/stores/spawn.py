"""The server of this node: found if it runs, started if it does not, gone with the last process that uses it.

A node is a folder in shared memory with a server (Valkey or Redis) and a clerk, which its keeper looks after (see
keeper.py). The kernel knows who uses it: every process holds a shared lock on the folder, and forked workers inherit
it. So it does not matter which process or thread started the server, and how any of them ends.

Who finds no keeper starts one, under a lock that a dead process cannot keep. Address and password belong to the folder:
a server that was started again has the same.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stallfree.errors import InputError, MissingServerError, StorageError, WaitError
from stallfree.folders import SharedFolder, check_name, default_root, sweep
from stallfree.locks import FileLock
from stallfree.platform import OPEN, fcntl
from stallfree.stores import keeper
from stallfree.stores.endpoint import Address
from stallfree.units import format_size, parse_size

MEMORY = "256MiB"
"""What a server may use for what is on its way: messages, and replies that were not yet read."""

PROGRAMS = ("valkey-server", "redis-server")

_CLERK = ("-m", "stallfree.stores.clerk")
_LEAST_MEMORY = 4 << 20
_PREFIX = "redis-"
_LIVES = 20  # deaths of the server, one soon after the other, until its keeper gives up
_KEEPERS = 3  # that may die without a word, one after the other
_START_SECONDS = 30.0
_QUIET_SECONDS = 1.0  # of a server that runs and does not answer, until a process attaches nevertheless
_END_SECONDS = 5.0
_LONGEST_PATH = 107  # of a socket, in bytes
_SIOCGIFADDR = 0x8915
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | OPEN


def find_server() -> str:
    """The path of valkey-server, else of redis-server, on the PATH or beside this Python. Or `MissingServerError`."""
    beside = os.path.dirname(os.path.abspath(sys.executable))
    for program in PROGRAMS:
        found = shutil.which(program) or shutil.which(program, path=beside)
        if found:
            return os.path.abspath(found)
    raise MissingServerError(
        "neither valkey-server nor redis-server is installed, and a store across hosts needs one of them: "
        "`apt install redis-server`, `dnf install valkey`, `conda install -c conda-forge redis-server` or "
        "`brew install valkey`, or give hosts=[...] of servers that run already"
    )


@dataclass(frozen=True)
class Doors:
    """Where a node is reached.

    Attributes:
        server: the address of its server.
        clerk: of its clerk.
    """

    server: Address
    clerk: Address

    @staticmethod
    def at(host: str, server: int, clerk: int, password: str) -> Doors:
        """Two ports of a host."""
        return Doors(
            Address(host=host, port=server, password=password), Address(host=host, port=clerk, password=password)
        )


class Node:
    """Attach to the node `name` of this host, and start its server if there is none.

    Args:
        name: letters, digits, `.`, `_` and `-`. Another name is another server.
        memory: the server's limit, in bytes or as text. The first process decides; another wish is a warning.
        interface: an address of this host, or the name of a network interface, on which other hosts reach the server.
            None: only this host does, by a Unix socket.
        port: of the server, there; the clerk has the next one. 0 for free ones. Once known they stay.
        root: the folder above; `folders.default_root()` if None. Two roots on one host are two nodes.
        clerk: command of the clerk, to which the folder is added; None for stallfree's own.

    Attributes:
        folder: the node's, of mode 0700.
        unix: the addresses of server and clerk on this host, in this process and those forked from it.
        public: their addresses for other hosts; None without `interface`.
        started: whether this process started the server.

    Comes back when the server answers. One that has answered before and does not do so now (it is stopped, or being
    started again) is waited for no longer than a second: its address stays what it is.

    Can be pickled: the other process attaches anew. A forked child shares its parent's attachment; `close` there only
    drops the child's part.

    Raises `InputError` for values that cannot be used, a port that is taken, or a node of that name on another
    interface or port; `MissingServerError` when no server is installed or it cannot be started; `WaitError` when it
    does not answer within 30 s; `StorageError` as `SharedFolder` does.
    """

    def __init__(
        self,
        name: str,
        *,
        memory: int | str = MEMORY,
        interface: str | None = None,
        port: int = 0,
        root: str | Path | None = None,
        clerk: Sequence[str] | None = None,
    ) -> None:
        self._again = partial(
            Node, _checked(name), memory=memory, interface=interface, port=port, root=root, clerk=clerk
        )
        self.name = name
        self.started = False
        self._clerk = [sys.executable, *_CLERK] if clerk is None else list(clerk)
        limit = _memory(memory)
        host = "" if interface is None else find_address(interface)
        _check_port(port, host)
        self._owner = os.getpid()
        self._directory = -1
        root = default_root() if root is None else Path(root)
        sweep(root)  # what killed processes left, or their settings would count for this node
        self._attached = SharedFolder(
            _PREFIX + name, root=root, initialize=partial(_write, limit=limit, host=host, port=port)
        )
        self.folder = self._attached.path
        self._locks: list[FileLock] = []
        try:
            self._setup = _read(self.folder)
            self._check(limit, host)
            self._starting = self._lock("starting")
            self._keeper = self._lock("keeper")
            told = self._reach()
            self._check_found(told, port)
        except BaseException:
            self.close()
            raise
        password = self._setup["password"]
        self.unix = Doors(
            Address(path=self._socket(keeper.SOCKET), password=password),
            Address(path=self._socket(keeper.CLERK), password=password),
        )
        self.public = Doors.at(self._setup["host"], told["port"], told["clerk"], password) if host else None

    def _lock(self, name: str) -> FileLock:
        lock = FileLock(self.folder / name)
        self._locks.append(lock)
        return lock

    def _check(self, limit: int, host: str) -> None:
        """The settings of a node that others made may differ from those asked for here."""
        its_host, its_limit = self._setup["host"], self._setup["memory"]
        if host and its_host != host:
            where = f"on {its_host}" if its_host else "on this host only"
            raise InputError(
                f"the server of the store {self.name!r} was started by another process to listen {where}, not on "
                f"{host}: give the same interface in all processes of this host, or another name"
            )
        if its_limit != limit:
            warnings.warn(
                f"the server of the store {self.name!r} keeps the limit of {format_size(its_limit)} with which it was "
                f"started, not {format_size(limit)}",
                stacklevel=4,
            )

    def _check_found(self, told: dict[str, Any], port: int) -> None:
        if port and told["port"] != port:
            raise InputError(
                f"the server of the store {self.name!r} was started by another process on port {told['port']}, not on "
                f"port={port}: give the same port in all processes of this host, or another name"
            )

    def _socket(self, name: str) -> str:
        """The path of a socket in the folder, by way of an open descriptor if it would be too long."""
        path = str(self.folder / name)
        if len(os.fsencode(path)) <= _LONGEST_PATH:
            return path
        if self._directory < 0:
            self._directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._directory}/{name}"

    # -- the keeper ---------------------------------------------------------------------------------------------------

    def _reach(self) -> dict[str, Any]:
        """Wait for the server, and start what is missing. What `server.json` says."""
        deadline = time.monotonic() + _START_SECONDS
        earlier = _told(self.folder / keeper.FAILED)
        quiet: float | None = None
        starts = 0
        while True:
            told = _told(self.folder / keeper.SERVER)
            failed = _told(self.folder / keeper.FAILED)
            if failed is not None and failed != earlier:
                raise self._failure(failed)
            now = time.monotonic()
            if not self._keeper.claimed_elsewhere():
                starts += self._start(starts)
            elif told is None:
                quiet = None
            elif keeper.identify(self._socket(keeper.SOCKET), self._setup["password"]) == told["pid"]:
                return told
            else:
                quiet = now if quiet is None else quiet
                if now - quiet > _QUIET_SECONDS:
                    return told
            if now > deadline:
                raise WaitError(
                    f"the server of the store {self.name!r} did not answer within {_START_SECONDS:.0f} s. "
                    f"The file {self.folder / keeper.LOG} says what it does: end what keeps it busy, and try again"
                )
            time.sleep(0.002)

    def _start(self, before: int) -> bool:
        """Start a keeper, unless another process was faster. It has the folder's lock when this returns."""
        log = self.folder / keeper.LOG
        with self._starting.hold(_START_SECONDS, f"starting the server of the store {self.name!r}"):
            if self._keeper.claimed_elsewhere():
                return False
            if before >= _KEEPERS:
                raise MissingServerError(
                    f"the process that keeps the server died {before} times; the end of {log}: {_tail(log)}"
                )
            self._run_keeper(log, find_server())
        self.started = True
        return True

    def _run_keeper(self, log: Path, server: str) -> None:
        command = [sys.executable, "-I", "-S", keeper.__file__, str(self.folder), server, *self._clerk]
        try:
            with open(os.open(log, _FRESH, 0o600), "wb") as output:
                process = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_environment(),
                    start_new_session=True,
                )
        except OSError as error:
            raise StorageError(
                f"the server of the store {self.name!r} cannot be started: {error}. See that {server} can be run"
            ) from error
        process.wait()  # not for the keeper, which is a child of this one and goes on

    def _failure(self, failed: dict[str, Any]) -> Exception:
        if failed["kind"] == "port":
            return InputError(
                f"the server of the store {self.name!r} cannot listen there: {failed['text']}. Give another port, "
                "or port=0 for a free one"
            )
        return MissingServerError(
            f"the server of the store {self.name!r} cannot be kept alive: {failed['text']}. See "
            f"{self.folder / keeper.LOG}"
        )

    def close(self) -> None:
        """Leave the node. If nobody is left, server, clerk and folder are gone when this returns."""
        self._attached.close()
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1
        deadline = time.monotonic() + _END_SECONDS
        if self._locks and os.getpid() == self._owner and not self.folder.exists():
            while self._keeper.claimed_elsewhere() and time.monotonic() < deadline:
                time.sleep(0.002)
        for lock in self._locks:
            lock.close()
        self._locks = []

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return self._again, ()


def read_server(folder: Path) -> Address:
    """The address of the server whose node's folder is `folder`, for a process that is not attached to it: the clerk.

    A path that is too long for a socket needs `folder` as the working directory. Raises `OSError` or `ValueError` when
    the server is not there.
    """
    json.loads((folder / keeper.SERVER).read_bytes())
    path = str(folder / keeper.SOCKET)
    if len(os.fsencode(path)) > _LONGEST_PATH:
        if not os.path.samefile(folder, "."):
            raise ValueError(f"{path} is longer than {_LONGEST_PATH} bytes: change to its folder first")
        path = f"/proc/self/cwd/{keeper.SOCKET}"
    return Address(path=path, password=_read(folder)["password"])


def find_address(interface: str) -> str:
    """The address of this host that is meant by an address, the name of a network interface, or a name of this host.

    Raises `InputError` for what is no address of this host, and for one that stands for all of them.
    """
    expected = "give an address of this host or the name of a network interface, such as '10.1.2.3' or 'eth0'"
    if not isinstance(interface, str) or not interface:
        raise InputError(f"interface={interface!r}: {expected}")
    try:
        address = _of_interface(interface) or str(socket.getaddrinfo(interface, None)[0][4][0])
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as test:
            test.bind((address, 0))
    except (OSError, UnicodeError) as error:
        raise InputError(f"interface={interface!r} is none of this host ({error}): {expected}") from error
    if ipaddress.ip_address(address).is_unspecified:
        raise InputError(f"interface={interface!r} stands for all networks of this host: {expected}")
    return address


def _of_interface(name: str) -> str:
    """The IPv4 address of a network interface; empty if there is no interface of that name."""
    if name not in (known for _, known in socket.if_nameindex()):
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        told = fcntl.ioctl(any_socket, _SIOCGIFADDR, name.encode().ljust(40, b"\0"))
    return socket.inet_ntoa(told[20:24])


def _checked(name: Any) -> str:
    try:
        check_name(_PREFIX + name if isinstance(name, str) and name else name)
    except InputError:
        raise InputError(
            f"name={name!r} cannot name a store: use 1 to 114 of the letters a-z and A-Z, digits, '.', '_' and '-'"
        ) from None
    return str(name)


def _memory(memory: int | str) -> int:
    limit = parse_size(memory, "memory")
    if limit < _LEAST_MEMORY:
        raise InputError(f"memory={memory!r} is too little for a server: give {format_size(_LEAST_MEMORY)} or more")
    return limit


def _check_port(port: Any, host: str) -> None:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < (1 << 16) - 1:
        raise InputError(f"port={port!r}: give a number from 1 to 65534, or 0 for a free one")
    if port and not host:
        raise InputError(f"port={port} without an interface: give the address of this host on which to listen, too")


def _write(folder: Path, limit: int, host: str, port: int) -> None:
    told = {
        "version": keeper.VERSION,
        "memory": limit,
        "host": host,
        "port": port,
        "password": secrets.token_urlsafe(32),
        "lives": _LIVES,
    }
    with open(os.open(folder / keeper.NODE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(told, file)


def _read(folder: Path) -> dict[str, Any]:
    told = _told(folder / keeper.NODE)
    if told is None or told.get("version") != keeper.VERSION:
        raise StorageError(f"{folder} was made by another release of stallfree, or is damaged: give another name")
    return told


def _told(path: Path) -> dict[str, Any] | None:
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-1000:].decode(errors="replace").strip() or "it said nothing"
    except OSError:
        return "it said nothing"


def _environment() -> dict[str, str]:
    """This process's, in which the clerk finds stallfree: its working directory is another one."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    above = Path(__file__).absolute().parents[2]
    if above.name not in ("site-packages", "dist-packages"):
        paths.append(str(above))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
