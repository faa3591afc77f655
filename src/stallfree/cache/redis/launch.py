"""One server per node: started by the node's first process, shared by all of them, and ended with its starter.

The process that claims the file `starter` in the store's folder starts the server, in a thread of its own. The thread
stays as long as the server runs, because the kernel kills the server when the thread that started it ends
(`PR_SET_PDEATHSIG`). A server that has died is lost until an epoch begins: then its starter, or another process of the
node if the starter has died, starts an empty one, at the same port if it is free, with a new password.

The nodes of a job exchange addresses and passwords through the `TCPStore` at MASTER_ADDR:MASTER_PORT, which torchrun
runs from the start, and `init_process_group` after its call. It has no password: a process that can reach it can read
the passwords of the servers, and can also join the training itself. Other processes of a node and workers read the
addresses from the file `servers.json`.

While its server runs, a node publishes its record again twice a second, with a number that increases (a *beat*). If
that goes on after other nodes have lost the server, its port still belongs to it, and they may connect again.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from stallfree import errors
from stallfree.cache.redis.addresses import open_client
from stallfree.cache.redis.servers import RECORDS, SOCKET, Record, Servers, write_records
from stallfree.ipc.folders import SharedFolder
from stallfree.ipc.forked import Owner
from stallfree.ipc.locks import FileLock

log = logging.getLogger("stallfree")

PROGRAMS = ("valkey-server", "redis-server")

RENDEZVOUS_SECONDS = 300.0
"""Maximum wait for the other nodes."""

BEAT_SECONDS = 0.5

_START_SECONDS, _END_SECONDS = 20.0, 5.0
_SIOCGIFADDR = 0x8915
_RESERVED_ADDRESS = "192.0.2.1"  # reserved for documentation by RFC 5737: no host has it
_openings: Counter[str] = Counter()  # of each store by this process

_EXEC = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], [sys.argv[2], "-"])
"""
"""Program of the new process until it becomes the server. A `preexec_fn` would run the hooks of forks."""

_CONFIGURATION = (
    "bind {host}\nport {port}\nunixsocket {socket}\nunixsocketperm 700\nrequirepass {password}\ntcp-keepalive 30\n"
    'maxmemory {memory}\nmaxmemory-policy noeviction\nsave ""\nloglevel warning\n'
)


def find_server() -> str:
    """Return the path of valkey-server or redis-server, on the PATH or beside this Python.

    Raises `MissingServerError` if there is none.
    """
    beside = os.path.dirname(os.path.abspath(sys.executable))
    for program in PROGRAMS:
        path = shutil.which(program) or shutil.which(program, path=beside)
        if path:
            return os.path.abspath(path)
    raise errors.server_missing(
        "neither valkey-server nor redis-server is installed: `apt install redis-server`, `dnf install valkey`, `conda "
        "install -c conda-forge redis-server` or `brew install valkey`, or give hosts=[...] of running servers"
    )


def find_node() -> tuple[int, int]:
    """Return the number of this node and the count of nodes.

    They follow from the ranks of `torch.distributed`, or else of RANK and WORLD_SIZE, and from LOCAL_WORLD_SIZE.
    Without the latter, each rank counts as a node, unless MASTER_ADDR is a loop-back address; ranks that have the same
    server become one node later. Raises `InputError` for variables that are not numbers or contradict each other.
    """
    import torch.distributed as distributed

    try:
        rank, world, local = (int(os.environ.get(name) or 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if distributed.is_available() and distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
        if not 0 <= rank < (world := world or 1):
            raise ValueError(f"rank {rank} of {world}")
    except ValueError as error:
        raise errors.launch_environment(f"RANK, WORLD_SIZE or LOCAL_WORLD_SIZE: {error}. Use torchrun") from error
    if local < 1 or world % local:
        local = world if _is_loopback(os.environ.get("MASTER_ADDR", "localhost")) else 1
    return rank // local, world // local


def find_host(interface: str | None, master: str) -> str:
    """Return this host's address for an address or a network interface; None means the route to `master`.

    Raises `InputError` if this host has no such address.
    """
    with contextlib.suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        if interface in [name for _, name in socket.if_nameindex()]:
            request = str(interface).encode().ljust(40, b"\0")
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
        if interface is not None:
            return str(socket.getaddrinfo(interface, None)[0][4][0])
        for target in (master, _RESERVED_ADDRESS):  # the master may resolve its own name to a loop-back address
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as test:
                test.connect(address)  # sends nothing
                host = str(test.getsockname()[0])
            if not _is_loopback(host) or _is_loopback(master):
                return host
    raise errors.network_interface(
        f"interface={interface!r}, MASTER_ADDR={master!r}: this host has no such address, or no route to it. Give "
        "interface=, an address of this host or the name of a network interface, such as '10.1.2.3' or 'eth0'"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Nodes:
    """The nodes of the job that open the store `name`. A job of one node needs no `TCPStore`.

    Args:
        name: of the store.
        id: of this node.
        interface: address or network interface at which other nodes reach this one.

    Attributes:
        host: address of this node for the others; empty if there are none.

    The `TCPStore` may outlive an attempt of a job, as torchrun's does, so keys contain the number of the attempt. Once
    it has ended, known addresses are kept.
    """

    def __init__(self, name: str, id: str, interface: str | None) -> None:
        self.id, self.name, self.host, self._store = id, name, "", None
        number, count = find_node()
        if count == 1:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        master, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        self.host = find_host(interface, master)
        _openings[name] += 1
        attempt = f"stallfree/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{count}/{name}/{_openings[name]}"
        self._keys = [f"{attempt}/{number}" for number in range(count)]
        seconds = timedelta(seconds=RENDEZVOUS_SECONDS)
        try:
            self._store = TCPStore(master, int(port), is_master=False, timeout=seconds, wait_for_workers=False)
            self._store.set(self._keys[number], id)
        except (ValueError, RuntimeError) as error:
            raise errors.nodes_missing(
                f"the key-value store of the job's {count} nodes at MASTER_ADDR={master!r}, MASTER_PORT={port!r} does "
                "not answer: use torchrun, or call torch.distributed.init_process_group before creating the store"
            ) from error

    def publish(self, record: Record) -> None:
        """Publish the record of this node's server."""
        with contextlib.suppress(RuntimeError):  # the job ends
            if self._store is not None:
                self._store.set(f"stallfree/{self.id}", json.dumps(record))

    def record_of(self, id: str) -> Record | None:
        """Return the last record of a node's server; None if the `TCPStore` has ended."""
        with contextlib.suppress(RuntimeError):
            return dict(json.loads(self._store.get(f"stallfree/{id}"))) if self._store is not None else None
        return None

    def gather(self, own: Record) -> list[Record]:
        """Return the servers of all nodes, in the same order on all. Raises `WaitError` if nodes are missing."""
        if self._store is None:
            return [own]
        deadline = time.monotonic() + RENDEZVOUS_SECONDS
        ids = list(dict.fromkeys(value.decode() for value in self._wait(self._keys, deadline)))
        return [json.loads(value) for value in self._wait([f"stallfree/{id}" for id in ids], deadline)]

    def _wait(self, keys: list[str], deadline: float) -> list[bytes]:
        store: Any = self._store
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = ", ".join(str(number) for number, key in enumerate(keys) if not store.check([key]))
                raise errors.nodes_missing(
                    f"of {len(keys)} nodes, number {missing} did not create the store {self.name!r} in time: all must"
                )
            time.sleep(0.01)
        values: list[bytes] = store.multi_get(keys)
        return values


class NodeServer:
    """The server of this node: attaches to it, or starts it if no process of the node has.

    Args:
        folder: of the store.
        memory: limit of the server in bytes.
        port: TCP port for other nodes; 0 for a free one. Without other nodes the server has no port.
        nodes: of the job.
        timeout: seconds without data after which a server is lost.

    Attributes:
        servers: of all nodes.

    Raises `MissingServerError` if the server cannot be started, `InputError` if its port is in use, `StorageError` if
    a server cannot be reached, and `WaitError` if nodes or the first process of this node take too long.
    """

    def __init__(self, folder: SharedFolder, memory: int, port: int, nodes: Nodes, timeout: float) -> None:
        self._folder, self._memory, self._port, self._nodes = folder, memory, port, nodes
        self._last_port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._stop, self._lock = threading.Event(), FileLock(folder.path / "starter")
        self._is_starter, self._owner = False, Owner()
        self.servers: Servers = None  # type: ignore[assignment] # until they are known
        deadline = time.monotonic() + RENDEZVOUS_SECONDS + 2 * _START_SECONDS
        try:
            while not self._claim() and not (folder.path / RECORDS).exists():
                time.sleep(0.005)
                if time.monotonic() > deadline:
                    raise errors.lock_held(f"another process has not started the server in {folder.path} in time")
            if self._is_starter:
                self._start()
            self.servers = Servers(folder, timeout, node=self)
            if self._is_starter:
                self.servers.check()
        except BaseException:
            self.close()
            raise

    def begin_epoch(self) -> None:
        """Start the server again if it has died, or if the process that started it has. Never raises."""
        ended = self._owner.is_here and (self._process is None or self._process.poll() is not None)
        if ended and self._claim():
            try:
                self._start()
            except (errors.StallfreeError, OSError) as error:
                log.warning("the server of this node stays lost in this epoch: %s", error)

    def close(self) -> None:
        """End the server if this process has started it. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        self._lock.close()

    def _claim(self) -> bool:
        self._is_starter = self._is_starter or self._lock.claim(1)
        return self._is_starter

    def _start(self) -> None:
        """Start the server and publish its address; the first time, wait for those of the other nodes."""
        started: Future[Record] = Future()
        self._thread = threading.Thread(target=self._keep, args=(started,), name="stallfree-server", daemon=True)
        self._thread.start()
        own = started.result()
        self._nodes.publish(own)
        if (self._folder.path / RECORDS).exists():
            (self.servers or Servers(self._folder, 1.0)).confirm(own, answers=True)
        else:
            write_records(self._folder.path, self._nodes.gather(own))

    def _keep(self, started: Future[Record]) -> None:
        """Run the server, in the thread that starts it."""
        try:
            process, record = self._launch()
        except BaseException as error:
            started.set_exception(error)
            return
        self._process = process
        started.set_result(record)
        lost: dict[str, Record] = {}  # the last record of each server that is lost
        while not self._stop.wait(BEAT_SECONDS) and process.poll() is None:
            self._nodes.publish(record := {**record, "beat": record["beat"] + 1})
            barred = self.servers.barred() if self.servers else []
            known = {id: found for id in barred if (found := self._nodes.record_of(id)) is not None}
            for id in known.keys() & lost.keys():
                if known[id] != lost[id]:
                    self.servers.confirm(known.pop(id))
            lost = known
        process.kill()
        process.wait()

    def _launch(self) -> tuple[subprocess.Popen[bytes], Record]:
        """Start the server. Raises `InputError` if its port is in use, `MissingServerError` for any other failure."""
        program, folder, host, password = find_server(), self._folder.path, self._nodes.host, secrets.token_hex(32)
        with contextlib.ExitStack() as stack:
            if host:
                self._last_port = stack.enter_context(self._reserve(host)).getsockname()[1]
            output = stack.enter_context(open(folder / "log", "wb"))
            command = [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), program]
            process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=output, stderr=output)
            values = {"socket": SOCKET, "password": password, "memory": self._memory}
            text = _CONFIGURATION.format(host=host or "127.0.0.1", port=self._last_port if host else 0, **values)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # other users can read a process's arguments
                process.stdin.write(text.encode())
            directory = os.open(folder, os.O_PATH | os.O_CLOEXEC)  # a socket address has room for 107 bytes
            stack.callback(os.close, directory)
            address = {"path": f"/proc/self/fd/{directory}/{SOCKET}", "password": password}
            deadline = time.monotonic() + _START_SECONDS
            while process.poll() is None:
                with contextlib.suppress(Exception):  # it does not answer yet
                    open_client(address, _START_SECONDS).ping()
                    record = {"id": self._nodes.id, "host": host, "port": self._last_port}
                    return process, {**record, "password": password, "beat": 0}
                if time.monotonic() > deadline or self._stop.wait(0.002):
                    process.kill()
        printed = (folder / "log").read_text(errors="replace").strip()[-1000:].replace(password, "...")
        raise errors.MissingServerError(f"{program} ended when it was started; its output: {printed or 'none'}")

    def _reserve(self, host: str) -> socket.socket:
        """Return a socket that keeps a port for the server: the last one, or the given one, or a free one."""
        for port in (self._last_port, self._port):
            bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the server can bind it too
                bound.bind((host, port))
                return bound
            except OSError as error:
                bound.close()
                problem = error
        raise errors.port_unavailable(
            f"the server of this node cannot use port {self._port} of {host}: {problem}. Give another, or port=0"
        )
