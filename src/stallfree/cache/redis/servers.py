"""The servers of a store: connections, and one circuit breaker per server that all processes of a node share.

A failure opens the breaker of a server. While it is open, no request is sent. Once its pause is over, the next attempt
to use the server starts one ping in a separate thread, so no batch waits for it; a reply closes the breaker.

A server of another node is *guarded*: its TCP port may belong to a stranger after the server has died. After a failure
no process connects to it, and so sends it no password, until the node's first process has confirmed its address
(launch.py). Other addresses are given by the user, or are Unix sockets in a folder of this user.

The state of a server is four numbers in a file of the store's folder, without a lock between processes. A race or a
dead process may leave a wrong number, which the next ping or confirmation corrects.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stallfree import errors
from stallfree.cache.redis.addresses import Address, open_client, shown_address
from stallfree.ipc.folders import SharedFolder
from stallfree.ipc.shared_array import shared_array

log = logging.getLogger("stallfree")

T = TypeVar("T")
Command = tuple[Any, ...]
Record = dict[str, Any]
"""A server of a node: its id, host, port, password and beat."""

RECORDS, ID, SOCKET = "servers.json", "id", "socket"
"""Files of a store's folder: the records of the nodes' servers, the id of this node, the socket of its server."""

START_SECONDS = 5.0
"""Time limit for the first use of a server."""

PAUSE, LONGEST = 0.25, 8.0
"""Seconds without requests after a failure. They double with each failure until a request has succeeded."""

_RETRY_AT, _PAUSE, _GENERATION, _BARRED = range(4)
# Time of the next ping, 0 while closed; pause; number of the confirmed address; lowest number that is not lost.

_KEYS = 1000

_inherited: list[Any] = []
"""Clients of a parent process. They are never used and never freed, as both take locks that no thread may release."""


class Server:
    """One standalone server, for all threads of this process and of its forked children.

    Args:
        name: for people.
        find: returns the current address.
        cells: four numbers that all processes of the node share.
        timeout: seconds without data after which the server is lost.
        guarded: whether an address must be confirmed after a failure.
    """

    is_cluster = False

    def __init__(
        self, name: str, find: Callable[[], Address], cells: Any, timeout: float, guarded: bool = False
    ) -> None:
        self.name, self._find, self._cells, self._timeout, self._guarded = name, find, cells, timeout, guarded
        self._client: tuple[tuple[int, int], Any] = (os.getpid(), -1), None
        self._closed = False

    @property
    def lost(self) -> bool:
        """Whether the server counts as lost."""
        return bool(self._cells[_RETRY_AT] != 0)

    @property
    def barred(self) -> bool:
        """Whether the address must be confirmed before it is used again."""
        return bool(self._guarded and self._cells[_GENERATION] < self._cells[_BARRED])

    def confirm(self, *, answers: bool) -> None:
        """Allow connections to the current address. If the server `answers`, requests are sent at once."""
        self._cells[_GENERATION] = max(self._cells[_GENERATION] + 1, self._cells[_BARRED])
        if answers:
            self._cells[_RETRY_AT] = 0

    def lose(self, reason: object, generation: int) -> None:
        """Open the breaker, unless `generation` is an earlier address."""
        cells = self._cells
        if generation == cells[_GENERATION]:
            cells[_BARRED] = generation + 1
            if not self.lost:
                cells[_PAUSE] = min(max(2 * cells[_PAUSE], PAUSE), LONGEST)
                cells[_RETRY_AT] = time.monotonic() + cells[_PAUSE]
                log.warning("the server %s is lost, its samples are read from storage: %s", self.name, reason)

    def is_usable(self) -> bool:
        """Return whether requests may be sent. If not, start a ping if one is due."""
        if not self.lost:
            return not self._closed
        cells, now = self._cells, time.monotonic()
        if not (self.barred or self._closed or now < cells[_RETRY_AT] <= now + 2 * LONGEST):
            cells[_RETRY_AT] = now + min(max(cells[_PAUSE], PAUSE) + self._timeout, LONGEST)  # of the next ping
            threading.Thread(target=self._ping, name="stallfree-ping", daemon=True).start()
        return False

    def _ping(self) -> None:
        if self.request(lambda client: client.ping(), is_ping=True):
            self._cells[_RETRY_AT] = 0

    def request(self, function: Callable[[Any], T], *, is_ping: bool = False) -> T | None:
        """Return `function(client)`, with a client of redis-py. Return None if the server is lost."""
        if not (is_ping or self.is_usable()):
            return None
        generation = int(self._cells[_GENERATION])
        try:
            result = function(self._connected(generation))
        except Exception as error:  # of the socket, of redis-py, or of a parser on invalid data
            self.lose(error, generation)
            return None
        if self._cells[_PAUSE] and not is_ping:
            self._cells[_PAUSE] = 0
        return result

    def _connected(self, generation: int) -> Any:
        """Return the client for an address, which has connections of its own."""
        now, (key, client) = (os.getpid(), generation), self._client
        if key != now:
            if key[0] != now[0]:
                _inherited.append(client)
            client = self._open(generation)
            self._client = now, client
        return client

    def _open(self, generation: int) -> Any:
        return open_client(self._find(), self._timeout, partial(self._check, generation))

    def _check(self, generation: int, connection: Any) -> None:
        """Raise an error if a guarded address may belong to a stranger by now."""
        if self._guarded and getattr(connection, "is_checked", False):  # its server closed it
            self.lose("it has closed a connection", generation)
        if self._guarded and generation < self._cells[_BARRED]:
            raise ConnectionError("its address is not confirmed")
        connection.is_checked = True

    def send(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to commands, errors of commands as exceptions. Empty if the server is lost."""
        return self.request(lambda client: _pipelined(client, commands)) or []

    def clear(self, pattern: bytes) -> None:
        """Remove all keys that match."""

        def remove(client: Any) -> None:
            keys = client.scan_iter(pattern, _KEYS)
            while some := list(islice(keys, _KEYS)):
                _pipelined(client, [("UNLINK", key) for key in some])

        self.request(remove)

    def info(self) -> dict[str, int]:
        """Return memory use and hits by their names in Redis, as sums over a cluster; empty if lost."""
        options = {"target_nodes": "primaries"} if self.is_cluster else {}
        found = self.request(lambda client: client.info(**options)) or {}
        sums: Counter[str] = Counter()
        for part in found.values() if self.is_cluster and "used_memory" not in found else [found]:
            sums.update({name: value for name, value in part.items() if isinstance(value, int)})
        return sums

    def close(self) -> None:
        """Close the connections, and send no more requests."""
        self._closed, self._cells = True, self._cells.copy()  # not shared any more
        if self._client[1] is not None and self._client[0][0] == os.getpid():
            self._client[1].close()


class Cluster(Server):
    """A Redis Cluster as `redis.RedisCluster` provides it; one circuit breaker for all of its servers."""

    is_cluster = True

    def _open(self, generation: int) -> Any:
        from redis.backoff import NoBackoff
        from redis.cluster import RedisCluster
        from redis.retry import Retry

        limits = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), self._timeout)
        options = {**limits, "protocol": 2, **self._find()}
        return RedisCluster(retry=Retry(NoBackoff(), 1), **options)


def _pipelined(client: Any, commands: Sequence[Command]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    return list(pipeline.execute(raise_on_error=False))


def refusal(server: Server, reply: object) -> errors.StorageError:
    """Return the error for a reply that refuses a request."""
    return errors.StorageError(f"the server {server.name} refuses a request: {reply}", page="server-refused")


def read_records(folder: Path) -> list[Record]:
    """Return the servers of all nodes."""
    return list(json.loads((folder / RECORDS).read_bytes()))


def write_records(folder: Path, records: list[Record]) -> None:
    """Replace the servers of all nodes, for the processes of this node. Only this user can read the file."""
    new = folder / f"{RECORDS}.{os.getpid()}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(records, file)
    os.replace(new, folder / RECORDS)


def node_servers(root: Path) -> list[tuple[str, Address]]:
    """Return the names of this user's stores below `root` and the addresses of their servers, this node's first."""
    found = []
    for folder in sorted(file.parent for file in root.glob(f"redis-*/{RECORDS}")):
        with contextlib.suppress(OSError):  # it is being removed
            me = (folder / ID).read_text()
            for record in sorted(read_records(folder), key=lambda record: bool(record["id"] != me)):
                address = _address(record, str(folder) if record["id"] == me else "")
                found.append((folder.name.removeprefix("redis-"), address))
    return found


def _address(record: Record, folder: str) -> Address:
    """Return the address of a node's server: the socket in `folder` if this is the node."""
    where = {"path": f"{folder}/{SOCKET}"} if folder else {name: record[name] for name in ("host", "port")}
    return {**where, "password": record["password"]}


class Servers:
    """The servers of a store, as a process uses them. Picklable: another process attaches to the folder.

    Args:
        folder: of the store.
        timeout: seconds without data after which a server is lost.
        given: their addresses; none for those that the nodes have started.
        is_cluster: whether the first address is a node of a Redis Cluster.
        node: the `NodeServer` of this process.

    Attributes:
        all: the servers.
        names: of the servers, which determine the owner of an id.
        me: the index of this node's server; None for given servers.
    """

    def __init__(
        self,
        folder: SharedFolder,
        timeout: float,
        given: Sequence[Address] = (),
        is_cluster: bool = False,
        node: Any = None,
    ) -> None:
        self.folder, self._arguments = folder, (timeout, given, is_cluster)
        self.is_copy = False  # of the servers of another process
        self.node = node
        self._directory = os.open(folder.path, os.O_PATH | os.O_CLOEXEC)  # for a short path of the socket
        self._release = weakref.finalize(self, os.close, self._directory)
        records = [] if given else read_records(folder.path)
        self.ids = [record["id"] for record in records]
        self.me = None if given else self.ids.index((folder.path / ID).read_text())
        self.names = [f"{shown_address(at)}/{at.get('db', 0)}" for at in given] or [
            str(at) for at in range(len(records))
        ]
        shown = list(map(shown_address, given)) or [
            f"{folder.path.name} on {at['host'] or 'this host'}" for at in records
        ]
        cells = shared_array(folder.path / "state", np.float64, len(shown) * 4).reshape(-1, 4)
        kind = Cluster if is_cluster else Server
        self.all = [
            kind(shown[index], partial(self._find, index), cells[index], timeout, not given and index != self.me)
            for index in range(1 if is_cluster else len(shown))
        ]

    def _find(self, index: int) -> Address:
        """Return the current address of a server."""
        if given := self._arguments[1]:
            return given[index]
        folder = f"/proc/self/fd/{self._directory}" if index == self.me else ""
        return _address(read_records(self.folder.path)[index], folder)

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
            try:
                with open_client(self._find(index), START_SECONDS) as client:
                    info = client.info("server")
            except (AuthenticationError, ResponseError) as error:
                raise errors.server_refused(
                    f"the server {server.name} refuses access: {error}. Give its user and password"
                ) from error
            except Exception as error:  # of the socket, of redis-py, or of a parser on invalid data
                raise errors.server_unreachable(
                    f"the server {server.name} does not answer within {START_SECONDS:.0f} s ({error}): start it, "
                    "correct the address, or allow the port in the firewall"
                ) from error
            modes.add(info.get("redis_mode", info.get("server_mode")) == "cluster")
        if len(modes) > 1:
            raise errors.server_address(
                f"{', '.join(self.names)}: give standalone servers or a Redis Cluster, not both"
            )
        return modes.pop()

    def begin_epoch(self) -> None:
        """Start the server of this node again if it has died."""
        if self.node is not None:
            self.node.begin_epoch()

    def close(self) -> None:
        """Close all connections, and leave the folder."""
        for server in self.all:
            server.close()
        self._release()
        self.folder.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.folder.path, *self._arguments)


def _attached(path: Path, *arguments: Any) -> Servers:
    folder = SharedFolder(path.name, root=path.parent, initialize=None)
    servers = Servers(folder, *arguments)
    servers.is_copy = True
    weakref.finalize(servers, folder.close)
    return servers
