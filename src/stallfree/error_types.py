"""Errors of this package that are of another type too: that of what a data set raised."""

from __future__ import annotations

import contextlib
import copyreg
import inspect
import pickle
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar

from stallfree.errors import SampleError, StallfreeError, text_of

_Error = TypeVar("_Error", bound="StallfreeError")
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)


_ARGUMENTS: tuple[tuple[Any, ...], ...] = ((), ("", [Exception()]))
"""What constructors are tried with: without anything, and as a group of exceptions wants it."""


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
        for arguments in _ARGUMENTS:
            with contextlib.suppress(Exception):
                return kind.__new__(cls, *arguments)
        return BaseException.__new__(cls)

    def reduced(self: Any) -> tuple[object, ...]:
        return make_error, (base, kinds_of(self), text_of(self), portable(fields_of(self)))

    names = {"__new__": new, "__reduce__": reduced, "__doc__": base.__doc__}
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
    return make_error(type(error), [type(cause)], text_of(error), fields)  # type: ignore[return-value]


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
