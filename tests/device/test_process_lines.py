"""Messages arrive whole and in order, however they are cut."""

from __future__ import annotations

import random
import socket

import pytest

from stallfree.device.crossing import BATCH, Line, Message, connect, listen, pack
from stallfree.folders import SharedFolder


@pytest.mark.parametrize("seed", range(5))
def test_messages_cut_anywhere(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([0, 0, 10, 1000, 4000, 4048, 4096, 5000, 70_000]) for _ in range(150)]
    sent = [Message(BATCH, n, -n, n % 3, n * 7, chance.randbytes(size)) for n, size in enumerate(sizes)]
    data = b"".join(pack(*message) for message in sent)
    one, other = socket.socketpair()
    line, got = Line(other), []
    at = 0
    while at < len(data):
        step = chance.choice([1, 7, 47, 48, 100, 5000])
        one.sendall(data[at : at + step])
        at += step
        while (message := line.receive()) is not None:
            got.append(message)
    assert got == sent
    assert not line.ended
    one.close()
    assert line.ended
    with pytest.raises(EOFError):
        line.receive()
    line.close()
    line.close()


def test_who_does_not_read_holds_nobody_up() -> None:
    """What cannot be sent waits; what is sent to an end that is gone vanishes."""
    one, other = map(Line, socket.socketpair())
    bodies = [bytes([number]) * 100_000 for number in range(20)]
    for body in bodies:
        one.send(pack(BATCH, body=body))
    assert one.writing
    got = []
    while len(got) < 20:
        one.flush()
        while (message := other.receive()) is not None:
            got.append(message.body)
    assert got == bodies
    assert not one.writing
    other.close()
    one.send(pack(BATCH))
    assert not one.writing
    with pytest.raises(EOFError):
        one.receive()
    one.close()


def test_a_folder_with_a_long_name() -> None:
    """The address of a socket has room for 107 bytes, the path of a folder has more."""
    folder = SharedFolder("f" * 110, initialize=lambda _: None)
    listener = listen(folder.path)
    line = connect(folder.path)
    there, _ = listener.accept()
    there.send(pack(BATCH, 5))
    assert line.wait(10)
    message = line.receive()
    assert message is not None
    assert message.epoch == 5
    for end in (line, there, listener, folder):
        end.close()
    with pytest.raises(OSError, match="No such file"):
        connect(folder.path)
