"""Attributes of a data set and its steps, to notice those that change after samples were cached."""

import copy
import ctypes
import sys
import warnings
import weakref
from typing import Any

import numpy as np
import torch

from stallfree.errors import StallfreeWarning
from stallfree.pipeline.fingerprint import content
from stallfree.pipeline.objects import CONTAINERS, VALUES, attribute, attributes_used, comes_from
from stallfree.raising import users_level

_ITEMS, _INNER, _FEW, _MANY, _SPREAD = 1 << 20, 1 << 16, 32, 500, 256
"""Items of a container up to which they are compared, containers among them too, and also in each batch; and the number
of the elements of an array that are compared."""
_NAMESPACES = {"types", "argparse", "functools", "collections"}
"""Modules of Python whose objects hold settings; those of the others change while they are used."""
_STEERING = {"multiprocessing.sharedctypes", "multiprocessing.synchronize", "threading"}
"""Modules of objects by which a program steers its workers."""
_Simple: Any = ctypes.c_int.__base__
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
        self.note()

    def note(self) -> None:
        """Take the present values as unchanged."""
        used = (each for thing in self._things for each in attributes_used(thing))
        self._states = {  # by the identity of the owner, which is kept alive, and the name
            (id(owner), name): (owner, *_state_of(value)) for owner, name, value in used if _is_setting(owner, name)
        }

    def glance(self) -> list[Any]:
        """Return the noted attributes as they are now, for `moved`; none if they are very many."""
        states = self._states.items() if len(self._states) <= _MANY else ()
        owned = ((owner, name, attribute(owner, name)) for (_, name), (owner, *_) in states)
        return [(*each, _state_of(each[2]) if _is_small(each[2]) else None) for each in owned]

    @staticmethod
    def moved(glance: list[Any]) -> bool:
        """Return whether one of these attributes has changed since, in microseconds."""
        for owner, name, value, state in glance:
            now = getattr(owner, name, None)
            if now is not value and not _is_same(now, value):
                return True
            if state is not None and not _is_same(state, _state_of(value)):
                return True
        return False

    def changes(self) -> list[str]:
        """Return what has changed since the last call of `note` or of this method."""
        before = self._states
        self.note()
        return [
            f"{_described(key[1], now)} is not what it was when samples were cached"
            for key, now in self._states.items()
            if key in before and not _is_same(before[key][1:], now[1:])
        ]

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


def _described(name: str, state: tuple[Any, ...]) -> str:
    owner, kind = state[:2]
    of = owner if isinstance(owner, type) else type(owner)
    ours = comes_from(of, "stallfree")
    return f"the {name} of type {kind.__name__}" if ours else f"the attribute {name!r} of {of.__name__}"


def _is_setting(owner: Any, name: str) -> bool:
    top, *inner = (owner if isinstance(owner, type) else type(owner)).__module__.split(".")
    if top == "stallfree":
        return inner[0] in _OWN
    if top == "albumentations" and name == "params":  # those of the last call
        return False
    return top in _NAMESPACES or top not in sys.stdlib_module_names


def _state_of(value: Any) -> tuple[type, Any, Any]:
    """Return what is compared of a value: its type, a reference to it if its identity counts, and its content."""
    kind, compared = type(value), None  # type: tuple[type, Any]
    if isinstance(value, CONTAINERS):
        items: Any = () if len(value) > _INNER else list(value.values()) if isinstance(value, dict) else value
        inner = [copy.copy(item) for item in items if type(item) in (dict, list)]
        return kind, None, (copy.copy(value), inner) if len(value) <= _ITEMS else len(value)
    if kind.__module__ == "multiprocessing.sharedctypes":
        value = getattr(value, "get_obj", lambda: value)()
    if isinstance(value, torch.Tensor):
        compared = attribute(value, "_version"), value.dtype, None if value.is_nested else value.shape
    elif isinstance(value, np.ndarray):
        items = value.ravel() if value.dtype.kind == "T" else value.flat  # which damages such strings
        step = value.size + 1 if isinstance(value, np.memmap) else max(1, value.size // _SPREAD)
        compared = value.shape, value.dtype, content(np.asarray(items[::step]))
    elif isinstance(value, (*VALUES, range)):
        return kind, None, value
    elif isinstance(value, (ctypes.Array, ctypes.Structure, _Simple)):
        compared = bytes(value) if ctypes.sizeof(value) <= _INNER else None
    elif kind.__name__ == "Event" and kind.__module__ in _STEERING:
        compared = value.is_set()
    try:
        return kind, weakref.ref(value), compared
    except TypeError:
        return kind, value, compared


def _is_small(value: Any) -> bool:
    """Return whether a value may change in place, and can be compared in microseconds."""
    mutable = isinstance(value, (dict, list)) or type(value).__module__ in _STEERING
    return mutable and getattr(value, "__len__", int)() <= _FEW


def _is_same(before: Any, now: Any) -> bool:
    try:
        return bool(before == now)
    except Exception:  # items without a truth, such as arrays
        return False
