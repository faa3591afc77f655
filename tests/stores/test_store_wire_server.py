"""The connection, with a real server at its other end."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest
from redis_servers import Server, needs_server, until
from wire_tools import ENOUGH

from children import Child
from stallfree.stores.buffers import Buffers
from stallfree.stores.values import Expected, data_key, pack_head
from stallfree.stores.wire import Lost, Refused, Wire, command

BUFFERS = Buffers()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as there:
        yield there


@pytest.fixture(params=["unix", "tcp"])
def real(request: pytest.FixtureRequest, server: Server) -> Iterator[Wire]:
    address = server.tcp if request.param == "tcp" else server.address
    made = Wire(lambda: address.connection(ENOUGH), ENOUGH)
    made.call("FLUSHALL")
    yield made
    made.close()


@needs_server
@pytest.mark.parametrize("size", [0, 1, 3000, 70_000, 600_000])
def test_values_of_a_server(real: Wire, size: int) -> None:
    rng, key = np.random.default_rng(size), data_key("a", "b")
    records = {id: rng.bytes(size + id % 2) for id in range(60) if id % 7}
    for id, record in records.items():
        assert real.call("SET", b"k%d" % id, [pack_head(key, id, [record]), record], "NX") == b"OK"
    ids = [*range(60), 5, 5, 7]
    for typical in (1, size + 64, 1 << 30):
        found = real.mget([b"k%d" % id for id in ids], typical, BUFFERS, Expected(key, ids))
        assert [None if one is None else one.tobytes() for one in found] == [records.get(id) for id in ids]
        assert all(one is None or one.ctypes.data % 64 == 0 for one in found)
        assert real.idle


@needs_server
def test_a_damaged_value_of_a_server_is_none(real: Wire) -> None:
    key = data_key("a", "b")
    values = [pack_head(key, id, [bytes(100)]) + bytes(100) for id in range(20)]
    for id, value in enumerate(values):
        real.call("SET", b"k%d" % id, value)
    real.call("SETRANGE", "k3", 120, b"x")
    real.call("SETRANGE", "k4", 36, b"x")
    real.call("APPEND", "k5", b"x")
    real.call("SET", "k6", values[7])
    real.call("SET", "k8", values[8][:100])
    real.call("SET", "k9", b"")
    real.call("DEL", "k10")
    found = real.mget([b"k%d" % id for id in range(20)], 164, BUFFERS, Expected(key, range(20)))
    assert [id for id, one in enumerate(found) if one is None] == [3, 4, 5, 6, 8, 9, 10]


@needs_server
def test_many_commands_at_once(real: Wire) -> None:
    pieces = [piece for number in range(100) for piece in command("INCRBY", "count", number)]
    real.send(pieces, replies=100)
    assert [real.integer() for _ in range(100)] == np.arange(100).cumsum().tolist()
    assert real.idle
    with pytest.raises(Refused) as caught:
        real.call("INCRBY", "count", "x")
    assert caught.value.code == "ERR"
    assert real.call("GET", "count") == b"4950"


@needs_server
def test_a_command_that_waits(server: Server) -> None:
    made = Wire(lambda: server.address.connection(ENOUGH), timeout=0.05)
    made.send(command("BLPOP", "nothing", "0.2"))
    made.expect(ENOUGH)
    assert made.array() is None
    made.send(command("BLPOP", "nothing", "0"))
    with pytest.raises(Lost, match="silent"):
        made.array()
    made.close()


@needs_server
def test_a_connection_that_the_server_closed_is_seen(real: Wire) -> None:
    assert real.usable()
    number = real.call("CLIENT", "ID")
    real.send(command("CLIENT", "KILL", "ID", number, "SKIPME", "no"))
    with contextlib.suppress(Lost):
        real.integer()
    until(lambda: not real.usable(), "the server has closed it")
    real.close()
    assert not real.usable()
    assert real.call("CLIENT", "ID") > number
    real.send(command("PING"))
    assert not real.usable()
    assert not real.idle


@needs_server
def test_a_fork_leaves_the_parent_its_connection(real: Wire) -> None:
    real.call("SET", "k", bytes(300_000))
    number = real.call("CLIENT", "ID")
    real.send(command("GET", "k"))
    ours = real._socket
    assert ours is not None

    def uses() -> None:
        assert not real.usable()
        assert real.call("CLIENT", "ID") > number
        assert real.mget([b"k"], 300_000, BUFFERS)[0] is not None

    def closes() -> None:
        real.close()

    for child in (uses, closes):
        assert Child(child).wait() == 0
    assert real.reply() == bytes(300_000), "the child did not take the parent's reply"
    assert real.call("CLIENT", "ID") == number
    assert real._socket is ours


@needs_server
def test_a_forgotten_connection_is_closed(server: Server) -> None:
    made = Wire(lambda: server.address.connection(ENOUGH), ENOUGH)
    made.open()
    assert made._socket is not None
    number = made._socket.fileno()
    del made
    gc.collect()  # redis-py 5 keeps the traceback of an error within its handshake
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
