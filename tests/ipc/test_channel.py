"""Messages between processes: complete and in order, also with slow or dead ones, and never held up by them."""

import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stallfree as sf
from children import Child, Holder
from stallfree.ipc.channel import ERROR, Channel, Connection, Message, Server, pack, pack_error
from stallfree.ipc.folders import SharedFolder

PATIENCE = 60.0
DATA = 7

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Channel((pair := socket.socketpair())[0]), Channel(pair[1])
    yield made
    for channel in made:
        channel.close()
        channel.close()


def received(channel: Channel) -> bytes:
    message = channel.receive_by(time.monotonic() + PATIENCE)
    assert message is not None
    return bytes(message)


def test_sending_does_not_wait(ends: Ends) -> None:
    channel, other = ends
    messages = [bytes([k]) * 1_000_000 for k in range(5)]
    channel.send(*messages)
    channel.finish()
    assert channel.pending
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.extend(received(other) for _ in messages))
    reader.start()
    while channel.pending:
        channel.wait(PATIENCE)
    reader.join()
    assert got == messages
    with pytest.raises(EOFError):
        other.receive()


def test_messages_cut_anywhere(ends: Ends) -> None:
    chance = random.Random(0)
    sizes = [chance.choice([0, 0, 10, 1000, 4000, 4088, 4096, 5000, 70_000]) for _ in range(200)]
    sent = [chance.randbytes(size) for size in sizes]
    through, last = socket.socketpair()
    sender, receiver, got = Channel(through), ends[1], list[bytes]()
    sender.send(*sent)
    raw = socket.socket(fileno=os.dup(ends[0].fileno()))
    assert receiver.receive() is None
    assert not receiver.wait(0.0)
    assert receiver.receive_by(time.monotonic()) is None
    while len(got) < len(sent):
        sender.flush()
        raw.sendall(last.recv(chance.choice([1, 7, 39, 40, 100, 5000])))
        while (message := receiver.receive()) is not None:
            got.append(bytes(message))
    assert got == sent
    for end in (raw, sender, last):
        end.close()


@pytest.mark.parametrize("cut", [3, 10])
def test_an_end_in_the_middle_of_a_message(ends: Ends, cut: int) -> None:
    channel, other = ends
    other.send_all(b"whole")
    os.write(other.fileno(), ((5).to_bytes(8, "little") + b"hello")[:cut])
    channel.send(b"unread")  # the end of a process that has not read everything is an error to the other
    other.close()
    assert channel.receive() == b"whole"
    with pytest.raises(EOFError):
        list(iter(channel.receive, b"more"))
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as some scripts do
    channel.send(b"into the void")
    with pytest.raises(OSError, match=r"."):
        channel.send_all(b"into the void")
    signal.signal(signal.SIGPIPE, before)
    assert not channel.pending


def test_nothing_is_received_on_a_channel_that_is_closed(ends: Ends) -> None:
    """Also in a thread that was about to receive: the descriptor may belong to another file by then."""
    channel, _ = ends
    descriptor = channel.fileno()
    channel.close()
    reused = os.memfd_create("reused")
    os.dup2(reused, descriptor)
    with pytest.raises(EOFError):
        channel.receive()
    channel.send(b"x")
    assert os.fstat(reused).st_size == 0
    for fd in {descriptor, reused}:
        os.close(fd)


def test_forked_children_hold_no_end(ends: Ends) -> None:
    """A child has /dev/null in its place: inherited objects may close the number, which must not be another file's."""
    channel, other = ends

    def begin() -> object:
        assert os.readlink(f"/proc/self/fd/{channel.fileno()}") == "/dev/null"
        assert not os.get_inheritable(channel.fileno())
        channel.send(b"from the child")
        channel.close()
        with open(os.devnull, "rb"):  # takes the lowest number, which is the one just closed
            assert Child(lambda: None).wait() == 0
        return lambda: None

    child = Holder(begin)  # type: ignore[arg-type]
    channel.send(b"from the parent")
    assert received(other) == b"from the parent"
    channel.close()
    with pytest.raises(EOFError):
        received(other)
    child.end()


# -- several processes ------------------------------------------------------------------------------------------------


class Serving:
    """A server that is driven step by step by one thread."""

    def __init__(self, folder: Path) -> None:
        self.server = Server(folder)
        self.received: list[tuple[Connection, Message | None]] = []

    def until(self, count: int) -> list[tuple[Connection, Message | None]]:
        """Serve until the given number of messages has arrived; returns all messages."""
        deadline = time.monotonic() + PATIENCE
        while len(self.received) < count:
            assert time.monotonic() < deadline
            poller = select.poll()
            for fd, events in self.server.descriptors:
                poller.register(fd, events)
            poller.poll(100)
            self.received.extend(self.server.receive())
        return self.received


@pytest.fixture
def folder() -> Iterator[Path]:
    """A socket address has room for 107 bytes; the path of a folder may be longer."""
    shared = SharedFolder("f" * 110, initialize=lambda _: None)
    yield shared.path
    shared.close()


@pytest.fixture
def serving(folder: Path) -> Iterator[Serving]:
    made = Serving(folder)
    yield made
    made.server.close()
    made.server.close()


def connected(folder: Path, number: int = 0) -> Connection:
    made = Connection.open(folder)
    assert made is not None
    made.send(pack(DATA, number=number))
    return made


def answer(connection: Connection) -> Message:
    message = connection.next_message(time.monotonic() + PATIENCE)
    assert message is not None
    return message


def test_where_nobody_listens(folder: Path) -> None:
    assert Connection.open(folder) is None
    assert Connection.open(folder / "missing") is None
    serving = Serving(folder)
    connection = connected(folder, 5)
    ((peer, hello),) = serving.until(1)
    assert (peer.pid, connection.pid, hello) == (os.getpid(), os.getpid(), Message(DATA, number=5))
    peer.send(pack(ERROR, body=pack_error(sf.InputError("give another"))))
    serving.server.close()
    with pytest.raises(sf.InputError, match="give another"):
        answer(connection)
    with pytest.raises(EOFError):
        answer(connection)
    connection.close()
    assert Connection.open(folder) is None


def test_one_that_does_not_read_holds_nobody_up(serving: Serving, folder: Path) -> None:
    slow = connected(folder)
    ((peer, _),) = serving.until(1)
    bodies = [bytes([number]) * 100_000 for number in range(20)]
    peer.send(*(pack(DATA, body=body) for body in bodies))
    assert peer.pending
    thread = threading.Thread(target=serving.until, args=(2,))
    thread.start()
    assert [bytes(answer(slow).body) for _ in bodies] == bodies
    slow.close()
    thread.join()
    assert serving.received[1:] == [(peer, None)]
    assert serving.server.peers == set()


def test_messages_of_a_dead_process_come_before_its_end(serving: Serving, folder: Path) -> None:
    def consume() -> None:
        connected(folder).send(pack(DATA, number=1))
        os.kill(os.getpid(), signal.SIGKILL)

    child = Child(consume)
    found = serving.until(3)
    assert [message and message.number for _, message in found] == [0, 1, None]
    assert found[0][0].pid == child.pid
    assert child.wait() == -signal.SIGKILL


def test_a_process_that_is_dropped_is_not_served_any_more(serving: Serving, folder: Path) -> None:
    connection, seen = connected(folder), []
    connection.send(*(pack(DATA, number=number) for number in (1, 2, 3)))
    deadline = time.monotonic() + PATIENCE
    while len(seen) < 2 and time.monotonic() < deadline:
        for peer, message in serving.server.receive():
            seen.append(message and message.number)
            if len(seen) == 2:
                serving.server.drop(peer)
    assert seen == [0, 1]
    with pytest.raises(EOFError):
        answer(connection)
    connection.close()
