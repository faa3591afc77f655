"""Errors sent from one process to another of the same user.

An error arrives as it was raised: its class, arguments, attributes, notes, cause and context, but no constructor is
called, since it may need other arguments than `args`. Its traceback arrives as a note.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import traceback
from typing import Any

from stallfree.errors import BatchError, StallfreeError, text_of
from stallfree.notes import notes_of


def pack_error(error: BaseException) -> bytes:
    """Return the error as bytes.

    Attributes that have no pickle are left out, and arguments become text. An error whose class has none becomes a
    `BatchError` with the name of its type and its text.
    """
    text = _text(error)
    try:
        return pickle.dumps((text, _dumps(error)))
    except Exception:  # such as a cause that contains itself
        return pickle.dumps((text, b""))


def unpack_error(packed: bytes | bytearray | memoryview) -> BaseException:
    """Return the packed error; a `BatchError` with its text if it cannot be made here."""
    text, data = pickle.loads(packed)
    try:
        return pickle.loads(data)  # type: ignore[no-any-return]
    except Exception:
        return _stand_in(text)


class _Pickler(pickle.Pickler):
    """Pickles errors in parts."""

    def reducer_override(self, value: Any) -> Any:
        """Return the parts of an error, which `_create` and `_restore` put together; other objects as usual."""
        if not isinstance(value, BaseException):
            return NotImplemented
        notes, links = _notes(value), (value.__cause__, value.__context__, value.__suppress_context__)
        if not _has_pickle(type(value)):
            return _stand_in, (_text(value),), ({"__notes__": notes}, links), None, None, _restore
        _, arguments, *state = _builtin(type(value)).__reduce__(value)
        attributes = dict[str, Any](state[0] or {}) if state else {}
        own = object.__getstate__(value)
        if isinstance(own, tuple):  # also attributes in slots
            attributes |= own[1]
        attributes = {name: attribute for name, attribute in attributes.items() if _has_pickle(attribute)}
        sent = tuple(argument if _has_pickle(argument) else text_of(argument) for argument in arguments)
        return (
            _create,
            (type(value), sent),
            ({**attributes, "__notes__": notes}, links),
            None,
            None,
            _restore,
        )


def _builtin(kind: type[BaseException]) -> Any:
    return next(parent for parent in kind.__mro__ if parent.__module__ == "builtins")


def _create(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    builtin = _builtin(kind)
    made: BaseException = builtin.__new__(kind, *arguments)
    builtin.__init__(made, *arguments)
    return made


def _stand_in(text: str) -> BatchError:
    return BatchError(f"{text} (an error of a class that cannot be sent from one process to another)")


def _restore(made: BaseException, state: tuple[dict[str, Any], tuple[Any, Any, bool]]) -> None:
    attributes, (made.__cause__, made.__context__, made.__suppress_context__) = state
    for name, value in attributes.items():
        with contextlib.suppress(Exception):  # one that cannot be set
            setattr(made, name, value)


def _notes(error: BaseException) -> list[str]:
    """The notes of an error, and its traceback in this process; a stallfree error describes itself."""
    if error.__traceback__ is None or isinstance(error, StallfreeError):
        return notes_of(error)
    lines = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return [*notes_of(error), f"Traceback in process {os.getpid()} (most recent call last):\n{lines}"]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"


def _dumps(value: object) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def _has_pickle(value: object) -> bool:
    with contextlib.suppress(Exception):
        pickle.loads(_dumps(value))
        return True
    return False
