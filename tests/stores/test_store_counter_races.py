"""The counter of a clerk while others write, come and go: no sample that is overwritten comes through."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from askers import KEY, Asker, Desk, connect, show
from nodes import PASSWORD, PATIENCE, TIMEOUT, offices, parts, stamp, until
from redis_servers import needs_server

from stallfree.cache import SampleCache, visit
from stallfree.pipeline.codec import encode
from stallfree.stores import counter as counters
from stallfree.stores.clerk import Clerk
from stallfree.stores.counter import Counter
from stallfree.stores.registry import register

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


# --- samples that are overwritten -------------------------------------------------------------------------------------


def overwrite(cache: SampleCache) -> None:
    """Sample 1 goes, and another one comes to where it lay."""
    place = cache._index.first[1]
    cache.drop([1])
    cache.put(7, (stamp(7), 7))
    assert cache._index.first[7] == place


def test_a_sample_that_goes_before_its_checksum_is_made_is_a_miss(
    desk: Desk, cache: SampleCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(ids: Any, real: Callable[..., Any] = cache.view_records) -> Any:
        views = real(ids)
        overwrite(cache)
        return views

    monkeypatch.setattr(cache, "view_records", look)
    values = desk.connect().values(0, 1, 2)
    assert show(values, [0, 1, 2]) == [0, None, 2]
    assert values[1] == b""  # it was known before it was sent


def test_a_sample_that_goes_between_its_checksum_and_the_sending_comes_damaged(
    desk: Desk, cache: SampleCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asker = desk.connect()

    def send(connection: Any, pieces: Any, real: Callable[..., None] = counters._send) -> None:
        overwrite(cache)
        real(connection, pieces)

    monkeypatch.setattr(counters, "_send", send)
    values = asker.values(0, 1, 2)
    assert show(values, [0, 1, 2]) == [0, None, 2]
    assert values[1] != b""  # nobody could know, but the checksum tells


def test_no_wrong_sample_comes_out_of_a_cache_that_evicts_under_load() -> None:
    count, size = 400, 300
    options: dict[str, Any] = {"fingerprint": "f", "name": "load", "policy": "lru", "allow_pickle": False}
    with SampleCache(count, capacity="256KiB", example=(stamp(0, size=size), 0), **options) as cache:
        over = threading.Event()

        def write(seed: int) -> None:
            chance = np.random.default_rng(seed)
            while not over.is_set():
                ids = chance.integers(0, count, 8)
                cache.put_many(ids, [(stamp(id, size=size * (1 + id % 3)), id) for id in ids.tolist()])
                if chance.random() < 0.1:
                    cache.drop(chance.integers(0, count, 30))

        with contextlib.closing(Desk({KEY: cache})) as desk:
            asker = desk.connect()
            writers = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
            for writer in writers:
                writer.start()
            chance = np.random.default_rng(9)
            hits = asked = 0
            try:
                while asked < 20_000 or not hits:
                    ids = chance.integers(0, count, 100).tolist()
                    found = show(asker.values(*ids), ids)  # which fails for one that is not what it should be
                    hits += sum(id is not None for id in found)
                    asked += len(ids)
            finally:
                over.set()
                for writer in writers:
                    writer.join()
            assert cache.stats().evictions > 0
            assert cache.check() == []


# --- askers that hold up others ---------------------------------------------------------------------------------------


def test_who_takes_nothing_holds_up_nobody_and_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.zeros(1 << 20, dtype=torch.uint8)
    with SampleCache(SIZE, capacity="64MiB", fingerprint="f", name="slow", example=large) as cache:
        cache.put_many(range(SIZE), [large] * SIZE)
        with contextlib.closing(Desk({KEY: cache})) as desk:
            busy = desk.connect()
            assert busy.ask("PING") == b"PONG"  # by now its time limit is set
            monkeypatch.setattr(counters, "_SEND_SECONDS", 0.3)
            lazy = desk.connect()
            lazy.say("ASK", KEY, 0, np.zeros(4, "<i8"))
            lazy.say("PING")
            for _ in range(3):
                assert len(busy.values(*range(SIZE))) == SIZE
            desk._made[1][1].join(PATIENCE)  # its thread has ended
            with pytest.raises((EOFError, ConnectionError)):
                lazy.reply()
            assert len(busy.values(0)) == 1


def test_places_are_free_again_when_their_askers_have_gone(desk: Desk) -> None:
    free = desk.counter._free._value
    for end in (b"", b"*1\r\n", b"nonsense"):
        for password in ("", PASSWORD):
            asker = desk.connect(password)
            asker.connection.sendall(end)
            asker.close()
    for _, thread in desk._made:
        thread.join(PATIENCE)
    assert desk.counter._free._value == free


@needs_server
def test_more_askers_than_a_process_may_usually_have_files_are_answered_at_once(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(list(Path("/proc/self/fd").iterdir())) + 100
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            (office,) = stack.enter_context(offices(tmp_path, 1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)) if hard > 0 else soft, hard))
        (part,) = stack.enter_context(parts([office], SIZE))
        part.put_many(range(4), [(stamp(id), id) for id in range(4)])
        askers = []
        for number in range(few + 50):
            askers.append(connect(office, unix=number % 2 == 1))
            stack.callback(askers[-1].close)
        for asker in askers:
            asker.say("ASK", KEY, 0, np.arange(5, dtype="<i8"))
        for asker in askers:
            assert show(asker.reply(), range(5)) == [0, 1, 2, 3, None]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_server
def test_beyond_the_most_connections_one_is_refused_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_room_for_connections", lambda: 3)
    with offices(tmp_path, 1) as (office,):
        askers = [connect(office, unix=number == 1) for number in range(3)]
        too_many = connect(office, password="")
        assert too_many.is_over()
        too_many.close()
        assert [asker.ask("PING") for asker in askers] == [b"PONG"] * 3
        askers.pop().close()

        def let_in() -> bool:
            with contextlib.suppress(EOFError, OSError):
                askers.append(connect(office))
                return True
            return False

        until(let_in, "there is a place again")
        assert [asker.ask("PING") for asker in askers] == [b"PONG"] * 3
        for asker in askers:
            asker.close()


# --- caches that come and go --------------------------------------------------------------------------------------


@needs_server
def test_a_clerk_whose_caches_are_used_by_threads_while_they_come_and_go(tmp_path: Path) -> None:
    """Its main thread stores and looks after its caches, askers look and clear, and the data set is made anew."""
    with offices(tmp_path, 1) as (office,):
        office.kill_clerk()  # its part is played here
        clerk = Clerk(office.folder, office.unix.server)
        counter = Counter([], PASSWORD, clerk.find, lambda seconds: True)
        over, found = threading.Event(), [0]
        problems: list[BaseException] = []

        def repeat(step: Callable[[], None]) -> None:
            try:
                while not over.is_set():
                    step()
            except BaseException as error:
                problems.append(error)

        def look() -> None:
            reply = counter._answer([b"ASK", KEY, b"0", np.arange(SIZE).astype("<i8").tobytes()])
            if reply[0][:1] == b"*":
                left, right = socket.socketpair()
                with left:
                    counters._send(left, reply)
                asker = Asker(right, "")
                found[0] += sum(id is not None for id in show(asker.reply(), range(SIZE)))
                asker.close()
            for request in ([b"ROOM", KEY], [b"COUNT", KEY, b"0"]):
                assert counter._answer(request)[0][:1] in b":-"

        def clear() -> None:
            assert counter._answer([b"CLEAR", KEY, b"0"])[0][:1] in b"+-"
            time.sleep(0.002)

        post = office.post()
        someone = Someone(post)
        threads = [
            threading.Thread(target=repeat, args=(step,)) for step in (look, look, clear, someone.hand_in, clerk.turn)
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in range(25):
                with SampleCache(SIZE, capacity="4MiB", fingerprint="f", name="anew", example=(stamp(0), 0)) as cache:
                    register(office.folder, KEY, cache)
                    before = found[0]
                    until(lambda: found[0] > before or problems, "samples were found")  # noqa: B023
        finally:
            over.set()
            for thread in threads:
                thread.join(PATIENCE)
        post.close()
        assert not any(thread.is_alive() for thread in threads)
        assert problems == []
        clerk._look()
        assert clerk._caches == {}  # and the fixture of all tests finds nothing that is still open
        clerk._wire.close()
        clerk._own_office.close()


class Someone:
    """Somebody who hands in all samples again and again."""

    def __init__(self, post: Any) -> None:
        self._post, self._records = post, [encode((stamp(id), id)) for id in range(SIZE)]

    def hand_in(self) -> None:
        self._post.hand_in(KEY, range(SIZE), self._records, time.monotonic() + TIMEOUT)
        time.sleep(0.001)


def test_a_cache_that_was_let_go_is_left_by_the_last_one_who_uses_it(cache: SampleCache) -> None:
    visitor = visit(cache.path.parent, cache.name, cache.policy, False)
    files = len(list(Path("/proc/self/fd").iterdir()))
    views = visitor.view_records([1, 2])
    del visitor
    assert len(list(Path("/proc/self/fd").iterdir())) < files
    assert views.unchanged().all()
