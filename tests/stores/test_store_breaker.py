"""The breaker: opens at once, closes when the server is back, and leaves no thread."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from node_tools import until

from children import Child
from stallfree.stores.breaker import Breaker


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


def rejoining() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stallfree-rejoin"]


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
    from stallfree.stores import breaker as module

    monkeypatch.setattr(module, "_SOON", 1e9)  # however slow this machine is
    patient = Patient(seconds=0.001)
    patient.back.set()
    pauses = []
    for _ in range(4):
        patient.breaker.trip()
        pauses.append(patient.breaker.pause)
        until(lambda: patient.breaker.closed, "it closes")
    assert pauses == [0.001, 0.002, 0.004, 0.008]
    monkeypatch.setattr(module, "LONGEST", 0.01)
    for longest in (0.01, 0.01):
        patient.breaker.trip()
        assert patient.breaker.pause == longest
        until(lambda: patient.breaker.closed, "it closes")
    patient.breaker._good_until = 0.0  # as if it had gone well for long
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


def test_a_forked_child_waits_for_the_server_itself() -> None:
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

    from stallfree.stores import breaker as module

    with module._rejoin.lock:  # as if another thread of the parent held it
        process = Child(child)
    assert process.wait() == 0
    assert not patient.breaker.closed, "the parent knows by itself"
    patient.back.set()
    until(lambda: patient.breaker.closed, "it closes in the parent")
