"""A forked child does not keep its parent's connections open, and does not end its parent's objects."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from multiprocessing.resource_tracker import _resource_tracker as TRACKER

import pytest

from children import Child, Holder
from stallfree.ipc.fork_guard import Owner, finalize, keep_from_children


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def points_to(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def open_here() -> set[str]:
    """The descriptors of this process. A forked child has none of `multiprocessing`'s tracker from Python 3.14 on."""
    numbers = os.listdir("/proc/self/fd")  # and one of its own, which is closed by then
    return {number for number in numbers if os.path.lexists(f"/proc/self/fd/{number}")} - {str(TRACKER._fd)}


def test_the_other_end_receives_the_end_though_a_child_lives(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    keep_from_children(ours)
    child = Holder(lambda: lambda: None)
    ours.close()
    assert theirs.recv(1) == b""
    child.end()


def test_a_child_has_nothing_in_its_place(pair: tuple[socket.socket, socket.socket]) -> None:
    """Inherited objects may close the number, which must not belong to another file by then."""
    ours, theirs = pair
    keep_from_children(ours)
    before = open_here()

    def child() -> None:
        assert points_to(ours.fileno()) == "/dev/null"
        assert not os.get_inheritable(ours.fileno())
        assert points_to(theirs.fileno()).startswith("socket:")
        assert open_here() == before
        ours.close()
        with open(os.devnull, "rb"):  # takes the lowest number, which is the one just closed
            assert Child(lambda: None).wait() == 0

    assert Child(child).wait() == 0
    ours.sendall(b"x")
    assert theirs.recv(1) == b"x"


def test_what_is_closed_or_freed_is_forgotten(pair: tuple[socket.socket, socket.socket]) -> None:
    """The number may belong to another file by then."""
    closed, freed = socket.socketpair()
    keep_from_children(closed, freed)
    numbers = closed.fileno(), freed.fileno()
    closed.close()
    del freed
    reused = [os.open("/dev/zero", os.O_RDONLY) for _ in numbers]
    assert sorted(reused) == sorted(numbers)

    def child() -> None:
        assert {points_to(number) for number in numbers} == {"/dev/zero"}

    assert Child(child).wait() == 0
    for fd in reused:
        os.close(fd)


def test_a_child_keeps_from_its_own_children(pair: tuple[socket.socket, socket.socket]) -> None:
    """The parent's list does not apply to the child's children."""
    ours, theirs = pair
    keep_from_children(ours)

    def child() -> None:
        os.dup2(theirs.fileno(), ours.fileno())

        def grandchild() -> None:
            assert points_to(ours.fileno()).startswith("socket:")

        assert Child(grandchild).wait() == 0

    assert Child(child).wait() == 0


class Thing:
    """Supports weak references."""


def test_what_a_finalizer_ends_is_the_parents() -> None:
    calls: list[str] = []
    thing, owner = Thing(), Owner()
    end = finalize(thing, calls.append, "ended")

    def child() -> None:
        assert not owner.is_here
        end()
        assert not end.alive
        assert calls == []

    assert Child(child).wait() == 0
    assert owner.is_here
    assert end.alive
    del thing
    assert calls == ["ended"]
