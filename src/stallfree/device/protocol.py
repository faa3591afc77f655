"""The messages between the loading process and its consumers. See `stallfree.ipc.consumers`.

A message refers to batch `number` of epoch `serial`, stored in slot `value`, unless stated otherwise below.
"""

from __future__ import annotations

import enum
import struct
from typing import NoReturn

from stallfree.errors import batch_failed
from stallfree.ipc.remote import RemoteTraceback, pack_error, unpack_error

VERSION = 1

_LENGTH = struct.Struct("<q")


class Kind(enum.IntEnum):
    """Kind of a message. The first message of a consumer carries its number."""

    # sent by a consumer
    BEGIN = 3  # request the next epoch, the consumer's `number`th
    RETURN = 4  # return a batch
    BREAK = 5  # leave the epoch
    # sent by a visitor
    REQUEST_LENGTH = 6
    REQUEST_STATE = 7  # request what consumer `number` waits for
    # sent by the loading process
    WELCOME = 11  # its PID is `number`
    START = 12  # start of the epoch that the consumer requested as its `number`th
    SLOT = 13  # the body holds the handles of a slot's new memory
    BATCH = 14  # ready in its slot; the body holds its layout and the rest
    FAILED = 15  # in place of a batch; the body is the error
    END = 16  # end of the epoch
    LENGTH = 17  # the loader's length is in the body
    STATE = 18  # text in the body


def pack_length(loader: object) -> bytes:
    """Pack the loader's length, or the error if it has none, which is longer."""
    try:
        return _LENGTH.pack(len(loader))  # type: ignore[arg-type]
    except BaseException as error:
        return pack_error(error)


def unpack_length(packed: bytes | memoryview) -> int:
    """Return the packed length. Raises the error that was packed in its place."""
    if len(packed) != _LENGTH.size:
        raise_error(packed)
    length: int = _LENGTH.unpack(packed)[0]
    return length


def raise_error(packed: bytes | memoryview) -> NoReturn:
    """Raise a packed error; if it cannot be raised here, a `StallfreeError` that names it."""
    error, trace = unpack_error(bytes(packed))
    if error is None or isinstance(error, StopIteration | StopAsyncIteration):  # they would end more than the epoch
        what = trace.strip().rsplit("\n", 1)[-1]
        error = batch_failed(f"the loading process raised {what}")
    raise error from RemoteTraceback(trace)
