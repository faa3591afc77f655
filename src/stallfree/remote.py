"""Errors on their way from one process to another, both of one user."""

from __future__ import annotations

import pickle
import struct
import traceback

from stallfree.errors import StallfreeError
from stallfree.frames import shorten

_LENGTH = struct.Struct("<Q")


class RemoteTraceback(Exception):
    """Where in another process an error came up, as text: the cause of that error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack_error(error: BaseException) -> bytes:
    """The traceback as text, and the error if it can be pickled.

    Of an error of this package that has a cause, the text is that of the cause: it says itself what happened.
    """
    shorten(error)
    told = error.__cause__ if isinstance(error, StallfreeError) and error.__cause__ is not None else error
    trace = "".join(traceback.format_exception(type(told), told, told.__traceback__)).encode(errors="replace")
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = b""
    return _LENGTH.pack(len(trace)) + trace + data


def unpack_error(packed: bytes) -> tuple[Exception | None, str]:
    """The error, None if it could not be brought over or is none that a program may end in, and its traceback."""
    end = _LENGTH.size + _LENGTH.unpack_from(packed)[0]
    trace = packed[_LENGTH.size : end].decode(errors="replace")
    try:
        error = pickle.loads(packed[end:])
    except Exception:
        return None, trace
    return (error if isinstance(error, Exception) else None), trace
