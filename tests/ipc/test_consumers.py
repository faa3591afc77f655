"""Messages between a server and its consumers: complete and in order, also with slow or dead consumers."""

from __future__ import annotations

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
from hypothesis import given
from hypothesis import strategies as st

import stallfree as sf
from children import Child, Holder
from stallfree.ipc import sockets
from stallfree.ipc.consumers import (
    HELLO,
    VISITOR,
    Connection,
    Gone,
    Leases,
    Message,
    Peer,
    Server,
    pack,
    request,
    unpack,
)
from stallfree.ipc.folders import SharedFolder

PATIENCE = 60.0
VERSION = 4
DATA, QUESTION, ANSWER = 7, 8, 9

int64 = st.integers(-(2**63), 2**63 - 1)


class Serving:
    """A server that is driven step by step by one thread."""

    def __init__(self, folder: Path) -> None:
        self.poller = select.epoll()
        self.server = Server(sockets.listen(folder), VERSION, "test", self.poller)
        self.received: list[tuple[Peer, Message | None]] = []

    def until(self, count: int) -> list[tuple[Peer, Message | None]]:
        """Serve until the given number of messages has arrived; returns all messages."""
        deadline = time.monotonic() + PATIENCE
        while len(self.received) < count:
            assert time.monotonic() < deadline
            for peer, message in self.server.receive(self.poller.poll(0.1)):
                self.received.append((peer, message))
        return self.received


@pytest.fixture
def folder() -> Iterator[Path]:
    shared = SharedFolder("consumers", initialize=lambda _: None)
    yield shared.path
    shared.close()


@pytest.fixture
def serving(folder: Path) -> Iterator[Serving]:
    made = Serving(folder)
    yield made
    made.server.close()
    made.server.close()
    made.poller.close()


def connected(folder: Path, number: int = 0) -> Connection:
    made = Connection.open(folder, VERSION, number)
    assert made is not None
    return made


def received(connection: Connection) -> Message:
    message = connection.receive(time.monotonic() + PATIENCE)
    assert message is not None
    return message


@given(kind=int64, serial=int64, number=int64, value=int64, body=st.binary(max_size=50))
def test_messages_are_what_was_sent(kind: int, serial: int, number: int, value: int, body: bytes) -> None:
    assert unpack(bytearray(pack(kind, serial, number, value, body))) == (kind, serial, number, value, body)


@pytest.mark.parametrize("seed", range(2))
def test_messages_cut_anywhere(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([0, 0, 10, 1000, 4000, 4048, 4096, 5000, 70_000]) for _ in range(150)]
    sent = [Message(DATA, n, -n, n % 3, chance.randbytes(size)) for n, size in enumerate(sizes)]
    one, other = socket.socketpair()
    through, last = socket.socketpair()
    sender, receiver, got = Connection(one, False), Connection(last, False), []
    for message in sent:
        sender.send(message.kind, message.serial, message.number, message.value, bytes(message.body))
    while len(got) < len(sent):
        sender.channel.flush()
        through.sendall(other.recv(chance.choice([1, 7, 39, 40, 100, 5000])))
        while (found := receiver.receive()) is not None:
            got.append(found)
    assert got == sent
    assert not receiver.ended
    through.close()
    assert receiver.ended
    with pytest.raises(Gone):
        receiver.receive()
    for end in (receiver, receiver, sender, other):
        end.close()


def test_an_end_that_does_not_read_holds_nobody_up(serving: Serving, folder: Path) -> None:
    """Data that cannot be sent yet is queued; data for an ended process is lost."""
    slow = connected(folder)
    ((peer, _),) = serving.until(1)
    bodies = [bytes([number]) * 100_000 for number in range(20)]
    for number, body in enumerate(bodies):
        serving.server.send(peer, DATA, number=number, body=body)
    assert peer.channel.writing
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            for _ in serving.server.receive(serving.poller.poll(0.001)):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    assert [bytes(received(slow).body) for _ in bodies] == bodies
    done.set()
    thread.join()
    slow.close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as some scripts do
    serving.server.send(peer, DATA)
    signal.signal(signal.SIGPIPE, before)
    assert serving.until(2)[1] == (peer, None)
    assert serving.server.peers == set()


def test_nothing_is_received_on_a_connection_that_is_closed() -> None:
    """Also in a thread that was about to receive: the descriptor may belong to another file by then."""
    one, other = (Connection(end, False) for end in socket.socketpair())
    descriptor = other.channel.fileno()
    other.close()
    reused = os.memfd_create("reused")
    os.dup2(reused, descriptor)
    with pytest.raises(Gone):
        other.receive()
    other.send(DATA)
    assert other.ended
    assert os.fstat(reused).st_size == 0
    os.close(descriptor)
    if descriptor != reused:
        os.close(reused)
    one.close()


def test_a_folder_with_a_long_name() -> None:
    """A socket address has room for 107 bytes; the path of a folder may be longer."""
    shared = SharedFolder("f" * 110, initialize=lambda _: None)
    serving = Serving(shared.path)
    connection = connected(shared.path, 5)
    ((peer, hello),) = serving.until(1)
    assert (peer.pid, hello) == (os.getpid(), Message(HELLO, VERSION, 5))
    connection.close()
    serving.server.close()
    serving.poller.close()
    assert Connection.open(shared.path, VERSION) is None
    shared.close()
    assert Connection.open(shared.path, VERSION) is None


# -- how it begins and ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "version"), [(HELLO, VERSION + 1), (DATA, VERSION)])
def test_a_consumer_of_another_release(kind: int, version: int, serving: Serving, folder: Path) -> None:
    found = sockets.connect(folder)
    assert found is not None
    connection = Connection(found, True)
    connection.send(kind, version)
    connection.send(DATA)
    wrong = threading.Thread(target=lambda: serving.until(1))
    wrong.start()
    words = rf"process {os.getpid()} uses version {version} of the test's protocol, this one uses 4: install the same"
    with pytest.raises(sf.StallfreeError, match=words):
        received(connection)
    connection.close()
    well = connected(folder)
    wrong.join()
    assert [message and message.kind for _, message in serving.received] == [HELLO]
    well.close()


def test_an_error_is_raised_by_the_consumer(serving: Serving, folder: Path) -> None:
    connection = connected(folder)
    ((peer, _),) = serving.until(1)
    serving.server.refuse(peer, sf.InputError("give another"))
    assert serving.server.peers == set()
    with pytest.raises(sf.InputError, match="give another"):
        received(connection)
    with pytest.raises(Gone):
        received(connection)
    connection.close()


def test_a_question_needs_no_consumer(serving: Serving, folder: Path) -> None:
    thread = threading.Thread(target=lambda: serving.until(2))
    answers: list[Message | None] = []
    asking = threading.Thread(target=lambda: answers.append(request(folder, VERSION, QUESTION, 3, PATIENCE)))
    thread.start()
    asking.start()
    thread.join()
    (peer, hello), (_, question) = serving.received
    assert hello is not None
    assert (hello.number, question) == (VISITOR, Message(QUESTION, number=3))
    serving.server.send(peer, ANSWER, number=6)
    asking.join()
    assert answers == [Message(ANSWER, number=6)]
    assert serving.until(3)[2] == (peer, None)
    assert request(folder, VERSION, QUESTION, 3, 0.0) is None
    serving.server.close()
    with pytest.raises(Gone):
        request(folder, VERSION, QUESTION, 3, PATIENCE)


def test_messages_of_a_dead_consumer_come_before_its_end(serving: Serving, folder: Path) -> None:
    def consume() -> None:
        connection = connected(folder)
        connection.send(DATA, number=1)
        os.kill(os.getpid(), signal.SIGKILL)

    child = Child(consume)
    found = serving.until(3)
    assert [message and message.kind for _, message in found] == [HELLO, DATA, None]
    assert found[0][0].pid == child.pid
    assert child.wait() == -signal.SIGKILL


def test_a_dead_end_is_found_though_its_connection_is_kept_open(folder: Path) -> None:
    """A process that was started without Python's fork hooks has a copy of the descriptor."""
    kept: list[int] = []

    def serve() -> None:
        serving = Serving(folder)
        os.write(ready, b"x")
        serving.until(1)
        os.kill(os.getpid(), signal.SIGKILL)

    begun, ready = os.pipe()
    child = Child(serve)
    assert os.read(begun, 1) == b"x"
    found = sockets.connect(folder)
    assert found is not None
    connection = Connection(found, True)
    kept.append(os.dup(found.fileno()))
    connection.send(HELLO, VERSION)
    with pytest.raises(Gone):
        received(connection)
    assert connection.ended
    assert child.wait() == -signal.SIGKILL
    connection.close()
    for fd in (begun, ready, *kept):
        os.close(fd)


def test_forked_children_hold_no_end(serving: Serving, folder: Path) -> None:
    connection = connected(folder)
    ((peer, _),) = serving.until(1)
    child = Holder(lambda: connection.close)
    connection.close()
    assert serving.until(2)[1] == (peer, None)
    child.end()


def test_a_peer_that_is_dropped_is_not_served_any_more(serving: Serving, folder: Path) -> None:
    connection = connected(folder)
    for number in range(3):
        connection.send(DATA, number=number)
    seen = []
    deadline = time.monotonic() + PATIENCE
    while len(seen) < 2 and time.monotonic() < deadline:
        for peer, message in serving.server.receive(serving.poller.poll(0.1)):
            seen.append(message)
            if len(seen) == 2:
                serving.server.drop(peer)
    assert [message and message.kind for message in seen] == [HELLO, DATA]
    with pytest.raises(Gone):
        received(connection)
    connection.close()


def test_a_wait_ends_when_no_more_consumers_are_accepted(serving: Serving, folder: Path) -> None:
    ready: list[list[tuple[int, int]]] = []
    thread = threading.Thread(target=lambda: ready.append(serving.poller.poll()))
    thread.start()
    serving.server.stop_listening()
    thread.join(PATIENCE)
    assert ready
    assert list(serving.server.receive(ready[0])) == []
    assert Connection.open(folder, VERSION) is None


# -- leases -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("grl"), st.integers(0, 3), st.integers(0, 3))))
def test_leases(steps: list[tuple[str, int, int]]) -> None:
    """Compares the leases with a set of all pairs."""
    leases, pairs = Leases(), set[tuple[int, int]]()
    for what, batch, consumer in steps:
        held = {each for each, _ in pairs}
        if what == "g":
            leases.grant(batch, consumer)
            pairs.add((batch, consumer))
        elif what == "r":
            pairs.discard((batch, consumer))
            assert leases.release(batch, consumer) == (batch in held - {each for each, _ in pairs})
        else:
            pairs = {pair for pair in pairs if pair[1] != consumer}
            assert sorted(leases.leave(consumer)) == sorted(held - {each for each, _ in pairs})
        for each in range(4):
            assert leases.holders(each) == {holder for number, holder in pairs if number == each}
