"""The breaker: opens at once, closes when the server is back, and leaves no thread."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import socket
import struct
import threading
import weakref
from pathlib import Path

import pytest
from redis_servers import FakeServer, until

from children import Child
from stallfree.stores import circuit_breaker as module
from stallfree.stores.circuit_breaker import AT_ONCE, Breaker, shared_cells
from stallfree.stores.shard import Fixed, Shard


class Patient:
    """A server that comes back when it is told to."""

    def __init__(self, seconds: float = 0.001) -> None:
        self.pings = 0
        self.back = threading.Event()
        self.breaker = Breaker(self.ping, seconds)

    def ping(self) -> None:
        self.pings += 1
        if not self.back.is_set():
            raise ConnectionRefusedError


def rejoining(*names: str) -> list[threading.Thread]:
    """The threads that look after breakers."""
    return [thread for thread in threading.enumerate() if thread.name in (names or ("stallfree-rejoin",))]


def test_it_is_closed_and_costs_no_thread() -> None:
    patient = Patient()
    assert patient.breaker.closed
    assert patient.breaker.trips == 0
    assert not rejoining()
    assert not patient.pings


def test_it_opens_at_once_and_closes_when_the_server_is_back() -> None:
    patient = Patient()
    for trip in (1, 2):
        patient.back.clear()
        patient.pings = 0
        patient.breaker.trip()
        assert not patient.breaker.closed
        assert patient.breaker.trips == trip
        until(lambda: patient.pings > 3, "it pings")
        assert not patient.breaker.closed
        assert len(rejoining()) == 1
        patient.back.set()
        until(lambda: patient.breaker.closed, "it closes")
        until(lambda: not rejoining(), "its thread ends")


def test_it_opens_once_however_many_say_so() -> None:
    patient, start = Patient(), threading.Barrier(8)

    def trip() -> None:
        start.wait()
        for _ in range(50):
            patient.breaker.trip()

    threads = [threading.Thread(target=trip) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert patient.breaker.trips == 1
    assert len(rejoining()) == 1
    patient.back.set()
    until(lambda: patient.breaker.closed, "it closes")


def test_who_fails_again_soon_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that lets pings through, and nothing else."""
    monkeypatch.setattr(module, "_SOON", 1e9)  # however slow this machine is
    monkeypatch.setattr(module, "LONGEST", 0.01)
    patient = Patient(seconds=0.001)
    patient.back.set()
    pauses = []
    for _ in range(6):
        patient.breaker.trip()
        pauses.append(patient.breaker.pause)
        until(lambda: patient.breaker.closed, "it closes")
    assert pauses == [0.001, 0.002, 0.004, 0.008, 0.01, 0.01]
    patient.breaker._cells[2] = 1.0  # as if it had gone well for long
    patient.breaker.trip()
    assert patient.breaker.pause == 0.001
    until(lambda: patient.breaker.closed, "it closes")


def test_one_thread_serves_all() -> None:
    patients = [Patient() for _ in range(5)]
    for patient in patients:
        patient.breaker.trip()
    until(lambda: all(patient.pings for patient in patients), "all are pinged")
    assert len(rejoining()) == 1
    for patient in patients[1:]:
        patient.back.set()
    until(lambda: all(patient.breaker.closed for patient in patients[1:]), "those that are back close")
    assert not patients[0].breaker.closed
    patients[0].back.set()
    until(lambda: patients[0].breaker.closed, "the last one closes")


@pytest.mark.parametrize("how", ["forgotten", "collected"])
def test_the_thread_ends_when_nobody_needs_it(how: str) -> None:
    patient = Patient(seconds=1000 if how == "forgotten" else 0.001)
    patient.breaker.trip()
    assert rejoining()
    if how == "forgotten":
        patient.breaker.forget()
        assert not patient.breaker.closed
        patient.breaker.trip()
    else:
        gone = weakref.ref(patient.breaker)
        del patient
        until(lambda: gc.collect() is not None and gone() is None, "nobody refers to it")
    until(lambda: not rejoining(), "the thread ends")


# --- many at once ---------------------------------------------------------------------------------------------------


def test_of_thirty_lost_servers_none_hides_the_one_that_is_back() -> None:
    """They take connections and say nothing; the one that answers is found while all of them are still being asked."""

    def say_nothing(connection: socket.socket, command: list[bytes]) -> None:
        asked.append(connection)

    def answer(connection: socket.socket, command: list[bytes]) -> None:
        connection.sendall(b"+PONG\r\n")

    asked: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(FakeServer(say_nothing)) for _ in range(30)]
        good = stack.enter_context(FakeServer(answer))
        endpoints = [Shard(Fixed(server.tcp), timeout=600.0) for server in (*silent[:20], good, *silent[20:])]
        for endpoint in endpoints:
            stack.callback(endpoint.close)
            endpoint.breaker.trip()
        until(lambda: endpoints[20].breaker.closed, "the one that is back is found")
        until(lambda: len(asked) == len(silent), "all others are being asked, at the same time")
        assert [server.connections for server in (*silent, good)] == [1] * 31
        assert not any(endpoint.breaker.closed for endpoint in (*endpoints[:20], *endpoints[21:]))
    until(lambda: not rejoining("stallfree-rejoin", "stallfree-ping"), "the threads end")


def test_more_than_can_be_asked_at_once_have_their_turn() -> None:
    patients = [Patient() for _ in range(3 * AT_ONCE)]
    for patient in patients:
        patient.breaker.trip()
    until(lambda: min(patient.pings for patient in patients) > 1, "all are pinged again and again")
    for patient in patients:
        patient.back.set()
    until(lambda: all(patient.breaker.closed for patient in patients), "all close")
    until(lambda: not rejoining("stallfree-rejoin", "stallfree-ping"), "the threads end")


# --- processes that know the same -----------------------------------------------------------------------------------


def test_a_forked_child_and_its_parent_know_the_same() -> None:
    patient = Patient()
    patient.breaker.trip()

    def child() -> None:
        assert not rejoining()
        assert not patient.breaker.closed
        assert patient.breaker.trips == 1
        assert len(rejoining()) == 1
        patient.back.set()
        until(lambda: patient.breaker.closed, "it closes in the child")
        until(lambda: not rejoining(), "the child's thread ends")

    with module._rejoin.lock:  # as if another thread of the parent held it
        process = Child(child)
    assert process.wait() == 0
    assert not patient.back.is_set()
    until(lambda: patient.breaker.closed, "the parent hears of it, though it asks in vain")

    patient.breaker._seconds = 1000.0

    def lose() -> None:
        patient.breaker.trip()
        assert patient.breaker.trips == 2

    assert Child(lose).wait() == 0
    assert not patient.breaker.closed, "nobody waits for it a second time"
    assert patient.breaker.trips == 1
    patient.breaker.forget()


def shared(file: Path, count: int = 1, seconds: float = 0.001) -> list[Patient]:
    """Servers as a process sees them that has `file` in common with others."""
    patients = [Patient(seconds) for _ in range(count)]
    for patient, cells in zip(patients, shared_cells(file, count), strict=True):
        patient.breaker.share(cells)
    return patients


def test_processes_with_a_file_know_the_same_and_one_of_them_pings(tmp_path: Path) -> None:
    file = tmp_path / "lost"
    everyone = [shared(file, 3) for _ in range(4)]
    for one in everyone:
        one[1].breaker._seconds = 0.02
    everyone[0][1].breaker.trip()
    for one in everyone:
        assert [patient.breaker.closed for patient in one] == [True, False, True]
    assert [one[1].breaker.trips for one in everyone] == [1, 0, 0, 0]
    until(lambda: sum(one[1].pings for one in everyone) >= 8, "it is pinged")
    later = shared(file, 3)
    assert not later[1].breaker.closed, "whoever comes later knows it too"
    everyone[2][1].back.set()
    everyone[3][1].back.set()
    for one in (*everyone, later):
        until(lambda one=one: one[1].breaker.closed, "one has found it, and all know")
    until(lambda: not rejoining(), "all threads end")
    assert file.stat().st_size == 3 * 24


def test_one_ping_per_pause_however_many_processes_there_are(tmp_path: Path) -> None:
    everyone = [shared(tmp_path / "lost", seconds=1000.0)[0] for _ in range(8)]
    everyone[0].breaker.trip()
    assert not any(patient.breaker.closed for patient in everyone)  # now all of them look after it
    until(lambda: sum(patient.pings for patient in everyone), "it is pinged at once")
    until(lambda: not rejoining("stallfree-ping"), "there was no answer")
    assert not any(patient.breaker.closed for patient in everyone)
    for patient in everyone:
        patient.breaker.forget()
    until(lambda: not rejoining(), "the thread ends")
    assert sum(patient.pings for patient in everyone) == 1


def test_a_false_alarm_is_over_at_once() -> None:
    """Though the next ping would be far away."""
    patient = Patient(seconds=1000.0)
    patient.back.set()
    patient.breaker.trip()
    until(lambda: patient.breaker.closed, "it closes")
    assert patient.pings == 1
    patient.breaker.trip()
    assert not patient.breaker.closed, "soon after that it is not pinged at once"
    patient.breaker.forget()


def test_a_bad_link_is_known_to_those_who_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch has workers of its own, and pings go through: the waits grow rare all the same."""
    monkeypatch.setattr(module, "_SOON", 1e9)
    pauses = []
    for _ in range(4):
        (worker,) = shared(tmp_path / "lost")
        worker.back.set()
        until(lambda worker=worker: worker.breaker.closed, "it closes")
        worker.breaker.trip()
        pauses.append(worker.breaker.pause)
        worker.breaker.forget()
    assert pauses == [0.001, 0.002, 0.004, 0.008]


@pytest.mark.parametrize("other", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("due", [math.nan, math.inf, -1.0])
def test_whatever_stands_in_the_file_heals(due: float, other: float, tmp_path: Path) -> None:
    """As a torn number would, or one of another clock."""
    file = tmp_path / "lost"
    (patient,) = shared(file)
    patient.breaker._cells[:] = memoryview(struct.pack("ddd", due, other, other)).cast("d")
    assert not patient.breaker.closed
    assert patient.breaker.pause == 0.001
    until(lambda: patient.pings > 2, "it is pinged at once, and again")
    patient.back.set()
    until(lambda: patient.breaker.closed, "it closes")
    patient.breaker._cells[2] = other
    patient.breaker.trip()
    assert patient.breaker.pause == 0.001
    patient.breaker.forget()


def test_a_process_that_dies_while_it_pings_leaves_it_to_the_others(tmp_path: Path) -> None:
    (patient,) = shared(tmp_path / "lost")

    def die() -> None:
        patient.breaker._ping = lambda: os.kill(os.getpid(), signal.SIGKILL)
        patient.breaker.trip()
        threading.Event().wait()

    child = Child(die)
    assert child.wait() == -signal.SIGKILL
    assert not patient.breaker.closed
    patient.back.set()
    until(lambda: patient.breaker.closed, "it closes")


def test_who_leaves_does_not_touch_what_others_know(tmp_path: Path) -> None:
    (stays,), (leaves,) = (shared(tmp_path / "lost", seconds=1000.0) for _ in range(2))
    leaves.breaker.forget()
    leaves.breaker.trip()
    assert stays.breaker.closed
    assert not leaves.breaker.closed
    assert not rejoining()


def test_where_no_file_can_be_each_process_has_its_own(tmp_path: Path) -> None:
    (one,), (other,) = (shared(tmp_path / "not there" / "lost", seconds=1000.0) for _ in range(2))
    one.breaker.trip()
    assert not one.breaker.closed
    assert other.breaker.closed
    one.breaker.forget()
