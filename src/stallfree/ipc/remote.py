"""Errors sent from one process to another, both of one user.

Between the processes of one job they are pickled. Other jobs receive a plain description, from which nothing is
imported.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import sys
import traceback
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from stallfree import errors
from stallfree.error_types import fields_of, kinds_of, make_error, portable
from stallfree.errors import SampleError, StallfreeError, text_of
from stallfree.frames import shorten

E = TypeVar("E", bound=BaseException)

_LENGTH = struct.Struct("<Q")


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text: the cause of that error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack_error(error: BaseException) -> bytes:
    """Return the traceback as text, and the error, without those of its arguments and attributes that have no pickle.

    For a stallfree error with a cause, the traceback is that of the cause, since the error describes itself.
    """
    shorten(error)
    cause = error.__cause__ if isinstance(error, StallfreeError) and error.__cause__ is not None else error
    trace = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__)).encode(errors="replace")
    return _LENGTH.pack(len(trace)) + trace + _pickled(error)


def _pickled(error: BaseException) -> bytes:
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        sent = pickle.loads(data)
        if type(sent) is type(error) and text_of(sent) == text_of(error):
            return data
    kinds = kinds_of(error)
    if not kinds:
        return b""
    own = kinds[0] is type(error)
    arguments = tuple(map(_sendable, error.args)) if own else (f"{type(error).__name__}: {text_of(error)}",)
    return pickle.dumps(_Parts(kinds[0], arguments, portable(fields_of(error))))


def _sendable(argument: Any) -> Any:
    try:
        pickle.loads(pickle.dumps(argument))
    except Exception:
        return text_of(argument)
    return argument


class _Parts(NamedTuple):
    """An error that is sent in parts, as its constructor wants other arguments, or it has no pickle."""

    kind: type[BaseException]
    arguments: tuple[Any, ...]
    fields: dict[str, Any]

    def error(self) -> BaseException:
        builtin: Any = next(kind for kind in self.kind.__mro__ if kind.__module__ == "builtins")
        made: BaseException = builtin.__new__(self.kind, *self.arguments)
        made.args = self.arguments
        for name, value in self.fields.items():
            with contextlib.suppress(Exception):  # one that cannot be set
                setattr(made, name, value)
        return made


def unpack_error(packed: bytes, kind: type[E] = Exception) -> tuple[E | None, str]:  # type: ignore[assignment]
    """Return the error and its traceback; None for an error that cannot be unpickled or is not a `kind`."""
    end = _LENGTH.size + _LENGTH.unpack_from(packed)[0]
    trace = packed[_LENGTH.size : end].decode(errors="replace")
    try:
        error = pickle.loads(packed[end:])
        error = error.error() if isinstance(error, _Parts) else error
    except Exception:
        return None, trace
    return (error if isinstance(error, kind) else None), trace


# -- between jobs -----------------------------------------------------------------------------------------------------


def pack_plain_error(error: BaseException | None, trace: str) -> bytes:
    """Return the error and its traceback as text."""
    packed: dict[str, object] = {
        "message": "" if error is None else text_of(error),
        "trace": trace,
        "kind": "StallfreeError",
    }
    if isinstance(error, StallfreeError):
        packed["kind"] = next(kind.__name__ for kind in type(error).__mro__ if kind in _BASES.values())
    else:
        packed["message"] = trace if error is None else f"{type(error).__name__}: {text_of(error)}"
    if error is not None:
        packed["types"] = [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__]
        own = {"id": error.id, "where": error.where} if isinstance(error, SampleError) else {}
        own["page"] = error.page if isinstance(error, StallfreeError) else ""
        packed["fields"] = {name: value for name, value in fields_of(error).items() if _plain(value)} | own
    return json.dumps(packed, default=str).encode()  # a user's error may hold any object


def _plain(value: object) -> bool:
    return isinstance(value, (str, int, float, type(None))) or (
        isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value)
    )


def unpack_plain_error(packed: bytes | bytearray | memoryview) -> tuple[StallfreeError, str]:
    """Return the packed error, also of its original type if that is loaded here, and its traceback as text."""
    found = json.loads(bytes(packed))
    base = _BASES.get(found["kind"], StallfreeError)
    kinds = [kind for module, name in found.get("types", ()) if (kind := _loaded(module, name)) is not None]
    fields = {name: value for name, value in found.get("fields", {}).items() if not name.startswith("__")}
    return make_error(base, kinds[:1], found["message"], fields), found["trace"]


_BASES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, StallfreeError)
}


def _loaded(module: str, name: str) -> type | None:
    """Return an exception type of a loaded module, or None: a message must not import anything. Excludes our types."""
    if module.split(".")[0] == "stallfree":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None  # runs no code of the module
    return found if isinstance(found, type) and issubclass(found, Exception) and found is not Exception else None
