"""What a call of an object may use: the user's code that it runs, the names in it, generators, and attributes."""

from __future__ import annotations

import copy
import functools
import random
import re
import sys
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from itertools import islice
from operator import itemgetter
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from stallfree.errors import StallfreeWarning
from stallfree.frames import users_level
from stallfree.pipeline.objects import (
    attribute,
    attributes,
    closure_values,
    code_names,
    comes_from,
    current,
    describe,
    is_known,
    is_library,
    module_of,
    named_values,
)

GENERATOR_TYPES = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)

_NAMES = re.compile(
    r"rand|randn|randu|randint|randrange|randperm|randbelow|randbits|randbytes|rand(n|int)?_like|randShuffle|"
    r"random|random_|random_(sample|integers|raw|bytes|noise)|ranf|default_rng|Random|RandomState|SystemRandom|"
    r"Generator|SeedSequence|PCG64|PCG64DXSM|MT19937|Philox|SFC64|shuffle|choices?|permutation|permuted|"
    r"urandom|getrandom|getrandbits|secrets|token_(bytes|hex|urlsafe)|uuid[1467]|"
    r"gauss|\w+variate|triangular|standard_(normal|cauchy|exponential|gamma|t)|bernoulli\w*|multinomial|rvs|"
    r"(normal|uniform|exponential|cauchy|geometric|log_normal)_|effect_(spread|noise)"
)
"""Names that make or use randomness, whatever has them."""
_LIBRARY_NAMES = re.compile(r"[rR]and\w*|normal|poisson")
"""Further names that do if they are of a known library."""
_MODULES = {"random", "secrets", "mtrand"}
_TYPES = {"collections.abc", "typing"}
"""Modules of types, one of which is `Generator`."""

_VALUES = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, torch.Tensor, PurePath)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MOST_ITEMS, _MOST_OBJECTS = 4096, 20_000
_ENTRIES = ("__call__", "forward", "__getitem__", "__getitems__")
_UNCALLED = {
    *("__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__", "__format__", "__hash__", "__eq__"),
    *("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__init_subclass__", "__class_getitem__"),
}
_PRINTED = ("__repr__", "__annotate__")
"""Methods that no sample depends on. From Python 3.13 on, `__repr__` of a dataclass refers to `threading.get_ident`."""
_BARE = ("builtins", "abc", "collections.abc", "typing", "enum", "torch.utils.data.dataset")
"""Modules whose classes call no method and read no attribute of the classes that are derived from them."""
_OF_PROCESS = ("logging", "threading", "multiprocessing", "weakref")
"""Libraries whose objects lead to all of the process."""


def random_name(thing: Any) -> str | None:
    """Return where the user's code that a call of `thing` runs names a source of randomness.

    Such as "default_rng in Flip.__call__"; None if it names none.
    """
    sources = [(isinstance(value, ModuleType), label) for value, label in _Walk(thing).run() if _is_source(value)]
    return min(sources, key=itemgetter(0))[1] if sources else None  # a module says the least


def _is_source(value: Any) -> bool:
    if isinstance(value, str):
        return any(_NAMES.fullmatch(part) for part in value.split("."))
    if isinstance(value, (*GENERATOR_TYPES, np.random.BitGenerator, np.random.SeedSequence)):
        return True
    module = module_of(value)
    if not is_known(module) or module in _TYPES:
        return False
    if _MODULES.intersection(module.split(".")):
        return True
    name = attribute(value, "__name__") if callable(value) else None
    return isinstance(name, str) and any(names.fullmatch(name) for names in (_NAMES, _LIBRARY_NAMES))


def generators_of(thing: Any) -> list[Any]:
    """Return the generators that `thing` owns or refers to, in a fixed order, each once.

    Searched are attributes, slots, containers, closures, partial functions, bound methods, and what user code names and
    has as default values. Generators inside compiled library code, and those created only while it runs, are not found.
    """
    reached = (value for value, _ in _Walk(thing, everything=True).run())
    return [value for value in reached if isinstance(value, GENERATOR_TYPES)]


def label_of(thing: Any, roots: Iterable[Any]) -> str:
    """Return where one of `roots` names `thing`, such as "client in Reader.read"; "" if it is one, and if none does."""
    walks = ((root, value, label) for root in roots for value, label in _Walk(root, everything=True).run())
    return next((label if root is not thing else "" for root, value, label in walks if value is thing), "")


def attributes_used(thing: Any) -> list[tuple[Any, str, Any]]:
    """Return the attributes that a call of `thing` may use, of it and of what it holds: owner, name and value.

    Data in the bodies of the user's classes are among them.
    """
    walk = _Walk(thing)
    deque(walk.run(), 0)
    return [(owner, name, value) for owner, name, value, called in walk.attributes if called or name in walk.named]


class _Walk:
    """Goes through the objects that a call of `root` may use, each with where it is named, as "RNG in Flip.__call__".

    Functions of the user are among them, with the values that they name and the methods that they name of the objects
    which they hold; of `root` itself, what `root(...)` or `root[...]` runs. A name of an attribute that none of these
    objects has, of a result for instance, is yielded as text. The code of libraries is not followed, but the user's
    code that they hold is. With `everything`, attributes and methods count whether code names them or not.
    """

    def __init__(self, root: Any, *, everything: bool = False) -> None:
        self._everything = everything
        self._kind = root if isinstance(root, (FunctionType, type)) else type(root)
        self._todo: deque[tuple[Any, str]] = deque([(root, describe(root))])
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no identity is reused meanwhile
        self._classes: set[tuple[type, bool, frozenset[str]]] = set()
        self.attributes: list[tuple[Any, str, Any, bool]] = []
        """Attributes with their owner, and whether they count even if no code names them."""
        self.named: dict[str, str] = {}
        """Names in the code so far, with the function that was seen first to use them."""
        self._unnamed: defaultdict[str, list[Any]] = defaultdict(list)
        """Attributes and methods of objects, by name, whose name has not been used so far."""
        self._owned: set[str] = set()
        """Names of values that the code names, and of attributes that one of the objects has."""

    def run(self) -> Iterator[tuple[Any, str]]:
        while self._todo and len(self._seen) < _MOST_OBJECTS:
            thing, label = self._todo.popleft()
            if id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                yield thing, label
                self._follow(thing, label)
        yield from ((name, f"{name} in {user}") for name, user in self.named.items() if name not in self._owned)

    def _follow(self, thing: Any, label: str) -> None:
        if isinstance(thing, FunctionType):
            return self._function(thing)
        if isinstance(thing, type):
            self.attributes += ((thing, name, value, False) for name, value in _class_values(thing).items())
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
            if not any(comes_from(type(thing), library) for library in _OF_PROCESS):
                called = is_library(type(thing)) or bool(_libraries(type(thing)))
                values = _class_values(type(thing)) | own
                self.attributes += ((thing, name, value, called and name in own) for name, value in values.items())
                for name, value in own.items():
                    self._offer(name, value, called=called and not isinstance(value, GENERATOR_TYPES))

    def _add(self, values: Iterable[Any], label: str) -> None:
        for value in values:
            flat = type(value) in (tuple, list) and all(isinstance(item, _VALUES) for item in value[:8])
            if not isinstance(value, _VALUES) and not (flat and len(value) <= 8):  # such as (path, label)
                self._todo.append((value, label))

    def _function(self, function: FunctionType) -> None:
        where = function.__qualname__
        if is_library(function):
            return self._add((*closure_values(function).values(), attribute(function, "__wrapped__")), where)
        values = named_values(function, libraries=True) | vars(function) | (function.__kwdefaults__ or {})
        values |= {f"default {number}": value for number, value in enumerate(function.__defaults__ or ())}
        for name, value in values.items():
            if not (self._everything and isinstance(value, (type, ModuleType)) and is_library(value)):
                self._add((value,), f"{name} in {where}")
            self._owned.update(name.split("."))
        for name in sorted(code_names(function.__code__) - self.named.keys()):
            self.named[name] = where
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
        libraries = _libraries(cls)
        overridden: set[str] = set()
        for base in cls.__mro__:
            if is_library(base):
                held = (value for value in vars(base).values() if isinstance(value, GENERATOR_TYPES))
                self._add(held if self._everything else (), describe(base))
                continue
            for name, member in vars(base).items():
                if name in own and not hasattr(type(member), "__set__"):
                    continue
                special = name in _ENTRIES if cls is self._kind else name.startswith("__") and name.endswith("__")
                called = name not in overridden and (special or any(hasattr(library, name) for library in libraries))
                inner = (attribute(member, each) for each in ("__func__", "fget", "func"))
                for value in (member, *(each for each in inner if isinstance(each, FunctionType))):
                    self._offer(name, value, called=called and (made or name not in _UNCALLED))
            overridden.update(vars(base))

    def _offer(self, name: str, value: Any, *, called: bool) -> None:
        """Register an attribute or a method, which counts once its name is used, or now if it is `called` unnamed."""
        self._owned.add(name)
        if called or name in self.named or (self._everything and name not in _PRINTED):
            self._add((value,), f"{name} in {self.named[name]}" if name in self.named else name)
        else:
            self._unnamed[name].append(value)


def _libraries(cls: type) -> list[type]:
    """Return the classes of libraries from which `cls` is derived, and whose code may call its methods."""
    return [base for base in cls.__mro__ if is_library(base) and base.__module__ not in _BARE]


def _class_values(cls: type) -> dict[str, Any]:
    """Return the data in the bodies of the user's classes among `cls` and its bases."""
    bodies = [vars(base).items() for base in reversed(cls.__mro__) if not is_library(base)]
    return {name: value for body in bodies for name, value in body if isinstance(value, (*_VALUES, *_CONTAINERS))}


# --- attributes that change -------------------------------------------------------------------------------------------

_ITEMS, _SPREAD = 1 << 20, 256
"""Maximum number of items of a container that are compared; of larger ones and of arrays, `_SPREAD` are."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), PurePath, np.generic, range)
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
            _described(key[1], owner, before[key][1], state)
            for key, (owner, state) in self._known.items()
            if key in before and not _is_same(before[key][1], state)
        ]

    def _saved(self) -> dict[tuple[int, str], tuple[object, _State]]:
        """Return the state of each attribute, by the identity of its owner, which is kept alive, and its name."""
        used = (each for thing in self._things for each in attributes_used(thing))
        return {(id(owner), name): (owner, _state_of(value)) for owner, name, value in used if _is_setting(owner, name)}

    def __reduce__(self) -> tuple[Any, ...]:
        return Settings, ()  # in another process, which does not look for changes


def warn_of_changes(settings: Settings) -> None:
    """Warn of attributes that have changed since samples were cached."""
    for change in settings.changes():
        warnings.warn(
            f"{change}: the cached samples do not change. Make a new CachedDataset, or move the code that uses it to a "
            "step marked with stallfree.mark_random",
            StallfreeWarning,
            stacklevel=users_level(),
        )


def _is_setting(owner: Any, name: str) -> bool:
    """Return whether an attribute is a setting.

    Those of locks and files, of this package's caches, and of objects with a fingerprint of their own are not.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    top, *inner = kind.__module__.split(".")
    if top == "stallfree":
        return inner[0] in _OWN
    # A step with a fingerprint states its settings there. Data sets and sources state their identity only.
    reads = hasattr(kind, "__getitem__") or hasattr(kind, "fetch")
    if (not reads and callable(getattr(kind, "fingerprint", None))) or (top == "albumentations" and name == "params"):
        return False  # albumentations keeps the parameters of the last call there
    return top in _NAMESPACES or top not in sys.stdlib_module_names


_State = tuple[type, Any, Any]
"""The type of a value, a reference to it if its identity counts, and what is compared of its content."""


def _state_of(value: Any) -> _State:
    kind = type(value)
    if isinstance(value, _PLAIN):
        return kind, None, value
    if isinstance(value, _CONTAINERS):
        few = len(value) <= _ITEMS
        return kind, None, (len(value), copy.copy(value) if few else [*islice(value, 0, None, len(value) // _SPREAD)])
    content: Any = None
    if isinstance(value, torch.Tensor):
        content = value.shape, value.dtype, attribute(value, "_version")
    elif isinstance(value, np.ndarray):
        mapped = isinstance(value, np.memmap)  # whose pages would be read
        few_of = slice(None, None, max(1, value.size // _SPREAD))
        content = value.shape, value.dtype, mapped or value.flat[few_of].tobytes()
    try:
        return kind, weakref.ref(value), content
    except TypeError:
        return kind, lambda: value, content


def _is_same(before: _State, now: _State) -> bool:
    if before[0] is not now[0] or (now[1] is not None and before[1]() is not now[1]()):
        return False
    try:
        return bool(before[2] == now[2])
    except Exception:  # items without a truth, such as arrays
        return False


def _described(name: str, owner: object, before: _State, now: _State) -> str:
    kind = owner if isinstance(owner, type) else type(owner)
    ours = comes_from(kind, "stallfree")
    what = f"the {name} of type {now[0].__name__}" if ours else f"the attribute {name!r} of {kind.__name__}"
    if issubclass(before[0], _PLAIN) and issubclass(now[0], _PLAIN):
        return f"{what} was {before[2]!r:.80} when samples were cached, and is {now[2]!r:.80} now"
    return f"{what} is not what it was when samples were cached"
