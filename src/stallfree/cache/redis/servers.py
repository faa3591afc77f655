"""The servers of a store: addresses, connections, and one circuit breaker per server, shared by a node's processes.

A failure opens the breaker of a server. While it is open, no request is sent. Once its pause is over, the next attempt
to use the server starts one ping in a separate thread, so no batch waits for it; a reply closes the breaker.

A server of another node is *guarded*: its TCP port may belong to a stranger after the process that started it has died.
After a failure no process connects to it, and so sends it no password, until the node's first process has confirmed its
address (launch.py). Other addresses are given by the user, or are Unix sockets in a folder of this user.

The state of a server is three numbers in a file of the store's folder, without a lock between processes. A race or a
dead process may leave a wrong number, which the next ping or confirmation corrects.
"""

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from stallfree import errors
from stallfree.ipc.folders import SharedFolder, in_use, is_root, short_path
from stallfree.ipc.shared_array import shared_array
from stallfree.raising import log

EXAMPLE = "{'host': 'node1', 'port': 6379, 'password': '...'}"

_CLIENT_MODULES = ("redis.backoff", "redis.cluster", "redis.connection", "redis.exceptions", "redis.retry", "ssl")

_READ_BYTES = 256 << 10
"""Bytes per receive: faster than redis-py's 64 KiB for values of 100 KB and more."""

_SLOWEST = 4 << 20
"""Minimum bytes sent or received within the time limit; a slower server counts as lost."""

Address = dict[str, Any]
"""Address and credentials of a server: arguments of redis-py's connections, and `ssl`."""

Record = dict[str, Any]
"""A server of a node: its id, host, port, password and beat."""

RECORDS, ID, SOCKET = "servers.json", "id", "socket"
"""Files of a store's folder: the records of the nodes' servers, the id of this node, the socket of its server."""

START_SECONDS = 5.0
"""Time limit for the first use of a server."""

PAUSE, LONGEST = 0.25, 8.0
"""Seconds without requests after a failure. They double with each failure until a request has succeeded."""

_RETRY_AT, _PAUSE, _ADDRESS = range(3)
# Time of the next ping, 0 while closed; pause; number of the address, negative while it must be confirmed.

_inherited: list[Any] = []
"""Clients of a parent process. They are never used and never freed, as both take locks that no thread may release."""

# -- addresses and clients of redis-py ---------------------------------------------------------------------------------


def checked_addresses(hosts: Any) -> dict[str, Address]:
    """Return the addresses that a user has given, by name in order; values of None count as missing.

    Raises `InputError` for what is no list of dicts, for what redis-py does not accept, and for a server given twice.
    """
    if not isinstance(hosts, (list, tuple)) or not hosts or not all(isinstance(host, Mapping) for host in hosts):
        raise errors.server_address(
            f"hosts, a {type(hosts).__name__}, is no list of dicts: give servers, such as [{EXAMPLE}]"
        )
    addresses = dict[str, Address]()
    for host in hosts:
        address = {key: value for key, value in host.items() if value is not None}
        try:
            open_client(address, 1.0).connection_pool.make_connection()
        except (TypeError, ValueError) as error:
            raise errors.server_address(
                f"a host is no address of a server ({error}): give a dict such as {EXAMPLE}"
            ) from None
        addresses[shown_address(address)] = address
    if len(addresses) < len(hosts):
        raise errors.server_address(f"the servers {', '.join(addresses)}: give each of them once")
    return dict(sorted(addresses.items()))


def shown_address(address: Address) -> str:
    """Return the address without credentials."""
    where = address.get("path") or f"{address.get('host', 'localhost')}:{address.get('port', 6379)}"
    return f"{where}/{address.get('db') or ''}".rstrip("/")


def open_client(address: Address, timeout: float, check: Callable[[Any], None] = lambda connection: None) -> Any:
    """Return a client of redis-py with a pool of its own, without retries.

    `check(connection)` is called when a connection is open, before the password is sent, and may raise an error.
    """
    load_client()
    import redis.connection as kinds
    from redis import ConnectionPool, Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options = {**address, "protocol": 2, "socket_timeout": timeout, "socket_connect_timeout": timeout}
    kind: Any = kinds.UnixDomainSocketConnection if "path" in address else kinds.Connection
    if options.pop("ssl", False):
        kind = kinds.SSLConnection
        options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    options |= {"socket_read_size": _READ_BYTES, "retry": Retry(NoBackoff(), 0)}

    def connect(connection: Any) -> None:
        check(connection)
        connection._sock = _LimitedSocket(connection._sock, timeout)
        connection.on_connect()
        connection.send_command("PING", check_health=False)  # takes in TLS session tickets, an error for a pool
        connection.read_response()

    return Redis.from_pool(ConnectionPool(connection_class=kind, redis_connect_func=connect, **options))


@cache
def load_client() -> None:
    """Import redis-py and its lazy imports.

    Call it before threads use connections: a process forked while a thread imports a module can never import that
    module. Raises `MissingExtraError` without redis-py.
    """
    try:
        for name in _CLIENT_MODULES:
            import_module(name)
    except ModuleNotFoundError as error:
        raise errors.missing_extra("redis", "redis", "a store on Redis or Valkey") from error
    "localhost".encode("idna")  # as for host names
    import_module("redis").Connection()  # selects the installed parser


class _LimitedSocket:
    """A socket whose time limit applies to a whole reply, and grows with its size: once more for each 4 MiB.

    The timeout of a socket applies to each received piece, so a server that sends byte by byte would never exceed it.
    It also applies to a whole send, however large.
    """

    def __init__(self, socket: Any, timeout: float) -> None:
        self._socket, self._timeout, self._deadline = socket, timeout, time.monotonic() + timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_into(self, *arguments: Any) -> int:
        received: int = self._socket.recv_into(*arguments)
        self._deadline += received * self._timeout / _SLOWEST
        if time.monotonic() > self._deadline:
            raise TimeoutError("the server sends too slowly")
        return received

    def sendall(self, data: Any) -> None:
        for start in range(0, len(data), _SLOWEST):
            self._socket.sendall(memoryview(data)[start : start + _SLOWEST])
        self._deadline = time.monotonic() + self._timeout


# -- the servers ------------------------------------------------------------------------------------------------------


class Server:
    """One standalone server, for all threads of this process and of its forked children.

    Args:
        name: for people.
        find: returns the current address.
        cells: three numbers that all processes of the node share.
        timeout: seconds without data after which the server is lost.
        guarded: whether an address must be confirmed after a failure.
    """

    def __init__(self, name: str, find: Callable[[], Address], cells: Any, timeout: float, guarded: bool) -> None:
        self.name, self._find, self._cells, self._timeout, self._guarded = name, find, cells, timeout, guarded
        self._client: tuple[Any, Any] = (os.getpid(), None), None

    @property
    def lost(self) -> bool:
        """Whether the server counts as lost."""
        return bool(self._cells[_RETRY_AT] != 0)

    @property
    def barred(self) -> bool:
        """Whether the address must be confirmed before it is used again."""
        return bool(self._cells[_ADDRESS] < 0)

    def confirm(self, *, answers: bool) -> None:
        """Allow connections to the current address. If the server `answers`, requests are sent at once."""
        self._cells[_ADDRESS] = abs(self._cells[_ADDRESS]) + 1
        if answers:
            self._cells[_RETRY_AT] = 0

    def lose(self, reason: object, number: int) -> None:
        """Open the breaker, unless `number` is that of an earlier address."""
        cells = self._cells
        if number == cells[_ADDRESS]:
            if self._guarded:
                cells[_ADDRESS] = -number - 1
            if not self.lost:
                cells[_PAUSE] = min(max(2 * cells[_PAUSE], PAUSE), LONGEST)
                cells[_RETRY_AT] = time.monotonic() + cells[_PAUSE]
                log.warning("the server %s is lost, its samples are read from storage: %s", self.name, str(reason))

    def is_usable(self) -> bool:
        """Return whether requests may be sent. If not, start a ping if one is due."""
        if not self.lost:
            return True
        cells, now = self._cells, time.monotonic()
        if not (self.barred or now < cells[_RETRY_AT]):
            cells[_RETRY_AT] = now + min(max(cells[_PAUSE], PAUSE) + self._timeout, LONGEST)  # of the next ping
            threading.Thread(target=self._ping, name="stallfree-ping", daemon=True).start()
        return False

    def _ping(self) -> None:
        if self._request(lambda client: client.ping()):
            self._cells[_RETRY_AT] = 0

    def _request(self, function: Callable[[Any], Any]) -> Any:
        """Return `function(client)`, with a client of redis-py. Return None if the server does not answer."""
        number = int(self._cells[_ADDRESS])
        try:
            return function(self._connected(number))
        except Exception as error:  # of the socket, of redis-py, or of a parser on invalid data
            self.lose(error, number)
            return None

    def _connected(self, number: int) -> Any:
        """Return the client for an address, which has connections of its own."""
        now, (key, client) = (os.getpid(), number), self._client
        if key != now:
            if key[0] != now[0]:
                _inherited.append(client)
            client = self._open(partial(self._check, number))
            self._client = now, client
        return client

    def _open(self, check: Callable[[Any], None]) -> Any:
        return open_client(self._find(), self._timeout, check)

    def _check(self, number: int, connection: Any) -> None:
        """Raise an error if a guarded address may belong to a stranger by now."""
        if self._guarded and getattr(connection, "is_checked", False):  # its server closed it
            self.lose("it has closed a connection", number)
        if self.barred or number != self._cells[_ADDRESS]:
            raise ConnectionError("its address is not confirmed")
        connection.is_checked = True

    def send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the replies to commands; an `OutOfMemoryError` of redis-py is one. Empty if the server is lost.

        Raises `StorageError` if the server refuses a command.
        """
        from redis.exceptions import OutOfMemoryError

        def send(client: Any) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute(raise_on_error=False))

        replies = (self._request(send) if self.is_usable() else None) or []
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, OutOfMemoryError):
                raise errors.StorageError(f"the server {self.name} refuses a request: {reply}", page="server-refused")
        if replies and self._cells[_PAUSE]:
            self._cells[_PAUSE] = 0
        return replies

    def read(self, keys: Sequence[bytes]) -> Any:
        """Return the reply to a request for values: a list with one for each of `keys`, unless it is wrong or lost."""
        replies = self.send([("MGET", *keys)])
        return replies[0] if replies else []

    def info(self) -> dict[str, Any]:
        """Return memory use and hits by their names in Redis; empty if lost."""
        return (self._request(lambda client: client.info()) if self.is_usable() else None) or {}

    def close(self) -> None:
        """Close the connections, and send no more requests."""
        self._cells = np.array([np.inf, 0, 0])  # not shared any more, and lost for ever
        if self._client[1] is not None and self._client[0][0] == os.getpid():
            self._client[1].close()


class Cluster(Server):
    """A Redis Cluster as `redis.RedisCluster` provides it; one circuit breaker for all of its servers."""

    def _open(self, check: Callable[[Any], None]) -> Any:
        from redis.backoff import NoBackoff
        from redis.cluster import RedisCluster
        from redis.retry import Retry

        limits = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), self._timeout)
        return RedisCluster(retry=Retry(NoBackoff(), 1), **{**limits, "protocol": 2, **self._find()})

    def read(self, keys: Sequence[bytes]) -> Any:
        """See `Server`: with a request for each key, as a batch has keys of many slots."""
        return self.send([("GET", key) for key in keys])

    def info(self) -> dict[str, Any]:
        """Return nothing: each server has numbers of its own."""
        return {}


def read_records(folder: Path) -> list[Record]:
    """Return the servers of all nodes."""
    return list(json.loads((folder / RECORDS).read_bytes()))


def write_records(folder: Path, records: list[Record]) -> None:
    """Replace the servers of all nodes, for the processes of this node."""
    new = folder / f"{RECORDS}.{os.getpid()}"
    new.write_text(json.dumps(records))
    new.replace(folder / RECORDS)


class Servers:
    """The servers of a store, as a process uses them. Picklable: another process attaches to the folder.

    Args:
        folder: of the store.
        timeout: seconds without data after which a server is lost.
        given: their addresses; none for those that the nodes have started.
        kind: `Cluster` if the only address is that of a node of a Redis Cluster.

    Attributes:
        all: the servers.
        names: of the servers, which determine the owner of an id.
        me: the index of this node's server; None for given servers.
        node: the `NodeServer` of this process; None for given servers and in copies.
    """

    def __init__(self, folder: SharedFolder, timeout: float, given: Sequence[Address] = (), kind: Any = Server) -> None:
        self.folder, self._given, self._arguments = folder, given, (timeout, given, kind)
        self.node: Any = None
        self._directory = os.open(folder.path, os.O_PATH | os.O_CLOEXEC)  # for a short path of the socket
        self._release = weakref.finalize(self, os.close, self._directory)
        records = [] if given else read_records(folder.path)
        self.ids = [record["id"] for record in records]
        self.me = None if given else self.ids.index((folder.path / ID).read_text())
        self.names = [shown_address(address) for address in given]
        self.names += [f"{folder.path.name} of node {at} {record['host']}" for at, record in enumerate(records)]
        cells = shared_array(folder.path / "state", np.float64, len(self.names) * 3).reshape(-1, 3)
        self.all = [
            kind(name, partial(self._find, index), cells[index], timeout, not given and index != self.me)
            for index, name in enumerate(self.names)
        ]

    def _find(self, index: int) -> Address:
        """Return the current address of a server: as given, or its socket on this node, or its TCP port."""
        if self._given:
            return self._given[index]
        record = read_records(self.folder.path)[index]
        if index == self.me:
            return {"path": f"/proc/self/fd/{self._directory}/{SOCKET}", "password": record["password"]}
        return {name: record[name] for name in ("host", "port", "password")}

    def barred(self) -> list[str]:
        """Return the ids of nodes whose addresses must be confirmed."""
        return [id for id, server in zip(self.ids, self.all, strict=True) if server.barred]

    def confirm(self, record: Record, *, answers: bool = False) -> None:
        """Write the current address of a node's server, and allow connections to it."""
        records, index = read_records(self.folder.path), self.ids.index(record["id"])
        records[index] = record
        write_records(self.folder.path, records)
        self.all[index].confirm(answers=answers)

    def check(self) -> bool:
        """Return whether the servers are a Redis Cluster.

        Raises `InputError` if one refuses access or they cannot be combined, `StorageError` if one does not answer.
        """
        from redis.exceptions import AuthenticationError, ResponseError

        modes: set[bool] = set()
        for index, server in enumerate(self.all):
            name = f"the server {server.name}"
            try:
                with open_client(self._find(index), START_SECONDS) as client:
                    info = client.info("server")
            except (AuthenticationError, ResponseError) as error:
                raise errors.server_refused(f"{name} refuses access: {error}. Give its user and password") from error
            except Exception as error:  # of the socket, of redis-py, or of a parser on invalid data
                raise errors.server_unreachable(
                    f"{name} does not answer within {START_SECONDS:.0f} s ({error}): start it, correct the address, or "
                    "allow the port in the firewall"
                ) from error
            modes.add(info.get("redis_mode", info.get("server_mode")) == "cluster")
        if len(modes) > 1:
            raise errors.server_address(f"{', '.join(self.names)}: standalone servers and a Redis Cluster, not both")
        return modes.pop()

    def close(self) -> None:
        """End the server of this node if this process has started it, close all connections, and leave the folder."""
        if self.node is not None:
            self.node.close()
        for server in self.all:
            server.close()
        self._release()
        self.folder.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.folder.path, *self._arguments)


def _attached(path: Path, *arguments: Any) -> Servers:
    folder = SharedFolder(path.name, root=path.parent, initialize=None)
    servers = Servers(folder, *arguments)
    weakref.finalize(servers, folder.close)
    return servers


# -- the servers of this host -----------------------------------------------------------------------------------------


def running_servers(root: Path) -> list[tuple[str, dict[str, Any] | None]]:
    """Return the stores in use below `root`, and what the servers report that they have started on this host.

    That is None for a server that does not answer within 0.25 s. Connects by their sockets only: a port may by now
    belong to another program, which would receive the password.
    """
    folders = [file.parent for file in sorted(root.glob(f"redis-*/{RECORDS}"))] if is_root(root) else []
    return [(folder.name.removeprefix("redis-"), _reported(folder)) for folder in folders if in_use(folder)]


def _reported(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(Exception), short_path(folder) as path:  # the server starts, ends or is lost
        from redis import Redis

        id, records = (folder / ID).read_text(), read_records(folder)
        password = next(record["password"] for record in records if record["id"] == id)
        options: Any = {"socket_timeout": PAUSE, "socket_connect_timeout": PAUSE, "retry": None}
        with Redis(unix_socket_path=f"{path}/{SOCKET}", password=password, **options) as client:
            return {**client.info("everything"), "keys": client.dbsize()}
    return None
