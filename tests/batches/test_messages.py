"""Messages arrive complete and unchanged, and the iterating process never waits for one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallfree.batches.messages import (
    FORGET,
    PRIVATE,
    READY,
    WORK,
    Result,
    Task,
    forget_message,
    unpack_result,
    unpack_task,
)
from stallfree.ipc.channel import Channel, receive_message, send_message

int64 = st.integers(-(2**63), 2**63 - 1)


@given(token=int64, number=int64, slot=st.integers(-1, 2**31 - 1), epoch=int64, ids=st.lists(int64, max_size=5))
def test_tasks(token: int, number: int, slot: int, epoch: int, ids: list[int]) -> None:
    kind, task = unpack_task(Task(token, number, slot, epoch, np.array(ids, np.int64)).pack())
    assert kind == WORK
    assert (task.token, task.number, task.slot, task.epoch, task.ids.tolist()) == (token, number, slot, epoch, ids)


def test_forget() -> None:
    kind, task = unpack_task(forget_message(7))
    assert (kind, task.token) == (FORGET, 7)


@given(
    ids=st.lists(int64, max_size=5),
    note=st.binary(max_size=20),
    memory=st.one_of(st.none(), st.binary(min_size=1, max_size=100)),
    counts=st.tuples(*[st.integers(0, 2**63 - 1)] * 4),
    seconds=st.tuples(*[st.floats(0, 1e9)] * 2),
)
def test_results(ids: list[int], note: bytes, memory: bytes | None, counts: Any, seconds: Any) -> None:
    size = len(memory) if memory else 5
    private = None if memory is None else np.frombuffer(memory + b"beyond", np.uint8)
    sent = Result(
        READY if memory is None else PRIVATE, 1, 2, 3, size, *counts[:3], *seconds, counts[3],
        np.array(ids, np.int64), note, private,
    )  # fmt: skip
    got = unpack_result(bytearray(b"".join(sent.pack())))
    for name in ("status", "token", "number", "slot", "size", "hits", "misses", "storage_bytes", "skipped", "note"):
        assert getattr(got, name) == getattr(sent, name)
    assert (got.fetch_seconds, got.prep_seconds) == seconds
    assert got.ids.tolist() == ids
    assert memory is None or (got.memory is not None and got.memory.tobytes() == memory)
    assert (got.memory is None) == (memory is None)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Connection]]:
    ours, theirs = Pipe()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_messages_in_order(ends: tuple[Channel, Connection]) -> None:
    channel, worker = ends
    assert channel.receive() is None
    for size in (1, 3, 70_000, 5):
        send_message(worker.fileno(), [b"a" * size, memoryview(b"b")])
    assert [len(channel.receive() or b"") for _ in range(4)] == [2, 4, 70_001, 6]
    assert channel.receive() is None
    channel.send(b"x" * 10)
    channel.send(b"")
    assert receive_message(worker.fileno()) == b"x" * 10
    assert receive_message(worker.fileno()) == b""


def test_sending_does_not_wait(ends: tuple[Channel, Connection]) -> None:
    channel, worker = ends
    messages = [bytes([k]) * 1_000_000 for k in range(5)]
    for message in messages:
        channel.send(message)
    assert channel.writing
    got: list[bytearray] = []
    reader = threading.Thread(target=lambda: got.extend(receive_message(worker.fileno()) for _ in range(5)))
    reader.start()
    while channel.writing:
        channel.flush()
    reader.join()
    assert got == messages


def test_a_message_that_comes_in_pieces(ends: tuple[Channel, Connection]) -> None:
    channel, worker = ends
    data = b"".join([(5).to_bytes(8, "little"), b"hello", (2).to_bytes(8, "little"), b"yo"])
    got = []
    for at in range(len(data)):
        os.write(worker.fileno(), data[at : at + 1])
        while (message := channel.receive()) is not None:
            got.append(bytes(message))
    assert got == [b"hello", b"yo"]


@pytest.mark.parametrize("cut", [3, 10])
def test_an_end_in_the_middle_of_a_message(ends: tuple[Channel, Connection], cut: int) -> None:
    channel, worker = ends
    send_message(worker.fileno(), [b"whole"])
    os.write(worker.fileno(), ((5).to_bytes(8, "little") + b"hello")[:cut])
    channel.send(b"unread")  # the end of a process that has not read everything is an error to the other
    worker.close()
    assert channel.receive() == b"whole"
    with pytest.raises(EOFError):
        list(iter(channel.receive, b"more"))
    channel.send(b"into the void")
    assert not channel.writing


def test_the_worker_hears_of_the_end(ends: tuple[Channel, Connection]) -> None:
    channel, worker = ends
    channel.close()
    with pytest.raises((EOFError, OSError)):
        receive_message(worker.fileno())
    with pytest.raises(BrokenPipeError):
        send_message(worker.fileno(), [b"x"])
