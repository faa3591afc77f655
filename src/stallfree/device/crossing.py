"""What passes between the process that loads and those that train: messages, and batches without their tensors.

A message is a kind, the length of its body, four numbers, and the body. Most have none: what a batch is made of is told
once for all batches of its form, and where a slot lies once for all batches in it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from stallfree.device.leaves import take_apart
from stallfree.device.staging import is_plain
from stallfree.errors import StallfreeError, StorageError
from stallfree.folders import SharedFolder, short_path

HELLO, BEGIN, BACK, BREAK, ASK_LENGTH, ASK_STATE = range(1, 7)
"""Of a consumer: its number and process; it wants the next epoch; a batch is given back; it leaves the epoch."""

WELCOME, REFUSED, START, SLOT, LAYOUT, BATCH, ERROR, END, LENGTH, STATE = range(11, 21)
"""Of the producer: an epoch begins; where a slot lies; what batches of a form are; a batch, or an error, is there."""

_HEAD = struct.Struct("<6q")
_ROOM = 4096
_SOCKET = "socket"


class RemoteTraceback(Exception):
    """Where in the process that loads an error came up, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# -- messages ---------------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """What was received.

    Attributes:
        kind: one of those above.
        epoch, number: of a batch in its epoch. In a HELLO the number is that of the consumer, `epoch` its process.
        slot: in which the batch lies.
        layout: the serial number of its layout. In a LAYOUT `number` is the oldest that is still in use.
        body: what else there is to tell.
    """

    kind: int
    epoch: int
    number: int
    slot: int
    layout: int
    body: bytes


def pack(kind: int, epoch: int = 0, number: int = 0, slot: int = 0, layout: int = 0, body: bytes = b"") -> bytes:
    """A message as bytes."""
    return _HEAD.pack(kind, len(body), epoch, number, slot, layout) + body


class Line:
    """One end of a connection. Neither sending nor receiving waits. A forked child has it closed."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        keep_from_children(connection)
        self._socket = connection
        self._in = bytearray(_ROOM)
        self._begin = self._end = 0
        self._out: deque[memoryview] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor; -1 when it is closed."""
        return self._socket.fileno()

    @property
    def writing(self) -> bool:
        """Whether something is still to be sent: call `flush` when the descriptor is writable."""
        return bool(self._out)

    def send(self, data: bytes) -> None:
        """Send messages, or what can be sent of them now. To an end that is gone they vanish; `receive` tells."""
        self._out.append(memoryview(data))
        self.flush()

    def flush(self) -> None:
        """Send what has not been sent."""
        while self._out:
            part = self._out[0]
            try:
                sent = self._socket.send(part, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._out.clear()
                return
            if sent < len(part):
                self._out[0] = part[sent:]
            else:
                self._out.popleft()

    def receive(self) -> Message | None:
        """The next message, or None if it is not there yet. Raises `EOFError` at the end."""
        while True:
            there = self._end - self._begin
            wanted = _HEAD.size
            if there >= wanted:
                kind, size, epoch, number, slot, layout = _HEAD.unpack_from(self._in, self._begin)
                wanted += size
                if there >= wanted:
                    start = self._begin + _HEAD.size
                    self._begin += wanted
                    body = bytes(self._in[start : start + size]) if size else b""
                    return Message(kind, epoch, number, slot, layout, body)
            self._make_room(wanted)
            try:
                got = self._socket.recv_into(memoryview(self._in)[self._end :])
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if got == 0:
                raise EOFError
            self._end += got

    def _make_room(self, wanted: int) -> None:
        """Have room for a message of `wanted` bytes, of which some may be there, and for at least one byte more."""
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._begin + wanted > len(self._in):
            rest = self._in[self._begin : self._end]
            self._in = bytearray(max(wanted, _ROOM))
            self._in[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)

    def wait(self, seconds: float) -> bool:
        """Wait until there is something to receive; whether there is."""
        return bool(self._poll.poll(max(0.0, seconds) * 1000))

    @property
    def ended(self) -> bool:
        """Whether the other end is gone, whatever is still to be received."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        """End the connection, for the other end and in all processes. May be called twice."""
        self._out.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


_kept: weakref.WeakSet[socket.socket | SharedFolder] = weakref.WeakSet()


def keep_from_children(held: socket.socket | SharedFolder) -> None:
    """A child that is forked from now on has it closed: it would keep up what ends with this process."""
    _kept.add(held)


def _close_in_child() -> None:
    for held in list(_kept):
        held.close()
    _kept.clear()


os.register_at_fork(after_in_child=_close_in_child)


def attach(folder: Path) -> SharedFolder:
    """Keep a folder that is there. Raises `StorageError` if it is not there any more."""
    attached = SharedFolder(folder.name, root=folder.parent, initialize=_must_exist)
    keep_from_children(attached)
    return attached


def _must_exist(folder: Path) -> None:
    raise StorageError(f"{folder} is gone")


def listen(folder: Path) -> socket.socket:
    """A listening socket in `folder`, which is its user's alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with short_path(folder) as short:
            listener.bind(f"{short}/{_SOCKET}")
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    keep_from_children(listener)
    return listener


def connect(folder: Path) -> Line:
    """A connection to who listens there. Raises `OSError` if nobody does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with short_path(folder) as short:
            connection.connect(f"{short}/{_SOCKET}")
    except BaseException:
        connection.close()
        raise
    return Line(connection)


def pack_error(error: BaseException) -> bytes:
    """An error with its traceback. One that cannot be pickled, or would end more than the epoch, becomes another."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
            raise TypeError
        data = pickle.dumps((error, trace))
        pickle.loads(data)
        return data
    except Exception:
        told = StallfreeError(f"the process that loads raised {type(error).__name__}: {error!s}")
        return pickle.dumps((told, trace))


def raise_error(data: bytes) -> None:
    """Raise an error that was packed."""
    error, trace = pickle.loads(data)
    raise error from RemoteTraceback(trace)


# -- batches without their tensors ------------------------------------------------------------------------------------

_TENSOR, _OTHER, _ODD, _SPECIAL = range(4)
_PLAIN = {str, bytes, int, float, bool, type(None)}


class Layout(NamedTuple):
    """What batches of one kind are: two that are equal need not be told twice.

    Attributes:
        form: containers, and what stands where in them.
        tensors: data type, shape, strides and offset (in elements, from the beginning of the slot) of each.
    """

    form: Any
    tensors: tuple[tuple[torch.dtype, torch.Size, tuple[int, ...], int], ...]


Build = Callable[[list[torch.Tensor], list[Any]], Any]


class _Mark:
    """Stands for a tensor in a container that is pickled."""

    to = record_stream = None  # by which `take_apart` finds it

    def __reduce__(self) -> str:
        return "MARK"


MARK = _Mark()


def sketch(batch: Any, tensors: list[torch.Tensor], others: list[Any]) -> Any:
    """The form of a batch, hashable. Its plain tensors are added to `tensors`, all other values to `others`.

    Dicts, lists, tuples and named tuples are part of the form. Other containers with tensors in them are a value each,
    without those tensors.
    """
    kind = type(batch)
    if kind is torch.Tensor:
        return _leaf(batch, tensors, others)
    if kind in _PLAIN:
        others.append(batch)
        return _OTHER
    if kind is dict:
        return dict, tuple(batch), tuple([sketch(part, tensors, others) for part in batch.values()])
    named = isinstance(batch, tuple) and hasattr(batch, "_fields") and not isinstance(batch, PackedSequence)
    if kind is list or kind is tuple or named:
        return kind, None, tuple([sketch(part, tensors, others) for part in batch])
    leaves, rebuild = take_apart(batch)
    if len(leaves) == 1 and leaves[0] is batch:
        return _leaf(batch, tensors, others)
    if not leaves:
        others.append(batch)
        return _OTHER
    others.append(rebuild([MARK] * len(leaves)))
    return _SPECIAL, None, tuple([_leaf(leaf, tensors, others) for leaf in leaves])


def _leaf(leaf: Any, tensors: list[torch.Tensor], others: list[Any]) -> Any:
    if is_plain(leaf):
        tensors.append(leaf)
        return _TENSOR
    others.append(leaf)
    name = type(leaf).__name__
    if type(leaf) is torch.Tensor:
        name += f" of {leaf.layout}" if leaf.is_cpu else f" on {leaf.device}"
    return _ODD, name, ()


class Builder:
    """Puts batches of one form together.

    Attributes:
        build: makes a batch of its tensors and its other values.
        odd: positions among the other values of what should have been a plain tensor, and the names of their types.
    """

    def __init__(self, form: Any) -> None:
        self._tensors = self._others = 0
        self.odd: dict[int, str] = {}
        self.build: Build = self._make(form)

    def _make(self, form: Any) -> Build:
        if form == _TENSOR:
            here = self._tensors
            self._tensors += 1
            return lambda tensors, _: tensors[here]
        kind: Any
        keys: Any
        kind, keys, parts = (form, None, ()) if form == _OTHER else form
        if kind in (_OTHER, _ODD, _SPECIAL):
            at = self._others
            self._others += 1
        if kind == _OTHER:
            return lambda _, others: others[at]
        if kind == _ODD:
            self.odd[at] = keys
            return lambda _, others: others[at]
        builds = [self._make(part) for part in parts]
        if kind == _SPECIAL:
            return lambda tensors, others: take_apart(others[at])[1]([build(tensors, others) for build in builds])
        if kind is dict:
            return lambda tensors, others: dict(zip(keys, [build(tensors, others) for build in builds], strict=True))
        make = kind if kind in (list, tuple) else kind._make
        return lambda tensors, others: make([build(tensors, others) for build in builds])
