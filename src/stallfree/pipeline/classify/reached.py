"""The user's code that a call of an object may run, and the objects that it uses, found by following names."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from stallfree.pipeline._objects import (
    attribute,
    attributes,
    closure_values,
    code_names,
    current,
    describe,
    is_known,
    is_library,
    module_of,
    named_values,
)
from stallfree.pipeline.generators import GENERATOR_TYPES

_VALUES = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, torch.Tensor)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MOST_ITEMS, _MOST_OBJECTS = 256, 20_000
_ENTRIES = ("__call__", "forward", "__getitem__", "__getitems__")
_UNCALLED = {
    *("__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__", "__format__", "__hash__", "__eq__"),
    *("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__init_subclass__", "__class_getitem__"),
}
_BARE = ("builtins", "abc", "collections.abc", "typing", "enum", "torch.utils.data.dataset")
"""Modules whose classes call no method and read no attribute of the classes that are derived from them."""


def reached(thing: Any) -> Iterator[tuple[Any, str]]:
    """Yield the objects that a call of `thing` may use, each with where it is named, as "RNG in Flip.__call__".

    Functions of the user are among them, with the values that they name and the methods that they name of the objects
    which they hold; of `thing` itself, what `thing(...)` or `thing[...]` runs. A name of an
    attribute that none of these objects has, of a result for instance, is yielded as text. The code of libraries is not
    followed, but the user's code that they hold is. A package installed from an index is followed if `thing` is from
    it.
    """
    return _Walk(thing).run()


class _Walk:
    def __init__(self, root: Any) -> None:
        self._kind = root if isinstance(root, (FunctionType, type)) else type(root)
        self._todo: deque[tuple[Any, str]] = deque([(root, describe(root))])
        self._seen: dict[int, Any] = {}
        self._classes: set[tuple[type, bool, frozenset[str]]] = set()
        self._far: set[int] = set()
        """Objects named in packages that are not followed further."""
        self._named: dict[str, str] = {}
        """Names in the code so far, with the function that was seen first to use them."""
        self._unnamed: defaultdict[str, list[Any]] = defaultdict(list)
        """Attributes and methods of objects, by name, whose name has not been used so far."""
        self._owned: set[str] = set()
        """Names of values that the code names, and of attributes that one of the objects has."""

    def run(self) -> Iterator[tuple[Any, str]]:
        while self._todo and len(self._seen) < _MOST_OBJECTS:
            thing, label = self._todo.popleft()
            if id(thing) in self._seen or isinstance(thing, _VALUES):
                continue
            self._seen[id(thing)] = thing
            yield thing, label
            self._follow(thing, label)
        yield from ((name, f"{name} in {user}") for name, user in self._named.items() if name not in self._owned)

    def _follow(self, thing: Any, label: str) -> None:
        if isinstance(thing, FunctionType):
            return self._function(thing)
        if isinstance(thing, type):
            return self._class(thing, made=not (isinstance(self._kind, type) and issubclass(self._kind, thing)))
        if isinstance(thing, functools.partial):
            self._add((thing.func, thing.args, thing.keywords), label)
        elif isinstance(thing, (MethodType, BuiltinFunctionType)):
            self._add((thing.__self__, attribute(thing, "__func__")), label)
        elif isinstance(thing, _CONTAINERS):
            self._add(islice(thing.values() if isinstance(thing, dict) else thing, _MOST_ITEMS), label)
        elif isinstance(thing, (ContextVar, weakref.ref)):
            self._add((current(thing),), label)
        if not isinstance(thing, (ModuleType, BuiltinFunctionType, *GENERATOR_TYPES)):
            own = attributes(thing)
            self._class(type(thing), made=False, own=frozenset(own))
            bare = self._is_users(type(thing)) and not self._libraries(type(thing))
            for name, value in own.items():
                self._offer(name, value, called=not bare and not isinstance(value, GENERATOR_TYPES))

    def _add(self, values: Iterable[Any], label: str) -> None:
        self._todo += ((value, label) for value in values if not isinstance(value, _VALUES))

    def _is_users(self, thing: Any) -> bool:
        top, own = (module_of(each).partition(".")[0] for each in (thing, self._kind))
        return not is_library(thing) or (top == own and not is_known(top))

    def _function(self, function: FunctionType) -> None:
        where, users = function.__qualname__, self._is_users(function)
        if not users and (is_known(module_of(function)) or id(function) in self._far):
            return self._add((*closure_values(function).values(), attribute(function, "__wrapped__")), where)
        values = named_values(function, libraries=True) | vars(function) | (function.__kwdefaults__ or {})
        values |= {f"default {place}": value for place, value in enumerate(function.__defaults__ or ())}
        for name, value in values.items():
            self._add((value,), f"{name} in {where}")
            self._owned.update(name.split("."))
        if not users:
            self._far.update(map(id, values.values()))
        for name in sorted(code_names(function.__code__) - self._named.keys()):
            self._named[name] = where
            self._add(self._unnamed.pop(name, ()), f"{name} in {where}")

    def _class(self, cls: type, *, made: bool, own: frozenset[str] = frozenset()) -> None:
        """Register the members of `cls`, without those that attributes of the instance replace, its `own` ones.

        Methods that create an instance count only if one is `made` in a call, those that a subclass overrides only if
        their name is used, as by `super()`.
        """
        own = own.intersection(dir(cls)) if own else own
        if (cls, made, own) in self._classes:
            return
        self._classes.add((cls, made, own))
        libraries = self._libraries(cls)
        overridden: set[str] = set()
        for base in (base for base in cls.__mro__ if self._is_users(base)):
            for name, member in vars(base).items():
                if name in own and not hasattr(type(member), "__set__"):
                    continue
                special = name in _ENTRIES if cls is self._kind else name.startswith("__") and name.endswith("__")
                called = name not in overridden and (special or any(hasattr(library, name) for library in libraries))
                inner = (attribute(member, each) for each in ("__func__", "fget", "func"))
                for value in (member, *(each for each in inner if isinstance(each, FunctionType))):
                    self._offer(name, value, called=called and (made or name not in _UNCALLED))
            overridden.update(vars(base))

    def _libraries(self, cls: type) -> list[type]:
        return [base for base in cls.__mro__ if not self._is_users(base) and base.__module__ not in _BARE]

    def _offer(self, name: str, value: Any, *, called: bool) -> None:
        """Register an attribute or a method, which counts once its name is used, or now if it is `called` unnamed."""
        self._owned.add(name)
        if called or name in self._named:
            self._add((value,), f"{name} in {self._named[name]}" if name in self._named else name)
        else:
            self._unnamed[name].append(value)
