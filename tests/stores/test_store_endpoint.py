"""A server that is killed, frozen, started again, or talks nonsense: it costs hits, and nothing else."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_servers import FakeServer, Server, needs_server, until

from children import Child
from stallfree.errors import InputError, MissingExtraError
from stallfree.stores import endpoint as module
from stallfree.stores.buffers import Buffers
from stallfree.stores.endpoint import Address, Endpoint
from stallfree.stores.wire import Refused, Wire, command

ENOUGH = 60.0  # seconds that a server may be silent where that is not what is tested
SOON = 0.05  # the same where it is


def ping(wire: Wire) -> bytes:
    answer: bytes = wire.call("PING")
    return answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as there:
        yield there


@pytest.fixture
def endpoint(server: Server) -> Iterator[Endpoint]:
    made = Endpoint(server.address, ENOUGH)
    yield made
    made.close()


# -- addresses --------------------------------------------------------------------------------------------------------


def test_an_address_as_users_give_it() -> None:
    given = {"host": "node1", "port": 7000, "password": "secret", "username": "me", "db": 3, "ssl_keyfile": None}
    address = Address.of(given)
    assert address == Address("node1", 7000, username="me", password="secret", db=3)
    assert Address.of({}) == Address("localhost", 6379)
    assert Address.of({"path": Path("/tmp/s")}).path == "/tmp/s"
    assert Address.of({"ssl": True, "ssl_ca_certs": "/ca.pem"}).ssl_ca_certs == "/ca.pem"
    assert [str(one) for one in (address, Address("::1"), Address(path="/s"))] == ["node1:7000", "[::1]:6379", "/s"]
    assert pickle.loads(pickle.dumps(address)) == address
    assert "secret" not in repr(address) + str(address)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("node1:6379", "str: give a dict"),
        ({"hots": "a"}, "'hots', which is unknown: use host, port"),
        ({"port": "6379"}, "port='6379': expected an integer"),
        ({"port": True}, "port=True: expected an integer"),
        ({"port": 0}, "port=0: expected 1 to 65535"),
        ({"host": ""}, "an empty host"),
        ({"db": -1}, "db=-1"),
        ({"ssl": 1}, "ssl=1: expected True or False"),
        ({"path": "/s", "port": 1}, "give one of them"),
        ({"path": "/s", "ssl": True}, "needs no TLS"),
        ({"username": "me"}, "no password"),
        ({"ssl_ca_certs": "/ca.pem"}, "ssl_ca_certs and without ssl=True"),
        ({"ssl": True, "ssl_keyfile": "/key.pem"}, "no ssl_certfile"),
        ({"password": 12345}, "password=something else: expected a text"),
        ({1: 2}, "1, which is unknown"),
    ],
)
def test_an_address_that_cannot_be(given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        Address.of(given)
    assert "12345" not in str(caught.value)


def test_without_the_client_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.backoff", None)
    for use in (lambda: Endpoint(Address()).run(ping), lambda: Endpoint(Address()).client()):
        with pytest.raises(MissingExtraError, match=r"stallfree\[redis\]"):
            use()


# -- what it gives ----------------------------------------------------------------------------------------------------


@needs_server
def test_connections_are_used_again(endpoint: Endpoint) -> None:
    number = endpoint.run(lambda wire: wire.call("CLIENT", "ID"))
    assert number
    for _ in range(5):
        assert endpoint.run(lambda wire: wire.call("CLIENT", "ID")) == number
    assert endpoint.breaker.trips == 0


@needs_server
def test_threads_have_connections_of_their_own(endpoint: Endpoint) -> None:
    together, numbers = threading.Barrier(6), []

    def work() -> None:
        def call(wire: Wire) -> Any:
            together.wait()
            return wire.call("CLIENT", "ID")

        numbers.append(endpoint.run(call))

    for _ in range(2):
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(numbers[:6])) == 6
    assert set(numbers[6:]) == set(numbers[:6]), "they are kept"


@needs_server
def test_a_refusal_is_raised_and_costs_nothing(endpoint: Endpoint) -> None:
    number = endpoint.run(lambda wire: wire.call("CLIENT", "ID"))
    with pytest.raises(Refused, match="unknown command") as caught:
        endpoint.run(lambda wire: wire.call("NONSENSE"))
    assert caught.value.code == "ERR"
    assert endpoint.run(lambda wire: wire.call("CLIENT", "ID")) == number
    assert endpoint.breaker.closed


@needs_server
@pytest.mark.parametrize("how", ["forgotten", "error"])
def test_replies_that_were_not_read_are_nobody_elses(endpoint: Endpoint, how: str) -> None:
    def careless(wire: Wire) -> None:
        wire.send([*command("ECHO", "first"), *command("ECHO", "second")], replies=2)
        assert wire.reply() == b"first"
        if how == "error":
            raise ZeroDivisionError

    if how == "error":
        with pytest.raises(ZeroDivisionError):
            endpoint.run(careless)
    else:
        endpoint.run(careless)
    assert endpoint.run(lambda wire: wire.call("ECHO", "third")) == b"third"
    assert endpoint.breaker.trips == 0


@needs_server
def test_the_client_library_for_the_rest(endpoint: Endpoint) -> None:
    client = endpoint.client()
    assert client is endpoint.client()
    client.set("a", b"1")
    assert client.info("server")["process_id"] > 0
    assert list(client.scan_iter("a")) == [b"a"]


@needs_server
def test_a_child_has_connections_of_its_own(endpoint: Endpoint) -> None:
    number = endpoint.run(lambda wire: wire.call("CLIENT", "ID"))
    assert number

    def child() -> None:
        other = endpoint.run(lambda wire: wire.call("CLIENT", "ID"))
        assert other
        assert other > number
        endpoint.close()

    assert Child(child).wait() == 0
    assert endpoint.run(lambda wire: wire.call("CLIENT", "ID")) == number


@needs_server
def test_it_travels(endpoint: Endpoint) -> None:
    endpoint.run(ping)
    other = pickle.loads(pickle.dumps(endpoint))
    assert (other.address, other.timeout) == (endpoint.address, endpoint.timeout)
    assert other.run(ping) == b"PONG"
    other.close()
    other.close()
    assert other.run(ping) is None


@needs_server
def test_a_connection_that_was_idle_for_long_is_not_used(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    number = endpoint.run(lambda wire: wire.call("CLIENT", "ID"))
    monkeypatch.setattr(module, "_STALE", 0.0)
    assert endpoint.run(lambda wire: wire.call("CLIENT", "ID")) != number


@needs_server
def test_to_connect_is_all_that_a_new_connection_asks(server: Server) -> None:
    with redis.Redis.from_url(f"unix://{server.path}", single_connection_client=True) as watcher:
        before = watcher.info("commandstats")
        for address in (server.address, server.tcp):
            made = Endpoint(address, ENOUGH)
            assert made.run(ping) == b"PONG"
            assert made.client().ping()
            made.close()
        after = watcher.info("commandstats")
    new = {name: row["calls"] - before.get(name, {"calls": 0})["calls"] for name, row in after.items()}
    assert {name: count for name, count in new.items() if count} == {"cmdstat_ping": 4, "cmdstat_info": 1}


@needs_server
def test_a_closed_one_keeps_no_connection(server: Server) -> None:
    made = Endpoint(server.address, ENOUGH)
    kept: list[Wire] = []

    def call(wire: Wire) -> bytes:
        kept.append(wire)
        made.close()
        return ping(wire)

    assert made.run(call) == b"PONG"
    assert kept[0]._socket is None
    assert made.run(ping) is None
    assert made.breaker.trips == 0


# -- being let in -----------------------------------------------------------------------------------------------------


@needs_server
def test_passwords_users_and_databases(tmp_path: Path) -> None:
    with Server(tmp_path, "requirepass secret", "user reader on >word ~a* +@all -flushall") as server:
        places = {
            "": Address(path=server.path),
            "default": Address(path=server.path, password="secret"),
            "wrong": Address(path=server.path, password="hidden"),
            "user": Address("127.0.0.1", server.port, username="reader", password="word", db=3),
            "no database": Address(path=server.path, password="secret", db=1000),
        }
        endpoints = {name: Endpoint(place, ENOUGH) for name, place in places.items()}
        assert endpoints["default"].run(ping) == endpoints["user"].run(ping) == b"PONG"
        assert endpoints["user"].run(lambda wire: wire.call("SET", "a", "1")) == b"OK"
        assert endpoints["default"].run(lambda wire: wire.call("GET", "a")) is None, "another database"
        with pytest.raises(Refused) as caught:
            endpoints["user"].run(lambda wire: wire.call("SET", "b", "1"))
        assert caught.value.code == "NOPERM"
        with pytest.raises(Refused) as caught:
            endpoints[""].run(ping)
        assert caught.value.code == "NOAUTH"
        for name in ("wrong", "no database"):
            assert endpoints[name].run(ping) is None
            assert not endpoints[name].breaker.closed
            assert server.path in endpoints[name].last_failure
            assert "hidden" not in endpoints[name].last_failure
        for one in endpoints.values():
            one.close()


# -- being lost -------------------------------------------------------------------------------------------------------


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "stallfree-rejoin"]


@needs_server
def test_a_killed_server(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        made = Endpoint(server.tcp, ENOUGH)
        calls = 0

        def dies(wire: Wire) -> Any:
            nonlocal calls
            calls += 1
            wire.send(command("BLPOP", "nothing", "0"))
            server.kill()
            return wire.reply()

        assert made.run(ping) == b"PONG"
        assert made.run(dies) is None
        for _ in range(100):
            assert made.run(dies) is None
        assert calls == made.breaker.trips == 1, "once it is lost nobody asks"
        assert "closed the connection" in made.last_failure or "receiving failed" in made.last_failure
        server.restart()
        until(lambda: made.run(ping) == b"PONG", "it is asked again")
        assert made.breaker.trips == 1
        until(no_thread_is_left, "the thread ends")
        made.close()


@needs_server
def test_a_server_that_was_started_again_unnoticed(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        made = Endpoint(server.address, ENOUGH)
        assert made.run(ping) == b"PONG"
        server.restart()
        assert made.run(ping) == b"PONG"
        assert made.breaker.trips == 0
        made.close()


@needs_server
@pytest.mark.parametrize("connected", [True, False])
def test_a_frozen_server(tmp_path: Path, connected: bool) -> None:
    with Server(tmp_path) as server:
        made = Endpoint(server.tcp, SOON)
        if connected:
            until(lambda: made.run(ping) == b"PONG", "it answers")
        before = made.breaker.trips
        server.freeze()
        try:
            for _ in range(100):
                assert made.run(ping) is None
            assert made.breaker.trips == before + 1
            assert not made.breaker.closed
            with pytest.raises(redis.TimeoutError):
                made.client().ping()
        finally:
            server.thaw()
        until(lambda: made.run(ping) == b"PONG", "it is asked again")
        made.close()
        until(no_thread_is_left, "the thread ends")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for place in (
        Address("127.0.0.1", port),
        Address(path=f"{tmp_path}/none"),
        Address("a" * 300),
        Address("no.such.host."),
    ):
        made = Endpoint(place, ENOUGH)
        assert made.run(ping) is None
        assert made.run(ping) is None
        assert made.breaker.trips == 1
        assert str(place) in made.last_failure
        made.close()


SAYS: dict[str, bytes | Callable[[socket.socket, list[bytes]], None]] = {
    "nothing more": lambda connection, _: connection.shutdown(socket.SHUT_RDWR),
    "half a reply": b"*3\r\n$3\r\nabc\r\n$500000\r\nabc",
    "another count": b"*1\r\n$3\r\nabc\r\n",
    "a negative length": b"*3\r\n$-7\r\n",
    "a huge length": b"*3\r\n$4000000000\r\nabc",
    "too much": b"*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n+MORE\r\n",
}


def test_a_server_that_talks_nonsense() -> None:
    buffers, says = Buffers(), b""

    def answer(connection: socket.socket, words: list[bytes]) -> None:
        if callable(says):
            says(connection, words)
            return
        for piece in [says] if b"MORE" in says else [bytes([byte]) for byte in says]:
            connection.sendall(piece)

    with FakeServer(answer) as server:
        for what, says in SAYS.items():  # noqa: B007
            made = Endpoint(server.tcp, ENOUGH if what not in ("half a reply", "a huge length") else SOON)
            found = made.run(lambda wire: wire.mget([b"1", b"2", b"3"], 10, buffers))
            if what == "too much":
                assert found
                assert [one.tobytes() for one in found if one is not None] == [b"a", b"b", b"c"]
                before = server.connections
                assert made.run(lambda wire: wire.mget([b"1", b"2", b"3"], 10, buffers)), "by another connection"
                assert server.connections == before + 1
                assert made.breaker.trips == 0
            else:
                assert found is None
                assert made.breaker.trips == 1, what
            made.close()


def test_nonsense_while_it_connects() -> None:
    said = iter(
        [b"\xff" * 100 + b"\r\n", b"*5\r\n", b"$99999999999\r\n", b"%1\r\n+a\r\n", b"HTTP/1.1 400 Bad\r\n", b""]
    )
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        for words in said:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):  # who does not read it all resets the connection
                connection.sendall(words)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1000):
                    pass

    thread = threading.Thread(target=listen)
    thread.start()
    for _ in range(6):
        made = Endpoint(Address("127.0.0.1", listener.getsockname()[1], password="x"), ENOUGH)
        made.breaker.forget()  # or it would ping, and be given what the next one is meant to hear
        assert made.run(ping) is None
        assert made.breaker.trips == 1
        made.close()
    thread.join()
    listener.close()


@needs_server
def test_a_child_of_one_that_lost_its_server(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        made = Endpoint(server.address, ENOUGH)
        server.kill()
        assert made.run(ping) is None

        def child() -> None:
            assert made.run(ping) is None
            os.kill(os.getpid(), signal.SIGSTOP)
            until(lambda: made.run(ping) == b"PONG", "the child uses it again")

        process = Child(child)
        process.wait_until_stopped()
        server.restart()
        process.signal(signal.SIGCONT)
        assert process.wait() == 0
        until(lambda: made.run(ping) == b"PONG", "the parent uses it again")
        made.close()
