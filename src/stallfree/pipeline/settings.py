"""Notices that attributes of a data set or of its steps have changed."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from stallfree.errors import StallfreeWarning
from stallfree.frames import users_level
from stallfree.pipeline._objects import attribute, attributes, class_functions, closure_values, comes_from, is_library

_DEPTH = 5
_OBJECTS = 256
"""Maximum number of objects whose attributes are compared."""

_ITEMS = 1 << 20
"""Maximum number of items of a container that are compared; of larger ones and of arrays, `_SPREAD` are."""

_SPREAD = 256
_FEW = 32
"""Maximum number of items of a container whose own attributes are compared."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), PurePath, np.generic, range)
_LISTS = (list, tuple, deque)
_DATA = (*_PLAIN, *_LISTS, dict, set, frozenset, np.ndarray, torch.Tensor)
_NO_OWNERS = (*_DATA, ModuleType, FunctionType, MethodType, type)
_NAMESPACES = {"types", "argparse", "functools"}
"""Modules of Python whose objects hold settings."""

_OWN = {"pipeline", "sources", "vision", "clara"}
"""Packages of stallfree whose objects do."""


class Settings:
    """The attributes of `things` and of the objects in them, to notice those that change.

    Numbers, texts and containers are compared by value, item by item; arrays and tensors by identity and a sample of
    their elements; all other objects by identity, and by their own attributes. Left out are attributes that the code
    of these objects does not name.
    """

    def __init__(self, *things: Any) -> None:
        self._things = things
        self._known = self._saved()

    def note(self) -> None:
        """Take the present values as unchanged."""
        self._known = self._saved()

    def changes(self) -> list[str]:
        """Return what has changed since the last call of `note` or of this method."""
        before, self._known = self._known, self._saved()
        return [
            _describe(key[1], owner, before[key][1], value)
            for key, (owner, value) in self._known.items()
            if key in before and not before[key][1].is_same(value)
        ]

    def _saved(self) -> dict[tuple[int, str], tuple[object, _Value]]:
        """The value of each attribute, by the identity of its owner, which is kept alive, and its name."""
        if not self._things:
            return {}
        owners = list(self._owners())
        used: set[str] = set().union(*(_names(cls) for cls in set(map(type, owners))))
        return {
            (id(owner), name): (owner, _Value(value))
            for owner in owners
            for name, value in (_class_attributes(type(owner)) | attributes(owner)).items()
            if name in used
        }

    def _owners(self) -> Iterator[object]:
        """The things, and the objects that their attributes hold."""
        seen: set[int] = set()
        left = deque((thing, 0) for thing in self._things)
        while left and len(seen) < _OBJECTS:
            thing, depth = left.popleft()
            if isinstance(thing, (*_LISTS, dict)) and len(thing) <= _FEW:
                left.extend((item, depth + 1) for item in (thing.values() if isinstance(thing, dict) else thing))
            elif id(thing) not in seen and depth < _DEPTH and _has_settings(thing):
                seen.add(id(thing))
                yield thing
                left.extend((value, depth + 1) for value in attributes(thing).values())

    def __reduce__(self) -> tuple[Any, ...]:
        return Settings, ()  # in another process, which does not look for changes


def _has_settings(thing: object) -> bool:
    """Whether its attributes may be settings: not those of data, functions, locks, and this package's caches."""
    top, *inner = type(thing).__module__.split(".")
    if isinstance(thing, _NO_OWNERS) or (top == "stallfree" and inner[0] not in _OWN):
        return False
    return top in _NAMESPACES or top not in sys.stdlib_module_names


def warn_of_changes(settings: Settings) -> None:
    """Warn of attributes that have changed since samples were cached."""
    for change in settings.changes():
        warnings.warn(
            f"{change}: the cached samples do not change. Make a new CachedDataset, or move the code that uses it to a "
            "step marked with stallfree.mark_random",
            StallfreeWarning,
            stacklevel=users_level(),
        )


class _Value:
    """A value, to be compared with a later one."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self.content: tuple[Any, ...] = ()
        self._itself: Callable[[], Any] = _no_identity  # what is compared by identity
        if isinstance(value, _PLAIN):
            self.content = (value,)
        elif isinstance(value, (set, frozenset)):
            self.content = (frozenset(value),)
        elif isinstance(value, _LISTS):
            many = len(value) > _ITEMS
            self.content = len(value), [value[at] for at in _places(len(value))] if many else list(value)
        elif isinstance(value, dict):
            self.content = len(value), None if len(value) > _ITEMS else dict(value)
        else:
            self._itself = lambda: value
            with contextlib.suppress(TypeError):
                self._itself = weakref.ref(value)
            if isinstance(value, torch.Tensor):
                self.content = value.shape, value.dtype, attribute(value, "_version")
            elif isinstance(value, np.ndarray):
                file = isinstance(value, np.memmap)  # whose pages would be read
                self.content = value.shape, value.dtype, file or value.flat[[*_places(value.size)]].tobytes()

    def is_same(self, later: _Value) -> bool:
        if self.kind is not later.kind or self._itself() is not later._itself():
            return False
        try:
            return bool(self.content == later.content)
        except Exception:  # items without a truth, such as arrays
            return False


def _no_identity() -> None:
    """Stands for a value that is compared by its content alone."""


def _places(count: int) -> range:
    return range(0, count, max(1, -(-count // _SPREAD)))


def _describe(name: str, owner: object, before: _Value, now: _Value) -> str:
    ours = comes_from(type(owner), "stallfree")
    what = f"the {name} of type {now.kind.__name__}" if ours else f"the attribute {name!r} of {type(owner).__name__}"
    if issubclass(before.kind, _PLAIN) and issubclass(now.kind, _PLAIN):
        return f"{what} was {before.content[0]!r:.80} when samples were cached, and is {now.content[0]!r:.80} now"
    return f"{what} is not what it was when samples were cached"


def _class_attributes(cls: type) -> dict[str, Any]:
    """The data in the bodies of the user's classes among `cls` and its bases."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not is_library(base):
            found |= {name: value for name, value in vars(base).items() if isinstance(value, _DATA)}
    return found


@functools.lru_cache(maxsize=256)
def _names(cls: type) -> frozenset[str]:
    """The names and texts in the code of `cls` and its bases, without that which sets the attributes at first."""
    left = [function for base in cls.__mro__ for function in class_functions(base) if function.__name__ != "__init__"]
    functions: set[FunctionType] = set()
    while left:
        function = left.pop()
        if function not in functions:
            functions.add(function)  # a decorated one is in the closure of its wrapper
            left += [value for value in closure_values(function).values() if isinstance(value, FunctionType)]
    return frozenset(name for function in functions for name in _names_in(function.__code__))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant
