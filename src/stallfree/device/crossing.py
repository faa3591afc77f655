"""Messages between the process that loads and those that train, and what ends with one of them."""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import struct
import weakref
from pathlib import Path
from typing import NamedTuple, NoReturn

from stallfree import sockets
from stallfree.channel import Channel
from stallfree.errors import StallfreeError, StorageError
from stallfree.folders import SharedFolder
from stallfree.platform import at_fork
from stallfree.remote import RemoteTraceback, pack_error, unpack_error

_MESSAGE = struct.Struct("<4q")
_LENGTH = struct.Struct("<q")


class Kind(enum.IntEnum):
    """What a message says."""

    # of a consumer
    HELLO = 1  # of consumer `number`, which is the process `epoch`
    BEGIN = 2  # it wants the next epoch, its `number`th
    BACK = 3  # it gives a batch back
    BREAK = 4  # it leaves the epoch
    ASK_LENGTH = 5  # without a HELLO
    ASK_STATE = 6  # what does consumer `number` wait for? Without a HELLO
    # of the process that loads
    WELCOME = 11  # it is the process `number`
    REFUSED = 12  # the body says why
    START = 13  # the epoch begins that the consumer wanted as its `number`th
    SLOT = 14  # the body says where a slot lies from now on
    BATCH = 15  # is in its slot; the body is what it is made of
    ERROR = 16  # in the place of a batch, in the body
    END = 17  # of the epoch
    LENGTH = 18  # of the loader, in the body
    STATE = 19  # as text in the body


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: what it says.
        epoch, number: of a batch in its epoch.
        slot: in which the batch lies.
        body: what else there is to tell.
    """

    kind: int
    epoch: int = 0
    number: int = 0
    slot: int = 0
    body: bytes = b""


class Line(Channel):
    """One end of a connection. Neither `tell` nor `hear` waits. A forked child has it closed."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        keep_from_children(connection)
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def tell(self, kind: Kind, epoch: int = 0, number: int = 0, slot: int = 0, body: bytes = b"") -> None:
        """Send a message, or what can be sent of it now: see `flush`. To an end that is gone it vanishes."""
        self.send(_MESSAGE.pack(kind, epoch, number, slot) + body)

    def hear(self) -> Message | None:
        """The next message, or None if it is not there yet. Raises `EOFError` at the end."""
        data = self.receive()
        if data is None:
            return None
        kind, epoch, number, slot = _MESSAGE.unpack_from(data)
        return Message(kind, epoch, number, slot, bytes(data[_MESSAGE.size :]))

    def wait(self, seconds: float) -> bool:
        """Wait until there is something to hear; whether there is."""
        return bool(self._poll.poll(max(0.0, seconds) * 1000))

    @property
    def ended(self) -> bool:
        """Whether the other end is gone, whatever is still to be heard."""
        return any(events & select.POLLHUP for _, events in self._poll.poll(0))

    def _write(self, part: memoryview) -> int:
        return self._socket.send(part, socket.MSG_NOSIGNAL)  # a script may have SIGPIPE end it

    def close(self) -> None:
        """End the connection, for the other end and in all processes. May be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._fd = -1  # another thread may be about to hear
        super().close()


def connect(folder: Path) -> Line | None:
    """A connection to who listens in `folder`; None if nobody does."""
    connection = sockets.connect(folder)
    return None if connection is None else Line(connection)


# -- what ends with a process -----------------------------------------------------------------------------------------

_kept: weakref.WeakSet[socket.socket | SharedFolder] = weakref.WeakSet()


def keep_from_children(held: socket.socket | SharedFolder) -> None:
    """A child that is forked from now on has it closed: it would keep up what ends with this process."""
    _kept.add(held)


def _close_in_child() -> None:
    for held in list(_kept):
        held.close()
    _kept.clear()


at_fork(after_in_child=_close_in_child)


def attach(folder: Path) -> SharedFolder:
    """Keep a folder that is there. Raises `StorageError` if it is not there any more."""
    attached = SharedFolder(folder.name, root=folder.parent, initialize=_must_exist)
    keep_from_children(attached)
    return attached


def _must_exist(folder: Path) -> None:
    raise StorageError(f"{folder} is gone: the process that loads has ended. Make a new ProcessPrefetcher")


# -- errors -----------------------------------------------------------------------------------------------------------


def pack_length(loader: object) -> bytes:
    """Of the loader, or the error if it has none, which is longer."""
    try:
        return _LENGTH.pack(len(loader))  # type: ignore[arg-type]
    except BaseException as error:
        return pack_error(error)


def unpack_length(packed: bytes) -> int:
    """The length that was packed. Raises what stands there in its place."""
    if len(packed) != _LENGTH.size:
        raise_error(packed)
    length: int = _LENGTH.unpack(packed)[0]
    return length


def raise_error(packed: bytes) -> NoReturn:
    """Raise an error that was packed, or what stands for one that cannot be raised here."""
    error, trace = unpack_error(packed)
    if error is None or isinstance(error, StopIteration | StopAsyncIteration):  # which would end more than the epoch
        what = trace.strip().rsplit("\n", 1)[-1]
        error = StallfreeError(f"the process that loads raised {what}")
    raise error from RemoteTraceback(trace)
