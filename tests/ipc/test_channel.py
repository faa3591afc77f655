"""Messages between processes: complete and in order, also with slow or dead ones, and never held up by them."""

import os
import pickle
import random
import signal
import socket
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import stallfree as sf
from children import PATIENCE, Child, Holder, received, until
from loader_data import Missing, local
from stallfree.errors import lock_held
from stallfree.ipc.channel import ERROR, Channel, Connection, Message, Server, pack, pack_error, unpack_error
from stallfree.ipc.folders import SharedFolder

DATA = 7

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Channel((pair := socket.socketpair())[0]), Channel(pair[1])
    yield made
    for channel in made * 2:
        channel.close()


def test_sending_does_not_wait(ends: Ends) -> None:
    channel, other = ends
    messages = [bytes([k]) * 1_000_000 for k in range(5)]
    channel.send(*messages)
    channel.finish()
    assert channel.pending
    with ThreadPoolExecutor(1) as executor:
        got = executor.submit(lambda: [received(other) for _ in messages])
        while channel.pending:
            channel.wait(PATIENCE)
        assert got.result(PATIENCE) == messages
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


@pytest.fixture
def folder() -> Iterator[Path]:
    """A socket address has room for 107 bytes; the path of a folder may be longer."""
    shared = SharedFolder("f" * 110, initialize=lambda _: None)
    yield shared.path
    shared.close()


def connected(folder: Path, number: int = 0) -> Connection:
    made = Connection.open(folder)
    assert made is not None
    made.send(pack(DATA, number=number))
    return made


def test_a_server_begins_sends_errors_and_ends(folder: Path) -> None:
    assert Connection.open(folder) is Connection.open(folder / "missing") is None
    server = Server(folder)
    connection = connected(folder, 5)
    ((peer, hello),) = until(lambda: list(server.receive()))
    assert (peer.pid, connection.pid, hello) == (os.getpid(), os.getpid(), Message(DATA, number=5))
    peer.send(pack(ERROR, body=pack_error(sf.InputError("give another"))))
    server.close()
    server.close()
    with pytest.raises(sf.InputError, match="give another"):
        connection.next_message(time.monotonic() + PATIENCE)
    with pytest.raises(EOFError):
        connection.next_message()
    connection.close()
    assert Connection.open(folder) is None


def test_a_process_that_is_dropped_is_not_served_any_more(folder: Path) -> None:
    server = Server(folder)
    connection, seen = connected(folder), list[int]()
    connection.send(*(pack(DATA, number=number) for number in (1, 2, 3)))

    def receive() -> bool:
        for peer, message in server.receive():
            assert message is not None
            seen.append(message.number)
            if len(seen) == 2:
                server.drop(peer)
        return len(seen) > 1

    until(receive)
    assert seen == [0, 1]
    with pytest.raises(EOFError):
        connection.next_message(time.monotonic() + PATIENCE)
    connection.close()
    server.close()


WHY = "(an error of a class that cannot be sent from one process to another)"


class Wants(RuntimeError):
    """Cannot be made without an argument."""

    def __new__(cls, needed: int) -> "Wants":
        return super().__new__(cls, needed)


class Slotted(ValueError):
    __slots__ = ("__line", "line")

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line}")
        self.line = self.__line = line


@dataclass(frozen=True)
class Frozen(Exception):
    line: int
    file: str = "a.csv"


class Part:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return dict.fromkeys, (3,)  # which raises


class Holding(RuntimeError):
    """Holds objects that cannot be sent; and its own way to be pickled loses what it was given."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.call, self.part, self.number = lambda: 0, Part(), 7

    def __reduce__(self) -> Any:
        return Holding, ("lost",)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def sent(error: BaseException) -> Any:
    return unpack_error(memoryview(pack_error(error)))


@pytest.mark.parametrize(("error", "fields"), [
    (Missing("/data", "a", tries=3), {"errno": 2, "filename": "/data/a", "tries": 3}), (Wants(3), {}),
    (Slotted(7), {"line": 7, "_Slotted__line": 7}), (Frozen(7), {"line": 7, "file": "a.csv"}),
    (Holding("kept"), {"number": 7}), (KeyError("left label"), {}), (StopIteration(5), {"value": 5}),
    (SystemExit(3), {"code": 3}),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start"), {"start": 0, "reason": "invalid start"}),
    (ImportError("none", name="module"), {"name": "module"}), (urllib.error.URLError("refused"), {"reason": "refused"}),
    (sf.WorkerError("killed", ids=[3, 4]), {"ids": [3, 4], "page": "worker-died"}),
    (lock_held("busy"), {"page": "lock-held"}),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_class_arguments_and_attributes(error: BaseException, fields: dict[str, Any]) -> None:
    back = sent(raised(error))
    assert (type(back), back.args, str(back)) == (type(error), error.args, str(error))
    assert {name: getattr(back, name) for name in fields} == fields


def test_cause_context_notes_and_traceback() -> None:
    error = raised(KeyError("label"), raised(Missing("/data", "a", tries=1)))
    error.add_note("of the user")
    back = sent(error)
    assert back.__notes__[0] == "of the user"
    assert back.__notes__[1].startswith(f"Traceback in process {os.getpid()} (most recent call last):\n")
    assert "in raised" in back.__notes__[1]
    assert (type(back.__cause__), back.__cause__.tries, back.__suppress_context__) == (Missing, 1, True)
    assert "in raised" in back.__cause__.__notes__[0]
    again = sent(back)  # as from a worker through the coordinator of a group to its members
    assert (type(again), again.args, again.__notes__) == (KeyError, ("label",), back.__notes__)
    assert pickle.loads(pickle.dumps(back)).args == ("label",)
    error.__context__, error.__suppress_context__ = ValueError("first"), False
    assert (repr(sent(error).__context__), sent(error).__suppress_context__) == ("ValueError('first')", False)


def test_what_no_other_process_finds_becomes_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class, an argument, one of a group; a class that is missing here alone; an error that has no text."""
    back = sent(raised(local(), ValueError("cause")))
    assert (type(back), back.args) == (sf.BatchError, (f"Hidden: seen {WHY}",))
    assert "in raised" in back.__notes__[0]
    assert repr(back.__cause__) == "ValueError('cause')"
    back = sent(KeyError(local, lambda: 0))
    assert (type(back), back.args[0], back.args[1][:9]) == (KeyError, local, "<function")
    first, second = sent(raised(ExceptionGroup("several", [Missing("/data", "a", tries=2), local()]))).exceptions
    assert (type(first), first.tries) == (Missing, 2)
    assert (type(second), second.args) == (sf.BatchError, (f"Hidden: seen {WHY}",))
    packed = pack_error(raised(Wants(3)))
    monkeypatch.delitem(globals(), "Wants")
    back = unpack_error(packed)
    assert (type(back), back.args) == (sf.BatchError, (f"Wants: 3 {WHY}",))
    silent = type("Silent", (Exception,), {"__str__": lambda self: 1 / 0})
    assert "Silent: (its text cannot be made: ZeroDivisionError)" in str(sent(silent()))
