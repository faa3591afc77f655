"""Errors sent from one process to another of the same user."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import Any

from stallfree.errors import StallfreeError, batch_failed, text_of
from stallfree.frames import shorten


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text: the cause of that error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack_error(error: BaseException) -> bytes:
    """Return the error and its traceback as bytes.

    For a stallfree error with a cause, the traceback is that of the cause, since the error describes itself. Attributes
    are left out if one has no pickle.
    """
    shorten(error)
    cause = error.__cause__ if isinstance(error, StallfreeError) and error.__cause__ is not None else error
    trace = "".join(traceback.format_exception(cause))
    return pickle.dumps((trace, f"{type(error).__name__}: {text_of(error)}", _pickled(error)))


def unpack_error(packed: bytes | bytearray | memoryview) -> BaseException:
    """Return the error, with its traceback as its cause.

    An error that cannot be made again here becomes a `StallfreeError` with the name of its type and its text.
    """
    trace, text, data = pickle.loads(packed)
    try:
        error = _made(data)
    except Exception:
        error = batch_failed(f"another process raised {text}")
    error.__cause__ = RemoteTraceback(trace)
    return error


def _pickled(error: BaseException) -> bytes:
    """Return the pickle of the error, or of its type, arguments and attributes; b"" if none makes it again."""
    kind = type(error)
    arguments: tuple[Any, ...] = _builtin(kind).__reduce__(error)[1]  # of an `OSError`, its file too
    for form in [error, (kind, arguments, vars(error)), (kind, arguments, {})]:
        with contextlib.suppress(Exception):
            data = pickle.dumps(form)
            if text_of(_made(data)) == text_of(error):
                return data
    return b""


def _made(data: bytes) -> BaseException:
    form: Any = pickle.loads(data)
    if isinstance(form, BaseException):
        return form
    kind, arguments, attributes = form
    made: BaseException = _builtin(kind).__new__(kind, *arguments)  # its constructor may want other arguments
    _builtin(kind).__init__(made, *arguments)
    vars(made).update(attributes)
    return made


def _builtin(kind: type) -> Any:
    return next(parent for parent in kind.__mro__ if parent.__module__ == "builtins")
