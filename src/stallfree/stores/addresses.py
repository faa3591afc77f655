"""Addresses and credentials of Redis or Valkey servers, and connections of redis-py to them."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from stallfree.errors import missing_extra, server_address

if TYPE_CHECKING:
    import redis
    from redis.connection import AbstractConnection


@dataclass(frozen=True)
class Address:
    """Address and credentials of a server. Picklable; the pickle contains the password, the repr does not.

    Attributes:
        host: name or number of the host.
        port: TCP port.
        path: of a Unix socket; host and port are then ignored.
        username: of an ACL user; empty for the default user.
        password: empty for none.
        ssl: whether to use TLS. The server's certificate and host name are verified.
        ssl_ca_certs: file of the trusted authorities; the system's if empty.
        ssl_certfile: file of the client certificate, if the server requires one.
        ssl_keyfile: file of its key, if not in the same file.
        db: number of the database.
    """

    host: str = "localhost"
    port: int = 6379
    path: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    ssl: bool = False
    ssl_ca_certs: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    db: int = 0

    @staticmethod
    def of(given: Mapping[str, Any]) -> Address:
        """The address from a dict of the attributes above, all optional.

        None counts as missing. Raises `InputError` for an unknown name or an invalid value.
        """
        known = {field.name: field for field in fields(Address)}
        if not isinstance(given, Mapping):
            raise server_address(f"a host was given as {type(given).__name__}: give a dict such as {EXAMPLE}")
        values = {name: value for name, value in given.items() if value is not None}
        for name, value in values.items():
            if name not in known:
                raise server_address(f"a host was given with {name!r}, which is unknown: use {', '.join(known)}")
            kind = type(known[name].default)
            if isinstance(value, os.PathLike) and kind is str:
                value = values[name] = os.fspath(value)
            if type(value) is not kind:
                shown = "something else" if name == "password" else repr(value)
                raise server_address(f"a host was given with {name}={shown:.80}: expected {_KINDS[kind]}")
        address = Address(**values)
        for wrong, why in (
            (not address.path and not address.host, "an empty host: give its name, or leave it out for this host"),
            (not 0 < address.port < 1 << 16, f"port={address.port}: expected 1 to 65535"),
            (address.db < 0, f"db={address.db}: expected 0 or more"),
            (address.path and {"host", "port"} & set(values), "path and host or port: give one of them"),
            (address.path and address.ssl, "path and ssl: a Unix socket needs no TLS"),
            (address.username and not address.password, "a username and no password: give both"),
            (
                not address.ssl and any(values.get(name) for name in _TLS),
                f"{next((name for name in _TLS if values.get(name)), '')} and without ssl=True: give both",
            ),
            (address.ssl_keyfile and not address.ssl_certfile, "ssl_keyfile and no ssl_certfile: give both"),
        ):
            if wrong:
                raise server_address(f"a host was given with {why}")
        return address

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connection(self, timeout: float) -> AbstractConnection:
        """An unopened connection of redis-py to this address.

        Its attribute `deadline`, on the clock of `time.monotonic`, limits all later receives.

        Args:
            timeout: seconds for connecting, and for each send and receive step.

        Raises `MissingExtraError` without redis-py.
        """
        kind: Any
        kind, arguments = self._redis(timeout)
        connection: AbstractConnection = _limited(kind)(**arguments, socket_read_size=_READ_BYTES)
        return connection

    def request(self, timeout: float, *command: str) -> Any:
        """The reply to one command, over a separate connection.

        The clients of redis-py 8 check whether a new connection is readable, and treat a TLS session ticket as an
        error. Raises `redis.RedisError` or `OSError` if there is no reply, and other errors for invalid replies.
        """
        connection: Any = self.connection(timeout)
        connection.deadline = time.monotonic() + 2 * timeout
        try:
            connection.connect()
            connection.send_command(*command)
            return connection.read_response()
        finally:
            connection.disconnect()

    def client(self, timeout: float) -> redis.Redis:
        """A client of redis-py without retries. Raises `MissingExtraError` without redis-py."""
        kind, arguments = self._redis(timeout)
        from redis import ConnectionPool, Redis

        return Redis(connection_pool=ConnectionPool(connection_class=kind, **arguments))

    def at(self, host: str, port: int) -> Address:
        """Another server, with the same user, password and TLS."""
        return replace(self, host=host, port=port, path="")

    def _redis(self, timeout: float) -> tuple[type[AbstractConnection], dict[str, Any]]:
        load_client()
        from redis.backoff import NoBackoff
        from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
        from redis.retry import Retry

        arguments: dict[str, Any] = {
            "username": self.username or None,
            "password": self.password or None,
            "db": self.db,
            "protocol": 2,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            **_nameless(),
        }
        if self.path:
            return UnixDomainSocketConnection, arguments | {"path": self.path}
        arguments |= {"host": self.host, "port": self.port}
        if not self.ssl:
            return Connection, arguments
        arguments |= {name: getattr(self, name) or None for name in _TLS}
        return SSLConnection, arguments | {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


@functools.cache
def load_client() -> None:
    """Import redis-py and its lazy imports.

    Call it before threads use connections: a process forked while a thread imports a module can never import that
    module. Raises `MissingExtraError` without redis-py.
    """
    try:
        import redis.backoff
        import redis.connection
        import redis.crc
        import redis.exceptions
        import redis.retry
    except ModuleNotFoundError as error:
        raise missing_extra("redis", "redis", "a store on Redis or Valkey") from error
    import ssl  # noqa: F401

    "localhost".encode("idna")  # as for host names
    _nameless()
    redis.connection.Connection()  # type: ignore[no-untyped-call] # selects the installed parser


@functools.cache
def _limited(kind: Any) -> Any:
    """A subclass of the connection class `kind`, with a deadline for receives.

    The timeout of a socket applies to each received piece, so a server that sends byte by byte would never exceed it.
    It also applies to a whole send, however large.
    """

    class Limited(kind):  # type: ignore[misc]
        deadline = math.inf

        def _connect(self) -> Any:
            return _LimitedSocket(super()._connect(), self)

    return Limited


class _LimitedSocket:
    """A socket whose timeout grows with the size: one time limit, and another one for each 4 MiB."""

    def __init__(self, socket: Any, connection: Any) -> None:
        self._socket, self._connection = socket, connection
        self._seconds_per_byte = connection.socket_timeout / _SLOWEST

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_into(self, *arguments: Any) -> int:
        received: int = self._socket.recv_into(*arguments)
        self._check(received)
        return received

    def recv(self, *arguments: Any) -> bytes:
        received: bytes = self._socket.recv(*arguments)
        self._check(len(received))
        return received

    def _check(self, received: int) -> None:
        self._connection.deadline += received * self._seconds_per_byte
        if time.monotonic() > self._connection.deadline:
            raise TimeoutError("the server sends too slowly")

    def sendall(self, data: Any) -> None:
        for start in range(0, len(data), _SLOWEST):  # each piece has the time limit
            self._socket.sendall(memoryview(data)[start : start + _SLOWEST])


@functools.cache
def _nameless() -> dict[str, Any]:
    """Options that stop redis-py from sending its name and version: two round trips fewer per connection."""
    try:
        from redis import driver_info  # noqa: F401 - version 8 and later have another parameter
    except ImportError:
        return {"lib_name": None, "lib_version": None}
    return {"driver_info": None}


_READ_BYTES = 256 << 10
"""Bytes per receive: twice as fast as redis-py's 64 KiB for values of 100 KB and more."""

_SLOWEST = 4 << 20
"""Minimum bytes sent or received within the time limit; a slower server counts as lost."""

_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_KINDS = {str: "a text", int: "an integer", bool: "True or False"}
EXAMPLE = "{'host': 'node1', 'port': 6379, 'password': '...'}"
