"""Each event of `ProcessPrefetcher` is needed, on a simulated device with delays, in two processes."""

from __future__ import annotations

import itertools
import mmap
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import PATIENCE, read_stamp, stamped

from children import Child
from stallfree.device import consumer as consumer_module
from stallfree.device import producer
from stallfree.device.consumer import Consumer
from stallfree.device.producer import Producer, Setup, produce
from stallfree.device.slots import OpenSlots, SharedHost
from stallfree.ipc.folders import SharedFolder
from stallfree.ipc.process import Parent
from stallfree.ipc.sockets import listen

BATCHES = 40
COPY_SECONDS, STEP_SECONDS = 0.0005, 0.002


class LateMemory(SharedHost):
    """Host memory that behaves like a device's: copies, fills and events are executed later, in a stream.

    An event is two numbers that all processes see: how often it was recorded, and how often that was reached.
    """

    def __init__(self, _: torch.device, folder: Path) -> None:
        super().__init__(folder)
        with (folder / "events").open("r+b") as file:
            self.events = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self.number = itertools.count()
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.stream = threading.Thread(target=self.run, daemon=True)
        self.stream.start()

    def run(self) -> None:
        while (todo := self.work.get()) is not None:
            todo()

    def end(self) -> None:
        self.work.put(None)
        self.stream.join()

    def new_event(self) -> int:
        return next(self.number)

    def record(self, event: int) -> None:
        self.events[2 * event] += 1
        self.work.put(lambda count=self.events[2 * event]: self.reach(event, count))  # type: ignore[misc]

    def reach(self, event: int, count: int) -> None:
        self.events[2 * event + 1] = count

    def wait(self, event: int) -> None:
        self.work.put(lambda count=self.events[2 * event]: self.sleep_until(event, count))  # type: ignore[misc]

    def finish(self, event: int) -> None:
        self.sleep_until(event, self.events[2 * event])

    def sleep_until(self, event: int, count: int) -> None:
        while self.events[2 * event + 1] < count:
            time.sleep(0.0001)

    def reached(self, event: int) -> bool:
        return self.events[2 * event + 1] >= self.events[2 * event]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def do() -> None:
            half = len(target) // 2
            np.copyto(target[:half].numpy(), source[:half].numpy())
            time.sleep(COPY_SECONDS)
            np.copyto(target[half:].numpy(), source[half:].numpy())

        self.work.put(do)

    def share_event(self, event: int) -> int:
        return event

    def open_event(self, handle: int) -> int:
        return handle


def batches() -> Iterator[Any]:
    """A loader."""
    return (stamped(0, number) for number in range(BATCHES))


@contextmanager
def served(consumers: int) -> Iterator[Path]:
    """The process, and the folder of its socket."""
    shared = SharedFolder(f"prefetch-guards-{os.getpid()}", initialize=lambda _: None)
    (shared.path / "events").write_bytes(bytes(4096))
    ours, theirs = socket.socketpair()
    listener = listen(shared.path)

    def run() -> None:
        ours.close()
        torch.set_num_threads(1)  # those of the parent are not here
        produce(
            Parent(theirs, os.getppid(), True), listener, Setup(batches, torch.device("cpu"), 2, consumers, shared.path)
        )  # type: ignore[arg-type]

    child = Child(run)
    listener.close()
    theirs.close()
    yield shared.path
    ours.close()
    assert child.wait() == 0
    shared.close()


def train(consumers: int) -> list[str]:
    """A training loop that submits its steps to the device and continues; returns the wrong values found."""
    wrong: list[str] = []
    with served(consumers) as folder:
        all_of_them = [
            Consumer(folder, number, consumers, torch.device("cpu"), PATIENCE) for number in range(consumers)
        ]
        passes = [iter(each) for each in all_of_them]
        for number, got in enumerate(zip(*passes, strict=True)):
            for consumer, batch in zip(all_of_them, got, strict=True):
                memory_of(consumer).work.put(lambda batch=batch, number=number: step(batch, number, wrong))  # type: ignore[misc]
        for consumer in all_of_them:
            memory = memory_of(consumer)
            consumer.close()
            memory.end()
        assert number == BATCHES - 1
    return wrong


def memory_of(consumer: Consumer) -> LateMemory:
    """The device as seen by a consumer."""
    assert consumer._link is not None
    memory = consumer._link.slots.memory
    assert isinstance(memory, LateMemory)
    return memory


def step(batch: Any, number: int, wrong: list[str]) -> None:
    """Work of the device on a batch, which must not change meanwhile."""
    try:
        assert read_stamp(batch) == (0, number)
        time.sleep(STEP_SECONDS)
        assert read_stamp(batch) == (0, number)
    except AssertionError as error:
        wrong.append(str(error))


class Hasty(LateMemory):
    """Does not wait until a batch is complete."""

    def wait(self, event: int) -> None:
        pass

    def reached(self, event: int) -> bool:
        return True


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, and in those forked from it."""
    monkeypatch.setattr(consumer_module, "memory_of", LateMemory)
    monkeypatch.setattr(producer, "memory_of", LateMemory)


def test_no_step_sees_a_batch_too_early_or_too_late() -> None:
    assert train(2) == []


@pytest.mark.parametrize(
    ("consumers", "kind", "guard"),
    [
        (1, LateMemory, "wait"),  # of the copies for the steps
        (2, OpenSlots, "release"),  # where the steps with a batch end
        (2, Producer, "_await_consumers"),  # for the steps of all
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_each_guard_is_needed(consumers: int, kind: type[Any], guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, guard, lambda *_: True)
    assert any(train(consumers) for _ in range(10))  # on a busy machine the missing guard does not always show


def test_a_batch_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_module, "memory_of", Hasty)
    monkeypatch.setattr(sys.modules[__name__], "COPY_SECONDS", 10 * STEP_SECONDS)
    assert train(1)
