"""The post office and its clerk, with a real server: what is handed in, asked for, and answered."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes import TIMEOUT, Office, offices, parts, stamp, until
from redis_servers import Server, needs_server

from children import Child
from stallfree.cache import SampleCache
from stallfree.pipeline.codec import encode, read_record, record_size, write_record
from stallfree.stores import clerk
from stallfree.stores.post import ASK, BUSY, CLEAR, COUNT, ECHO, GO, MOST, POST, REQUEST, PostOffice, answer_key
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


@pytest.fixture
def post(office: Office) -> Iterator[PostOffice]:
    """As another node sees it."""
    post = PostOffice(office.address, TIMEOUT)
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
    client = office.server.tcp.client(TIMEOUT)
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
    other = PostOffice(office.address, TIMEOUT)
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


def test_lots_and_answers_are_of_bounded_size(cache: SampleCache, post: PostOffice, office: Office) -> None:
    client = office.server.tcp.client(TIMEOUT)
    client.config_resetstat()
    large = MOST // 5  # bytes: five of them do not fit into one lot, with what is around them
    some = [encode((stamp(0, size=large // 8), id)) for id in range(SIZE)]
    assert post.hand_in(KEY, range(SIZE), some) is True
    post.num_keys(KEY)
    lots = client.info("commandstats")["cmdstat_rpush"]["calls"] - 2  # the question, and its answer
    assert lots == -(-SIZE // 4)
    client.config_resetstat()
    post.ask(KEY, np.arange(SIZE), 100)
    few = client.info("commandstats")["cmdstat_blpop"]["calls"]
    post.ask(KEY, np.arange(SIZE), MOST // 2)
    assert client.info("commandstats")["cmdstat_rpush"]["calls"] >= 2 * (1 + SIZE // 2)
    assert few
    client.close()


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


TOKEN = b"12345678"
ODD = {
    "nothing": b"",
    "a byte": b"x",
    "short of a request": bytes(REQUEST.size - 1),
    "zeros": bytes(REQUEST.size),
    "short of a value": b"\xff" * (HEAD_SIZE - 1),
    "a header of nonsense": b"\xff" * HEAD_SIZE,
    "long nonsense": bytes(range(256)) * 9,
    "an unknown kind": REQUEST.pack(TOKEN, b"SFZ1", KEY) + np.arange(20).tobytes(),
    "half an id": REQUEST.pack(TOKEN, ASK, KEY) + b"abc",
    "ids that are none": REQUEST.pack(TOKEN, ASK, KEY) + np.array([-1, 1 << 60, SIZE]).tobytes(),
    "no ids": REQUEST.pack(TOKEN, ASK, KEY),
    "an echo with more": REQUEST.pack(TOKEN, ECHO, KEY) + bytes(900),
    "a count with more": REQUEST.pack(TOKEN, COUNT, KEY) + bytes(900),
    "a clear of nothing": REQUEST.pack(TOKEN, CLEAR, bytes(16)),
}


@pytest.mark.parametrize("odd", ODD)
def test_nonsense_costs_nobody_else_anything(odd: str, cache: SampleCache, post: PostOffice, office: Office) -> None:
    office.freeze_clerk()  # it finds all of it at once
    push(office, value(1), ODD[odd], value(2), ODD[odd], value(3))
    office.thaw_clerk()
    assert ask(post, 1, 2, 3, 4) == [1, 2, 3, None]
    assert post._clerk.trips == 0


def test_a_token_that_is_taken_harms_nobody(cache: SampleCache, post: PostOffice, office: Office) -> None:
    client = office.server.tcp.client(TIMEOUT)
    client.set(answer_key(TOKEN), "no list")
    push(office, REQUEST.pack(TOKEN, ASK, KEY) + np.arange(3).tobytes(), value(2))
    assert ask(post, 2) == [2]
    client.delete(answer_key(TOKEN))
    client.close()


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
        if bad[8:12].tobytes() != CLEAR:
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


class FalseClerk:
    """Answers the first request to a server with what `make` gives for the good items of it."""

    def __init__(self, server: Server, make: Callable[[list[bytes]], list[bytes]]) -> None:
        self._thread = threading.Thread(target=self._run, args=(server, make))
        self._thread.start()

    def _run(self, server: Server, make: Callable[[list[bytes]], list[bytes]]) -> None:
        client = server.tcp.client(2 * TIMEOUT)
        taken = client.blpop([POST], TIMEOUT)
        assert taken is not None
        message = taken[1]
        ids = np.frombuffer(message[REQUEST.size :], np.int64).tolist()
        client.rpush(answer_key(message[:8]), *make([GO, *(value(id).tobytes() for id in ids)]))
        client.close()

    def end(self) -> None:
        self._thread.join()


ANSWERS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "one too few": lambda items: items[:-1],
    "one too many": lambda items: [*items, items[1]],
    "nothing but the first": lambda items: items[:1],
    "without the first": lambda items: items[1:],
    "numbers": lambda items: [b"1"] * len(items),
    "another order": lambda items: [items[0], *items[:0:-1]],
    "cut short": lambda items: [items[0], *(item[:-1] for item in items[1:])],
    "another data set": lambda items: [items[0], *(value(at, key=bytes(16)).tobytes() for at in range(3))],
    "a flipped bit": lambda items: [items[0], *(item[:99] + bytes([item[99] ^ 4]) + item[100:] for item in items[1:])],
    "nonsense": lambda items: [b"\0", *[bytes(range(200))] * 3],
}  # fmt: skip


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without a clerk."""
    with Server(tmp_path_factory.mktemp("mute")) as server:
        yield server


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_false_answer_is_a_miss(answer: str, mute: Server) -> None:
    post = PostOffice(mute.tcp, TIMEOUT)
    clerk = FalseClerk(mute, ANSWERS[answer])
    found = ask(post, 0, 1, 2)
    clerk.end()
    assert found == ([None, 1, None] if answer == "another order" else [None] * 3)
    post.close()


def test_a_good_answer_is_none_of_those(mute: Server) -> None:
    post = PostOffice(mute.tcp, TIMEOUT)
    clerk = FalseClerk(mute, lambda items: items)
    assert ask(post, 0, 1, 2) == [0, 1, 2]
    clerk.end()
    post.close()


def test_a_clerk_that_says_nothing_is_waited_for_once(mute: Server) -> None:
    post = PostOffice(mute.tcp, 1.0)
    assert ask(post, 0, 1) == [None, None]
    assert post._clerk.trips == 1
    client = mute.tcp.client(TIMEOUT)
    asked = client.llen(POST)
    for _ in range(20):
        assert ask(post, 0, 1) == [None, None]
        assert post.num_keys(KEY) == 0
    questions = [message for message in client.lrange(POST, 0, -1) if message[8:12] != ECHO]
    assert len(questions) == asked == 1  # the other twenty asked nobody
    assert hand_in(post, 3) is True
    client.delete(POST)
    client.close()
    post.close()


def test_an_answer_that_nobody_takes_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clerk, "_KEEP_MILLISECONDS", 100)
    with offices(tmp_path, 1) as (office,), parts([office], SIZE):
        client = office.server.tcp.client(TIMEOUT)
        client.config_resetstat()
        push(office, value(2), REQUEST.pack(TOKEN, ASK, KEY) + np.arange(3).tobytes())
        until(lambda: client.info("commandstats").get("cmdstat_pexpire"), "it was answered")
        until(lambda: client.dbsize() == 0, "the answer has vanished")
        client.close()


# --- servers and clerks that fail -----------------------------------------------------------------------------------


def test_a_full_server_refuses_and_recovers(tmp_path: Path) -> None:
    example = stamp(0, size=2048)
    with offices(tmp_path, 1, *SMALL) as (office,), parts([office], 4000, example=example, capacity="64MiB") as (part,):
        post = PostOffice(office.address, TIMEOUT)
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


def test_where_there_is_no_room_for_a_question_there_is_no_answer_and_no_lost_node(
    office: Office, cache: SampleCache, post: PostOffice
) -> None:
    hand_in(post, 1)
    assert ask(post, 1) == [1]
    client = office.server.tcp.client(TIMEOUT)
    client.config_set("maxmemory", 1)
    assert ask(post, 1) == [None]
    assert hand_in(post, 2) is BUSY
    assert post.num_keys(KEY) == 0
    client.config_set("maxmemory", 0)
    client.close()
    assert ask(post, 1, 2) == [1, None]
    assert post._clerk.trips == 0


def test_an_answer_for_which_there_is_no_room_is_a_miss_and_no_lost_node(tmp_path: Path) -> None:
    large = stamp(0, size=3 << 19)
    with offices(tmp_path, 1, *SMALL) as (office,), parts([office], 20, example=large, capacity="256MiB") as (part,):
        part.put_many([0, 1], [large, (stamp(1), 1)])
        client = office.server.tcp.client(TIMEOUT)
        client.set("what takes the room", bytes(8 << 20))
        client.close()
        post = PostOffice(office.address, TIMEOUT)
        for _ in range(2):
            assert post.ask(KEY, np.array([0]), 1000) == [None]
            assert ask(post, 1) == [1]
        assert post._clerk.trips == 0
        post.close()


def test_a_server_that_was_killed_is_asked_again_when_it_is_back(tmp_path: Path) -> None:
    with offices(tmp_path, 1) as (office,), parts([office], SIZE):
        post = PostOffice(office.address, TIMEOUT)
        hand_in(post, 1, 2)
        assert ask(post, 1) == [1]
        office.server.kill()
        assert ask(post, 1) == [None]
        assert hand_in(post, 3) is False
        assert post.num_keys(KEY) == 0
        post.clear(KEY)
        office.server.start()
        until(lambda: ask(post, 1, 2, 3) == [1, 2, None], "it is asked again, and the node has kept its samples")
        post.close()


@pytest.mark.parametrize("end", ["freeze", "kill"])
def test_a_clerk_that_is_gone_is_asked_again_when_it_is_back(end: str, tmp_path: Path) -> None:
    with offices(tmp_path, 1) as (office,), parts([office], SIZE):
        post = PostOffice(office.address, TIMEOUT)
        hand_in(post, 1)
        assert ask(post, 1) == [1]
        impatient = PostOffice(office.address, 0.1)
        office.freeze_clerk() if end == "freeze" else office.kill_clerk()
        assert ask(impatient, 1) == [None]
        assert hand_in(impatient, 2) is True
        office.thaw_clerk() if end == "freeze" else office.start_clerk()
        until(lambda: ask(impatient, 1, 2) == [1, 2], "it is asked again, and what was handed in was put away")
        post.close()
        impatient.close()


def test_a_post_office_that_is_closed_answers_nothing(office: Office, cache: SampleCache) -> None:
    post = PostOffice(office.address, TIMEOUT)
    assert hand_in(post, 1) is True
    post.close()
    post.close()
    assert ask(post, 1) == [None]
    assert hand_in(post, 2) is False
    assert check_value(value(1), KEY, 1) is not None
