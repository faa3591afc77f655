"""The connection: every reply is read as it was meant wherever it is cut, and nonsense is `Lost` and nothing else."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_tools import ENOUGH, Cut, Ready, Status, asked, encoded, plain, wire_to

from stallfree.errors import StallfreeError
from stallfree.stores import link, wire
from stallfree.stores.buffers import Buffers
from stallfree.stores.values import Expected, data_key, pack_head
from stallfree.stores.wire import Lost, Refused, Wire, command

BUFFERS = Buffers()

# -- replies of every kind, cut anywhere ------------------------------------------------------------------------------

LINES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
STRINGS = st.none() | st.binary(max_size=40) | st.integers(0, 900).map(lambda size: bytes(range(256)) * 4 * bool(size))
ERRORS = LINES.map(lambda text: Refused(text.partition(" ")[0], text))
SMALL = st.integers(-(2**63), 2**63 - 1) | LINES.map(lambda text: Status(text.encode())) | ERRORS | STRINGS
REPLIES = st.recursive(SMALL, lambda one: st.lists(one, max_size=5), max_leaves=12)
SIZES = st.lists(st.integers(1, 9) | st.integers(1, 3000), min_size=1, max_size=6)


def read_in_some_way(made: Wire, reply: Any, way: int) -> Any:
    """Read a reply by one of the methods that fit it."""
    ways: list[Callable[[], Any]] = [made.reply]
    if reply is None or (isinstance(reply, bytes) and not isinstance(reply, Status)):
        ways.append(lambda: made.value(BUFFERS))
    if isinstance(reply, list):
        ways.append(lambda: [read_in_some_way(made, one, way + 1) for one in reply[: made.array()]])
    if isinstance(reply, int):
        ways.append(made.integer)

    def skipped() -> Any:
        made.skip()
        return reply

    ways.append(skipped)
    try:
        return ways[way % len(ways)]()
    except Refused as refused:
        return refused


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes that make a difference within 2 KiB, so that short replies meet them all."""
    for module, name, size in (
        (link, "STANDING", 2048),
        (wire, "STANDING", 2048),
        (link, "DIRECT", 300),
        (wire, "DIRECT", 300),
        (wire, "_LEASE", 1000),
    ):
        monkeypatch.setattr(module, name, size)


any_example = settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@any_example
@given(replies=st.lists(st.tuples(REPLIES, st.integers(0, 9)), min_size=1, max_size=6), sizes=SIZES)
def test_replies_are_read_as_they_were_meant(
    small_pieces: None, replies: list[tuple[Any, int]], sizes: list[int]
) -> None:
    with wire_to(b"".join(encoded(reply) for reply, _ in replies), sizes) as made:
        asked(made, len(replies))
        for reply, way in replies:
            assert not made.idle
            assert plain(read_in_some_way(made, reply, way)) == plain(reply)
        assert made.idle
        with pytest.raises(RuntimeError):
            made.reply()


LENGTHS = st.lists(
    st.tuples(st.sampled_from([None, 0, 1, 63, 64, 65, 200, 296, 299, 300, 301, 1000, 2045, 2100]), st.integers(1, 9)),
    min_size=1,
    max_size=6,
).map(lambda runs: [size for size, count in runs for _ in range(count)])


@any_example
@given(lengths=LENGTHS, sizes=SIZES, checked=st.booleans())
def test_values_are_read_as_they_were_meant(
    small_pieces: None, lengths: list[int | None], sizes: list[int], checked: bool
) -> None:
    rng, key = np.random.default_rng(len(lengths)), data_key("a", "b")
    records = [None if size is None else rng.bytes(size) for size in lengths]
    values = list(records)
    if checked:
        values = [None if one is None else pack_head(key, id, [one]) + one for id, one in enumerate(records)]
    with wire_to(encoded(values), sizes) as made:
        found = asked(made).values(len(values), BUFFERS, Expected(key, range(len(values))) if checked else None)
        assert made.idle
    assert [one if one is None else one.tobytes() for one in found] == [
        one or (b"" if checked and one is not None else None) for one in records
    ]
    assert all(one is None or one.ctypes.data % 64 == 0 for one in found)


def test_values_as_large_as_they_come() -> None:
    rng = np.random.default_rng(0)
    values = [
        rng.bytes(size) for size in (10, 65535, 65536, 65537, 3000, 3000, 3000, 3000, 3000, 5_000_000, 1, 262_144)
    ]
    with wire_to(encoded(values) + encoded(values[::-1])) as made:
        asked(made, 2)
        for wanted in (values, values[::-1]):
            found = made.values(len(values), BUFFERS)
            assert [one.tobytes() for one in found if one is not None] == wanted


@pytest.mark.parametrize("lease", [1000, wire._LEASE])
@pytest.mark.parametrize("checked", [False, True])
def test_many_small_values(monkeypatch: pytest.MonkeyPatch, lease: int, checked: bool) -> None:
    """Long runs of one length are read many at a time."""
    monkeypatch.setattr(wire, "_LEASE", lease)
    rng, key = np.random.default_rng(0), data_key("a", "b")
    kinds = [(None, 60), (3, 10), (0, 40), (100, 2000), (None, 1), (100, 3), (99, 3), (3000, 200), (9, 1), (4000, 20)]
    records = [None if size is None else rng.bytes(size) for size, count in kinds for _ in range(count)]
    values, expected = list(records), None
    if checked:
        values = [None if one is None else pack_head(key, id, [one]) + one for id, one in enumerate(records)]
        expected = Expected(key, range(len(records)))
    with wire_to(encoded(values) + b":5\r\n") as made:
        found = asked(made, 2).values(len(values), BUFFERS, expected)
        assert made.integer() == 5
    wanted = [one if one or checked else None for one in records]
    assert [one if one is None else one.tobytes() for one in found] == wanted
    assert all(one is None or one.ctypes.data % 64 == 0 for one in found)


def test_values_that_are_kept_are_not_overwritten() -> None:
    batches = [[bytes([number]) * 5000 for number in range(start, start + 10)] for start in range(0, 100, 10)]
    with wire_to(b"".join(map(encoded, batches))) as made:
        asked(made, len(batches))
        kept = [made.values(10, BUFFERS)[3] for _ in batches]
    assert [one.tobytes() for one in kept if one is not None] == [batch[3] for batch in batches]


@pytest.mark.parametrize(
    "read", [lambda made: made.values(3, BUFFERS), lambda made: made.reply(), lambda made: made.skip()]
)
def test_a_reply_that_ends_anywhere_is_lost(read: Callable[[Wire], Any]) -> None:
    whole = encoded([b"first", None, bytes(100)])
    for end in range(len(whole)):
        with wire_to(whole[:end]) as made, pytest.raises(Lost):
            read(asked(made))
    with wire_to(whole) as made:
        read(asked(made))
        assert made.idle


def test_what_nobody_asked_for_makes_a_connection_useless() -> None:
    with wire_to(b"+OK\r\n+MORE\r\n", [5], close=False) as made:
        assert asked(made).reply() == b"OK"
        assert made.idle
        assert not made.usable()
    with wire_to(b"+OK\r\n+MORE\r\n", close=False) as made:
        assert asked(made).reply() == b"OK"
        assert not made.idle


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_is_no_broken_connection() -> None:
    with wire_to(b"-OOM command not allowed\r\n-NOAUTH\r\n+OK\r\n", close=False) as made:
        for read, code in ((made.reply, "OOM"), (lambda: made.values(4, BUFFERS), "NOAUTH")):
            asked(made)
            with pytest.raises(Refused) as caught:
                read()
            assert caught.value.code == code
            assert caught.value.text.startswith(code)
            assert not made._due
        assert asked(made).reply() == b"OK"


def test_errors_within_a_reply() -> None:
    inner = Refused("MOVED", "MOVED 3 there")
    with wire_to(encoded([b"a", inner, b"b"]) * 2 + encoded(5)) as made:
        asked(made, 3)
        assert plain(made.reply()) == plain([b"a", inner, b"b"])
        with pytest.raises(Refused, match="MOVED 3 there"):
            made.values(3, BUFFERS)
        assert made.integer() == 5
        assert made.idle


def test_an_error_in_a_bulk_read_leaves_nothing_behind() -> None:
    with wire_to(b"-LOADING wait\r\n" * 2 + b"+OK\r\n") as made:
        with pytest.raises(Refused, match="LOADING"):
            made.mget([b"k"] * 5, wire._REQUEST, BUFFERS)
        assert made.idle or made._due == 0
        assert asked(made).reply() == b"OK"


NONSENSE = {
    "another count": encoded([b"a"] * 3),
    "nil": b"*-1\r\n",
    "no array": encoded(b"abc"),
    "a line": b"+OK\r\n",
    "a number": b":2\r\n",
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a type of RESP3": b"%2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "an empty line": b"\r\n\r\n",
    "zeros": bytes(1000) + b"\r\n",
    "a line without end": b"*" * 300_000,
    "a negative count": b"*-2\r\n",
    "a count with a sign": b"*+2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "a count with a space": b"* 2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "a count with a line": b"*0_2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "a huge count": b"*99999999999999999999999\r\n",
    "a count of millions": b"*2147483647\r\n",
    "a negative length": b"*2\r\n$-2\r\n",
    "no length": b"*2\r\n$\r\n\r\n",
    "a length that is none": b"*2\r\n$abc\r\n",
    "a length of 3 GiB": b"*2\r\n$3221225472\r\n",
    "a length beyond all": b"*2\r\n$99999999999999999999999999\r\n",
    "a length that is too small": b"*2\r\n$3\r\nabcd\r\n$1\r\na\r\n",
    "a length that is too large": b"*2\r\n$7\r\nabc\r\n$1\r\nab\r\n",
    "one of many is too small": b"*2\r\n$3\r\nabc\r\n$3\r\nabcd\r\n",
    "an array within": b"*2\r\n*1\r\n$1\r\na\r\n$1\r\na\r\n",
    "a number within": b"*2\r\n:1\r\n$1\r\na\r\n",
    "nothing": b"",
}


def test_nonsense_is_lost() -> None:
    for what, said in NONSENSE.items():
        for sizes in ([1 << 20], [1]):
            if len(said) < 10_000 or sizes != [1]:
                with wire_to(said, sizes) as made:
                    with pytest.raises(Lost):
                        print(f"{what}: {asked(made).values(2, BUFFERS)}")
                    assert not made.idle


NONSENSE_TO: list[tuple[bytes, Callable[[Wire], Any]]] = [
    (b"*1\r\n" * 100 + b":1\r\n", lambda made: made.reply()),
    (b"*1\r\n" * 5000, lambda made: made.skip()),
    (b":1x\r\n", lambda made: made.reply()),
    (b":--1\r\n", lambda made: made.integer()),
    (b"+OK\r\n", lambda made: made.integer()),
    (b"?\r\n", lambda made: made.skip()),
    (b"$5\r\nabcdefg\r\n", lambda made: made.skip()),
    (b"$2147483648\r\nabc", lambda made: made.value(BUFFERS)),
    (b"$-3\r\n", lambda made: made.value(BUFFERS)),
    (b":5\r\n", lambda made: made.array()),
]


def test_nonsense_is_lost_however_it_is_read() -> None:
    for said, read in NONSENSE_TO:
        with wire_to(said) as made:
            with pytest.raises(Lost):
                print(f"{said!r}: {read(asked(made))}")
            assert not made.idle


@any_example
@given(
    said=st.lists(st.sampled_from([b"*", b"$", b"-", b":", b"2", b"1", b"0", b"-1", b"a", b"\r\n", b"\0"])).map(
        b"".join
    ),
    sizes=SIZES,
    way=st.integers(0, 3),
)
def test_whatever_is_said_is_a_reply_an_error_or_lost(said: bytes, sizes: list[int], way: int) -> None:
    with wire_to(said, sizes) as made, contextlib.suppress(Lost, Refused):
        asked(made)
        [made.reply, made.skip, lambda: made.values(2, BUFFERS), lambda: made.value(BUFFERS)][way]()
        assert made._due == 0


# -- time -------------------------------------------------------------------------------------------------------------


def test_silence_is_lost() -> None:
    for said in (b"", b"*2\r\n$1\r\na\r\n$100000\r\nabc"):
        with wire_to(said, close=False, timeout=0.02) as made, pytest.raises(Lost, match=r"silent|less"):
            asked(made).values(2, BUFFERS)


def test_a_server_that_takes_nothing_is_lost() -> None:
    with wire_to(b"", close=False, timeout=0.02) as made, pytest.raises(Lost, match="took"):
        made.send([bytes(64 << 20)])


@pytest.mark.parametrize(("rate", "enough"), [(2 * link.SLOWEST, True), (link.SLOWEST / 2, False)])
def test_a_server_that_drips_is_lost(monkeypatch: pytest.MonkeyPatch, rate: float, enough: bool) -> None:
    now = 0.0

    def arrived(size: int) -> None:
        nonlocal now
        now += size / rate

    monkeypatch.setattr(link.time, "monotonic", lambda: now)
    monkeypatch.setattr(Cut, "arrived", staticmethod(arrived))
    with wire_to(encoded([bytes(20_000_000)]), timeout=0.25) as made:
        if enough:
            asked(made).values(1, BUFFERS)
            assert now > 0.9
        else:
            with pytest.raises(Lost, match="less than it should"):
                asked(made).values(1, BUFFERS)
            assert now < 10, "0.5 s and one receiving; all of it takes 20 s"


# -- sending ----------------------------------------------------------------------------------------------------------

PIECES = st.binary(max_size=50) | st.integers(16_000, 40_000).map(bytes)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(PIECES | st.integers(0, 10**9) | LINES | st.lists(PIECES, max_size=4), min_size=1, max_size=8),
    st.sampled_from([bytes, bytearray, memoryview, lambda one: np.frombuffer(one, np.uint8)]),
)
def test_commands_are_what_a_server_reads(arguments: list[Any], kind: Callable[[bytes], Any]) -> None:
    def as_bytes(one: Any) -> bytes:
        if isinstance(one, list):
            return b"".join(one)
        return one if isinstance(one, bytes) else str(one).encode()

    def as_given(one: Any) -> Any:
        if isinstance(one, list):
            return [kind(piece) for piece in one]
        return kind(one) if isinstance(one, bytes) else one

    pieces = command(b"SET", *map(as_given, arguments))
    assert b"".join(map(bytes, pieces)) == encoded([b"SET", *map(as_bytes, arguments)])


def test_many_keys() -> None:
    keys = [b"%0*d" % (1 + number % 600, number) for number in range(2000)]
    for some in (keys, keys[:100], [b""]):
        assert b"".join(map(bytes, command(b"MGET", *some))) == encoded([b"MGET", *some])


@pytest.mark.parametrize("sizes", [[1 << 30], [1, 70_000, 1_000_000]])
def test_large_commands_arrive_whole(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    record = rng.integers(0, 256, 3_000_000, np.uint8)
    pieces = [
        piece for number in range(1500) for piece in command(b"SET", b"%d" % number, [b"", record[number:][:20_000]])
    ]
    pieces += command(b"SET", b"all", record)
    assert len(pieces) > 2 * 1024, "more than one call of the system takes"
    sent = hash(b"".join(map(bytes, pieces)))
    ours, theirs = socket.socketpair()
    got = bytearray()

    def read() -> None:
        while some := theirs.recv(1 << 20):
            got.extend(some)

    reader = threading.Thread(target=read)
    reader.start()
    cut = Cut(fileno=ours.detach())
    cut.sizes = itertools.cycle(sizes)
    made = Wire(lambda: Ready(cut), ENOUGH)  # type: ignore[arg-type,return-value]
    made.send(pieces, replies=1501)
    made.close()
    reader.join()
    theirs.close()
    assert hash(bytes(got)) == sent


def test_a_client_library_that_changed() -> None:
    class Other:
        def connect(self) -> None:
            pass

    with pytest.raises(StallfreeError, match=r"redis-py \d.*install"):
        Wire(Other).call("PING")  # type: ignore[arg-type]
