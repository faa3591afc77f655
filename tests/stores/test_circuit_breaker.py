"""The breaker: opens at once, closes when the server answers again, and leaves no thread."""

from __future__ import annotations

import math
import os
import signal
import struct
import threading
from pathlib import Path

import pytest

from children import Child
from redis_servers import until
from stallfree.stores import circuit_breaker as module
from stallfree.stores.circuit_breaker import CircuitBreaker, shared_cells


class Patient:
    """A server that answers pings once `back` is set."""

    def __init__(self, seconds: float = 0.001) -> None:
        self.pings = 0
        self.back = threading.Event()
        self.breaker = CircuitBreaker(self.ping, seconds)

    def ping(self) -> None:
        self.pings += 1
        if not self.back.is_set():
            raise ConnectionRefusedError


def pings_under_way() -> list[threading.Thread]:
    """The threads of all breakers."""
    return [thread for thread in threading.enumerate() if thread.name == "stallfree-ping"]


def test_it_opens_at_once_and_closes_when_the_server_is_back() -> None:
    patient = Patient()
    for trip in (1, 2):
        patient.back.clear()
        patient.pings = 0
        patient.breaker.trip()
        assert not patient.breaker.closed
        assert patient.breaker.trips == trip
        until(lambda: not patient.breaker.closed and patient.pings > 3, "it pings")
        assert not patient.breaker.closed
        patient.back.set()
        until(lambda: patient.breaker.closed, "it closes")
        until(lambda: not pings_under_way(), "its thread ends")


def test_it_opens_once_however_many_threads_fail() -> None:
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
    patient.back.set()
    until(lambda: patient.breaker.closed, "it closes")


def test_a_server_that_fails_again_soon_is_pinged_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(module, "_SOON", 0.0)  # as if no request had failed for long
    patient.breaker.trip()
    assert patient.breaker.pause == 0.001
    until(lambda: patient.breaker.closed, "it closes")


def test_a_single_failure_of_a_server_that_answers_is_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the next ping would be far away."""
    monkeypatch.setattr(module, "_SOON", 1e9)
    patient = Patient(seconds=1000.0)
    patient.back.set()
    patient.breaker.trip()
    until(lambda: patient.breaker.closed, "it closes")
    assert patient.pings == 1
    patient.breaker.trip()
    assert not patient.breaker.closed, "soon after that it is not pinged at once"
    assert not pings_under_way()


def test_no_ping_begins_while_one_is_under_way() -> None:
    """One that takes longer than the pause, as of a name server that does not answer."""
    entered, leave = threading.Event(), threading.Event()
    pings = []

    def ping() -> None:
        pings.append(0)
        entered.set()
        leave.wait()
        raise ConnectionRefusedError

    breaker = CircuitBreaker(ping, 1e-6)
    breaker.trip()
    assert not breaker.closed
    assert entered.wait(60)
    assert not any(breaker.closed for _ in range(1000))
    assert len(pings) == len(pings_under_way()) == 1
    leave.set()
    until(lambda: not breaker.closed and len(pings) > 1, "the next one begins")
    breaker.forget()
    until(lambda: not pings_under_way(), "the threads end")


def test_once_forgotten_it_stays_open_without_pings() -> None:
    patient = Patient()
    patient.back.set()
    patient.breaker.trip()
    patient.breaker.forget()
    patient.breaker.trip()
    assert not any(patient.breaker.closed for _ in range(10))
    assert not pings_under_way()
    assert not patient.pings


# --- processes that share it ----------------------------------------------------------------------------------------


def test_a_forked_child_and_its_parent_share_it() -> None:
    patient = Patient()
    patient.breaker.trip()

    def child() -> None:
        assert not patient.breaker.closed
        assert patient.breaker.trips == 1
        patient.back.set()
        until(lambda: patient.breaker.closed, "it closes in the child")
        until(lambda: not pings_under_way(), "the child's thread ends")

    assert Child(child).wait() == 0
    assert not patient.back.is_set()
    assert patient.breaker.closed, "the child's ping closed it"
    assert not patient.pings

    patient.breaker._seconds = 1000.0

    def lose() -> None:
        patient.breaker.trip()
        assert patient.breaker.trips == 2

    assert Child(lose).wait() == 0
    assert not patient.breaker.closed
    assert patient.breaker.trips == 1


def shared(file: Path, count: int = 1, seconds: float = 0.001) -> list[Patient]:
    """Servers as a process sees them that has `file` in common with others."""
    patients = [Patient(seconds) for _ in range(count)]
    for patient, cells in zip(patients, shared_cells(file, count), strict=True):
        patient.breaker.share(cells)
    return patients


def test_processes_share_it_through_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lost"
    everyone = [shared(file, 3) for _ in range(4)]
    everyone[0][1].breaker.trip()
    for one in everyone:
        assert [patient.breaker.closed for patient in one] == [True, False, True]
    assert [one[1].breaker.trips for one in everyone] == [1, 0, 0, 0]
    later = shared(file, 3)
    assert not later[1].breaker.closed, "also with a process that attaches later"
    everyone[2][1].back.set()
    until(lambda: everyone[2][1].breaker.closed, "a ping closes it")
    for one in (*everyone, later):
        assert [patient.breaker.closed for patient in one] == [True] * 3
    until(lambda: not pings_under_way(), "all threads end")
    assert file.stat().st_size == 3 * 24


def test_one_ping_per_pause_however_many_processes_there_are(tmp_path: Path) -> None:
    everyone = [shared(tmp_path / "lost", seconds=1000.0)[0] for _ in range(8)]
    everyone[0].breaker.trip()
    for _ in range(10):
        assert not any(patient.breaker.closed for patient in everyone)
    until(lambda: not pings_under_way(), "there was no answer")
    for _ in range(10):
        assert not any(patient.breaker.closed for patient in everyone)
    assert not pings_under_way()
    assert sum(patient.pings for patient in everyone) == 1


@pytest.mark.parametrize(("due", "other"), [(math.nan, 1e300), (math.inf, math.nan), (-1.0, math.inf), (1e300, -1.0)])
def test_whatever_stands_in_the_file_heals(due: float, other: float, tmp_path: Path) -> None:
    """As a torn number would, or one of another clock."""
    (patient,) = shared(tmp_path / "lost")
    patient.breaker._cells[:] = memoryview(struct.pack("ddd", due, other, other)).cast("d")
    assert not patient.breaker.closed
    assert patient.breaker.pause == 0.001
    until(lambda: not patient.breaker.closed and patient.pings > 2, "it is pinged at once, and again")
    patient.back.set()
    until(lambda: patient.breaker.closed, "it closes")
    patient.breaker._cells[2] = other
    patient.breaker.trip()
    assert patient.breaker.pause == 0.001


def test_a_process_that_dies_while_it_pings_leaves_it_to_the_others(tmp_path: Path) -> None:
    (patient,) = shared(tmp_path / "lost")

    def die() -> None:
        patient.breaker._ping = lambda: os.kill(os.getpid(), signal.SIGKILL)
        patient.breaker.trip()
        until(lambda: patient.breaker.closed, "the ping kills this process")

    child = Child(die)
    assert child.wait() == -signal.SIGKILL
    assert not patient.breaker.closed
    patient.back.set()
    until(lambda: patient.breaker.closed, "it closes")
