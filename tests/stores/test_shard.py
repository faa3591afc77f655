"""One server as a process sees it: what is read, and how a server is lost and found again."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from children import Child
from redis_servers import FakeServer, Server, free_port, needs_server, until
from stallfree.stores import addresses
from stallfree.stores import shard as module
from stallfree.stores.addresses import Address
from stallfree.stores.shard import FixedLocation, Shard

ENOUGH = 60.0  # seconds that a server may be silent where that is not what is tested
SOON = 0.1  # the same where it is
REQUEST = [[("MGET", b"1", b"2", b"3")]]


def reply(shard: Shard, *command: Any) -> Any:
    """The reply to one command; None if the server is lost."""
    replies = shard.send([command])
    if replies and isinstance(replies[0], Exception):
        raise replies[0]
    return replies[0] if replies else None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as there:
        yield there


@pytest.fixture
def shard(server: Server) -> Iterator[Shard]:
    made = Shard(FixedLocation(server.tcp), ENOUGH)
    yield made
    made.close()


def values_of(shard: Shard, requests: Any = REQUEST) -> list[Any] | None:
    """What `read` passes, in order; None if the server is lost."""
    found: dict[int, Any] = {}
    if not shard.read(requests, found.__setitem__):
        return None
    assert sorted(found) == list(range(len(found)))
    return [found[position] for position in range(len(found))]


def number(shard: Shard) -> int:
    """Identifies the connection that a command is sent by."""
    found = reply(shard, "CLIENT", "ID")
    assert isinstance(found, int)
    return found


class Moving:
    """A location whose address may change. It is confirmed when a test says so."""

    fixed = False

    def __init__(self, address: Address) -> None:
        self.number, self.address = 1, address
        self.requested: list[int] = []

    def find(self) -> tuple[int, Address] | None:
        return None if self.number < 1 else (self.number, self.address)

    def confirm(self, after: int) -> None:
        self.requested.append(after)


# --- what is read ---------------------------------------------------------------------------------------------------


@needs_server
@pytest.mark.parametrize("kind", ["MGET", "GET"])
def test_values_come_in_order_over_many_requests(shard: Shard, kind: str) -> None:
    values = {b"v%d" % at: bytes([at]) * (1 + at**3) for at in range(90)}
    for key, value in values.items():
        reply(shard, "SET", key, value)
    keys = [b"none", *values, b"none", *reversed(values), b"v3", b"v3"]
    for step in (1, 7, len(keys)):
        parts = [keys[start : start + step] for start in range(0, len(keys), step)]
        requests = [[("MGET", *part)] if kind == "MGET" else [("GET", key) for key in part] for part in parts]
        assert values_of(shard, requests) == [values.get(key) for key in keys]
    assert values_of(shard, []) == []


@needs_server
def test_an_error_stands_in_the_place_of_its_value(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_COMMANDS", 2)
    reply(shard, "DEL", "list", "a")
    replies = shard.send([("SET", "a", "1"), ("RPUSH", "list", "x"), ("NONSENSE",), ("GET", "a"), ("GET", "none")])
    assert replies is not None
    assert [replies[0], replies[1], replies[3], replies[4]] == [b"OK", 1, b"1", None]
    assert "unknown command" in str(replies[2])
    first, error, last = values_of(shard, [[("GET", "a"), ("GET", "list"), ("GET", "a")]]) or []
    assert (first, last) == (b"1", b"1")
    assert isinstance(error, redis.ResponseError)
    before = number(shard)
    with pytest.raises(redis.ResponseError, match="unknown command"):
        reply(shard, "NONSENSE")
    assert number(shard) == before, "the connection is kept"
    assert shard.breaker.trips == 0


@needs_server
def test_what_fails_in_the_middle_leaves_no_replies_for_others(shard: Shard) -> None:
    reply(shard, "SET", "a", "first")

    def fail(position: int, value: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shard.read([[("MGET", "a", "a")], [("MGET", "a")]], fail)
    assert reply(shard, "ECHO", "second") == b"second"
    assert shard.breaker.trips == 0


# --- connections ----------------------------------------------------------------------------------------------------


@needs_server
def test_a_forked_child_has_connections_of_its_own(shard: Shard) -> None:
    before = number(shard)

    def child() -> None:
        assert number(shard) > before
        shard.close()

    assert Child(child).wait() == 0
    assert number(shard) == before


@needs_server
def test_a_connection_that_is_old_or_that_the_server_closed_is_not_used(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = number(shard)
    other = Shard(shard.location, ENOUGH)
    reply(other, "CLIENT", "KILL", "ID", before)
    other.close()
    after = number(shard)
    assert after > before
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.0)
    assert number(shard) > after
    assert shard.breaker.trips == 0


@needs_server
def test_a_closed_shard_keeps_nothing_and_sends_nothing(server: Server) -> None:
    shard = Shard(FixedLocation(server.tcp), ENOUGH)
    copy = pickle.loads(pickle.dumps(shard))
    assert (str(copy), copy.timeout) == (str(server.tcp), ENOUGH)
    kept: list[Any] = []

    def call(connection: Any) -> bool:
        kept.append(connection)
        shard.close()
        return True

    assert shard.run(call)
    assert not kept[0].is_connected
    shard.close()
    assert reply(shard, "PING") is None
    assert reply(copy, "PING") == b"PONG"
    copy.close()


# --- a server that is lost ------------------------------------------------------------------------------------------


@needs_server
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_lost_server_is_not_used_until_it_is_back(tmp_path: Path, how: str) -> None:
    with Server(tmp_path) as server:
        shard = Shard(FixedLocation(server.tcp), ENOUGH if how == "killed" else 1.0)
        until(lambda: reply(shard, "PING") == b"PONG", "it answers")
        before, calls = shard.breaker.trips, 0

        def call(connection: Any) -> Any:
            nonlocal calls
            calls += 1
            connection.send_command("BLPOP", "nothing", "0")
            (server.kill if how == "killed" else server.freeze)()
            return connection.read_response()

        assert shard.run(call) is None
        assert all(shard.run(call) is None for _ in range(100))
        assert (calls, shard.breaker.trips, shard.lost) == (1, before + 1, True)
        assert shard.last_failure
        (server.start if how == "killed" else server.thaw)()
        until(lambda: reply(shard, "PING") == b"PONG", "it is used again")
        shard.close()


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    for address in (
        Address("127.0.0.1", free_port()),
        Address(path=f"{tmp_path}/none"),
        Address("a" * 300),
        Address("no.such.host."),
    ):
        shard = Shard(FixedLocation(address), ENOUGH)
        assert values_of(shard) is None
        assert values_of(shard) is None
        assert shard.breaker.trips == 1
        shard.close()


def test_a_server_that_sends_byte_by_byte_is_lost_after_all() -> None:
    """Each byte comes in time; the value would never be whole."""

    def trickle(connection: socket.socket, words: list[bytes]) -> None:
        connection.sendall(b"*3\r\n$100000000\r\n")
        while True:
            connection.sendall(b"x")
            over.wait(SOON / 10)

    over = threading.Event()
    with FakeServer(trickle) as server:
        shard = Shard(FixedLocation(server.tcp), SOON)
        assert values_of(shard) is None
        shard.close()
        over.set()


def test_large_values_have_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket at which a MiB takes 0.2 s, and the time limit is 1 s for 4 MiB."""

    class Slow:
        def recv(self, size: int) -> bytes:
            nonlocal now
            now += 0.2
            return bytes(size)

        def sendall(self, data: bytes) -> None:
            sent.append(len(data))

    now, sent = 0.0, list[int]()
    connection = SimpleNamespace(socket_timeout=1.0, deadline=1.0)
    monkeypatch.setattr(addresses, "time", SimpleNamespace(monotonic=lambda: now))
    limited = addresses._LimitedSocket(Slow(), connection)
    for _ in range(100):
        limited.recv(1 << 20)
    now = connection.deadline
    with pytest.raises(TimeoutError, match="too slowly"):
        limited.recv(1 << 10)
    limited.sendall(bytes(9 << 20))
    assert sent == [4 << 20, 4 << 20, 1 << 20]


NONSENSE: dict[str, bytes | Callable[[socket.socket], None]] = {
    "nothing": b"",
    "a closed connection": lambda connection: connection.shutdown(socket.SHUT_RDWR),
    "half a reply": b"*3\r\n$3\r\nabc\r\n$500000\r\nabc",
    "too few values": b"*1\r\n$3\r\nabc\r\n",
    "too many values": b"*4\r\n" + 4 * b"$3\r\nabc\r\n",
    "no reply of Redis": b"HTTP/1.1 400 Bad\r\n\r\n",
    "a negative length": b"*3\r\n$-7\r\n",
    "no memory": b"*4000000000\r\n",
    "an error that cannot be parsed": b"-MOVED x y\r\n",
    "a server that is starting": b"-LOADING data\r\n",
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_makes_a_server_lost(kind: str) -> None:
    def answer(connection: socket.socket, words: list[bytes]) -> None:
        text = NONSENSE[kind]
        text(connection) if callable(text) else connection.sendall(text)

    with FakeServer(answer) as server:
        shard = Shard(FixedLocation(server.tcp), SOON if kind in ("nothing", "half a reply") else ENOUGH)
        assert values_of(shard) is None
        assert shard.breaker.trips == 1
        shard.close()


def test_a_reply_that_nobody_requested_ends_its_connection() -> None:
    def answer(connection: socket.socket, words: list[bytes]) -> None:
        connection.sendall(b"*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n+MORE\r\n")

    with FakeServer(answer) as server:
        shard = Shard(FixedLocation(server.tcp), ENOUGH)
        for count in (1, 2):
            assert values_of(shard) == [b"a", b"b", b"c"]
            assert server.connections == count
        assert shard.breaker.trips == 0
        shard.close()


# --- a server whose address changes ---------------------------------------------------------------------------------


@needs_server
@pytest.mark.parametrize("how", ["while it is read", "while it is idle"])
def test_nothing_connects_to_an_address_that_was_lost_until_it_is_confirmed(tmp_path: Path, how: str) -> None:
    """Another process may listen there by now, and must not get the password."""
    with Server(tmp_path, "requirepass secret") as server:
        location = Moving(Address("127.0.0.1", server.port, password="secret"))
        shard = Shard(location, ENOUGH)
        shard.breaker._seconds = 0.001

        def call(connection: Any) -> Any:
            server.kill()
            return connection.read_response()

        assert reply(shard, "PING") == b"PONG"
        if how == "while it is read":
            assert shard.run(call) is None
        else:
            server.kill()
            assert reply(shard, "PING") is None
        with FakeServer(lambda connection, words: connection.sendall(b"+PONG\r\n")) as stranger:
            location.address = Address("127.0.0.1", stranger.tcp.port, password="secret")
            asked = len(location.requested)
            until(lambda: shard.lost and len(location.requested) > asked + 5, "it requests another address")
            assert shard.lost
            assert reply(shard, "PING") is None
            assert set(location.requested) == {1}
            assert stranger.connections == 0
        location.number = 0
        assert str(shard) == "a server that is not running"
        server.start()
        location.address = Address("127.0.0.1", server.port, password="secret")
        location.number = 2
        until(lambda: reply(shard, "PING") == b"PONG", "it is used again")
        shard.close()


@needs_server
def test_connections_to_the_address_before_are_not_used(server: Server, tmp_path: Path) -> None:
    location = Moving(server.tcp)
    shard = Shard(location, ENOUGH)
    with Server(tmp_path) as other:
        assert reply(shard, "SET", "where", "first") == b"OK"
        location.address, location.number = other.tcp, 2
        assert reply(shard, "GET", "where") is None
    shard.close()
