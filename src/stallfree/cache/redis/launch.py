"""One server per node: started by the node's first process, shared by all of them, and ended with its starter.

The process that claims the file `starter` in the store's folder starts the server, in a thread of its own. The thread
stays as long as the server runs, because the kernel kills the server when the thread that started it ends
(`PR_SET_PDEATHSIG`). A server that has died is lost until an epoch begins: then its starter, or another process of the
node if the starter has died, starts an empty one with a new password.

The nodes of a job exchange addresses and passwords through the `TCPStore` at MASTER_ADDR:MASTER_PORT, which torchrun
runs from the start, and `init_process_group` after its call. It has no password: a process that can reach it can read
the passwords of the servers, and can also join the training itself. Other processes of a node and workers read the
addresses from the file `servers.json`.

While its server runs, a node publishes its record again twice a second, with a number that increases (a *beat*). If
that goes on for two beats after other nodes have lost the server, its port still belongs to it, and they may connect
again. The starter keeps the port: after the server has died no other program can listen on it, which would be sent the
password by a process of another node that does not know yet.
"""

import contextlib
import json
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
from stallfree.cache.redis.servers import ID, RECORDS, SOCKET, Record, Servers, open_client, write_records
from stallfree.ipc.folders import SharedFolder, short_path
from stallfree.ipc.locks import FileLock
from stallfree.raising import log

PROGRAMS = ("valkey-server", "redis-server")

RENDEZVOUS_SECONDS = 300.0
"""Maximum wait for the other nodes."""

BEAT_SECONDS = 0.5

_START_SECONDS, _END_SECONDS = 20.0, 5.0
_RESERVED_ADDRESS = "192.0.2.1"  # reserved for documentation by RFC 5737: no host has it
_openings: Counter[str] = Counter()  # of each store by this process

_EXEC = """
import ctypes, os, sys
os.setsid()  # out of reach of Ctrl-C
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
    folders = [os.environ.get("PATH", os.defpath), os.path.dirname(os.path.abspath(sys.executable))]
    for program in PROGRAMS:
        if path := shutil.which(program, path=os.pathsep.join(folders)):
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


def find_host(master: str) -> str:
    """Return this host's address on the route to `master`. Raises `InputError` if there is no route."""
    with contextlib.suppress(OSError, UnicodeError):
        for target in (master, _RESERVED_ADDRESS):  # the master may resolve its own name to a loop-back address
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as test:
                test.connect(address)  # sends nothing
                host = str(test.getsockname()[0])
            if not _is_loopback(host) or _is_loopback(master):
                return host
    raise errors.network_interface(f"MASTER_ADDR={master!r}: no route to it. Give an address of the nodes' network")


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


class NodeServer:
    """The server of this node: attaches to it, or starts it if no process of the node has.

    The nodes of a job meet in a `TCPStore`. A job of one node needs none. The `TCPStore` may outlive an attempt of a
    job, as torchrun's does, so keys contain the number of the attempt. Once it has ended, known addresses are kept.

    Args:
        folder: of the store.
        memory: limit of the server in bytes.
        port: TCP port for other nodes; 0 for a free one. Without other nodes the server has no port.
        name: of the store.
        timeout: seconds without data after which a server is lost.

    Attributes:
        servers: of all nodes.

    Raises `MissingServerError` if the server cannot be started, `InputError` if its port is in use, `StorageError` if
    a server cannot be reached, and `WaitError` if nodes or the first process of this node take too long.
    """

    def __init__(self, folder: SharedFolder, memory: int, port: int, name: str, timeout: float) -> None:
        self._folder, self._memory, self._port, self._name = folder, memory, port, name
        self._id, self._host = (folder.path / ID).read_text(), ""  # no host without other nodes
        self._store: Any = None
        self._kept: socket.socket | None = None  # has the port, while the server runs and after it has died
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._stop, self._lock = threading.Event(), FileLock(folder.path / "starter")
        self._starter = 0  # the pid of this process if it starts the server
        self.servers: Servers = None  # type: ignore[assignment] # until they are known
        deadline = time.monotonic() + RENDEZVOUS_SECONDS + 2 * _START_SECONDS
        try:
            self._join(*find_node())
            while not self._claim() and not (folder.path / RECORDS).exists():
                time.sleep(0.005)
                if time.monotonic() > deadline:
                    raise errors.lock_held(f"another process has not started the server in {folder.path} in time")
            if self._claim():
                self._start()
            self.servers = Servers(folder, timeout)
            self.servers.node = self
            if self._claim():
                self.servers.check()
        except BaseException:
            self.close()
            raise

    def _join(self, number: int, count: int) -> None:
        """Publish the id of this node, as the node `number` of `count`."""
        if count == 1:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        master, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        self._host = find_host(master)
        _openings[self._name] += 1
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{count}/{self._name}/{_openings[self._name]}"
        self._keys = [f"stallfree/{attempt}/{number}" for number in range(count)]
        seconds = timedelta(seconds=RENDEZVOUS_SECONDS)
        try:
            self._store = TCPStore(master, int(port), is_master=False, timeout=seconds, wait_for_workers=False)
            self._store.set(self._keys[number], self._id)
        except (ValueError, RuntimeError) as error:
            raise errors.nodes_missing(
                f"the key-value store of the job's {count} nodes at MASTER_ADDR={master!r}, MASTER_PORT={port!r} does "
                "not answer: use torchrun, or call torch.distributed.init_process_group before creating the store"
            ) from error

    def _gather(self) -> list[Record]:
        """Return the servers of all nodes, in the same order on all. Raises `WaitError` if nodes are missing."""
        deadline = time.monotonic() + RENDEZVOUS_SECONDS
        ids = list(dict.fromkeys(value.decode() for value in self._wait(self._keys, deadline)))
        return [json.loads(value) for value in self._wait([f"stallfree/{id}" for id in ids], deadline)]

    def _wait(self, keys: list[str], deadline: float) -> list[bytes]:
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = ", ".join(str(number) for number, key in enumerate(keys) if not self._store.check([key]))
                raise errors.nodes_missing(
                    f"of {len(keys)} nodes, number {missing} did not create the store {self._name!r} in time: all must"
                )
            time.sleep(0.01)
        return list(self._store.multi_get(keys))

    def _exchange(self, own: Record, ids: list[str]) -> dict[str, Record]:
        """Publish the record of this node's server. Return the last records of other nodes' servers by their ids.

        Without other nodes, or once the `TCPStore` has ended, there are none.
        """
        with contextlib.suppress(RuntimeError):  # the job ends
            if self._store is not None:
                self._store.set(f"stallfree/{self._id}", json.dumps(own))
                return {id: json.loads(self._store.get(f"stallfree/{id}")) for id in ids}
        return {}

    def begin_epoch(self) -> None:
        """Start the server again if it has died, or if the process that started it has. Never raises."""
        if (self._process is None or self._process.poll() is not None) and self._claim():
            try:
                self._start()
            except (errors.StallfreeError, OSError) as error:
                log.warning("the server of this node stays lost in this epoch: %s", error)

    def close(self) -> None:
        """End the server if this process has started it. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        if self._kept is not None:  # forked processes inherit it: with this option, the port is free all the same
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._kept.close()
        self._lock.close()

    def _claim(self) -> bool:
        if self._starter != os.getpid() and self._lock.claim(1):
            self._starter = os.getpid()
        return self._starter == os.getpid()

    def _start(self) -> None:
        """Start the server and publish its address; the first time, wait for those of the other nodes."""
        started: Future[Record] = Future()
        self._thread = threading.Thread(target=self._keep, args=(started,), name="stallfree-server", daemon=True)
        self._thread.start()
        own = started.result()
        self._exchange(own, [])
        if (self._folder.path / RECORDS).exists():
            (self.servers or Servers(self._folder, 1.0)).confirm(own, answers=True)
        else:
            write_records(self._folder.path, self._gather() if self._store else [own])

    def _keep(self, started: Future[Record]) -> None:
        """Run the server, in the thread that starts it, and confirm the addresses of other nodes that are alive."""
        try:
            process, record = self._launch()
        except BaseException as error:
            started.set_exception(error)
            return
        self._process = process
        started.set_result(record)
        first: dict[str, Record] = {}  # the records of lost servers when they were seen to be lost
        while not self._stop.wait(BEAT_SECONDS) and process.poll() is None:
            record = {**record, "beat": record["beat"] + 1}
            lost = self._exchange(record, self.servers.barred() if self.servers else [])
            first = {id: first.get(id, other) for id, other in lost.items()}
            for id, other in lost.items():
                # The next beat may have been on its way when the server died, and a stranger may have its port by now.
                if other["password"] != first[id]["password"] or other["beat"] > first[id]["beat"] + 1:
                    self.servers.confirm(other)
        process.kill()
        process.wait()

    def _launch(self) -> tuple[subprocess.Popen[bytes], Record]:
        """Start the server. Raises `InputError` if its port is in use, `MissingServerError` for any other failure."""
        program, folder, password = find_server(), self._folder.path, secrets.token_hex(32)
        record = {"id": self._id, "host": self._host, "port": 0, "password": password, "beat": 0}
        with contextlib.ExitStack() as stack:
            if self._host:
                record["port"] = self._share_port(stack)
            output = stack.enter_context(open(folder / "log", "wb"))
            command = [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid()), program]
            process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=output, stderr=output)
            values = {**record, "host": self._host or "127.0.0.1", "socket": SOCKET, "memory": self._memory}
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # other users can read a process's arguments
                process.stdin.write(_CONFIGURATION.format_map(values).encode())
            address = {"path": f"{stack.enter_context(short_path(folder))}/{SOCKET}", "password": password}
            deadline = time.monotonic() + _START_SECONDS
            while process.poll() is None:
                with contextlib.suppress(Exception):  # it does not answer yet
                    open_client(address, _START_SECONDS).ping()
                    return process, record
                if time.monotonic() > deadline or self._stop.wait(0.002):
                    process.kill()
        printed = (folder / "log").read_text(errors="replace").strip()[-1000:].replace(password, "...")
        raise errors.MissingServerError(f"{program} ended when it was started; its output: {printed or 'none'}")

    def _share_port(self, stack: contextlib.ExitStack) -> int:
        """Let the server listen on the port of this node until `stack` ends, and return its number."""
        self._kept = self._kept or socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stack.callback(self._kept.setsockopt, socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        try:
            if self._kept.getsockname()[1] == 0:
                self._kept.bind((self._host, self._port))
        except (OSError, OverflowError) as error:
            raise errors.port_unavailable(
                f"port={self._port}: {self._host} cannot use it ({error}): give another, or 0 for a free one"
            ) from error
        return int(self._kept.getsockname()[1])
