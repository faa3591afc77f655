"""A forked child does not keep the ends of its parent's connections open."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from children import Child, Holder
from stallfree.shared.closing import forget, keep_from_children


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    forget(ours.fileno())
    ours.close()
    theirs.close()


def points_to(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def test_the_other_end_hears_of_the_end_though_a_child_lives(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    keep_from_children(ours.fileno())
    child = Holder(lambda: lambda: None)
    forget(ours.fileno())
    ours.close()
    assert theirs.recv(1) == b""
    child.end()


def test_without_it_the_other_end_does_not_hear_of_it(pair: tuple[socket.socket, socket.socket]) -> None:
    """So that the test above shows something."""
    ours, theirs = pair
    child = Holder(lambda: lambda: None)
    ours.close()
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    child.end()
    assert theirs.recv(1) == b""


def test_a_child_has_nothing_in_its_place(pair: tuple[socket.socket, socket.socket]) -> None:
    """Objects that it inherited may close the number; that is not another file's by then."""
    ours, theirs = pair
    keep_from_children(ours.fileno())
    before = set(os.listdir("/proc/self/fd"))

    def child() -> None:
        assert points_to(ours.fileno()) == "/dev/null"
        assert not os.get_inheritable(ours.fileno())
        assert points_to(theirs.fileno()).startswith("socket:")
        assert set(os.listdir("/proc/self/fd")) == before
        ours.close()

        def grandchild() -> None:
            assert points_to(theirs.fileno()).startswith("socket:")

        with open(os.devnull, "rb") as file:  # takes the lowest number, which is the one just closed
            keep_from_children(theirs.fileno())
            forget(theirs.fileno())
            assert Child(grandchild).wait() == 0
            assert points_to(file.fileno()) == "/dev/null"

    assert Child(child).wait() == 0
    ours.sendall(b"x")
    assert theirs.recv(1) == b"x"


def test_what_is_forgotten_is_inherited(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    keep_from_children(ours.fileno())
    keep_from_children(theirs.fileno())
    forget(ours.fileno())
    forget(ours.fileno())

    def child() -> None:
        assert points_to(ours.fileno()).startswith("socket:")
        assert points_to(theirs.fileno()) == "/dev/null"

    assert Child(child).wait() == 0
    forget(theirs.fileno())


def test_a_child_keeps_from_its_own_children(pair: tuple[socket.socket, socket.socket]) -> None:
    """What the parent listed is not on the child's list: the number may be another file's there."""
    ours, theirs = pair
    keep_from_children(ours.fileno())

    def child() -> None:
        os.dup2(theirs.fileno(), ours.fileno())

        def grandchild() -> None:
            assert points_to(ours.fileno()).startswith("socket:")

        assert Child(grandchild).wait() == 0

    assert Child(child).wait() == 0
