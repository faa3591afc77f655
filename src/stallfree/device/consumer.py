"""A consumer of a `ProcessPrefetcher`: gets the batches that another process has put on the device."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stallfree.device.backend import Event, Stream
from stallfree.device.crossing import (
    ASK_LENGTH,
    ASK_STATE,
    BACK,
    BATCH,
    BEGIN,
    BREAK,
    END,
    ERROR,
    HELLO,
    LAYOUT,
    REFUSED,
    SLOT,
    START,
    WELCOME,
    Builder,
    Layout,
    Line,
    Message,
    attach,
    connect,
    pack,
    raise_error,
)
from stallfree.device.slots import Memory, memory_of, poison
from stallfree.device.staging import send_itself
from stallfree.errors import InputError, ProducerError, StallfreeError, StorageError, WaitError
from stallfree.folders import SharedFolder

_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 0.00005

_warned: set[str] = set()


@dataclass
class _Slot:
    """What a consumer knows of a slot.

    Attributes:
        handles: of its memory and its events, pickled.
        memory: once it was needed.
        events: one is reached when the batch in it is there, one is to be recorded when it is not needed any more.
        layout, views: of the last batch in it.
    """

    handles: bytes
    memory: torch.Tensor | None = None
    events: tuple[Event, ...] = ()
    layout: int = -1
    views: list[torch.Tensor] = field(default_factory=list)


class Consumer:
    """Gets the batches of a `ProcessPrefetcher`, epoch by epoch; each iteration is one.

    Made by `ProcessPrefetcher.consumer`. A pickled one, or one in a forked child, is not connected.

    Attributes:
        number: which consumer it is, from 0 on.
        consumers: how many there are.
        device: that the batches are on.
        timeout: longest wait for a batch, in seconds.
    """

    def __init__(self, folder: Path, number: int, consumers: int, device: torch.device, timeout: float) -> None:
        self.number, self.consumers, self.device, self.timeout = number, consumers, device, timeout
        self._folder = folder
        self.describe_end: Callable[[], str] = str
        self._passes = 0
        self._process = 0  # the one that loads
        self._forget()

    def _forget(self) -> None:
        self._line: Line | None = None
        self._attached: SharedFolder | None = None
        self._memory: Memory | None = None
        self._pid = 0  # the one that is connected
        self._pass: weakref.ref[Pass] | None = None
        self._slots: dict[int, _Slot] = {}
        self._layouts: dict[int, tuple[Layout, Builder]] = {}
        self._oldest = 0

    @property
    def here(self) -> bool:
        """Whether this process is connected."""
        return self._line is not None and self._pid == os.getpid()

    def __iter__(self) -> Pass:
        line = self._connect()
        before = None if self._pass is None else self._pass()
        if before is not None:
            before.close()
        self._passes += 1
        line.send(pack(BEGIN, number=self._passes))
        started = Pass(self, line, self._passes)
        self._pass = weakref.ref(started)
        return started

    def __len__(self) -> int:
        """Number of batches of an epoch, as the loader says. Waits until there is a loader."""
        with contextlib.closing(self._reach()) as line:
            line.send(pack(ASK_LENGTH))
            answer = self.receive(line, "the length of the loader")
        length = pickle.loads(answer.body)
        if not isinstance(length, int):
            raise_error(answer.body)
        return int(length)

    def close(self) -> None:
        """Leave: the others go on without this one, which cannot come back. May be called twice."""
        if self._line is None or not self.here:
            return
        started = None if self._pass is None else self._pass()
        if started is not None:
            started.close()
        for slot in self._slots.values():  # when this one has left, nobody waits for what its device is doing
            for used in slot.events[1:]:
                assert self._memory is not None
                self._memory.finish(used)
        self._line.close()
        if self._attached is not None:
            self._attached.close()
        self._forget()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return Consumer(self._folder, self.number, self.consumers, self.device, self.timeout).__dict__

    # -- the connection -----------------------------------------------------------------------------------------------

    def _connect(self) -> Line:
        """Say hello, unless that is done."""
        if self._line is not None and self.here:
            return self._line
        self._forget()
        line = self._reach()
        try:
            line.send(pack(HELLO, os.getpid(), self.number))
            answer = self.receive(line, "the process that loads to start")
            if answer.kind == REFUSED:
                raise InputError(
                    f"consumer {self.number} {answer.body.decode()}: give each process a number of its own"
                )
            assert answer.kind == WELCOME
            self._attached = self._attach()
        except BaseException:
            line.close()
            raise
        self._process = answer.epoch
        self._memory = memory_of(self.device, self._folder)
        self._line, self._pid = line, os.getpid()
        return line

    def _reach(self) -> Line:
        try:
            return connect(self._folder)
        except OSError as error:
            raise self.gone() from error

    def _attach(self) -> SharedFolder:
        try:
            return attach(self._folder)
        except StorageError as error:
            raise self.gone() from error

    def receive(self, line: Line, what: str = "") -> Message:
        """Wait for a message. Raises `ProducerError` when the process is gone, `WaitError` when it is late."""
        try:
            message = line.receive()
            if message is None:
                deadline = time.monotonic() + self.timeout
                while (message := line.receive()) is None:
                    if not line.wait(deadline - time.monotonic()):
                        why = what or f"a batch: {self._reason()}"
                        raise WaitError(f"consumer {self.number} has waited {self.timeout:g} s for {why}")
        except EOFError:
            raise self.gone() from None
        return message

    def _reason(self) -> str:
        """Why there is no batch, as the process that loads sees it."""
        with contextlib.closing(self._reach()) as line:
            line.send(pack(ASK_STATE, number=self.number))
            if line.wait(_ANSWER_SECONDS) and (answer := line.receive()) is not None:
                return answer.body.decode()
        return f"process {self._process}, which loads, does not answer"

    def gone(self) -> StallfreeError:
        """The error when there is no connection any more."""
        if self._pid not in (0, os.getpid()):
            return InputError(
                f"consumer {self.number} is iterated by process {self._pid}, and not by this one, a child of it: "
                "ProcessPrefetcher(consumers=...) can serve both"
            )
        if self._attached is not None:
            self._attached.close()
        if self.consumers == 1 and self.device.type == "cpu":  # nobody else reads there
            for slot in self._slots.values():
                if slot.memory is not None and self._memory is not None:
                    poison(self._memory, slot.memory)
        which = f" (process {self._process})" if self._process else ""
        return ProducerError(
            f"the process that loads{which} has ended{self.describe_end()}, or was closed: make a new "
            "ProcessPrefetcher. What it printed says why; a script that makes one needs `if __name__ == '__main__':`"
        )

    # -- batches ------------------------------------------------------------------------------------------------------

    def learn(self, message: Message) -> None:
        """What is told once for many batches."""
        if message.kind == SLOT:
            before = self._slots.get(message.slot)
            self._slots[message.slot] = _Slot(message.body)
            if before is not None:
                self._slots[message.slot].events = before.events
        elif message.kind == LAYOUT:
            layout = Layout(*pickle.loads(message.body))
            builder = Builder(layout.form)
            for name in set(builder.odd.values()) - _warned:
                _warned.add(name)
                warnings.warn(
                    f"a {name} in a batch is pickled each time on its way to {self.device}: plain strided tensors of "
                    "the host are not",
                    RuntimeWarning,
                    stacklevel=3,
                )
            if message.number > self._oldest:
                self._oldest = message.number
                self._layouts = {serial: known for serial, known in self._layouts.items() if serial >= self._oldest}
            self._layouts[message.layout] = layout, builder

    def current_stream(self) -> Stream:
        """The stream that waits for the next batch."""
        assert self._memory is not None
        return self._memory.current_stream()

    def make(self, message: Message, line: Line) -> Any:
        """The batch that a message announces."""
        slot, memory = self._slots[message.slot], self._memory
        assert memory is not None
        layout, builder = self._layouts[message.layout]
        if slot.memory is None:
            self._open(slot, memory)
        if slot.layout != message.layout:
            assert slot.memory is not None
            slot.layout, slot.views = message.layout, _views(slot.memory, layout)
        copied = slot.events[0]
        # A stream that waits for a process that is killed may wait for ever, and its memory may be gone.
        while not (there := memory.reached(copied)) or self.device.type == "cuda":
            if line.ended:
                raise self.gone()
            if there:
                break
            time.sleep(_LOOK_SECONDS)
        memory.wait(copied)
        others = pickle.loads(message.body) if message.body else []
        for at in builder.odd:
            others[at] = send_itself(others[at], self.device)
        # New tensors: what is done to one of them, such as `requires_grad_()`, is not done to the next batch.
        return builder.build([view.detach() for view in slot.views], others)

    def _open(self, slot: _Slot, memory: Memory) -> None:
        handle, events = pickle.loads(slot.handles)
        with torch.inference_mode(False):
            slot.memory = memory.open(handle)
        if not slot.events:
            slot.events = tuple(memory.open_event(event) for event in events)

    def release(self, slot: int, stream: Stream) -> None:
        """What was given to the current stream, and to `stream`, until now is the last that is done with a slot."""
        memory = self._memory
        assert memory is not None
        if stream != memory.current_stream():
            there = memory.new_event()
            with memory.using(stream):
                memory.record(there)
            memory.wait(there)
        for used in self._slots[slot].events[1:]:
            memory.record(used)


class Pass:
    """One epoch of a consumer. Ends when it is through, closed, or no longer referred to."""

    def __init__(self, consumer: Consumer, line: Line, token: int) -> None:
        self._consumer, self._line, self._token = consumer, line, token
        self.keeps: Any = None
        """What has to stay until the pass ends."""
        self._epoch = -1
        self._through = False
        self._out: tuple[Message, Stream] | None = None  # the batch that was given

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self._through:
            raise StopIteration
        consumer, line = self._consumer, self._line
        if not consumer.here:  # a forked child has even what was received already
            raise consumer.gone()
        self._give_back()
        while True:
            message = consumer.receive(line)
            kind = message.kind
            if kind == START and message.number == self._token:
                self._epoch = message.epoch
            elif kind in (SLOT, LAYOUT):
                consumer.learn(message)
            elif message.epoch != self._epoch:  # of an epoch that was broken off
                continue
            elif kind == BATCH:
                self._out = message, consumer.current_stream()
                return consumer.make(message, line)
            elif kind == ERROR:
                line.send(pack(BACK, message.epoch, message.number, message.slot))
                raise_error(message.body)
            elif kind == END:
                self._through = True
                raise StopIteration

    def _give_back(self) -> None:
        """The batch that was given last is not used any more by what is asked of the device from now on."""
        if self._out is None:
            return
        (message, stream), self._out = self._out, None
        self._consumer.release(message.slot, stream)
        self._line.send(pack(BACK, message.epoch, message.number, message.slot))

    def close(self) -> None:
        """End the pass. May be called twice."""
        if self._through or not self._consumer.here:
            return
        self._through = True
        self._give_back()
        self._line.send(pack(BREAK))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _views(memory: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The tensors of a batch in a slot."""
    with torch.inference_mode(False):
        return [_view(memory, *where) for where in layout.tensors]


def _view(
    memory: torch.Tensor, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], start: int
) -> torch.Tensor:
    empty: Any = torch.empty(0, dtype=dtype, device=memory.device)
    view: torch.Tensor = empty.set_(memory.untyped_storage(), start, shape, stride)
    return view
