"""Addresses and credentials of Redis or Valkey servers, and clients of redis-py for them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from stallfree.errors import missing_extra, server_address

EXAMPLE = "{'host': 'node1', 'port': 6379, 'password': '...'}"

_MODULES = ("redis.backoff", "redis.cluster", "redis.connection", "redis.exceptions", "redis.retry", "ssl")

_READ_BYTES = 256 << 10
"""Bytes per receive: faster than redis-py's 64 KiB for values of 100 KB and more."""

_SLOWEST = 4 << 20
"""Minimum bytes sent or received within the time limit; a slower server counts as lost."""

Address = dict[str, Any]
"""Address and credentials of a server: arguments of redis-py's connections, and `ssl`."""


def checked_address(given: Any) -> Address:
    """Return the address in a dict that a user has given; None counts as missing.

    Raises `InputError` for names and values that redis-py does not accept.
    """
    try:
        address = {name: value for name, value in dict(given).items() if value is not None}
        open_client(address, 1.0).connection_pool.make_connection()
    except (TypeError, ValueError) as error:
        raise server_address(f"a host is no address of a server ({error}): give a dict such as {EXAMPLE}") from None
    return address


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


@functools.cache
def load_client() -> None:
    """Import redis-py and its lazy imports.

    Call it before threads use connections: a process forked while a thread imports a module can never import that
    module. Raises `MissingExtraError` without redis-py.
    """
    try:
        for name in _MODULES:
            import_module(name)
    except ModuleNotFoundError as error:
        raise missing_extra("redis", "redis", "a store on Redis or Valkey") from error
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
