"""One server of Redis or Valkey: connections of redis-py, and a circuit breaker.

A batch is read in requests of 512 KiB, two of which are in flight while the previous reply is checked and copied. This
is faster than one MGET for the whole batch, because the server works in parallel. Figures: docs/decisions/redis.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from stallfree.stores.addresses import Address, load_client
from stallfree.stores.circuit_breaker import CircuitBreaker

T = TypeVar("T")
Request = Sequence[tuple[Any, ...]]
Connection = Any  # of redis-py, whose methods have no types

REQUEST_BYTES = 512 << 10
"""Bytes of values per request."""

AHEAD = 2
"""Requests in flight while a reply is read."""

_MOST_COMMANDS = 1000
"""Maximum commands sent before their replies are read."""

_IDLE_SECONDS = 15.0
"""Seconds after which an idle connection is not reused. A started server closes it after 30 s."""


class Location(Protocol):
    """The location of a server, which may change."""

    fixed: bool
    """Whether the address never changes, so that it needs no confirmation."""

    def find(self) -> tuple[int, Address] | None:
        """A number that increases with each confirmation, and the address; None if there is currently none."""

    def confirm(self, after: int) -> None:
        """Request an address with a number above `after`."""


class FixedLocation:
    """The location of a server with a constant address."""

    fixed = True

    def __init__(self, address: Address) -> None:
        self.address = address

    def find(self) -> tuple[int, Address] | None:
        """0 and the address."""
        return 0, self.address

    def confirm(self, after: int) -> None:
        """Do nothing."""


class NoReply(Exception):
    """The server is not running, or its reply does not match the request."""


class Shard:
    """A server, for all threads of this process and of its forked children. Picklable.

    Args:
        location: of the server.
        timeout: in seconds, for each step of connecting and reading.

    Attributes:
        breaker: open while the server counts as lost.
        last_failure: reason of the last opening of the breaker.
    """

    def __init__(self, location: Location, timeout: float = 0.25) -> None:
        load_client()
        self.location, self.timeout = location, timeout
        self.breaker = CircuitBreaker(self._ping)
        self.last_failure = ""
        # Connection, address number, and start of the idle time. List operations are atomic: no lock.
        self._idle: list[tuple[Connection, int, float]] = []
        self._lost_at = -1  # the number of the address at which the server was lost
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.location, self.timeout)

    def __str__(self) -> str:
        found = self.location.find()
        return "a server that is not running" if found is None else str(found[1])

    # -- commands -----------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[Connection], T]) -> T | None:
        """Return `call(connection)`, or None if the server is lost.

        A connection that fails opens the breaker; nothing is then sent until the server answers again. Raises
        `redis.ResponseError` for an error that `call` raises; the connection is then closed.
        """
        if self._closed or not self.breaker.closed:
            return None
        from redis.exceptions import RedisError, ResponseError

        connection, number = None, self._lost_at
        try:
            connection, number = self._take()
            result = call(connection)
        except Exception as error:
            if connection is not None:
                connection.disconnect()  # replies may be outstanding
            if isinstance(error, ResponseError) or not isinstance(error, (RedisError, OSError, NoReply)):
                raise
            self._fail(number, error)
            return None
        self._keep(connection, number)
        return result

    def read(self, requests: Sequence[Request], use: Callable[[int, Any], None]) -> bool:
        """Send `requests` and pass each value of the replies to `use`.

        Args:
            requests: of commands such as `("MGET", key, key)` or `("GET", key)`.
            use: called with the position of a key over all requests, and its value: bytes, None without a value, or an
                exception for an error.

        Returns whether all values were passed; False if the server is lost.
        """

        def call(connection: Connection) -> bool:
            position = 0
            for request in requests[:AHEAD]:
                connection.send_packed_command(connection.pack_commands(request))
            for number, request in enumerate(requests):
                for command in request:
                    keys = len(command) - 1
                    _limit(connection)
                    reply = _reply(connection)
                    values = reply if isinstance(reply, list) else [reply] * keys
                    if len(values) != keys:
                        raise NoReply(f"the reply has {len(values)} values instead of {keys}")
                    for value in values:
                        use(position, value)
                        position += 1
                if number + AHEAD < len(requests):
                    connection.send_packed_command(connection.pack_commands(requests[number + AHEAD]))
            return True

        return bool(self.run(call))

    def send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any] | None:
        """The replies to `commands`, with errors as exceptions; None if the server is lost."""

        def call(connection: Connection) -> list[Any]:
            replies: list[Any] = []
            for start in range(0, len(commands), _MOST_COMMANDS):
                some = commands[start : start + _MOST_COMMANDS]
                connection.send_packed_command(connection.pack_commands(some))
                for _ in some:
                    _limit(connection)
                    replies.append(_reply(connection))
            return replies

        return self.run(call) if commands else []

    @property
    def lost(self) -> bool:
        """Whether the server counts as lost."""
        return not self.breaker.closed

    def close(self) -> None:
        """Close the idle connections; those in use are closed when they are returned. Idempotent."""
        self._closed = True
        self.breaker.forget()
        self._drop_idle()

    # -- connections --------------------------------------------------------------------------------------------------

    def _take(self) -> tuple[Connection, int]:
        """A connection, and the number of its address.

        A closed idle connection counts as a failure of that address.
        """
        while True:
            try:
                connection, number, since = self._idle.pop()
            except IndexError:
                return self._connect()
            if connection.pid != os.getpid():
                continue  # belongs to a parent process
            found = self.location.find()
            if time.monotonic() - since > _IDLE_SECONDS or (found is not None and found[0] != number):
                connection.disconnect()
                continue
            try:
                if not connection.can_read():
                    return connection, number
            except Exception:
                if not self.location.fixed:
                    self._lost_at = max(self._lost_at, number)
                    raise
            connection.disconnect()

    def _connect(self) -> tuple[Connection, int]:
        found = self.location.find()
        if found is None or (found[0] <= self._lost_at and not self.location.fixed):
            self.location.confirm(self._lost_at)
            raise NoReply("the server is not running, or its address is not confirmed")
        connection = found[1].connection(self.timeout)
        _limit(connection)
        try:
            _parsed(connection.connect)
        except BaseException:
            self._lost_at = max(self._lost_at, found[0])
            raise
        return connection, found[0]

    def _fail(self, number: int, error: Exception) -> None:
        self._lost_at = max(self._lost_at, number)
        self.last_failure = f"{type(error).__name__}: {error}"
        if not self.location.fixed:
            self.location.confirm(self._lost_at)
        self.breaker.trip()
        self._drop_idle()

    def _keep(self, connection: Connection, number: int) -> None:
        self._idle.append((connection, number, time.monotonic()))
        if self._closed:
            self._drop_idle()

    def _drop_idle(self) -> None:
        while self._idle:
            try:
                connection, _, _ = self._idle.pop()
            except IndexError:
                return
            if connection.pid == os.getpid():
                connection.disconnect()

    def _ping(self) -> None:
        """Connect and exchange one message, in the breaker's thread."""
        self.location.confirm(self._lost_at)
        connection, number = self._connect()
        try:
            connection.send_command("PING")
            _limit(connection)
            if _reply(connection) != b"PONG":
                raise NoReply("no reply to PING")
        except BaseException:
            self._lost_at = max(self._lost_at, number)
            connection.disconnect()
            raise
        self._keep(connection, number)


def _limit(connection: Any) -> None:
    """Set the deadline of the next reply, which is later for larger replies."""
    connection.deadline = time.monotonic() + connection.socket_timeout


def _reply(connection: Any) -> Any:
    """The next reply: bytes, int, None, a list of these, or an exception for an error."""
    from redis.exceptions import ResponseError

    try:
        return _parsed(lambda: connection.read_response(disable_decoding=True))
    except ResponseError as error:
        return error


def _parsed(receive: Callable[[], T]) -> T:
    """Return `receive()`. Raises `NoReply` for data that redis-py or hiredis cannot parse."""
    from redis.exceptions import RedisError

    try:
        return receive()
    except (RedisError, OSError, NoReply):
        raise
    except Exception as error:
        raise NoReply(f"a reply that cannot be parsed: {error!r}") from error
