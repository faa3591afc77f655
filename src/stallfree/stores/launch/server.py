"""The server of this node: started by the first process, shared by all, and stopped with the last.

A node is a folder in shared memory with a server (Valkey or Redis) that its supervisor keeps running (see
supervisor.py). Every process holds a shared lock on the folder, which forked workers inherit and the kernel releases
when a process dies. So it does not matter which process or thread started the server, or how any of them exits.

A process that finds no supervisor starts one, under a lock that a dead process cannot hold. Password and port change
with each start of the server: read the address before every connection, and never send to an old one.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from stallfree.cache.capacity import check_free_memory
from stallfree.errors import (
    InputError,
    MissingServerError,
    StorageError,
    WaitError,
    capacity_too_small,
    group_mismatch,
    name_invalid,
    network_interface,
    port_unavailable,
    release_mismatch,
    server_missing,
)
from stallfree.ipc.folders import SharedFolder, check_name, default_root, sweep
from stallfree.ipc.locks import FileLock
from stallfree.platform import OPEN, fcntl
from stallfree.stores.addresses import Address
from stallfree.stores.launch import supervisor
from stallfree.units import format_size, parse_size

PROGRAMS = ("valkey-server", "redis-server")

REQUESTS = "requests"
"""Subfolder of a node's folder for address requests; see rendezvous.py."""

_LEAST_MEMORY = 4 << 20
_LOCAL = "127.0.0.1"
_PREFIX = "redis-"
_LIVES = 20  # deaths of the server in quick succession until its supervisor gives up
_SUPERVISORS = 3  # consecutive supervisors that may die without a message
_START_SECONDS = 30.0
_END_SECONDS = 5.0
_SIOCGIFADDR = 0x8915
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | OPEN


def find_server() -> str:
    """The path of valkey-server or else redis-server, on the PATH or beside this Python. Or `MissingServerError`."""
    beside = os.path.dirname(os.path.abspath(sys.executable))
    for program in PROGRAMS:
        found = shutil.which(program) or shutil.which(program, path=beside)
        if found:
            return os.path.abspath(found)
    raise server_missing(
        "neither valkey-server nor redis-server is installed, and a store across hosts needs one of them: "
        "`apt install redis-server`, `dnf install valkey`, `conda install -c conda-forge redis-server` or "
        "`brew install valkey`, or give hosts=[...] of running servers"
    )


def read_running(folder: Path) -> tuple[int, Address] | None:
    """The start number of the server of a node's folder, and its address; None while none runs.

    If the number is unchanged after a connection was opened, the connection is to that server: the port was in use
    throughout.
    """
    server = supervisor.read_json(folder / supervisor.SERVER)
    if server is None or not 0 < supervisor.birth(server["pid"]) == server["birth"]:
        return None
    return server["start"], Address(host=server["host"], port=server["port"], password=server["password"])


def server_folders(root: Path) -> dict[str, Path]:
    """The folders of this user's servers below `root`, by the names of their stores."""
    found = sorted(root.glob(f"{_PREFIX}*/{supervisor.NODE}"))
    return {path.parent.name.removeprefix(_PREFIX): path.parent for path in found}


class NodeServer:
    """Attaches to the server `name` of this host, and starts it if it is not running.

    Args:
        name: letters, digits, `.`, `_` and `-`. Another name is another server.
        memory: the server's limit, in bytes or as text. The first process sets it; another value logs a warning.
        interface: an address of this host, or the name of a network interface, on which other hosts reach the server.
            None: only this host, at 127.0.0.1.
        port: of the server. 0: a free port, which changes with each start.
        root: the parent folder; `folders.default_root()` if None. Two roots on one host are two nodes.

    Attributes:
        folder: of the server, of mode 0700.
        host: the address at which it listens.
        id: of the folder, different from all others.
        started: whether this process started the server.

    The constructor returns when the server has answered. Can be pickled: the other process attaches separately. A
    forked child shares its parent's attachment; `close` in the child has no effect on the parent's.

    Raises:
        InputError: for invalid values, a port in use, or a server of that name on another interface or port.
        MissingServerError: if no server is installed, or the server cannot be started.
        WaitError: if the server does not answer within 30 s.
        StorageError: as `SharedFolder` does.
    """

    def __init__(
        self,
        name: str,
        *,
        memory: int | str,
        interface: str | None = None,
        port: int = 0,
        root: str | Path | None = None,
    ) -> None:
        self._again = partial(NodeServer, _checked(name), memory=memory, interface=interface, port=port, root=root)
        self.name = name
        self.started = False
        limit = _memory(memory)
        host = "" if interface is None else find_address(interface)
        _check_port(port)
        self._owner = os.getpid()
        root = default_root() if root is None else Path(root)
        sweep(root)  # leftovers of killed processes, whose settings would apply to this server
        self._attached = SharedFolder(
            _PREFIX + name, root=root, initialize=partial(_initialize, limit=limit, host=host or _LOCAL, port=port)
        )
        self.folder = self._attached.path
        self._locks: list[FileLock] = []
        try:
            setup = _read_setup(self.folder)
            self._check(setup, limit, host, port)
            self.host: str = setup["host"]
            self.id: str = setup["id"]
            self._starting = self._lock("starting")
            self._supervisor = self._lock(supervisor.SUPERVISOR)
            self._wait()
        except BaseException:
            self.close()
            raise

    def address(self) -> Address | None:
        """The server's current address; None while no server runs."""
        running = read_running(self.folder)
        return None if running is None else running[1]

    def revive(self) -> None:
        """Restart the supervisor if it has died, unless it gave up."""
        if not self._supervisor.claimed_elsewhere() and not (self.folder / supervisor.FAILED).exists():
            self._start()

    def close(self) -> None:
        """Detach from the server. If no process is left, server and folder are removed before this returns."""
        self._attached.close()
        deadline = time.monotonic() + _END_SECONDS
        if self._locks and os.getpid() == self._owner and not self.folder.exists():
            while self._supervisor.claimed_elsewhere() and time.monotonic() < deadline:
                time.sleep(0.002)
        for lock in self._locks:
            lock.close()
        self._locks = []

    def __enter__(self) -> NodeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return self._again, ()

    def _lock(self, name: str) -> FileLock:
        lock = FileLock(self.folder / name)
        self._locks.append(lock)
        return lock

    def _check(self, setup: dict[str, Any], limit: int, host: str, port: int) -> None:
        """Compare the settings of a server started by another process with those requested here."""
        for what, there, wanted in (("interface", setup["host"], host), ("port", setup["port"], port)):
            if wanted and wanted != there:
                raise group_mismatch(
                    f"the server of the store {self.name!r} was started by another process with {what}={there!r}, not "
                    f"{wanted!r}: give the same {what} in all processes of this host, or another name"
                )
        if setup["memory"] != limit:
            warnings.warn(
                f"the server of the store {self.name!r} was started with a limit of {format_size(setup['memory'])} and "
                f"keeps it: the requested {format_size(limit)} are ignored",
                stacklevel=4,
            )

    # -- the supervisor -----------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for the server, and start the supervisor if there is none."""
        deadline = time.monotonic() + _START_SECONDS
        earlier = supervisor.read_json(self.folder / supervisor.FAILED)
        starts = 0
        while True:
            failed = supervisor.read_json(self.folder / supervisor.FAILED)
            if failed is not None and failed != earlier:
                raise self._failure(failed)
            if not self._supervisor.claimed_elsewhere():
                if starts == _SUPERVISORS:
                    raise MissingServerError(
                        f"the supervisor of the server died {starts} times; the end of "
                        f"{self.folder / supervisor.LOG}: {_tail(self.folder / supervisor.LOG)}"
                    )
                starts += self._start()
            elif self.address() is not None:
                return
            if time.monotonic() > deadline:
                raise WaitError(
                    f"the server of the store {self.name!r} did not answer within {_START_SECONDS:.0f} s. Its output "
                    f"is in {self.folder / supervisor.LOG}. Reduce the load of this host, and try again",
                    page="server-failed",
                )
            time.sleep(0.002)

    def _start(self) -> bool:
        """Start a supervisor, unless another process did. The supervisor holds its lock when this returns."""
        with self._starting.hold(_START_SECONDS, f"starting the server of the store {self.name!r}"):
            if self._supervisor.claimed_elsewhere():
                return False
            program = find_server()
            command = [sys.executable, "-I", "-S", supervisor.__file__, str(self.folder), program]
            try:
                with open(os.open(self.folder / supervisor.LOG, _FRESH, 0o600), "wb") as output:
                    process = subprocess.Popen(
                        command,
                        cwd=self.folder,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
            except OSError as error:
                raise StorageError(
                    f"the server of the store {self.name!r} cannot be started: {error}. Check that {program} can run",
                    page="server-failed",
                ) from error
            process.wait()  # the supervisor is a child of this process, and keeps running
        self.started = True
        return True

    def _failure(self, failed: dict[str, Any]) -> Exception:
        if failed["kind"] == "port":
            return port_unavailable(
                f"the server of the store {self.name!r} cannot listen on its port: {failed['text']}. Give another "
                "port, or port=0 for a free one"
            )
        return MissingServerError(
            f"the server of the store {self.name!r} cannot be kept running: {failed['text']}. See "
            f"{self.folder / supervisor.LOG}"
        )


def find_address(interface: str) -> str:
    """The address of this host for an address, the name of a network interface, or a host name.

    Raises `InputError` if this host does not have the address, or if it means all addresses.
    """
    expected = "give an address of this host or the name of a network interface, such as '10.1.2.3' or 'eth0'"
    if not isinstance(interface, str) or not interface:
        raise network_interface(f"interface={interface!r}: {expected}")
    try:
        address = _of_interface(interface) or str(socket.getaddrinfo(interface, None)[0][4][0])
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as test:
            test.bind((address, 0))
    except (OSError, UnicodeError) as error:
        raise network_interface(f"interface={interface!r} does not exist on this host ({error}): {expected}") from error
    if ipaddress.ip_address(address).is_unspecified:
        raise network_interface(f"interface={interface!r} means all networks of this host: {expected}")
    return address


def _of_interface(name: str) -> str:
    """The IPv4 address of a network interface; empty if there is no interface of that name."""
    if name not in (known for _, known in socket.if_nameindex()):
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, _SIOCGIFADDR, name.encode().ljust(40, b"\0"))
    return socket.inet_ntoa(request[20:24])


def _checked(name: Any) -> str:
    try:
        check_name(_PREFIX + name if isinstance(name, str) and name else name)
    except InputError:
        raise name_invalid(
            f"name={name!r} is not a valid store name: use 1 to 114 of the letters a-z and A-Z, digits, '.', '_', '-'"
        ) from None
    return str(name)


def _memory(memory: int | str) -> int:
    limit = parse_size(memory, "capacity_per_node")
    if limit < _LEAST_MEMORY:
        raise capacity_too_small(
            f"capacity_per_node={memory!r} is too small for a server: give {format_size(_LEAST_MEMORY)} or more"
        )
    return limit


def _check_port(port: Any) -> None:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
        raise InputError(f"port={port!r}: give a number from 1 to 65535, or 0 for a free one")


def _initialize(folder: Path, limit: int, host: str, port: int) -> None:
    check_free_memory(limit, f"capacity_per_node={format_size(limit)}")
    (folder / REQUESTS).mkdir(mode=0o700)
    setup = {"version": supervisor.VERSION, "memory": limit, "host": host, "port": port}
    supervisor.write_json(folder / supervisor.NODE, {**setup, "lives": _LIVES, "id": os.urandom(16).hex()})


def _read_setup(folder: Path) -> dict[str, Any]:
    setup = supervisor.read_json(folder / supervisor.NODE)
    if setup is None or setup.get("version") != supervisor.VERSION:
        raise release_mismatch(
            f"{folder} was created by another release of stallfree, or is damaged: give another name"
        )
    return setup


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-1000:].decode(errors="replace").strip() or "no output"
    except OSError:
        return "no output"
