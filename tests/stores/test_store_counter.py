"""The counter of a clerk: who is listened to, and what is answered."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from askers import KEY, Asker, Desk, show
from nodes import PASSWORD, stamp

from stallfree.cache import MISS, SampleCache
from stallfree.errors import WaitError
from stallfree.pipeline.codec import encode, read_record, record_size, write_record
from stallfree.stores import counter as counters
from stallfree.stores.values import check_value, data_key

SIZE = 12
"""Samples of the data set."""


@pytest.fixture
def cache() -> Iterator[SampleCache]:
    options: dict[str, Any] = {"example": (stamp(0), 0), "allow_pickle": False}
    with SampleCache(SIZE, capacity="4MiB", fingerprint="f", name="counter", **options) as made:
        made.put_many(range(4), [(stamp(id), id) for id in range(4)])
        yield made


@pytest.fixture
def desk(cache: SampleCache) -> Iterator[Desk]:
    made = Desk({KEY: cache})
    yield made
    made.close()


# --- who is listened to ---------------------------------------------------------------------------------------------


def test_nothing_is_answered_before_the_password(desk: Desk, cache: SampleCache) -> None:
    stranger = desk.connect("")
    for request in (("PING",), ("ROOM", KEY), ("ASK", KEY, 0, bytes(8)), ("COUNT", KEY, 0), ("CLEAR", KEY, 0), ("X",)):
        assert stranger.ask(*request).startswith("NOAUTH")
    for wrong in ("", "secre", "secrets", "SECRET", "x" * 900):
        assert stranger.ask("AUTH", wrong).startswith("WRONGPASS")
    assert stranger.ask("AUTH").startswith("WRONGPASS")
    assert stranger.ask("PING").startswith("NOAUTH")
    assert cache.resident(range(4)).all()
    assert stranger.ask("auth", PASSWORD) == b"OK"
    assert stranger.ask("PING") == b"PONG"
    assert desk.connect("").ask("AUTH", "default", PASSWORD) == b"OK"


STRANGE = {
    "nothing": b"",
    "an end of line": b"\r\n",
    "a line": b"PING\r\n",
    "of the web": b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n",
    "bytes": bytes(range(256)),
    "a long line": b"*" * 5000,
    "no arguments": b"*0\r\n",
    "fewer than none": b"*-1\r\n",
    "too many arguments": b"*17\r\n",
    "no number": b"*x\r\n",
    "a number in another script": "*\u0661\r\n".encode(),
    "no string": b"*1\r\n:1\r\n",
    "a string of no length": b"*1\r\n$-1\r\n",
    "a string that is longer than it says": b"*1\r\n$2\r\nPING\r\n",
    "half a command": b"*2\r\n$4\r\nAUTH\r\n$6\r\nsec",
    "half a length": b"*2\r\n$",
    "more than a stranger may say": b"*2\r\n$4\r\nAUTH\r\n$1024\r\n" + b"x" * 1024 + b"\r\n",
    "100 MiB": b"*2\r\n$4\r\nAUTH\r\n$104857600\r\n" + bytes(1000),
    "so many bytes that no number holds them": b"*1\r\n$" + b"9" * 25 + b"\r\n",
}


@pytest.mark.parametrize("password", ["", PASSWORD])
def test_what_is_no_command_ends_the_connection_unanswered(password: str, desk: Desk) -> None:
    other = desk.connect()
    for what, text in STRANGE.items():
        if what == "more than a stranger may say" and password:
            continue
        asker = desk.connect(password)
        asker.connection.sendall(text)
        asker.connection.shutdown(socket.SHUT_WR)  # or more would be waited for, where it is not whole
        with contextlib.suppress(ConnectionError):
            assert asker.connection.recv(100) == b"", what
        assert show(other.values(1, 2), [1, 2]) == [1, 2]


def test_a_command_of_100_mib_is_not_even_received(desk: Desk) -> None:
    asker = desk.connect()
    asker.connection.sendall(b"*4\r\n$3\r\nASK\r\n$104857600\r\n")
    assert asker.is_over()
    asker = desk.connect()
    asker.connection.sendall(b"*4\r\n$3\r\nASK\r\n$16\r\n" + KEY + b"\r\n$1\r\n0\r\n$%d\r\n" % (64 << 20))
    assert asker.is_over()  # all together is too much


@pytest.mark.parametrize("drips", [False, True])
def test_a_stranger_has_only_so_much_time(drips: bool, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    other = desk.connect()
    monkeypatch.setattr(counters, "_STRANGER_SECONDS", 0.2)
    stranger = desk.connect("")
    assert other.ask("PING") == b"PONG"  # meanwhile
    if drips:
        assert is_stopped(stranger)
    assert stranger.is_over()
    assert other.ask("PING") == b"PONG"


def is_stopped(stranger: Asker) -> bool:
    """Whether somebody is, at last, who sends a byte now and then, and takes what is answered."""
    with contextlib.suppress(OSError, EOFError):
        for _ in range(500):
            for byte in b"*1\r\n$4\r\nPING\r\n":
                stranger.connection.sendall(bytes([byte]))
                time.sleep(0.001)
            assert stranger.reply().startswith("NOAUTH")
        return False
    return True


def test_who_has_given_the_password_may_take_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(counters, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asker, stranger = desk.connect(), desk.connect("")
    for _ in range(3):
        for byte in b"*1\r\n$4\r\nPING\r\n":
            asker.connection.sendall(bytes([byte]))
            now[0] += 0.1
        assert asker.reply() == b"PONG"
    assert stranger.ask("PING").startswith("NOAUTH")  # 4.2 s
    now[0] += 1
    with contextlib.suppress(ConnectionError):
        stranger.say("PING")
    assert stranger.is_over()
    assert asker.ask("PING") == b"PONG"


# --- what is answered -----------------------------------------------------------------------------------------------


def test_requests_and_their_answers(desk: Desk, cache: SampleCache) -> None:
    asker = desk.connect()
    assert asker.ask("ping") == b"PONG"
    assert (asker.ask("ROOM", KEY), asker.ask("COUNT", KEY, 0), asker.ask("SETTLE", 0)) == (1, 4, 1)
    assert show(asker.values(3, 9, 0, 3), [3, 9, 0, 3]) == [3, None, 0, 3]
    assert asker.values() == []
    many = [id % 5 for id in range(3000)]  # more pieces than one call sends
    assert show(asker.values(*many), many) == [None if id == 4 else id for id in many]
    assert asker.ask("CLEAR", KEY, 0) == b"OK"
    assert (asker.ask("COUNT", KEY, 0), asker.values(1)) == (0, [b""])
    assert not cache.resident(range(SIZE)).any()
    stranger = data_key("data", "another")
    assert (asker.ask("ROOM", stranger), asker.ask("COUNT", stranger, 0)) == (1, 0)
    assert asker.ask("CLEAR", stranger, 0) == b"OK"
    assert asker.values(1, 2, key=stranger) == [b"", b""]
    for request in (
        (b"\xff" * 9,),
        ("PING", "x"),
        ("ROOM",),
        ("ASK", KEY, 0),
        ("COUNT", KEY),
        ("SETTLE",),
        ("GET", "x"),
    ):
        assert asker.ask(*request) == "ERR unknown command"
    assert cache.stats().hits == cache.stats().misses == 0


def test_ids_and_times_that_are_none(desk: Desk) -> None:
    asker = desk.connect()
    for ids in ([-1], [SIZE], [1, 1 << 62], [-(1 << 63), 2], [0, SIZE, 1]):
        assert asker.values(*ids) == [b""] * len(ids)
    for wrong in (b"abc", bytes(9)):
        assert asker.ask("ASK", KEY, 0, wrong).startswith("ERR")
    for wrong in ("", "x", "1.5", b"\xff", "1 2"):
        assert asker.ask("ASK", KEY, wrong, bytes(8)).startswith("ERR")
        assert asker.ask("SETTLE", wrong).startswith("ERR")
    for much in (10**18, 10**40, -(10**40)):
        assert asker.ask("SETTLE", much) == 1
    for key in (b"", b"x", bytes(900)):
        assert asker.values(1, key=key) == [b""]
    assert show(asker.values(1), [1]) == [1]


def test_what_was_handed_in_is_waited_for_as_long_as_was_said_and_only_where_it_matters(cache: SampleCache) -> None:
    waits: list[float] = []

    def settle(seconds: float) -> bool:
        waits.append(seconds)
        cache.put(5, (stamp(5), 5))
        return False

    with contextlib.closing(Desk({KEY: cache}, settle)) as desk:
        asker = desk.connect()
        assert show(asker.values(1, 2, wait=700), [1, 2]) == [1, 2]
        assert waits == []
        assert show(asker.values(1, 5, wait=700), [1, 5]) == [1, 5]
        assert asker.ask("SETTLE", 1500) == 0
        assert asker.ask("COUNT", KEY, 10) == 5
        assert asker.ask("CLEAR", KEY, 20) == b"OK"
        assert asker.ask("SETTLE", 10**12) == 0
        assert waits == [0.7, 1.5, 0.01, 0.02, 60.0]


def test_a_lock_that_is_not_free_is_an_error_for_one_request(
    desk: Desk, cache: SampleCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise WaitError("somebody\r\n+held it")

    monkeypatch.setattr(cache, "clear", fail)
    asker = desk.connect()
    assert asker.ask("CLEAR", KEY, 0) == "ERR somebody +held it"
    assert show(asker.values(1), [1]) == [1]


def whole(sample: Any) -> bytes:
    """The record of a sample."""
    structure, arrays = encode(sample)
    record = np.zeros(record_size(structure, arrays), np.uint8)
    write_record(structure, arrays, record)
    return record.tobytes()


def test_records_of_all_forms_come_as_they_are() -> None:
    large = torch.arange(200_000)
    samples = [None, "", b"x" * 5000, {"a": large}, [stamp(1), "text" * 999], (stamp(5), 5), large]
    for example in ((stamp(0), 0), MISS):
        options: dict[str, Any] = {"fingerprint": "f", "name": "forms", "example": example}
        with SampleCache(50, capacity="64MiB", **options) as cache:
            for id in range(20, 40):  # so that free blocks do not lie side by side
                cache.put(id, (stamp(id), id) if id % 2 else b"y" * 700)
            cache.drop(range(20, 40, 3))
            cache.put_many(range(len(samples)), samples)
            with contextlib.closing(Desk({KEY: cache})) as desk:
                values = desk.connect().values(*range(8))
        assert values.pop() == b""
        for id, (value, sample) in enumerate(zip(values, samples, strict=True)):
            record = check_value(np.frombuffer(value, np.uint8), KEY, id)
            assert record is not None
            assert whole(read_record(record.copy(), copy=True)) == whole(sample)
