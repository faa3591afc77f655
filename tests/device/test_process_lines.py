"""Messages arrive whole and in order, however they are cut."""

from __future__ import annotations

import os
import random
import signal
import socket

import pytest

from stallfree.device.crossing import Kind, Line, Message, connect
from stallfree.folders import SharedFolder
from stallfree.sockets import listen


@pytest.mark.parametrize("seed", range(5))
def test_messages_cut_anywhere(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([0, 0, 10, 1000, 4000, 4048, 4096, 5000, 70_000]) for _ in range(150)]
    sent = [Message(Kind.BATCH, n, -n, n % 3, chance.randbytes(size)) for n, size in enumerate(sizes)]
    one, other = socket.socketpair()
    through, last = socket.socketpair()
    teller, line, got = Line(one), Line(last), []
    for message in sent:
        teller.tell(Kind.BATCH, *message[1:])
    while len(got) < len(sent):
        teller.flush()
        through.sendall(other.recv(chance.choice([1, 7, 39, 40, 100, 5000])))
        while (message := line.hear()) is not None:
            got.append(message)
    assert got == sent
    assert not line.ended
    through.close()
    assert line.ended
    with pytest.raises(EOFError):
        line.hear()
    for end in (line, line, teller, other):
        end.close()


def test_who_does_not_read_holds_nobody_up() -> None:
    """What cannot be sent waits; what is sent to an end that is gone vanishes."""
    one, other = map(Line, socket.socketpair())
    bodies = [bytes([number]) * 100_000 for number in range(20)]
    for body in bodies:
        one.tell(Kind.BATCH, body=body)
    assert one.writing
    got = []
    while len(got) < 20:
        one.flush()
        while (message := other.hear()) is not None:
            got.append(message.body)
    assert got == bodies
    assert not one.writing
    other.close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as some scripts do
    one.tell(Kind.BATCH)
    signal.signal(signal.SIGPIPE, before)
    assert not one.writing
    with pytest.raises(EOFError):
        one.hear()
    one.close()


def test_nothing_is_heard_on_a_line_that_is_closed() -> None:
    """Not even by a thread that was about to: the descriptor may be another file's by then."""
    one, other = map(Line, socket.socketpair())
    descriptor = other.fileno()
    other.close()
    reused = os.memfd_create("reused")
    os.dup2(reused, descriptor)
    with pytest.raises(EOFError):
        other.hear()
    other.tell(Kind.BATCH)
    assert os.fstat(reused).st_size == 0
    os.close(descriptor)
    if descriptor != reused:
        os.close(reused)
    one.close()


def test_a_folder_with_a_long_name() -> None:
    """The address of a socket has room for 107 bytes, the path of a folder has more."""
    folder = SharedFolder("f" * 110, initialize=lambda _: None)
    listener = listen(folder.path)
    line = connect(folder.path)
    assert line is not None
    there = Line(listener.accept()[0])
    there.tell(Kind.BATCH, 5)
    assert line.wait(10)
    assert line.hear() == Message(Kind.BATCH, 5)
    for end in (line, there, listener):
        end.close()
    assert connect(folder.path) is None
    folder.close()
    assert connect(folder.path) is None
