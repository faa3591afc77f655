"""A consumer of a `ProcessPrefetcher`: receives the batches that the loading process has copied to the device."""

from __future__ import annotations

import contextlib
import pickle
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from typing_extensions import Self

from stallfree.device.backend import Stream
from stallfree.device.batch_codec import join
from stallfree.device.protocol import VERSION, Kind, raise_error, unpack_length
from stallfree.device.slots import OpenSlots, memory_of
from stallfree.errors import (
    ProducerError,
    StallfreeError,
    StorageError,
    batch_timeout,
    consumer_process,
    iteration_over,
)
from stallfree.frames import short_traceback
from stallfree.ipc.consumers import VISITOR, Connection, Gone, Message, request
from stallfree.ipc.folders import SharedFolder, attach
from stallfree.ipc.fork_guard import Owner, keep_from_children
from stallfree.typevars import BatchT_co

_ANSWER_SECONDS = 1.0


@dataclass(frozen=True)
class _Link:
    """The state of a connected consumer.

    Attributes:
        connection: connection to the loading process.
        folder: the shared folder, attached while connected.
        slots: the slots of the loading process.
        owner: the process that is connected.
    """

    connection: Connection
    folder: SharedFolder
    slots: OpenSlots
    owner: Owner


class Consumer(Generic[BatchT_co]):
    """Receives the batches of a `ProcessPrefetcher`; each iteration is one epoch.

    Created by `ProcessPrefetcher.consumer`. A consumer that was pickled, or inherited by a forked child, is not
    connected.

    Attributes:
        number: number of this consumer, from 0.
        consumers: number of consumers.
        device: the device of the batches.
        timeout: longest wait for a batch, in seconds.
    """

    def __init__(self, folder: Path, number: int, consumers: int, device: torch.device, timeout: float) -> None:
        self.number, self.consumers, self.device, self.timeout = number, consumers, device, timeout
        self.describe_end: Callable[[], str] = str
        """Returns how the loading process ended, if called in the process that started it."""
        self._folder = folder
        self._process = 0  # PID of the loading process
        self._link: _Link | None = None
        self._passes = 0
        self._pass: weakref.ref[Pass[BatchT_co]] | None = None  # the most recent one

    def __iter__(self) -> Pass[BatchT_co]:
        link = self._connect()
        self._end_pass(replaced=True)
        self._passes += 1
        link.connection.send(Kind.BEGIN, number=self._passes)
        started: Pass[BatchT_co] = Pass(self, link, self._passes)
        self._pass = weakref.ref(started)
        return started

    def __len__(self) -> int:
        """Number of batches per epoch, as reported by the loader. Waits until the loader exists."""
        with contextlib.closing(self._reach(VISITOR)) as connection:
            connection.send(Kind.REQUEST_LENGTH)
            return unpack_length(self.receive(connection, "the length of the loader").body)

    def close(self) -> None:
        """Leave for good; the other consumers continue without this one. Idempotent."""
        link = self._link
        if link is None or not link.owner.is_here:
            return
        self._end_pass()
        link.slots.close()
        link.connection.close()
        link.folder.close()
        self._link = None

    def _end_pass(self, *, replaced: bool = False) -> None:
        before = None if self._pass is None else self._pass()
        if before is not None:
            before.close(replaced=replaced)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        return Consumer(self._folder, self.number, self.consumers, self.device, self.timeout).__dict__

    def _connect(self) -> _Link:
        """Connect unless connected."""
        if self._link is not None:
            if not self._link.owner.is_here:
                raise self.connection_error()
            return self._link
        connection = self._reach(self.number)
        try:
            self._process = self.receive(connection, "the loading process to start").number
            try:
                folder = attach(self._folder)
            except StorageError as error:
                raise self.connection_error() from error
        except BaseException:
            connection.close()
            raise
        keep_from_children(folder)
        slots = OpenSlots(memory_of(self.device, self._folder), lambda: not connection.ended)
        self._link = _Link(connection, folder, slots, Owner())
        return self._link

    def _reach(self, number: int) -> Connection:
        # The process that listens is not the one that created the socket.
        connection = Connection.open(self._folder, VERSION, number, watch=False)
        if connection is None:
            raise self.connection_error()
        return connection

    def receive(self, connection: Connection, what: str = "") -> Message:
        """Wait for a message. Raises `ProducerError` if the process has ended, `WaitError` after the timeout."""
        try:
            message = connection.receive() or connection.receive(time.monotonic() + self.timeout)
            if message is None:
                why = what or f"a batch: {self._reason()}"
                raise batch_timeout(
                    f"consumer {self.number} has waited {self.timeout:g} s for {why}. Give a larger timeout if it "
                    "takes so long"
                )
        except Gone:
            raise self.connection_error() from None
        return message

    def _reason(self) -> str:
        """Return why there is no batch, as reported by the loading process."""
        answer = request(self._folder, VERSION, Kind.REQUEST_STATE, self.number, _ANSWER_SECONDS)
        if answer is None:
            return f"the loading process {self._process} does not answer"
        return bytes(answer.body).decode()

    def connection_error(self) -> StallfreeError:
        """Return the error for a lost connection."""
        link = self._link
        if link is not None and not link.owner.is_here:
            return consumer_process(
                f"consumer {self.number} belongs to process {link.owner.pid}, and this process is a child of it: "
                "ProcessPrefetcher(consumers=...) can serve both"
            )
        if link is not None:
            link.folder.close()
            if self.consumers == 1 and self.device.type == "cpu":  # no other process reads these slots
                link.slots.poison()
        which = f" (process {self._process})" if self._process else ""
        return ProducerError(
            f"the loading process{which} has ended{self.describe_end()}, or was closed: make a new ProcessPrefetcher. "
            "Its output shows the cause; a script that makes one needs `if __name__ == '__main__':`"
        )


class Pass(Generic[BatchT_co]):
    """One epoch of a consumer. Ends when it is exhausted, closed or no longer referenced."""

    def __init__(self, consumer: Consumer[BatchT_co], link: _Link, token: int) -> None:
        self._consumer, self._link, self._token = consumer, link, token
        self.keepalive: Any = None
        """An object to keep alive until the pass ends."""
        self._epoch = -1
        self._ended = self._replaced = False
        self._out: tuple[Message, Stream] | None = None  # the batch that was yielded last

    def __iter__(self) -> Self:
        return self

    @short_traceback
    def __next__(self) -> BatchT_co:
        if self._replaced:
            raise iteration_over(
                "this iteration is over: the ProcessPrefetcher was iterated again, and its process loads for one "
                "iteration at a time. Make one for each loop that runs at the same time"
            )
        if self._ended:
            raise StopIteration
        consumer, link = self._consumer, self._link
        if not link.owner.is_here:
            raise consumer.connection_error()
        self._return_batch()
        while True:
            message = consumer.receive(link.connection)
            if message.kind == Kind.START and message.number == self._token:
                self._epoch = message.serial
            elif message.kind == Kind.SLOT:
                link.slots.open(message.value, message.body)
            elif message.serial != self._epoch:  # of an interrupted epoch
                continue
            elif message.kind == Kind.BATCH:
                return self._take(message)
            elif message.kind == Kind.FAILED:
                self._send_back(message)
                raise_error(message.body)
            elif message.kind == Kind.END:
                self._ended = True
                raise StopIteration

    def _take(self, message: Message) -> BatchT_co:
        """Open the batch that a message announces."""
        slots = self._link.slots
        self._out = message, slots.memory.current_stream()
        layout, rest = pickle.loads(message.body)
        try:
            tensors = slots.take(message.value, layout)
        except EOFError:
            raise self._consumer.connection_error() from None
        return join(tensors, rest, self._consumer.device)  # type: ignore[no-any-return]

    def _send_back(self, message: Message) -> None:
        self._link.connection.send(Kind.RETURN, message.serial, message.number, message.value)

    def _return_batch(self) -> None:
        """Return the batch yielded last: work submitted to the device from now on does not use it."""
        if self._out is not None:
            (message, stream), self._out = self._out, None
            self._link.slots.release(message.value, stream)
            self._send_back(message)

    def close(self, *, replaced: bool = False) -> None:
        """End the pass, in favour of a new one if it is `replaced`. Idempotent."""
        if self._ended or not self._link.owner.is_here:
            return
        self._ended, self._replaced = True, replaced
        self._return_batch()
        self._link.connection.send(Kind.BREAK)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
