"""The errors that stallfree raises, all in one tree.

StallfreeError
├── InputError (ValueError)            a value that the user gave cannot be used
│   ├── CapacityError                  a size that is no size, negative, or more than the machine can give
│   └── FingerprintError               a cache of that name belongs to other data or to another user
├── StorageError (OSError)             the folder of a cache cannot be made, locked or read
├── CodecError (TypeError)             a value that cannot be stored without pickle
├── SampleError                        one sample could not be fetched or prepared; `.id`, `.where`. It is also of the
│                                      type that the data set raised, such as FileNotFoundError
├── WorkerError                        worker processes died on the same batch; `.ids`
├── WaitError (TimeoutError)           a wait reached its limit; the message says for what
├── MissingServerError (OSError)       no server for a store is installed, or it cannot be started
├── PlatformError (NotImplementedError) this operating system lacks what is needed; the message says what to use
├── ProducerError                      the process that loads for a `ProcessPrefetcher` ended
└── MissingExtraError (ImportError)    an optional package is not installed; the message names the extra
"""

from __future__ import annotations

import contextlib
import copyreg
import inspect
import pickle
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar


class StallfreeError(Exception):
    """The base of every error that stallfree raises on purpose."""


class InputError(StallfreeError, ValueError):
    """A value given by the caller cannot be used. The message says what was given, what was expected, what to do."""


class CapacityError(InputError):
    """A capacity that is no size, is negative, or is more than the machine can give."""


class FingerprintError(InputError):
    """A cache of this name exists and belongs to other data, another pipeline or another user."""


class StorageError(StallfreeError, OSError):
    """The folder or a file of a cache cannot be made, locked or read."""


class CodecError(StallfreeError, TypeError):
    """A value cannot be stored as it is and pickle is not allowed here."""


class SampleError(StallfreeError):
    """One sample could not be fetched or prepared.

    What the data set raised is `__cause__`. The error is of that type too, with its attributes: `except
    FileNotFoundError` catches it, and `.errno` and `.filename` are there. Two exceptions: `StopIteration`, which would
    end a loop, and types from which no class can be derived together with this one.

    Attributes:
        id: the sample's id (its index in the data set); -1 if another loader has passed on the text alone.
        where: what is known about its place, for instance the path; may be empty.
    """

    def __init__(self, message: str, *, id: int = -1, where: str = "") -> None:
        Exception.__init__(self, message)  # not that of the other type, which may take other arguments
        self.id = id
        self.where = where

    def __reduce__(self) -> tuple[object, ...]:
        return make_error, (SampleError, [], str(self), vars(self))


class WorkerError(StallfreeError):
    """Worker processes died again and again on one batch.

    Attributes:
        ids: the ids of the samples of that batch.
    """

    def __init__(self, message: str, *, ids: list[int]) -> None:
        super().__init__(message)
        self.ids = ids

    def __reduce__(self) -> tuple[object, ...]:
        return _make_worker_error, (str(self), self.ids)


def _make_worker_error(message: str, ids: list[int]) -> WorkerError:
    return WorkerError(message, ids=ids)


class WaitError(StallfreeError, TimeoutError):
    """A wait reached its limit. The message says what was waited for and how long."""


class MissingServerError(StallfreeError, OSError):
    """No server for a store across hosts is installed, or the one that is there cannot be kept running."""


class PlatformError(StallfreeError, NotImplementedError):
    """The operating system lacks what this part needs. The message says what to use in its place."""


class ProducerError(StallfreeError):
    """The process that loads for a `ProcessPrefetcher` ended, or was ended. Make a new one."""


class MissingExtraError(StallfreeError, ImportError):
    """An optional package is not installed. The message names the extra that installs it."""


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """The error for an optional `package` that `purpose` needs and that `pip install 'stallfree[extra]'` brings."""
    return MissingExtraError(
        f"{purpose} needs the package {package!r}, which is not installed: pip install 'stallfree[{extra}]'"
    )


# --- errors that are of another type too ------------------------------------------------------------------------------

_Error = TypeVar("_Error", bound="StallfreeError")
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)


class _Joined(type):
    """The class of the classes that `joined` makes, which are found by their bases and not by their names."""


def joined(base: type[StallfreeError], kind: type) -> type[StallfreeError]:
    """A class that `except base` and `except kind` catch; of `base` and a parent of `kind` if there cannot be one."""
    for parent in kind.__mro__[: kind.__mro__.index(Exception)] if issubclass(kind, Exception) else ():
        if issubclass(parent, _ENDS_LOOPS) or issubclass(base, parent):
            break
        with contextlib.suppress(Exception):  # layouts or metaclasses that conflict, a constructor that is needed
            return _join(base, parent)  # type: ignore[arg-type]  # mypy does not see that a class can be hashed
    return base


@lru_cache(maxsize=64)
def _join(base: type[StallfreeError], kind: Any) -> type[StallfreeError]:
    def new(cls: Any, *_: Any, **__: Any) -> Any:
        return kind.__new__(cls)

    def init(self: Any, message: str = "", **own: Any) -> None:
        Exception.__init__(self, message)  # `kind` may take other arguments
        if base is SampleError:
            SampleError.__init__(self, message, **own)

    def text(self: Any) -> str:
        return str(self.args[0])  # KeyError would give the message in quotes, OSError the error number

    def reduced(self: Any) -> tuple[object, ...]:
        return make_error, (base, kinds_of(self), str(self), portable(fields_of(self)))

    names = {"__new__": new, "__init__": init, "__str__": text, "__reduce__": reduced, "__doc__": base.__doc__}
    members: dict[str, Any] = {**names, "__module__": base.__module__, "__qualname__": base.__qualname__}
    made: Any = _Joined(base.__name__, (base, kind), members)
    made("")  # raises what would be raised in place of the error
    return made  # type: ignore[no-any-return]


def _reduce(made: Any) -> tuple[Any, ...]:
    return _found, (made.__bases__[0], kinds_of(made))


copyreg.pickle(_Joined, _reduce)  # torch's workers send the class of an error


def also_of_type(error: _Error, cause: BaseException) -> _Error:
    """`error` as one that is of the type of `cause` too, and has its attributes."""
    fields = fields_of(cause) | vars(error)
    return make_error(type(error), [type(cause)], str(error), fields)  # type: ignore[return-value]


def make_error(base: type[StallfreeError], kinds: list[type], message: str, fields: dict[str, Any]) -> StallfreeError:
    """An error of `base` and of the first of `kinds`, if any, with `fields` as attributes."""
    error = _found(base, kinds)(message)
    for name, value in fields.items():
        with contextlib.suppress(Exception):  # one that cannot be set
            setattr(error, name, value)
    return error


def _found(base: type[StallfreeError], kinds: list[type]) -> type[StallfreeError]:
    return joined(base, kinds[0]) if kinds else base


def kinds_of(error: BaseException | type) -> list[type]:
    """The nearest type of `error` that another process finds by its name, unless that says nothing, in a list."""
    kind = error if isinstance(error, type) else type(error)
    for parent in kind.__mro__:
        if parent is Exception:
            break
        if isinstance(parent, _Joined) or issubclass(StallfreeError, parent) or parent is SampleError:
            continue
        with contextlib.suppress(Exception):
            if pickle.loads(pickle.dumps(parent)) is parent:
                return [parent]
    return []


def fields_of(error: BaseException) -> dict[str, Any]:
    """The attributes of `error`, those included that are kept in slots or by C code, such as `errno`."""
    return dict(_slots_of(error)) | vars(error)


def _slots_of(error: BaseException) -> Iterator[tuple[str, Any]]:
    for cls in type(error).__mro__:
        for name, member in vars(cls).items():
            if name == "args" or name.startswith("__"):
                continue
            if inspect.ismemberdescriptor(member) or inspect.isgetsetdescriptor(member):
                with contextlib.suppress(Exception):  # it was never set
                    if (value := member.__get__(error)) is not None:
                        yield name, value


def portable(fields: dict[str, Any]) -> dict[str, Any]:
    """Those of `fields` that another process can be sent: no object whose attribute was missing, for instance."""
    found = {}
    for name, value in fields.items():
        with contextlib.suppress(Exception):
            if name != "obj":
                pickle.loads(pickle.dumps(value))
                found[name] = value
    return found
