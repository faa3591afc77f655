"""What the process that loads and its consumers send to each other. See `stallfree.ipc.consumers`.

Messages belong to batch `number` of epoch `serial`, which lies in slot `value`, unless something else is said here.
"""

from __future__ import annotations

import enum
import struct
from typing import NoReturn

from stallfree.errors import StallfreeError
from stallfree.ipc.remote import RemoteTraceback, pack_error, unpack_error

VERSION = 1

_LENGTH = struct.Struct("<q")


class Kind(enum.IntEnum):
    """What a message is. The first one of a consumer has its number."""

    # of a consumer
    BEGIN = 3  # asks for the next epoch, the consumer's `number`th
    BACK = 4  # gives a batch back
    BREAK = 5  # leaves the epoch
    # of a visitor
    ASK_LENGTH = 6
    ASK_STATE = 7  # what does consumer `number` wait for?
    # of the process that loads
    WELCOME = 11  # it is process `number`
    START = 12  # the epoch begins that the consumer asked for as its `number`th
    SLOT = 13  # the body says where a slot lies from now on
    BATCH = 14  # is in its slot; the body says what it consists of
    FAILED = 15  # in the place of a batch; the body is the error
    END = 16  # of the epoch
    LENGTH = 17  # of the loader, in the body
    STATE = 18  # as text in the body


def pack_length(loader: object) -> bytes:
    """Of the loader, or the error if it has none, which is longer."""
    try:
        return _LENGTH.pack(len(loader))  # type: ignore[arg-type]
    except BaseException as error:
        return pack_error(error)


def unpack_length(packed: bytes | memoryview) -> int:
    """The length that was packed. Raises the error that was packed in its place."""
    if len(packed) != _LENGTH.size:
        raise_error(packed)
    length: int = _LENGTH.unpack(packed)[0]
    return length


def raise_error(packed: bytes | memoryview) -> NoReturn:
    """Raise an error that was packed; if it cannot be raised here, another one that names it."""
    error, trace = unpack_error(bytes(packed))
    if error is None or isinstance(error, StopIteration | StopAsyncIteration):  # which would end more than the epoch
        what = trace.strip().rsplit("\n", 1)[-1]
        error = StallfreeError(f"the process that loads raised {what}")
    raise error from RemoteTraceback(trace)
