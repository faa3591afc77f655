"""The post office of a node, with a real server and a real clerk: what is handed in, asked for, and answered."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes import TIMEOUT, Office, offices, parts, stamp, until
from redis_servers import FakeServer, needs_server

from children import Child
from stallfree.cache import SampleCache
from stallfree.pipeline.codec import encode, read_record, record_size, write_record
from stallfree.stores import post as posts
from stallfree.stores.endpoint import Address
from stallfree.stores.post import BUSY, MOST, POST, PostOffice
from stallfree.stores.values import HEAD_SIZE, check_value, data_key, pack_head

pytestmark = needs_server

KEY = data_key("data", "f")
SMALL = "maxmemory 32mb", "maxmemory-policy noeviction"
SIZE = 12
"""Samples of the data set."""


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    with offices(tmp_path_factory.mktemp("post"), 1) as made:
        yield made[0]


@pytest.fixture
def cache(office: Office) -> Iterator[SampleCache]:
    """The node's part of the data set."""
    with parts([office], SIZE) as (part,):
        yield part.local
        office.settle()  # or the next test found it


@pytest.fixture
def post(office: Office) -> Iterator[PostOffice]:
    """As another node sees it."""
    post = office.post()
    yield post
    post.close()


def value(id: int, sample: Any = None, key: bytes = KEY) -> np.ndarray:
    """A value as it lies in a post office."""
    structure, arrays = encode((stamp(id), id) if sample is None else sample, allow_pickle=True)
    record = np.zeros(record_size(structure, arrays), np.uint8)
    write_record(structure, arrays, record)
    return np.concatenate([np.frombuffer(pack_head(key, id, [record]), np.uint8), record])


def ids_of(records: list[np.ndarray | None]) -> list[int | None]:
    """The ids that records tell."""
    ids = []
    for record in records:
        sample = None if record is None else read_record(record, copy=True)
        assert sample is None or sample[0].tolist() == stamp(sample[1]).tolist()
        ids.append(None if sample is None else sample[1])
    return ids


def ask(post: PostOffice, *ids: int, key: bytes = KEY, typical: int = 1000) -> list[int | None]:
    """The ids of the samples that come for `ids`."""
    return ids_of(post.ask(key, np.array(ids, np.int64), typical))


def hand_in(post: PostOffice, *ids: int, key: bytes = KEY) -> Any:
    return post.hand_in(key, ids, [encode((stamp(id), id)) for id in ids])


def push(office: Office, *messages: bytes | np.ndarray) -> None:
    """Put messages into the post as somebody who knows the password."""
    client = office.client()
    client.rpush(POST, *(bytes(message) for message in messages))
    client.close()


# --- asking and handing in ------------------------------------------------------------------------------------------


def test_records_come_in_the_order_of_the_ids_and_none_for_those_that_are_not_there(
    cache: SampleCache, post: PostOffice
) -> None:
    cache.put_many([1, 4, 7], [(stamp(id), id) for id in (1, 4, 7)])
    assert ask(post, 7, 3, 1, 11, 4, 7, 0) == [7, None, 1, None, 4, 7, None]
    assert ask(post) == []
    assert cache.stats().hits == cache.stats().misses == 0


def test_what_was_handed_in_before_is_read(cache: SampleCache, post: PostOffice, office: Office) -> None:
    other = office.post(unix=True)
    for id in range(SIZE):
        assert hand_in(post, id) is True
        assert ask(other, id, (id + 1) % SIZE)[0] == id
    assert cache.resident(range(SIZE)).all()
    other.close()


def test_records_that_have_no_common_size_travel_too(cache: SampleCache, post: PostOffice) -> None:
    samples = [None, 0, "", b"", [], {"a": stamp(5, size=900)}, (stamp(6, size=3), "six"), stamp(7)]
    assert post.hand_in(KEY, range(8), [encode(sample) for sample in samples]) is True
    records = post.ask(KEY, np.arange(8), 1000)
    assert all(record is not None for record in records)
    back = [read_record(record, copy=True) for record in records if record is not None]
    assert back[:5] == samples[:5]
    assert back[5]["a"].equal(stamp(5, size=900))
    assert back[6][0].equal(stamp(6, size=3))
    assert back[7].equal(stamp(7))


def test_two_data_sets_lie_side_by_side_and_one_is_cleared(office: Office, post: PostOffice) -> None:
    other = data_key("data", "g")
    with parts([office], SIZE), parts([office], 5, fingerprint="g"):
        hand_in(post, *range(SIZE))
        hand_in(post, 2, 3, key=other)
        assert (post.num_keys(KEY), post.num_keys(other)) == (SIZE, 2)
        assert ask(post, 2, 4, key=other) == [2, None]
        assert ask(post, 2, 4) == [2, 4]
        post.clear(KEY)
        assert (post.num_keys(KEY), post.num_keys(other)) == (0, 2)
        assert ask(post, 2, 3) == [None, None]
        assert ask(post, 3, 2, key=other) == [3, 2]


def test_a_data_set_that_the_node_does_not_hold_is_a_miss(cache: SampleCache, post: PostOffice) -> None:
    stranger = data_key("data", "another")
    assert ask(post, 1, 2, key=stranger) == [None, None]
    assert post.num_keys(stranger) == 0
    post.clear(stranger)
    assert ask(post, SIZE, 1) == [None, None]  # an id that is none


def test_a_data_set_that_was_made_anew_has_nothing_of_the_old_one(office: Office, post: PostOffice) -> None:
    for _ in range(2):
        with parts([office], SIZE) as (part,):
            assert ask(post, 3) == [None]
            hand_in(post, 3)
            assert ask(post, 3) == [3]
            assert part.local.resident([3]).all()
    assert ask(post, 3) == [None]


def test_lots_are_of_bounded_size(cache: SampleCache, post: PostOffice, office: Office) -> None:
    client = office.client()
    client.config_resetstat()
    large = MOST // 5  # bytes: five of them do not fit into one lot, with what is around them
    some = [encode((stamp(0, size=large // 8), id)) for id in range(SIZE)]
    assert post.hand_in(KEY, range(SIZE), some) is True
    assert client.info("commandstats")["cmdstat_rpush"]["calls"] == -(-SIZE // 4)
    client.close()


def test_who_hands_in_waits_for_a_clerk_that_is_behind_until_it_is_time(
    cache: SampleCache, post: PostOffice, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posts, "_MANY", 2)
    assert ask(post, 0) == [None]
    office.freeze_clerk()
    assert post.hand_in(KEY, [0], [encode((stamp(0), 0))], time.monotonic() + 1e6) is True  # there is room
    until_then = time.monotonic() + 0.2
    assert post.hand_in(KEY, range(1, 8), [encode((stamp(id), id)) for id in range(1, 8)], until_then) is True
    assert time.monotonic() >= until_then
    thread = threading.Thread(target=office.thaw_clerk)
    thread.start()
    assert post.hand_in(KEY, [8], [encode((stamp(8), 8))], time.monotonic() + 1e6) is True  # as soon as it is not
    thread.join()
    assert ask(post, *range(SIZE)) == [*range(9), *[None] * (SIZE - 9)]


def test_threads_forks_and_pickles_have_connections_of_their_own(
    cache: SampleCache, post: PostOffice, office: Office
) -> None:
    hand_in(post, *range(SIZE))
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda id=id: answers.append(ask(post, *[id] * 50) == [id] * 50)) for id in range(SIZE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * SIZE

    def in_child() -> None:
        for id in range(SIZE):
            assert ask(post, id) == [id]

    children = [Child(in_child) for _ in range(2)]
    in_child()
    assert [child.wait() for child in children] == [0, 0]
    in_child()
    again = pickle.loads(pickle.dumps(post))
    assert ask(again, 5) == [5]
    again.close()


# --- nonsense -------------------------------------------------------------------------------------------------------


ODD = {
    "nothing": b"",
    "a byte": b"x",
    "what tells that all before it is put away": b"mark:12345678",
    "short of a header": b"\xff" * (HEAD_SIZE - 1),
    "zeros": bytes(HEAD_SIZE),
    "a header of nonsense": b"\xff" * HEAD_SIZE,
    "a header of the data set, and no record": pack_head(KEY, 4, []),
    "long nonsense": bytes(range(256)) * 9,
}


@pytest.mark.parametrize("odd", ODD)
def test_nonsense_costs_nobody_else_anything(odd: str, cache: SampleCache, post: PostOffice, office: Office) -> None:
    office.freeze_clerk()  # it finds all of it at once
    push(office, value(1), ODD[odd], value(2), ODD[odd], value(3))
    office.thaw_clerk()
    assert ask(post, 1, 2, 3, 4) == [1, 2, 3, None]
    assert post._clerk.breaker.trips == 0


def test_a_record_of_nonsense_under_a_good_header_is_no_sample(
    cache: SampleCache, post: PostOffice, office: Office
) -> None:
    rng = np.random.default_rng(3)
    good = value(3)[HEAD_SIZE:]
    before = office.clerk
    assert before is not None
    for _ in range(300):
        record = good[: rng.integers(len(good) + 1)].copy()
        record[rng.integers(0, 120, 3) % max(1, len(record)) if len(record) else []] = rng.integers(0, 256)
        push(office, pack_head(KEY, 3, [record]) + record.tobytes())
    post.num_keys(KEY)
    cache.drop([3])
    push(office, value(3))
    assert ask(post, 3) == [3]
    assert not cache.check()


def test_every_flipped_byte_of_a_value_is_noticed(cache: SampleCache, post: PostOffice, office: Office) -> None:
    good = value(5)
    rng = np.random.default_rng(0)
    flipped = []
    for at in range(len(good)):
        bad = good.copy()
        bad[at] ^= 1 << rng.integers(8)
        flipped.append(bad)
    push(office, *flipped)
    push(office, good[:-1], np.append(good, np.uint8(0)), value(5, key=data_key("data", "g")), value(SIZE))
    assert post.num_keys(KEY) == 0
    push(office, good)
    assert ask(post, 5) == [5]


def test_a_pickle_is_not_stored_where_pickles_are_not_allowed(
    cache: SampleCache, post: PostOffice, office: Office
) -> None:
    push(office, value(1, Unknown()), value(2))
    assert post.num_keys(KEY) == 1
    assert ask(post, 1, 2) == [None, 2]


class Unknown:
    """A class that the codec does not know."""


# --- answers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def false_clerk(answer: Callable[[list[int]], bytes], timeout: float = TIMEOUT) -> Iterator[tuple[PostOffice, Any]]:
    """A post office whose clerk answers, to those who ask for samples, what a test wants; and all that it was told."""
    told: list[list[bytes]] = []

    def say(connection: socket.socket, request: list[bytes]) -> None:
        told.append(request)
        if request[0] == b"PING":
            connection.sendall(b"+PONG\r\n")
        elif request[0] == b"ROOM":
            connection.sendall(b":1\r\n")
        elif request[0] == b"ASK":
            connection.sendall(answer(np.frombuffer(request[3], np.int64).tolist()))

    with FakeServer(say) as server:
        post = PostOffice(Address(path="/nowhere"), server.tcp, timeout)
        yield post, told
        post.close()


def array(*items: bytes) -> bytes:
    """A reply that is an array of strings."""
    return b"*%d\r\n" % len(items) + b"".join(b"$%d\r\n%b\r\n" % (len(item), item) for item in items)


def good(ids: list[int]) -> list[bytes]:
    """What a clerk says that has all samples."""
    return [value(id).tobytes() for id in ids]


ANSWERS: dict[str, Callable[[list[int]], bytes]] = {
    "one too few": lambda ids: array(*good(ids)[:-1]),
    "one too many": lambda ids: array(*good([*ids, 3])),
    "no array": lambda ids: b"+OK\r\n",
    "numbers": lambda ids: b"*%d\r\n" % len(ids) + b":1\r\n" * len(ids),
    "an array of nothing": lambda ids: b"*-1\r\n",
    "nonsense": lambda ids: b"nonsense\r\n",
    "an error": lambda ids: b"-ERR no\r\n",
    "errors": lambda ids: b"*%d\r\n" % len(ids) + b"-ERR no\r\n" * len(ids),
    "another order": lambda ids: array(*good(ids)[::-1]),
    "cut short": lambda ids: array(*(item[:-1] for item in good(ids))),
    "another data set": lambda ids: array(*(value(id, key=bytes(16)).tobytes() for id in ids)),
    "a flipped bit": lambda ids: array(*(item[:99] + bytes([item[99] ^ 4]) + item[100:] for item in good(ids))),
    "long nonsense": lambda ids: array(*[bytes(range(200))] * len(ids)),
}  # fmt: skip
NO_REPLY = list(ANSWERS)[:6]
"""What no clerk would say: it is not asked for a while."""


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_false_answer_is_a_miss(answer: str) -> None:
    with false_clerk(ANSWERS[answer]) as (post, _):
        assert ask(post, 0, 1, 2) == ([None, 1, None] if answer == "another order" else [None] * 3)
        assert post._clerk.breaker.trips == (answer in NO_REPLY)


def test_a_good_answer_is_none_of_those_and_comes_in_parts_of_bounded_size() -> None:
    with false_clerk(lambda ids: array(*good(ids))) as (post, told):
        assert ask(post, 0, 1, 2) == [0, 1, 2]
        assert [request[0] for request in told] == [b"ASK", b"ROOM"]
        told.clear()
        assert ask(post, *range(SIZE), typical=300_000) == [*range(SIZE)]
        asked = [np.frombuffer(request[3], np.int64).tolist() for request in told if request[0] == b"ASK"]
        assert asked == [[first, first + 1, first + 2] for first in range(0, SIZE, 3)]
        assert ask(post, *range(3), typical=1 << 30) == [0, 1, 2]  # one by one
        assert len(told) == SIZE // 3 + 1 + 3 + 1


def test_an_answer_that_ends_in_the_middle_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posts, "_REQUEST", 1)
    with false_clerk(lambda ids: array(*good(ids)) if ids != [2] else b"*1\r\n$99\r\nx", 1.0) as (post, _):
        assert ask(post, 0, 1) == [0, 1]
        assert ask(post, 0, 1, 2, 3) == [None] * 4
        assert post.lost


def test_a_clerk_that_says_nothing_is_waited_for_once() -> None:
    with false_clerk(lambda ids: b"", 0.5) as (post, told):
        post._clerk.breaker._ping = lambda: 1 / 0  # it says nothing to that either
        assert ask(post, 0, 1) == [None, None]
        assert post._clerk.breaker.trips == 1
        assert post.lost
        for _ in range(20):
            assert ask(post, 0, 1) == [None, None]
            assert post.num_keys(KEY) == 0
        assert [request[0] for request in told] == [b"ASK", b"ROOM"]  # the other twenty asked nobody


# --- servers and clerks that fail -----------------------------------------------------------------------------------


def test_a_full_server_refuses_and_recovers(tmp_path: Path) -> None:
    example = stamp(0, size=2048)
    with offices(tmp_path, 1, *SMALL) as (office,), parts([office], 4000, example=example, capacity="64MiB") as (part,):
        post = office.post()
        office.freeze_clerk()
        taken = 0
        while (answer := post.hand_in(KEY, [taken], [encode(stamp(taken, size=2048))])) is True:
            taken += 1
        assert answer is BUSY
        assert 100 < taken < 4000
        office.thaw_clerk()
        until(lambda: post.hand_in(KEY, [taken], [encode(stamp(taken, size=2048))]) is True, "there is room again")
        until(lambda: post.num_keys(KEY) == taken + 1, "all that was taken was put away")
        assert part.resident(range(taken + 1)).all()
        post.close()


def test_what_is_asked_for_needs_no_room_in_the_server(tmp_path: Path) -> None:
    large = stamp(0, size=3 << 19)
    with offices(tmp_path, 1, *SMALL) as (office,), parts([office], 20, example=large, capacity="256MiB") as (part,):
        part.put_many([0, 1], [large, (stamp(1), 1)])
        client = office.client()
        client.config_set("maxmemory", 1)
        post = office.post()
        for _ in range(2):
            (record,) = post.ask(KEY, np.array([0]), 1000)
            assert record is not None
            assert read_record(record, copy=True).equal(large)
            assert ask(post, 1, 2) == [1, None]
        assert hand_in(post, 2) is BUSY
        assert post.num_keys(KEY) == 2
        client.config_set("maxmemory", 0)
        client.close()
        assert hand_in(post, 2) is True
        assert ask(post, 1, 2) == [1, 2]
        assert post._clerk.breaker.trips == 0
        post.close()


def test_a_killed_server_takes_nothing_with_it_but_what_is_handed_in(tmp_path: Path) -> None:
    with offices(tmp_path, 1) as (office,), parts([office], SIZE):
        post = office.post()
        hand_in(post, 1, 2)
        assert ask(post, 1) == [1]
        office.server.kill()
        assert ask(post, 1, 2, 3) == [1, 2, None]
        assert hand_in(post, 3) is False
        assert post.num_keys(KEY) == 2
        assert not post.lost
        office.server.start()
        until(lambda: hand_in(post, 3), "it is handed samples again")
        until(lambda: ask(post, 1, 2, 3) == [1, 2, 3], "they are put away")
        assert post._clerk.breaker.trips == 0
        post.close()


def test_a_frozen_server_does_not_make_the_clerk_lost(tmp_path: Path) -> None:
    with offices(tmp_path, 1) as (office,), parts([office], SIZE) as (part,):
        post = office.post()
        hand_in(post, 1, 2)
        assert ask(post, 1, 2) == [1, 2]
        office.server.freeze()
        try:
            for _ in range(3):
                assert ask(post, 2, 1, 3) == [2, 1, None]
                assert post.num_keys(KEY) == 2
                post.settle()
            post.clear(KEY)
            assert not part.resident(range(SIZE)).any()
            assert (post.lost, post._clerk.breaker.trips) == (False, 0)
        finally:
            office.server.thaw()
        until(lambda: hand_in(post, 3), "it is handed samples again")
        until(lambda: ask(post, 3) == [3], "they are put away")
        post.close()


@pytest.mark.parametrize("end", ["freeze", "kill"])
def test_a_clerk_that_is_gone_is_asked_again_when_it_is_back(end: str, tmp_path: Path) -> None:
    with offices(tmp_path, 1) as (office,), parts([office], SIZE):
        post = office.post()
        hand_in(post, 1)
        assert ask(post, 1) == [1]
        impatient = office.post(0.1)
        office.freeze_clerk() if end == "freeze" else office.kill_clerk()
        assert ask(impatient, 1) == [None]
        assert hand_in(impatient, 2) is True
        office.thaw_clerk() if end == "freeze" else office.start_clerk()
        until(lambda: ask(impatient, 1, 2) == [1, 2], "it is asked again, and what was handed in was put away")
        post.close()
        impatient.close()


def test_a_post_office_that_is_closed_answers_nothing(office: Office, cache: SampleCache) -> None:
    post = office.post()
    assert hand_in(post, 1) is True
    post.close()
    post.close()
    assert ask(post, 1) == [None]
    assert hand_in(post, 2) is False
    assert check_value(value(1), KEY, 1) is not None
